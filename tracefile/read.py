"""How to get rows: which chunks a selection touches, each decoded once, placed into one array.

The plan groups everything that a selection wants from a chunk, so that a chunk is fetched, checked and
decoded once however many runs touch it. A chunk that a read uses up goes through a scratch buffer; one of
which other layers or rows may be wanted later goes to the cache.
"""

from __future__ import annotations

import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from tracefile.cache import chunk_cache
from tracefile.runs import MissingRun, PaddingRun, Rows, SegmentRef, StoredRun, TraceRef, render_missing
from tracefile.settings import settings
from tracefile.stats import ReadStats
from tracefile.store import OpenSegment, segment_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracefile.format import ModelConfig

Array: TypeAlias = "np.ndarray[Any, Any]"
Selector: TypeAlias = "slice | list[int]"

#: Fewer chunks than this per thread are not worth handing to one.
_CHUNKS_PER_THREAD = 4

#: Called with the segment's id and the ``(layer, row)`` positions of the chunks that a read decodes.
chunk_observers: list[Callable[[str, list[tuple[int, int]]], None]] = []


class _Copy(NamedTuple):
    """From a chunk ``[layers, rows * top_k]`` to the destination of the same form."""

    layers: Selector
    start: int
    stop: int
    to_layers: Selector
    to_start: int
    to_stop: int


class _LayerChunk(NamedTuple):
    """What a selection of layers wants from one chunk along the layer axis."""

    number: int
    layers: Selector
    to_layers: Selector
    all_layers: bool


def _selector(positions: Sequence[int]) -> Selector:
    first = positions[0]
    if list(positions) == list(range(first, first + len(positions))):
        return slice(first, first + len(positions))
    return list(positions)


