"""Trains the model for some seconds, so that its routers are trained ones."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from demo_job import corpus
from demo_job.model import Model, ModelShape, Routing

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, LENGTH = 4, 128
LEARNING_RATE, WARMUP = 3e-3, 10
BALANCE = 0.02


class Trained(NamedTuple):
    """A trained model and how training went: losses in nats a token on text that is held fixed."""

    model: Model
    loss_before: float
    loss_after: float
    steps: int
    busiest: float
    """Load of the busiest expert of any layer, in units of the mean load."""


def load_balance(routing: list[Routing], num_experts: int) -> tuple[Tensor, float]:
    """The load-balance loss (Switch Transformer, equation 4), 1 when even, and the highest relative load."""
    loads = torch.stack([r.experts.flatten().bincount(minlength=num_experts) for r in routing]).float()
    loads = loads * num_experts / loads.sum(1, keepdim=True)
    shares = torch.stack([r.probabilities.mean(0) for r in routing])
    return (loads * shares).sum(1).mean(), float(loads.max())


def train(shape: ModelShape, steps: int, seconds: float, seed: int, progress: Callable[[str], None]) -> Trained:
    """Train on random cuts of the text for ``steps`` steps, or until ``seconds`` have passed."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    text = corpus.load()
    model = Model(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)

    def batch(size: int) -> Tensor:
        return torch.stack([corpus.cut(text, LENGTH + 1, generator) for _ in range(size)])

    def losses(tokens: Tensor) -> tuple[Tensor, Tensor, float]:
        logits, routing, _ = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return loss, *load_balance(routing, shape.num_experts)

    held_fixed = batch(4 * BATCH)
    with torch.no_grad():
        before = float(losses(held_fixed)[0])
    began = time.monotonic()
    step = 0
    while step < steps and time.monotonic() - began < seconds:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP)
        loss, balance, _ = losses(batch(BATCH))
        optimizer.zero_grad()
        torch.autograd.backward(loss + BALANCE * balance)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 15 == 0:
            progress(f"step {step} of {steps}, loss {float(loss.detach()):.2f}")
    with torch.no_grad():
        after, _, busiest = losses(held_fixed)
    return Trained(model, before, float(after), step, busiest)
