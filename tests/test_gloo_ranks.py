"""Eight ranks in eight processes, context parallel 2 x tensor parallel 4, talking over gloo.

Each works out its place from a DeviceMesh and from Megatron's parallel_state, opens the lazy tensors that it was sent
and takes its shard; all shards are compared with pad, concatenate and slice of what was written. The same for verl's
way of packing sequences, with its replay mask.
"""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from support import random_routing, run_python

import tracefile

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

LAYERS, TOP_K, EXPERTS = 7, 4, 64
ROWS = [1200, 0, 37, 699, 2]  # samples have no row for their last token

# Ranks are forked from a process that has imported everything, which takes most of the time.
_RANKS = """
import json, os, pickle, signal, sys, traceback, warnings
warnings.simplefilter("ignore")
import numpy as np
import torch
import torch.distributed as dist
torch.set_num_threads(1)
import tracefile
from megatron.core import parallel_state
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from tracefile.integrations import verl
from tracefile.integrations.megatron import set_replay_data, shard_spec
from tracefile.sharding import ShardSpec

directory = sys.argv[1]
MOE = (1, 2, 3, 4, 5, 6)

def read_bytes(name):
    with open(os.path.join(directory, name), "rb") as file:
        return file.read()

def gathered(value, rank):
    values = [None] * 8 if rank == 0 else None
    dist.gather_object(value, values)
    return values

class Router:
    def set_target_indices(self, ids, replay_mask=None):  # as verl's
        self.ids, self.mask = ids, replay_mask

def moe_layer(layer):
    module = torch.nn.Module()
    module.layer_number, module.router_replay = layer + 1, Router()
    return module

def run(rank):
    signal.alarm(80)  # ranks wait for one that has failed
    dist.init_process_group("gloo", store=dist.FileStore(os.path.join(directory, "store"), 8), rank=rank, world_size=8)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=4, context_parallel_size=2, create_gloo_process_groups=False
    )
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 4), mesh_dim_names=("cp", "tp"))
    config = TransformerConfig(
        num_layers=7, hidden_size=16, num_attention_heads=4, num_moe_experts=64, moe_layer_freq=[0] + [1] * 6,
        tensor_model_parallel_size=4, context_parallel_size=2, sequence_parallel=True, add_bias_linear=False,
    )
    options = {"rows": "tokens-1", "buffer_multiple": 16}
    spec = ShardSpec.from_device_mesh(mesh, layer_ids=MOE, **options)
    assert spec == shard_spec(config, **options)

    *handles, holes = pickle.loads(read_bytes("handles"))
    tokens = [len(handle) + 1 for handle in handles]
    for _ in MOE:
        RouterReplay()
    local = spec.apply(handles, tokens)
    set_replay_data(local)
    assert tracefile.process_stats().reads == 0
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    scores = torch.zeros(len(local), 64)
    routers = RouterReplay.global_router_replay_instances
    ids = torch.stack([router.get_replay_topk(scores, 4)[1] for router in routers]).to(torch.uint8)
    shards = gathered(ids.numpy(), rank)
    ranges = gathered([tuple(each) for each in spec.row_ranges(tokens)], rank)
    decoded = gathered(tracefile.process_stats().bytes_decoded, rank)

    model = torch.nn.ModuleList(map(moe_layer, MOE))
    lengths = [*tokens, len(holes) + 1]
    routed = verl.jagged([*handles, holes], lengths)
    mask = torch.nested.as_nested_tensor([torch.arange(n) < n - 1 for n in lengths], layout=torch.jagged)
    before = tracefile.process_stats()
    verl.set_router_replay_data(routed, None, config, 0, replay_mask=mask, model=model)
    assert tracefile.process_stats() == before
    packed = gathered(np.stack([layer.router_replay.ids.to("cpu").numpy() for layer in model]), rank)
    masks = gathered(model[0].router_replay.mask.numpy(), rank)
    if rank == 0:
        names = {"shards": shards, "packed": packed, "masks": masks}
        np.savez(os.path.join(directory, "gathered.npz"), **{name: np.stack(each) for name, each in names.items()})
        print(json.dumps({"ranges": ranges, "decoded": decoded}))
    dist.barrier()
    dist.destroy_process_group()

children = []
for rank in range(8):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run(rank)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    children.append(child)
failed = [rank for rank, child in enumerate(children) if os.waitpid(child, 0)[1]]
assert not failed, failed
"""


