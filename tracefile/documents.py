"""The ``zarr.json`` documents of a trace, made and read. Pure: dictionaries in, dictionaries out.

The documents are plain Zarr v3. What is ours lies under the attribute ``"tracefile"``. Each document
carries a crc32c of the fields that the reader relies on, because a flipped digit in the index of samples
would otherwise be another sample's rows, silently.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from crc32c import crc32c

from tracefile.errors import FormatVersionError, MetadataDamagedError, OptionError
from tracefile.format import (
    CODECS,
    CONVENTION_UUID,
    FORMAT_VERSION,
    ChunkGeometry,
    CodecName,
    ModelConfig,
    is_count,
    is_segment_id,
    normalize_ranges,
)
from tracefile.metadata import Moved, SampleEntry, SegmentHeader, Span, TraceHeader, WeightRange

if TYPE_CHECKING:
    from collections.abc import Mapping


def checksum(document: Mapping[str, Any]) -> int:
    """Of the whole document but for other people's attributes. Every format version keeps this rule."""
    ours = {k: v for k, v in document["attributes"]["tracefile"].items() if k != "crc32c"}
    checked = {k: v for k, v in document.items() if k != "attributes"}
    return int(crc32c(json.dumps([checked, ours], sort_keys=True, separators=(",", ":")).encode("ascii")))


def sealed(document: dict[str, Any]) -> dict[str, Any]:
    """The document with its checksum."""
    document["attributes"]["tracefile"]["crc32c"] = checksum(document)
    return document


