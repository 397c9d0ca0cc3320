"""slime's extension points: samples' routing goes to a trace, per sample or per step, and survives what slime does."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support import random_routing

import tracefile
from tracefile.integrations import slime

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

LAYERS, TOP_K, EXPERTS = 5, 2, 64


class Status(enum.Enum):
    COMPLETED = "completed"
    ABORTED = "aborted"


@dataclasses.dataclass
class Sample:
    """What matters here of slime's."""

    group_index: int
    index: int
    rollout_routed_experts: Any
    tokens: list[int] = dataclasses.field(default_factory=list)
    status: Status = Status.COMPLETED

    def resume(self, start: int, rows: torch.Tensor) -> None:
        """The engine went on, and returned the rows from ``start`` on."""
        self.rollout_routed_experts = torch.cat([self.rollout_routed_experts[:start], rows], dim=0) if start else rows
        self.status = Status.COMPLETED


@pytest.fixture
def args(tmp_path: Path) -> SimpleNamespace:
    return SimpleNamespace(
        num_layers=LAYERS,
        moe_router_topk=TOP_K,
        num_experts=EXPERTS,
        partial_rollout=False,
        tracefile_path=str(tmp_path / "step_{rollout_id:06d}.trace"),
    )


def routing(rng: np.random.Generator, rows: int) -> torch.Tensor:
    return torch.from_numpy(random_routing(rng, rows, LAYERS, TOP_K, EXPERTS))


def traces(args: SimpleNamespace) -> list[str]:
    return sorted(os.listdir(os.path.dirname(args.tracefile_path)))


async def generate(args: SimpleNamespace, samples: list[Sample], rollout_id: int, **kwargs: Any) -> None:
    """As slime calls the hook: for all samples of a step at once, each in a task of its own."""
    await asyncio.gather(*(slime.write_sample(args, sample, rollout_id=rollout_id, **kwargs) for sample in samples))


