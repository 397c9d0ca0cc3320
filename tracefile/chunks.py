"""Encoded chunks of a shard file, checked as they are read, for what copies them as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefile.source import merge_ranges

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracefile.segments import OpenSegment


def sound_chunks(segment: OpenSegment, numbers: Sequence[int]) -> Iterator[tuple[int, memoryview]]:
    """Chunks of a segment, each with its checksum, in the order in which they are asked for.

    Holds one merged read at a time.

    Raises
    ------
    ChunkDamagedError, ChunkMissingError, SegmentMissingError, ShardDamagedError
    """
    source, index, decoder = segment.source, segment.index, segment.decoder
    for number in numbers:
        if not index.lengths[number]:
            raise decoder.missing(*decoder.position(number))
    places = [(index.offsets[number], index.lengths[number]) for number in numbers]
    assert source is not None or not places
    for first, last, start, stop in merge_ranges(places):
        assert source is not None
        block = source.read(start, stop - start)
        for number, (offset, length) in zip(numbers[first:last], places[first:last], strict=True):
            encoded = block[offset - start : offset - start + length]
            decoder.check(number, encoded)
            yield number, encoded
