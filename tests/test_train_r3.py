"""``tools/train_r3.py``: a whole RL step on a trace, against the same step without a trace, shards or processes.

Ranks are real processes that talk over gloo; they are started once for all cases. Rollouts are real ones, by the
command's own worker, with a noisy router, so that replay and native routing differ.
"""

from __future__ import annotations

import asyncio
import doctest
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from typer.testing import CliRunner

import tracefile
from tracefile import process_stats

TOOLS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tools")
COMMAND = os.path.join(TOOLS, "train_r3.py")
sys.path.insert(0, TOOLS)

from demo_job import processes  # noqa: E402
from train_r3 import app  # noqa: E402
from train_r3_job import batch, job, losses, step  # noqa: E402
from train_r3_job.generate import Generator, Session  # noqa: E402
from train_r3_job.learner import Learner, LearnerOptions, load_version, new_optimizer, save_checkpoint  # noqa: E402
from train_r3_job.model import Model, ModelShape, native  # noqa: E402
from train_r3_job.parallel import Layout, Place  # noqa: E402
from train_r3_job.rollout import ROWS_PER_CHUNK, RolloutOptions, RolloutWorker  # noqa: E402
from train_r3_job.routing import Source  # noqa: E402
from train_r3_job.shard import rows_of  # noqa: E402
from train_r3_job.step import StepOptions, StepResult  # noqa: E402
from train_r3_job.task import ALPHABET, Environment, Prompt, Sum, Task, decode, encode  # noqa: E402
from train_r3_job.warmup import PackedAttention, transcript  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from demo_job.processes import Channel
    from train_r3_job.batch import Sample

RANKS = 4
TASK = Task(largest=99, turns=3)
DENSE_FIRST = ModelShape(len(ALPHABET), num_layers=3, num_experts=8, top_k=2, width=32, expert_width=16)
MOE_ONLY = replace(DENSE_FIRST, dense_first=False)
#: Context, sequence and data parallel 1, 2 and 4, on four ranks.
LAYOUTS = [
    Layout(dp=4, cp=1, sp=1),
    Layout(dp=2, cp=2, sp=1),
    Layout(dp=2, cp=2, sp=1, cp_layout="contiguous"),
    Layout(dp=2, cp=1, sp=2),
    Layout(dp=1, cp=2, sp=2),
    Layout(dp=1, cp=2, sp=2, cp_layout="contiguous"),
    Layout(dp=1, cp=4, sp=1),
    Layout(dp=1, cp=4, sp=1, cp_layout="contiguous"),
    Layout(dp=1, cp=1, sp=4),
]

FLOAT32_LAYOUTS = [LAYOUTS[i] for i in (2, 4, 7)]


def name_of(layout: Layout) -> str:
    return f"dp{layout.dp}-cp{layout.cp}-sp{layout.sp}-{layout.cp_layout}"


def shape_of(layout: Layout) -> ModelShape:
    return MOE_ONLY if LAYOUTS.index(layout) % 2 else DENSE_FIRST


@dataclass(frozen=True, slots=True)
class Case:
    """A step's gradients, to be computed by all ranks together."""

    layout: Layout
    shape: ModelShape
    weights: str
    samples: str
    dtype: torch.dtype
    options: StepOptions


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank has of a case.

    ``asked``: the ids that its routers were given, as ``(microbatch, layer, stage, ids)`` in order.
    """

    result: StepResult
    digest: str
    gradients: dict[str, np.ndarray[Any, Any]]
    asked: list[tuple[int, int, str, np.ndarray[Any, Any]]]
    chunks: int
    decoded_bytes: int
    read_bytes: int


class Recording(Source):
    """The source that a step uses, with a record of what it gave."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked: list[tuple[int, int, str, np.ndarray[Any, Any]]] = []
        recordings.append(self)

    def read(self, number: int) -> Any:
        read = super().read(number)
        if read is None:
            return None

        def recorded(layer: int, stage: str) -> Tensor:
            ids = read(layer, stage)
            self.asked.append((number, layer, stage, ids.numpy().copy()))
            return ids

        return recorded


recordings: list[Recording] = []


