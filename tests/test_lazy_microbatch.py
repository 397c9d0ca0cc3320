"""What a framework does to a microbatch, on lazy tensors: small to send, the same values wherever it arrives."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from support import Shape, random_routing

import tracefile
from tracefile import LazyRoutedExperts

if TYPE_CHECKING:
    from collections.abc import Sequence

CP, TP = 2, 4
SHAPES = [Shape("GLM-4.7-Flash", 47, 4, 64), Shape("Qwen3-30B-A3B", 48, 8, 128), Shape("Qwen3-Next", 48, 10, 512)]


def rank_shard(samples: Sequence[torch.Tensor], experts: int, cp_rank: int, tp_rank: int) -> torch.Tensor:
    """One padding row per sample, zigzag context parallel slices, padding of the buffer, tensor parallel slice."""
    local = []
    for sample in samples:
        tokens, layers, top_k = sample.shape

        def spread(rows: int, layers: int = layers, top_k: int = top_k) -> torch.Tensor:
            return (torch.arange(rows * layers * top_k, dtype=torch.int32) % experts).view(rows, layers, top_k)

        sample = torch.as_tensor(sample).detach().cpu().contiguous()
        sample = torch.cat([sample, spread(1)])
        half = -(-(tokens + 1) // (2 * CP))
        sample = torch.cat([sample, spread(2 * CP * half - tokens - 1)])
        start, end = half * cp_rank, 2 * CP * half - half * (cp_rank + 1)
        local += [sample[start : start + half], sample[end : end + half]]
    buffer = torch.cat(local)
    size = -(-buffer.shape[0] // TP)
    buffer = torch.cat([buffer, spread(size * TP - buffer.shape[0])])
    return buffer[size * tp_rank : size * (tp_rank + 1)]


@pytest.mark.parametrize(
    ("shape", "segments"),
    [
        pytest.param(shape, segments, id=f"{segments}-{shape.name}", marks=() if quick else pytest.mark.slow)
        for number, shape in enumerate(SHAPES)
        for segments, quick in (("one segment", number == 2), ("a segment each", number == 0))
    ],
)
def test_sixteen_samples_travel_in_four_kib(path: str, rng: np.random.Generator, shape: Shape, segments: str) -> None:
    _, layers, top_k, experts = shape
    arrays = [random_routing(rng, int(rows), layers, top_k, experts) for rows in rng.integers(50, 900, 16)]
    with tracefile.TraceWriter(path, num_layers=layers, top_k=top_k, num_experts=experts) as writer:
        named = [(f"prompt-{i // 4}/{i % 4}", array) for i, array in enumerate(arrays)]
        lazies = writer.append_many(named) if segments == "one segment" else [writer.append(*item) for item in named]
    eager = [torch.from_numpy(array) for array in arrays]
    before = tracefile.process_stats()
    sent = {}
    for cp_rank in range(CP):
        for tp_rank in range(TP):
            shard = rank_shard(lazies, experts, cp_rank, tp_rank)
            assert isinstance(shard, LazyRoutedExperts)
            sent[cp_rank, tp_rank] = pickle.dumps(shard)
            assert len(sent[cp_rank, tp_rank]) < 4096
    assert tracefile.process_stats() == before
    # Another process on the same path reads the same values.
    code = """
import pickle, sys, numpy as np
for number, handle in enumerate(pickle.load(sys.stdin.buffer)):
    np.save(f"{sys.argv[1]}/{number}.npy", pickle.loads(handle).numpy())
"""
    directory = path.rpartition("/")[0]
    subprocess.run([sys.executable, "-c", code, directory], input=pickle.dumps([*sent.values()]), check=True)
    for number, (cp_rank, tp_rank) in enumerate(sent):
        expected = rank_shard(eager, experts, cp_rank, tp_rank).numpy()
        np.testing.assert_array_equal(np.load(f"{directory}/{number}.npy"), expected)


def test_one_handle_is_a_few_hundred_bytes(path: str, rng: np.random.Generator) -> None:
    with tracefile.TraceWriter(path, num_layers=47, top_k=4, num_experts=64) as writer:
        experts = writer.append("a", random_routing(rng, 2000, 47, 4, 64))
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert len(pickle.dumps(experts, protocol)) < 500 + len(path)


def test_samples_of_several_traces_mix(path: str, rng: np.random.Generator) -> None:
    arrays = [random_routing(rng, rows, 5, 2, 16) for rows in (20, 30)]
    lazies = []
    for number, array in enumerate(arrays):
        with tracefile.TraceWriter(f"{path}-{number}", num_layers=5, top_k=2, num_experts=16) as writer:
            lazies.append(writer.append("a", array))
    joined = torch.cat(lazies)
    assert isinstance(joined, LazyRoutedExperts)
    assert torch.equal(pickle.loads(pickle.dumps(joined))[10:40], torch.from_numpy(np.concatenate(arrays)[10:40]))
    with tracefile.TraceWriter(f"{path}-other", num_layers=5, top_k=2, num_experts=300) as writer:
        other = writer.append("a", arrays[0])
    mixed = torch.cat([lazies[0], other])  # another configuration: read, and right
    assert torch.equal(mixed, torch.from_numpy(np.concatenate([arrays[0], arrays[0]])))
