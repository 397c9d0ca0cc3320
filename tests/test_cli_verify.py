"""``tracefile verify``: real damage to real files, and what is said of it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
from crc32c import crc32c
from support import random_routing, run_python, write_long_sample
from typer.testing import CliRunner

import tracefile
from tracefile import documents, survey, verify
from tracefile.cli import app
from tracefile.findings import Tally
from tracefile.format import ChunkGeometry, ModelConfig
from tracefile.metadata import SampleEntry, SegmentHeader, Span
from tracefile.shard import ChunkDecoder
from tracefile.store import read_trace_header

if TYPE_CHECKING:
    from collections.abc import Callable

    from typer.testing import Result

LAYER_IDS = (3, 4, 5, 7, 8, 10)
CONFIG = ModelConfig(6, 2, 16, LAYER_IDS)
GEOMETRY = ChunkGeometry(4, 8)  # chunks of layers 3-7 and 8-10
SAMPLES = {"a/0": 20, "a/1": 3, "b/0": 17}


def make_trace(path: str, rng: np.random.Generator, codec: str = "fast") -> dict[str, str]:
    """A trace with a segment per sample; returns the samples' segments."""
    segments: dict[str, str] = {}
    with _writer(path, codec) as writer:
        for sample, rows in SAMPLES.items():
            writer.append(sample, random_routing(rng, rows, 6, 2, 16))
            (segments[sample],) = set(_segments(path)) - set(segments.values())
    return segments


def _writer(path: str, codec: str = "fast") -> tracefile.TraceWriter:
    return tracefile.TraceWriter(
        path, num_layers=6, top_k=2, num_experts=16, layer_ids=LAYER_IDS, codec=codec,
        layers_per_chunk=GEOMETRY.layers_per_chunk, rows_per_chunk=GEOMETRY.rows_per_chunk,
    )  # fmt: skip


def _segments(path: str) -> list[str]:
    return sorted(name for name in os.listdir(f"{path}/segments") if name != "zarr.json")


def shard(path: str, segment: str) -> str:
    return f"{path}/segments/{segment}/c/0/0/0"


def rewrite(file: str, change: Callable[[bytearray], Any]) -> None:
    with open(file, "rb") as opened:
        data = bytearray(opened.read())
    changed = change(data)
    with open(file, "wb") as opened:
        opened.write(data if changed is None else changed)


def flip(file: str, at: int) -> None:
    def change(data: bytearray) -> None:
        data[at] ^= 0x10

    rewrite(file, change)


def index_of(file: str, chunks: int) -> list[tuple[int, int]]:
    """Offset and length of each chunk, read as the Zarr specification says."""
    with open(file, "rb") as opened:
        table = opened.read()[-16 * chunks - 4 : -4]
    values = struct.unpack(f"<{2 * chunks}Q", table)
    return list(zip(values[::2], values[1::2], strict=True))


def publish_index(path: str, entries: list[SampleEntry], segment: str = "ffff-shared") -> str:
    """A segment without rows of its own, whose samples have their rows in other segments."""
    trace = read_trace_header(path)
    header = SegmentHeader(
        segment, trace.uuid, trace.config, 0, GEOMETRY, "fast", 0, {entry.id: entry for entry in entries}
    )
    directory = f"{path}/segments/{segment}"
    os.makedirs(directory)
    with open(f"{directory}/zarr.json", "wb") as file:
        file.write(documents.encode(documents.segment_document(header)))
    return segment


def cli(*arguments: str, **kwargs: Any) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False, env={"COLUMNS": "100"}, **kwargs)


def findings(path: str, code: int = 1) -> list[dict[str, Any]]:
    result = cli("verify", path, "--json")
    assert result.exit_code == code, result.output
    assert result.stderr == ""
    document = json.loads(result.stdout)
    assert document["sound"] is (code == 0)
    found: list[dict[str, Any]] = document["findings"]
    return found


def lost(finding: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(rows["sample"], rows["start"], rows["stop"]) for rows in finding["samples"]]