def serve(channel: Channel, rank: int, store: str) -> None:
    """A rank's process."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    step.Source = Recording  # type: ignore[attr-defined]
    places: dict[Layout, Place] = {}
    while True:
        case: Case = channel.receive()
        if case.layout not in places:
            places[case.layout] = Place(case.layout)
        model = load_model(case.shape, case.weights, case.dtype)
        recordings.clear()
        tracefile.clear_cache()  # of eager cases
        before = process_stats()
        result = step.accumulate(model, places[case.layout], batch.load(case.samples), case.options)
        after = process_stats()
        gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
        digest = hashlib.blake2b(b"".join(gradient.tobytes() for gradient in gradients.values())).hexdigest()
        channel.reply(
            Found(
                result=result,
                digest=digest,
                gradients=gradients if rank == 0 else {},
                asked=recordings[0].asked,
                chunks=after.chunks_decoded - before.chunks_decoded,
                decoded_bytes=after.bytes_decoded - before.bytes_decoded,
                read_bytes=after.bytes_read - before.bytes_read,
            )
        )


def load_model(shape: ModelShape, weights: str, dtype: torch.dtype = torch.float64) -> Model:
    model = Model(shape).to(dtype)
    model.load_state_dict(torch.load(weights, weights_only=True))
    return model


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> Iterator[None]:
    """Ranks are forked from a server that has imported torch; it ends with this module's tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in processes._ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", TOOLS)
        processes.prepare("train_r3_job.learner")
        yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def ranks(fork_server: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Case], list[Found]]]:
    store = str(tmp_path_factory.mktemp("ranks") / "store")
    members = {f"rank {rank}": (rank, store) for rank in range(RANKS)}
    with processes.Team(serve, members, method="forkserver") as team:

        @functools.cache
        def run(case: Case) -> list[Found]:
            team.tell(case)
            replies = team.replies()
            return [replies[f"rank {rank}"] for rank in range(RANKS)]

        yield run


@dataclass(frozen=True, slots=True)
class Made:
    """Rollouts and the weights that made them, and other weights, as a learner has them a few steps later."""

    shape: ModelShape
    trace: str
    samples: list[Sample]
    path: str
    weights: str
    later_weights: str


def roll_out(
    directory: Path,
    shape: ModelShape,
    prompts: int,
    *,
    dtype: torch.dtype = torch.float32,
    noise: float = 0.3,
    weights: str | None = None,
    seed: int = 0,
) -> Made:
    """Groups of four sessions of three turns, in random order, with rewards drawn at random."""
    torch.manual_seed(seed)
    model = Model(shape).double()
    if weights is not None:
        model.load_state_dict(torch.load(weights, weights_only=True))
    paths = {name: str(directory / name) for name in ("weights", "later_weights", "step.batch", "step.trace")}
    torch.save(model.state_dict(), paths["weights"])
    worker = RolloutWorker(RolloutOptions(shape, TASK, 4, dtype, noise, seed))
    worker.set_weights(3, {name: tensor.numpy() for name, tensor in model.state_dict().items()})
    if dtype == torch.float64:  # weights travel as float32; here they are to be the learner's, bit for bit
        worker._model = model
    samples = asyncio.run(worker.rollout(0, paths["step.trace"], range(prompts)))
    rng = np.random.default_rng(seed)
    samples = [replace(samples[i], reward=float(rng.integers(0, 4)) / 3) for i in rng.permutation(len(samples))]
    batch.save(paths["step.batch"], samples)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    torch.save(model.state_dict(), paths["later_weights"])
    return Made(shape, paths["step.trace"], samples, paths["step.batch"], paths["weights"], paths["later_weights"])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[ModelShape, Made]:
    return {
        DENSE_FIRST: roll_out(tmp_path_factory.mktemp("dense"), DENSE_FIRST, 5),
        MOE_ONLY: roll_out(tmp_path_factory.mktemp("moe"), MOE_ONLY, 5, seed=1),
    }


def causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(0, 1)


