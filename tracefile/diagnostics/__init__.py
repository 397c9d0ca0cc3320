"""What tracefile costs: :func:`snapshot` for a training job's metrics, :class:`Sampler` for memory over time.

``RssAnon`` is what to watch: memory that a process has allocated itself. RSS and PSS, and USS where no other process
maps the same file, also count mapped pages of shard files, which the kernel drops when it needs their room.
"""

from tracefile.diagnostics.figure import PlotUnavailableError
from tracefile.diagnostics.measure import snapshot
from tracefile.diagnostics.sampler import Sampler

__all__ = ["PlotUnavailableError", "Sampler", "snapshot"]
