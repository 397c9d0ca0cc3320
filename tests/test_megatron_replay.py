"""Megatron-core's own RouterReplay and routers on lazy routing: what is read when, which layers, and memory."""

from __future__ import annotations

import importlib
import json
import textwrap
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support import random_routing, run_python

import tracefile
from tracefile.integrations import megatron
from tracefile.integrations.megatron import decoder_routers, moe_layers, set_replay_data, shard_spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

LAYERS, TOP_K, EXPERTS = 6, 4, 64


@pytest.fixture(scope="module")
def core() -> Iterator[SimpleNamespace]:
    """Megatron-core, with its parallel groups set up for the one rank that this process is."""
    with warnings.catch_warnings():
        # Of its import: deprecated torch.jit, and optional packages that are not there.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", UserWarning)
        importlib.import_module("megatron.core.transformer.multi_token_prediction")  # which moe_layers imports
        from megatron.core import parallel_state
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
        from megatron.core.transformer.transformer_config import TransformerConfig
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        yield SimpleNamespace(
            parallel_state=parallel_state,
            TopKRouter=TopKRouter,
            RouterReplay=RouterReplay,
            Action=RouterReplayAction,
            TransformerConfig=TransformerConfig,
        )
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def no_routers(core: SimpleNamespace) -> Iterator[None]:
    """Routers register themselves for the life of the process."""
    yield
    core.RouterReplay.clear_global_router_replay_instances()


def configuration(core: SimpleNamespace, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of defaults that Megatron would rather see set
        return core.TransformerConfig(
            **{
                "num_layers": LAYERS,
                "hidden_size": 16,
                "num_attention_heads": 4,
                "num_moe_experts": EXPERTS,
                "moe_router_topk": TOP_K,
                "moe_router_load_balancing_type": "none",
                "moe_layer_freq": [0] + [1] * (options.get("num_layers", LAYERS) - 1),
                "moe_enable_routing_replay": True,
                "add_bias_linear": False,
                "pipeline_dtype": torch.float32,
                **options,
            }
        )


def model_chunk(core: SimpleNamespace, config: Any, layers: tuple[int, ...], mtp: bool = False) -> torch.nn.Module:
    """The routers of a model chunk, where a model has them. ``mtp``: an MTP layer that calls itself layer 1."""

    def block(layer_numbers: list[int]) -> torch.nn.Module:
        routers = torch.nn.ModuleList()
        for number in layer_numbers:
            router = core.TopKRouter(config, pg_collection=SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None))
            router.set_layer_number(number)
            routers.append(torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"router": router})}))
        return torch.nn.ModuleDict({"layers": routers})

    parts = {"decoder": block([layer + 1 for layer in layers])}
    if mtp:
        parts["mtp"] = block([1])
    return torch.nn.Sequential(torch.nn.ModuleDict(parts))  # wrapped, as Float16Module or DDP would


def routers_of(chunk: torch.nn.Module) -> list[Any]:
    return [module for module in chunk.modules() if hasattr(module, "router_replay")]


def write(path: str, rng: np.random.Generator, rows: list[int]) -> tuple[list[Any], list[torch.Tensor]]:
    arrays = [random_routing(rng, count, LAYERS, TOP_K, EXPERTS) for count in rows]
    with tracefile.TraceWriter(
        path, num_layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS, layers_per_chunk=2, rows_per_chunk=64
    ) as writer:
        lazies = writer.append_many([(str(i), array) for i, array in enumerate(arrays)])
    return list(lazies), [torch.from_numpy(array) for array in arrays]


def routing_map(ids: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(ids), EXPERTS, dtype=torch.bool).scatter(1, ids.to(torch.int64), True)


def test_the_lines_that_a_user_changes(core: SimpleNamespace, path: str, rng: np.random.Generator) -> None:
    samples, arrays = write(path, rng, [99, 40])
    config = configuration(core)
    chunk = model_chunk(core, config, moe_layers(config))
    assert megatron.__doc__ is not None
    lines = textwrap.dedent(megatron.__doc__.split("::\n\n", 1)[1].split("\n\nMegatron keeps", 1)[0])
    before = tracefile.process_stats()
    exec(
        lines,
        {
            "config": config,
            "model_chunk": chunk,
            "samples": samples,
            "num_tokens": [100, 41],
            "RouterReplayAction": core.Action,
        },
    )
    assert tracefile.process_stats() == before
    spread = torch.arange(LAYERS * TOP_K).view(1, LAYERS, TOP_K) % EXPERTS
    expected = torch.cat([arrays[0], spread, arrays[1], spread])
    for layer, router in zip(range(1, LAYERS), routers_of(chunk), strict=True):
        _, chosen = router.routing(torch.randn(141, 1, EXPERTS))
        assert torch.equal(chosen, routing_map(expected[:, layer]))


