"""Partial and multi-turn rollouts: what a sample becomes, what is written for it, and what older handles read."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support import in_fork, random_routing

import tracefile
from tracefile.metadata import WeightRange

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYERS, TOP_K, EXPERTS = 5, 3, 64
Array = np.ndarray[Any, Any]


@pytest.fixture
def writer(path: str) -> Iterator[tracefile.TraceWriter]:
    with tracefile.TraceWriter(
        path, num_layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS, rows_per_chunk=32, share_prefixes=False
    ) as writer:
        yield writer


def make(rng: np.random.Generator, rows: int) -> Array:
    return random_routing(rng, rows, LAYERS, TOP_K, EXPERTS)


def stored_rows(path: str) -> list[int]:
    """Of each segment, in order."""
    return [header.rows for header in tracefile.open(path).segments.values()]


@pytest.mark.parametrize("start", [0, 1, 40, 99, 100])
def test_a_sample_goes_on(writer: tracefile.TraceWriter, rng: np.random.Generator, start: int) -> None:
    """Inside of what it had, at its end, and one before the end: the boundary row."""
    old, new = make(rng, 100), make(rng, 30)
    first = writer.append("a", old)
    second = writer.append("a", new, start=start)
    np.testing.assert_array_equal(second.numpy(), np.concatenate([old[:start], new]))
    np.testing.assert_array_equal(first.numpy(), old)
    np.testing.assert_array_equal(tracefile.open(writer.path)["a"].numpy(), second.numpy())
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(second))[start:].numpy(), new)
    assert stored_rows(writer.path) == [100, 30]


def test_nothing_to_go_on_with(writer: tracefile.TraceWriter, rng: np.random.Generator) -> None:
    old = make(rng, 10)
    writer.append("a", old)
    np.testing.assert_array_equal(writer.append("a", old[:0], start=7).numpy(), old[:7])
    np.testing.assert_array_equal(writer.append("b", old, start=0).numpy(), old)
    assert stored_rows(writer.path) == [10, 0, 10]


@pytest.mark.parametrize(("start", "rows"), [(2, 3), (2, 8), (2, 30), (10, 4), (0, 4)])
def test_which_rows_win(writer: tracefile.TraceWriter, rng: np.random.Generator, start: int, rows: int) -> None:
    old, new = make(rng, 10), make(rng, rows)
    writer.append("a", old)
    np.testing.assert_array_equal(
        writer.append("a", new, start=start, keep="first").numpy(), np.concatenate([old, new[10 - start :]])
    )
    writer.append("b", old)
    np.testing.assert_array_equal(
        writer.append("b", new, start=start, keep="last").numpy(), np.concatenate([old[:start], new])
    )


def test_a_boundary_row_gets_its_route_with_the_next_turn(
    writer: tracefile.TraceWriter, rng: np.random.Generator
) -> None:
    """Whoever wins otherwise: a row that was never captured gives way."""
    first, second = make(rng, 10), make(rng, 6)
    first[-1] = -1
    for keep in ("first", "last"):
        writer.append(keep, first)
        experts = writer.append(keep, second, start=9, keep=keep)  # type: ignore[arg-type]
        assert experts.valid.all()
        np.testing.assert_array_equal(experts.numpy(), np.concatenate([first[:9], second]))
    second[0] = -1
    first[-1] = 1
    experts = writer.append("last", np.concatenate([first[8:], second[1:]]), start=8)
    again = writer.append("last", second, start=9)
    assert again.valid.all()
    np.testing.assert_array_equal(again.numpy(), experts.numpy())


def test_a_gap(writer: tracefile.TraceWriter, rng: np.random.Generator) -> None:
    ids = make(rng, 10)
    writer.append("a", ids)
    for sample, rows in (("a", 10), ("never seen", 0)):
        with pytest.raises(tracefile.SampleGapError, match=rf"{sample}.* has {rows} rows, .*gap='missing'") as caught:
            writer.append(sample, ids, start=12)
        assert vars(pickle.loads(pickle.dumps(caught.value)))["start"] == 12
    assert stored_rows(writer.path) == [10]
    experts = writer.append("a", ids, start=12, gap="missing")
    assert experts.valid.tolist() == [True] * 10 + [False] * 2 + [True] * 10
    np.testing.assert_array_equal(experts.filled("zeros").numpy(), np.concatenate([ids, 0 * ids[:2], ids]))
    with pytest.raises(tracefile.MissingRowsError):
        experts.numpy()


def test_truncate(writer: tracefile.TraceWriter, rng: np.random.Generator) -> None:
    ids = make(rng, 50)
    ids[20:22] = -1
    whole = writer.append("a", ids)
    for rows in (50, 21, 5, 0):
        cut = writer.truncate("a", rows)
        np.testing.assert_array_equal(cut.filled("minus_one").numpy(), ids[:rows])
    np.testing.assert_array_equal(whole.filled("minus_one").numpy(), ids)
    assert stored_rows(writer.path) == [50, 0, 0, 0, 0]
    with pytest.raises(tracefile.OptionError, match="has 0 rows; it cannot be cut to 1"):
        writer.truncate("a", 1)
    with pytest.raises(tracefile.SampleNotFoundError):
        writer.truncate("b", 0)


@pytest.mark.parametrize(
    "option",
    [{"start": -1}, {"start": 1.0}, {"start": True}, {"start": 0, "keep": "both"}, {"start": 0, "gap": "fill"}],
)
def test_options(writer: tracefile.TraceWriter, rng: np.random.Generator, option: dict[str, Any]) -> None:
    with pytest.raises(tracefile.OptionError, match=f"{list(option)[-1]} must be"):
        writer.append("a", make(rng, 3), **option)
    with pytest.raises(tracefile.OptionError, match="weight_version must be"):
        writer.append("a", make(rng, 3), weight_version=1.5)  # type: ignore[arg-type]
    assert stored_rows(writer.path) == []


def test_what_slime_builds_when_a_rollout_resumes(writer: tracefile.TraceWriter, rng: np.random.Generator) -> None:
    """``torch.cat([existing[:start], new])``: rows that the trace has are named, not copied."""
    first, second, third = make(rng, 100), make(rng, 30), make(rng, 9)
    experts = writer.append("a", first)
    experts = writer.append("a", torch.cat([experts[:80], torch.from_numpy(second)]))
    experts = writer.append("a", torch.cat([experts, torch.from_numpy(third)]).view(-1, LAYERS * TOP_K))
    expected = np.concatenate([first[:80], second, third])
    np.testing.assert_array_equal(experts.numpy(), expected)
    assert stored_rows(writer.path) == [100, 30, 9]
    before = tracefile.process_stats()
    again = writer.append("copy", experts[10:])
    assert stored_rows(writer.path)[-1] == 0
    assert tracefile.process_stats().bytes_read == before.bytes_read
    np.testing.assert_array_equal(again.numpy(), expected[10:])


def test_lazy_rows_of_another_trace_are_copied(
    writer: tracefile.TraceWriter, rng: np.random.Generator, tmp_path: Any
) -> None:
    ids = make(rng, 20)
    ids[4] = -1
    options = {"num_layers": LAYERS, "top_k": TOP_K, "num_experts": EXPERTS}
    with tracefile.TraceWriter(tmp_path / "other.trace", **options) as other:  # type: ignore[arg-type]
        elsewhere = other.append("a", ids).filled("spread").to(torch.uint8)
    here = writer.append("a", torch.cat([elsewhere, torch.from_numpy(ids[:3])]))
    np.testing.assert_array_equal(here.filled("minus_one").numpy(), np.concatenate([ids, ids[:3]]))
    assert stored_rows(writer.path) == [23]
    layers = writer.append("b", elsewhere[:4, [1, 0, 2, 3, 4]])
    np.testing.assert_array_equal(layers.numpy(), ids[:4, [1, 0, 2, 3, 4]])


def test_bad_ids_are_named_by_the_samples_rows(writer: tracefile.TraceWriter, rng: np.random.Generator) -> None:
    writer.append("a", make(rng, 100))
    new = make(rng, 50)
    new[40, 2, 1] = EXPERTS
    with pytest.raises(tracefile.ExpertIdError, match="token 130, layer 2") as caught:
        writer.append("a", new, start=90)
    assert vars(caught.value)["token"] == 130
    assert stored_rows(writer.path) == [100]


def test_writers_take_turns(path: str, rng: np.random.Generator) -> None:
    """A session whose turns are written by whichever process is free."""
    options = {"num_layers": LAYERS, "top_k": TOP_K, "num_experts": EXPERTS}
    turns = [make(rng, 20) for _ in range(6)]
    with tracefile.TraceWriter(path, **options) as ours:  # type: ignore[arg-type]
        for number, turn in enumerate(turns):
            start = 15 * number

            def append(turn: Array = turn, start: int = start) -> int:
                with tracefile.TraceWriter(path, **options) as theirs:  # type: ignore[arg-type]
                    return len(theirs.append("session", turn, start=start))

            if number % 2:
                assert in_fork(append) == start + 20
            else:
                assert len(ours.append("session", turn, start=start)) == start + 20
    expected = np.concatenate([*(turn[:15] for turn in turns[:-1]), turns[-1]])
    np.testing.assert_array_equal(tracefile.open(path)["session"].numpy(), expected)


def test_weight_versions(writer: tracefile.TraceWriter, rng: np.random.Generator) -> None:
    writer.append("a", make(rng, 10))
    writer.append("a", make(rng, 10), start=8, weight_version="v2")
    writer.append("a", make(rng, 4), start=18, weight_version=3)
    resumed = tracefile.open(writer.path)["a"]
    writer.append("b", torch.cat([resumed[4:20], torch.from_numpy(make(rng, 5))]), weight_version=3)
    trace = tracefile.open(writer.path)
    versions = [WeightRange(0, 8, None), WeightRange(8, 18, "v2"), WeightRange(18, 22, 3)]
    assert trace.weight_versions("a") == versions
    assert trace.weight_versions("a", 9, 19) == [WeightRange(9, 18, "v2"), WeightRange(18, 19, 3)]
    assert trace.weight_versions("a", 5, 5) == []
    assert trace.weight_versions("b") == [WeightRange(0, 4, None), WeightRange(4, 14, "v2"), WeightRange(14, 21, 3)]
    writer.append_many([("c", make(rng, 3)), ("d", make(rng, 40))], weight_version=9)
    trace.refresh()
    assert trace.weight_versions("d") == [WeightRange(0, 40, 9)]


def test_a_segment_that_others_name_is_gone(writer: tracefile.TraceWriter, rng: np.random.Generator) -> None:
    writer.append("a", make(rng, 10))
    experts = writer.append("a", make(rng, 10), start=10)
    (first, _) = sorted(os.listdir(f"{writer.path}/segments"))[:2]
    os.rename(f"{writer.path}/segments/{first}", f"{writer.path}/{first}")
    assert len(experts[10:].numpy()) == 10
    with pytest.raises(tracefile.SegmentMissingError, match=first):
        tracefile.open(writer.path)["a"][5:15].materialize()
