"""XTuner's path of routed experts, in our own words, on lazy tensors: nothing is read before a layer gathers."""

from __future__ import annotations

import ctypes
import gc
import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from support import random_routing
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

import tracefile
from tracefile.integrations.xtuner import read_before_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

LAYERS, TOP_K, EXPERTS = 12, 4, 64
CHUNK_LAYERS, CHUNK_ROWS = 4, 64


class Ref(NamedTuple):
    """An object ref, without Ray: what a process put, pickled."""

    data: bytes

    @classmethod
    def put(cls, value: Any) -> Ref:
        return cls(pickle.dumps(value))

    def get(self) -> Any:
        return pickle.loads(self.data)


def experts_of_pack(
    entries: Sequence[Any], get: Callable[[Any], Any], seed: int, num_experts: int = EXPERTS
) -> torch.Tensor:
    """The train worker's: one int64 tensor of a pack's refs, and lists of refs; a tensor stands for padding."""
    random = torch.Generator().manual_seed(seed)
    parts = []
    for entry in entries:
        if isinstance(entry, torch.Tensor):
            parts.append(torch.randint(0, num_experts, (entry.size(0), LAYERS, TOP_K), generator=random))
            continue
        # The first row of a session belongs to no token: routing starts after its first token.
        rows = np.concatenate([get(ref) for ref in entry], axis=0)[1:, ...] if isinstance(entry, list) else get(entry)
        parts.append(torch.as_tensor(rows, dtype=torch.long).reshape(-1, LAYERS, TOP_K))
    return torch.cat(parts, dim=0)


