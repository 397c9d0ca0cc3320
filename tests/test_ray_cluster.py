"""A real Ray cluster: lazy tensors go from rollout actors to learner actors as references, whichever way."""

from __future__ import annotations

import asyncio
import gc
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray_nodes import ray_node  # noqa: F401 - a fixture
from support import ids_of, random_routing
from test_xtuner_sequence import experts_of_pack, layer_experts, pack, route, sequence_parallel_part

import tracefile
from tracefile.integrations import slime
from tracefile.integrations.xtuner import RolloutRefs
from tracefile.sharding import ShardSpec

ray = pytest.importorskip("ray")

SAMPLES_PER_PROMPT, DP, MICROBATCH = 16, 4, 32
LAYERS, TOP_K, EXPERTS = 12, 4, 64


pytestmark = pytest.mark.usefixtures("ray_node")


def object_store_bytes() -> int:
    """What Ray's object store holds, once what nobody refers to has left it. Ray reports it with a delay."""
    gc.collect()
    used: list[float] = []
    while len(used) < 5 or len(set(used[-5:])) > 1:
        time.sleep(0.1)
        used.append(ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"])
    return int(used[-1])


def tokens_of(index: int) -> int:
    return 20 + index % 50


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Rollout:
    """slime's rollout manager, in our own words: generates a step, and puts what each DP rank needs of it."""

    def __init__(self, template: str) -> None:
        self.args = SimpleNamespace(
            num_layers=LAYERS, moe_router_topk=TOP_K, num_experts=EXPERTS, tracefile_path=template
        )

    def generate(self, rollout_id: int, lazy: bool, prompts: int) -> tuple[list[Any], int]:
        samples = [
            SimpleNamespace(
                group_index=index // SAMPLES_PER_PROMPT,
                index=index,
                tokens=list(range(tokens_of(index))),
                rollout_routed_experts=torch.from_numpy(
                    ids_of(f"{rollout_id}/{index}", tokens_of(index) - 1, LAYERS, TOP_K, EXPERTS)
                ),
            )
            for index in range(prompts * SAMPLES_PER_PROMPT)
        ]
        if lazy:
            slime.write_rollout(rollout_id, self.args, samples)
        refs, nbytes = [], 0
        for rank in range(DP):
            partition = samples[rank::DP]
            experts = [torch.as_tensor(sample.rollout_routed_experts) for sample in partition]
            data = {
                "sample_indices": [sample.index for sample in partition],
                "rollout_routed_experts": [x.detach().cpu().contiguous() for x in experts],
            }
            nbytes += ray._private.worker.global_worker.get_serialization_context().serialize(data).total_bytes
            refs.append([ray.put(data)])
        return refs, nbytes

    @ray.method(tensor_transport="gloo")
    def by_transport(self, rollout_id: int) -> dict[str, Any]:
        samples = [
            SimpleNamespace(
                group_index=0,
                index=index,
                rollout_routed_experts=torch.from_numpy(ids_of(f"{rollout_id}/{index}", 30, LAYERS, TOP_K, EXPERTS)),
            )
            for index in range(3)
        ]
        slime.write_rollout(rollout_id, self.args, samples)
        return {"tokens": torch.arange(7), "experts": [sample.rollout_routed_experts for sample in samples]}


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Learner:
    """One rank: takes its DP rank's samples, cuts microbatches to its own rows, reads layer by layer."""

    def train(self, rollout_id: int, refs: list[Any], dp_rank: int, cp_rank: int, tp_rank: int) -> dict[str, int]:
        before = tracefile.process_stats()
        data = ray.get(refs[dp_rank][0])
        experts, indices = data["rollout_routed_experts"], data["sample_indices"]
        assert all(type(x) is tracefile.LazyRoutedExperts for x in experts)
        spec = ShardSpec(cp_size=2, cp_rank=cp_rank, tp_size=2, tp_rank=tp_rank, rows="tokens-1")
        shards, rows = [], 0
        for first in range(0, len(experts), MICROBATCH):
            tokens = [tokens_of(index) for index in indices[first : first + MICROBATCH]]
            shards.append(spec.apply(experts[first : first + MICROBATCH], tokens))
        assert tracefile.process_stats() == before, "nothing is read until a router pops"
        for number, shard in enumerate(shards):
            batch = indices[MICROBATCH * number : MICROBATCH * (number + 1)]
            arrays = [ids_of(f"{rollout_id}/{i}", tokens_of(i) - 1, LAYERS, TOP_K, EXPERTS) for i in batch]
            expected = spec.apply(
                [torch.from_numpy(array) for array in arrays], [tokens_of(i) for i in batch], num_experts=EXPERTS
            )
            rows += len(expected)
            for layer in range(LAYERS):
                assert torch.equal(shard[:, layer].materialize_for_routing_replay("forward"), expected[:, layer])
        after = tracefile.process_stats()
        return {"rows": rows, "decoded": after.bytes_decoded - before.bytes_decoded}

    def take(self, data: dict[str, Any]) -> tuple[list[str], list[int]]:
        experts = data["experts"]
        return [type(x).__name__ for x in (data["tokens"], *experts)], [
            int(x.sum()) for x in (data["tokens"], *experts)
        ]

    def train_pack(self, entries: list[Any], seed: int, size: int, rank: int, offload: bool) -> dict[str, Any]:
        """XTuner's train worker."""
        before = tracefile.process_stats()
        device = torch.device("cpu")
        experts = experts_of_pack(entries, ray.get, seed)
        local = sequence_parallel_part(experts if offload else experts.to(device), size, rank)
        lazy = type(local) is tracefile.LazyRoutedExperts
        unread = tracefile.process_stats() == before
        scores = torch.rand(len(local), EXPERTS, generator=torch.Generator().manual_seed(0))
        results = [route(scores, layer_experts(local, layer, device, offload)) for layer in range(LAYERS)]
        return {
            "lazy": lazy,
            "unread": unread,
            "weights": torch.stack([weights for weights, _ in results]).numpy(),
            "counts": torch.stack([counts for _, counts in results]).numpy(),
        }


@pytest.fixture(scope="module")
def rollout(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return Rollout.remote(str(tmp_path_factory.mktemp("ray") / "step_{rollout_id}.trace"))


@pytest.fixture(scope="module")
def learners() -> list[Any]:
    return [Learner.remote() for _ in range(2)]


@pytest.mark.parametrize("prompts", [12, pytest.param(96, marks=pytest.mark.slow)])
def test_a_step_of_16_samples_a_prompt(rollout: Any, learners: list[Any], prompts: int) -> None:
    payload = sum(tokens_of(index) - 1 for index in range(prompts * SAMPLES_PER_PROMPT)) * LAYERS * TOP_K
    few = payload * 4 // 8  # of the bytes that frameworks send
    empty = object_store_bytes()
    refs, nbytes = ray.get(rollout.generate.remote(prompts, lazy=True, prompts=prompts))
    assert nbytes < few, "bytes that travel"
    assert object_store_bytes() - empty < few
    ranks = [(0, 0, 0), (0, 1, 1), (1, 0, 1), (3, 1, 0)]  # of data, context and tensor parallelism
    done = ray.get([learners[i % 2].train.remote(prompts, refs, *rank) for i, rank in enumerate(ranks)])
    assert all(result["rows"] for result in done)
    assert object_store_bytes() - empty < few
    assert all(result["decoded"] < payload for result in done)


def test_the_same_step_with_ordinary_tensors_is_in_the_object_store(rollout: Any) -> None:
    empty = object_store_bytes()
    refs, nbytes = ray.get(rollout.generate.remote(2, lazy=False, prompts=12))
    payload = sum(tokens_of(index) - 1 for index in range(12 * SAMPLES_PER_PROMPT)) * LAYERS * TOP_K * 4
    assert nbytes > payload
    assert object_store_bytes() - empty > payload, "so the measurement measures"
    del refs
    assert object_store_bytes() - empty < payload


def test_tensor_transports_leave_references_in_the_object(rollout: Any, learners: list[Any]) -> None:
    """What Ray's transports (gloo, NCCL, NIXL) pull out of an object is plain tensors, by their exact type."""
    from ray.experimental.collective import create_collective_group, destroy_collective_group

    group = create_collective_group([rollout, learners[0]], backend="gloo")
    try:
        types, sums = ray.get(learners[0].take.remote(rollout.by_transport.remote(3)), timeout=60)
    finally:
        destroy_collective_group(group)
    assert types == ["Tensor", *["LazyRoutedExperts"] * 3]
    assert sums == [21, *(int(ids_of(f"3/{index}", 30, LAYERS, TOP_K, EXPERTS).sum()) for index in range(3))]


def test_what_nixl_would_pull_out(path: str) -> None:
    with tracefile.TraceWriter(path, num_layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS) as writer:
        experts = writer.append("a", ids_of("a", 30, LAYERS, TOP_K, EXPERTS))
    context = ray._private.worker.global_worker.get_serialization_context()
    tokens = [torch.arange(5), torch.arange(6)]
    serialized, pulled = context.serialize_rdt_objects({"tokens": tokens, "rollout_routed_experts": [experts]}, "NIXL")
    assert [id(tensor) for tensor in pulled] == [id(tensor) for tensor in tokens]
    assert serialized.total_bytes < 4096
    assert type(ray.get(ray.put(experts))) is tracefile.LazyRoutedExperts, "nor does that change what put does later"


async def _replace(refs: RolloutRefs, states: list[Any]) -> None:
    await asyncio.gather(*(refs.replace(state) for state in states))


@pytest.mark.parametrize("offload", [False, True])
def test_xtuner_refs_and_lists_of_refs(path: str, learners: list[Any], offload: bool) -> None:
    rng = np.random.default_rng(3)
    entries = pack(rng, lambda name, rows: ray.put(rows))
    arrays = list(entries)
    with tracefile.TraceWriter(path, num_layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS) as writer:
        refs = RolloutRefs(writer)
        states = [SimpleNamespace(rollout_id=i, routed_experts=entry) for i, entry in enumerate(entries[:-1])]
        asyncio.run(_replace(refs, states))
    lazies = [*(state.routed_experts for state in states), entries[-1]]
    assert lazies[1][0] == lazies[3][0], "a turn that two samples share is written once"
    assert sorted(tracefile.open(path)) == ["0", "1/0", "1/1", "1/2", "2", "3/1", "4"]
    for rank in (0, 3):
        work = [
            learner.train_pack.remote(pack_of, 7, 4, rank, offload)
            for learner, pack_of in zip(learners, (lazies, arrays), strict=True)
        ]
        got, expected = ray.get(work)
        assert (got["lazy"], got["unread"], expected["lazy"]) == (True, True, False)
        assert np.array_equal(got["weights"], expected["weights"])
        assert np.array_equal(got["counts"], expected["counts"])


def test_what_xtuner_replaced_leaves_the_object_store(path: str, rng: np.random.Generator) -> None:
    empty = object_store_bytes()
    ids = random_routing(rng, 4000, LAYERS, TOP_K, EXPERTS)
    state = SimpleNamespace(rollout_id=5, routed_experts=ray.put(ids))
    assert object_store_bytes() - empty > ids.nbytes
    refs = RolloutRefs(tracefile.TraceWriter(path, num_layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS))
    asyncio.run(_replace(refs, [state]))
    assert object_store_bytes() - empty < 4096
    replaced = state.routed_experts
    asyncio.run(_replace(refs, [state]))
    assert state.routed_experts == replaced, "a rollout that is in the trace already"
    assert np.array_equal(np.asarray(ray.get(replaced)), ids)


def test_xtuner_arrays_and_states_without_routing(path: str, rng: np.random.Generator) -> None:
    refs = RolloutRefs(tracefile.TraceWriter(path, num_layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS))
    ids = random_routing(rng, 40, LAYERS, TOP_K, EXPERTS)
    array, without = (
        SimpleNamespace(rollout_id=5, routed_experts=ids),
        SimpleNamespace(rollout_id=6, routed_experts=None),
    )
    nameless = SimpleNamespace(rollout_id=None, routed_experts=ids)
    asyncio.run(_replace(refs, [array, without]))
    assert without.routed_experts is None
    assert not isinstance(array.routed_experts, torch.Tensor), "the train worker would take it for padding"
    assert np.array_equal(np.asarray(ray.get(array.routed_experts)), ids)
    with pytest.raises(tracefile.OptionError, match="pass sample_id"):
        asyncio.run(_replace(refs, [nameless]))
    asyncio.run(refs.replace(nameless, "7/segment-2"))
    assert list(tracefile.open(path)) == ["5", "7/segment-2"]
    bad = SimpleNamespace(rollout_id=8, routed_experts=ray.put(ids + EXPERTS))
    with pytest.raises(tracefile.ExpertIdError):
        asyncio.run(_replace(refs, [bad]))
    assert np.array_equal(ray.get(bad.routed_experts), ids + EXPERTS)
