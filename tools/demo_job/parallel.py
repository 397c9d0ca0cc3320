"""Which rows of a microbatch a learner rank consumes: slime's preparation for routing replay, in its order.

Each sample gets a row for its last token, is cut for zigzag context parallelism, and all are concatenated; the
whole is padded and cut for sequence parallelism. The code only slices, pads and concatenates tensors: it does not
know whether they are ordinary or lazy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CP_SIZE, TP_SIZE = 2, 4


@dataclass(frozen=True, slots=True)
class Rank:
    """A learner rank's place in the context-parallel and tensor-parallel groups."""

    cp: int
    tp: int

    @property
    def name(self) -> str:
        return f"rank cp{self.cp} tp{self.tp}"


RANKS = tuple(Rank(cp, tp) for cp in range(CP_SIZE) for tp in range(TP_SIZE))


def padded(experts: Tensor, rows: int, num_experts: int) -> Tensor:
    """``experts`` ``[tokens, layers, top_k]`` and ``rows`` padding rows, spread evenly over the experts."""
    if not rows:
        return experts
    spread = torch.arange(rows * experts.shape[1] * experts.shape[2], dtype=experts.dtype) % num_experts
    return torch.cat([experts, spread.view(rows, *experts.shape[1:])])


def zigzag(experts: Tensor, rank: Rank, num_experts: int) -> Tensor:
    """The two pieces of one sample that the rank attends from: one from either end, so that work is even."""
    experts = padded(experts, -len(experts) % (2 * CP_SIZE), num_experts)
    piece = len(experts) // (2 * CP_SIZE)
    tail = len(experts) - piece * (rank.cp + 1)
    return torch.cat([experts[piece * rank.cp : piece * (rank.cp + 1)], experts[tail : tail + piece]])


def local_experts(samples: list[Tensor], rank: Rank, num_experts: int) -> Tensor:
    """The rows of a microbatch that a rank consumes, ``[local tokens, layers, top_k]``."""
    local = torch.cat([zigzag(padded(experts, 1, num_experts), rank, num_experts) for experts in samples])
    local = padded(local, -len(local) % TP_SIZE, num_experts)
    size = len(local) // TP_SIZE
    return local[size * rank.tp : size * (rank.tp + 1)]


def record(local: Tensor) -> list[Tensor]:
    """What the replaying routers keep: for each MoE layer its own int32 copy, ``[local tokens, top_k]``."""
    layers = []
    for layer in range(local.shape[1]):
        experts = local[:, layer]
        layers.append(torch.empty(experts.shape, dtype=torch.int32).copy_(experts))
    return layers