Array: TypeAlias = "np.ndarray[Any, Any]"


def spread(rows: int) -> Array:
    return (np.arange(rows * LAYERS * TOP_K) % EXPERTS).reshape(rows, LAYERS, TOP_K).astype(np.uint8)


def zeros(rows: int) -> Array:
    return np.zeros((rows, LAYERS, TOP_K), np.uint8)


def unknown(rows: int) -> Array:
    return np.zeros((rows, 1, 1), bool)


def halves(sequences: list[Array], fill: Any, multiple: int, cp_rank: int) -> Array:
    """Of each sequence, padded to a multiple, the piece of this rank from the start and the one from the end."""
    local = []
    for rows in sequences:
        rows = np.concatenate([rows, fill(-len(rows) % multiple)])
        half = len(rows) // 4
        local += [rows[half * cp_rank : half * (cp_rank + 1)], rows[half * (3 - cp_rank) : half * (4 - cp_rank)]]
    return np.concatenate(local)


def test_shards_of_eight_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(8)
    arrays = [random_routing(rng, rows, LAYERS, TOP_K, EXPERTS) for rows in ROWS]
    holes = random_routing(rng, 90, LAYERS, TOP_K, EXPERTS)
    holes[30:55] = -1
    with tracefile.TraceWriter(
        str(tmp_path / "t.trace"),
        num_layers=LAYERS,
        top_k=TOP_K,
        num_experts=EXPERTS,
        layers_per_chunk=7,
        rows_per_chunk=64,
    ) as writer:
        handles = [writer.append(f"prompt-0/{i}", array) for i, array in enumerate([*arrays, holes])]
    (tmp_path / "handles").write_bytes(pickle.dumps(handles))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    report = json.loads(run_python(_RANKS, str(tmp_path)).stdout.splitlines()[-1])
    gathered = np.load(tmp_path / "gathered.npz")  # shards and packed: [rank, layer, row, top_k]

    seen = []
    for rank in range(8):
        local = halves([np.concatenate([rows, spread(1)]) for rows in arrays], spread, 4, rank // 4)
        expected = np.split(np.concatenate([local, spread(-len(local) % 16)]), 4)[rank % 4]
        assert np.array_equal(gathered["shards"][rank], expected[:, 1:].transpose(1, 0, 2)), rank
        row = 0
        for sample, start, stop in report["ranges"][rank]:
            if sample is not None:
                seen += [(sample, number) for number in range(start, stop)]
                assert np.array_equal(expected[row : row + stop - start], arrays[sample][start:stop])
            row += stop - start
        assert row == len(expected)
    assert sorted(seen) == [(i, row) for i, array in enumerate(arrays) for row in range(len(array))]
    assert max(report["decoded"]) < sum(array.size for array in arrays) // 4, "an eighth, up to whole chunks"

    shown = np.where(holes == -1, 0, holes)
    known = [np.ones((rows, 1, 1), bool) for rows in ROWS] + [(holes != -1).all((1, 2))[:, None, None]]
    for rank in range(8):
        sequences = [np.concatenate([rows, zeros(1)]) for rows in [*arrays, shown]]
        expected = np.split(halves(sequences, zeros, 16, rank // 4), 4)[rank % 4]
        assert np.array_equal(gathered["packed"][rank], expected[:, 1:].transpose(1, 0, 2)), rank
        marks = halves([np.concatenate([rows, unknown(1)]) for rows in known], unknown, 16, rank // 4)
        assert np.array_equal(gathered["masks"][rank], np.split(marks, 4)[rank % 4].reshape(-1)), rank
