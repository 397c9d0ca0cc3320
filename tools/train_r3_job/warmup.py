"""A short supervised start: an untrained model never answers right, and RL has nothing to reinforce then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from train_r3_job.model import Model, ModelShape, native
from train_r3_job.task import Task, encode

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, LEARNING_RATE, BALANCE = 16, 3e-3, 0.01


def transcript(task: Task, rng: np.random.Generator) -> tuple[list[int], list[bool]]:
    """A session with right answers, and some wrong ones for the environment to refuse: tokens, and which to learn."""
    tokens: list[int] = []
    learn: list[bool] = []

    def say(text: str, learned: bool) -> None:
        tokens.extend(encode(text))
        learn.extend([learned] * len(text))

    asked, again = task.draw(rng), ""
    for _ in range(task.turns):
        say(again + asked.question, False)
        if rng.random() < 0.3:
            say(f"{task.draw(rng).left + asked.right}\n", False)
            again = "!"
        else:
            say(asked.answer, True)
            asked, again = task.draw(rng), ""
    return tokens, learn


class PackedAttention:
    """Causal attention within samples, all of whose rows are here."""

    def __init__(self, samples: Tensor, positions: Tensor) -> None:
        self._visible = (samples[:, None] == samples) & (positions[:, None] >= positions)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=self._visible).transpose(0, 1)


def warm_up(shape: ModelShape, task: Task, steps: int, seed: int, progress: Callable[[int, float], None]) -> Model:
    """A new model, trained on transcripts for ``steps`` steps; ``progress`` gets each step and its loss."""
    torch.set_num_threads(1)  # a second one costs more than it gives on products as small as these
    torch.manual_seed(seed)
    rng = np.random.default_rng((seed, 1))
    model = Model(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    choose = native(shape.top_k)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20)
        sessions = [transcript(task, rng) for _ in range(BATCH)]
        tokens = torch.tensor([token for session, _ in sessions for token in session])
        learn = torch.tensor([mark for _, marks in sessions for mark in marks])
        samples = torch.tensor([number for number, (session, _) in enumerate(sessions) for _ in session])
        positions = torch.tensor([place for session, _ in sessions for place in range(len(session))])
        loads: list[Tensor] = []

        def balanced(layer: int, logits: Tensor, loads: list[Tensor] = loads) -> Tensor:
            ids = choose(layer, logits)
            load = ids.flatten().bincount(minlength=shape.num_experts) / ids.numel()
            loads.append((load * logits.softmax(-1).mean(0)).sum() * shape.num_experts)
            return ids

        logits, _ = model(tokens, positions, PackedAttention(samples, positions), balanced)
        loss = functional.cross_entropy(logits[:-1][learn[1:]], tokens[1:][learn[1:]])
        optimizer.zero_grad()
        torch.autograd.backward(loss + BALANCE * torch.stack(loads).mean())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress(step + 1, float(loss.detach()))
    return model