@pytest.mark.parametrize("codec", ["fast", "compact", "none"])
def test_a_sound_trace(path: str, rng: np.random.Generator, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = make_trace(path, rng, codec)
    holes = random_routing(rng, 20, 6, 2, 16)
    holes[3:9] = holes[-1] = -1  # they are stored as 255, which no expert has
    with _writer(path, codec) as writer:
        writer.append("holes", holes)
        writer.append_many([("empty", holes[:0]), ("c", holes[:2]), ("d", holes[9:18])])
    decoded: list[tuple[str, int]] = []
    decode = ChunkDecoder.decode

    def counted(self: ChunkDecoder, number: int, *rest: Any) -> Any:
        decoded.append((self.segment, number))
        return decode(self, number, *rest)

    monkeypatch.setattr(ChunkDecoder, "decode", counted)
    result = cli("verify", path, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["findings"] == document["damaged_samples"] == []
    # Rows in chunks of 8: 20 -> 3, 3 -> 1, 17 -> 3, 20 -> 3, 2 -> 1 and 9 -> 2; times two chunks along layers.
    assert document["checked"] | {"bytes_read": 0} == {
        "segments": 5, "samples": 7, "rows": 71, "chunks": 26, "total_chunks": 26, "bytes_read": 0, "vanished": 0,
    }  # fmt: skip
    assert len(decoded) == len(set(decoded)) == 26
    assert {segment for segment, _ in decoded} >= set(segments.values())
    assert "sound" in cli("verify", path).stdout


@pytest.mark.parametrize("codec", ["fast", "compact", "none"])
@pytest.mark.parametrize(("chunk", "layers"), [((0, 0), [3, 4, 5, 7]), ((0, 2), [3, 4, 5, 7]), ((1, 1), [8, 10])])
def test_a_flipped_bit_names_its_chunk(
    path: str, rng: np.random.Generator, codec: str, chunk: tuple[int, int], layers: list[int]
) -> None:
    segments = make_trace(path, rng, codec)
    file = shard(path, segments["b/0"])
    offset, length = index_of(file, 6)[chunk[0] * 3 + chunk[1]]
    flip(file, offset + length // 2)
    (finding,) = findings(path)
    assert finding["kind"] == "chunk-damaged"
    assert finding["path"] == file
    assert finding["segment"] == segments["b/0"]
    assert tuple(finding["chunk"]) == chunk
    assert finding["layers"] == layers
    assert lost(finding) == [("b/0", 8 * chunk[1], min(8 * chunk[1] + 8, 17))]
    with pytest.raises(tracefile.ChunkDamagedError):
        tracefile.open(path)["b/0"].materialize()


def test_the_report_for_people(path: str, rng: np.random.Generator) -> None:
    segments = make_trace(path, rng)
    file = shard(path, segments["a/0"])
    flip(file, index_of(file, 6)[5][0])
    result = cli("verify", path)
    assert result.exit_code == 1
    assert f"damaged chunk (layers 1, rows 2)  segment {segments['a/0']}" in result.stdout
    assert "layers 8, 10" in result.stdout
    assert "sample a/0 rows [16, 20)" in result.stdout
    assert "1 sample cannot be read whole: a/0" in result.stdout
    assert result.stderr == ""


def test_rows_that_samples_share(path: str, rng: np.random.Generator) -> None:
    segments = make_trace(path, rng)
    a, b = segments["a/0"], segments["b/0"]
    # A revision of a/0 that keeps 10 rows and goes on elsewhere, and a sample that branches off.
    shared = publish_index(
        path,
        [
            SampleEntry("a/0", (Span(a, 0, 10), Span(b, 0, 17))),
            SampleEntry("fork", (Span(b, 16, 17), Span(a, 6, 20)), ((2, 3),)),
        ],
    )
    file = shard(path, a)
    flip(file, index_of(file, 6)[1][0])  # rows 8-16 of layers 3-7
    (finding,) = findings(path)
    assert [tuple(rows.values()) for rows in finding["samples"]] == [
        ("a/0", 8, 10, shared, False),
        ("fork", 3, 11, shared, False),
        ("a/0", 8, 16, a, True),
    ]
    text = cli("verify", path).stdout
    assert f"sample a/0 rows [8, 16), of the superseded revision in segment {a}" in text
    assert "2 samples cannot be read whole: a/0, fork" in text


def test_damage_that_only_a_superseded_revision_has(path: str, rng: np.random.Generator) -> None:
    segments = make_trace(path, rng)
    with _writer(path) as writer:
        writer.append("a/0", random_routing(rng, 5, 6, 2, 16))
    file = shard(path, segments["a/0"])
    flip(file, index_of(file, 6)[0][0])
    result = cli("verify", path, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["damaged_samples"] == []


def test_truncated(path: str, rng: np.random.Generator) -> None:
    segments = make_trace(path, rng)
    file = shard(path, segments["a/0"])
    for size in (os.path.getsize(file) - 1, 200, 10, 0):
        os.truncate(file, size)
        (finding,) = findings(path)
        assert finding["kind"] == "shard-damaged"
        assert finding["segment"] == segments["a/0"]
        assert f"{size} bytes" in finding["message"]
        assert finding["layers"] == list(LAYER_IDS)
        assert lost(finding) == [("a/0", 0, 20)]


def test_a_shard_file_that_is_gone(path: str, rng: np.random.Generator) -> None:
    segments = make_trace(path, rng)
    os.unlink(shard(path, segments["a/1"]))
    (finding,) = findings(path)
    assert (finding["kind"], finding["segment"]) == ("shard-missing", segments["a/1"])
    assert lost(finding) == [("a/1", 0, 3)]


@pytest.mark.parametrize("pair", [("a/0", "b/0"), ("a/0", "a/1")], ids=["same size", "other size"])
def test_swapped_shard_files(path: str, rng: np.random.Generator, pair: tuple[str, str]) -> None:
    segments = make_trace(path, rng, codec="none")
    first, second = (shard(path, segments[sample]) for sample in pair)
    assert (os.path.getsize(first) == os.path.getsize(second)) is (pair[1] == "b/0")
    os.rename(first, f"{path}/kept")
    os.rename(second, first)
    os.rename(f"{path}/kept", second)
    found = {finding["segment"]: finding for finding in findings(path)}
    assert set(found) == {segments[sample] for sample in pair}
    for here, there in (pair, pair[::-1]):
        finding = found[segments[here]]
        assert finding["kind"] == "shard-damaged"
        assert f"it is the shard file of segment {segments[there]}" in finding["message"]
        assert lost(finding) == [(here, 0, SAMPLES[here])]


def test_a_damaged_header_does_not_hide_damaged_chunks(path: str, rng: np.random.Generator) -> None:
    segments = make_trace(path, rng)
    file = shard(path, segments["a/0"])
    flip(file, 3)
    flip(file, index_of(file, 6)[4][0])
    header, chunk = findings(path)
    assert (header["kind"], header["chunk"]) == ("shard-damaged", None)
    assert (chunk["kind"], chunk["chunk"]) == ("chunk-damaged", [1, 1])


@pytest.mark.parametrize("where", [-1, -20, -100])
def test_a_broken_index(path: str, rng: np.random.Generator, where: int) -> None:
    segments = make_trace(path, rng)
    flip(shard(path, segments["b/0"]), where)
    (finding,) = findings(path)
    assert (finding["kind"], finding["segment"]) == ("shard-index", segments["b/0"])
    assert lost(finding) == [("b/0", 0, 17)]


def test_a_chunk_that_was_never_written(path: str, rng: np.random.Generator) -> None:
    segments = make_trace(path, rng)

    def change(data: bytearray) -> None:
        table = data[-100:-4]
        table[16 * 4 : 16 * 5] = b"\xff" * 16
        data[-100:] = table + struct.pack("<I", crc32c(bytes(table)))

    rewrite(shard(path, segments["a/0"]), change)
    (finding,) = findings(path)
    assert (finding["kind"], finding["chunk"], finding["layers"]) == ("chunk-missing", [1, 1], [8, 10])
    assert lost(finding) == [("a/0", 8, 16)]


def test_a_bad_sector(path: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = make_trace(path, rng)
    file = shard(path, segments["a/0"])
    bad, length = index_of(file, 6)[2]
    inode, pread = os.stat(file).st_ino, os.pread

    def failing(fd: int, nbytes: int, offset: int) -> bytes:
        if os.fstat(fd).st_ino == inode and offset < bad + length and bad < offset + nbytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, nbytes, offset)

    monkeypatch.setattr(os, "pread", failing)
    (finding,) = findings(path)
    assert (finding["kind"], finding["chunk"]) == ("chunk-damaged", [0, 2])
    assert "Input/output error" in finding["message"]
    assert lost(finding) == [("a/0", 16, 20)]


def _wrong_ids(path: str, segment: str, chunk: int, values: dict[tuple[int, int, int], int]) -> None:
    """Put ids into an uncompressed chunk ``[4, 8, 2]`` with the checksum that a writer would have given it."""
    offset, length = index_of(shard(path, segment), 6)[chunk]

    def change(data: bytearray) -> None:
        ids = np.frombuffer(data, np.uint8, length - 4, offset).reshape(4, 8, 2)
        for place, value in values.items():
            ids[place] = value
        data[offset + length - 4 : offset + length] = struct.pack("<I", crc32c(bytes(data[offset:][: length - 4])))

    rewrite(shard(path, segment), change)


def test_ids_that_no_expert_has(path: str, rng: np.random.Generator) -> None:
    with _writer(path, "none") as writer:
        rows = random_routing(rng, 20, 6, 2, 16)
        rows[13] = -1
        writer.append("a", rows)
    (segment,) = _segments(path)
    # In a missing row, behind the last layer, and behind the last row: none of the reader's business.
    _wrong_ids(path, segment, 4, {(0, 5, 0): 99, (2, 0, 0): 99})
    _wrong_ids(path, segment, 5, {(0, 4, 0): 99})
    assert findings(path, 0) == []
    _wrong_ids(path, segment, 1, {(0, 2, 1): 16, (3, 2, 0): 255, (3, 7, 0): 77, (1, 5, 0): 99})
    (finding,) = findings(path)
    assert (finding["kind"], finding["chunk"], finding["layers"]) == ("expert-ids", [0, 1], [3, 7])
    assert lost(finding) == [("a", 10, 11), ("a", 15, 16)]
    assert "3 ids outside [0, 16)" in finding["message"]


@pytest.mark.parametrize("experts", [255, 256])
def test_the_last_byte_is_an_expert_of_256(path: str, experts: int) -> None:
    with tracefile.TraceWriter(path, num_layers=1, top_k=2, num_experts=experts, codec="none") as writer:
        writer.append("a", np.zeros((8, 1, 2), int))
    (segment,) = _segments(path)
    ids = bytes([255] * 16)

    def change(data: bytearray) -> None:
        data[64:84] = ids + struct.pack("<I", crc32c(ids))

    rewrite(shard(path, segment), change)
    assert [finding["kind"] for finding in findings(path, int(experts == 255))] == ["expert-ids"] * (256 - experts)


def test_warnings_of_zarr_are_kept_off(path: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    make_trace(path, rng)
    opened = zarr.open_array

    def loud(*arguments: Any, **options: Any) -> Any:
        warnings.warn("a word from zarr", UserWarning, stacklevel=2)
        return opened(*arguments, **options)

    monkeypatch.setattr(zarr, "open_array", loud)
    assert findings(path, 0) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b"[[0,0,20]]", b"[[0,0,19]]"),
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"[]",
    ],
    ids=["edited", "truncated", "emptied", "not ours"],
)
def test_a_damaged_segment_document(path: str, rng: np.random.Generator, change: Callable[[bytearray], bytes]) -> None:
    segments = make_trace(path, rng)
    shared = publish_index(path, [SampleEntry("fork", (Span(segments["a/0"], 2, 9), Span(segments["b/0"], 0, 4)))])
    document = f"{path}/segments/{segments['a/0']}/zarr.json"
    with open(document, "rb") as file:
        before = file.read()
    rewrite(document, change)
    with open(document, "rb") as file:
        assert file.read() != before
    flip(shard(path, segments["b/0"]), -1)
    metadata_finding, index_finding = findings(path)
    assert (metadata_finding["kind"], metadata_finding["segment"]) == ("segment-metadata", segments["a/0"])
    assert metadata_finding["path"] == document
    assert [tuple(rows.values()) for rows in metadata_finding["samples"]] == [("fork", 0, 7, shared, False)]
    assert index_finding["kind"] == "shard-index"
    assert lost(index_finding) == [("b/0", 0, 17), ("fork", 7, 11)]


def test_a_segment_document_that_is_gone(path: str, rng: np.random.Generator) -> None:
    segments = make_trace(path, rng)
    os.unlink(f"{path}/segments/{segments['a/0']}/zarr.json")
    (finding,) = findings(path)
    assert (finding["kind"], finding["segment"]) == ("segment-metadata", segments["a/0"])


def test_documents_that_cannot_be_read(path: str, rng: np.random.Generator) -> None:
    segments = make_trace(path, rng)
    for document in (f"{path}/zarr.json", f"{path}/segments/{segments['a/0']}/zarr.json"):
        os.unlink(document)
        os.mkdir(document)
    root, segment = findings(path)
    assert (root["kind"], root["path"]) == ("trace-metadata", f"{path}/zarr.json")
    assert (segment["kind"], segment["segment"]) == ("segment-metadata", segments["a/0"])
    assert "Is a directory" in segment["message"]


def test_no_document_is_sound(path: str, rng: np.random.Generator) -> None:
    segments = make_trace(path, rng)
    for document in (path, *(f"{path}/segments/{segment}" for segment in segments.values())):
        os.truncate(f"{document}/zarr.json", 40)
    root, *documents = findings(path)
    assert root["kind"] == "trace-metadata"
    assert "no data could be checked" in root["message"]
    assert {(each["kind"], each["segment"]) for each in documents} == {
        ("segment-metadata", segment) for segment in segments.values()
    }


def test_swapped_segment_directories(path: str, rng: np.random.Generator) -> None:
    segments = make_trace(path, rng)
    a, b = (f"{path}/segments/{segments[sample]}" for sample in ("a/0", "b/0"))
    os.rename(a, f"{path}/kept")
    os.rename(b, a)
    os.rename(f"{path}/kept", b)
    assert {(finding["kind"], finding["segment"]) for finding in findings(path)} == {
        ("segment-metadata", segments["a/0"]),
        ("segment-metadata", segments["b/0"]),
    }


def test_a_segment_that_is_gone(path: str, rng: np.random.Generator) -> None:
    segments = make_trace(path, rng)
    entry = SampleEntry("fork", (Span(segments["b/0"], 0, 4), Span(segments["a/0"], 2, 9), Span(segments["b/0"], 4, 6)))
    shared = publish_index(path, [entry])
    assert findings(path, 0) == []
    shutil.rmtree(f"{path}/segments/{segments['a/0']}")
    (finding,) = findings(path)
    assert (finding["kind"], finding["segment"]) == ("segment-absent", segments["a/0"])
    assert [tuple(rows.values()) for rows in finding["samples"]] == [("fork", 4, 11, shared, False)]


def test_rows_beyond_the_end_of_a_segment(path: str, rng: np.random.Generator) -> None:
    segments = make_trace(path, rng)
    publish_index(path, [SampleEntry("fork", (Span(segments["a/0"], 15, 25),))])
    (finding,) = findings(path)
    assert (finding["kind"], finding["segment"]) == ("span-range", segments["a/0"])
    assert lost(finding) == [("fork", 5, 10)]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b'"num_experts":16', b'"num_experts":18'),
        lambda data: data[:50],
        lambda data: b"",
        None,
    ],
    ids=["edited", "truncated", "emptied", "deleted"],
)
def test_a_damaged_root_document(
    path: str, rng: np.random.Generator, change: Callable[[bytearray], bytes] | None
) -> None:
    segments = make_trace(path, rng)
    if change is None:
        os.unlink(f"{path}/zarr.json")
    else:
        rewrite(f"{path}/zarr.json", change)
    os.unlink(f"{path}/segments/{segments['a/0']}/zarr.json")
    file = shard(path, segments["b/0"])
    flip(file, index_of(file, 6)[3][0])
    root, document, chunk = findings(path)
    assert (root["kind"], root["path"]) == ("trace-metadata", f"{path}/zarr.json")
    assert (document["kind"], document["segment"]) == ("segment-metadata", segments["a/0"])
    # Only the root document knew the global ids.
    assert (chunk["kind"], chunk["chunk"], chunk["layers"]) == ("chunk-damaged", [1, 0], [4, 5])
    assert lost(chunk) == [("b/0", 0, 8)]