def test_each_sample_as_it_is_generated(args: SimpleNamespace, rng: np.random.Generator) -> None:
    expected = [routing(rng, rows) for rows in (0, 1, 700, *range(30, 60))]
    samples = [Sample(i // 16, i, rows.clone()) for i, rows in enumerate(expected)]
    asyncio.run(generate(args, samples, 7))
    for sample, rows in zip(samples, expected, strict=True):
        assert type(sample.rollout_routed_experts) is tracefile.LazyRoutedExperts
        assert torch.equal(sample.rollout_routed_experts.materialize(), rows)
    trace = tracefile.open(slime.trace_path(args, 7))
    assert sorted(trace) == sorted(f"{i // 16}/{i}" for i in range(len(expected)))
    assert torch.equal(trace["0/2"].materialize(), expected[2])


def test_samples_of_an_evaluation_and_without_routing_are_left_alone(
    args: SimpleNamespace, rng: np.random.Generator
) -> None:
    rows = routing(rng, 9)
    sample, without = Sample(0, 0, rows), Sample(0, 1, None)
    asyncio.run(generate(args, [sample], 1, evaluation=True))
    asyncio.run(generate(args, [without], 1))
    assert slime.write_rollout(1, args, [without]) is False
    assert sample.rollout_routed_experts is rows
    assert without.rollout_routed_experts is None
    assert traces(args) == []


@pytest.mark.parametrize("start", [0, 1, 250, 300])
def test_partial_rollout(args: SimpleNamespace, rng: np.random.Generator, start: int) -> None:
    args.partial_rollout = True
    first, second = routing(rng, 300), routing(rng, 500)
    first[40:43] = -1  # rows that the engine did not capture
    sample = Sample(0, 3, first.clone(), status=Status.ABORTED)
    asyncio.run(generate(args, [sample], 1))
    aborted = sample.rollout_routed_experts
    sample.resume(start, second[start:])
    asyncio.run(generate(args, [sample], 2))
    experts = sample.rollout_routed_experts
    assert torch.equal(experts.filled("minus_one").materialize(), torch.cat([first[:start], second[start:]]))
    stored = {os.path.basename(segment.trace.path) for segment in experts.selection.rows.segments()}
    assert stored == {"step_000002.trace"}, "it does not depend on the step that began it"
    assert torch.equal(aborted.filled("minus_one").materialize(), first)
    again = sample.rollout_routed_experts
    asyncio.run(generate(args, [sample], 3))  # it waits in a buffer for another step
    assert sample.rollout_routed_experts is again
    assert traces(args)[-1] == "step_000002.trace"


def test_what_slime_drops_is_not_written(args: SimpleNamespace, rng: np.random.Generator) -> None:
    rows = routing(rng, 9)
    sample = Sample(0, 0, rows, status=Status.ABORTED)
    asyncio.run(generate(args, [sample], 1))
    assert sample.rollout_routed_experts is rows
    assert traces(args) == []


def test_a_whole_step(args: SimpleNamespace, rng: np.random.Generator) -> None:
    expected = [routing(rng, 20 + i) for i in range(40)]
    samples = [Sample(i // 4, i, rows.clone()) for i, rows in enumerate(expected)]
    samples[3].rollout_routed_experts = expected[3].tolist()
    asyncio.run(generate(args, samples[:2], 4))  # both may be in use
    groups = [[samples[i : i + 2], samples[i + 2 : i + 4]] for i in range(0, 40, 4)]
    assert slime.write_rollout(5, args, groups, {"reward": 1.0}, 3.5) is False, "slime's own logging goes on"
    for sample, rows in zip(samples, expected, strict=True):
        assert torch.equal(sample.rollout_routed_experts.materialize(), rows)
    trace = tracefile.open(slime.trace_path(args, 5))
    assert len(trace) == 38
    assert len(trace.segments) == 3, "some samples to a segment, so that memory is given back meanwhile"
    assert traces(args) == [".step_000004.trace.staging", "step_000004.trace", "step_000005.trace"]


def test_samples_that_one_rollout_fanned_out_into(args: SimpleNamespace, rng: np.random.Generator) -> None:
    expected = [routing(rng, 20 + i) for i in range(6)]
    for rollout_id, write in ((1, slime.write_rollout), (2, None)):
        samples = [Sample(0, 9, rows) for rows in expected]
        if write is None:
            asyncio.run(generate(args, samples, rollout_id))
        else:
            write(rollout_id, args, [samples])
        trace = tracefile.open(slime.trace_path(args, rollout_id))
        assert sorted(trace) == ["0/9", *(f"0/9#{i}" for i in range(2, 7))]
        assert [len(s.rollout_routed_experts) for s in samples] == [len(rows) for rows in expected]
        assert sorted(len(experts) for experts in trace.values()) == [len(rows) for rows in expected]


def test_traces_of_past_steps_are_closed(args: SimpleNamespace, rng: np.random.Generator) -> None:
    for rollout_id in range(20, 28):
        asyncio.run(generate(args, [Sample(0, 0, routing(rng, 5))], rollout_id))
    staging = [name for name in traces(args) if name.endswith(".staging")]
    assert len(staging) <= 4
    assert len(traces(args)) - len(staging) == 8


def test_rows_that_were_not_captured(
    args: SimpleNamespace, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = routing(rng, 9)
    rows[2:4] = -1
    refused, spread = Sample(0, 0, rows.clone()), Sample(0, 1, rows.clone())
    asyncio.run(generate(args, [refused], 1))
    with pytest.raises(tracefile.MissingRowsError):
        refused.rollout_routed_experts.materialize()
    monkeypatch.setenv("TRACEFILE_SLIME_FILL", "zeros")
    args.tracefile_fill = "spread"
    slime.write_rollout(1, args, [spread])
    ids = spread.rollout_routed_experts.materialize()
    assert torch.equal(ids[2:4].flatten(), torch.arange(2 * LAYERS * TOP_K, dtype=torch.int32) % EXPERTS)


def test_where_traces_go(args: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample(0, 0, torch.zeros(3, LAYERS, TOP_K, dtype=torch.int32))
    monkeypatch.setenv("TRACEFILE_SLIME_PATH", str(tmp_path / "elsewhere_{rollout_id}.trace"))
    assert slime.trace_path(args, 3) == str(tmp_path / "step_000003.trace")
    del args.tracefile_path
    assert slime.trace_path(args, 3) == str(tmp_path / "elsewhere_3.trace")
    for template, message in (
        ("", "set tracefile_path in the file of --custom-config-path, or TRACEFILE_SLIME_PATH"),
        ("step.trace", "has no {rollout_id}"),
        ("step_{step}.trace", "does not make a path of rollout_id=3: 'step'"),
        ("step_{rollout_id:q}.trace", "does not make a path"),
        ("step_{rollout_id.trace", "does not make a path"),
    ):
        monkeypatch.setenv("TRACEFILE_SLIME_PATH", template)
        with pytest.raises(tracefile.OptionError, match=message):
            slime.write_rollout(3, args, [sample])
        with pytest.raises(tracefile.OptionError, match=message):
            asyncio.run(generate(args, [sample], 3))
    assert type(sample.rollout_routed_experts) is torch.Tensor
    assert list(tmp_path.iterdir()) == []


def test_bad_routing_stops_the_rollout_and_leaves_the_sample(args: SimpleNamespace, rng: np.random.Generator) -> None:
    rows = routing(rng, 4)
    rows[2, 1, 0] = EXPERTS
    sample = Sample(0, 5, rows)
    with pytest.raises(tracefile.ExpertIdError, match="0/5"):
        asyncio.run(generate(args, [sample], 1))
    with pytest.raises(tracefile.ExpertIdError, match="0/5"):
        slime.write_rollout(1, args, [sample])
    assert sample.rollout_routed_experts is rows
    assert len(tracefile.open(slime.trace_path(args, 1))) == 0


def test_debug_dump_of_rollout_data_and_its_load(
    args: SimpleNamespace, rng: np.random.Generator, tmp_path: Path
) -> None:
    expected = [routing(rng, 400 + i) for i in range(8)]
    samples = [Sample(0, i, rows, tokens=[1] * (len(rows) + 1)) for i, rows in enumerate(expected)]
    slime.write_rollout(1, args, samples)
    before = tracefile.process_stats()
    dump = tmp_path / "rollout_1.pt"
    torch.save(
        {"rollout_id": 1, "samples": [dataclasses.asdict(s) | {"status": s.status.value} for s in samples]}, dump
    )
    loaded = torch.load(dump, weights_only=False)["samples"]
    assert dump.stat().st_size < 32 * 1024
    # What follows in slime: a check for layers that are all zero, then tensors on the CPU that lie in order.
    restored = [torch.as_tensor(sample["rollout_routed_experts"]) for sample in loaded]
    restored = [experts.detach().cpu().contiguous() for experts in restored]
    assert all(type(experts) is tracefile.LazyRoutedExperts for experts in restored)
    assert tracefile.process_stats() == before
    for experts, rows in zip(restored, expected, strict=True):
        assert all(torch.count_nonzero(experts[:, layer, :]) for layer in range(LAYERS))
        assert torch.equal(experts + 0, rows)
