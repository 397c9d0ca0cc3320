"""A rollout worker: samples groups of sessions and writes the routing that it used into the step's trace.

Its numerics are not the learner's: weights in bfloat16, as engines have them, noise on the router's logits if asked
for, and weights that are a step old where rollouts do not wait for the learner. So its routers choose otherwise for
some tokens than the learner's would, and the trace says how.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import tracefile
from train_r3_job.batch import Sample
from train_r3_job.generate import Generator, Session
from train_r3_job.model import Model, ModelShape
from train_r3_job.task import Environment, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from train_r3_job.learner import Weights

#: Sessions of this task have tens of tokens, not tens of thousands: short chunks, so that ranks have something to skip.
ROWS_PER_CHUNK = 8


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """What rollout workers do.

    Attributes
    ----------
    shape : ModelShape
    task : Task
    group : int
        Sessions of each prompt.
    dtype : torch.dtype
        Of weights and activations.
    noise : float
        Of the router's logits, in their own units.
    seed : int
    """

    shape: ModelShape
    task: Task
    group: int
    dtype: torch.dtype = torch.bfloat16
    noise: float = 0.0
    seed: int = 0


class RolloutWorker:
    """Generates; one instance in each rollout process."""

    def __init__(self, options: RolloutOptions) -> None:
        torch.set_num_threads(1)
        self.options = options
        self.version = -1
        self._model = Model(options.shape).to(options.dtype).eval()

    def set_weights(self, version: int, weights: Weights) -> int:
        """Generate with these from the next turn on, also of sessions that have begun."""
        model = Model(self.options.shape)
        model.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
        self._model, self.version = model.to(self.options.dtype).eval(), version
        return version

    async def rollout(self, step: int, trace_path: str, prompts: Sequence[int]) -> list[Sample]:
        """A group of sessions for each prompt number, all in one batch.

        A turn's rows are written while the next turn is generated; what this returns is committed.
        """
        options, task = self.options, self.options.task
        sessions = []
        for number in prompts:
            prompt = task.prompt(options.seed, step, number)
            sessions += [
                Session(f"{prompt.name}/{member}", number, Environment(prompt)) for member in range(options.group)
            ]
        seed = (options.seed * 1_000_003 + step) * 1009 + prompts[0]
        generator = Generator(self._model, sessions, task.max_tokens, options.noise, seed)
        shape = options.shape
        async with tracefile.TraceWriter(
            trace_path,
            num_layers=shape.num_layers,
            top_k=shape.top_k,
            num_experts=shape.num_experts,
            layer_ids=shape.layer_ids,
            rows_per_chunk=ROWS_PER_CHUNK,
        ) as writer:
            writes: list[asyncio.Task[list[tracefile.LazyRoutedExperts]]] = []
            for turn in range(task.turns):
                generator.model, version = self._model, self.version
                starts = [len(session.rows) for session in sessions]
                generator.turn(task.max_answer)
                rows = {s.sample_id: s.routed_experts(start) for s, start in zip(sessions, starts, strict=True)}
                writes.append(asyncio.create_task(_write(writer, rows, starts if turn else None, version)))
                await asyncio.sleep(0.001)  # lets the writer begin, and new weights in
            handles = [await write for write in writes][-1]
        return [
            Sample(
                sample_id=session.sample_id,
                group=session.group,
                tokens=torch.tensor(session.tokens),
                generated=torch.tensor(session.generated),
                logprobs=torch.tensor(session.logprobs),
                reward=session.environment.reward,
                experts=handle,
            )
            for session, handle in zip(sessions, handles, strict=True)
        ]


async def _write(
    writer: tracefile.TraceWriter, rows: dict[str, Tensor], starts: Sequence[int] | None, version: int
) -> list[tracefile.LazyRoutedExperts]:
    """New sessions as one segment; later turns continue each session's sample from row ``starts`` on."""
    if starts is None:
        return await writer.append_many_async(rows.items(), weight_version=version)
    appends = [
        writer.append_async(sample_id, new, start=start, weight_version=version)
        for (sample_id, new), start in zip(rows.items(), starts, strict=True)
    ]
    return await asyncio.gather(*appends)
