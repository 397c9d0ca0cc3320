"""slime's path of routed experts, in our own words, on lazy tensors: nothing is read before a router pops."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest
import torch
from support import random_routing

import tracefile

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

LAYERS, TOP_K, EXPERTS = 24, 4, 64
ROWS = (700, 1, 333, 1500)


def spread(rows: int) -> torch.Tensor:
    return (torch.arange(rows * LAYERS * TOP_K, dtype=torch.int32) % EXPERTS).reshape(rows, LAYERS, TOP_K)


def zigzag_shard(samples: list[torch.Tensor], cp: int, cp_rank: int, tp: int, tp_rank: int) -> torch.Tensor:
    local = []
    for sample in samples:
        sample = torch.cat([sample, spread(1)])
        half = -(-len(sample) // (2 * cp))
        sample = torch.cat([sample, spread(2 * cp * half - len(sample))])
        local.append(sample[half * cp_rank : half * (cp_rank + 1)])
        local.append(sample[half * (2 * cp - cp_rank - 1) : half * (2 * cp - cp_rank)])
    buffer = torch.cat(local)
    buffer = torch.cat([buffer, spread(-len(buffer) % tp)])
    size = len(buffer) // tp
    return buffer[size * tp_rank : size * (tp_rank + 1)]


class Router:
    """Keeps what it is given per microbatch, and gives it back in order, once forward and once backward."""

    def __init__(self) -> None:
        self.recorded: list[torch.Tensor] = []
        self.popped = {"forward": 0, "backward": 0}

    def record(self, top_indices: torch.Tensor) -> None:
        self.recorded.append(top_indices)

    def pop(self, stage: str) -> torch.Tensor:
        top_indices = self.recorded[self.popped[stage]]
        self.popped[stage] += 1
        hook: Callable[[str], torch.Tensor] = top_indices.materialize_for_routing_replay  # type: ignore[attr-defined]
        return hook(stage)


@pytest.mark.parametrize(("cp_rank", "tp_rank"), [(0, 0), (0, 3), (1, 2)])
def test_record_pop_forward_pop_backward(
    path: str, rng: np.random.Generator, decoded: list[tuple[str, int, int]], cp_rank: int, tp_rank: int
) -> None:
    arrays = [random_routing(rng, rows, LAYERS, TOP_K, EXPERTS) for rows in ROWS]
    with tracefile.TraceWriter(
        path, num_layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS, layers_per_chunk=8, rows_per_chunk=64
    ) as writer:
        handles = [writer.append(f"prompt-0/{i}", array) for i, array in enumerate(arrays)]
    received = pickle.loads(pickle.dumps([torch.as_tensor(h).detach().cpu().contiguous() for h in handles]))
    expected = zigzag_shard([torch.from_numpy(array) for array in arrays], 2, cp_rank, 4, tp_rank)
    before = tracefile.process_stats()
    local = zigzag_shard(received, 2, cp_rank, 4, tp_rank)
    routers = [Router() for _ in range(LAYERS)]
    for layer, router in enumerate(routers):
        router.record(local[:, layer])
    assert tracefile.process_stats() == before
    routers[0].pop("forward")
    first_group = {(segment, row) for segment, layer, row in decoded}
    assert {layer for _, layer, _ in decoded} == {0}, "only chunks of the first group of layers"
    assert len(decoded) == len(first_group)
    for layer, router in enumerate(routers[1:], 1):
        values = router.pop("forward")
        assert type(values) is torch.Tensor
        assert (values.dtype, values.shape) == (torch.int32, (len(expected), TOP_K))
        assert torch.equal(values, expected[:, layer])
    assert len(decoded) == 3 * len(first_group), "each chunk of the rank's own rows once"
    for layer, router in reversed([*enumerate(routers)]):
        assert torch.equal(router.pop("backward"), expected[:, layer])
    with pytest.raises(tracefile.OptionError, match="stage must be forward or backward"):
        local[:, 0].materialize_for_routing_replay("record")  # type: ignore[attr-defined]