def test_damaged_groups(path: str, rng: np.random.Generator) -> None:
    make_trace(path, rng)
    os.unlink(f"{path}/segments/zarr.json")
    (finding,) = findings(path)
    assert (finding["kind"], finding["path"]) == ("zarr-metadata", f"{path}/segments/zarr.json")
    shutil.rmtree(f"{path}/segments")
    (finding,) = findings(path)
    assert (finding["kind"], finding["path"]) == ("trace-metadata", f"{path}/segments")


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(dimension_names=["layer", "token"]),
        lambda document: document.update(rotated={"must_understand": True}),
        lambda document: document.update(node_type="group"),
    ],
    ids=["dimension names", "unknown field", "node type"],
)
def test_what_only_zarr_refuses(path: str, rng: np.random.Generator, change: Callable[[dict[str, Any]], None]) -> None:
    """Documents with a sound checksum, so that our own reader does not mind."""
    segments = make_trace(path, rng)
    file = f"{path}/segments/{segments['a/0']}/zarr.json"
    with open(file) as stream:
        document = json.load(stream)
    change(document)
    with open(file, "wb") as binary:
        binary.write(documents.encode(documents.sealed(document)))
    tracefile.open(path)["a/0"].materialize()
    (finding,) = findings(path)
    assert (finding["kind"], finding["path"]) == ("zarr-metadata", file)


