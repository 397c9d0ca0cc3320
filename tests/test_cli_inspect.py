"""``tracefile inspect``: its facts against those computed from the arrays that were written."""

from __future__ import annotations

import errno
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from crc32c import crc32c
from rich.cells import cell_len
from support import random_routing, run_python, write_long_sample
from typer.testing import CliRunner

import tracefile
from tracefile import documents, load, native, read, survey
from tracefile.cli import app
from tracefile.cli import inspect as inspect_module
from tracefile.cli.charts import HeatMap
from tracefile.format import ChunkGeometry
from tracefile.metadata import SampleEntry, SegmentHeader, Span
from tracefile.store import read_trace_header
from tracefile.summary import length_facts

if TYPE_CHECKING:
    from typer.testing import Result

LAYER_IDS = (3, 4, 5, 7, 8, 10)
Arrays = dict[str, "np.ndarray[Any, Any]"]


def cli(*arguments: str, columns: int = 100) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False, env={"COLUMNS": str(columns)})


def document(*arguments: str, code: int = 0) -> dict[str, Any]:
    result = cli("inspect", *arguments, "--json")
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def _writer(path: str, **options: Any) -> tracefile.TraceWriter:
    return tracefile.TraceWriter(path, num_layers=6, top_k=2, num_experts=16, layer_ids=LAYER_IDS, **options)


@pytest.fixture
def arrays(path: str, rng: np.random.Generator) -> Arrays:
    """A trace of samples of many lengths, in segments of one and of many; some rows were never captured."""
    samples = {f"s/{i}": random_routing(rng, rows, 6, 2, 16) for i, rows in enumerate((40, 1, 300, 0, 25, 25, 130, 61))}
    samples["s/0"][5:8] = samples["s/0"][-1] = samples["s/6"][:50] = -1
    with _writer(path) as writer:
        for sample in ("s/0", "s/1", "s/2"):
            writer.append(sample, samples[sample])
        writer.append_many([(sample, samples[sample]) for sample in list(samples)[3:]])
    return samples


def expected_load(arrays: list[np.ndarray[Any, Any]], experts: int = 16) -> list[list[int]]:
    captured = np.concatenate([rows[(rows >= 0).all(axis=(1, 2))] for rows in arrays])
    return [np.bincount(captured[:, layer].ravel(), minlength=experts).tolist() for layer in range(captured.shape[1])]


def segment_names(path: str) -> list[str]:
    return sorted(name for name in os.listdir(f"{path}/segments") if name != "zarr.json")


def test_the_facts(path: str, arrays: Arrays) -> None:
    os.makedirs(os.path.join(os.path.dirname(path), ".step_000001.trace.staging", "00-left"))
    facts = document(path)
    lengths = [len(rows) for rows in arrays.values()]
    names = segment_names(path)
    shards = [f"{path}/segments/{name}/c/0/0/0" for name in names]
    assert facts["path"] == path
    assert facts["uuid"] == tracefile.open(path).uuid
    assert facts["model"] == {
        "num_layers": 6, "top_k": 2, "num_experts": 16, "layer_ids": list(LAYER_IDS), "dtype": "uint8",
    }  # fmt: skip
    assert facts["samples"] == 8
    assert facts["rows"] == facts["rows_stored"] == sum(lengths)
    assert (facts["missing_rows"], facts["samples_with_missing_rows"]) == (54, 2)
    assert facts["lengths"]["min"] == 0
    assert facts["lengths"]["max"] == 300
    assert facts["lengths"]["median"] == statistics.median(lengths)
    assert facts["lengths"]["mean"] == statistics.mean(lengths)
    assert facts["lengths"]["p90"] == pytest.approx(np.percentile(lengths, 90))
    assert sum(facts["lengths"]["counts"]) == 8
    assert facts["segments"] == len(names) == 4
    assert facts["superseded"] == {"revisions": 0, "unreachable_rows": 0}
    stored = sum(map(os.path.getsize, shards))
    assert facts["bytes"] == {
        "int32": sum(lengths) * 6 * 2 * 4,
        "narrow": sum(lengths) * 6 * 2,
        "stored": stored,
        "metadata": sum(os.path.getsize(f"{path}/segments/{name}/zarr.json") for name in names),
        "ratio": sum(lengths) * 48 / stored,
    }
    assert facts["codecs"] == {"fast": 4}
    assert facts["unfinished"] == ["00-left"]
    assert facts["damaged"] == facts["vanished"] == []
    assert "sample_list" not in facts
    headers = tracefile.open(path).segments.values()
    assert sum(each["segments"] for each in facts["geometries"]) == 4
    for each in facts["geometries"]:
        geometry = ChunkGeometry(each["layers_per_chunk"], each["rows_per_chunk"])
        assert sum(header.geometry == geometry for header in headers) == each["segments"]
        assert each["chunk_bytes"] == each["layers_per_chunk"] * each["rows_per_chunk"] * each["top_k"]


