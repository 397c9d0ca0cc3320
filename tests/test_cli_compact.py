"""``tracefile compact`` and ``tracefile copy``."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support import tree
from typer.testing import CliRunner

import tracefile
from tracefile.cli import app
from tracefile.store import list_segments

if TYPE_CHECKING:
    from typer.testing import Result


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False, env={"COLUMNS": "120"})


def document(*arguments: str, code: int = 0) -> dict[str, Any]:
    result = cli(*arguments, "--json")
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def trace(path: str) -> str:
    with tracefile.TraceWriter(path, num_layers=5, top_k=2, num_experts=16) as writer:
        for number in range(8):
            writer.append(f"s{number % 7}", np.full((40, 5, 2), number))
    return path


NOW = ("--min-age", "0", "--settle", "0")


def _damage(path: str) -> str:
    victim = list_segments(path)[2]
    with open(f"{path}/segments/{victim}/c/0/0/0", "r+b") as file:
        file.seek(80)
        file.write(b"\xff")
    return victim


def test_compact(trace: str) -> None:
    assert "nothing to merge" in cli("compact", trace).stdout, "they are too young"
    planned = cli("compact", trace, *NOW, "--dry-run").stdout
    assert "would merge 8 segments into 1" in planned
    assert len(list_segments(trace)) == 8
    result = cli("compact", trace, *NOW)
    assert result.exit_code == 0
    assert "merged 8 segments into 1 in " in result.stdout
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["segments", "8", "1"] in rows
    assert ["files", "18", "4"] in rows
    assert any(row[:1] == ["opening"] and row[2::2] == ["ms", "ms"] for row in rows)
    assert len(list_segments(trace)) == 1
    assert tracefile.open(trace)["s0"][0, 0].tolist() == [7, 7]
    assert "nothing to merge" in cli("compact", trace, *NOW).stdout


def test_compact_as_json(trace: str) -> None:
    plan = document("compact", trace, *NOW, "--dry-run")
    assert (plan["dry_run"], plan["after"]["segments"], plan["open_seconds"]["after"]) == (True, 1, None)
    done = document("compact", trace, *NOW, "--target-bytes", "1.5 GiB", "--min-segments", "2", "--no-durable")
    assert done["before"] == plan["before"]
    assert done["merged"][0]["segment"] == list_segments(trace)[0]
    assert len(done["merged"][0]["replaced"]) == 8
    assert done["after"]["bytes"] < done["before"]["bytes"]
    assert done["open_seconds"]["after"] > 0
    facts = document("inspect", trace)
    assert facts["superseded"] == {"revisions": 0, "unreachable_rows": 40}
    assert (facts["segments"], facts["rows"], facts["rows_stored"]) == (1, 7 * 40, 8 * 40)
    assert "40 stored rows that no sample reaches" in " ".join(cli("inspect", trace).stdout.split())
    assert "s3" in cli("inspect", trace, "--sample", "s3").stdout
    with tracefile.TraceWriter(trace, num_layers=5, top_k=2, num_experts=16) as writer:
        writer.append("s1", np.zeros((3, 5, 2), int))
    assert document("inspect", trace)["superseded"] == {"revisions": 1, "unreachable_rows": 80}
    document("compact", trace, *NOW, "--min-segments", "2", "--drop-unreachable")
    assert document("inspect", trace)["superseded"]["unreachable_rows"] == 0


def test_inspect_of_samples_whose_segments_were_replaced(trace: str) -> None:
    opened = tracefile.open(trace)
    document("compact", trace, *NOW)
    with tracefile.TraceWriter(trace, num_layers=5, top_k=2, num_experts=16) as writer:
        writer.append("fork", opened["s3"][10:30])
    (merged, _) = list_segments(trace)
    found = document("inspect", trace, "--sample", "fork", "--samples", "--load")
    assert [(span["segment"], span["start"], span["stop"]) for span in found["sample"]["spans"]] == [(merged, 130, 150)]
    assert [each["segments"] for each in found["sample_list"] if each["id"] == "fork"] == [[merged]]
    assert document("verify", trace)["sound"]


def test_compact_leaves_damage(trace: str) -> None:
    victim = _damage(trace)
    result = cli("compact", trace, *NOW)
    assert result.exit_code == 1
    assert f"left as found  {victim}" in result.stdout
    assert "fails its checksum" in result.stdout
    assert "1 damaged segment left as found" in result.stderr
    assert len(list_segments(trace)) == 2
    assert list(document("compact", trace, *NOW, "--min-segments", "2", code=1)["refused"]) == [victim]


@pytest.mark.parametrize(
    "arguments",
    [("--target-bytes", "many"), ("--target-bytes", "0"), ("--min-segments", "1"), ("--min-age", "-1")],
)
def test_compact_refuses(trace: str, arguments: tuple[str, ...]) -> None:
    assert cli("compact", trace, *arguments).exit_code == 2
    assert cli("compact", f"{trace}.none").exit_code == 2
    assert len(list_segments(trace)) == 8


def test_copy(trace: str) -> None:
    target = f"{trace}.copy"
    result = cli("copy", trace, target)
    assert result.exit_code == 0
    assert f"copied  {trace} to {target}" in result.stdout
    assert "8 segments, " in result.stdout
    assert tree(target) == tree(trace)
    assert "; 8 segments there already" in cli("copy", trace, target).stdout
    found = document("copy", trace, f"file://{target}", "--durable")
    assert (found["segments"], found["present"], found["damaged"], found["target"]) == (0, 8, {}, target)


def test_copy_of_what_is_damaged(trace: str) -> None:
    victim, target = _damage(trace), f"{trace}.copy"
    result = cli("copy", trace, target)
    assert result.exit_code == 1
    assert victim in result.stdout
    assert "sample s2 rows [0, 40)" in result.stdout
    assert "6 segments not copied" in result.stdout
    assert len(list_segments(target)) == 2
    result = cli("copy", trace, target, "--skip-damaged")
    assert result.exit_code == 1
    assert "fails at the target too" in result.stdout
    assert tree(target) == tree(trace)
    assert document("copy", trace, f"{target}.2", "--skip-damaged", code=1)["lost"] == [
        {"sample": "s2", "start": 0, "stop": 40}
    ]
    assert document("copy", trace, f"{target}.3", "--no-verify")["damaged"] == {}


def test_copy_refuses(trace: str) -> None:
    other = f"{trace}.other"
    tracefile.TraceWriter(other, num_layers=5, top_k=2, num_experts=16).close()
    result = cli("copy", trace, other)
    assert result.exit_code == 2
    assert "is another trace" in result.stderr
    assert cli("copy", f"{trace}.none", other).exit_code == 2
    assert cli("copy", trace, trace).exit_code == 2
    assert cli("copy", trace, "gopher://x").exit_code == 2
    assert os.listdir(f"{other}/segments") == ["zarr.json"]
