"""The run from end to end: a warm start, then rollouts, a learner step, and the weights back, again and again."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import torch

import tracefile
from train_r3_job import batch
from train_r3_job.cluster import Rollouts, cluster
from train_r3_job.learner import Learner, LearnerOptions, load_version, load_weights, new_optimizer, save_checkpoint
from train_r3_job.log import LOG_NAME, Log, Record, read_log
from train_r3_job.model import ModelShape
from train_r3_job.parallel import Layout
from train_r3_job.rollout import RolloutOptions
from train_r3_job.step import StepOptions
from train_r3_job.task import ALPHABET, Task
from train_r3_job.warmup import warm_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from train_r3_job.batch import Sample
    from train_r3_job.learner import Trained

Mode = Literal["sync", "async"]
#: A step's files stay until so many newer steps are there, unless all are kept.
KEPT_STEPS = 2


class RunFailed(RuntimeError):
    """The run cannot go on; the message says why."""


@dataclass(frozen=True, slots=True)
class Options:
    """A run; see ``--help``. What is in :meth:`identity` must be the same for a run that continues another."""

    out: str
    steps: int = 50
    prompts: int = 16
    group: int = 8
    turns: int = 2
    largest: int = 9
    mode: Mode = "async"
    workers: int = 2
    shape: ModelShape = field(default_factory=lambda: ModelShape(len(ALPHABET)))
    layout: Layout = field(default_factory=Layout)
    step: StepOptions = field(default_factory=StepOptions)
    learning_rate: float = 1e-3
    warmup_steps: int = 150
    rollout_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    noise: float = 0.05
    seed: int = 0
    keep_traces: bool = False
    wandb_project: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", os.path.abspath(self.out))  # Ray's workers are elsewhere

    @property
    def task(self) -> Task:
        return Task(self.largest, self.turns)

    def identity(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        for name in ("out", "steps", "keep_traces", "wandb_project"):
            del fields[name]
        return fields

    def trace(self, step: int) -> str:
        return os.path.join(self.out, f"step_{step:06d}.trace")

    def batch(self, step: int) -> str:
        return os.path.join(self.out, f"step_{step:06d}.batch")

    @property
    def checkpoint(self) -> str:
        return os.path.join(self.out, "checkpoint.pt")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run.

    Attributes
    ----------
    records : list of dict
        One for each step, as in the log.
    log, last_trace : str
    tensorboard : str or None
    """

    records: list[Record]
    log: str
    last_trace: str
    tensorboard: str | None


class Progress:
    """What a run tells while it lasts; this one is silent."""

    def warm_up(self, step: int, loss: float) -> None:
        """A step of the supervised start is done."""

    def detail(self, text: str) -> None:
        """What goes on within a step."""

    def step(self, record: Record) -> None:
        """A step is done."""


def prepare(options: Options, *, resume: bool, progress: Progress) -> list[Record]:
    """Make the directory ready; what an earlier run in it has logged, if it is continued.

    Raises
    ------
    RunFailed
        There is a run already and it is not to be continued, or it was another one, or there is none.
    """
    settings, log = (os.path.join(options.out, name) for name in ("options.json", LOG_NAME))
    if resume:
        if not (os.path.exists(settings) and os.path.exists(options.checkpoint)):
            raise RunFailed(f"{options.out} holds no run with a checkpoint; start one, without --resume")
        with open(settings, encoding="utf-8") as file:
            before: dict[str, Any] = json.load(file)
        changed = sorted(name for name, value in options.identity().items() if before.get(name) != value)
        if changed:
            raise RunFailed(
                f"the run in {options.out} had other options: {', '.join(changed)}; resume it with the same"
            )
        version = load_version(options.checkpoint)
        records = read_log(log)[:version]
        if len(records) < version - 1:  # a step's weights are saved before it is logged
            raise RunFailed(f"{log} has {len(records)} steps, and {options.checkpoint} is of step {version}")
        if len(records) >= options.steps:
            raise RunFailed(f"the run in {options.out} has taken {len(records)} steps already; give more --steps")
        return records
    if os.path.exists(options.checkpoint) or os.path.exists(log):
        raise RunFailed(f"{options.out} holds a run already: continue it with --resume, or give another --out")
    os.makedirs(options.out, exist_ok=True)
    with open(settings, "w", encoding="utf-8") as file:
        json.dump(options.identity(), file, indent=1)
    model = warm_up(options.shape, options.task, options.warmup_steps, options.seed, progress.warm_up)
    save_checkpoint(options.checkpoint, 0, model, new_optimizer(model, options.learning_rate), None)
    return []


