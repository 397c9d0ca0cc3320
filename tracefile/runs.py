"""Which rows: the algebra of selections. Pure: no files, no torch.

A selection of rows is an ordered list of runs. A run is rows of a segment (:class:`StoredRun`), rows that
were never captured (:class:`MissingRun`), or rows that live in memory because a framework concatenated them
(:class:`PaddingRun`). Slicing, taking and concatenating selections touches no data but the padding, which is
kept compact and cut with the slice, so that a selection never pins more than its own rows.
"""

from __future__ import annotations

import functools
import math
import zlib
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tracefile.metadata import SampleEntry

Array: TypeAlias = "np.ndarray[Any, Any]"


class TraceRef(NamedTuple):
    """Names a trace: where it is, and which one it must be."""

    path: str
    uuid: str
    source: str


class SegmentRef(NamedTuple):
    """Names a segment of a trace.

    ``handle`` keeps it alive where segments live only as long as they are referred to; a store's, one for each
    segment and process.
    """

    trace: TraceRef
    id: str
    handle: object = None


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Rows ``[start, stop)`` of a segment."""

    segment: SegmentRef
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def cut(self, start: int, stop: int) -> StoredRun:
        return StoredRun(self.segment, self.start + start, self.start + stop)

    def joined(self, other: Run) -> StoredRun | None:
        if isinstance(other, StoredRun) and other.start == self.stop and other.segment == self.segment:
            return StoredRun(self.segment, self.start, other.stop)
        return None


@dataclass(frozen=True, slots=True)
class MissingRun:
    """Rows ``[start, stop)`` of a block of rows that were never captured.

    The position within the block is kept, because some renderings of missing rows depend on it.
    """

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def cut(self, start: int, stop: int) -> MissingRun:
        return MissingRun(self.start + start, self.start + stop)

    def joined(self, other: Run) -> MissingRun | None:
        if isinstance(other, MissingRun) and other.start == self.stop:
            return MissingRun(self.start, other.stop)
        return None


@dataclass(frozen=True, slots=True, eq=False)
class PaddingRun:
    """Rows in memory, ``[rows, layers, top_k]``, in the narrowest dtype that holds them.

    ``core`` has length 1 along every axis on which all values agree; the rest of the rows is ``shape``.
    """

    core: Array
    shape: tuple[int, int, int]
    low: int
    high: int

    @classmethod
    def of(cls, values: Array, stored: np.dtype[Any]) -> PaddingRun:
        """Compact ``values`` ``[rows, layers, top_k]``: to the ``stored`` dtype where they fit it."""
        low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
        shape = (values.shape[0], values.shape[1], values.shape[2])
        core = values
        for axis in range(3):
            first = core.take([0], axis) if core.shape[axis] else core
            if core.shape[axis] > 1 and bool((core == first).all()):
                core = first
        # A copy, always: the caller's tensor may be a small view of a large storage, and may change.
        return cls(np.array(core, dtype=narrowest_dtype(low, high, stored), order="C"), shape, low, high)

    @classmethod
    def constant(cls, value: int, rows: int, layers: int, top_k: int, stored: np.dtype[Any]) -> PaddingRun:
        core = np.full((1, 1, 1), value, narrowest_dtype(value, value, stored))
        return cls(core, (rows, layers, top_k), value, value)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def values(self) -> Array:
        return np.broadcast_to(self.core, self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that this run holds in memory."""
        return self.core.nbytes

    def cut(self, start: int, stop: int) -> PaddingRun:
        core = self.core if self.core.shape[0] == 1 else self.core[start:stop].copy()
        return PaddingRun(core, (stop - start, *self.shape[1:]), self.low, self.high)

    def joined(self, other: Run) -> PaddingRun | None:
        if (
            isinstance(other, PaddingRun)
            and self.core.shape[0] == other.core.shape[0] == 1
            and self.core.dtype == other.core.dtype
            and np.array_equal(self.core, other.core)
        ):
            return PaddingRun(self.core, (len(self) + len(other), *self.shape[1:]), self.low, self.high)
        return None

    def with_layers(self, positions: Sequence[int]) -> PaddingRun:
        core = self.core if self.core.shape[1] == 1 else self.core[:, list(positions)]
        return PaddingRun(core, (self.shape[0], len(positions), self.shape[2]), self.low, self.high)

    @staticmethod
    def joined_layers(runs: Sequence[PaddingRun]) -> PaddingRun:
        """As many rows, with the layers of all ``runs``."""
        values = np.concatenate([run.values for run in runs], axis=1)
        widest = max((run.core.dtype for run in runs), key=lambda dtype: dtype.itemsize)
        return PaddingRun.of(values, widest)


