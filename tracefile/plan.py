"""What a read wants from the chunks of one segment, and where it goes in the output.

A plan groups everything that a selection wants from a chunk, so that a chunk is fetched, checked and decoded
once however many runs touch it.
"""

from __future__ import annotations

import functools
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from tracefile.cache import ALWAYS, chunk_cache

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from tracefile.runs import SegmentRef, StoredRun
    from tracefile.segments import OpenSegment

Array: TypeAlias = "np.ndarray[Any, Any]"
Selector: TypeAlias = "slice | list[int]"

#: Columns ``[start, stop)`` of a chunk seen as ``[layers, rows * top_k]``, and the columns where they go.
RowCopy: TypeAlias = tuple[int, int, int, int]


class LayerChunk(NamedTuple):
    """What a selection of layers wants from the chunks at one position along the layer axis."""

    number: int
    layers: Selector
    to_layers: Selector
    wanted: int  # a bit per layer of the chunk
    others: int


class LayerChunks(NamedTuple):
    """What a selection of layers wants, by position along the layer axis."""

    chunks: dict[int, LayerChunk]
    #: The same for the native decoder: ``position, layer of the chunk, layer of the output`` for each layer.
    table: array[int]


def _selector(positions: Sequence[int]) -> Selector:
    first = positions[0]
    if list(positions) == list(range(first, first + len(positions))):
        return slice(first, first + len(positions))
    return list(positions)


@functools.lru_cache(maxsize=512)
def _layer_chunks(layers: tuple[int, ...], per_chunk: int, num_layers: int) -> LayerChunks:
    wanted: dict[int, list[tuple[int, int]]] = {}
    for position, layer in enumerate(layers):
        wanted.setdefault(layer // per_chunk, []).append((layer % per_chunk, position))
    result = {}
    table = array("q")
    for number, pairs in sorted(wanted.items()):
        inside = [pair[0] for pair in pairs]
        taken = sum(1 << layer for layer in set(inside))
        every = (1 << min(per_chunk, num_layers - number * per_chunk)) - 1
        to_layers = _selector([pair[1] for pair in pairs])
        result[number] = LayerChunk(number, _selector(inside), to_layers, taken, every & ~taken)
        for layer, position in pairs:
            table.extend((number, layer, position))
    return LayerChunks(result, table)


class Plan:
    """What one read wants from one segment: columns of its row chunks, times layers of its layer chunks."""

    def __init__(self, ref: SegmentRef, segment: OpenSegment, layers: tuple[int, ...], keep: bool) -> None:
        self.ref = ref
        self.segment = segment
        self.keep = keep
        header = segment.header
        self.per_chunk = header.geometry.rows_per_chunk
        self.top_k = header.config.top_k
        self.layer_chunks, self.layer_table = _layer_chunks(
            layers, header.geometry.layers_per_chunk, header.config.num_layers
        )
        self.row_copies: dict[int, list[RowCopy]] = {}
        #: The encoded chunks, where they were fetched before.
        self.encoded: dict[int, memoryview] = {}

    def fetch(self, numbers: Sequence[int]) -> Iterator[memoryview]:
        """The encoded chunks, in order."""
        if self.encoded:
            return map(self.encoded.pop, numbers)
        source, index = self.segment.source, self.segment.index
        if source is None:
            raise self.segment.decoder.missing(*self.segment.decoder.position(numbers[0]))
        return source.read_many([(index.offsets[number], index.lengths[number]) for number in numbers])

    @property
    def takes_round_trips(self) -> bool:
        """Whether fetching chunks waits for a server, so that several plans' are better fetched at the same time."""
        return self.segment.source is not None and self.segment.source.kind == "object"

    def fetch_ahead(self, numbers: Sequence[int]) -> None:
        """Fetch encoded chunks now, all of them."""
        self.encoded = dict(zip(numbers, self.fetch(numbers), strict=True))

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

    def layer_chunk(self, number: int) -> LayerChunk:
        return self.layer_chunks[number // self.segment.row_chunks]

    def row_table(self, numbers: Sequence[int]) -> list[int]:
        """What is wanted along rows of some chunks: ``row chunk, column, column of the output, columns`` for each
        copy, ordered, for the native decoder."""
        row_chunks, row_copies = self.segment.row_chunks, self.row_copies
        return [
            value
            for chunk in sorted({number % row_chunks for number in numbers})
            for start, stop, to_start, _ in row_copies[chunk]
            for value in (chunk, start, to_start, stop - start)
        ]

    def place(self, number: int, block: Array, out: Array) -> None:
        """Copy what is wanted of a decoded chunk to where it goes."""
        layer_chunk, row_chunk = divmod(number, self.segment.row_chunks)
        _, layers, to_layers, _, _ = self.layer_chunks[layer_chunk]
        for start, stop, to_start, to_stop in self.row_copies[row_chunk]:
            out[to_layers, to_start:to_stop] = block[layers, start:stop]

    def kept(self) -> dict[int, int]:
        """Which chunks the cache is to keep after this read, by their position along layers, and of which layers.

        Those that were not wanted now will be, layer by layer. Where all were, rows are: if this read took a few
        of one chunk, the next one may take its neighbours; the edges of a longer range are not worth keeping.
        """
        if not (self.keep and chunk_cache.accepts(self.segment.decoder.chunk_bytes)):
            return {}
        if len(self.row_copies) > 1:
            always = 0
        else:
            (copies,) = self.row_copies.values()
            taken = sum(stop - start for start, stop, _, _ in copies)
            always = ALWAYS if taken < min(self.per_chunk, self.segment.header.rows) * self.top_k else 0
        kept = {chunk.number: chunk.others or always for chunk in self.layer_chunks.values()}
        return {number: layers for number, layers in kept.items() if layers}
