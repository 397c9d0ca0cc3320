"""Many chunks decoded, and what is wanted of each placed: natively where that can be, else in Python; by several
threads where it is worth it. Both ways give the same ids and the same errors.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tracefile import native
from tracefile.cache import chunk_cache
from tracefile.settings import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tracefile.plan import Plan
    from tracefile.segments import OpenSegment

Array: TypeAlias = "np.ndarray[Any, Any]"

#: Chunks of one segment, in the order of its file.
Wanted: TypeAlias = "tuple[Plan, list[int]]"

#: Another thread is worth waking from so much work for each. In Python the interpreter changes hands for every chunk;
#: natively waking one costs some 30 us, in which about 50 KiB are decoded.
_CHUNKS_PER_THREAD = 32
_NATIVE_BYTES_PER_THREAD = 256 * 1024

#: Chunks of about so many decoded bytes are decoded natively at once where more would cost memory: encoded chunks that
#: were read from a file wait for the others, and so do decoded chunks that the cache is to keep.
_BATCH_BYTES = 4 * 1024 * 1024


def decode(wanted: Sequence[Wanted], out: Array) -> None:
    """Decode chunks, and place what is wanted of them in ``out``.

    Raises
    ------
    ChunkDamagedError
    """
    library = native.library()
    if library is not None and not all(native.can_place(plan.segment.header.config.dtype, out) for plan, _ in wanted):
        library = None
    if library is None:
        worth = sum(len(numbers) for _, numbers in wanted) // _CHUNKS_PER_THREAD
    else:
        decoded_bytes = sum(len(numbers) * plan.segment.decoder.chunk_bytes for plan, numbers in wanted)
        worth = decoded_bytes // _NATIVE_BYTES_PER_THREAD
    threads = max(1, min(settings().decode_threads, worth))
    separate: list[Wanted] = []
    shared: list[Wanted] = []
    for plan, numbers in wanted:
        if plan.segment.source is None:
            raise plan.segment.decoder.missing(*plan.segment.decoder.position(numbers[0]))
        (separate if library is None or plan.segment.source.kind != "mmap" else shared).append((plan, numbers))
    if library is not None and shared:
        _decode_mapped(library, shared, out, threads)
    if separate:
        _decode_read(library, separate, out, threads)


def _decode_read(library: native.Library | None, wanted: Sequence[Wanted], out: Array, threads: int) -> None:
    """Each thread reads and decodes a batch at a time."""
    batches: deque[Wanted] = deque()
    for plan, numbers in wanted:
        assert plan.segment.source is not None
        if plan.segment.source.kind == "mmap" and threads > 1:
            size = max(2, len(numbers) // (4 * threads))  # small batches, so that nobody is waited for long
        else:
            size = -(-len(numbers) // threads)  # one batch each: what lies together is one request
        batches.extend((plan, numbers[i : i + size]) for i in range(0, len(numbers), size))

    def work() -> None:
        while batches:
            try:
                plan, batch = batches.popleft()
            except IndexError:
                return  # another thread took the last one
            if library is None:
                _decode_in_python(plan, batch, out)
            else:
                _decode_natively(library, plan, batch, out)

    _together(work, batches.clear, threads)


def _decode_in_python(plan: Plan, numbers: Sequence[int], out: Array) -> None:
    segment = plan.segment
    header, check_and_decode = segment.header, segment.decoder.decode
    shape = (header.geometry.layers_per_chunk, header.geometry.rows_per_chunk * header.config.top_k)
    dtype = header.config.dtype
    kept = plan.kept()
    for number, view in zip(numbers, plan.fetch(numbers), strict=True):
        block = np.frombuffer(check_and_decode(number, view), dtype).reshape(shape)
        plan.place(number, block, out)
        later = kept.get(number // segment.row_chunks)
        if later:
            chunk_cache.put((segment.serial, number), block, later)


def _decode_natively(library: native.Library, plan: Plan, numbers: Sequence[int], out: Array) -> None:
    """Chunks that have to be read first."""
    views = plan.fetch(numbers)
    kept = plan.kept()
    for batch in _batches(plan, numbers):
        encoded = list(itertools.islice(views, len(batch)))
        addresses = [native.address_of(np.frombuffer(view, np.uint8)) for view in encoded]
        job = _ChunkJob(library, plan, batch, addresses, list(map(len, encoded)), kept, out, encoded)
        job.run()
        job.finish()


def _decode_mapped(library: native.Library, wanted: Sequence[Wanted], out: Array, threads: int) -> None:
    """Chunks that lie in mappings: all threads work on the same jobs."""
    jobs: list[_ChunkJob] = []
    pending = 0
    for plan, numbers in wanted:
        base = _mapped_at(plan.segment)
        offsets, lengths = plan.segment.index.offsets, plan.segment.index.lengths
        kept = plan.kept()
        for batch in _batches(plan, numbers) if kept else [numbers]:
            addresses = [base + offsets[number] for number in batch]
            job = _ChunkJob(library, plan, batch, addresses, [lengths[number] for number in batch], kept, out)
            jobs.append(job)
            pending += job.kept_bytes
            if pending >= _BATCH_BYTES:
                _run(jobs, threads)
                jobs, pending = [], 0
    if jobs:
        _run(jobs, threads)


def _run(jobs: Sequence[_ChunkJob], threads: int) -> None:
    def work() -> None:
        for job in jobs:
            job.run()

    def cancel() -> None:
        for job in jobs:
            job.cancel()

    _together(work, cancel, threads)
    for job in jobs:
        job.finish()


def _batches(plan: Plan, numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    size = max(1, _BATCH_BYTES // plan.segment.decoder.chunk_bytes)
    return (numbers[i : i + size] for i in range(0, len(numbers), size))


_mappings: weakref.WeakKeyDictionary[OpenSegment, int] = weakref.WeakKeyDictionary()


def _mapped_at(segment: OpenSegment) -> int:
    """Where the mapping of a segment's file begins."""
    address = _mappings.get(segment)
    if address is None:
        assert segment.source is not None
        whole = np.frombuffer(segment.source.read(0, segment.source.size), np.uint8)
        address = _mappings[segment] = native.address_of(whole)
    return address


