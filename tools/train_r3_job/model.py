"""A small MoE transformer over flat rows of tokens: RMSNorm, rotary causal attention, a top-k softmax router.

The model knows neither samples nor ranks. It works on rows ``[rows, width]``; what a row attends to is the business
of an :data:`Attend`, and which experts it goes through that of a :data:`Choose`. So the same weights generate from
a cache of keys and values, train on a rank's part of a packed microbatch, and replay routing from outside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

#: ``(layer, query, key, value) -> mixed``, each ``[rows, heads, head_width]``; ``layer`` counts all layers.
Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
#: ``(layer, logits [rows, experts]) -> ids [rows, top_k]``, int64; ``layer`` counts MoE layers.
Choose: TypeAlias = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the model.

    Attributes
    ----------
    num_layers : int
        MoE layers; a dense first layer comes on top.
    dense_first : bool
        Whether there is one. MoE layer ``i`` then has the global id ``i + 1``.
    """

    vocab: int
    num_layers: int = 3
    num_experts: int = 8
    top_k: int = 2
    dense_first: bool = True
    width: int = 64
    heads: int = 4
    expert_width: int = 64

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Global ids of the MoE layers."""
        return tuple(range(self.dense_first, self.num_layers + self.dense_first))

    @property
    def all_layers(self) -> int:
        return self.num_layers + self.dense_first


def native(top_k: int) -> Choose:
    """What the router itself chooses: the experts with the highest logits, highest first."""
    return lambda layer, logits: logits.topk(top_k, -1).indices


def rotation(positions: Tensor, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[rows, 1, head_width / 2]`` of the rotary embedding at ``positions`` ``[rows]``."""
    half = head_width // 2
    frequencies = 1000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (a.to(x.dtype) for a in angles)
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)


class Experts(nn.Module):
    """A router and its experts, gated (SwiGLU) feed-forward networks."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, shape.num_experts, bias=False)
        self.rise = nn.Parameter(torch.randn(shape.num_experts, shape.width, 2 * shape.expert_width) * 0.1)
        self.fall = nn.Parameter(torch.randn(shape.num_experts, shape.expert_width, shape.width) * 0.1)

    def forward(self, x: Tensor, layer: int, choose: Choose) -> tuple[Tensor, Tensor]:
        """The result ``[rows, width]`` and the ids ``[rows, top_k]`` that were used.

        Replayed ids change which experts a token goes through, not how much of each: gate weights come from this
        model's logits, so that the router has gradients either way.
        """
        logits = self.router(x)
        ids = choose(layer, logits)
        weights = logits.softmax(-1).gather(1, ids)
        weights = weights / weights.sum(-1, keepdim=True)

        # Rows grouped by expert, so that each expert is one product, and back into their order.
        order = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=len(self.rise)).tolist()
        groups = torch.split(x.index_select(0, order // ids.shape[1]), counts)
        results = []
        for group, rise, fall in zip(groups, self.rise, self.fall, strict=True):
            gate, up = (group @ rise).chunk(2, -1)
            results.append((functional.silu(gate) * up) @ fall)
        result = torch.cat(results).index_select(0, order.argsort()).view(*ids.shape, -1)
        return (weights[..., None] * result).sum(1), ids


class Layer(nn.Module):
    """Attention, then one feed-forward network or routed experts."""

    def __init__(self, shape: ModelShape, number: int) -> None:
        super().__init__()
        self.number = number
        self.moe_number = number - shape.dense_first
        self.heads = shape.heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.mlp: nn.Module
        if self.moe_number < 0:
            hidden = 4 * shape.width
            self.mlp = nn.Sequential(nn.Linear(shape.width, hidden), nn.SiLU(), nn.Linear(hidden, shape.width))
        else:
            self.mlp = Experts(shape)

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend, choose: Choose
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = self.qkv(self.attention_norm(x)).view(len(x), 3, self.heads, -1).unbind(1)
        mixed = attend(self.number, rotate(query, angles), rotate(key, angles), value)
        x = x + self.out(mixed.reshape(len(x), -1))
        if not isinstance(self.mlp, Experts):
            return x + self.mlp(self.mlp_norm(x)), None
        routed, ids = self.mlp(self.mlp_norm(x), self.moe_number, choose)
        return x + routed, ids


class Model(nn.Module):
    """The language model."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(Layer(shape, number) for number in range(shape.all_layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: Attend, choose: Choose, *, checkpointed: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits of the next token ``[rows, vocab]``, and the experts of each MoE layer ``[rows, top_k]``.

        Parameters
        ----------
        tokens, positions : Tensor
            int64 ``[rows]``; positions within the row's sample.
        attend, choose : callable
        checkpointed : bool
            Keep a layer's input only, and compute the layer again in the backward: ``attend`` and ``choose`` are
            then called once more, last layer first.
        """
        x = self.embedding(tokens)
        angles = rotation(positions, self.shape.head_width)
        routing: list[Tensor] = []
        for layer in self.layers:
            if checkpointed:
                x, ids = checkpoint(layer, x, angles, attend, choose, use_reentrant=False, preserve_rng_state=False)
            else:
                x, ids = layer(x, angles, attend, choose)
            if ids is not None:
                routing.append(ids)
        return self.head(self.norm(x)), routing
