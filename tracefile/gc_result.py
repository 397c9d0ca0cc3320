"""What ``tracefile gc`` did, or would do."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class TraceResult:
    """What became of one trace.

    Attributes
    ----------
    path : str
    deleted_by : str or None
        The rule by which the whole trace was deleted.
    total_bytes : int
        Of its shard files before.
    freed_bytes : int
        Of shard files and leftovers.
    samples : list of str
        Samples that were deleted.
    segments : list of str
        Segments that were removed, oldest first.
    brought_back : list of str
        Segments that were to be removed, and that somebody needed meanwhile.
    leftovers : list of str
        What was removed of what killed processes left.
    partial_segments, partial_bytes : int
        Segments of which some rows are needed no more, and about what compaction would free of them.
    error : str or None
        Why the trace was left as it is.
    """

    path: str
    deleted_by: str | None = None
    total_bytes: int = 0
    freed_bytes: int = 0
    samples: list[str] = field(default_factory=list)
    segments: list[str] = field(default_factory=list)
    brought_back: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    partial_segments: int = 0
    partial_bytes: int = 0
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(slots=True)
class GcResult:
    """What :func:`tracefile.collect.collect` did, or would do.

    Attributes
    ----------
    traces : list of TraceResult
        Oldest first.
    ordered_by : {"step", "time"} or None
        How traces were told old from new: by the step numbers in their names, or by their newest data.
    swept : list of str
        Names of traces that were gone, and of which something was left.
    """

    traces: list[TraceResult] = field(default_factory=list)
    ordered_by: str | None = None
    swept: list[str] = field(default_factory=list)

    @property
    def freed_bytes(self) -> int:
        """Bytes of shard files and leftovers."""
        return sum(trace.freed_bytes for trace in self.traces)