@pytest.mark.parametrize("prefetch", [None, 0, 2])
def test_forward_and_first_in_first_out_backward(
    core: SimpleNamespace,
    path: str,
    rng: np.random.Generator,
    decoded: list[tuple[str, int, int]],
    prefetch: int | None,
) -> None:
    """1F1B over four microbatches; with ``prefetch``, a loader reads them."""
    microbatches = 4
    samples, arrays = write(path, rng, [150] * microbatches)
    config = configuration(core)
    chunk = model_chunk(core, config, moe_layers(config))
    routers, replays = routers_of(chunk), decoder_routers(chunk)
    spec = shard_spec(config)
    shards = [spec.apply([sample], [150]) for sample in samples]
    loader = None
    if prefetch is not None:
        loader = tracefile.MicrobatchLoader(shards, prefetch=prefetch, warmup=2)  # type: ignore[arg-type]

    def set_action(action: Any) -> None:
        for replay in replays.values():
            replay.set_router_replay_action(action)

    def forward(number: int) -> None:
        before = tracefile.process_stats().reads
        set_replay_data(shards[number] if loader is None else loader[number], replays)
        if loader is None:
            assert tracefile.process_stats().reads == before, "setting reads nothing"
        set_action(core.Action.REPLAY_FORWARD)
        for layer, router in enumerate(routers, 1):
            logits = torch.randn(150, 1, EXPERTS, requires_grad=True)
            probs, chosen = router.routing(logits)
            assert torch.equal(chosen, routing_map(arrays[number][:, layer]))
            probs.square().sum().backward()  # uses what autograd kept of the ids
            assert logits.grad is not None
            assert int(logits.grad.count_nonzero()) == 150 * TOP_K
            if loader is None:
                assert tracefile.process_stats().reads == before + layer, "once for a router, not for each use"
        if number == 0 and loader is None:
            assert {layer for _, layer, _ in decoded} == {0, 1, 2}
            assert len(decoded) == len(set(decoded)), "no chunk twice"

    def backward(number: int) -> None:
        set_action(core.Action.REPLAY_BACKWARD)
        for layer, router in reversed([*enumerate(routers, 1)]):
            _, chosen = router.routing(torch.randn(150, 1, EXPERTS))
            assert torch.equal(chosen, routing_map(arrays[number][:, layer]))

    for step in [*zip("ffbfbfbb", (0, 1, 0, 2, 1, 3, 2, 3), strict=True)]:
        {"f": forward, "b": backward}[step[0]](step[1])
    assert all(replay.replay_backward_list == [] for replay in replays.values())
    if loader is not None:
        loader.close()


def test_what_a_router_gets(core: SimpleNamespace, path: str, rng: np.random.Generator) -> None:
    """int64, which is what gather takes everywhere, plain, and read on the way to the scores' device."""
    samples, arrays = write(path, rng, [30])
    replays = [core.RouterReplay() for _ in range(LAYERS)]
    scores = torch.rand(30, EXPERTS)
    for layers in (samples[0], [samples[0][:, i] for i in range(LAYERS)], arrays[0]):
        set_replay_data(layers)
        core.RouterReplay.set_global_router_replay_action(core.Action.REPLAY_FORWARD)
        probs, ids = replays[2].get_replay_topk(scores, TOP_K)
        assert type(ids) is torch.Tensor
        assert ids.dtype == torch.int64
        assert torch.equal(ids, arrays[0][:, 2].to(torch.int64))
        assert torch.equal(probs, scores.gather(1, ids))
    # What Megatron is given directly works too; each use reads.
    core.RouterReplay.set_replay_data([samples[0][:, i].to(torch.int64) for i in range(LAYERS)])
    probs, ids = replays[3].get_replay_topk(scores, TOP_K)
    assert torch.equal(probs, scores.gather(1, arrays[0][:, 3].to(torch.int64)))
    queued = replays[2].replay_backward_list[0]
    assert queued.shape == (30, TOP_K)
    assert queued.to("cpu", torch.uint8).dtype == torch.uint8


