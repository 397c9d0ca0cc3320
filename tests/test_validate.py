"""Signs of a bad capture: each is found where it is, and sound routing shows none."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import MODEL_SHAPES, Shape, random_routing

import tracefile
from tracefile.format import ModelConfig, default_geometry
from tracefile.validate import REPEAT_THRESHOLD, CaptureCheck, CaptureFinding, capture_error, check_validate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Array = np.ndarray[Any, Any]

TRACES = Path(__file__).parents[2] / "shared" / "traces"
#: Global ids that differ from the positions, to see which of them a finding gives.
CONFIG = ModelConfig(num_layers=6, top_k=4, num_experts=64, layer_ids=(10, 11, 12, 13, 14, 15))


def _sound(rows: int, config: ModelConfig, seed: int = 0) -> Array:
    # The last row is made to hold the largest id, perhaps twice.
    ids = random_routing(
        np.random.default_rng(seed), rows + 1, config.num_layers, config.top_k, config.num_experts, config.dtype
    )
    return ids[:-1]


def _check(
    ids: Array,
    config: ModelConfig,
    cuts: Iterable[int] = (),
    captured: Array | None = None,
    *,
    start: int = 0,
    num_tokens: int | None = None,
    check: CaptureCheck | None = None,
    **options: Any,
) -> list[CaptureFinding]:
    check = CaptureCheck(config, **options) if check is None else check
    check.begin("a")
    edges = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    for first, stop in itertools.pairwise(edges):
        check.block(ids[first:stop], start + first, None if captured is None else captured[first:stop])
    return check.finish(num_tokens)


def _facts(findings: Sequence[CaptureFinding]) -> list[tuple[Any, ...]]:
    return [(each.kind, each.rows, each.count, each.layers) for each in findings]


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def _expected(
    ids: Array, config: ModelConfig, captured: Array, start: int, dense: set[int] | None, threshold: int
) -> list[tuple[Any, ...]]:
    """The findings, by plain Python, one row and layer after the other."""
    rows = {start + i: ids[i].tolist() for i in range(len(ids)) if captured[i]}
    layers, top_k = range(config.num_layers), config.top_k
    nothing = [0] * top_k
    zero = [layer for layer in layers if top_k > 1 and rows and all(row[layer] == nothing for row in rows.values())]
    leading = 0
    while leading in zero and config.layer_ids[leading] == leading:
        leading += 1
    if dense is not None:
        bad = [layer for layer in zero if config.layer_ids[layer] not in dense]
    elif leading == config.num_layers or leading > max(1, config.num_layers // 8):
        bad = zero
    else:
        bad = [layer for layer in zero if layer >= leading]
    found: list[tuple[Any, ...]] = []

    def add(kind: str, numbers: Sequence[int], where: Iterable[int]) -> None:
        if numbers:
            ids_of = tuple(config.layer_ids[layer] for layer in sorted(where))
            found.append((kind, _runs(numbers)[0], len(numbers), ids_of))

    if bad:
        add("zero-layer", sorted(rows), bad)
    twice = [(n, k) for n, row in rows.items() for k in layers if k not in zero and len(set(row[k])) < top_k]
    add("duplicate-expert", sorted({number for number, _ in twice}), {layer for _, layer in twice})
    repeated: list[int] = []
    for first, stop in _runs(sorted(rows)):
        while first < stop:
            end = first + 1
            while end < stop and rows[end] == rows[first]:
                end += 1
            if end - first > threshold and config.num_experts > 1:
                repeated += range(first, end)
            first = end
    if not (bad and len(zero) == config.num_layers):
        add("repeated-row", repeated, ())
    return found


@st.composite
def _captures(draw: st.DrawFn) -> dict[str, Any]:
    layers = draw(st.sampled_from([1, 2, 5, 17]))
    top_k, experts = draw(st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 64), (4, 256), (8, 384), (5, 257)]))
    moe_only = draw(st.booleans())
    config = ModelConfig(layers, top_k, experts, tuple(range(3, 3 + layers)) if moe_only else ())
    rows = draw(st.integers(0, 40))
    ids = _sound(rows, config, draw(st.integers(0, 2**32 - 1))).copy()
    row = st.integers(0, rows)
    layer = st.integers(0, layers)
    slot = st.integers(0, top_k - 1)
    for _ in range(draw(st.integers(0, 3)) if rows else 0):
        a, b = sorted((draw(row), draw(row)))
        k, m = sorted((draw(layer), draw(layer)))
        match draw(st.sampled_from(["zeros", "dense", "everything", "duplicate", "repeat"])):
            case "zeros":
                ids[a:b, k:m] = 0
            case "dense":
                ids[:, k:m] = 0
            case "everything":
                ids[:, :] = 0
            case "duplicate":
                at = min(a, rows - 1), min(k, layers - 1)
                ids[(*at, draw(slot))] = ids[(*at, draw(slot))]
            case "repeat":
                ids[a:b] = ids[min(a, rows - 1)]
    captured = np.ones(rows, bool)
    if rows and draw(st.booleans()):
        a, b = sorted((draw(row), draw(row)))
        captured[a:b] = False
        captured[draw(st.lists(st.integers(0, rows - 1), max_size=3))] = False
    return {
        "ids": ids,
        "config": config,
        "captured": captured,
        "start": draw(st.sampled_from([0, 0, 7])),
        "dense": draw(st.one_of(st.none(), st.none(), st.sets(st.sampled_from(config.layer_ids)))),
        "threshold": draw(st.integers(1, 6)),
        "cuts": draw(st.sets(st.integers(1, 39), max_size=6)),
    }


@given(_captures())
@settings(max_examples=200, deadline=None)
def test_findings_are_those_of_plain_python(capture: dict[str, Any]) -> None:
    config, captured, ids = capture["config"], capture["captured"], capture["ids"].copy()
    ids[~captured] = config.fill_value
    found = _check(
        ids,
        config,
        capture["cuts"],
        captured,
        start=capture["start"],
        dense_layers=capture["dense"],
        repeat_threshold=capture["threshold"],
    )
    expected = _expected(ids, config, captured, capture["start"], capture["dense"], capture["threshold"])
    assert _facts(found) == expected
    for finding in found:
        assert "sample 'a'" in finding.message
        assert f"[{finding.rows[0]}, {finding.rows[1]})" in finding.message
        assert CaptureFinding.from_json(json.loads(json.dumps(finding.as_json()))) == finding


@pytest.mark.parametrize("shape", MODEL_SHAPES, ids=lambda shape: shape.name)
def test_sound_routing_of_every_model_shape(shape: Shape) -> None:
    config = ModelConfig(*shape[1:])
    per_block = default_geometry(config).rows_per_chunk
    rows = 2 * per_block + 3
    ids = _sound(rows, config)
    check = CaptureCheck(config)
    for dense in (0, 1, config.num_layers // 8):
        ids[:, :dense] = 0
        assert _check(ids, config, [per_block, 2 * per_block], num_tokens=rows + 1, check=check) == []
    layer, row = config.num_layers - 1, 2 * per_block
    ids[row, layer, -1] = ids[row, layer, 0]
    (finding,) = _check(ids, config, [per_block, 2 * per_block], check=check)
    assert _facts([finding]) == [("duplicate-expert", (row, row + 1), 1, (layer,))]
    assert f"row {row:,}, layer {layer} (global id {layer}): {ids[row, layer].tolist()}" in finding.message


def test_a_check_starts_afresh_with_each_sample() -> None:
    check = CaptureCheck(CONFIG)
    assert len(_check(np.zeros((40, 6, 4), np.uint8), CONFIG, check=check)) == 1
    assert _check(_sound(40, CONFIG), CONFIG, check=check, num_tokens=40) == []
    assert _check(_sound(0, CONFIG), CONFIG, check=check, num_tokens=1) == []


def test_every_layer_zero_is_one_finding() -> None:
    (finding,) = _check(np.zeros((40, 6, 4), np.uint8), CONFIG, [9], num_tokens=41)
    assert _facts([finding]) == [("zero-layer", (0, 40), 40, CONFIG.layer_ids)]
    assert "every layer is all zeros" in finding.message


def test_which_zero_layers_are_taken_for_dense() -> None:
    config = ModelConfig(num_layers=61, top_k=8, num_experts=256)
    ids = _sound(30, config)
    ids[:, :3] = 0
    assert _check(ids, config) == []
    assert _check(ids, config, dense_layers=range(3)) == []
    assert _facts(_check(ids, config, dense_layers=())) == [("zero-layer", (0, 30), 30, (0, 1, 2))]
    moe_only = ModelConfig(61, 8, 256, tuple(range(3, 64)))
    assert _facts(_check(ids, moe_only)) == [("zero-layer", (0, 30), 30, (3, 4, 5))]
    ids[:, 60] = 0
    assert _facts(_check(ids, config)) == [("zero-layer", (0, 30), 30, (60,))]
    assert _check(ids, config, dense_layers=[0, 1, 2, 60]) == []
    ids[:, :8] = 0  # a stage of eight
    assert [finding.layers for finding in _check(ids, config)] == [(*range(8), 60)]


def test_a_layer_that_is_zero_at_first_was_no_dense_layer() -> None:
    config = ModelConfig(num_layers=6, top_k=4, num_experts=64)
    ids = _sound(40, config)
    ids[:23, 0] = 0
    captured = np.ones(40, bool)
    captured[[0, 5]] = False
    (finding,) = _check(ids, config, [10, 20, 30], captured)
    assert _facts([finding]) == [("duplicate-expert", (1, 5), 21, (0,))]
    assert "row 1, layer 0 (global id 0): [0, 0, 0, 0]" in finding.message


@pytest.mark.parametrize("cuts", [(), (10,), (20, 21, 22), (16, 32, 48)])
def test_repeats_beyond_the_threshold(cuts: tuple[int, ...]) -> None:
    ids = _sound(120, CONFIG)
    ids[10 : 10 + REPEAT_THRESHOLD] = ids[10]
    assert _check(ids, CONFIG, cuts) == []
    ids[10 : 11 + REPEAT_THRESHOLD] = ids[10]
    assert _facts(_check(ids, CONFIG, cuts)) == [("repeated-row", (10, 27), 17, ())]
    ids[53:] = ids[53]  # as in sglang #36404, to the end
    (finding,) = _check(ids, CONFIG, cuts)
    assert _facts([finding]) == [("repeated-row", (10, 27), 17 + 67, ())]
    assert "67 times" in finding.message
    assert "and 67 more" in finding.message
    assert _check(ids, CONFIG, cuts, repeat_threshold=67) == []


def test_missing_rows_are_not_looked_at_and_end_a_run() -> None:
    ids = _sound(40, CONFIG)
    ids[:] = ids[0]
    captured = np.ones(40, bool)
    captured[[16, 33]] = False
    ids[~captured] = 255
    assert _check(ids, CONFIG, [20], captured) == []
    captured[16] = True
    assert [finding.kind for finding in _check(ids, CONFIG, [20], captured)] == ["duplicate-expert"]
    assert _check(ids, CONFIG, [20], np.zeros(40, bool)) == []


@pytest.mark.parametrize(("tokens", "sound"), [(None, True), (39, False), (40, True), (41, True), (42, False)])
@pytest.mark.parametrize("start", [0, 15])
def test_the_number_of_rows(tokens: int | None, sound: bool, start: int) -> None:
    found = _check(_sound(40 - start, CONFIG), CONFIG, start=start, num_tokens=tokens)
    assert _facts(found) == ([] if sound else [("row-count", (0, 40), 40, ())])
    if found:
        assert f"should be {tokens}" in found[0].message


def test_rows_of_an_aborted_turn() -> None:
    assert _check(_sound(0, CONFIG), CONFIG, num_tokens=0) == []
    assert _facts(_check(_sound(0, CONFIG), CONFIG, num_tokens=5)) == [("row-count", (0, 0), 0, ())]


def test_rows_that_were_there_already_count() -> None:
    check = CaptureCheck(CONFIG)
    check.begin("a")
    check.block(_sound(10, CONFIG), 4)
    check.block(_sound(10, CONFIG), 30)
    assert check.finish(num_tokens=101, rows=100) == []
    check.begin("a")
    assert _facts(check.finish(num_tokens=50, rows=100)) == [("row-count", (0, 100), 100, ())]


def test_rows_need_not_be_contiguous() -> None:
    ids = np.zeros((40, 4, 6), np.uint8).transpose(0, 2, 1)
    ids[:] = _sound(40, CONFIG)
    ids[7, 2, 3] = ids[7, 2, 1]
    assert _facts(_check(ids, CONFIG, [5])) == [("duplicate-expert", (7, 8), 1, (12,))]


def test_findings_are_read_back_whole_or_refused() -> None:
    finding = CaptureFinding("zero-layer", "prompt-\u00e9", (3, 40), 37, (10, 12), "why")
    document = json.loads(json.dumps(finding.as_json()))
    assert CaptureFinding.from_json(document) == finding
    assert CaptureFinding.from_json(document | {"kind": "of a later release", "more": 1}).count == 37
    for wrong in (
        {"rows": [4]},
        {"rows": [5, 4]},
        {"count": -1},
        {"count": True},
        {"layers": ["a"]},
        {"sample": 3},
        {"message": None},
        {"kind": []},
    ):
        with pytest.raises((KeyError, TypeError, ValueError)):
            CaptureFinding.from_json(document | wrong)
    with pytest.raises(KeyError):
        CaptureFinding.from_json({})


def test_the_error_of_a_strict_writer_pickles() -> None:
    ids = _sound(40, CONFIG)
    ids[30, 2, 3] = ids[30, 2, 1]
    found = _check(ids, CONFIG, num_tokens=3)
    error = pickle.loads(pickle.dumps(capture_error(found)))
    assert isinstance(error, tracefile.CaptureError)
    assert isinstance(error, ValueError)
    assert (error.sample, error.findings) == ("a", tuple(found))
    assert all(finding.message in str(error) for finding in found)
    assert 'validate="warn"' in str(error)


def test_options_are_checked() -> None:
    with pytest.raises(tracefile.OptionError, match=r"dense_layers names \[0, 3\]"):
        CaptureCheck(CONFIG, dense_layers=[0, 3, 11])
    for threshold in (0, -1, True, 1.5):
        with pytest.raises(tracefile.OptionError, match="repeat_threshold"):
            CaptureCheck(CONFIG, repeat_threshold=threshold)  # type: ignore[arg-type]
    assert [check_validate(mode) for mode in ("strict", "warn", "off")] == ["strict", "warn", "off"]
    with pytest.raises(tracefile.OptionError, match="strict, warn, off, not 'loud'"):
        check_validate("loud")


@pytest.mark.parametrize("name", ["gpt_oss_20b_6seq", "gpt_oss_20b_decode", "flame_moe_290m", "trained_e128k8"])
def test_real_routing_shows_no_sign(name: str) -> None:
    path = TRACES / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"no real traces at {TRACES}")
    with np.load(path) as trace:
        ids, experts = trace["ids"], int(trace["num_experts"])
        lengths = trace["seq_len"].tolist() if "seq_len" in trace else [len(ids)]
    config = ModelConfig(ids.shape[1], ids.shape[2], experts)
    check = CaptureCheck(config, dense_layers=())
    stops = np.cumsum(lengths).tolist()
    for length, stop in zip(lengths, stops, strict=True):
        sample = ids[stop - length : stop]
        assert _check(sample, config, range(64, length, 64), num_tokens=length + 1, check=check) == []
    # As one sample, and as profiling passes and an unwritten buffer would have it.
    bad = ids.copy()
    bad[1000:1400] = bad[1000]
    bad[1700, 3] = 0
    expected = [("duplicate-expert", (1700, 1701), 1, (3,)), ("repeated-row", (1000, 1400), 400, ())]
    assert _facts(_check(bad, config, range(256, len(bad), 256), check=check)) == expected
