"""How to get rows: which chunks a selection touches, each decoded once, placed into one array.

The plan groups everything that a selection wants from a chunk, so that a chunk is fetched, checked and
decoded once however many runs touch it. A chunk of which other layers are likely to be wanted next is kept in
the cache until they have been.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from tracefile.cache import ALWAYS, chunk_cache
from tracefile.runs import MissingRun, PaddingRun, Rows, SegmentRef, StoredRun, TraceRef, render_missing
from tracefile.segments import OpenSegment, segment_pool
from tracefile.settings import settings
from tracefile.stats import ReadStats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracefile.format import ModelConfig

Array: TypeAlias = "np.ndarray[Any, Any]"
Selector: TypeAlias = "slice | list[int]"

#: Fewer chunks than this per thread are not worth handing to one: waking it takes as long as decoding several, and
#: the interpreter changes hands for every chunk.
_CHUNKS_PER_THREAD = 32

#: Called with the segment's id and the ``(layer, row)`` positions of the chunks that a read decodes.
chunk_observers: list[Callable[[str, list[tuple[int, int]]], None]] = []


class _LayerChunk(NamedTuple):
    """What a selection of layers wants from the chunks at one position along the layer axis."""

    number: int
    layers: Selector
    to_layers: Selector
    wanted: int  # a bit per layer of the chunk
    others: int


#: Columns ``[start, stop)`` of a chunk seen as ``[layers, rows * top_k]``, and the columns where they go.
_RowCopy: TypeAlias = tuple[int, int, int, int]


def _selector(positions: Sequence[int]) -> Selector:
    first = positions[0]
    if list(positions) == list(range(first, first + len(positions))):
        return slice(first, first + len(positions))
    return list(positions)


@functools.lru_cache(maxsize=512)
def _layer_chunks(layers: tuple[int, ...], per_chunk: int, num_layers: int) -> dict[int, _LayerChunk]:
    wanted: dict[int, list[tuple[int, int]]] = {}
    for position, layer in enumerate(layers):
        wanted.setdefault(layer // per_chunk, []).append((layer % per_chunk, position))
    result = {}
    for number, pairs in sorted(wanted.items()):
        inside = [pair[0] for pair in pairs]
        taken = sum(1 << layer for layer in set(inside))
        every = (1 << min(per_chunk, num_layers - number * per_chunk)) - 1
        to_layers = _selector([pair[1] for pair in pairs])
        result[number] = _LayerChunk(number, _selector(inside), to_layers, taken, every & ~taken)
    return result


class _Plan:
    """What one read wants from one segment: columns of its row chunks, times layers of its layer chunks."""

    def __init__(self, ref: SegmentRef, segment: OpenSegment, layers: tuple[int, ...], keep: bool) -> None:
        self.ref = ref
        self.segment = segment
        self.keep = keep
        header = segment.header
        self.per_chunk = header.geometry.rows_per_chunk
        self.top_k = header.config.top_k
        self.layer_chunks = _layer_chunks(layers, header.geometry.layers_per_chunk, header.config.num_layers)
        self.row_copies: dict[int, list[_RowCopy]] = {}

    def add(self, run: StoredRun, position: int) -> None:
        """Want a run, of which the first row goes to ``position``."""
        if run.stop > self.segment.header.rows:
            raise self.segment.decoder.missing(0, (run.stop - 1) // self.per_chunk)
        width = self.per_chunk * self.top_k
        first, last = run.start * self.top_k, run.stop * self.top_k
        moved = (position - run.start) * self.top_k
        for chunk in range(first // width, (last - 1) // width + 1):
            base = chunk * width
            start, stop = max(first, base), min(last, base + width)
            copy = (start - base, stop - base, start + moved, stop + moved)
            self.row_copies.setdefault(chunk, []).append(copy)

    def numbers(self) -> list[int]:
        """The chunks that are wanted, by their numbers in the grid, all layers of the first rows first."""
        row_chunks = self.segment.row_chunks
        return [layer * row_chunks + row for row in self.row_copies for layer in self.layer_chunks]

    def layer_chunk(self, number: int) -> _LayerChunk:
        return self.layer_chunks[number // self.segment.row_chunks]

    def place(self, number: int, block: Array, out: Array) -> None:
        """Copy what is wanted of a decoded chunk to where it goes."""
        layer_chunk, row_chunk = divmod(number, self.segment.row_chunks)
        _, layers, to_layers, _, _ = self.layer_chunks[layer_chunk]
        for start, stop, to_start, to_stop in self.row_copies[row_chunk]:
            out[to_layers, to_start:to_stop] = block[layers, start:stop]

    def later(self, number: int) -> int:
        """Of which layers a chunk is worth keeping after this read, as the cache has it.

        Those that were not wanted now will be, layer by layer. Where all were, rows are: if this read took a few
        of one chunk, the next one may take its neighbours; the edges of a longer range are not worth keeping.
        """
        others = self.layer_chunk(number).others
        if others or len(self.row_copies) > 1:
            return others
        (copies,) = self.row_copies.values()
        taken = sum(stop - start for start, stop, _, _ in copies)
        return ALWAYS if taken < min(self.per_chunk, self.segment.header.rows) * self.top_k else 0


def _decode(plan: _Plan, numbers: Sequence[int], out: Array) -> None:
    """Decode chunks of one segment and place what is wanted of them."""
    segment = plan.segment
    source, decode = segment.source, segment.decoder.decode
    if source is None:
        raise segment.decoder.missing(*segment.decoder.position(numbers[0]))
    header = segment.header
    shape = (header.geometry.layers_per_chunk, header.geometry.rows_per_chunk * header.config.top_k)
    dtype = header.config.dtype
    offsets, lengths = segment.index.offsets, segment.index.lengths
    encoded = source.read_many([(offsets[number], lengths[number]) for number in numbers])
    keep = plan.keep and chunk_cache.enabled
    for number, view in zip(numbers, encoded, strict=True):
        block = np.frombuffer(decode(number, view), dtype).reshape(shape)
        plan.place(number, block, out)
        if keep and (later := plan.later(number)):
            chunk_cache.put((segment.serial, number), block, later)


class _DecodePool:
    """Threads that help with large reads: started with the first one, made anew after a fork.

    Bare queues, because a read takes a millisecond and handing a part to an executor a tenth of that.
    """

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._tasks: SimpleQueue[tuple[Callable[[], None], SimpleQueue[BaseException | None]]] = SimpleQueue()
        self._threads = 0

    def start(self, task: Callable[[], None], done: SimpleQueue[BaseException | None], threads: int) -> None:
        """Have one of at least ``threads`` threads run ``task``, and put its error or ``None`` into ``done``."""
        if self._threads < threads:
            with self._lock:
                while self._threads < threads:
                    self._threads += 1
                    name = f"tracefile-decode-{self._threads}"
                    threading.Thread(target=self._work, args=(self._tasks,), name=name, daemon=True).start()
        self._tasks.put((task, done))

    @staticmethod
    def _work(tasks: SimpleQueue[tuple[Callable[[], None], SimpleQueue[BaseException | None]]]) -> None:
        while True:
            task, done = tasks.get()
            error: BaseException | None = None
            try:
                task()
            except BaseException as caught:
                error = caught
            done.put(error)
            del task, done, error  # an idle thread holds on to no arrays


_pool = _DecodePool()


def _decode_together(plan: _Plan, numbers: Sequence[int], out: Array, threads: int) -> None:
    """As :func:`_decode`, with the help of other threads."""
    if plan.segment.source is not None and plan.segment.source.kind == "pread":
        size = -(-len(numbers) // threads)  # one batch each: what lies together is one request
    else:
        size = max(2, len(numbers) // (4 * threads))  # small batches, so that nobody is waited for long
    batches = deque(numbers[i : i + size] for i in range(0, len(numbers), size))

    def work() -> None:
        while batches:
            try:
                batch = batches.popleft()
            except IndexError:
                return  # another thread took the last one
            _decode(plan, batch, out)

    done: SimpleQueue[BaseException | None] = SimpleQueue()
    for _ in range(threads - 1):
        _pool.start(work, done, threads - 1)
    try:
        work()
    finally:
        batches.clear()
        errors = [done.get() for _ in range(threads - 1)]  # waits: they write into ``out``
    for error in errors:
        if error is not None:
            raise error


def _execute(plan: _Plan, out: Array, stats: ReadStats) -> None:
    segment = plan.segment
    assert segment.source is not None
    segment.source.check_size()
    offsets, lengths = segment.index.offsets, segment.index.lengths
    wanted = plan.numbers()
    if len(chunk_cache):
        missed = []
        for number in wanted:
            block = chunk_cache.take((segment.serial, number), plan.layer_chunk(number).wanted)
            if block is None:
                missed.append(number)
            else:
                plan.place(number, block, out)
        stats.cache_hits += len(wanted) - len(missed)
        wanted = missed
    if not wanted:
        return
    wanted.sort(key=offsets.__getitem__)  # in the order of the file, so that a source can merge its reads
    absent = [number for number in wanted if not lengths[number]]
    if absent:
        raise segment.decoder.missing(*segment.decoder.position(absent[0]))
    for observe in chunk_observers:
        observe(plan.ref.id, [segment.decoder.position(number) for number in wanted])
    threads = min(settings().decode_threads, len(wanted) // _CHUNKS_PER_THREAD)
    if threads > 1:
        _decode_together(plan, wanted, out, threads)
    else:
        _decode(plan, wanted, out)
    stats.chunks_decoded += len(wanted)
    stats.bytes_read += sum(map(lengths.__getitem__, wanted))
    stats.bytes_decoded += len(wanted) * segment.decoder.chunk_bytes


def read_rows(
    rows: Rows, layers: tuple[int, ...], config: ModelConfig, out: Array, *, fill: str = "error", keep: bool = True
) -> int:
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
    keep : bool
        Whether other reads may want the rest of these chunks.

    Returns
    -------
    int
        How many chunks the selection touches.
    """
    flat = out.reshape(len(layers), len(rows) * config.top_k)
    plans: dict[SegmentRef, _Plan] = {}
    for position, run in rows.placed():
        if isinstance(run, StoredRun):
            plan = plans.get(run.segment)
            if plan is None:
                segment = segment_pool.get(run.segment.trace, config, run.segment.id)
                plan = plans[run.segment] = _Plan(run.segment, segment, layers, keep)
            plan.add(run, position)
        else:
            out[:, position : position + len(run)] = _in_memory(run, layers, config, fill).transpose(1, 0, 2)
    stats: dict[TraceRef, ReadStats] = {}
    for plan in plans.values() if layers else ():
        _execute(plan, flat, stats.setdefault(plan.ref.trace, ReadStats()))
    for trace, cost in stats.items():
        cost.reads = 1
        segment_pool.record(trace, cost)
    return sum(len(plan.row_copies) * len(plan.layer_chunks) for plan in plans.values())


def _in_memory(run: PaddingRun | MissingRun, layers: Sequence[int], config: ModelConfig, fill: str) -> Array:
    if isinstance(run, PaddingRun):
        return run.values
    return render_missing(run, fill, layers, config.num_layers, config.top_k, config.num_experts)
