"""Where rows are that lay in segments which compaction has replaced.

Who holds a lazy tensor names segments, and one of them may be gone: the segment that has its rows now says so in its
document. A process looks for that only when it misses a segment, and remembers it for the next time.
"""

from __future__ import annotations

import errno
import itertools
import threading
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tracefile.errors import SegmentMissingError, TraceError
from tracefile.forking import tell_after_fork
from tracefile.metadata import SegmentHeader, Span, TraceHeader
from tracefile.runs import Rows, SegmentRef, StoredRun
from tracefile.settings import mapped_path
from tracefile.store import list_segments, read_segment_headers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tracefile.format import ModelConfig
    from tracefile.metadata import Moved
    from tracefile.runs import Run, TraceRef

#: Documents that are read at once: those of long indexes are large, and only a little of each is kept.
_BATCH = 256
#: Of how many traces a process remembers what moved.
_MAX_TRACES = 64

Result = TypeVar("Result")


class _Move(NamedTuple):
    """Rows ``[start, stop)`` of a segment lie from row ``first`` of ``target`` on."""

    start: int
    stop: int
    target: str
    first: int


class Relocations:
    """What the documents of segments say about rows that moved. Pure.

    Parameters
    ----------
    moves : iterable of (str, sequence of Moved)
        Segments, and what they say.

    Examples
    --------
    >>> from tracefile.metadata import Moved
    >>> found = Relocations([("c", [Moved("a", 0, 50, 0), Moved("b", 0, 9, 64)]), ("d", [Moved("c", 64, 73, 8)])])
    >>> found.resolve(Span("b", 2, 5)), found.resolve(Span("a", 2, 5)), found.resolve(Span("x", 2, 5))
    ([Span(segment='d', start=10, stop=13)], [Span(segment='c', start=2, stop=5)], [Span(segment='x', start=2, stop=5)])
    """

    def __init__(self, moves: Iterable[tuple[str, Sequence[Moved]]] = ()) -> None:
        self._moves: dict[str, list[_Move]] = {}
        for segment, moved in moves:
            for each in moved:
                if each.segment < segment:  # always so; and chains come to an end
                    self._moves.setdefault(each.segment, []).append(_Move(each.start, each.stop, segment, each.first))
        self._ends: dict[str, list[int]] = {}
        for name, found in self._moves.items():
            found.sort()
            self._ends[name] = list(itertools.accumulate((move.stop for move in found), max))

    @classmethod
    def of(cls, headers: Iterable[SegmentHeader]) -> Relocations:
        return cls((header.id, header.moved) for header in headers)

    def __bool__(self) -> bool:
        return bool(self._moves)

    def __contains__(self, segment: str) -> bool:
        return segment in self._moves

    def resolve(self, span: Span) -> list[Span]:
        """The same rows where they were moved to last; those that were not, where they are."""
        if span.segment not in self._moves or span.start == span.stop:
            return [span]
        found: list[Span] = []
        position = span.start
        while position < span.stop:
            move, stop = self._at(span.segment, position, span.stop)
            if move is None:
                pieces = [Span(span.segment, position, stop)]
            else:
                shift = move.first - move.start
                pieces = self.resolve(Span(move.target, position + shift, stop + shift))
            for piece in pieces:
                if found and (found[-1].segment, found[-1].stop) == (piece.segment, piece.start):
                    found[-1] = Span(piece.segment, found[-1].start, piece.stop)
                else:
                    found.append(piece)
            position = stop
        return found

    def _at(self, segment: str, row: int, limit: int) -> tuple[_Move | None, int]:
        """The move of a row, the last one if there are several, and up to which row that holds."""
        moves, ends = self._moves[segment], self._ends[segment]
        following = bisect_right(moves, row, key=lambda move: move.start)
        best: _Move | None = None
        number = following
        while number and ends[number - 1] > row:
            number -= 1
            if moves[number].stop > row and (best is None or best.target < moves[number].target):
                best = moves[number]
        if best is not None:
            return best, min(best.stop, limit)
        return None, min(moves[following].start, limit) if following < len(moves) else limit


class _KnownMoves:
    """What this process knows of rows that moved, by trace. Safe for threads and fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said: dict[tuple[str, str], dict[str, tuple[Moved, ...]]] = {}
        self._relocations: dict[tuple[str, str], Relocations] = {}
        tell_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._relocations)

    def get(self, trace: TraceRef) -> Relocations | None:
        return self._relocations.get((trace.path, trace.uuid))

    def look(self, trace: TraceRef, config: ModelConfig, segment: str) -> None:
        """See who says now that rows of ``segment``, which is gone, moved."""
        path, key = mapped_path(trace.path), (trace.path, trace.uuid)
        listed = list_segments(path)
        before = self._said.get(key, {})
        said = {name: before[name] for name in listed if name in before}
        # Who replaces a segment was made after it.
        unread = [name for name in listed if name > segment and name not in before]
        for first in range(0, len(unread), _BATCH):
            batch = unread[first : first + _BATCH]
            for name, found in read_segment_headers(path, TraceHeader(trace.uuid, config), batch).items():
                if isinstance(found, SegmentHeader):
                    said[name] = found.moved
        relocations = Relocations(said.items())
        with self._lock:
            self._said.pop(key, None)
            self._said[key] = said
            while len(self._said) > _MAX_TRACES:
                oldest = next(iter(self._said))
                del self._said[oldest]
                self._relocations.pop(oldest, None)
            if relocations:
                self._relocations[key] = relocations
            else:
                self._relocations.pop(key, None)


_known = _KnownMoves()


def moved_rows(rows: Rows) -> Rows:
    """The same rows where they are, as far as this process has learned; asks no store."""
    if not _known:
        return rows
    runs: list[Run] = []
    changed = False
    for run in rows.runs:
        relocations = _known.get(run.segment.trace) if isinstance(run, StoredRun) else None
        if relocations is None or not isinstance(run, StoredRun) or run.segment.id not in relocations:
            runs.append(run)
            continue
        for span in relocations.resolve(Span(run.segment.id, run.start, run.stop)):
            changed = changed or span.segment != run.segment.id
            runs.append(StoredRun(SegmentRef(run.segment.trace, span.segment), span.start, span.stop))
    return Rows.of(runs) if changed else rows


def where_they_are(rows: Rows, config: ModelConfig, use: Callable[[Rows], Result]) -> Result:
    """What ``use`` makes of ``rows``, or of the same rows elsewhere, if segments that they name were replaced.

    Raises
    ------
    SegmentMissingError
        A segment is gone, and no other has its rows.
    """
    tried = moved_rows(rows)
    while True:
        try:
            return use(tried)
        except OSError as error:
            # Deleted files that are open are stale to a network file system.
            if not isinstance(error, SegmentMissingError) and error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            elsewhere = _look_for(rows, tried, config, getattr(error, "segment", None))
            if elsewhere is None:
                raise
            tried = elsewhere


def _look_for(rows: Rows, tried: Rows, config: ModelConfig, missing: str | None) -> Rows | None:
    """Where ``rows`` are now, after some could not be read where they were ``tried``; ``None``: nowhere else."""
    oldest: dict[TraceRef, str] = {}
    for segment in tried.segments():
        if missing in (None, segment.id):
            oldest[segment.trace] = min(segment.id, oldest.get(segment.trace, segment.id))
    try:
        for trace, name in oldest.items():
            _known.look(trace, config, name)
    except (TraceError, OSError):
        return None  # what was met first is what to tell
    again = moved_rows(rows)
    return None if again.runs == tried.runs else again