def without_shards(made: Made, clip: float) -> tuple[float, dict[str, Tensor], int]:
    """One process, one sample after the other: no packs, no padding, no microbatches. Loss, gradients, clipped."""
    model = load_model(made.shape, made.later_weights)
    tokens = sum(int(sample.generated.sum()) for sample in made.samples)
    total, clipped = 0.0, 0
    for sample in made.samples:
        others = [other.reward for other in made.samples if other.group == sample.group and other is not sample]
        assert len(others) == 3
        advantage = sample.reward - fmean(others)
        ids = sample.experts.materialize(dtype=torch.int64)
        fed = len(sample) - 1
        assert len(ids) == fed
        logits, used = model(sample.tokens[:fed], torch.arange(fed), causal, lambda layer, _, ids=ids: ids[:, layer])
        assert torch.equal(torch.stack(used, 1), ids)
        logprobs = logits.log_softmax(-1)[torch.arange(fed), sample.tokens[1:]]
        of = sample.generated[1:]
        ratio = (logprobs - sample.logprobs[1:].double()).exp()[of]
        outside = (ratio > 1 + clip) if advantage > 0 else (ratio < 1 - clip)
        bound = 1 + clip if advantage > 0 else 1 - clip
        loss = -(torch.where(outside, bound, ratio) * advantage).sum() / tokens
        clipped += int(((ratio - 1).abs() > clip).sum())
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, clipped


@pytest.fixture(scope="module")
def references(made: dict[ModelShape, Made]) -> dict[ModelShape, tuple[float, dict[str, Tensor], int]]:
    return {shape: without_shards(rollouts, OPTIONS.clip) for shape, rollouts in made.items()}


def assert_near(gradients: dict[str, np.ndarray[Any, Any]], expected: dict[str, Tensor], tolerance: float) -> None:
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        scale = float(expected[name].abs().max())
        assert scale > 0, f"{name} has no gradient"
        assert float((torch.from_numpy(gradient).double() - expected[name]).abs().max()) < tolerance * scale, name


