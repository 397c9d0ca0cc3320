"""What a trace holds by now, for a writer that continues a sample which another writer may have begun."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tracefile.forking import tell_after_fork
from tracefile.trace import Trace

if TYPE_CHECKING:
    from tracefile.metadata import SampleEntry


class NewestRevisions:
    """The newest revision of each sample of a trace, by whichever writer. Reads nothing before it is asked.

    Safe for threads and fork.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._trace: Trace | None = None
        self._lock = threading.Lock()
        tell_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held it

    def entry(self, sample_id: str) -> SampleEntry:
        """The newest revision of a sample, as of now.

        Raises
        ------
        SampleNotFoundError, MetadataDamagedError
        """
        with self._lock:
            if self._trace is None:
                self._trace = Trace(self._path)
            else:
                self._trace.refresh()
            return self._trace.entry(sample_id)