def test_mtp_layers_take_no_decoder_layers_routes(core: SimpleNamespace, path: str, rng: np.random.Generator) -> None:
    samples, arrays = write(path, rng, [30])
    config = configuration(core)
    chunk = model_chunk(core, config, moe_layers(config), mtp=True)
    local = shard_spec(config).apply(samples, [30])
    with pytest.raises(tracefile.OptionError, match="5 layers for 6 routers"):
        set_replay_data(local)
    replays = decoder_routers(chunk)
    assert list(replays) == [1, 2, 3, 4, 5]
    set_replay_data(local, replays)
    for replay in replays.values():
        replay.set_router_replay_action(core.Action.REPLAY_FORWARD)
    *decoder, mtp = routers_of(chunk)
    logits = torch.randn(30, 1, EXPERTS)
    for layer, router in enumerate(decoder, 1):
        assert torch.equal(router.routing(logits)[1], routing_map(arrays[0][:, layer]))
    assert torch.equal(mtp.routing(logits)[1], routing_map(logits[:, 0].topk(TOP_K).indices))


def test_model_chunks_find_their_layers_by_id(core: SimpleNamespace, path: str, rng: np.random.Generator) -> None:
    """Virtual pipeline: each chunk is set before its own forward; the trace may hold MoE layers only."""
    samples, arrays = write(path, rng, [30])
    with tracefile.TraceWriter(
        path + "-moe", num_layers=5, top_k=TOP_K, num_experts=EXPERTS, layer_ids=[1, 2, 3, 4, 5]
    ) as writer:
        moe_only = writer.append("a", arrays[0][:, 1:])
    config = configuration(core)
    first, second = model_chunk(core, config, (1, 2)), model_chunk(core, config, (4, 5))
    for local in (samples[0], moe_only, shard_spec(config, layer_ids=(5, 4, 2, 1)).apply(samples, [30])):
        for chunk, layers in ((second, (4, 5)), (first, (1, 2))):
            set_replay_data(local, decoder_routers(chunk))
            for layer, router in zip(layers, routers_of(chunk), strict=True):
                router.router_replay.set_router_replay_action(core.Action.REPLAY_FORWARD)
                assert torch.equal(router.routing(torch.randn(30, 1, EXPERTS))[1], routing_map(arrays[0][:, layer]))
    with pytest.raises(tracefile.OptionError, match=r"layers \[4, 5\] of the routers are not among those given"):
        set_replay_data(samples[0][:, :3], decoder_routers(second))
    with pytest.raises(tracefile.OptionError, match="ordinary tensors do not say"):
        set_replay_data(arrays[0], decoder_routers(second))
    routers_of(second)[1].set_layer_number(5)
    with pytest.raises(tracefile.OptionError, match="two routers of the model chunk say that they are of layer 4"):
        decoder_routers(second)


@pytest.fixture
def pipeline(core: SimpleNamespace) -> Iterator[Any]:
    """Makes this process believe that it is a pipeline rank."""
    state = core.parallel_state

    def stand_at(rank: int | None, size: int | None, chunks: int | None = None) -> None:
        state.set_pipeline_model_parallel_rank(rank)
        state.set_pipeline_model_parallel_world_size(size)
        state.set_virtual_pipeline_model_parallel_world_size(chunks)

    yield stand_at
    stand_at(None, None)


@pytest.mark.parametrize(
    ("options", "chunks_of_ranks"),
    [
        ({}, [[range(1, 12)]]),
        ({"moe_layer_freq": 3}, [[(0, 3, 6, 9)]]),
        ({"num_moe_experts": None, "moe_enable_routing_replay": False}, [[()]]),
        ({"pipeline_model_parallel_size": 3}, [[range(1, 4)], [range(4, 8)], [range(8, 12)]]),
        (
            {"pipeline_model_parallel_size": 2, "moe_layer_freq": [0] * 6 + [1] * 6},
            [[()], [range(6, 12)]],
        ),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3},
            [[(1,), (4, 5), (8, 9)], [(2, 3), (6, 7), (10, 11)]],
        ),
        (
            {
                "pipeline_model_parallel_size": 3,
                "num_layers_in_first_pipeline_stage": 2,
                "num_layers_in_last_pipeline_stage": 4,
            },
            [[(1,)], [range(2, 8)], [range(8, 12)]],
        ),
        (
            {
                "pipeline_model_parallel_size": 2,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            [[range(1, 6)], [range(6, 12)]],
        ),
    ],
)
def test_moe_layers_of_pipeline_ranks(
    core: SimpleNamespace, pipeline: Any, options: dict[str, Any], chunks_of_ranks: list[list[Any]]
) -> None:
    config = configuration(core, num_layers=12, **options)
    chunks = config.virtual_pipeline_model_parallel_size
    for rank, expected in enumerate(chunks_of_ranks):
        pipeline(rank, len(chunks_of_ranks), chunks)
        assert moe_layers(config) == tuple(layer for chunk in expected for layer in chunk)
        assert shard_spec(config).layer_ids == moe_layers(config)
        for stage in range(chunks or 0):
            assert moe_layers(config, vp_stage=stage) == tuple(expected[stage])