def same_bits(left: dict[str, np.ndarray[Any, Any]], right: dict[str, np.ndarray[Any, Any]]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


OPTIONS = StepOptions(pack_tokens=200, clip=0.2, compare=False)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_equals_eager_routing_and_no_shards(
    ranks: Any, made: dict[ModelShape, Made], references: Any, layout: Layout
) -> None:
    shape = shape_of(layout)
    rollouts = made[shape]
    case = Case(layout, shape, rollouts.later_weights, rollouts.path, torch.float64, OPTIONS)
    eager = replace(case, options=replace(OPTIONS, routing="eager"))
    loss, gradients, clipped = references[shape]
    tokens = sum(int(sample.generated.sum()) for sample in rollouts.samples)

    found, expected = ranks(case), ranks(eager)
    result = found[0].result
    assert result.microbatches >= 3
    assert len({rank.digest for rank in found + expected}) == 1, "the same gradients on every rank, both ways"
    assert same_bits(found[0].gradients, expected[0].gradients)
    assert result.loss == expected[0].result.loss
    assert [rank.chunks > 0 for rank in found] == [True] * RANKS, "the trace was read"
    assert result.tokens == tokens, "each token that was generated, once"
    assert abs(result.loss - loss) < 1e-9 * max(1, abs(loss))
    assert_near(found[0].gradients, gradients, 1e-9)
    assert round(result.clipped * tokens) == clipped > 0
    assert result.agreement < 1

    if layout not in FLOAT32_LAYOUTS:
        return
    single, single_eager = (ranks(replace(each, dtype=torch.float32)) for each in (case, eager))
    assert single[0].result.loss == pytest.approx(single_eager[0].result.loss, rel=1e-6)
    for name, gradient in single[0].gradients.items():
        np.testing.assert_allclose(gradient, single_eager[0].gradients[name], rtol=1e-5, atol=1e-7)
    assert_near(single[0].gradients, gradients, 1e-3)


def test_data_parallel_ranks_without_a_microbatch(ranks: Any, made: dict[ModelShape, Made], references: Any) -> None:
    rollouts, layout = made[MOE_ONLY], LAYOUTS[0]
    loss, gradients, _ = references[MOE_ONLY]
    options = replace(OPTIONS, pack_tokens=400)
    found = ranks(Case(layout, MOE_ONLY, rollouts.later_weights, rollouts.path, torch.float64, options))
    assert found[0].result.microbatches == 2
    assert [rank.chunks > 0 for rank in found] == [True, True, False, False]
    assert found[0].result.loss == pytest.approx(loss, rel=1e-9)
    assert len({rank.digest for rank in found}) == 1
    assert_near(found[0].gradients, gradients, 1e-9)


def test_microbatches_are_uneven_and_cut_groups(made: dict[ModelShape, Made]) -> None:
    """So that the test above shows something."""
    for rollouts in made.values():
        samples = rollouts.samples
        lengths = [len(sample) for sample in samples]
        packs = batch.pack(lengths, OPTIONS.pack_tokens)
        assert len({sum(lengths[i] for i in numbers) for numbers in packs}) > 1
        assert len({len(numbers) for numbers in packs}) > 1
        assert any(len({samples[i].group for i in numbers}) > 1 for numbers in packs)
        assert all(
            sum(any(samples[i].group == group for i in numbers) for numbers in packs) > 1
            for group in {sample.group for sample in samples}
        )
        padded: dict[Layout, int] = {}
        for layout in LAYOUTS:
            specs = [
                tracefile.ShardSpec(layout.cp, cp, layout.cp_layout, layout.sp, sp)
                for cp in range(layout.cp)
                for sp in range(layout.sp)
            ]
            for numbers in packs if len(specs) > 1 else []:
                rows = torch.cat([rows_of([lengths[i] for i in numbers], spec).samples for spec in specs])
                padding = int((rows == -1).sum())
                assert len(rows) - padding == sum(lengths[i] for i in numbers), "each row on one rank"
                padded[layout] = padded.get(layout, 0) + padding
        assert len(padded) == len(LAYOUTS) - 1
        assert min(padded.values()) > 0


@pytest.mark.parametrize("layout", [LAYOUTS[4], LAYOUTS[7]], ids=name_of)
def test_recompute_replays_the_same_routing(ranks: Any, made: dict[ModelShape, Made], layout: Layout) -> None:
    shape = shape_of(layout)
    rollouts = made[shape]
    case = Case(layout, shape, rollouts.later_weights, rollouts.path, torch.float64, OPTIONS)
    checkpointed = ranks(case)
    kept = ranks(replace(case, options=replace(OPTIONS, checkpointed=False)))
    assert same_bits(checkpointed[0].gradients, kept[0].gradients)
    layers = shape.num_layers
    for rank in checkpointed:
        stages: dict[str, dict[tuple[int, int], Any]] = {"forward": {}, "backward": {}}
        for number, layer, stage, ids in rank.asked:
            stages[stage][number, layer] = ids
        assert len(rank.asked) == 2 * rank.result.microbatches * layers, "each once forward and once for the backward"
        assert stages["forward"].keys() == stages["backward"].keys()
        assert all(np.array_equal(ids, stages["backward"][key]) for key, ids in stages["forward"].items())
        order = [layer for number, layer, stage, _ in rank.asked if (number, stage) == (0, "backward")]
        assert order == list(reversed(range(layers)))
    assert {stage for rank in kept for _, _, stage, _ in rank.asked} == {"forward"}


def test_another_routing_in_the_recompute_would_be_noticed(made: dict[ModelShape, Made]) -> None:
    """With the routers' own choice there, gradients are others, or torch sees that shapes do not fit."""
    rollouts = made[DENSE_FIRST]
    sample = rollouts.samples[0]
    ids = sample.experts.materialize(dtype=torch.int64)
    fed = len(sample) - 1

    def gradient(recompute_natively: bool) -> Tensor | None:
        model = load_model(DENSE_FIRST, rollouts.later_weights)
        forward = [True]

        def choose(layer: int, logits: Tensor) -> Tensor:
            return native(2)(layer, logits) if recompute_natively and not forward[0] else ids[:, layer]

        logits, _ = model(sample.tokens[:fed], torch.arange(fed), causal, choose, checkpointed=True)
        forward[0] = False
        try:
            torch.autograd.backward(logits.square().sum())
        except torch.utils.checkpoint.CheckpointError:
            return None
        return model.layers[-1].mlp.router.weight.grad  # type: ignore[union-attr, return-value]

    right, wrong = gradient(False), gradient(True)
    assert right is not None
    assert wrong is None or not torch.equal(wrong, right)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-5), (torch.float32, 1e-4), (torch.bfloat16, 0.03)], ids=str
)
def test_replay_brings_the_importance_ratio_to_one(
    ranks: Any, tmp_path: Path, dtype: torch.dtype, tolerance: float
) -> None:
    """At step 0, learner and rollout have the same weights."""
    rollouts = roll_out(tmp_path, DENSE_FIRST, 4, dtype=dtype, noise=0.3)
    options = replace(OPTIONS, compare=True, pack_tokens=10_000)
    found = ranks(Case(LAYOUTS[4], DENSE_FIRST, rollouts.weights, rollouts.path, torch.float64, options))
    result = found[0].result
    assert 0.2 < result.agreement < 0.99, "native routing is another for some tokens, or this shows nothing"
    assert result.ratio_most < tolerance
    assert result.native_ratio_most > 3 * tolerance
    assert result.native_ratio_off > 5 * result.ratio_off
    unreplayed = replace(options, routing="native")
    untraced = ranks(Case(LAYOUTS[4], DENSE_FIRST, rollouts.weights, rollouts.path, torch.float64, unreplayed))
    assert untraced[0].result.ratio_most == pytest.approx(result.native_ratio_most)
    assert untraced[0].chunks == 0
    assert np.isnan(untraced[0].result.agreement)


