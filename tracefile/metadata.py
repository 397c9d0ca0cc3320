"""What the documents of a trace say: what it is, what a segment holds, where a sample's rows are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefile.format import ChunkGeometry, CodecName, ModelConfig


@dataclass(frozen=True, slots=True)
class Span:
    """Rows ``[start, stop)`` of one segment."""

    segment: str
    start: int
    stop: int


class WeightRange(NamedTuple):
    """Rows ``[start, stop)`` that were made under one version of the policy's weights; ``None``: not told."""

    start: int
    stop: int
    version: int | str | None


class Moved(NamedTuple):
    """Rows ``[start, stop)`` of ``segment``, which may be gone, lie from row ``first`` on in who says so."""

    segment: str
    start: int
    stop: int
    first: int


@dataclass(frozen=True, slots=True)
class SampleEntry:
    """One revision of a sample: its spans, in order, and the ranges of its rows that were never captured.

    ``origin`` is the segment that this revision was committed with, where another lists it since; which revision is
    the newest goes by that.
    """

    id: str
    spans: tuple[Span, ...]
    missing: tuple[tuple[int, int], ...] = ()
    origin: str = ""

    @property
    def rows(self) -> int:
        return sum(span.stop - span.start for span in self.spans)


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """The root document: what a trace is."""

    uuid: str
    config: ModelConfig


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """A segment's document: its array, who wrote it, and the index of its samples."""

    id: str
    trace_uuid: str
    config: ModelConfig
    rows: int
    geometry: ChunkGeometry
    codec: CodecName
    shard_bytes: int
    samples: dict[str, SampleEntry]
    writer: dict[str, Any] = field(default_factory=dict)
    weight_versions: tuple[WeightRange, ...] = ()
    findings: tuple[dict[str, Any], ...] = ()  # signs of a bad capture, as CaptureFinding.as_json gives them
    deleted: dict[str, str] = field(default_factory=dict)  # samples, and the segments that they were deleted with
    moved: tuple[Moved, ...] = ()  # rows of segments that this one replaces
    replaces: tuple[str, ...] = ()  # segments of which nothing is needed any more

    @property
    def grid(self) -> tuple[int, int]:
        """Chunks along layers and along rows."""
        return self.geometry.layer_chunks(self.config.num_layers), self.geometry.row_chunks(self.rows)

    def origin_of(self, entry: SampleEntry) -> str:
        """The segment that a revision which this segment lists was committed with."""
        return entry.origin or self.id

    def versions_of(self, span: Span) -> Iterator[WeightRange]:
        """The weight versions of a span of this segment, as ranges from its first row."""
        return _versions_within(self, span)


def _versions_within(header: SegmentHeader, span: Span) -> Iterator[WeightRange]:
    position = span.start
    for start, stop, version in header.weight_versions:
        start, stop = max(start, span.start), min(stop, span.stop)
        if start >= stop:
            continue
        if position < start:
            yield WeightRange(position - span.start, start - span.start, None)
        yield WeightRange(start - span.start, stop - span.start, version)
        position = stop
    if position < span.stop:
        yield WeightRange(position - span.start, span.stop - span.start, None)
