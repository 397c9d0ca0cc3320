"""slime's path of routed experts, in our own words, on lazy tensors: nothing is read before a router pops."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support import random_routing

import tracefile
from tracefile.integrations.slime import read_ahead

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


class _Routers:
    """What of slime's ``RoutingReplay`` the loader meets: the routers, and lazy resources that end with the step."""

    def __init__(self, layers: int) -> None:
        self.all_routing_replays = [_Recorded() for _ in range(layers)]
        self.lazy_resources: list[Any] = []

    def register_lazy_resource(self, resource: Any) -> None:
        self.lazy_resources.append(resource)


class _Recorded(Router):
    @property
    def top_indices_list(self) -> list[torch.Tensor]:
        return self.recorded


@pytest.mark.parametrize("prefetch", [0, 2])
def test_reading_ahead_of_the_routers(path: str, rng: np.random.Generator, prefetch: int) -> None:
    """What the learner hooks do: a pass for log-probabilities, a training pass, each chunk read once in each."""
    arrays = [random_routing(rng, rows, LAYERS, TOP_K, EXPERTS) for rows in ROWS]
    with tracefile.TraceWriter(path, num_layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS) as writer:
        handles = [writer.append(str(i), array) for i, array in enumerate(arrays)]
    routers = _Routers(LAYERS)
    expected = []
    for number in range(4):
        local = zigzag_shard([handles[number], handles[number - 1]], 2, 0, 4, 1)
        for layer, router in enumerate(routers.all_routing_replays):
            router.record(local[:, layer])
        eager = [torch.from_numpy(arrays[number]), torch.from_numpy(arrays[number - 1])]
        expected.append(zigzag_shard(eager, 2, 0, 4, 1))
    before = tracefile.process_stats()
    loader = read_ahead(routers, "forward", prefetch=prefetch)
    assert loader is not None
    assert routers.lazy_resources == [loader]
    for number in range(4):
        for layer, router in enumerate(routers.all_routing_replays):
            assert torch.equal(router.pop("forward"), expected[number][:, layer])
    middle = tracefile.process_stats()
    for router in routers.all_routing_replays:
        router.popped["forward"] = 0
    assert read_ahead(routers, "backward") is loader
    for number in range(4):
        for layer, router in enumerate(routers.all_routing_replays):
            assert torch.equal(router.pop("forward"), expected[number][:, layer])
        for layer, router in reversed([*enumerate(routers.all_routing_replays)]):
            assert torch.equal(router.pop("backward"), expected[number][:, layer])
    after = tracefile.process_stats()
    assert middle.chunks_decoded > before.chunks_decoded
    assert after.chunks_decoded - middle.chunks_decoded <= middle.chunks_decoded - before.chunks_decoded
    loader.close()
    eager_routers = _Routers(1)
    eager_routers.all_routing_replays[0].record(expected[0][:, 0])
    assert read_ahead(eager_routers, "forward") is None