def touched_chunks(made: Made, layout: Layout, rank: int) -> list[set[tuple[str, int]]]:
    """For each microbatch of a rank, the chunks that its rows lie in: segment and place along the rows."""
    trace = tracefile.open(made.trace)
    per_stage = layout.cp * layout.sp
    place, within = divmod(rank, per_stage)
    spec = tracefile.ShardSpec(
        layout.cp, within // layout.sp, layout.cp_layout, layout.sp, within % layout.sp, rows="tokens-1"
    )
    packs = batch.pack([len(sample) for sample in made.samples], OPTIONS.pack_tokens)
    touched = []
    for numbers in packs[place :: layout.dp]:
        chunks: set[tuple[str, int]] = set()
        for sample, start, stop in spec.row_ranges([len(made.samples[i]) for i in numbers]):
            if sample is None:
                continue
            first = 0
            for span in trace.entry(made.samples[numbers[sample]].sample_id).spans:
                size = span.stop - span.start
                for row in range(max(start - first, 0), min(stop - first, size)):
                    chunks.add((span.segment, (span.start + row) // ROWS_PER_CHUNK))
                first += size
        touched.append(chunks)
    return touched


@pytest.mark.parametrize("layout", [LAYOUTS[i] for i in (0, 2, 4, 7, 8)], ids=name_of)
def test_each_rank_reads_only_its_shard(ranks: Any, made: dict[ModelShape, Made], layout: Layout) -> None:
    shape = shape_of(layout)
    rollouts = made[shape]
    case = Case(layout, shape, rollouts.later_weights, rollouts.path, torch.float64, OPTIONS)
    found = ranks(case)
    everything = set().union(*(set().union(*touched_chunks(rollouts, layout, rank)) for rank in range(RANKS)))
    chunk_bytes = ROWS_PER_CHUNK * shape.num_layers * shape.top_k
    for rank, each in enumerate(found):
        touched = touched_chunks(rollouts, layout, rank)
        assert each.chunks == sum(map(len, touched)), "what its rows touch, once for forward and backward together"
        assert each.decoded_bytes == each.chunks * chunk_bytes
        assert 0 < each.read_bytes < each.decoded_bytes + each.chunks * 64
        assert len(set().union(*touched)) < 0.75 * len(everything)


def test_chunks_held_do_not_depend_on_the_number_of_samples(ranks: Any, tmp_path: Path) -> None:
    most = {}
    layout = LAYOUTS[4]
    for prompts in (3, 15):
        directory = tmp_path / str(prompts)
        directory.mkdir()
        rollouts = roll_out(directory, DENSE_FIRST, prompts)
        options = replace(OPTIONS, prefetch=1)
        found = ranks(Case(layout, DENSE_FIRST, rollouts.weights, rollouts.path, torch.float32, options))
        largest = max(len(chunks) for rank in range(RANKS) for chunks in touched_chunks(rollouts, layout, rank))
        diagnostics = [each.result.diagnostics for each in found]
        most[prompts] = max(each["most_active_chunks"] for each in diagnostics)
        assert found[0].result.microbatches > prompts / 2
        assert 0 < most[prompts] <= 2 * largest, "the microbatch in use and the one read ahead"
        assert max(each["most_active_bytes"] for each in diagnostics) < 2 * largest * ROWS_PER_CHUNK * 6
        assert all(each["active_chunks"] == 0 for each in diagnostics), "nothing is left when the step is done"
    assert len(found) == RANKS
    assert most[15] < 1.5 * most[3], "five times the samples"


@dataclass(slots=True)
class Kill:
    """Kills a rank when it says something."""

    at: str
    learner: Learner | None = None
    killed: bool = False

    def __call__(self, name: str, text: str) -> None:
        if not self.killed and self.learner is not None and f"{name}: {text}" == self.at:
            os.kill(self.learner.pids[name], signal.SIGKILL)
            self.killed = True


def learner_options(directory: Path, made: Made) -> LearnerOptions:
    directory.mkdir(exist_ok=True)
    model = load_model(made.shape, made.weights)
    checkpoint = str(directory / "checkpoint.pt")
    save_checkpoint(checkpoint, 0, model.float(), new_optimizer(model, 1e-2), None)
    return LearnerOptions(made.shape, Layout(1, 2, 2), OPTIONS, 1e-2, checkpoint)


def test_a_killed_learner_resumes_the_step_from_the_trace(tmp_path: Path, made: dict[ModelShape, Made]) -> None:
    rollouts = made[DENSE_FIRST]
    weights, outcomes, steps = {}, {}, 2
    for name in ("unkilled", "killed"):
        options = learner_options(tmp_path / name, rollouts)
        kill = Kill("rank 2: microbatch 2 of 4")
        with Learner(options, progress=kill if name == "killed" else lambda *_: None) as learner:
            learner.step(0, rollouts.path)
            kill.learner = learner
            outcomes[name] = learner.step(1, rollouts.path)
        assert kill.killed == (name == "killed")
        weights[name] = outcomes[name].weights
        assert load_version(options.checkpoint) == steps
    assert (outcomes["unkilled"].restarts, outcomes["killed"].restarts) == (0, 1)
    assert same_bits(weights["unkilled"], weights["killed"])
    assert outcomes["killed"].result.loss == outcomes["unkilled"].result.loss
    before = load_model(DENSE_FIRST, rollouts.weights, torch.float32).state_dict()
    assert not same_bits(weights["killed"], {key: value.numpy() for key, value in before.items()})

    # Killed once more, after the step was saved and before anybody heard of it: it is not taken twice.
    with Learner(options, attempts=1) as learner:
        again = learner.step(1, rollouts.path)
        assert load_version(options.checkpoint) == steps
        assert same_bits(again.weights, weights["killed"])
        assert again.result.loss == outcomes["killed"].result.loss
        with pytest.raises(processes.ChildFailed, match="step 5 was asked for"):
            learner.step(5, rollouts.path)


def test_sessions_and_what_the_trace_has_of_them(made: dict[ModelShape, Made]) -> None:
    rollouts = made[DENSE_FIRST]
    trace = tracefile.open(rollouts.trace)
    assert trace.config.layer_ids == DENSE_FIRST.layer_ids == (1, 2, 3)
    assert sorted(trace) == sorted(sample.sample_id for sample in rollouts.samples)
    for sample in rollouts.samples:
        assert sample.experts.shape == (len(sample) - 1, 3, 2)
        assert torch.equal(trace[sample.sample_id].materialize(), sample.experts.materialize())
        assert trace.weight_versions(sample.sample_id) == [(0, len(sample) - 1, 3)]
        assert bool((sample.logprobs[sample.generated] < 0).all())
        assert not sample.logprobs[~sample.generated].any()
        turns = int((sample.generated[1:] & ~sample.generated[:-1]).sum())
        assert turns == TASK.turns


def test_weights_that_arrive_between_turns(tmp_path: Path) -> None:
    """As in asynchronous training: the trace says which rows were made with which."""
    worker = RolloutWorker(RolloutOptions(MOE_ONLY, TASK, 2))
    torch.manual_seed(5)
    weights = {name: tensor.numpy() for name, tensor in Model(MOE_ONLY).state_dict().items()}
    worker.set_weights(7, weights)

    async def roll_out_meanwhile() -> list[Sample]:
        rollout = asyncio.create_task(worker.rollout(0, str(tmp_path / "t.trace"), [0, 1]))
        await asyncio.sleep(0)  # the first turn
        worker.set_weights(8, {name: array + 0.01 for name, array in weights.items()})
        return await rollout

    samples = asyncio.run(roll_out_meanwhile())
    trace = tracefile.open(tmp_path / "t.trace")
    for sample in samples:
        (first, second) = trace.weight_versions(sample.sample_id)
        assert (first.start, first.version, second.stop, second.version) == (0, 7, len(sample) - 1, 8)
        assert first.stop == second.start
        answered = int((sample.generated[:-1] & ~sample.generated[1:]).nonzero()[0])
        assert first.stop == answered, "the first answer's last token was fed in the second turn"


def test_the_cache_computes_what_a_whole_forward_does() -> None:
    torch.manual_seed(2)
    model = Model(DENSE_FIRST).double()
    sessions = [Session(f"{i}", i, Environment(TASK.prompt(1, 0, i))) for i in range(6)]
    generator = Generator(model, sessions, TASK.max_tokens, 0.0, 3)
    for _ in range(TASK.turns):
        generator.turn(TASK.max_answer)
    lengths = [len(session.tokens) for session in sessions]
    assert len(set(lengths)) > 1
    assert max(lengths) <= TASK.max_tokens
    samples = torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)])
    positions = torch.cat([torch.arange(length) for length in lengths])
    tokens = torch.tensor([token for session in sessions for token in session.tokens])
    logits, routing = model(tokens, positions, PackedAttention(samples, positions), native(2))
    logprobs = logits.log_softmax(-1)
    for i, session in enumerate(sessions):
        mine = samples == i
        assert torch.equal(torch.stack(routing, 1)[mine][:-1], session.routed_experts())
        expected = logprobs[mine][torch.arange(lengths[i] - 1), tokens[mine][1:]]
        generated = torch.tensor(session.generated[1:])
        assert torch.allclose(torch.tensor(session.logprobs[1:])[generated].double(), expected[generated], atol=1e-5)


