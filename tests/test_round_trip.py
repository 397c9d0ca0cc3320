"""What is written is what is read, through tracefile itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import MODEL_SHAPES, Shape, random_routing

import tracefile


@pytest.mark.parametrize("codec", ["fast", "compact", "none"])
@pytest.mark.parametrize("shape", MODEL_SHAPES, ids=lambda shape: shape.name)
def test_every_model_shape(path: str, rng: np.random.Generator, shape: Shape, codec: str) -> None:
    samples = {f"s{rows}": random_routing(rng, rows, *shape[1:]) for rows in (1, 7, 1025, 2500)}
    with tracefile.TraceWriter(path, **_config(shape), codec=codec) as writer:
        for sample, ids in samples.items():
            writer.append(sample, ids)
    trace = tracefile.open(path)
    assert list(trace) == list(samples)
    for sample, ids in samples.items():
        values = trace[sample].numpy()
        assert values.dtype == np.int32
        np.testing.assert_array_equal(values, ids)


def _config(shape: Shape) -> dict[str, int]:
    return {"num_layers": shape.num_layers, "top_k": shape.top_k, "num_experts": shape.num_experts}


def test_stored_dtype_follows_the_declared_experts(path: str) -> None:
    with tracefile.TraceWriter(path, num_layers=1, top_k=1, num_experts=257) as writer:
        experts = writer.append("a", torch.zeros(4, 1, 1, dtype=torch.uint8))
    assert experts.config.dtype == np.uint16
    assert "uint16 on disk" in repr(experts)
