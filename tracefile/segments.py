"""The segments that this process has open: documents, shard files, chunk indexes, and what reading them cost."""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from tracefile.cache import chunk_cache
from tracefile.errors import ShardDamagedError
from tracefile.format import CODECS, HEADER_BYTES, SHARD_NAME, ModelConfig, segment_path
from tracefile.metadata import TraceHeader
from tracefile.settings import mapped_path, on_change, settings
from tracefile.shard import ChunkDecoder, ShardIndex, check_header, index_bytes
from tracefile.source import Source, check_source_kind
from tracefile.stats import ReadStats
from tracefile.store import read_segment_header, store_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracefile.runs import SegmentRef, TraceRef

T = TypeVar("T")
R = TypeVar("R")

#: Round trips that one read makes at the same time.
_THREADS = 32
_serial = itertools.count()


class OpenSegment:
    """A segment ready to be read: its document, its shard file and the index of its chunks.

    Attributes
    ----------
    serial : int
        Names this opening of it in the chunk cache.
    """

    def __init__(self, trace_path: str, header: TraceHeader, segment: str, source: str) -> None:
        self.serial = next(_serial)
        self.header = read_segment_header(trace_path, header, segment)
        self.path = os.path.join(segment_path(trace_path, segment), SHARD_NAME)
        self.source: Source | None = None
        layer_chunks, self.row_chunks = self.header.grid
        geometry = self.header.geometry
        self.decoder = ChunkDecoder(
            CODECS[self.header.codec],
            geometry.chunk_bytes(header.config),
            row_chunks=max(1, self.row_chunks),
            segment=segment,
            path=self.path,
        )
        chunks = layer_chunks * self.row_chunks
        self.index = ShardIndex([], [])
        if self.header.rows:
            size, tail = self.header.shard_bytes, index_bytes(chunks)
            if size < HEADER_BYTES + tail:
                raise ShardDamagedError(
                    f"{self.path}: {size} bytes cannot hold the {chunks} chunks of segment {segment}; restore the file",
                    path=self.path,
                    segment=segment,
                )
            self.source = store_for(trace_path).open_source(
                self.path, kind=check_source_kind(source), size=size, segment=segment
            )
            try:
                # Asked for together: where each takes a round trip, they take one.
                first, last = map(bytes, self.source.read_many([(0, HEADER_BYTES), (size - tail, tail)]))
                check_header(first, segment, self.path)
                self.index = ShardIndex.parse(
                    last,
                    chunks=chunks,
                    shard_bytes=size,
                    segment=segment,
                    path=self.path,
                )
            except BaseException:
                self.source.close()
                raise

    def __del__(self) -> None:
        # Closing belongs to the last reader: eviction must not pull the file from under a read in progress.
        source = getattr(self, "source", None)
        if source is not None:
            source.close()


def in_threads(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Do something that mostly waits for each of ``items``, many at a time."""
    with ThreadPoolExecutor(min(len(items), _THREADS)) as threads:
        return list(threads.map(work, items))


class SegmentPool:
    """The open segments of this process, least recently used closed first. Safe for threads and fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[TraceRef, str], OpenSegment] = OrderedDict()
        self._stats: dict[TraceRef, ReadStats] = {}
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()

    def get(self, trace: TraceRef, config: ModelConfig, segment: str) -> OpenSegment:
        """The open segment, opened if need be."""
        key = (trace, segment)
        with self._lock:
            found = self._open.get(key)
            if found is not None:
                self._open.move_to_end(key)
                return found
        opened = OpenSegment(mapped_path(trace.path), TraceHeader(trace.uuid, config), segment, trace.source)
        with self._lock:
            opened = self._open.setdefault(key, opened)
            self._open.move_to_end(key)
        self.trim()
        return opened

    def get_all(self, refs: Sequence[SegmentRef], config: ModelConfig) -> dict[SegmentRef, OpenSegment]:
        """Several open segments; those that have to be opened first together, where that takes round trips."""

        def get(ref: SegmentRef) -> OpenSegment:
            return self.get(ref.trace, config, ref.id)

        if len(refs) > 1:
            with self._lock:
                closed = [ref for ref in refs if (ref.trace, ref.id) not in self._open]
            slow = [ref for ref in closed if store_for(ref.trace.path).round_trips]
            if len(slow) > 1:
                opened = dict(zip(slow, in_threads(get, slow), strict=True))
                return {ref: opened[ref] if ref in opened else get(ref) for ref in refs}
        return {ref: get(ref) for ref in refs}

    def trim(self) -> None:
        """Close the segments that ``max_open_segments`` has no room for."""
        evicted = []
        with self._lock:
            while len(self._open) > settings().max_open_segments:
                evicted.append(self._open.popitem(last=False)[1])
        for segment in evicted:
            chunk_cache.drop(segment.serial)

    def close(self, trace: TraceRef) -> None:
        """Close what is open of a trace, and forget its decoded chunks."""
        with self._lock:
            closed = [self._open.pop(key) for key in list(self._open) if key[0] == trace]
        for segment in closed:
            chunk_cache.drop(segment.serial)

    def record(self, trace: TraceRef, stats: ReadStats) -> None:
        with self._lock:
            self._stats.setdefault(trace, ReadStats()).add(stats)

    def stats(self, trace: TraceRef | None = None) -> ReadStats:
        """What reading a trace has cost this process; without a trace, all of them."""
        with self._lock:
            if trace is not None:
                return self._stats.get(trace, ReadStats()).copy()
            total = ReadStats()
            for stats in self._stats.values():
                total.add(stats)
            return total

    def active(self, trace: TraceRef) -> tuple[int, int]:
        """Decoded chunks of a trace that are held for reuse, and their bytes."""
        return chunk_cache.usage({segment.serial for segment in self.opened(trace)})

    def opened(self, trace: TraceRef) -> list[OpenSegment]:
        with self._lock:
            return [segment for key, segment in self._open.items() if key[0] == trace]


#: The open segments of this process.
segment_pool = SegmentPool()
on_change(segment_pool.trim)


def process_stats() -> ReadStats:
    """What reading has cost this process, over all traces."""
    return segment_pool.stats()