def encode(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode("ascii")


def _decode(raw: bytes, where: str, segment: str | None = None) -> dict[str, Any]:
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise MetadataDamagedError(
            f"{where} is not JSON ({error}); restore the file", path=where, segment=segment
        ) from None
    if not isinstance(document, dict) or document.get("zarr_format") != 3:
        raise MetadataDamagedError(f"{where} is not a Zarr v3 document; restore the file", path=where, segment=segment)
    return document


def is_another_node(raw: bytes) -> bool:
    """Whether a ``zarr.json`` is a whole Zarr document that tracefile did not write, and not one of ours, damaged."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "zarr_format" in document and b'"tracefile"' not in raw


def _attributes(document: Mapping[str, Any], where: str, segment: str | None = None) -> dict[str, Any]:
    attributes = document.get("attributes")
    ours = attributes.get("tracefile") if isinstance(attributes, dict) else None
    if not isinstance(ours, dict):
        raise MetadataDamagedError(
            f"{where} has no tracefile attributes: not written by tracefile", path=where, segment=segment
        )
    if ours.get("crc32c") != checksum(document):
        raise MetadataDamagedError(
            f"{where} fails its checksum: it was damaged or edited; restore the file", path=where, segment=segment
        )
    version = ours.get("format")
    if version != FORMAT_VERSION:
        raise FormatVersionError(
            f"{where} has format version {version}; this release reads {FORMAT_VERSION}: upgrade tracefile",
            path=where,
            segment=segment,
        )
    return ours


def _config(ours: Mapping[str, Any], where: str) -> ModelConfig:
    try:
        return ModelConfig(
            ours["num_layers"], ours["top_k"], ours["num_experts"], tuple(int(i) for i in ours["layer_ids"])
        )
    except (KeyError, TypeError, ValueError, OptionError) as error:
        raise MetadataDamagedError(f"{where} has no sound model configuration: {error}", path=where) from None


def group_document(header: TraceHeader | None = None) -> dict[str, Any]:
    """The document of the root group, or of the plain group ``segments``."""
    document: dict[str, Any] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    if header is None:
        return document
    document["attributes"] = {
        "zarr_conventions": [
            {
                "uuid": CONVENTION_UUID,
                "name": "tracefile",
                "description": "Routed experts of MoE rollouts: samples as row ranges of [layer, token, topk] arrays",
            }
        ],
        "tracefile": {"format": FORMAT_VERSION, "uuid": header.uuid, **header.config.as_json()},
    }
    return sealed(document)


def parse_trace_header(raw: bytes, where: str) -> TraceHeader:
    """Read the root document of a trace.

    Raises
    ------
    MetadataDamagedError, FormatVersionError
    """
    document = _decode(raw, where)
    ours = _attributes(document, where)
    uuid = ours.get("uuid")
    if document.get("node_type") != "group" or not isinstance(uuid, str):
        raise MetadataDamagedError(f"{where} does not describe a trace", path=where)
    return TraceHeader(uuid, _config(ours, where))


def _array_fields(config: ModelConfig, rows: int, geometry: ChunkGeometry, codec: CodecName) -> dict[str, Any]:
    bytes_codec: dict[str, Any] = {"name": "bytes"}
    if config.dtype.itemsize > 1:
        bytes_codec["configuration"] = {"endian": "little"}
    inner = [bytes_codec]
    blosc = CODECS[codec]
    if blosc is not None:
        inner.append(
            {
                "name": "blosc",
                "configuration": {
                    "cname": blosc.cname,
                    "clevel": blosc.clevel,
                    "shuffle": blosc.shuffle,
                    "typesize": blosc.typesize,
                    "blocksize": 0,
                },
            }
        )
    inner.append({"name": "crc32c"})
    chunk_shape = [geometry.layers_per_chunk, geometry.rows_per_chunk, config.top_k]
    shard_shape = [
        geometry.layer_chunks(config.num_layers) * geometry.layers_per_chunk,
        max(1, geometry.row_chunks(rows)) * geometry.rows_per_chunk,
        config.top_k,
    ]
    return {
        "shape": [config.num_layers, rows, config.top_k],
        "data_type": config.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard_shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": config.fill_value,
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": chunk_shape,
                    "codecs": inner,
                    "index_codecs": [
                        {"name": "bytes", "configuration": {"endian": "little"}},
                        {"name": "crc32c"},
                    ],
                    "index_location": "end",
                },
            }
        ],
    }


def segment_document(header: SegmentHeader) -> dict[str, Any]:
    """The Zarr v3 array document of a segment."""
    references = sorted({s.segment for e in header.samples.values() for s in e.spans} - {header.id})
    number = {segment: i for i, segment in enumerate([header.id, *references])}
    samples = []
    for entry in header.samples.values():
        item: list[Any] = [entry.id, [[number[s.segment], s.start, s.stop] for s in entry.spans]]
        if entry.missing:
            item.append([list(r) for r in entry.missing])
        samples.append(item)
    optional: dict[str, Any] = {}
    if header.weight_versions:
        optional["weight_versions"] = [list(each) for each in header.weight_versions]
    if header.findings:
        optional["findings"] = list(header.findings)
    origins = [entry.origin for entry in header.samples.values()]
    if any(origins):
        optional["origins"] = [[origin, len(list(run))] for origin, run in itertools.groupby(origins)]
    if header.deleted:
        optional["deleted"] = [[sample, origin] for sample, origin in header.deleted.items()]
    if header.moved:
        optional["moved"] = [list(each) for each in header.moved]
    if header.replaces:
        optional["replaces"] = list(header.replaces)
    return sealed(
        {
            "zarr_format": 3,
            "node_type": "array",
            **_array_fields(header.config, header.rows, header.geometry, header.codec),
            "dimension_names": ["layer", "token", "topk"],
            "attributes": {
                "tracefile": {
                    "format": FORMAT_VERSION,
                    "trace": header.trace_uuid,
                    "segment": header.id,
                    "codec": header.codec,
                    "num_experts": header.config.num_experts,
                    "shard_bytes": header.shard_bytes,
                    "writer": header.writer,
                    "references": references,
                    "samples": samples,
                    **optional,
                }
            },
        }
    )


def parse_segment_header(raw: bytes, trace: TraceHeader, segment: str, where: str) -> SegmentHeader:
    """Read a segment's document, and check it against the trace it lies in and the name it has.

    Raises
    ------
    MetadataDamagedError, FormatVersionError
    """
    document = _decode(raw, where, segment)
    ours = _attributes(document, where, segment)

    def damaged(why: str) -> MetadataDamagedError:
        return MetadataDamagedError(f"{where}: {why}", path=where, segment=segment)

    if ours.get("segment") != segment:
        raise damaged(f"it describes segment {ours.get('segment')!r}: directories were renamed or swapped")
    if ours.get("trace") != trace.uuid:
        raise damaged(f"it belongs to trace {ours.get('trace')!r}, not to {trace.uuid!r}: copied in from elsewhere?")
    config = trace.config
    try:
        rows = document["shape"][1]
        chunk_shape = document["codecs"][0]["configuration"]["chunk_shape"]
        geometry = ChunkGeometry(chunk_shape[0], chunk_shape[1])
        codec = ours["codec"]
        expected = _array_fields(config, rows, geometry, codec)
        _take_blosc_tuning(expected, document)
        writer = ours.get("writer", {})
        sound = (
            isinstance(writer, dict)
            and is_count(rows)
            and ours["num_experts"] == config.num_experts
            and is_count(ours["shard_bytes"])
        )
        differing = [k for k, v in expected.items() if document.get(k) != v]
    except (KeyError, TypeError, IndexError, ValueError, OptionError) as error:
        raise damaged(f"not a segment's array ({error!r})") from None
    if differing or not sound:
        raise damaged(f"its array is not that of the trace's configuration ({config}): {', '.join(differing)}")
    try:
        samples = _parse_samples(ours, segment, rows, where)
        versions = _parse_weight_versions(ours, rows)
        deleted = _parse_deleted(ours, segment, samples)
        moved = _parse_moved(ours, segment, rows)
        replaces = tuple(ours.get("replaces", ()))
        if segment in replaces or not all(map(is_segment_id, replaces)):
            raise ValueError("what it replaces are not other segments")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise damaged(f"its index of samples is not sound ({error})") from None
    return SegmentHeader(
        segment,
        trace.uuid,
        config,
        rows,
        geometry,
        codec,
        ours["shard_bytes"],
        samples,
        writer,
        versions,
        tuple(ours.get("findings", ())),
        deleted,
        moved,
        replaces,
    )


def _take_blosc_tuning(expected: dict[str, Any], document: Mapping[str, Any]) -> None:
    """Let a document's Blosc settings be what they are: chunks say how they decode, and presets may be tuned."""
    inner = expected["codecs"][0]["configuration"]["codecs"]
    theirs = document["codecs"][0]["configuration"]["codecs"]
    if inner[1]["name"] == theirs[1]["name"] == "blosc":
        tuning = theirs[1]["configuration"]
        inner[1]["configuration"].update({key: tuning[key] for key in inner[1]["configuration"]})


def _parse_weight_versions(ours: Mapping[str, Any], rows: int) -> tuple[WeightRange, ...]:
    end = 0
    ranges = []
    for start, stop, version in ours.get("weight_versions", ()):
        if not (is_count(start) and is_count(stop) and end <= start < stop <= rows and isinstance(version, int | str)):
            raise ValueError(
                f"[{start}, {stop}) of weight version {version!r} is not an ordered range within {rows} rows"
            )
        ranges.append(WeightRange(start, stop, version))
        end = stop
    return tuple(ranges)


def _is_origin(origin: object) -> bool:
    return origin == "" or is_segment_id(origin)


def _parse_deleted(ours: Mapping[str, Any], segment: str, samples: Mapping[str, SampleEntry]) -> dict[str, str]:
    deleted: dict[str, str] = {}
    for sample, origin in ours.get("deleted", ()):
        if not (isinstance(sample, str) and _is_origin(origin)):
            raise ValueError(f"{sample!r} is deleted with {origin!r}, which is no segment")
        entry = samples.get(sample)
        if entry is not None and (entry.origin or segment) <= (origin or segment):
            raise ValueError(f"sample {sample!r} is listed and deleted")
        deleted[sample] = origin
    return deleted


def _parse_moved(ours: Mapping[str, Any], segment: str, rows: int) -> tuple[Moved, ...]:
    moved = []
    for old, start, stop, first in ours.get("moved", ()):
        sound = is_segment_id(old) and old != segment and is_count(start) and is_count(stop) and is_count(first)
        if not (sound and start < stop and first + stop - start <= rows):
            raise ValueError(f"rows {[start, stop]} of {old!r} do not lie at {first} of {rows} rows")
        moved.append(Moved(old, start, stop, first))
    return tuple(moved)


def _parse_origins(ours: Mapping[str, Any]) -> list[str]:
    origins: list[str] = []
    for origin, count in ours.get("origins", ()):
        if not (_is_origin(origin) and is_count(count) and len(origins) + count <= len(ours["samples"])):
            raise ValueError(f"{count!r} samples come from {origin!r}")
        origins += [origin] * count
    return origins or [""] * len(ours["samples"])


def _parse_samples(ours: Mapping[str, Any], segment: str, rows: int, where: str) -> dict[str, SampleEntry]:
    references = ours["references"]
    if not all(is_segment_id(reference) for reference in references):
        raise ValueError("a reference is not a segment id")
    names = [segment, *references]
    samples: dict[str, SampleEntry] = {}
    for item, origin in zip(ours["samples"], _parse_origins(ours), strict=True):
        sample_id, raw_spans = item[0], item[1]
        spans = []
        for number, start, stop in raw_spans:
            if not (is_count(number) and is_count(start) and is_count(stop) and start <= stop):
                raise ValueError(f"sample {sample_id!r} has the span {[number, start, stop]}")
            if number == 0 and stop > rows:
                raise ValueError(f"sample {sample_id!r} ends at row {stop} of {rows}")
            spans.append(Span(names[number], start, stop))
        entry = SampleEntry(sample_id, tuple(spans), origin=origin)
        if len(item) > 2:
            missing = normalize_ranges(item[2], entry.rows, f"{where}: missing rows of sample {sample_id!r}")
            entry = replace(entry, missing=missing)
        if not isinstance(sample_id, str) or sample_id in samples:
            raise ValueError(f"sample id {sample_id!r} is not a string, or is there twice")
        samples[sample_id] = entry
    return samples