class _ChunkJob(native.Job):
    """Chunks of one segment that the native decoder is to decode, and those of them that the cache will keep."""

    def __init__(
        self,
        library: native.Library,
        plan: Plan,
        numbers: Sequence[int],
        addresses: Sequence[int],
        lengths: Sequence[int],
        kept: dict[int, int],
        out: Array,
        encoded: Sequence[memoryview] | None = None,
    ) -> None:
        segment = plan.segment
        header, decoder = segment.header, segment.decoder
        shape = (header.geometry.layers_per_chunk, header.geometry.rows_per_chunk * header.config.top_k)
        self._plan = plan
        self._numbers = numbers
        self._encoded = encoded
        self._blocks: dict[int, tuple[Array, int]] = {}
        into = [0] * len(numbers)
        if kept:
            for i, number in enumerate(numbers):
                later = kept.get(number // segment.row_chunks)
                if later:
                    block = np.empty(shape, header.config.dtype)
                    self._blocks[number] = block, later
                    into[i] = native.address_of(block)
        self.kept_bytes = len(self._blocks) * decoder.chunk_bytes
        super().__init__(
            library,
            out,
            header.config.dtype,
            chunk_bytes=decoder.chunk_bytes,
            chunk_width=shape[1],
            row_chunks=segment.row_chunks,
            compressed=decoder.codec is not None,
            numbers=numbers,
            addresses=addresses,
            lengths=lengths,
            kept=into,
            rows=plan.row_table(numbers),
            layers=plan.layer_table,
        )

    def finish(self) -> None:
        """Once all threads are done: raise the error of a damaged chunk, or have the cache keep what it will.

        Raises
        ------
        ChunkDamagedError
        """
        segment = self._plan.segment
        bad = self.bad
        if bad is not None:
            number = self._numbers[bad]
            (view,) = self._plan.fetch([number]) if self._encoded is None else [self._encoded[bad]]
            segment.decoder.decode(number, view)  # says what is wrong with it
            raise segment.decoder.damaged(number, "is damaged")
        for number, (block, later) in self._blocks.items():
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


def _together(work: Callable[[], None], cancel: Callable[[], None], threads: int) -> None:
    """Run ``work`` in this thread and in ``threads - 1`` others; ``cancel`` makes the others stop early."""
    if threads == 1:
        work()
        return
    done: SimpleQueue[BaseException | None] = SimpleQueue()
    for _ in range(threads - 1):
        _pool.start(work, done, threads - 1)
    try:
        work()
    except BaseException:
        cancel()
        raise
    finally:
        errors = [done.get() for _ in range(threads - 1)]  # waits: they write into the output
    for error in errors:
        if error is not None:
            raise error