def test_all_of_it_is_reported(path: str, rng: np.random.Generator) -> None:
    segments = make_trace(path, rng)
    with _writer(path) as writer:
        for sample in ("c", "d", "e"):
            writer.append(sample, random_routing(rng, 9, 6, 2, 16))
    c, d, e = _segments(path)[-3:]
    for number in (0, 4):
        file = shard(path, segments["a/0"])
        flip(file, index_of(file, 6)[number][0])
    os.unlink(shard(path, segments["a/1"]))
    os.truncate(shard(path, segments["b/0"]), 99)
    flip(f"{path}/segments/{c}/zarr.json", 500)
    flip(shard(path, d), -1)
    flip(shard(path, e), 0)
    assert [(finding["kind"], finding["segment"]) for finding in findings(path)] == [
        ("chunk-damaged", segments["a/0"]),
        ("chunk-damaged", segments["a/0"]),
        ("shard-missing", segments["a/1"]),
        ("shard-damaged", segments["b/0"]),
        ("segment-metadata", c),
        ("shard-index", d),
        ("shard-damaged", e),
    ]


def test_a_trace_without_rows(path: str) -> None:
    _writer(path).close()
    assert findings(path, 0) == []
    with _writer(path) as writer:
        writer.append("empty", np.zeros((0, 6, 2), int))
    assert findings(path, 0) == []


