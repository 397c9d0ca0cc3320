"""``tracefile gc``: what it deletes, and what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support import ids_of
from typer.testing import CliRunner

import tracefile
from tracefile.cli import app
from tracefile.gc_result import GcResult
from tracefile.store import list_segments

if TYPE_CHECKING:
    from typer.testing import Result

SMALL = {"num_layers": 4, "top_k": 2, "num_experts": 64}


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["gc", *arguments], catch_exceptions=False, env={"COLUMNS": "100"})


def as_json(*arguments: str, code: int = 0) -> dict[str, Any]:
    result = cli(*arguments, "--json")
    assert result.exit_code == code, result.output
    assert result.stderr == ""
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def write(path: str, samples: int = 3) -> None:
    with tracefile.TraceWriter(path, **SMALL) as writer:
        for number in range(samples):
            writer.append(f"{number}", ids_of(f"{path}{number}", 200, **SMALL))


def stored(path: str) -> int:
    return sum(header.shard_bytes for header in tracefile.open(path).segments.values())


@pytest.fixture
def steps(tmp_path: Any) -> str:
    for step in (8, 9, 10, 11):
        write(str(tmp_path / f"step_{step:06d}.trace"))
    return str(tmp_path)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracefile.local_store.LocalStore.settle_seconds", 0.0)


def test_without_a_rule_nothing_that_counts_goes(steps: str) -> None:
    before = sorted(os.listdir(steps))
    result = cli(steps)
    assert result.exit_code == 0
    assert result.stdout.startswith("freed 0 B; 4 traces left; ")
    assert sorted(os.listdir(steps)) == before


def test_the_newest_steps_are_kept(steps: str) -> None:
    gone = [f"{steps}/step_{step:06d}.trace" for step in (8, 9)]
    freed = sum(map(stored, gone))
    result = cli(steps, "--keep-steps", "2", "--dry-run")
    assert "would delete" in result.stdout
    assert all(os.path.isdir(path) for path in gone)
    result = cli(steps, "--keep-steps", "2")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["trace", "deleted", "of", "freed"]
    assert [line.split()[1:3] for line in lines[1:3]] == [["whole", "(--keep-steps)"]] * 2
    assert [os.path.basename(line.split()[0]) for line in lines[1:3]] == [os.path.basename(path) for path in gone]
    assert lines[3] == "old and new by the step numbers in their names"
    assert lines[4].startswith(f"freed {freed / 1024:.1f} KiB; 2 traces left; ")
    assert sorted(os.listdir(steps)) == ["step_000010.trace", "step_000011.trace"]


def test_json(steps: str) -> None:
    paths = [f"{steps}/step_{step:06d}.trace" for step in (8, 9, 10, 11)]
    keep = sum(map(stored, paths[1:]))
    for flags in (["--dry-run"], []):
        document = as_json(steps, "--max-bytes", str(keep), *flags)
        assert document["dry_run"] is bool(flags)
        assert document["ordered_by"] == "step"
        assert document["freed_bytes"] == document["traces"][0]["freed_bytes"] > 0
        assert [trace["deleted_by"] for trace in document["traces"]] == ["max-bytes", None, None, None]
        assert [trace["path"] for trace in document["traces"]] == paths
    assert as_json(*paths[1:], "--keep-steps", "1")["traces"][0]["deleted_by"] == "keep-steps"
    assert os.listdir(steps) == ["step_000011.trace"]


def test_one_trace(path: str) -> None:
    write(path)
    with tracefile.TraceWriter(path, **SMALL) as writer:
        writer.append("0", ids_of("again", 200, **SMALL))
        writer.append_many([("m", ids_of("m", 200, **SMALL)), ("n", ids_of("n", 200, **SMALL))])
    tracefile.open(path).delete_samples(["1", "m"])
    assert as_json(path)["freed_bytes"] == 0
    (found,) = as_json(path, "--grace", "0")["traces"]
    assert len(found["segments"]) == 2
    assert found["samples"] == []
    assert found["partial_segments"] == 1
    assert set(tracefile.open(path)) == {"0", "2", "n"}
    result = cli(path, "--max-bytes", f"{stored(path) - 1}")
    assert result.stdout.splitlines()[1].split()[1:5] == ["1", "sample,", "1", "segment"]
    assert "more in 1 segment that are needed in part; tracefile compact frees them" in result.stdout
    assert set(tracefile.open(path)) == {"0", "n"}
    time.sleep(0.05)
    assert len(as_json(path, "--older-than", "0.01s")["traces"][0]["samples"]) == 2
    assert list(tracefile.open(path)) == []
    result = cli(path, "--keep-steps", "1")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "name their directory" in result.stderr


def test_old_traces(steps: str) -> None:
    assert as_json(steps, "--older-than", "1h")["freed_bytes"] == 0
    time.sleep(0.05)
    assert {trace["deleted_by"] for trace in as_json(steps, "--older-than", "0.02s")["traces"]} == {"older-than"}
    assert os.listdir(steps) == []


def test_damaged_traces_are_left(steps: str) -> None:
    broken = f"{steps}/step_000009.trace"
    (first, *_) = list_segments(broken)
    with open(f"{broken}/segments/{first}/zarr.json", "r+b") as file:
        file.write(b"x")
    with open(f"{steps}/step_000008.trace/zarr.json", "wb") as file:
        file.write(b'{"tracefile')
    result = cli(steps)
    assert result.exit_code == 1
    assert f"{broken}: left as it is: " in result.stdout
    assert "step_000008.trace: left as it is: " in result.stdout
    document = as_json(steps, "--keep-steps", "1", code=1)
    assert [trace["deleted_by"] for trace in document["traces"] if trace["error"] is None] == [
        "keep-steps", "keep-steps", None
    ]  # fmt: skip
    assert sorted(os.listdir(steps)) == ["step_000008.trace", "step_000011.trace"]
    result = cli(f"{steps}/step_000008.trace")
    assert result.exit_code == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "no trace at"),
        (["https://127.0.0.1/step_1.trace"], "for reading"),
        ([".", "--max-bytes", "ten"], "is no size"),
        ([".", "--older-than", "2 fortnights"], "is no duration"),
        ([".", "--keep-steps", "-1"], "keep-steps"),
        ([], "Missing argument"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


def test_units(steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def collect(paths: list[str], **options: Any) -> GcResult:
        seen.append(options)
        return GcResult()

    monkeypatch.setattr("tracefile.cli.gc.collect", collect)
    cli(steps, "--max-bytes", "10GiB", "--older-than", "7d", "--grace", "90", "--unfinished", "2h")
    wanted = {"max_bytes": 10 * 2**30, "older_than": 7 * 86400, "grace": 90, "unfinished": 7200, "keep_steps": None}
    assert {name: seen[0][name] for name in wanted} == wanted
    cli(steps)
    assert (seen[1]["grace"], seen[1]["unfinished"], seen[1]["max_bytes"]) == (600, 86400, None)


def test_the_command_itself(steps: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tracefile.cli", "gc", steps, "--keep-steps", "1"],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "whole (--keep-steps)" in done.stdout
    with tracefile.open(f"{steps}/step_000011.trace") as trace:
        for number in range(3):
            ids = ids_of(f"{trace.path}{number}", 200, **SMALL)
            np.testing.assert_array_equal(trace[f"{number}"].numpy(), ids)