def test_the_environment() -> None:
    environment = Environment(Prompt("p", (Sum(12, 7), Sum(3, 4), Sum(5, 5))))
    assert decode(environment.ask()) == "12+7="
    environment.answer(encode("18\n"))
    assert decode(environment.ask()) == "!12+7="
    environment.answer(encode("19\n"))
    assert decode(environment.ask()) == "3+4="
    environment.answer(encode("7777"))
    assert environment.done
    assert environment.reward == pytest.approx(1 / 3)
    tokens, learn = transcript(TASK, np.random.default_rng(0))
    assert len(tokens) == len(learn) <= TASK.max_tokens
    assert Task(99, 2).prompt(1, 2, 3) == Task(99, 2).prompt(1, 2, 3) != Task(99, 2).prompt(1, 2, 4)


def test_examples_of_the_tools() -> None:
    for module in (batch, losses):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0
    with pytest.raises(ValueError, match="at least two"):
        losses.rloo_advantages([1.0, 0.0, 1.0], [0, 0, 1])


QUICK = {
    "steps": 3,
    "prompts": 4,
    "group": 4,
    "largest": 1,
    "warmup_steps": 40,
    "layout": Layout(1, 2, 2),
    "step": StepOptions(pack_tokens=100),
    "shape": replace(DENSE_FIRST, num_layers=2),
}