def test_a_segment_that_vanishes_meanwhile(
    path: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = make_trace(path, rng)
    listed = survey.list_segments

    def then_removed(where: str) -> list[str]:
        names = listed(where)
        shutil.rmtree(f"{path}/segments/{segments['a/0']}", ignore_errors=True)
        return names

    monkeypatch.setattr(survey, "list_segments", then_removed)
    tally = Tally()
    assert list(verify.verify_trace(path, tally=tally)) == []
    assert (tally.vanished, tally.segments) == (1, 2)


def test_a_segment_that_vanishes_after_its_document_was_read(
    path: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = make_trace(path, rng)
    take = survey.take_survey

    def then_removed(*arguments: Any) -> Any:
        taken = take(*arguments)
        shutil.rmtree(f"{path}/segments/{segments['b/0']}")
        return taken

    monkeypatch.setattr(verify, "take_survey", then_removed)
    tally = Tally()
    assert list(verify.verify_trace(path, tally=tally)) == []
    assert tally.vanished == 1


def test_a_segment_that_a_listing_missed_is_checked(
    path: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = make_trace(path, rng)
    shared = publish_index(path, [SampleEntry("fork", (Span(segments["a/0"], 0, 4),))])
    flip(shard(path, segments["a/0"]), -1)
    monkeypatch.setattr(survey, "list_segments", lambda _: [shared])
    (finding,) = verify.verify_trace(path)
    assert (finding.kind, finding.segment) == ("shard-index", segments["a/0"])


def test_while_others_write(path: str) -> None:
    code = """
import sys, numpy as np, tracefile
with tracefile.TraceWriter(sys.argv[1], num_layers=6, top_k=2, num_experts=16) as writer:
    print("begun", flush=True)
    for number in range(1_000_000):
        writer.append(f"{number % 50}", np.full((number % 40, 6, 2), number % 16))
"""
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        try:
            assert writer.stdout.readline() == "begun\n"
            seen = []
            for _ in range(5):
                tally = Tally()
                assert list(verify.verify_trace(path, tally=tally)) == []
                seen.append(tally.segments)
            assert writer.poll() is None
        finally:
            writer.kill()
    assert seen[-1] > seen[0]


def test_usage(path: str, tmp_path: Any, rng: np.random.Generator) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "group").mkdir()
    (tmp_path / "group" / "zarr.json").write_text('{"zarr_format":3,"node_type":"group","attributes":{}}')
    for where, words in {
        path: "no trace at",
        str(tmp_path): "not a trace",
        str(tmp_path / "file"): "a trace is a directory",
        str(tmp_path / "group"): "another kind of Zarr node",
    }.items():
        for arguments in (["verify", where], ["verify", where, "--json"]):
            result = cli(*arguments)
            assert result.exit_code == 2
            assert result.stdout == ""
            assert result.stderr.startswith("tracefile: ")
            assert words in result.stderr
            assert result.stderr.count("\n") == 1
    make_trace(path, rng)
    assert cli("verify", path, "--bogus").exit_code == 2
    assert cli("verify").exit_code == 2


def test_a_newer_format(path: str, rng: np.random.Generator) -> None:
    make_trace(path, rng)
    with open(f"{path}/zarr.json") as stream:
        document = json.load(stream)
    document["attributes"]["tracefile"]["format"] = 2
    with open(f"{path}/zarr.json", "wb") as binary:
        binary.write(documents.encode(documents.sealed(document)))
    result = cli("verify", path)
    assert result.exit_code == 2
    assert "upgrade tracefile" in result.stderr


def test_control_characters_of_sample_ids_do_not_reach_the_terminal(path: str, rng: np.random.Generator) -> None:
    with _writer(path) as writer:
        writer.append("\x1b[2J[red]\n", random_routing(rng, 5, 6, 2, 16))
    (segment,) = _segments(path)
    flip(shard(path, segment), -1)
    text = cli("verify", path).stdout
    assert "\x1b" not in text
    assert "sample \\x1b[2J[red]\\n rows [0, 5)" in text


def test_in_a_process_of_its_own(path: str, rng: np.random.Generator) -> None:
    segments = make_trace(path, rng)
    command = [sys.executable, "-m", "tracefile.cli", "verify", path, "--json"]
    sound = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (sound.returncode, sound.stderr) == (0, "")
    flip(shard(path, segments["a/0"]), -1)
    damaged = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (damaged.returncode, damaged.stderr) == (1, "")
    assert json.loads(damaged.stdout)["damaged_samples"] == ["a/0"]
    assert damaged.stdout.count("\n") == 1


def test_progress_goes_to_a_terminal_only(path: str, rng: np.random.Generator) -> None:
    segments = make_trace(path, rng)
    flip(shard(path, segments["a/0"]), -1)
    reader, terminal = os.openpty()
    shown = bytearray()

    def drain() -> None:
        with contextlib.suppress(OSError):  # what a terminal gives that nobody has open any more
            while data := os.read(reader, 4096):
                shown.extend(data)

    watcher = threading.Thread(target=drain)
    watcher.start()
    command = [sys.executable, "-m", "tracefile.cli", "verify", path, "--json"]
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=terminal, timeout=100, env=os.environ | {"TERM": "xterm"}
    )
    os.close(terminal)
    watcher.join()
    os.close(reader)
    assert b"Verifying" in shown
    assert result.returncode == 1
    assert json.loads(result.stdout)["sound"] is False


def test_memory_is_bounded(path: str) -> None:
    write_long_sample(path)  # the limit leaves 64 MiB
    code = """
import resource, sys, zarr, tracefile
from tracefile.findings import Tally
from tracefile.verify import verify_trace
tracefile.configure(decode_threads=1)
data = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (data + 64 * 2**20,) * 2)
tally = Tally()
assert list(verify_trace(sys.argv[1], tally=tally)) == []
assert tally.rows == 1_000_000 and tally.chunks == tally.total_chunks > 3000
try:
    tracefile.open(sys.argv[1])["long"].materialize(dtype=__import__("torch").uint8)
except (MemoryError, RuntimeError):
    print("bounded")
"""
    assert run_python(code, path).stdout == "bounded\n"