Run: TypeAlias = StoredRun | MissingRun | PaddingRun


_LIMITS = {
    np.dtype(name): (int(np.iinfo(name).min), int(np.iinfo(name).max))
    for name in ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
}


def holds_range(dtype: np.dtype[Any], low: int, high: int) -> bool:
    """Whether an integer dtype holds all of ``[low, high]``."""
    limits = _LIMITS.get(dtype)
    return limits is not None and limits[0] <= low and high <= limits[1]


@functools.lru_cache(maxsize=1024)
def narrowest_dtype(low: int, high: int, stored: np.dtype[Any]) -> np.dtype[Any]:
    """The stored dtype if it holds ``[low, high]``, else the narrowest signed dtype that does."""
    for dtype in (stored, *map(np.dtype, ("int8", "int16", "int32", "int64"))):
        if holds_range(dtype, low, high):
            return dtype
    return np.dtype("uint64")


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """An ordered selection of rows.

    Examples
    --------
    >>> segment = SegmentRef(TraceRef("/t.trace", "u", "auto"), "s")
    >>> rows = Rows.of([StoredRun(segment, 0, 10), MissingRun(0, 2)])
    >>> len(rows), rows[8:11].runs[0].start, rows[8:11].runs[1]
    (12, 8, MissingRun(start=0, stop=1))
    """

    runs: tuple[Run, ...]
    ends: tuple[int, ...] = field(repr=False)
    all_stored: bool = field(default=True, repr=False)

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Rows:
        """Put runs together; neighbours that continue each other become one, empty ones vanish."""
        kept: list[Run] = []
        for run in runs:
            if not len(run):
                continue
            joined = kept[-1].joined(run) if kept else None
            if joined is None:
                kept.append(run)
            else:
                kept[-1] = joined
        ends: list[int] = []
        total = 0
        for run in kept:
            total += len(run)
            ends.append(total)
        return cls(tuple(kept), tuple(ends), all(isinstance(run, StoredRun) for run in kept))

    @classmethod
    def of_sample(cls, entry: SampleEntry, trace: TraceRef, handle: Callable[[str, str], object] | None = None) -> Rows:
        """The rows of a sample of ``trace``; those that were never captured become missing runs.

        ``handle`` gives what keeps a segment of a trace alive.
        """
        stored = cls.of(
            StoredRun(
                SegmentRef(trace, span.segment, None if handle is None else handle(trace.path, span.segment)),
                span.start,
                span.stop,
            )
            for span in entry.spans
        )
        parts, done = [], 0
        for start, stop in entry.missing:
            parts += [stored[done:start], cls.of([MissingRun(0, stop - start)])]
            done = stop
        return cls.concat([*parts, stored[done:]]) if parts else stored

    @classmethod
    def concat(cls, parts: Iterable[Rows]) -> Rows:
        return cls.of(run for part in parts for run in part.runs)

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def _cut(self, start: int, stop: int) -> Iterator[Run]:
        """The runs of rows ``[start, stop)``, ``0 <= start <= stop <= len(self)``."""
        number = bisect_right(self.ends, start)
        while start < stop:
            run = self.runs[number]
            end = self.ends[number]
            begin = end - len(run)
            last = min(stop, end)
            yield run if start == begin and last == end else run.cut(start - begin, last - begin)
            start = last
            number += 1

    def __getitem__(self, rows: slice) -> Rows:
        start, stop, step = rows.indices(len(self))
        if step != 1:
            return self.take(np.arange(start, stop, step))
        if start == 0 and stop == len(self):
            return self
        return Rows.of(self._cut(start, max(start, stop)))

    def take(self, indices: Array) -> Rows:
        """The rows at ``indices`` (integers in ``[0, len(self))``), in that order."""
        if not len(indices):
            return Rows((), ())
        breaks = np.flatnonzero(np.diff(indices) != 1) + 1
        starts = indices[np.concatenate(([0], breaks))].tolist()
        stops = (indices[np.concatenate((breaks - 1, [-1]))] + 1).tolist()
        return Rows.of(run for a, b in zip(starts, stops, strict=True) for run in self._cut(a, b))

    def block_slices(self, outer: int, inner: int, start: int, stop: int) -> Rows:
        """Rows seen as ``outer`` blocks of equal size: rows ``[start * inner, stop * inner)`` of each block."""
        size = len(self) // outer if outer else 0
        return Rows.of(
            run for i in range(outer) for run in self._cut(i * size + start * inner, i * size + stop * inner)
        )

    def with_layers(self, positions: Sequence[int]) -> Rows:
        """The same rows of other layers, given as positions among the layers that are selected now."""
        if self.all_stored:
            return self
        return Rows.of(run.with_layers(positions) if isinstance(run, PaddingRun) else run for run in self.runs)

    @staticmethod
    def join_layers(parts: Sequence[Rows]) -> Rows | None:
        """The inverse of :meth:`with_layers`: the same rows of all the parts' layers; ``None`` if they differ."""
        joined: list[Run] = []
        for runs in zip(*(part.runs for part in parts), strict=False):
            first = runs[0]
            if isinstance(first, PaddingRun):
                if not all(isinstance(run, PaddingRun) and len(run) == len(first) for run in runs):
                    return None
                joined.append(PaddingRun.joined_layers(runs))
            elif any(run != first for run in runs):
                return None
            else:
                joined.append(first)
        rows = Rows.of(joined)
        return rows if all(len(part) == len(rows) for part in parts) else None

    def placed(self) -> Iterator[tuple[int, Run]]:
        """Each run with the position of its first row in the selection."""
        for end, run in zip(self.ends, self.runs, strict=True):
            yield end - len(run), run

    def valid(self) -> Array:
        """Bool per row: false where it was never captured."""
        mask = np.ones(len(self), bool)
        for start, run in self.placed():
            if isinstance(run, MissingRun):
                mask[start : start + len(run)] = False
        return mask

    def missing_ranges(self) -> list[tuple[int, int]]:
        """``[start, stop)`` positions, in the selection, of rows that were never captured."""
        if self.all_stored:
            return []
        return [(start, start + len(run)) for start, run in self.placed() if isinstance(run, MissingRun)]

    def bounds(self) -> tuple[int, int]:
        """Smallest and largest value of the padding rows; ``(0, 0)`` without any."""
        padding = [run for run in self.runs if isinstance(run, PaddingRun)]
        return min([0, *(run.low for run in padding)]), max([0, *(run.high for run in padding)])

    def segments(self) -> list[SegmentRef]:
        """The segments that these rows name, each once, in order."""
        return list(dict.fromkeys(run.segment for run in self.runs if isinstance(run, StoredRun)))

    @property
    def padding_bytes(self) -> int:
        """Bytes of padding that this selection holds in memory."""
        return sum(run.nbytes for run in self.runs if isinstance(run, PaddingRun))