@pytest.fixture(scope="module")
def ray_cluster(fork_server: None) -> Iterator[None]:
    pytest.importorskip("ray")
    from train_r3_job.cluster import cluster

    with cluster(2):
        yield


def comparable(records: list[dict[str, float]]) -> list[dict[str, float]]:
    """What does not depend on time."""
    return [{k: v for k, v in r.items() if not k.endswith("_s") and not k.startswith("rank")} for r in records]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_same_seed_gives_the_same_run_also_when_it_is_resumed(ray_cluster: None, tmp_path: Path) -> None:
    options = job.Options(out=str(tmp_path / "whole"), mode="sync", **QUICK)  # type: ignore[arg-type]
    whole = job.run(options).records
    assert [record["step"] for record in whole] == [0, 1, 2]
    assert all(record["staleness"] == 0 for record in whole)
    assert all(0 < record["reward"] < 1 and record["loss"] != 0 for record in whole)

    parts = replace(options, out=str(tmp_path / "parts"))
    job.run(replace(parts, steps=2))
    # As if killed after the step was saved and before it was logged.
    log = tmp_path / "parts" / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text(lines[0] + lines[1][:30])
    resumed = job.run(parts, resume=True)
    assert comparable(resumed.records) == comparable(whole)
    logged = [json.loads(line) for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines()]
    assert comparable(logged) == comparable(whole)
    assert sorted(name for name in os.listdir(parts.out) if name.endswith(".trace")) == [
        "step_000001.trace",
        "step_000002.trace",
    ]
    with pytest.raises(job.RunFailed, match="more --steps"):
        job.run(parts, resume=True)
    with pytest.raises(job.RunFailed, match="other options: seed"):
        job.run(replace(parts, steps=4, seed=1), resume=True)
    with pytest.raises(job.RunFailed, match="holds a run already"):
        job.run(parts)
    with pytest.raises(job.RunFailed, match="holds no run"):
        job.run(replace(parts, out=str(tmp_path / "nothing")), resume=True)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_asynchronous_rollouts_are_a_step_behind(ray_cluster: None, tmp_path: Path) -> None:
    options = job.Options(out=str(tmp_path), mode="async", keep_traces=True, **QUICK)  # type: ignore[arg-type]
    records = job.run(options).records
    assert records[0]["staleness"] == 0
    assert all(0 < record["staleness_most"] <= 1 for record in records[1:])
    assert all(record["agreement"] < 1 for record in records)
    for number in range(3):
        assert len(tracefile.open(options.trace(number))) == 16


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"COLUMNS": "140"}
    return subprocess.run(
        [sys.executable, COMMAND, *arguments], capture_output=True, text=True, env=environment, timeout=280, **options
    )


