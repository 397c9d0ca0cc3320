"""The demo from end to end: train, roll out, learn in both ways, compare."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from demo_job import corpus
from demo_job.learner import LearnerResult, LearnerTask, learn
from demo_job.memory import MemoryRecord, MemorySampler
from demo_job.model import ModelShape
from demo_job.parallel import RANKS
from demo_job.processes import Team
from demo_job.rollout import Prompt, RolloutResult, RolloutTask, rollout
from demo_job.training import Trained, train

if TYPE_CHECKING:
    from collections.abc import Callable

    import tracefile

ROLLOUT_PROCESSES = 2


class DemoFailed(RuntimeError):
    """The demo's own checks failed, or it cannot run here."""


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes of the run; see ``--help``."""

    samples: int
    tokens: int
    layers: int
    top_k: int
    experts: int
    group: int
    microbatch: int
    train_steps: int
    train_seconds: float
    seed: int

    @property
    def max_new(self) -> int:
        """The longest continuation."""
        return self.tokens // 24

    def prompts(self) -> list[Prompt]:
        """Prompts of 3/4 to 23/24 of ``tokens``, each with ``group`` samples."""
        generator = torch.Generator().manual_seed(self.seed)
        prompts = []
        for number, first in enumerate(range(0, self.samples, self.group)):
            length = int(torch.randint(self.tokens * 3 // 4, self.tokens - self.max_new + 1, (1,), generator=generator))
            count = min(self.group, self.samples - first)
            prompts.append(Prompt(tuple(f"prompt-{number}/{i}" for i in range(count)), length))
        return prompts

    @property
    def most_bytes(self) -> int:
        """An upper bound of the payload as int32."""
        return self.samples * self.tokens * self.layers * self.top_k * 4


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What the rollout processes made."""

    by_process: dict[str, RolloutResult]
    payload_bytes: int
    trace_bytes: int

    @property
    def handles(self) -> dict[str, tracefile.LazyRoutedExperts]:
        return {sample: lazy for result in self.by_process.values() for sample, lazy in result.handles.items()}

    @property
    def payload_files(self) -> tuple[str, ...]:
        return tuple(file for result in self.by_process.values() for file in result.payload_files)


@dataclass(frozen=True, slots=True)
class Pass:
    """All ranks getting all routing, in one of the two ways.

    Attributes
    ----------
    results : dict of str to LearnerResult
        By rank, as is ``arrays``.
    arrays : dict of str to list of ndarray
        One microbatch, layer by layer.
    memory : MemoryRecord
    handed_over_bytes : int
        What goes to each rank.
    """

    results: dict[str, LearnerResult]
    arrays: dict[str, list[np.ndarray[Any, Any]]]
    memory: MemoryRecord
    handed_over_bytes: int


def run_training(options: Options, progress: Callable[[str], None]) -> Trained:
    shape = ModelShape(options.layers, options.experts, options.top_k, corpus.VOCAB)
    return train(shape, options.train_steps, options.train_seconds, options.seed, progress)


def run_rollouts(options: Options, trained: Trained, work: str, progress: Callable[[str], None]) -> Rollouts:
    """Two processes write all samples into one trace, and the same as payload files."""
    weights, trace, payload = (os.path.join(work, name) for name in ("weights.pt", "step_1.trace", "payload"))
    torch.save(trained.model.state_dict(), weights)
    os.mkdir(payload)
    prompts = options.prompts()
    tasks = {
        f"rollout-{i}": RolloutTask(
            weights,
            trace,
            payload,
            trained.model.shape,
            tuple(prompts[i::ROLLOUT_PROCESSES]),
            options.max_new,
            options.seed + 1 + i,
        )
        for i in range(ROLLOUT_PROCESSES)
    }
    members = {name: (name, task) for name, task in tasks.items()}
    with Team(rollout, members, method="spawn", progress=lambda name, text: progress(f"{name}: {text}")) as team:
        results: dict[str, RolloutResult] = team.replies()
    for name, result in results.items():
        # A near tie may fall the other way when the sums are taken in another order; more than that is a bug.
        if result.reproduced < 0.95:
            raise DemoFailed(f"{name}: a forward pass reproduces only {result.reproduced:.1%} of the recorded routing")
    payload_bytes = sum(lazy.numel() * 4 for result in results.values() for lazy in result.handles.values())
    return Rollouts(results, payload_bytes, _size_of(trace))


def _size_of(directory: str) -> int:
    return sum(os.path.getsize(os.path.join(root, name)) for root, _, names in os.walk(directory) for name in names)


def microbatches(options: Options) -> tuple[tuple[str, ...], ...]:
    """The samples in a random order, ``microbatch`` at a time."""
    samples = [sample for prompt in options.prompts() for sample in prompt.sample_ids]
    generator = torch.Generator().manual_seed(options.seed)
    order = torch.randperm(len(samples), generator=generator).tolist()
    size = options.microbatch
    return tuple(tuple(samples[i] for i in order[start : start + size]) for start in range(0, len(order), size))


def run_pass(options: Options, rollouts: Rollouts, *, lazy: bool) -> Pass:
    """All ranks at once; they start when the last one has imported what it needs."""
    task = LearnerTask(
        () if lazy else rollouts.payload_files,
        rollouts.handles if lazy else {},
        microbatches(options),
        options.experts,
    )
    with Team(learn, {rank.name: (rank,) for rank in RANKS}, method="forkserver") as team:
        team.replies()
        with MemorySampler(team.pids) as sampler:
            team.tell(task)
            results: dict[str, LearnerResult] = team.replies()
        team.tell(len(task.microbatches) // 2)
        arrays: dict[str, list[np.ndarray[Any, Any]]] = team.replies()
    handed_over = len(pickle.dumps(task.handles)) if lazy else sum(map(os.path.getsize, rollouts.payload_files))
    return Pass(results, arrays, sampler.record, handed_over)


def check_same(eager: Pass, lazy: Pass) -> None:
    """Both passes gave every rank the same bytes.

    Raises
    ------
    DemoFailed
    """
    for name, expected in eager.results.items():
        got = lazy.results[name]
        if (got.digest, got.tensors, got.rows) != (expected.digest, expected.tensors, expected.rows):
            raise DemoFailed(f"{name} got other routing through the trace than from the whole payload")
        for layer, (one, other) in enumerate(zip(eager.arrays[name], lazy.arrays[name], strict=True)):
            if one.dtype != np.int32 or other.dtype != np.int32 or not np.array_equal(one, other):
                raise DemoFailed(f"{name}: layer {layer} of a microbatch differs between trace and whole payload")


def check_room(options: Options) -> None:
    """The whole payload goes to every rank: refuse what this host has no memory for.

    Raises
    ------
    DemoFailed
    """
    with open("/proc/meminfo") as meminfo:
        available = next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:"))
    needed = len(RANKS) * (options.most_bytes + 300 * 2**20)
    if needed > available:
        raise DemoFailed(
            f"handing the whole payload to {len(RANKS)} ranks would take up to {needed / 2**30:.1f} GiB of memory, and"
            f" {available / 2**30:.1f} GiB are free; choose fewer --samples or --tokens"
        )
