"""What several test files need: synthetic routing, and work done in other processes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np


class Shape(NamedTuple):
    name: str
    num_layers: int
    top_k: int
    num_experts: int


#: The model shapes that rollouts come in.
MODEL_SHAPES = [
    Shape("GLM-4.7-Flash", 47, 4, 64),
    Shape("Qwen3-30B-A3B", 48, 8, 128),
    Shape("Qwen3-235B-A22B", 94, 8, 128),
    Shape("Qwen3.5-35B-A3B", 40, 8, 256),
    Shape("DeepSeek-V3", 61, 8, 256),
    Shape("Moonlight", 26, 6, 64),
    Shape("Kimi-K2", 61, 8, 384),
    Shape("Qwen3-Next", 48, 10, 512),
    Shape("Nemotron", 52, 22, 512),
    Shape("just-over-uint8", 3, 2, 257),
]


def random_routing(
    rng: np.random.Generator, rows: int, num_layers: int, top_k: int, num_experts: int, dtype: Any = np.int32
) -> np.ndarray[Any, Any]:
    """``[rows, num_layers, top_k]`` ids; the largest id is among them, experts of one token and layer differ."""
    first = rng.integers(0, num_experts, (rows, num_layers, 1))
    step = rng.integers(1, max(2, num_experts // top_k), (rows, num_layers, 1))
    ids = (first + np.arange(top_k) * step) % num_experts
    if ids.size:
        ids[-1, -1, -1] = num_experts - 1
    return ids.astype(dtype)


def run_python(code: str, *arguments: str, check: bool = True, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter; its output is captured."""
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=100, **kwargs
    )
    if check and result.returncode:
        raise AssertionError(f"exit {result.returncode}\n{result.stdout}\n{result.stderr}")
    return result
