"""Signs of a bad capture at the writer's door: refused, recorded where ``inspect`` shows them, or not looked for."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
from support import random_routing, tree
from typer.testing import CliRunner

import tracefile
from tracefile.cli import app
from tracefile.store import unfinished
from tracefile.validate import CaptureFinding

SHAPE = {"num_layers": 6, "top_k": 4, "num_experts": 64}


def good(rng: np.random.Generator, rows: int = 200) -> np.ndarray[Any, Any]:
    return random_routing(rng, rows, **SHAPE)


def bad(rng: np.random.Generator, kind: str) -> np.ndarray[Any, Any]:
    ids = good(rng)
    if kind == "zero-layer":
        ids[:, 4] = 0
    elif kind == "duplicate-expert":
        ids[150, 2, 3] = ids[150, 2, 0]
    elif kind == "repeated-row":
        ids[100:167] = ids[100]
    return ids


def inspect(path: str, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["inspect", path, *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


KINDS = ["zero-layer", "duplicate-expert", "repeated-row", "row-count"]


@pytest.mark.parametrize("kind", KINDS)
def test_strict_refuses(path: str, rng: np.random.Generator, kind: str) -> None:
    with tracefile.TraceWriter(path, **SHAPE, validate="strict") as writer:
        writer.append("before", good(rng), num_tokens=201)
        before = tree(path)
        with pytest.raises(tracefile.CaptureError, match=r"'suspect'.*nothing was written") as caught:
            writer.append("suspect", bad(rng, kind), num_tokens=190 if kind == "row-count" else 200)
        assert tree(path) == before
        assert list(unfinished(path)) == []
        again = pickle.loads(pickle.dumps(caught.value))
        assert isinstance(again, ValueError)
        assert [finding.kind for finding in vars(again)["findings"]] == [kind]
        with pytest.raises(tracefile.CaptureError):
            writer.append_many([("fine", good(rng)), ("suspect", bad(rng, "zero-layer"))])
        assert tree(path) == before
        writer.append("suspect", good(rng))


@pytest.mark.parametrize("kind", KINDS)
def test_warn_records(path: str, rng: np.random.Generator, kind: str) -> None:
    ids = bad(rng, kind)
    with tracefile.TraceWriter(path, **SHAPE, layer_ids=(1, 2, 3, 5, 6, 7)) as writer:
        writer.append("fine", good(rng))
        experts = writer.append("suspect", ids, num_tokens=190 if kind == "row-count" else None)
    np.testing.assert_array_equal(experts.numpy(), ids)
    (found,) = json.loads(inspect(path, "--json"))["findings"]
    finding = CaptureFinding.from_json(found)
    assert (finding.kind, finding.sample) == (kind, "suspect")
    layers = {"zero-layer": (6,), "duplicate-expert": (3,)}.get(kind, ())
    rows = {"duplicate-expert": (150, 151), "repeated-row": (100, 167)}.get(kind, (0, 200))
    assert (finding.layers, finding.rows) == (layers, rows)
    assert f"{kind} in 1 sample (" in inspect(path)
    assert finding.message[:40] in inspect(path, "--sample", "suspect")
    assert finding.message[:40] not in inspect(path, "--sample", "fine")
    (header,) = [header for header in tracefile.open(path).segments.values() if header.findings]
    assert header.findings == (found,)
    with tracefile.TraceWriter(path, **SHAPE, layer_ids=(1, 2, 3, 5, 6, 7)) as writer:
        writer.append("suspect", good(rng))  # a newer revision, and a sound one
    assert json.loads(inspect(path, "--json"))["findings"] == []


def test_off_does_not_look(path: str, rng: np.random.Generator) -> None:
    with tracefile.TraceWriter(path, **SHAPE, validate="off") as writer:
        for kind in KINDS:
            writer.append(kind, bad(rng, kind), num_tokens=5)
        ids = good(rng)
        ids[3, 2, 1] = 64
        with pytest.raises(tracefile.ExpertIdError):
            writer.append("out of range", ids)
    assert json.loads(inspect(path, "--json"))["findings"] == []


def test_rows_are_those_of_the_sample(path: str, rng: np.random.Generator) -> None:
    """Also where a sample goes on, or begins with rows that are there already."""
    with tracefile.TraceWriter(path, **SHAPE) as writer:
        first = good(rng, 300)
        writer.append("a", first)
        writer.append("a", bad(rng, "duplicate-expert"), start=290, num_tokens=490)
        writer.append("b", np.concatenate([first, bad(rng, "duplicate-expert")]), num_tokens=501)
    findings = [CaptureFinding.from_json(each) for each in json.loads(inspect(path, "--json"))["findings"]]
    assert [(f.sample, f.kind, f.rows) for f in findings] == [
        ("a", "duplicate-expert", (440, 441)),
        ("b", "duplicate-expert", (450, 451)),
    ]


def test_dense_layers(path: str, rng: np.random.Generator) -> None:
    ids = good(rng)
    ids[:, [0, 4]] = 0
    with tracefile.TraceWriter(path, **SHAPE, validate="strict", dense_layers=[0, 4]) as writer:
        writer.append("a", ids)
    with (
        tracefile.TraceWriter(path, **SHAPE, validate="strict", dense_layers=[]) as writer,
        pytest.raises(tracefile.CaptureError),
    ):
        writer.append("a", ids)
    with pytest.raises(tracefile.OptionError, match="validate must be one of"):
        tracefile.TraceWriter(path, **SHAPE, validate="maybe")
    with pytest.raises(tracefile.OptionError, match="layer"):
        tracefile.TraceWriter(path, **SHAPE, dense_layers=[17])
