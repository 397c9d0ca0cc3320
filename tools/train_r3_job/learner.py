"""The learner: ranks that train step by step, and start over from the last checkpoint when one of them is killed.

After each step rank 0 writes weights, optimizer state and the step's result, as one file that replaces the last.
A rank that was killed takes the others with it, as they wait for it. New ones then load the file and take the same
step again: the samples are in the step's batch file, the routing is in the trace. Whether the step had been finished
or not, it comes to the same weights.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

# Optimizers and checkpointing import these when they are first used, which takes seconds: here once, for all ranks.
import torch._dynamo
import torch.distributed as dist
import torch.distributed.tensor
from demo_job.processes import ChildFailed, Team

import tracefile
from train_r3_job import batch
from train_r3_job.model import Model, ModelShape
from train_r3_job.parallel import Layout, Place
from train_r3_job.step import StepOptions, StepResult, accumulate

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    import numpy as np
    from demo_job.processes import Channel

#: Weights by name, as they travel between processes.
Weights: TypeAlias = "dict[str, np.ndarray[Any, Any]]"
_TIMEOUT = timedelta(seconds=120)
_RAMP_STEPS = 5
#: Of decoded chunks that more than one read wants; the loader's budget comes on top.
_CACHE_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """What every rank is told.

    Attributes
    ----------
    shape : ModelShape
    layout : Layout
    step : StepOptions
    learning_rate : float
    max_norm : float
        Gradients are clipped to this norm.
    checkpoint : str
        The file that holds weights and optimizer state.
    dtype : torch.dtype
        float32 or float64.
    """

    shape: ModelShape
    layout: Layout
    step: StepOptions
    learning_rate: float
    checkpoint: str
    max_norm: float = 1.0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Trained:
    """A step that was taken.

    Attributes
    ----------
    result : StepResult
        Of rank 0.
    grad_norm : float
    weights : dict of str to ndarray
        After it.
    diagnostics : dict of int to dict
        By rank.
    restarts : int
        How often ranks had to be started anew for it.
    """

    result: StepResult
    grad_norm: float
    weights: Weights
    diagnostics: dict[int, dict[str, float]]
    restarts: int


def new_optimizer(model: Model, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0)


def save_checkpoint(
    path: str, version: int, model: Model, optimizer: torch.optim.Optimizer, outcome: dict[str, Any] | None
) -> None:
    """Weights after ``version`` steps, and what came of the last one."""
    content = {"version": version, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "outcome": outcome}
    batch.replace(path, content)


def load_version(path: str) -> int:
    """After how many steps a checkpoint was made."""
    return int(torch.load(path, weights_only=True)["version"])


def load_weights(path: str) -> Weights:
    """Those of a checkpoint."""
    return _as_numpy(torch.load(path, weights_only=True)["model"])


def _as_numpy(state: dict[str, torch.Tensor]) -> Weights:
    return {name: tensor.float().numpy() for name, tensor in state.items()}


class _Rank:
    """One rank's state: the model, the optimizer, and after how many steps they are."""

    def __init__(self, options: LearnerOptions) -> None:
        self.options = options
        self.place = Place(options.layout)
        self.model = Model(options.shape).to(options.dtype)
        self.optimizer = new_optimizer(self.model, options.learning_rate)
        content = torch.load(options.checkpoint, weights_only=True)
        self.version: int = content["version"]
        self.outcome: dict[str, Any] | None = content["outcome"]
        self.model.load_state_dict(content["model"])
        if content["optimizer"]["state"]:
            self.optimizer.load_state_dict(content["optimizer"])

    def train(self, step: int, path: str, progress: Callable[[str], None]) -> None:
        """Take ``step``, unless it was taken before this process was started."""
        if self.version == step + 1 and self.outcome is not None:
            return
        if self.version != step:
            raise RuntimeError(f"the checkpoint is of step {self.version}, and step {step} was asked for")
        samples = batch.load(path)
        result = accumulate(self.model, self.place, samples, self.options.step, progress)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.max_norm)
        for group in self.optimizer.param_groups:  # Adam's first steps are large whatever the gradient
            group["lr"] = self.options.learning_rate * min(1.0, (step + 1) / _RAMP_STEPS)
        self.optimizer.step()
        self.version = step + 1
        self.outcome = {"result": asdict(result), "grad_norm": float(norm)}
        if dist.get_rank() == 0:
            save_checkpoint(self.options.checkpoint, self.version, self.model, self.optimizer, self.outcome)


def run_rank(channel: Channel, rank: int, options: LearnerOptions, store: str) -> None:
    """The process: gets ``(step, batch file)`` and replies with ``(outcome, weights of rank 0)``, until it is left."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host
    tracefile.configure(cache_bytes=_CACHE_BYTES)
    size = options.layout.ranks
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=_TIMEOUT)
    state = _Rank(options)
    while True:
        step, path = channel.receive()
        state.train(step, path, channel.progress)
        channel.reply((state.outcome, _as_numpy(state.model.state_dict()) if rank == 0 else None))


class Learner:
    """All ranks, from the process that drives them.

    Parameters
    ----------
    options : LearnerOptions
        Its checkpoint must be there.
    attempts : int
        How often a step is tried, with new ranks each time after one has died.
    progress : callable
        Gets the name of a rank and what it says.
    """

    def __init__(
        self,
        options: LearnerOptions,
        *,
        attempts: int = 2,
        progress: Callable[[str, str], None] = lambda name, text: None,
    ) -> None:
        self.options = options
        self._attempts = attempts
        self._progress = progress
        self._directory = tempfile.TemporaryDirectory(prefix="train-r3-")
        self._started = 0
        self._team: Team | None = None

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by rank name, ``rank 0`` and so on."""
        return {} if self._team is None else self._team.pids

    def _start(self) -> Team:
        store = os.path.join(self._directory.name, f"store-{self._started}")
        self._started += 1
        members = {f"rank {rank}": (rank, self.options, store) for rank in range(self.options.layout.ranks)}
        return Team(run_rank, members, method="forkserver", progress=self._progress)

    def step(self, step: int, path: str) -> Trained:
        """Take one step on the samples of a batch file.

        Raises
        ------
        ChildFailed
            A rank has failed, in every attempt.
        """
        for attempt in range(self._attempts):
            try:
                if self._team is None:
                    self._team = self._start()
                self._team.tell((step, path))
                replies = self._team.replies()
                break
            except ChildFailed as error:
                self.close(forced=True)
                if attempt + 1 == self._attempts:
                    raise
                self._progress("learner", f"{str(error).strip().splitlines()[-1]}; starting anew from the checkpoint")
        outcomes = {int(name.split()[1]): outcome for name, (outcome, _) in replies.items()}
        return Trained(
            result=StepResult(**outcomes[0]["result"]),
            grad_norm=outcomes[0]["grad_norm"],
            weights=replies["rank 0"][1],
            diagnostics={rank: outcome["result"]["diagnostics"] for rank, outcome in sorted(outcomes.items())},
            restarts=attempt,
        )

    def close(self, *, forced: bool = False) -> None:
        team, self._team = self._team, None
        if team is None:
            return
        if forced:
            team.kill()
        else:
            team.__exit__(None, None, None)

    def __enter__(self) -> Learner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(forced=kind is not None)
        self._directory.cleanup()