def run(options: Options, *, resume: bool = False, progress: Progress | None = None) -> Outcome:
    """Train, or go on with training, up to ``options.steps`` steps.

    Raises
    ------
    RunFailed
        As :func:`prepare` does.
    ChildFailed, RolloutsFailed
        A learner rank has failed, also when started anew; or a rollout worker has.
    """
    progress = progress or Progress()
    records = prepare(options, resume=resume, progress=progress)
    learner_options = LearnerOptions(
        options.shape, options.layout, options.step, options.learning_rate, options.checkpoint
    )
    rollout_options = RolloutOptions(
        options.shape,
        options.task,
        options.group,
        getattr(torch, options.rollout_dtype),
        options.noise,
        options.seed,
    )
    with (
        Log(options.out, records, options.wandb_project) as log,
        cluster(options.workers),
        Learner(learner_options, progress=lambda name, text: progress.detail(f"{name}: {text}")) as learner,
    ):
        rollouts = Rollouts(rollout_options, options.workers, options.prompts)
        loop = _Loop(options, rollouts, learner, progress)
        for record in loop.steps(len(records)):
            log.add(int(record["step"]), record)
            records.append(record)
            progress.step(record)
    return Outcome(records, log.path, options.trace(options.steps - 1), log.tensorboard)


class _Loop:
    """The steps, one after another; in asynchronous mode the rollouts of the next begin while this one trains."""

    def __init__(self, options: Options, rollouts: Rollouts, learner: Learner, progress: Progress) -> None:
        self.options = options
        self.rollouts = rollouts
        self.learner = learner
        self.progress = progress

    def steps(self, first: int) -> Iterator[Record]:
        options, rollouts = self.options, self.rollouts
        version = load_version(options.checkpoint)
        rollouts.wait(rollouts.send_weights(version, load_weights(options.checkpoint)))
        under_way: list[Any] | None = None
        for step in range(first, options.steps):
            began = time.perf_counter()
            self.progress.detail("rollouts")
            if os.path.exists(options.batch(step)):
                samples = batch.load(options.batch(step))  # an earlier run came as far as that
            else:
                parts = rollouts.wait(under_way or self._start(step))
                samples = [sample for part in parts for sample in part]
                batch.save(options.batch(step), samples)
            under_way = None
            waited = time.perf_counter() - began
            if options.mode == "async" and step + 1 < options.steps and not os.path.exists(options.batch(step + 1)):
                under_way = self._start(step + 1)
            began = time.perf_counter()
            trained = self.learner.step(step, options.batch(step))
            seconds = time.perf_counter() - began
            sent = rollouts.send_weights(step + 1, trained.weights)
            if options.mode == "sync":
                rollouts.wait(sent)
            record = _record(step, samples, trained, waited, seconds)
            record |= _staleness(options.trace(step), step, samples)
            self._drop(step - KEPT_STEPS)
            yield record

    def _start(self, step: int) -> list[Any]:
        shutil.rmtree(self.options.trace(step), ignore_errors=True)  # of a run that was killed meanwhile
        return self.rollouts.start(step, self.options.trace(step))

    def _drop(self, step: int) -> None:
        if step >= 0 and not self.options.keep_traces:
            shutil.rmtree(self.options.trace(step), ignore_errors=True)
            if os.path.exists(self.options.batch(step)):
                os.unlink(self.options.batch(step))


def _record(step: int, samples: Sequence[Sample], trained: Trained, waited: float, seconds: float) -> Record:
    result = trained.result
    record: Record = {
        "step": step,
        "reward": fmean(sample.reward for sample in samples),
        "loss": result.loss,
        "grad_norm": trained.grad_norm,
        "samples": len(samples),
        "tokens": result.tokens,
        "microbatches": result.microbatches,
        "agreement": result.agreement,
        "ratio": result.ratio,
        "ratio_off": result.ratio_off,
        "ratio_most": result.ratio_most,
        "clipped": result.clipped,
        "native_ratio_off": result.native_ratio_off,
        "native_ratio_most": result.native_ratio_most,
        "rollout_wait_s": waited,
        "train_s": seconds,
        "restarts": trained.restarts,
    }
    for rank, diagnostics in trained.diagnostics.items():
        record |= {f"rank{rank}/tracefile/{name}": value for name, value in diagnostics.items()}
    return record


def _staleness(trace_path: str, step: int, samples: Sequence[Sample]) -> Record:
    """By how many steps the weights that made the trace's rows are older than the learner's, as the trace says."""
    trace = tracefile.open(trace_path)
    rows, total, most, mixed = 0, 0, 0, 0
    for sample in samples:
        versions = trace.weight_versions(sample.sample_id)
        mixed += len(versions) > 1
        for start, stop, version in versions:
            assert isinstance(version, int)
            rows += stop - start
            total += (stop - start) * (step - version)
            most = max(most, step - version)
    trace.close()
    return {"staleness": total / rows, "staleness_most": most, "mixed_versions": mixed / len(samples)}
