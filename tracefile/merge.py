"""What a segment says that takes the place of others. Pure: documents in, a document out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tracefile.metadata import Moved, SampleEntry, SegmentHeader, WeightRange
from tracefile.moved import Relocations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


class Block(NamedTuple):
    """Rows ``[start, stop)`` of a segment lie from row ``first`` of the merged one on.

    ``copied`` is false where they are the same rows as others that were copied.
    """

    start: int
    stop: int
    first: int
    copied: bool = True


class SameRows:
    """Finds rows that several segments have, since each was merged from the same ones, in chunks along rows.

    That happens where two processes compact a trace at the same time.
    """

    def __init__(self) -> None:
        self._placed: dict[tuple[str, int], tuple[int, int]] = {}  # the first row of a chunk: its place, and rows

    def names(self, header: SegmentHeader) -> list[list[tuple[str, int]]]:
        """For each chunk along rows: what else its first row was called."""
        size = header.geometry.rows_per_chunk
        names = [[(header.id, first)] for first in range(0, header.rows, size)]
        for moved in header.moved:
            if moved.first % size == 0:
                for row in range(moved.first, moved.first + moved.stop - moved.start, size):
                    names[row // size].append((moved.segment, moved.start + row - moved.first))
        return names

    def find(self, names: Iterable[tuple[str, int]]) -> tuple[int, int] | None:
        return next((self._placed[name] for name in names if name in self._placed), None)

    def note(self, names: Iterable[tuple[str, int]], first: int, rows: int) -> None:
        self._placed.update(dict.fromkeys(names, (first, rows)))


def moves_of(sources: Sequence[tuple[SegmentHeader, Sequence[Block]]]) -> tuple[Moved, ...]:
    """Where the rows of merged segments, and those that had moved into these before, lie in the merged one."""
    moved: dict[Moved, None] = {}
    for header, blocks in sources:
        for block in blocks:
            moved[Moved(header.id, block.start, block.stop, block.first)] = None
        for earlier in header.moved:
            shift = earlier.start - earlier.first
            for block in blocks:
                low = max(earlier.first, block.start)
                high = min(earlier.first + earlier.stop - earlier.start, block.stop)
                if low < high:
                    moved[Moved(earlier.segment, low + shift, high + shift, block.first + low - block.start)] = None
    return tuple(moved)


def versions_of(sources: Sequence[tuple[SegmentHeader, Sequence[Block]]]) -> tuple[WeightRange, ...]:
    """The weight versions of merged segments, for the rows that were copied."""
    found: list[WeightRange] = []
    for header, blocks in sources:
        for start, stop, version in header.weight_versions:
            for block in blocks:
                low, high = max(start, block.start), min(stop, block.stop)
                if block.copied and low < high:
                    shift = block.first - block.start
                    found.append(WeightRange(low + shift, high + shift, version))
    joined: list[WeightRange] = []
    for each in sorted(found, key=lambda each: each.start):
        if joined and joined[-1].stop == each.start and joined[-1].version == each.version:
            joined[-1] = WeightRange(joined[-1].start, each.stop, each.version)
        else:
            joined.append(each)
    return tuple(joined)


def deletions(headers: Iterable[SegmentHeader]) -> dict[str, str]:
    """The samples that segments delete, and with which segment that was done last."""
    deleted: dict[str, str] = {}
    for header in headers:
        for sample, origin in header.deleted.items():
            deleted[sample] = max(origin or header.id, deleted.get(sample, ""))
    return deleted


def merged_header(
    segment: str,
    sources: Sequence[tuple[SegmentHeader, Sequence[Block]]],
    *,
    rows: int,
    shard_bytes: int,
    known: Iterable[SegmentHeader],
    is_listed: Callable[[str, str], bool],
    writer: Mapping[str, Any],
    replaces: Sequence[str],
) -> SegmentHeader:
    """The document of the segment that takes the place of ``sources``.

    Parameters
    ----------
    segment : str
        Its id.
    sources : sequence of (SegmentHeader, sequence of Block)
        In the order of their ids; of one configuration, codec and, but for those without rows, geometry.
    rows, shard_bytes : int
        What was copied.
    known : iterable of SegmentHeader
        Segments that say where rows moved before.
    is_listed : callable
        Whether the revision of a sample that was committed with a segment is worth listing.
    writer, replaces
        As the document has them.
    """
    first = next((header for header, _ in sources if header.rows), sources[0][0])
    moved = moves_of(sources)
    relocations = Relocations([*((header.id, header.moved) for header in known), (segment, moved)])
    newest: dict[str, tuple[SegmentHeader, SampleEntry]] = {}
    for header, entry in _entries(sources):
        known_entry = newest.get(entry.id)
        if is_listed(entry.id, header.origin_of(entry)) and (
            known_entry is None or known_entry[0].origin_of(known_entry[1]) < header.origin_of(entry)
        ):
            newest[entry.id] = header, entry
    samples = {}
    for sample, (header, entry) in newest.items():
        spans = tuple(piece for span in entry.spans for piece in relocations.resolve(span))
        samples[sample] = replace(entry, spans=spans, origin=header.origin_of(entry))
    findings = [
        finding
        for header, _ in sources
        for finding in header.findings
        if finding.get("sample") in newest and newest[finding["sample"]][0] is header
    ]
    return SegmentHeader(
        segment,
        first.trace_uuid,
        first.config,
        rows,
        first.geometry,
        first.codec,
        shard_bytes,
        samples,
        dict(writer),
        versions_of(sources),
        tuple(findings),
        deletions(header for header, _ in sources),
        moved,
        tuple(replaces),
    )


def _entries(
    sources: Sequence[tuple[SegmentHeader, Sequence[Block]]],
) -> Iterator[tuple[SegmentHeader, SampleEntry]]:
    for header, _ in sources:
        for entry in header.samples.values():
            yield header, entry
