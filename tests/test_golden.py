"""Traces of format version 1, committed as files: what this release reads, every later one must read the same.

They were made by ``python tests/test_golden.py DIRECTORY``, which nothing else runs. A new format version gets a
directory of its own; those of released versions are never written again.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support import run_python, tree

import tracefile
from tracefile.format import staging_path

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden", "v1")

CONFIGS: dict[str, dict[str, Any]] = {
    "uint8": {"num_layers": 5, "top_k": 3, "num_experts": 256, "layer_ids": (1, 2, 3, 5, 8)},
    "uint16": {"num_layers": 3, "top_k": 4, "num_experts": 512},
}
#: Of each trace, segment by segment: codec, and the rows of each sample.
SEGMENTS: list[tuple[str, dict[str, int]]] = [
    ("fast", {"prompt-0/0": 150, "prompt-0/1": 64, "empty": 0}),
    ("compact", {"größer/日本": 200}),
    ("none", {"holes": 9, "prompt-0/1": 3}),
    ("fast", {"no rows at all": 0}),
]
HOLES = [0, 1, 5, 8]


def golden_ids(name: str, sample: str, rows: int, revision: int) -> np.ndarray[Any, Any]:
    """The ids of a sample, by arithmetic alone."""
    config = CONFIGS[name]
    row, layer, slot = np.ogrid[:rows, : config["num_layers"], : config["top_k"]]
    ids: np.ndarray[Any, Any] = (
        row // 8 * 7 + layer * 31 + slot * (row // 32 + 1) * 11 + len(sample.encode()) * 13 + revision * 101
    ) % config["num_experts"]
    if rows:
        ids[-1, -1, -1] = config["num_experts"] - 1
    if sample == "holes":
        ids[HOLES] = -1
    return ids


def write_golden(directory: str) -> None:
    """Write both traces anew. For a new format version, by hand."""
    with mock.patch("socket.gethostname", return_value="golden"):
        for name, config in CONFIGS.items():
            path = os.path.join(directory, f"{name}.trace")
            for number, (codec, samples) in enumerate(SEGMENTS):
                with tracefile.TraceWriter(
                    path, **config, codec=codec, layers_per_chunk=2, rows_per_chunk=64, validate="off"
                ) as writer:
                    writer.append_many(
                        (sample, golden_ids(name, sample, rows, number)) for sample, rows in samples.items()
                    )


def _expected(name: str) -> dict[str, np.ndarray[Any, Any]]:
    """The newest revision of each sample."""
    return {
        sample: golden_ids(name, sample, rows, number)
        for number, (_, samples) in enumerate(SEGMENTS)
        for sample, rows in samples.items()
    }


@pytest.mark.parametrize("source", ["mmap", "pread"])
@pytest.mark.parametrize("name", CONFIGS)
def test_golden_values(name: str, source: str) -> None:
    trace = tracefile.open(os.path.join(GOLDEN, f"{name}.trace"), source=source)
    assert trace.config == tracefile.ModelConfig(**CONFIGS[name])
    expected = _expected(name)
    assert list(trace) == list(expected)
    for sample, ids in expected.items():
        experts = trace[sample]
        assert (ids[:, 0, 0] >= 0).tolist() == experts.valid.tolist()
        np.testing.assert_array_equal(experts.filled("minus_one").numpy(), ids)
        np.testing.assert_array_equal(experts[3:140, 1:].filled("minus_one").numpy(), ids[3:140, 1:])
    with pytest.raises(tracefile.MissingRowsError):
        trace["holes"].numpy()
    headers = list(trace.segments.values())
    assert [header.codec for header in headers] == [codec for codec, _ in SEGMENTS]
    assert [list(header.samples) for header in headers] == [list(samples) for _, samples in SEGMENTS]


@pytest.mark.parametrize("name", CONFIGS)
def test_golden_documents(name: str) -> None:
    """What is in the files, without our parser."""
    directory = os.path.join(GOLDEN, f"{name}.trace")
    config = CONFIGS[name]
    with open(os.path.join(directory, "zarr.json")) as file:
        root = json.load(file)
    assert (root["zarr_format"], root["node_type"]) == (3, "group")
    assert root["attributes"]["tracefile"]["format"] == 1
    assert {key: root["attributes"]["tracefile"][key] for key in ("num_layers", "top_k", "num_experts")} == {
        key: config[key] for key in ("num_layers", "top_k", "num_experts")
    }
    segments = sorted(set(os.listdir(os.path.join(directory, "segments"))) - {"zarr.json"})
    assert len(segments) == len(SEGMENTS)
    for segment, (codec, samples) in zip(segments, SEGMENTS, strict=True):
        with open(os.path.join(directory, "segments", segment, "zarr.json")) as file:
            document = json.load(file)
        ours = document["attributes"]["tracefile"]
        assert (document["node_type"], document["data_type"]) == ("array", name)
        assert document["fill_value"] == {"uint8": 255, "uint16": 65_535}[name]
        assert document["dimension_names"] == ["layer", "token", "topk"]
        assert (ours["format"], ours["segment"], ours["codec"]) == (1, segment, codec)
        assert ours["trace"] == root["attributes"]["tracefile"]["uuid"]
        assert [sample for sample, *_ in ours["samples"]] == list(samples)
        shard = os.path.join(directory, "segments", segment, "c", "0", "0", "0")
        assert os.path.exists(shard) == any(samples.values())
        if os.path.exists(shard):
            assert os.path.getsize(shard) == ours["shard_bytes"]
            inner = [item["name"] for item in document["codecs"][0]["configuration"]["codecs"]]
            assert inner == (["bytes", "crc32c"] if codec == "none" else ["bytes", "blosc", "crc32c"])
            with open(shard, "rb") as file:
                assert file.read(64) == (b"tracefile-shard\0" + segment.encode()).ljust(64, b"\0")


@pytest.mark.parametrize("pipeline", ["zarr.core.codec_pipeline.BatchedCodecPipeline", "zarrs.ZarrsCodecPipeline"])
@pytest.mark.parametrize("name", CONFIGS)
def test_golden_chunks_through_zarr(name: str, pipeline: str) -> None:
    """The bytes of each decoded chunk, as another reader sees them."""
    directory = os.path.join(GOLDEN, f"{name}.trace")
    output = run_python(
        """
