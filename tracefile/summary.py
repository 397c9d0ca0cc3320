"""The facts of a trace: what it holds, who wrote it, and what it costs on disk.

All of it comes from documents, chunk indexes and file sizes; no routing is read.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tracefile.errors import DamagedTraceError, SegmentMissingError, ShardDamagedError, TraceError
from tracefile.format import METADATA_NAME, SHARD_NAME, segment_path
from tracefile.runs import TraceRef
from tracefile.segments import segment_pool
from tracefile.store import store_for, unfinished
from tracefile.survey import absence, count_rows
from tracefile.validate import CaptureFinding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tracefile.metadata import SampleEntry, SegmentHeader
    from tracefile.survey import Range, Survey


@dataclass(slots=True)
class WriterFacts:
    """What one writing process committed; ``first`` and ``last`` are seconds since the epoch."""

    host: str
    pid: int | None
    version: str
    segments: int = 0
    samples: int = 0
    rows: int = 0
    first: float | None = None
    last: float | None = None

    def add(self, header: SegmentHeader) -> None:
        self.segments += 1
        self.samples += len(header.samples)
        self.rows += own_rows(header)
        created = header.writer.get("created")
        if isinstance(created, int | float):
            self.first = created if self.first is None else min(self.first, created)
            self.last = created if self.last is None else max(self.last, created)


@dataclass(frozen=True, slots=True)
class GeometryFacts:
    """A chunk geometry, and how many segments have it."""

    layers_per_chunk: int
    rows_per_chunk: int
    top_k: int
    chunk_bytes: int
    segments: int


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """One sample in its newest revision."""

    id: str
    rows: int
    missing_rows: int
    segments: list[str]


@dataclass(frozen=True, slots=True)
class LengthFacts:
    """The distribution of the samples' rows; ``edges`` has one more item than ``counts``, the last is inclusive."""

    min: int
    median: float
    p90: float
    max: int
    mean: float
    edges: list[int]
    counts: list[int]


@dataclass(slots=True)
class TraceFacts:
    """What a trace is, without reading any routing.

    Attributes
    ----------
    rows, missing_rows : int
        Over the newest revision of every sample. Missing rows were never captured.
    rows_seen, rows_stored : int
        Rows of all revisions of all samples, as they were appended, and the rows that are stored for them.
    superseded : int
        Older revisions of samples.
    unreachable_rows : int
        Stored rows that only older revisions have, or none that is listed any more.
    bytes_int32, bytes_narrow, bytes_stored, bytes_metadata : int
        ``rows`` as int32 and in the stored width, before compression; shard files and documents as they are.
    damaged : dict of str to str
        Segments that are visibly damaged, and why.
    findings : list of CaptureFinding
        Signs of a bad capture that the writers recorded, of the newest revisions.
    """

    path: str
    uuid: str
    model: dict[str, Any]
    samples: list[SampleFacts]
    rows: int
    missing_rows: int
    lengths: LengthFacts | None
    segments: int
    rows_seen: int
    rows_stored: int
    superseded: int
    unreachable_rows: int
    bytes_int32: int
    bytes_narrow: int
    bytes_stored: int
    bytes_metadata: int
    writers: list[WriterFacts]
    codecs: dict[str, int]
    geometries: list[GeometryFacts]
    unfinished: list[str]
    damaged: dict[str, str]
    vanished: list[str]
    findings: list[CaptureFinding]

    @property
    def ratio(self) -> float | None:
        """How many times smaller the shard files are than the samples' rows as int32."""
        return self.bytes_int32 / self.bytes_stored if self.bytes_stored else None

    def as_dict(self, *, list_samples: bool = False) -> dict[str, Any]:
        """The facts as plain JSON values."""
        return {
            "path": self.path,
            "uuid": self.uuid,
            "model": self.model,
            "samples": len(self.samples),
            "rows": self.rows,
            "missing_rows": self.missing_rows,
            "samples_with_missing_rows": sum(sample.missing_rows > 0 for sample in self.samples),
            "lengths": None if self.lengths is None else asdict(self.lengths),
            "segments": self.segments,
            "rows_seen": self.rows_seen,
            "rows_stored": self.rows_stored,
            "superseded": {"revisions": self.superseded, "unreachable_rows": self.unreachable_rows},
            "bytes": {
                "int32": self.bytes_int32,
                "narrow": self.bytes_narrow,
                "stored": self.bytes_stored,
                "metadata": self.bytes_metadata,
                "ratio": self.ratio,
            },
            "writers": [asdict(writer) for writer in self.writers],
            "codecs": self.codecs,
            "geometries": [asdict(geometry) for geometry in self.geometries],
            "unfinished": self.unfinished,
            "damaged": [{"segment": segment, "message": why} for segment, why in sorted(self.damaged.items())],
            "vanished": self.vanished,
            "findings": [finding.as_json() for finding in self.findings],
            **({"sample_list": [asdict(sample) for sample in self.samples]} if list_samples else {}),
        }