def test_mtp_layers_on_request(core: SimpleNamespace, pipeline: Any) -> None:
    config = configuration(core, num_layers=12, mtp_num_layers=2, pipeline_model_parallel_size=2)
    pipeline(0, 2)
    assert moe_layers(config, mtp=True) == moe_layers(config) == (1, 2, 3, 4, 5)
    pipeline(1, 2)
    assert moe_layers(config) == (6, 7, 8, 9, 10, 11)
    assert moe_layers(config, mtp=True) == (6, 7, 8, 9, 10, 11, 12, 13)
    assert shard_spec(config, mtp=True, padding="zeros").layer_ids == moe_layers(config, mtp=True)
    config.moe_layer_freq = [1] * 11
    with pytest.raises(tracefile.OptionError, match="moe_layer_freq has 11 entries for 12 layers"):
        moe_layers(config)


def test_a_stage_without_moe_layers(core: SimpleNamespace, path: str, rng: np.random.Generator) -> None:
    samples, _ = write(path, rng, [30])
    config = configuration(core, num_moe_experts=None, moe_enable_routing_replay=False)
    local = shard_spec(config).apply(samples, [30])
    assert local.shape == (30, 0, TOP_K)
    set_replay_data(local)


# Children of one process that has imported everything; they inherit its memory, the same for all.
_SCHEDULE = """
import ctypes, json, os, sys, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
import tracefile
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from tracefile.integrations.megatron import set_replay_data

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

def run(microbatches, eager):
    trace = tracefile.open(sys.argv[1])
    spec = tracefile.ShardSpec(cp_size=2, cp_rank=1, tp_size=4, tp_rank=2)
    names = list(trace)
    routers = [RouterReplay() for _ in range(47)]

    # Scores are made once: on the host, they would leave holes in malloc's heap between what the queues hold.
    scores = torch.rand(2002, 64)

    def route(router):
        return int(router.get_replay_topk(scores, 4)[1].sum())

    peak = total = 0
    for number in range(microbatches):
        samples = [trace[name] for name in names[4 * number : 4 * number + 4]]
        local = spec.apply(samples, [len(sample) for sample in samples])
        set_replay_data(local.materialize() if eager else local)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        total += sum(map(route, routers))
        peak = max(peak, anonymous())
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    for number in range(microbatches):
        total -= sum(map(route, reversed(routers)))
        peak = max(peak, anonymous())
    print(json.dumps([peak, total, sum(len(router.replay_backward_list) for router in routers)]), flush=True)

ctypes.CDLL(None).malloc_trim(0)  # or children would first use up what the imports have freed
for microbatches, eager in ((2, False), (16, False), (2, True), (16, True)):
    child = os.fork()
    if child == 0:
        run(microbatches, eager)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_whole_schedule_in_the_queue_takes_no_memory(path: str, rng: np.random.Generator) -> None:
    """16 microbatches of GLM-4.7-Flash are set, and their forwards run, before the first backward pops."""
    array = rng.integers(0, 64, (4 * 4004, 47, 4), dtype="uint8")
    with tracefile.TraceWriter(path, num_layers=47, top_k=4, num_experts=64) as writer:
        for number in range(16):
            writer.append_many([(f"{number}-{i}", array[4004 * i : 4004 * (i + 1)]) for i in range(4)])
    lines = [json.loads(line) for line in run_python(_SCHEDULE, path).stdout.splitlines() if line.startswith("[")]
    assert [line[1:] for line in lines] == [[0, 0]] * 4, "the same experts forward and backward, and empty queues"
    lazy_few, lazy_many, eager_few, eager_many = (line[0] for line in lines)
    assert eager_many - eager_few > 14 * 2002 * 47 * 4 * 4 // 1024, "KiB: values in the queue would be seen"
    assert lazy_many - lazy_few < 8 * 1024, f"KiB of RssAnon with 2 and with 16 microbatches: {lazy_few, lazy_many}"