import json, sys, zarr
zarr.config.set({"codec_pipeline.path": sys.argv[2]})
segments = zarr.open_group(sys.argv[1], mode="r")["segments"]
chunks = {}
for segment, array in segments.arrays():
    layers, rows, _ = array.chunks
    for layer in range(0, array.shape[0], layers):
        for row in range(0, array.shape[1], rows):
            block = array[layer : layer + layers, row : row + rows]
            chunks[f"{segment} {layer} {row}"] = [list(block.shape), block.tobytes().hex()]
print(json.dumps(chunks))
""",
        directory,
        pipeline,
    ).stdout
    seen = json.loads(output)
    dtype = np.dtype(name).newbyteorder("<")
    fill = np.iinfo(dtype).max
    segments = sorted(set(os.listdir(os.path.join(directory, "segments"))) - {"zarr.json"})
    expected = {}
    for number, (segment, (_, samples)) in enumerate(zip(segments, SEGMENTS, strict=True)):
        with open(os.path.join(directory, "segments", segment, "zarr.json")) as file:
            layers_per_chunk, rows_per_chunk, _ = json.load(file)["codecs"][0]["configuration"]["chunk_shape"]
        blocks, at = [], 0
        for sample, rows in samples.items():
            if rows:
                gap = -at % rows_per_chunk  # a sample starts on a chunk's first row
                blocks.append(np.full((gap, CONFIGS[name]["num_layers"], CONFIGS[name]["top_k"]), fill))
                blocks.append(golden_ids(name, sample, rows, number))
                at += gap + rows
        if not blocks:
            continue
        array = np.concatenate(blocks).swapaxes(0, 1)
        array = np.where(array < 0, fill, array).astype(dtype)
        for layer in range(0, array.shape[0], layers_per_chunk):
            for row in range(0, array.shape[1], rows_per_chunk):
                block = array[layer : layer + layers_per_chunk, row : row + rows_per_chunk]
                expected[f"{segment} {layer} {row}"] = [list(block.shape), block.tobytes().hex()]
    assert seen == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_todays_writer_joins_a_golden_trace(name: str, path: str) -> None:
    before = tree(GOLDEN)
    shutil.copytree(os.path.join(GOLDEN, f"{name}.trace"), path)
    trace = tracefile.open(path)
    with tracefile.TraceWriter(path, **CONFIGS[name]) as writer:
        new = golden_ids(name, "new", 50, 9)
        handle = pickle.dumps(writer.append("prompt-0/0", new))
    assert trace.refresh() == ["prompt-0/0"]
    np.testing.assert_array_equal(trace["prompt-0/0"].numpy(), new)
    np.testing.assert_array_equal(pickle.loads(handle).numpy(), new)
    assert tree(GOLDEN) == before
    assert not os.path.exists(staging_path(os.path.join(GOLDEN, f"{name}.trace")))


@pytest.mark.parametrize("name", CONFIGS)
def test_todays_writer_writes_version_1(name: str, tmp_path: Any) -> None:
    """The same samples written today differ in nothing but who wrote them, and when.

    Where this fails because the format was changed: that is a new version, with golden files of its own.
    """
    write_golden(str(tmp_path))
    old, new = (_without_authorship(os.path.join(root, f"{name}.trace")) for root in (GOLDEN, str(tmp_path)))
    assert old.keys() == new.keys()
    for file, text in old.items():
        assert new[file] == text, file


def _without_authorship(directory: str) -> dict[str, Any]:
    """Documents, with ids of traces and segments, checksums and authors left out; segments by their order."""
    documents: dict[str, Any] = {}
    segments = sorted(set(os.listdir(os.path.join(directory, "segments"))) - {"zarr.json"})
    for name, raw in tree(directory).items():
        for number, segment in enumerate(segments):
            name = name.replace(segment, str(number))
        if name.endswith("zarr.json"):
            documents[name] = json.loads(raw)
            ours = documents[name]["attributes"].get("tracefile", {})
            for key in ("crc32c", "uuid", "trace", "segment", "writer"):
                ours.pop(key, None)
            if ours.get("codec") != "none":
                ours.pop("shard_bytes", None)  # a newer Blosc may compress a little otherwise
            for array_codec in documents[name].get("codecs", ()):
                for codec in array_codec["configuration"]["codecs"]:
                    if codec["name"] == "blosc":
                        del codec["configuration"]  # each chunk says how it decodes; presets may be tuned
    return documents


if __name__ == "__main__":
    if len(sys.argv) != 2 or os.path.exists(sys.argv[1]):
        sys.exit("usage: python tests/test_golden.py DIRECTORY (which must not exist)")
    write_golden(sys.argv[1])