def test_the_load_counts_captured_rows(path: str, arrays: Arrays) -> None:
    counted = document(path)["load"]
    assert counted["rows"] == sum(map(len, arrays.values())) - 54
    assert (counted["uncounted_rows"], counted["ids_outside"]) == (0, 0)
    assert [layer["layer"] for layer in counted["layers"]] == list(LAYER_IDS)
    expected = expected_load(list(arrays.values()))
    assert [layer["counts"] for layer in counted["layers"]] == expected
    for layer, counts in zip(counted["layers"], expected, strict=True):
        assert layer["max_over_mean"] == pytest.approx(max(counts) / statistics.mean(counts))
        assert layer["idle_experts"] == counts.count(0)


def test_the_load_of_wide_ids(path: str, rng: np.random.Generator) -> None:
    rows = random_routing(rng, 500, 3, 4, 300)
    with tracefile.TraceWriter(path, num_layers=3, top_k=4, num_experts=300) as writer:
        writer.append("a", rows)
    counted = document(path)["load"]
    assert [layer["counts"] for layer in counted["layers"]] == expected_load([rows], 300)


@pytest.mark.parametrize("limit", [12, 1000, 12 * 64, 12 * 200])
def test_the_load_does_not_depend_on_the_slices(
    path: str, arrays: Arrays, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "SLICE_BYTES", limit)
    sizes = []
    count = load._LoadCount._count

    def recorded(self: Any, rows: Any) -> None:
        sizes.append(len(rows))
        count(self, rows)

    monkeypatch.setattr(load._LoadCount, "_count", recorded)
    counted = document(path)["load"]
    assert [layer["counts"] for layer in counted["layers"]] == expected_load(list(arrays.values()))
    assert max(sizes) * 12 <= limit


def test_each_chunk_is_decoded_once(path: str, arrays: Arrays) -> None:
    seen: list[tuple[str, tuple[int, int]]] = []
    observe = lambda segment, chunks: seen.extend((segment, chunk) for chunk in chunks)  # noqa: E731
    read.chunk_observers.append(observe)
    try:
        document(path)
        assert len(seen) == len(set(seen)) > 0
        seen.clear()
        facts = document(path, "--no-load")
    finally:
        read.chunk_observers.remove(observe)
    assert facts["load"] is None
    assert seen == []