def sequence_parallel_part(experts: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """The sequence context's: pad with zeros to a multiple, cut, lay in order."""
    assert isinstance(experts, torch.Tensor)
    pad = -experts.shape[0] % size
    if pad:
        zeros = torch.full((pad, *experts.shape[1:]), 0, dtype=experts.dtype, device=experts.device)
        experts = torch.cat([experts, zeros], dim=0)
    rows = experts.size(0) // size
    return experts.narrow(0, rows * rank, rows).contiguous()


def route(scores: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The router's: weights of the experts, and how many tokens each has."""
    weights = scores.softmax(dim=1).gather(dim=1, index=ids)
    counts = torch.histc(ids if ids.is_cuda else ids.float(), bins=EXPERTS, min=0, max=EXPERTS)  # CPUs: floats only
    return weights, counts


def layer_experts(experts: torch.Tensor, layer: int, device: torch.device, offload: bool) -> torch.Tensor:
    """The decoder layer's."""
    ids = experts[:, layer, :]
    return ids.contiguous().to(device) if offload else ids


def pack(rng: np.random.Generator, put: Callable[[str, np.ndarray[Any, Any]], Any]) -> list[Any]:
    """Single rollouts, two samples of a session that share its first turn, and padding."""

    def turn(name: str, rows: int) -> Any:
        return put(name, random_routing(rng, rows, LAYERS, TOP_K, EXPERTS, np.uint8))

    first_turn = turn("session/0", 211)
    return [
        turn("0", 700),
        [first_turn, turn("session/1", 90), turn("session/2", 33)],
        turn("1", 1),
        [first_turn, turn("session/3", 150)],
        turn("2", 64),
        torch.zeros(83, 1, 1, dtype=torch.long),
    ]


@pytest.fixture
def writer(path: str) -> tracefile.TraceWriter:
    return tracefile.TraceWriter(
        path,
        num_layers=LAYERS,
        top_k=TOP_K,
        num_experts=EXPERTS,
        layers_per_chunk=CHUNK_LAYERS,
        rows_per_chunk=CHUNK_ROWS,
    )


@pytest.fixture
def packs(writer: tracefile.TraceWriter) -> tuple[list[Any], list[Any]]:
    """The same pack, as refs of lazy tensors and of arrays."""
    lazy = pack(np.random.default_rng(3), lambda name, rows: Ref.put(writer.append(name, rows)))
    return lazy, pack(np.random.default_rng(3), lambda name, rows: Ref.put(rows))


def chunks_of(local: torch.Tensor, group: int) -> set[tuple[str, int, int]]:
    """The chunks of a group of layers that a shard's rows lie in."""
    assert isinstance(local, tracefile.LazyRoutedExperts)
    return {
        (run.segment.id, group, row // CHUNK_ROWS)
        for run in local.selection.rows.runs
        if hasattr(run, "segment")
        for row in range(run.start, run.stop)
    }


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (4, 0), (4, 2), (8, 7)])
def test_nothing_is_read_before_the_first_gather(
    packs: tuple[list[Any], list[Any]], decoded: list[tuple[str, int, int]], size: int, rank: int, offload: bool
) -> None:
    lazies, arrays = packs
    before = tracefile.process_stats()
    experts = experts_of_pack(lazies, Ref.get, seed=5)
    device = torch.device("cpu")
    local = sequence_parallel_part(experts if offload else experts.to(device), size, rank)
    assert (local.dtype, type(local)) == (torch.int64, tracefile.LazyRoutedExperts)
    assert tracefile.process_stats() == before
    expected = sequence_parallel_part(experts_of_pack(arrays, Ref.get, seed=5), size, rank)
    assert local.shape == expected.shape
    scores = torch.rand(len(local), EXPERTS, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for layer in range(LAYERS):
        ids = layer_experts(local, layer, device, offload)
        if layer == 0:
            assert tracefile.process_stats() == before
            scores.gather(dim=1, index=ids)
            assert len(decoded) == len(set(decoded)), "each chunk once"
        results = route(scores, ids)
        for result, eager in zip(results, route(scores, expected[:, layer]), strict=True):
            assert torch.equal(result, eager)
        (gradient,) = torch.autograd.grad(results[0].sum(), scores)
        (eager_gradient,) = torch.autograd.grad(route(scores, expected[:, layer])[0].sum(), scores)
        assert torch.equal(gradient, eager_gradient)
        groups = range(layer // CHUNK_LAYERS + 1)
        assert set(decoded) == {chunk for group in groups for chunk in chunks_of(local, group)}, layer


@pytest.mark.parametrize(("num_experts", "width"), [(64, 1), (512, 2)])
def test_only_the_shard_moves_to_a_device_in_the_stored_width(path: str, num_experts: int, width: int) -> None:
    rng = np.random.default_rng(0)
    entries: list[Any] = [torch.zeros(40, 1, 1, dtype=torch.long)]
    with tracefile.TraceWriter(path, num_layers=LAYERS, top_k=TOP_K, num_experts=num_experts) as writer:
        for number, rows in enumerate((700, 60)):
            ids = random_routing(rng, rows, LAYERS, TOP_K, num_experts)
            entries.insert(0, Ref.put(writer.append(str(number), ids)))
    experts = experts_of_pack(entries, Ref.get, 0, num_experts)
    local = sequence_parallel_part(experts, 4, 3)
    assert local.shape[0] == 200
    assert isinstance(local, tracefile.LazyRoutedExperts)
    assert local.selection.rows.padding_bytes == 40 * LAYERS * TOP_K * width, "padding, too"
    # A device that is everywhere, and whose memory costs nothing.
    moved = local.with_selection(local.selection, device=torch.device("meta"))
    scores = torch.empty(200, num_experts, device="meta")
    trace = tracefile.open(path)
    for layer in range(LAYERS):
        ids = moved[:, layer, :]
        assert trace.stats.bytes_moved == layer * 200 * TOP_K * width
        weights = scores.gather(dim=1, index=ids)
        assert (weights.shape, weights.device.type) == ((200, TOP_K), "meta")
    assert trace.stats.bytes_moved == 200 * LAYERS * TOP_K * width
    moved.materialize(dtype=torch.int64)
    assert trace.stats.bytes_moved == 2 * 200 * LAYERS * TOP_K * width


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("offload", [False, True])
def test_on_a_gpu(path: str, packs: tuple[list[Any], list[Any]], offload: bool) -> None:
    lazies, arrays = packs
    device = torch.device("cuda")
    experts = experts_of_pack(lazies, Ref.get, seed=5)
    local = sequence_parallel_part(experts if offload else experts.to(device), 4, 2)
    expected = sequence_parallel_part(experts_of_pack(arrays, Ref.get, seed=5).to(device), 4, 2)
    scores = torch.rand(len(local), EXPERTS, device=device)
    trace = tracefile.open(path)
    before = trace.stats.bytes_moved
    for layer in range(LAYERS):
        ids = layer_experts(local, layer, device, offload)
        for result, eager in zip(route(scores, ids), route(scores, expected[:, layer]), strict=True):
            assert torch.equal(result, eager)
    moved = trace.stats.bytes_moved - before
    assert moved == 2 * len(local) * LAYERS * TOP_K, "for gather and for histc"


def anonymous_kib() -> int:
    """Host heap in use: freed memory that the allocator keeps is given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def test_a_retained_microbatch_holds_its_own_compact_rows(writer: tracefile.TraceWriter) -> None:
    ref = Ref.put(writer.append("a", random_routing(np.random.default_rng(0), 500, LAYERS, TOP_K, EXPERTS)))
    padding = torch.zeros(60_000, 1, 1, dtype=torch.long)
    experts_of_pack([ref, padding], Ref.get, 0)  # whatever starts with the first one has started
    retained = []
    before = anonymous_kib()
    for seed in range(20):
        # The second of eight parts: it is all padding.
        retained.append(sequence_parallel_part(experts_of_pack([ref, padding], Ref.get, seed), 8, 1))
    grown = anonymous_kib() - before
    compact = sum(len(local) for local in retained) * LAYERS * TOP_K // 1024
    random_int64 = 20 * 60_000 * LAYERS * TOP_K * 8 // 1024
    assert 7_000 < compact < 8_000
    assert grown < compact + 1_500, f"KiB, of which compact rows are {compact}, and all of the padding {random_int64}"
    first = experts_of_pack([ref, padding], Ref.get, 0)
    assert torch.equal(retained[0] + 0, sequence_parallel_part(first + 0, 8, 1))


class Layer(torch.nn.Module):
    """A decoder layer that picks its experts from its sequence context (or contexts), and routes."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.gate = torch.nn.Linear(8, EXPERTS, bias=False)

    def forward(self, hidden: torch.Tensor, seq_ctx: Any) -> torch.Tensor:
        for context in seq_ctx if isinstance(seq_ctx, list) else [seq_ctx]:
            if context.rollout_routed_experts is not None and self.layer_idx < context.rollout_routed_experts.shape[1]:
                ids = context.rollout_routed_experts[:, self.layer_idx, :]
                weights = self.gate(hidden).softmax(dim=1).gather(dim=1, index=ids)
                counts = torch.zeros(EXPERTS).index_add(0, ids.flatten(), weights.flatten())
                hidden = hidden * weights.sum(dim=1, keepdim=True) + counts.square().mean()
        return hidden


def compiled_layer() -> type[Layer]:
    """As XTuner compiles its layers, but for the backend."""
    return type("CompiledLayer", (Layer,), {"forward": torch.compile(Layer.forward, fullgraph=True, backend="eager")})


def run_layers(layers: Iterable[torch.nn.Module], context: Any) -> list[torch.Tensor]:
    """The output, and the gradient of the input."""
    hidden = torch.linspace(-1, 1, 8).expand(len(context.rollout_routed_experts), 8).clone().requires_grad_()
    result = hidden
    for layer in layers:
        result = layer(result, seq_ctx=context)
    result.sum().backward()
    assert hidden.grad is not None
    return [result.detach(), hidden.grad]


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # Dynamo looks at it
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_reading_before_each_layer(packs: tuple[list[Any], list[Any]], compiled: bool, checkpointed: bool) -> None:
    lazies, arrays = packs
    torch.compiler.reset()  # it counts the programs that one forward is compiled to, over all cases
    numbers = (0, 11, 12)
    layers = torch.nn.ModuleList(map(compiled_layer() if compiled else Layer, numbers))
    ordinary = torch.nn.ModuleList(map(Layer, numbers))
    ordinary.load_state_dict(layers.state_dict())
    if checkpointed:
        for number, layer in enumerate(layers):
            layers[number] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.REENTRANT)
    assert read_before_layers(layers) == 3
    lazy = SimpleNamespace(rollout_routed_experts=sequence_parallel_part(experts_of_pack(lazies, Ref.get, 5), 4, 1))
    eager = SimpleNamespace(rollout_routed_experts=sequence_parallel_part(experts_of_pack(arrays, Ref.get, 5), 4, 1))
    held, before = lazy.rollout_routed_experts, tracefile.process_stats()
    results = run_layers(layers, lazy)
    assert lazy.rollout_routed_experts is held
    after = tracefile.process_stats()
    # Two of the three are layers of the trace; each forward of theirs reads once, a checkpointed layer's second too.
    assert after.reads - before.reads == (4 if checkpointed else 2)
    for result, expected in zip(results, run_layers(ordinary, eager), strict=True):
        assert torch.equal(result, expected)
    both = SimpleNamespace(rollout_routed_experts=held)
    assert torch.equal(
        layers[0](results[0].requires_grad_(), seq_ctx=[lazy, both]), ordinary[0](results[0], [eager, eager])
    )
    assert lazy.rollout_routed_experts is both.rollout_routed_experts is held


def test_a_layer_that_fails_leaves_the_context_lazy(packs: tuple[list[Any], list[Any]]) -> None:
    layer = Layer(0)
    read_before_layers(layer)
    context = SimpleNamespace(rollout_routed_experts=experts_of_pack(packs[0], Ref.get, 5))
    held = context.rollout_routed_experts
    with pytest.raises(RuntimeError):
        layer(torch.ones(3, 8), seq_ctx=context)
    assert context.rollout_routed_experts is held
    path = held.selection.rows.segments()[0].trace.path
    lost = SimpleNamespace(rollout_routed_experts=_of_a_lost_trace(held, path))
    with pytest.raises(tracefile.TraceError):
        layer(torch.ones(len(held), 8), seq_ctx=lost)
    assert type(lost.rollout_routed_experts) is tracefile.LazyRoutedExperts


def _of_a_lost_trace(experts: torch.Tensor, path: str) -> Any:
    return pickle.loads(pickle.dumps(experts).replace(path.encode(), b"x" * len(path)))