SMALL = ("--prompts", "4", "--group", "2", "--warmup-steps", "5", "--layers", "2", "--pack-tokens", "60")


@pytest.mark.timeout(300)
def test_the_command(tmp_path: Path) -> None:
    done = command("--steps", "2", *SMALL, "--no-dense-first", "--cp-layout", "contiguous", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step 2 of 2: reward" in done.stderr
    assert "Warning" not in done.stderr
    for said in (
        "2 steps; means",
        "log importance ratio",
        "most chunks held by a rank",
        "train.png",
        "tracefile inspect",
    ):
        assert said in done.stdout
    out = tmp_path / "train-r3-out"
    assert (out / "train.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((out / "log.jsonl").read_text().splitlines()[-1])
    assert {"reward", "agreement", "ratio_off", "native_ratio_off", "staleness"} <= record.keys()
    for rank in range(4):
        names = ("read_bytes", "rss_anon_bytes", "active_chunks", "most_active_chunks")
        assert {f"rank{rank}/tracefile/{name}" for name in names} <= record.keys()
    assert len(tracefile.open(out / "step_000001.trace")) == 8


def refused(*arguments: str) -> str:
    """What the command says of wrong usage."""
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "140", "TERM": "dumb"})
    assert done.exit_code == 2
    return " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--top-k 9", "9 of 8 experts"),
        ("--group 1", "Invalid value for '--group'"),
        ("--workers 5 --prompts 4", "5 workers share 4 prompts"),
        ("--clip 1.5", "between 0 and 1"),
        ("--learning-rate 0", "must be positive"),
        ("--cp 16 --sp 16", "at most 64"),
        ("--mode fast", "'fast' is not one of"),
    ],
)
def test_wrong_usage(arguments: str, said: str) -> None:
    assert said in refused(*arguments.split())


def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, arguments in (("wandb", ("--wandb", "project")), ("ray", ())):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, missing=module: None if name == missing else name)
        assert f"{module} is not installed" in refused(*arguments)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_reward_rises_over_fifty_steps(ray_cluster: None, tmp_path: Path) -> None:
    records = job.run(job.Options(out=str(tmp_path))).records
    rewards = [record["reward"] for record in records]
    assert len(rewards) == 50
    assert fmean(rewards[-10:]) > fmean(rewards[:10]) + 0.1
    assert fmean(record["ratio_off"] for record in records) < fmean(record["native_ratio_off"] for record in records)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_command_killed_and_resumed(tmp_path: Path) -> None:
    arguments = ("--steps", "4", "--mode", "sync", *SMALL, "--warmup-steps", "120", "--group", "4")
    whole = command(*arguments, "--out", str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    out = tmp_path / "killed"
    with subprocess.Popen(
        [sys.executable, COMMAND, *arguments, "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "step 2 of 4" in line:
                process.kill()  # Ray's processes and the ranks are left to notice
                break
    assert process.returncode == -signal.SIGKILL
    resumed = command(*arguments, "--out", str(out), "--resume")
    assert resumed.returncode == 0, resumed.stderr
    logs = [
        comparable([json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()])
        for directory in (tmp_path / "whole", out)
    ]
    assert logs[0] == logs[1]
    assert [record["loss"] != 0 for record in logs[0][1:3]] == [True, True], "before and after the kill"