def capture_findings(survey: Survey) -> list[CaptureFinding]:
    """The signs of a bad capture that writers recorded of the newest revision of every sample."""
    newest = survey.samples()
    return [
        CaptureFinding.from_json(finding)
        for segment, header in survey.segments.items()
        for finding in header.findings
        if finding["sample"] in newest and newest[finding["sample"]].listed_in == segment
    ]


def own_rows(header: SegmentHeader) -> int:
    """Rows of samples that a segment holds; the gaps up to chunk boundaries are none."""
    spans = [
        (span.start, span.stop)
        for entry in header.samples.values()
        for span in entry.spans
        if span.segment == header.id
    ]
    return count_rows(spans) + _unlisted_rows(header, spans)


def _unlisted_rows(header: SegmentHeader, held: Iterable[Range]) -> int:
    """Rows of older revisions that compaction moved into a segment, in chunks without rows that are held."""
    size = header.geometry.rows_per_chunk
    chunks = [(start // size * size, -(-stop // size) * size) for start, stop in held if start < stop]
    moved = [(each.first, each.first + each.stop - each.start) for each in header.moved]
    return count_rows([*chunks, *moved]) - count_rows(chunks)


def summarize(survey: Survey) -> TraceFacts:
    """Gather the facts of the trace that was surveyed. Reads no routing."""
    config = survey.header.config
    damaged = {segment: error.message for segment, error in survey.damaged.items()}
    damaged.update((segment, absence(survey, segment)) for segment in survey.absent())
    vanished = list(survey.vanished)
    stored = documents = 0
    for (segment, header), (document, shard) in zip(survey.segments.items(), _file_sizes(survey), strict=True):
        try:
            documents += _size(document)
            stored += _shard_size(survey, header, shard)
        except (DamagedTraceError, OSError) as error:
            if survey.is_gone(segment):
                vanished.append(segment)
            else:
                damaged[segment] = str(error)
    samples = [sample_facts(survey, revision.entry) for revision in survey.samples().values()]
    rows = sum(sample.rows for sample in samples)
    superseded, unreachable = _superseded(survey)
    return TraceFacts(
        path=survey.path,
        uuid=survey.header.uuid,
        model=config.as_json() | {"dtype": config.dtype.name},
        samples=samples,
        rows=rows,
        missing_rows=sum(sample.missing_rows for sample in samples),
        lengths=length_facts([sample.rows for sample in samples]),
        segments=len(survey.segments) + len(survey.damaged),
        rows_seen=sum(revision.entry.rows for revision in survey.revisions()),
        rows_stored=sum(map(own_rows, survey.segments.values())),
        superseded=superseded,
        unreachable_rows=unreachable,
        bytes_int32=rows * config.num_layers * config.top_k * 4,
        bytes_narrow=rows * config.row_bytes,
        bytes_stored=stored,
        bytes_metadata=documents,
        writers=_writers(survey),
        codecs=dict(Counter(header.codec for header in survey.segments.values()).most_common()),
        geometries=_geometries(survey),
        unfinished=list(unfinished(survey.path)),
        damaged=damaged,
        vanished=vanished,
        findings=capture_findings(survey),
    )


def _file_sizes(survey: Survey) -> Iterator[tuple[int | OSError, int | OSError]]:
    """Of each segment: the bytes of its document and of its shard file, or why they are not known."""
    paths = []
    for segment, header in survey.segments.items():
        directory = segment_path(survey.path, segment)
        paths += [os.path.join(directory, METADATA_NAME)] + [os.path.join(directory, SHARD_NAME)] * bool(header.rows)
    found = iter(store_for(survey.path).sizes(paths))
    for header in survey.segments.values():
        yield next(found), next(found) if header.rows else 0


def _size(found: int | OSError) -> int:
    if isinstance(found, OSError):
        raise found
    return found


def _shard_size(survey: Survey, header: SegmentHeader, found: int | OSError) -> int:
    path = os.path.join(segment_path(survey.path, header.id), SHARD_NAME)
    try:
        size = _size(found)
    except FileNotFoundError:
        raise SegmentMissingError(f"{path} is gone; restore it", path=path, segment=header.id) from None
    if header.rows and size != header.shard_bytes:
        raise ShardDamagedError(
            f"{path} has {size} bytes, and was published with {header.shard_bytes}; restore it",
            path=path,
            segment=header.id,
        )
    return size


def _superseded(survey: Survey) -> tuple[int, int]:
    """Older revisions, and the stored rows that only they have."""
    older = sum(revision.superseded for revision in survey.revisions())
    if not older and not any(header.moved for header in survey.segments.values()):
        return 0, 0
    unreachable = 0
    held = survey.holdings()
    for segment, header in survey.segments.items():
        holdings = held.get(segment, [])
        rows = [(each.start, each.stop) for each in holdings]
        unreachable += count_rows(rows) + _unlisted_rows(header, rows)
        unreachable -= count_rows((each.start, each.stop) for each in holdings if not each.superseded)
    return older, unreachable


def _writers(survey: Survey) -> list[WriterFacts]:
    writers: dict[tuple[str, int | None, str], WriterFacts] = {}
    for header in survey.segments.values():
        pid = header.writer.get("pid")
        key = (
            str(header.writer.get("host", "?")),
            pid if isinstance(pid, int) else None,
            str(header.writer.get("version", "?")),
        )
        writers.setdefault(key, WriterFacts(*key)).add(header)
    return sorted(writers.values(), key=lambda writer: (-writer.rows, writer.host, writer.pid or 0))


def _geometries(survey: Survey) -> list[GeometryFacts]:
    config = survey.header.config
    number = Counter(header.geometry for header in survey.segments.values() if header.rows)
    return [
        GeometryFacts(each.layers_per_chunk, each.rows_per_chunk, config.top_k, each.chunk_bytes(config), segments)
        for each, segments in number.most_common()
    ]


def sample_facts(survey: Survey, entry: SampleEntry) -> SampleFacts:
    """The facts of one sample."""
    missing = sum(stop - start for start, stop in entry.missing)
    segments = list(dict.fromkeys(span.segment for span in survey.spans_of(entry)))
    return SampleFacts(entry.id, entry.rows, missing, segments)


def length_facts(lengths: list[int], bins: int = 8) -> LengthFacts | None:
    """The distribution of ``lengths`` in at most ``bins`` bins with round edges; ``None`` without any.

    Examples
    --------
    >>> length_facts([0, 3, 511, 511]).edges
    [0, 100, 200, 300, 400, 500, 600]
    """
    if not lengths:
        return None
    low, high = min(lengths), max(lengths)
    width = _round_width((high - low + 1) / bins)
    while (high // width) - (low // width) + 1 > bins:
        width = _round_width(width + 1)
    edges = list(range(low // width * width, (high // width + 1) * width + 1, width))
    counts, _ = np.histogram(lengths, edges)
    values = np.asarray(lengths)
    median, p90 = np.percentile(values, [50, 90]).tolist()
    return LengthFacts(low, median, p90, high, float(values.mean()), edges, counts.tolist())


def _round_width(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that is at least ``least``."""
    scale = 1
    while True:
        for factor in (1, 2, 5):
            if factor * scale >= least:
                return factor * scale
        scale *= 10


@dataclass(frozen=True, slots=True)
class SpanFacts:
    """One span of a sample: rows of a segment, and the encoded bytes of the chunks that they lie in."""

    segment: str
    start: int
    stop: int
    chunks: int | None
    bytes: int | None


def span_facts(survey: Survey, entry: SampleEntry, damaged: dict[str, str]) -> list[SpanFacts]:
    """The spans of a sample. What cannot be opened is added to ``damaged``."""
    ref = pread_reference(survey)
    found = []
    for span in survey.spans_of(entry):
        chunks = size = None
        try:
            opened = segment_pool.get(ref, survey.header.config, span.segment)
        except (TraceError, OSError) as error:
            damaged.setdefault(span.segment, str(error))
        else:
            layer_chunks, row_chunks = opened.header.grid
            geometry = opened.header.geometry
            rows = range(span.start // geometry.rows_per_chunk, min(geometry.row_chunks(span.stop), row_chunks))
            numbers = [layer * row_chunks + row for layer in range(layer_chunks) for row in rows]
            chunks, size = len(numbers), sum(opened.index.lengths[number] for number in numbers)
        found.append(SpanFacts(span.segment, span.start, span.stop, chunks, size))
    segment_pool.close(ref)
    return found


def pread_reference(survey: Survey) -> TraceRef:
    """Names the trace for reading what may be damaged: a bad sector under a mapping is a signal, not an error."""
    return TraceRef(survey.path, survey.header.uuid, "pread")