#: Padding up to this size is deflated in a pickle: samples' padding rows are much alike.
_DEFLATED_BYTES = 1024 * 1024


def encode_rows(rows: Rows) -> tuple[Any, ...]:
    """A selection as nested tuples of integers, strings and bytes, small and safe to unpickle."""
    segments = rows.segments()
    traces = list(dict.fromkeys(segment.trace for segment in segments))
    number = {segment: i for i, segment in enumerate(segments)}
    runs: list[tuple[Any, ...]] = []
    padding: list[bytes] = []
    for run in rows.runs:
        if isinstance(run, StoredRun):
            runs.append((number[run.segment], run.start, run.stop))
        elif isinstance(run, MissingRun):
            runs.append((-1, run.start, run.stop))
        else:
            runs.append((-2, run.shape, run.low, run.high, run.core.shape, run.core.dtype.str))
            padding.append(run.core.tobytes())
    data = b"".join(padding)
    deflated = zlib.compress(data) if 64 < len(data) <= _DEFLATED_BYTES else data
    return (
        tuple(tuple(trace) for trace in traces),
        tuple(
            (traces.index(segment.trace), segment.id, *(() if segment.handle is None else (segment.handle,)))
            for segment in segments
        ),
        tuple(runs),
        len(data),
        # None, not b"": old pickle protocols spell that as a call of bytes, which torch.load refuses.
        (deflated if len(deflated) < len(data) else data) or None,
    )


def decode_rows(encoded: tuple[Any, ...]) -> Rows:
    """The inverse of :func:`encode_rows`."""
    raw_traces, raw_segments, raw_runs, size, data = encoded
    traces = [TraceRef(*trace) for trace in raw_traces]
    segments = [SegmentRef(traces[number], *named) for number, *named in raw_segments]
    data = data or b""
    if data and len(data) < size:
        data = zlib.decompress(data, bufsize=size)
    offset = 0
    runs: list[Run] = []
    for raw in raw_runs:
        if raw[0] == -1:
            runs.append(MissingRun(raw[1], raw[2]))
        elif raw[0] == -2:
            _, shape, low, high, core_shape, dtype = raw
            core = np.frombuffer(data, dtype, math.prod(core_shape), offset).reshape(core_shape)
            offset += core.nbytes
            # A copy of its own, so that a cut of this run does not keep the padding of all.
            runs.append(PaddingRun(core.copy(), tuple(shape), low, high))
        else:
            runs.append(StoredRun(segments[raw[0]], raw[1], raw[2]))
    return Rows.of(runs)
