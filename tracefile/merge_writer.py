"""Writes the segment that takes the place of others: encoded chunks are copied as they are, and checked on the way."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import TYPE_CHECKING, Any, TypeAlias

from tracefile.encode import EncodedChunk
from tracefile.errors import DamagedTraceError, SegmentMissingError, StoreError
from tracefile.format import SHARD_NAME, new_segment_id, segment_path
from tracefile.merge import Block, SameRows, merged_header
from tracefile.publish import building, this_writer, write_document
from tracefile.segments import OpenSegment
from tracefile.shard import CRC_BYTES
from tracefile.shard_file import ShardFile
from tracefile.source import merge_ranges
from tracefile.store import read_segment_header, store_for
from tracefile.survey import union

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tracefile.metadata import SegmentHeader, TraceHeader

#: Segments, and where those of their rows that are kept lie in the merged one.
Sources: TypeAlias = "Sequence[tuple[SegmentHeader, Sequence[Block]]]"


class ChangedError(Exception):
    """Somebody else replaced or deleted a segment that was to be merged, or wants rows that were to be dropped."""


class RefusedError(Exception):
    """A segment is damaged."""

    def __init__(self, segment: str, message: str) -> None:
        super().__init__(segment, message)
        self.segment = segment
        self.message = message


class MergeWriter:
    """Merges segments of one trace.

    Parameters
    ----------
    path : str
    header : TraceHeader
    durable : bool
        Flush to the disk before a segment becomes visible, and its name after.
    chunks_of : callable
        The chunks along rows of a segment that are to be kept.
    is_listed : callable
        Whether the revision of a sample that was committed with a segment is worth listing.
    on_copied : callable
        Called with the bytes of each chunk that was copied.
    """

    def __init__(
        self,
        path: str,
        header: TraceHeader,
        *,
        durable: bool,
        chunks_of: Callable[[SegmentHeader], Sequence[int]],
        is_listed: Callable[[str, str], bool],
        on_copied: Callable[[int], None],
    ) -> None:
        self._path = path
        self._header = header
        self._store = store_for(path)
        self._durable = durable
        self._chunks_of = chunks_of
        self._is_listed = is_listed
        self._on_copied = on_copied

    def write(
        self, group: Sequence[SegmentHeader], known: Iterable[SegmentHeader], check: Callable[[Sources], None]
    ) -> SegmentHeader:
        """Publish the segment that takes the place of a group.

        Parameters
        ----------
        group : sequence of SegmentHeader
            In the order of their ids; see :func:`tracefile.merge.merged_header`.
        known : iterable of SegmentHeader
            Segments that say where rows moved before.
        check : callable
            Called right before it is published. What it raises is raised, and nothing is published.

        Raises
        ------
        RefusedError, ChangedError, PublishError, StoreError
        """
        path, segment = self._path, new_segment_id()
        with building(path, segment) as build:
            first = next((header for header in group if header.rows), group[0])
            shard_path = os.path.join(build, SHARD_NAME)
            with ShardFile(shard_path, segment, first.geometry, self._header.config.num_layers, self._durable) as shard:
                same = SameRows()
                sources = [(header, list(self._copy(header, shard, same))) for header in group]
            merged = merged_header(
                segment,
                sources,
                rows=shard.rows,
                shard_bytes=shard.nbytes,
                known=known,
                is_listed=self._is_listed,
                writer=_writer(group),
                replaces=[header.id for header in group],
            )
            write_document(build, merged, durable=self._durable)
            self._store.upload(path, segment, build)  # which takes time, so before the last look
            check(sources)
            self._store.publish(path, segment, build, durable=self._durable)
        check_published(path, self._header, merged)
        return merged

    def _copy(self, header: SegmentHeader, shard: ShardFile, same: SameRows) -> Iterator[Block]:
        """Copy a segment's chunks; where its rows lie then."""
        if not header.rows:
            return
        with self._refusing(header):
            opened = OpenSegment(self._path, self._header, header.id, "pread")
        size, names = header.geometry.rows_per_chunk, same.names(header)
        wanted = self._chunks_of(header)
        for known, numbers in itertools.groupby(wanted, key=lambda number: same.find(names[number])):
            if known is not None:
                for number in numbers:
                    first, rows = known
                    stop = min(number * size + rows, header.rows)
                    yield Block(number * size, stop, first, copied=False)
                continue
            for low, high in union((number, number + 1) for number in numbers):
                start, stop = low * size, min(high * size, header.rows)
                first = shard.write_rows(stop - start, self._encoded(header, opened, low, high))
                for number in range(low, high):
                    same.note(names[number], first + (number - low) * size, min(size, stop - number * size))
                yield Block(start, stop, first)

    def _encoded(self, header: SegmentHeader, opened: OpenSegment, low: int, high: int) -> Iterator[EncodedChunk]:
        """The chunks along rows ``[low, high)`` of a segment, of all layers."""
        layer_chunks, row_chunks = header.grid
        chunks = _sound_chunks(
            opened, [layer * row_chunks + row for row in range(low, high) for layer in range(layer_chunks)]
        )
        while True:
            with self._refusing(header):
                found = next(chunks, None)
            if found is None:
                return
            number, encoded = found
            self._on_copied(len(encoded))
            yield EncodedChunk(number // row_chunks, bytes(encoded[:-CRC_BYTES]), bytes(encoded[-CRC_BYTES:]))

    @contextlib.contextmanager
    def _refusing(self, header: SegmentHeader) -> Iterator[None]:
        """While a segment is read: what is wrong with it, as what that means for the merge."""
        try:
            yield
        except StoreError:
            raise
        except SegmentMissingError:
            if self._store.is_gone(self._path, header.id):
                raise ChangedError from None
            message = f"{segment_path(self._path, header.id)} has no shard file; restore it"
            raise RefusedError(header.id, message) from None
        except (DamagedTraceError, OSError) as error:
            raise RefusedError(header.id, str(error)) from error


def check_published(path: str, header: TraceHeader, merged: SegmentHeader) -> None:
    """See that what others are deleted for is there, as far as a look at it tells.

    Raises
    ------
    SegmentMissingError, MetadataDamagedError, OSError
        It is not.
    """
    found = read_segment_header(path, header, merged.id)
    where = os.path.join(segment_path(path, merged.id), SHARD_NAME)
    if found.replaces != merged.replaces or (merged.rows and store_for(path).size(where) != merged.shard_bytes):
        raise SegmentMissingError(f"{where} is not as it was published", path=where, segment=merged.id)


def _sound_chunks(segment: OpenSegment, numbers: Sequence[int]) -> Iterator[tuple[int, memoryview]]:
    """Chunks of a segment, each with its checksum, checked, in the order in which they are asked for.

    Holds one merged read at a time.
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


def _writer(group: Sequence[SegmentHeader]) -> dict[str, Any]:
    created = [header.writer["created"] for header in group if "created" in header.writer]
    writer = this_writer()
    compacted = writer.pop("created")
    return {**writer, **({"created": max(created)} if created else {}), "compacted": compacted}