@functools.lru_cache(maxsize=512)
def _layer_chunks(layers: tuple[int, ...], per_chunk: int, num_layers: int) -> tuple[_LayerChunk, ...]:
    wanted: dict[int, list[tuple[int, int]]] = {}
    for position, layer in enumerate(layers):
        wanted.setdefault(layer // per_chunk, []).append((layer % per_chunk, position))
    result = []
    for number, pairs in sorted(wanted.items()):
        inside = [pair[0] for pair in pairs]
        size = min(per_chunk, num_layers - number * per_chunk)
        result.append(
            _LayerChunk(number, _selector(inside), _selector([pair[1] for pair in pairs]), len(set(inside)) == size)
        )
    return tuple(result)


class _Plan:
    """What one read wants from one segment: for each chunk, the copies to make and whether it is used up."""

    def __init__(self, ref: SegmentRef, segment: OpenSegment, layers: tuple[int, ...]) -> None:
        self.ref = ref
        self.segment = segment
        header = segment.header
        self.layer_chunks = _layer_chunks(layers, header.geometry.layers_per_chunk, header.config.num_layers)
        self.copies: dict[int, list[_Copy]] = {}
        self.rows_used: dict[int, int] = {}

    def add(self, run: StoredRun, position: int) -> None:
        header = self.segment.header
        per_chunk, top_k, row_chunks = (
            header.geometry.rows_per_chunk,
            header.config.top_k,
            self.segment.row_chunks,
        )
        if run.stop > header.rows:
            raise self.segment.decoder.missing((run.stop - 1) // per_chunk)
        for row_chunk in range(run.start // per_chunk, (run.stop - 1) // per_chunk + 1):
            base = row_chunk * per_chunk
            start, stop = max(run.start - base, 0), min(run.stop - base, per_chunk)
            to_start = (position + base + start - run.start) * top_k
            to_stop = to_start + (stop - start) * top_k
            for number, layers, to_layers, _ in self.layer_chunks:
                copy = _Copy(layers, start * top_k, stop * top_k, to_layers, to_start, to_stop)
                self.copies.setdefault(number * row_chunks + row_chunk, []).append(copy)
            self.rows_used[row_chunk] = self.rows_used.get(row_chunk, 0) + stop - start

    def used_up(self, number: int) -> bool:
        """Whether this read takes all that the chunk holds."""
        layer_chunk, row_chunk = divmod(number, self.segment.row_chunks)
        per_chunk = self.segment.header.geometry.rows_per_chunk
        rows = min(per_chunk, self.segment.header.rows - row_chunk * per_chunk)
        return self.rows_used[row_chunk] >= rows and any(
            chunk.all_layers for chunk in self.layer_chunks if chunk.number == layer_chunk
        )


class _Scratch(threading.local):
    """A decode buffer per thread, reused."""

    def __init__(self) -> None:
        self.buffer: Array = np.empty(0, np.uint8)

    def chunk(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> Array:
        nbytes = shape[0] * shape[1] * dtype.itemsize
        if self.buffer.nbytes < nbytes:
            self.buffer = np.empty(nbytes, np.uint8)
        return self.buffer[:nbytes].view(dtype).reshape(shape)


_scratch = _Scratch()


def _decode(plan: _Plan, numbers: Sequence[int], out: Array) -> None:
    """Decode chunks of one segment and place what is wanted of them."""
    segment = plan.segment
    source, decode = segment.source, segment.decoder.decode
    if source is None:
        raise segment.decoder.missing(numbers[0])
    header = segment.header
    shape = (header.geometry.layers_per_chunk, header.geometry.rows_per_chunk * header.config.top_k)
    dtype = header.config.dtype
    scratch = _scratch.chunk(shape, dtype)
    keep = chunk_cache.enabled
    offsets, lengths = segment.index.offsets, segment.index.lengths
    encoded = source.read_many([(offsets[number], lengths[number]) for number in numbers])
    for number, view in zip(numbers, encoded, strict=True):
        cached = keep and not plan.used_up(number)
        block = np.empty(shape, dtype) if cached else scratch
        decode(number, view, block)
        for layers, start, stop, to_layers, to_start, to_stop in plan.copies[number]:
            out[to_layers, to_start:to_stop] = block[layers, start:stop]
        if cached:
            chunk_cache.put((segment.serial, number), block)


class _DecodePool:
    """Threads for large reads, started with the first one, made anew after a fork."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._size = 0

    def executor(self, size: int) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None or self._size < size:
                self._executor = ThreadPoolExecutor(size, thread_name_prefix="tracefile-decode")
                self._size = size
            return self._executor


_pool = _DecodePool()


def _execute(plan: _Plan, out: Array, stats: ReadStats) -> None:
    segment = plan.segment
    assert segment.source is not None
    segment.source.check_size()
    offsets, lengths = segment.index.offsets, segment.index.lengths
    wanted = []
    if chunk_cache.enabled and len(chunk_cache):
        for number, copies in plan.copies.items():
            block = chunk_cache.get((segment.serial, number))
            if block is None:
                wanted.append(number)
                continue
            stats.cache_hits += 1
            for layers, start, stop, to_layers, to_start, to_stop in copies:
                out[to_layers, to_start:to_stop] = block[layers, start:stop]
    else:
        wanted.extend(plan.copies)
    if not wanted:
        return
    wanted.sort(key=offsets.__getitem__)
    if not lengths[min(wanted, key=lengths.__getitem__)]:
        raise segment.decoder.missing(next(number for number in wanted if not lengths[number]))
    for observe in chunk_observers:
        observe(plan.ref.id, [segment.decoder.position(number) for number in wanted])
    threads = min(settings().decode_threads, len(wanted) // _CHUNKS_PER_THREAD)
    if threads > 1:
        share = -(-len(wanted) // threads)
        parts = [wanted[i : i + share] for i in range(0, len(wanted), share)]
        executor = _pool.executor(settings().decode_threads - 1)
        futures = [executor.submit(_decode, plan, part, out) for part in parts[1:]]
        try:
            _decode(plan, parts[0], out)
        finally:
            errors = [future.exception() for future in futures]  # waits: they write into ``out``
        for error in errors:
            if error is not None:
                raise error
    else:
        _decode(plan, wanted, out)
    stats.chunks_decoded += len(wanted)
    stats.bytes_read += sum(map(lengths.__getitem__, wanted))
    stats.bytes_decoded += len(wanted) * segment.decoder.chunk_bytes


def read_rows(rows: Rows, layers: tuple[int, ...], config: ModelConfig, out: Array, *, fill: str = "error") -> None:
    """Read a selection into ``out``.

    Parameters
    ----------
    rows : Rows
    layers : tuple of int
        Positions of the layers, in the order in which they are wanted.
    config : ModelConfig
    out : ndarray
        ``[len(layers), len(rows), top_k]``, C-contiguous, of a dtype that holds what is read.
    fill : str
        How rows that were never captured are rendered; ``"error"`` must not meet any.
    """
    flat = out.reshape(len(layers), len(rows) * config.top_k)
    plans: dict[SegmentRef, _Plan] = {}
    for position, run in rows.placed():
        if isinstance(run, StoredRun):
            plan = plans.get(run.segment)
            if plan is None:
                segment = segment_pool.get(run.segment.trace, config, run.segment.id)
                plan = plans[run.segment] = _Plan(run.segment, segment, layers)
            plan.add(run, position)
        else:
            out[:, position : position + len(run)] = _in_memory(run, layers, config, fill).transpose(1, 0, 2)
    stats: dict[TraceRef, ReadStats] = {}
    for plan in plans.values() if layers else ():
        _execute(plan, flat, stats.setdefault(plan.ref.trace, ReadStats()))
    for trace, cost in stats.items():
        cost.reads = 1
        segment_pool.record(trace, cost)


def _in_memory(run: PaddingRun | MissingRun, layers: Sequence[int], config: ModelConfig, fill: str) -> Array:
    if isinstance(run, PaddingRun):
        return run.values
    return render_missing(run, fill, layers, config.num_layers, config.top_k, config.num_experts)
