"""Routing to measure with: like real routers', made up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


class ModelShape(NamedTuple):
    name: str
    num_layers: int
    top_k: int
    num_experts: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_layers": self.num_layers, "top_k": self.top_k, "num_experts": self.num_experts}

    def __str__(self) -> str:
        return f"{self.name} ({self.num_layers} layers x top-{self.top_k} of {self.num_experts})"


GLM = ModelShape("GLM-4.7-Flash", 47, 4, 64)
QWEN3 = ModelShape("Qwen3-30B-A3B", 48, 8, 128)
SHAPES = {"glm": GLM, "qwen3": QWEN3}


def synthetic_routing(shape: ModelShape, rows: int, seed: int) -> npt.NDArray[np.int32]:
    """``[rows, num_layers, top_k]`` int32, ids in order of score.

    Experts have unequal popularity per layer, and neighbouring tokens share about a third of their experts, as
    measured on real models; so data compress about as real ones do.
    """
    rng = np.random.default_rng(seed)
    out = np.empty((rows, shape.num_layers, shape.top_k), np.int32)
    for layer in range(shape.num_layers):
        popularity = rng.normal(0, 0.5, shape.num_experts).astype(np.float32)
        noise = rng.standard_normal((rows, shape.num_experts), dtype=np.float32)
        score: npt.NDArray[Any] = popularity + noise
        score[1:] += 0.7 * noise[:-1]
        top = np.argpartition(-score, shape.top_k, axis=1)[:, : shape.top_k]
        order = np.argsort(-np.take_along_axis(score, top, axis=1), axis=1)
        out[:, layer] = np.take_along_axis(top, order, axis=1)
    return out