def test_slices_are_cut_between_chunks(path: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_routing(rng, 100, 6, 2, 16)
    with _writer(path, rows_per_chunk=8) as writer:
        writer.append("a", rows)
    monkeypatch.setattr(load, "SLICE_BYTES", 20 * 12)
    tracefile.configure(cache_bytes=0)
    seen: list[tuple[int, int]] = []
    observe = lambda segment, chunks: seen.extend(chunks)  # noqa: E731
    read.chunk_observers.append(observe)
    try:
        facts = document(path)
    finally:
        read.chunk_observers.remove(observe)
    assert [layer["counts"] for layer in facts["load"]["layers"]] == expected_load([rows])
    assert seen == [(0, row) for row in range(13)]


def test_one_layer(path: str, arrays: Arrays) -> None:
    counted = document(path, "--layer", "7")["load"]
    (layer,) = counted["layers"]
    assert layer["layer"] == 7
    assert layer["counts"] == expected_load(list(arrays.values()))[3]
    result = cli("inspect", path, "--layer", "7")
    assert result.exit_code == 0
    total = sum(layer["counts"])
    bars = result.stdout[result.stdout.index("max/mean") :].splitlines()[1:]
    for expert, number in enumerate(layer["counts"]):
        assert any(line.split()[:3] == [str(expert), str(number), f"{number / total:.2%}"] for line in bars)
    longest = max(bars, key=lambda line: line.count("█"))
    assert int(longest.split()[0]) == int(np.argmax(layer["counts"]))


def test_a_layer_that_the_trace_does_not_have(path: str, arrays: Arrays) -> None:
    for layer in ("6", "11", "-1"):
        result = cli("inspect", path, "--layer", layer)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"no layer {layer}" in result.stderr
        assert "3-5, 7-8, 10" in result.stderr
    assert cli("inspect", path, "--layer", "x").exit_code == 2
    assert cli("inspect", path, "--layer", "3", "--no-load").exit_code == 2


def test_the_list_of_samples(path: str, arrays: Arrays) -> None:
    trace = tracefile.open(path)
    listed = document(path, "--samples", "--no-load")["sample_list"]
    assert [(each["id"], each["rows"], each["missing_rows"]) for each in listed] == [
        (sample, len(rows), int((rows == -1).all(axis=(1, 2)).sum())) for sample, rows in arrays.items()
    ]
    for each in listed:
        assert each["segments"] == [span.segment for span in trace.entry(each["id"]).spans]
    text = cli("inspect", path, "--samples", "--no-load").stdout
    line = next(line for line in text.splitlines() if line.startswith("s/6"))
    assert line.split() == ["s/6", "130", "50", *listed[6]["segments"]]


def test_one_sample(path: str, arrays: Arrays) -> None:
    facts = document(path, "--sample", "s/6")
    span = tracefile.open(path).entry("s/6").spans[0]
    assert facts["sample"]["rows"] == 130
    assert facts["sample"]["missing"] == [[0, 50]]
    assert facts["sample"]["listed_in"] == span.segment
    (shown,) = facts["sample"]["spans"]
    assert (shown["segment"], shown["start"], shown["stop"]) == (span.segment, span.start, span.stop)
    assert 0 < shown["bytes"] < os.path.getsize(f"{path}/segments/{span.segment}/c/0/0/0")
    assert [layer["counts"] for layer in facts["load"]["layers"]] == expected_load([arrays["s/6"]])
    text = cli("inspect", path, "--sample", "s/6").stdout
    assert "130, of which 50 were never captured: [0, 50)" in text
    assert span.segment in text
    assert f"[{span.start}, {span.stop})" in text


def test_the_bytes_of_a_sample_add_up(path: str, arrays: Arrays) -> None:
    size = 0
    for sample in list(arrays)[3:]:  # all that the last segment holds
        spans = document(path, "--sample", sample, "--no-load")["sample"]["spans"]
        size += sum(span["bytes"] for span in spans)
    (segment,) = {span.segment for sample in list(arrays)[4:] for span in tracefile.open(path).entry(sample).spans}
    header = tracefile.open(path).segments[segment]
    layers, rows = header.grid
    assert size == os.path.getsize(f"{path}/segments/{segment}/c/0/0/0") - 64 - (16 * layers * rows + 4)


def test_a_sample_that_the_trace_does_not_have(path: str, arrays: Arrays) -> None:
    result = cli("inspect", path, "--sample", "s/66")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no sample 's/66' among 8" in result.stderr
    assert "'s/6'" in result.stderr


def test_superseded_revisions_and_shared_rows(path: str, rng: np.random.Generator) -> None:
    first, second, third = (random_routing(rng, rows, 6, 2, 16) for rows in (100, 40, 30))
    with _writer(path) as writer:
        writer.append_many([("a", first), ("b", second)])
        (origin,) = segment_names(path)
        writer.append("c", third)
    # A revision of "a" that keeps 60 of its rows, and a sample that shares 10 of these.
    trace = read_trace_header(path)
    entries = {"a": SampleEntry("a", (Span(origin, 0, 60),)), "d": SampleEntry("d", (Span(origin, 50, 60),))}
    header = SegmentHeader("ffff", trace.uuid, trace.config, 0, ChunkGeometry(6, 8), "fast", 0, entries)
    os.makedirs(f"{path}/segments/ffff")
    with open(f"{path}/segments/ffff/zarr.json", "wb") as file:
        file.write(documents.encode(documents.segment_document(header)))
    facts = document(path)
    assert facts["superseded"] == {"revisions": 1, "unreachable_rows": 40}
    assert (facts["samples"], facts["rows"], facts["rows_stored"]) == (4, 140, 170)
    expected = expected_load([first[:60], second, third, first[50:60]])
    assert [layer["counts"] for layer in facts["load"]["layers"]] == expected
    assert "1 older revision of samples; 40 stored rows that no sample reaches" in cli("inspect", path).stdout
    sample = document(path, "--sample", "a")["sample"]
    assert (sample["rows"], sample["listed_in"]) == (60, "ffff")
    assert sample["superseded"] == [{"listed_in": origin, "rows": 100}]


def test_writers(path: str, rng: np.random.Generator) -> None:
    with _writer(path, codec="compact") as writer:
        for number in range(3):
            writer.append(f"{number}", random_routing(rng, 10, 6, 2, 16))
    code = """
import os, sys, numpy as np, tracefile
with tracefile.TraceWriter(sys.argv[1], num_layers=6, top_k=2, num_experts=16, layer_ids=(3, 4, 5, 7, 8, 10)) as writer:
    writer.append_many([("x", np.zeros((70, 6, 2), int)), ("y", np.zeros((7, 6, 2), int))])
print(os.getpid())
"""
    pid = int(run_python(code, path).stdout)
    facts = document(path, "--no-load")
    found = [(each["pid"], each["segments"], each["samples"], each["rows"]) for each in facts["writers"]]
    assert found == [(pid, 1, 2, 77), (os.getpid(), 3, 3, 30)]
    assert {each["version"] for each in facts["writers"]} == {tracefile.__version__}
    assert {each["host"] for each in facts["writers"]} == {os.uname().nodename}
    assert all(each["first"] <= each["last"] for each in facts["writers"])
    assert facts["codecs"] == {"compact": 3, "fast": 1}
    assert str(pid) in cli("inspect", path, "--no-load").stdout


def test_histogram_edges() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        high = int(10 ** rng.uniform(0, 6))
        lengths = rng.integers(0, high + 1, int(rng.integers(1, 50))).tolist()
        facts = length_facts(lengths)
        assert facts is not None
        assert len(facts.counts) <= 8
        assert sum(facts.counts) == len(lengths)
        assert facts.edges[0] <= min(lengths)
        assert facts.edges[-1] > max(lengths)
        assert facts.counts[0] > 0
        assert facts.counts[-1] > 0


@pytest.mark.parametrize("columns", [60, 100, 200])
@pytest.mark.parametrize("experts", [8, 32, 128, 512])
def test_the_load_picture_fits(path: str, experts: int, columns: int) -> None:
    layers = 3
    rows = np.tile(np.arange(experts).reshape(-1, 1, 1), (4, layers, 1))
    rows[:, 1] = np.where(rows[:, 1] == 0, 0, experts - 1)  # layer 1 uses the first and the last expert only
    with tracefile.TraceWriter(path, num_layers=layers, top_k=1, num_experts=experts) as writer:
        writer.append("a", rows)
    text = cli("inspect", path, columns=columns).stdout
    picture = text[text.index("Load of the experts") :]
    assert all(cell_len(line) <= columns for line in picture.splitlines())
    even, skewed, _ = (next(x for x in picture.splitlines() if x.startswith(f"{layer:>5} ")) for layer in range(layers))
    heat = HeatMap.fit(experts, columns - 33)
    assert even.split()[1] == "▅" * heat.cells * heat.width
    assert even.split()[2:] == ["1.00", "0"]
    cells = skewed.split()[1]
    assert cells[-1] == "█"
    assert set(cells[heat.width : -heat.width]) == {"·"}
    assert skewed.split()[-2:] == [str(experts - 1), str(experts - 2)]
    assert "worst" in picture


def test_plain_characters_where_the_terminal_has_no_others(path: str, arrays: Arrays) -> None:
    command = [sys.executable, "-m", "tracefile.cli", "inspect", path, "--samples"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "100"}
    result = subprocess.run(command, capture_output=True, timeout=100, env=environment)
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"Load of the experts" in result.stdout
    result.stdout.decode("ascii")


def test_damaged_documents_leave_the_rest(path: str, arrays: Arrays) -> None:
    segment = tracefile.open(path).entry("s/2").spans[0].segment
    with open(f"{path}/segments/{segment}/zarr.json", "r+b") as file:
        file.seek(300)
        file.write(b"##")
    facts = document(path, code=1)
    assert [each["segment"] for each in facts["damaged"]] == [segment]
    assert facts["samples"] == 7
    rest = [rows for sample, rows in arrays.items() if sample != "s/2"]
    assert [layer["counts"] for layer in facts["load"]["layers"]] == expected_load(rest)
    result = cli("inspect", path)
    assert result.exit_code == 1
    assert segment in result.stdout
    assert f"1 damaged segment; for all that is damaged, and whose rows, run: tracefile verify {path}" in result.stderr
    unknown = cli("inspect", path, "--sample", "s/2")
    assert unknown.exit_code == 1
    assert "1 damaged segment may list it" in unknown.stderr


def test_a_damaged_chunk_costs_its_own_rows(path: str, rng: np.random.Generator) -> None:
    rows = random_routing(rng, 100, 6, 2, 16)
    with _writer(path, rows_per_chunk=8, layers_per_chunk=4) as writer:
        writer.append("a", rows)
        writer.append("b", rows)
    segment = tracefile.open(path).entry("a").spans[0].segment
    with open(f"{path}/segments/{segment}/c/0/0/0", "r+b") as file:
        file.seek(70)  # in the first chunk: rows 0 to 8 of the first layers
        byte = file.read(1)
        file.seek(70)
        file.write(bytes([byte[0] ^ 1]))
    facts = document(path, code=1)
    assert [each["segment"] for each in facts["damaged"]] == [segment]
    assert (facts["load"]["rows"], facts["load"]["uncounted_rows"]) == (192, 8)
    assert [layer["counts"] for layer in facts["load"]["layers"]] == expected_load([rows[8:], rows])
    assert document(path, "--no-load")["damaged"] == []  # which looks at no chunk
    assert "without 8 rows that could not be read" in cli("inspect", path).stdout


def test_a_bad_sector(path: str, arrays: Arrays, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = tracefile.open(path).entry("s/2").spans[0].segment
    inode, pread = os.stat(f"{path}/segments/{segment}/c/0/0/0").st_ino, os.pread

    def failing(fd: int, nbytes: int, offset: int) -> bytes:
        if os.fstat(fd).st_ino == inode and offset < 100 < offset + nbytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, nbytes, offset)

    monkeypatch.setattr(os, "pread", failing)
    facts = document(path, code=1)
    assert [each["segment"] for each in facts["damaged"]] == [segment]
    assert "Input/output error" in facts["damaged"][0]["message"]
    assert facts["load"]["uncounted_rows"] == 300


def test_ids_that_no_expert_has(path: str) -> None:
    with tracefile.TraceWriter(path, num_layers=1, top_k=2, num_experts=16, codec="none") as writer:
        writer.append("a", np.zeros((8, 1, 2), int))
    (segment,) = segment_names(path)
    shard = f"{path}/segments/{segment}/c/0/0/0"
    ids = bytes([16, 200, *[0] * 14])
    with open(shard, "r+b") as file:
        file.seek(64)
        file.write(ids + struct.pack("<I", crc32c(ids)))
    facts = document(path, code=1)
    assert facts["load"]["ids_outside"] == 2
    assert facts["load"]["layers"][0]["counts"] == [14] + [0] * 15
    result = cli("inspect", path)
    assert "without 2 ids that no expert has" in result.stdout
    assert "run: tracefile verify" in result.stderr


@pytest.mark.parametrize("option", ["--load", "--no-load"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_damaged_shard_files(path: str, arrays: Arrays, damage: str, option: str) -> None:
    segment = tracefile.open(path).entry("s/2").spans[0].segment
    shard = f"{path}/segments/{segment}/c/0/0/0"
    os.unlink(shard) if damage == "missing" else os.truncate(shard, 100)
    facts = document(path, option, code=1)
    assert [each["segment"] for each in facts["damaged"]] == [segment]
    assert facts["samples"] == 8
    if option == "--load":
        assert facts["load"]["uncounted_rows"] == 300
    assert document(path, option, "--sample", "s/2", code=1)["sample"]["spans"][0]["bytes"] is None


def test_a_segment_that_samples_need_and_that_is_gone(path: str, arrays: Arrays) -> None:
    origin = tracefile.open(path).entry("s/2").spans[0].segment
    trace = read_trace_header(path)
    entries = {"fork": SampleEntry("fork", (Span(origin, 0, 9),))}
    header = SegmentHeader("ffff", trace.uuid, trace.config, 0, ChunkGeometry(6, 8), "fast", 0, entries)
    os.makedirs(f"{path}/segments/ffff")
    with open(f"{path}/segments/ffff/zarr.json", "wb") as file:
        file.write(documents.encode(documents.segment_document(header)))
    shutil.rmtree(f"{path}/segments/{origin}")
    for option in ("--load", "--no-load"):
        facts = document(path, option, code=1)
        assert [each["segment"] for each in facts["damaged"]] == [origin]
    counted = load.expert_load(survey.take_survey(path, trace), entries.values())
    assert (set(counted.damaged), counted.uncounted_rows) == ({origin}, 9)


def test_a_segment_that_vanishes_meanwhile(path: str, arrays: Arrays, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = tracefile.open(path).entry("s/2").spans[0].segment
    taken = inspect_module.take_survey

    def then_removed(*arguments: Any) -> Any:
        found = taken(*arguments)
        shutil.rmtree(f"{path}/segments/{segment}")
        return found

    monkeypatch.setattr(inspect_module, "take_survey", then_removed)
    facts = document(path)
    assert (facts["damaged"], facts["vanished"]) == ([], [segment])
    assert facts["load"]["uncounted_rows"] == 300


def test_a_segment_that_vanishes_before_it_is_read(path: str, arrays: Arrays, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = tracefile.open(path).entry("s/2").spans[0].segment
    listed = survey.list_segments

    def then_removed(where: str) -> list[str]:
        names = listed(where)
        shutil.rmtree(f"{path}/segments/{segment}", ignore_errors=True)
        return sorted({*names, segment})

    monkeypatch.setattr(survey, "list_segments", then_removed)
    facts = document(path)
    assert (facts["damaged"], facts["vanished"], facts["samples"]) == ([], [segment], 7)
    assert "1 segment removed while this was read" in cli("inspect", path).stdout


def test_a_trace_without_rows(path: str) -> None:
    _writer(path).close()
    for options in ([], ["--samples"], ["--layer", "3"], ["--no-load"]):
        assert cli("inspect", path, *options).exit_code == 0
    facts = document(path)
    assert (facts["samples"], facts["lengths"], facts["bytes"]["ratio"]) == (0, None, None)
    assert facts["load"]["layers"][0]["counts"] == [0] * 16
    with _writer(path) as writer:
        writer.append("empty", np.zeros((0, 6, 2), int))
    for options in ([], ["--samples"], ["--layer", "3"], ["--no-load"], ["--sample", "empty"]):
        assert cli("inspect", path, *options).exit_code == 0
    facts = document(path, "--sample", "empty")
    assert (facts["samples"], facts["sample"]["spans"], facts["load"]["rows"]) == (1, [], 0)


def test_errors_are_one_line(path: str, tmp_path: Any) -> None:
    for where, words in {path: "no trace at", str(tmp_path): "not a trace"}.items():
        result = cli("inspect", where)
        assert (result.exit_code, result.stdout) == (2, "")
        assert words in result.stderr
        assert result.stderr.count("\n") == 1
    with _writer(path) as writer:
        writer.append("a", np.zeros((2, 6, 2), int))
    with open(f"{path}/zarr.json", "r+b") as file:
        raw = file.read()
        file.seek(raw.index(b'"top_k":2') + 8)
        file.write(b"3")
    result = cli("inspect", path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert "zarr.json" in result.stderr
    os.unlink(f"{path}/zarr.json")
    os.mkdir(f"{path}/zarr.json")
    result = cli("inspect", path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"tracefile: {path}/zarr.json cannot be read (Is a directory)\n"


def test_control_characters_of_sample_ids_do_not_reach_the_terminal(path: str) -> None:
    with _writer(path) as writer:
        writer.append("\x1b[2J[red]\n", np.zeros((2, 6, 2), int))
    for options in (["--samples"], ["--sample", "\x1b[2J[red]\n"]):
        text = cli("inspect", path, *options).stdout
        assert "\x1b" not in text
        assert "\\x1b[2J[red]\\n" in text


def test_version_and_help() -> None:
    assert cli("--version").stdout == f"tracefile {tracefile.__version__}\nnative decoder: {native.status()}\n"
    assert cli().exit_code == 2
    for arguments in (["--help"], ["inspect", "--help"], ["verify", "-h"]):
        result = cli(*arguments)
        assert result.exit_code == 0
        assert "Exit codes: 0 sound" in result.stdout
        assert "completion" not in result.stdout


def test_in_a_process_of_its_own(path: str, arrays: Arrays) -> None:
    script = os.path.join(os.path.dirname(sys.executable), "tracefile")
    result = subprocess.run([script, "inspect", path, "--json"], capture_output=True, text=True, timeout=100)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["samples"] == 8
    result = subprocess.run([script, "inspect", f"{path}/nothing"], capture_output=True, text=True, timeout=100)
    assert (result.returncode, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr


def test_a_materialize_limit_makes_slices_smaller(path: str, arrays: Arrays) -> None:
    tracefile.configure(materialize_limit=12 * 50)
    with pytest.raises(tracefile.MaterializeLimitError):
        tracefile.open(path)["s/2"].materialize(dtype=torch.uint8)
    counted = document(path)["load"]
    assert [layer["counts"] for layer in counted["layers"]] == expected_load(list(arrays.values()))


def test_memory_is_bounded(path: str) -> None:
    block = write_long_sample(path)  # the limit leaves 96 MiB
    code = """
import resource, sys, torch, tracefile
from tracefile.cli import app
from typer.testing import CliRunner
tracefile.configure(decode_threads=1)
CliRunner().invoke(app, ["inspect", sys.argv[1], "--no-load"])
data = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (data + 96 * 2**20,) * 2)
result = CliRunner().invoke(app, ["inspect", sys.argv[1], "--json"], catch_exceptions=False)
print(result.stdout.strip())
try:
    tracefile.open(sys.argv[1])["long"].materialize(dtype=torch.uint8)
except (MemoryError, RuntimeError):
    print("bounded")
"""
    printed, control = run_python(code, path).stdout.splitlines()
    assert control == "bounded"
    counted = json.loads(printed)["load"]
    assert counted["rows"] == 1_000_000
    assert counted["layers"][46]["counts"] == (np.bincount(block[:, 46].ravel(), minlength=64) * 200).tolist()
