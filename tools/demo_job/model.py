"""A small MoE transformer: RMSNorm, rotary sliding-window attention, a top-k softmax router in each layer.

The first layer is dense, as in many MoE models, so that MoE layer ``i`` has the global id ``i + 1``. The window
bounds the KV cache of a sample to ``window`` positions a layer, however long its prompt is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the model. ``num_layers`` counts MoE layers; the dense first layer comes on top."""

    num_layers: int
    num_experts: int
    top_k: int
    vocab: int
    width: int = 64
    heads: int = 4
    expert_width: int = 16
    window: int = 64

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Global ids of the MoE layers."""
        return tuple(range(1, self.num_layers + 1))


class KeyValues(NamedTuple):
    """Keys and values of one layer's last ``window`` positions, each ``[samples, heads, window, head_width]``."""

    keys: Tensor
    values: Tensor


class Routing(NamedTuple):
    """What one layer's router did: experts ``[tokens, top_k]`` and probabilities ``[tokens, experts]``."""

    experts: Tensor
    probabilities: Tensor


def rotation(positions: Tensor, head_width: int) -> Tensor:
    """Cosines and sines of the rotary embedding at ``positions`` ``[samples, tokens]``."""
    half = head_width // 2
    frequencies = 1000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = positions[:, None, :, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """``x`` ``[samples, heads, tokens, head_width]`` turned by what :func:`rotation` returned."""
    cos, sin = angles
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)


