"""Rollout workers as actors of a Ray cluster on this machine."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from train_r3_job.learner import Weights
    from train_r3_job.rollout import RolloutOptions

TOOLS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Processes that are started inside can import this package."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = TOOLS if not before else f"{TOOLS}{os.pathsep}{before}"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@contextlib.contextmanager
def cluster(workers: int) -> Iterator[None]:
    """A cluster of this process, unless it has one already."""
    import ray

    if ray.is_initialized():
        yield
        return
    with warnings.catch_warnings(), importable():
        warnings.filterwarnings("ignore", category=FutureWarning, module="ray")  # of its own settings to come
        ray.init(
            address="local",
            num_cpus=workers,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=128 * 2**20,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    try:
        yield
    finally:
        ray.shutdown()


class RolloutsFailed(RuntimeError):
    """A rollout worker raised or died."""


class Rollouts:
    """All rollout workers, from the process that drives them.

    Parameters
    ----------
    options : RolloutOptions
    workers, prompts : int
        Prompts of a step are dealt out to the workers, in blocks of neighbours.
    """

    def __init__(self, options: RolloutOptions, workers: int, prompts: int) -> None:
        import ray

        from train_r3_job.rollout import RolloutWorker

        self._ray = ray
        actor = ray.remote(num_cpus=1, max_restarts=0)(RolloutWorker)
        self._actors: list[Any] = [actor.remote(options) for _ in range(workers)]
        bounds = [prompts * i // workers for i in range(workers + 1)]
        self._blocks = [range(start, stop) for start, stop in itertools.pairwise(bounds) if start < stop]

    def send_weights(self, version: int, weights: Weights) -> list[Any]:
        """Put them into the object store once, for all workers; what this returns, :meth:`wait` waits for."""
        reference = self._ray.put(weights)
        return [actor.set_weights.remote(version, reference) for actor in self._actors]

    def wait(self, references: list[Any]) -> list[Any]:
        """What the workers have to say to it.

        Raises
        ------
        RolloutsFailed
        """
        try:
            answers: list[Any] = self._ray.get(references)
        except self._ray.exceptions.RayError as error:
            raise RolloutsFailed(f"a rollout worker has failed: {error}") from error
        return answers

    def start(self, step: int, trace_path: str) -> list[Any]:
        """Begin a step's rollouts; what this returns, :meth:`wait` waits for: a list of samples of each worker."""
        pairs = zip(self._actors, self._blocks, strict=False)
        return [actor.rollout.remote(step, trace_path, list(block)) for actor, block in pairs]