class Attention(nn.Module):
    """Causal attention over the last ``window`` positions."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads, self.window = shape.heads, shape.window
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def _project(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        samples, tokens, width = x.shape
        qkv = self.qkv(x).view(samples, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return rotate(query, angles), rotate(key, angles), value

    def forward(self, x: Tensor, angles: Tensor) -> tuple[Tensor, KeyValues]:
        """Whole sequences ``[samples, tokens, width]``, tokens a multiple of the window.

        A block of ``window`` queries sees its own block and the one before, under a mask: the cost is linear in
        the tokens.
        """
        samples, tokens, width = x.shape
        window = self.window
        query, key, value = self._project(x, angles)

        def blocked(t: Tensor) -> Tensor:
            """``[samples * blocks, heads, window, head_width]``"""
            return t.view(samples, self.heads, -1, window, t.shape[-1]).transpose(1, 2).flatten(0, 1)

        def with_previous(t: Tensor) -> Tensor:
            return torch.cat([blocked(functional.pad(t, (0, 0, window, 0))[:, :, :tokens]), blocked(t)], 2)

        distance = torch.arange(window)[:, None] + window - torch.arange(2 * window)
        visible = ((distance >= 0) & (distance < window)).repeat(tokens // window, 1, 1)
        visible[0, :, :window] = False  # nothing precedes the first block
        mixed = functional.scaled_dot_product_attention(
            blocked(query), with_previous(key), with_previous(value), attn_mask=visible.repeat(samples, 1, 1)[:, None]
        )
        mixed = mixed.transpose(1, 2).reshape(samples, tokens, width)
        out: Tensor = self.out(mixed)
        return out, KeyValues(key, value)

    def step(self, x: Tensor, angles: Tensor, cache: KeyValues, slot: int) -> Tensor:
        """One token of each sample, ``[samples, 1, width]``.

        ``cache`` is a full ring: the new key takes the place of the oldest, at ``slot``, and what is left is
        exactly the window. The order in the ring does not matter, as keys are rotated by their position.
        """
        query, key, value = self._project(x, angles)
        cache.keys[:, :, slot] = key[:, :, 0]
        cache.values[:, :, slot] = value[:, :, 0]
        mixed = functional.scaled_dot_product_attention(query, cache.keys, cache.values)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(x.shape))
        return out


class Experts(nn.Module):
    """A top-k softmax router and its experts, gated (SwiGLU) feed-forward networks."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.router = nn.Linear(shape.width, shape.num_experts, bias=False)
        self.rise = nn.Parameter(torch.randn(shape.num_experts, shape.width, 2 * shape.expert_width) * 0.1)
        self.fall = nn.Parameter(torch.randn(shape.num_experts, shape.expert_width, shape.width) * 0.05)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """``[tokens, width]``, each token through the experts that the router chooses for it."""
        probabilities = self.router(x).softmax(-1)
        weights, experts = probabilities.topk(self.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)

        # Tokens grouped by expert, so that each expert is one product, and back into the order of the tokens.
        order = experts.flatten().argsort(stable=True)
        ends = experts.flatten().bincount(minlength=len(self.rise)).cumsum(0).to(torch.int32)
        grouped = x.index_select(0, order // self.top_k)
        gate, up = functional.grouped_mm(grouped, self.rise, offs=ends).chunk(2, -1)
        result = functional.grouped_mm(functional.silu(gate) * up, self.fall, offs=ends)
        result = result.index_select(0, order.argsort())
        mixed = torch.bmm(weights[:, None], result.view(*weights.shape, -1))
        return mixed[:, 0], Routing(experts, probabilities)


class Layer(nn.Module):
    """Attention, then either one feed-forward network or routed experts."""

    def __init__(self, shape: ModelShape, dense: bool) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.experts = None if dense else Experts(shape)
        hidden = 4 * shape.width
        self.dense = (
            nn.Sequential(nn.Linear(shape.width, hidden), nn.SiLU(), nn.Linear(hidden, shape.width)) if dense else None
        )

    def mlp(self, x: Tensor) -> tuple[Tensor, Routing | None]:
        normed = self.mlp_norm(x)
        if self.dense is not None:
            return x + self.dense(normed), None
        assert self.experts is not None
        mixed, routing = self.experts(normed.flatten(0, 1))
        return x + mixed.view(x.shape), routing


class Model(nn.Module):
    """The language model."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(Layer(shape, dense=i == 0) for i in range(shape.num_layers + 1))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Routing], list[KeyValues]]:
        """Whole sequences.

        Parameters
        ----------
        tokens : Tensor
            ``[samples, tokens]``, any number of tokens.

        Returns
        -------
        logits : Tensor
            ``[samples, tokens, vocab]``.
        routing : list of Routing
            Of each MoE layer, over ``samples * tokens`` tokens.
        key_values : list of KeyValues
            Of each layer, over all tokens.
        """
        length = tokens.shape[1]
        # Padded at the end, where causality hides it, to whole windows.
        x = self.embedding(functional.pad(tokens, (0, -length % self.shape.window)))
        angles = rotation(torch.arange(x.shape[1])[None], self.shape.head_width)
        routing, key_values = [], []
        for layer in self.layers:
            assert isinstance(layer, Layer)
            mixed, cache = layer.attention(layer.attention_norm(x), angles)
            # The experts see no padding: it would be counted as load.
            hidden, routed = layer.mlp((x + mixed)[:, :length])
            x = functional.pad(hidden, (0, 0, 0, -length % self.shape.window))
            key_values.append(KeyValues(cache.keys[:, :, :length], cache.values[:, :, :length]))
            if routed is not None:
                routing.append(routed)
        return self.head(self.norm(x[:, :length])), routing, key_values

    def step(
        self, tokens: Tensor, positions: Tensor, caches: list[KeyValues], slot: int
    ) -> tuple[Tensor, list[Routing]]:
        """One token of each sample: logits ``[samples, vocab]`` and the routing of each MoE layer."""
        x = self.embedding(tokens)[:, None]
        angles = rotation(positions[:, None], self.shape.head_width)
        routing = []
        for layer, cache in zip(self.layers, caches, strict=True):
            assert isinstance(layer, Layer)
            x = x + layer.attention.step(layer.attention_norm(x), angles, cache, slot)
            x, routed = layer.mlp(x)
            if routed is not None:
                routing.append(routed)
        return self.head(self.norm(x))[:, 0], routing
