"""verl's forms of routed experts, jagged and padded, and what verl does with them, in our own words."""

from __future__ import annotations

import copy
import pickle
import textwrap
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from support import random_routing, run_python

import tracefile
from tracefile.integrations import verl

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYERS, TOP_K, EXPERTS = 6, 4, 64
TOKENS = [300, 17, 1, 90]  # one more than rows


class Batch(NamedTuple):
    lazy: list[tracefile.LazyRoutedExperts]
    eager: list[torch.Tensor]
    """int16, with a row of zeros for the last token."""


@pytest.fixture
def batch(path: str, rng: np.random.Generator) -> Batch:
    arrays = [random_routing(rng, tokens - 1, LAYERS, TOP_K, EXPERTS) for tokens in TOKENS]
    with tracefile.TraceWriter(
        path, num_layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS, layers_per_chunk=2, rows_per_chunk=16
    ) as writer:
        lazy = list(writer.append_many([(str(i), array) for i, array in enumerate(arrays)]))
    zeros = torch.zeros(1, LAYERS, TOP_K, dtype=torch.int16)
    return Batch(lazy, [torch.cat([torch.from_numpy(array).to(torch.int16), zeros]) for array in arrays])


@pytest.fixture
def nothing_read() -> Iterator[None]:
    before = tracefile.process_stats()
    yield
    assert tracefile.process_stats() == before


def nested(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def is_lazy(routed: torch.Tensor) -> bool:
    values = routed.values() if routed.is_nested else routed
    return isinstance(values, tracefile.LazyRoutedExperts)


def same(routed: torch.Tensor, eager: list[torch.Tensor]) -> bool:
    parts = routed.unbind()
    return len(parts) == len(eager) and all(map(torch.equal, parts, eager))


def test_the_line_that_a_user_changes(batch: Batch) -> None:
    assert verl.__doc__ is not None
    lines = textwrap.dedent(verl.__doc__.split("::\n\n", 1)[1].split("\n\nIt has to be", 1)[0])
    names: dict[str, Any] = {"batch": {}, "samples": batch.lazy, "num_tokens": TOKENS}
    exec(lines, names)
    assert same(names["batch"]["routed_experts"], batch.eager)


def test_jagged_is_like_an_eager_one(batch: Batch) -> None:
    routed, eager = verl.jagged(batch.lazy, TOKENS), nested(batch.eager)
    assert (routed.is_nested, routed.dtype, routed.dim(), routed.size(0)) == (True, torch.int16, 4, len(TOKENS))
    assert torch.equal(routed.offsets(), eager.offsets())
    assert torch.equal(routed.values(), eager.values())
    assert same(verl.jagged(batch.lazy), [part[:-1] for part in batch.eager])
    cut = verl.jagged(batch.lazy, [2, 17, 1, 95])
    longer = torch.cat([batch.eager[3], torch.zeros(5, LAYERS, TOP_K, dtype=torch.int16)])
    assert same(cut, [batch.eager[0][:2], batch.eager[1], batch.eager[2], longer])


def test_jagged_stays_lazy(batch: Batch, nothing_read: None) -> None:
    """Moving, copying, pickling; selecting and joining samples, as TensorDicts do; verl's alignment with inputs."""
    routed = verl.jagged(batch.lazy)
    assert len(pickle.dumps(routed)) < 2000
    variants = [
        routed.to("cpu"),
        routed.to(torch.int64),
        routed.cpu().contiguous().detach().clone(),
        copy.deepcopy(routed),
        pickle.loads(pickle.dumps(routed)),
        nested([routed.unbind()[i] for i in (3, 1)]),
        nested([*routed.unbind(), *routed.unbind()]),
        *routed.chunk(4),
    ]
    placeholder = torch.zeros((1, *routed.shape[2:]), dtype=routed.dtype, device=routed.device)
    aligned = nested([torch.cat((rows, placeholder), dim=0) for rows in pickle.loads(pickle.dumps(routed)).unbind()])
    variants += [aligned, aligned.detach(), aligned[1], *verl.unpadded(aligned)]
    assert all(map(is_lazy, variants))


def test_values_after_all_that(batch: Batch) -> None:
    routed = pickle.loads(pickle.dumps(verl.jagged(batch.lazy, TOKENS).to("cpu")))
    assert same(nested([routed.unbind()[i] for i in (3, 1)]), [batch.eager[3], batch.eager[1]])
    assert same(routed.to(torch.int64), [part.to(torch.int64) for part in batch.eager])
    assert torch.equal(torch.nested.to_padded_tensor(routed, 0), torch.nested.to_padded_tensor(nested(batch.eager), 0))


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_ulysses_slices_of_a_jagged_batch(batch: Batch, decoded: list[tuple[str, int, int]], rank: int) -> None:
    """All sequences in a row, as int64, padded, a piece for each rank; layer by layer at use."""
    routed = verl.jagged(batch.lazy, TOKENS)
    expected = torch.cat([*batch.eager, torch.zeros(4, LAYERS, TOP_K, dtype=torch.int16)]).to(torch.int64)
    rows = len(expected) // 4
    targets = routed.values().to(torch.int64)
    targets = torch.cat([targets, targets.new_zeros((4, *targets.shape[1:]))])
    layers = targets[rank * rows : (rank + 1) * rows].contiguous().unbind(dim=1)
    assert decoded == []
    for number, layer in enumerate(layers):
        assert (layer.dtype, layer.shape) == (torch.int64, (rows, TOP_K))
        assert torch.equal(layer, expected[rank * rows : (rank + 1) * rows, number])
    assert {layer for _, layer, _ in decoded} == {0, 1, 2}
    assert len({row for _, _, row in decoded}) <= rows // 16 + 4, "only chunks with the rank's own rows"


def test_packing_reads_the_ranks_rows(batch: Batch) -> None:
    """verl's packing writes zigzag halves into a buffer of its own."""
    routed = verl.jagged(batch.lazy, TOKENS)
    cp, align = 2, 4
    for rank in range(cp):
        parts, expected = [], []
        before = tracefile.process_stats().bytes_decoded
        for i, tokens in enumerate(TOKENS):
            padded = -(-tokens // align) * align
            half = padded // (2 * cp)
            rows = torch.cat([routed[i], torch.zeros(padded - tokens, LAYERS, TOP_K, dtype=routed.dtype)])
            eager = torch.cat([batch.eager[i], torch.zeros(padded - tokens, LAYERS, TOP_K, dtype=torch.int16)])
            buffer = torch.zeros(2 * half, LAYERS, TOP_K, dtype=routed.dtype)
            for place, start in ((0, half * rank), (half, padded - half * (rank + 1))):
                buffer[place : place + half] = rows[start : start + half]
                expected.append(eager[start : start + half])
            parts.append(buffer)
        assert torch.equal(torch.cat(parts), torch.cat(expected))
        read = tracefile.process_stats().bytes_decoded - before
        assert read < 0.7 * sum(x.numel() for x in batch.eager), "half of the rows, up to whole chunks"


MASK = torch.zeros(len(TOKENS), 420, dtype=torch.int64)
for _row, _tokens in zip(MASK, TOKENS, strict=True):
    _prompt = min(_tokens, 40)
    _row[100 - _prompt : 100 - _prompt + _tokens] = 1


def test_padded_to_and_fro(batch: Batch) -> None:
    """Prompts end at 100, responses begin there."""
    before = tracefile.process_stats()
    routed = verl.padded(batch.lazy, MASK)
    samples = verl.unpadded(routed, MASK)
    parts = [*routed.chunk(2), torch.cat([routed, routed])[3:5], routed[torch.tensor([2, 0])]]
    travelled = pickle.loads(pickle.dumps(routed))
    assert all(map(is_lazy, [routed, *samples, *parts, travelled]))
    assert tracefile.process_stats() == before
    expected = torch.zeros(len(TOKENS), 420, LAYERS, TOP_K, dtype=torch.int16)
    for i, rows in enumerate(batch.eager):
        expected[i, MASK[i].bool()] = rows
    assert routed.dtype == torch.int16
    assert torch.equal(travelled, expected)
    assert torch.equal(parts[3], expected[[2, 0]])
    assert all(map(torch.equal, samples, batch.eager))
    assert all(map(torch.equal, verl.unpadded(expected, MASK), batch.eager))
    assert same(verl.jagged(samples), batch.eager)  # type: ignore[arg-type]


def test_masks_are_checked(batch: Batch) -> None:
    gap = MASK.clone()
    gap[0, 70] = 0
    with pytest.raises(tracefile.RoutedExpertsShapeError, match="row 0 of the attention mask have gaps"):
        verl.padded(batch.lazy, gap)
    with pytest.raises(tracefile.OptionError, match="needs its attention_mask"):
        verl.unpadded(verl.padded(batch.lazy, MASK))
    with pytest.raises(tracefile.OptionError, match="4 samples and 2 token counts"):
        verl.jagged(batch.lazy, [300, 17])


def test_replay_mask_leaves_uncaptured_rows_out(path: str, rng: np.random.Generator) -> None:
    array = random_routing(rng, 6, LAYERS, TOP_K, EXPERTS)
    array[2:4] = -1
    with tracefile.TraceWriter(path, num_layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS) as writer:
        samples = [writer.append("holes", array), writer.append("whole", array[:2])]
    mask = verl.replay_mask(samples, [8, 3])
    assert mask.dtype == torch.bool
    assert [part.tolist() for part in mask.unbind()] == [
        [True] * 2 + [False] * 2 + [True] * 2 + [False] * 2,
        [True] * 2 + [False],
    ]
    assert [part.int().tolist() for part in verl.replay_mask(samples, [3, 2]).unbind()] == [[1, 1, 0], [1, 1]]
    assert torch.equal(mask.offsets(), verl.jagged(samples, [8, 3]).offsets())
    with pytest.raises(tracefile.MissingRowsError):
        verl.jagged(samples, [8, 3])[0] + 0
    array[2:4] = 0
    zeros = np.zeros((2, LAYERS, TOP_K), array.dtype)
    for routed in (
        verl.jagged(samples, [8, 3], fill="zeros")[0],
        verl.padded(samples, torch.tensor([[1] * 8, [0] * 5 + [1] * 3]), fill="zeros")[0],
    ):
        assert np.array_equal(routed.numpy(), np.concatenate([array, zeros]))


def test_more_than_256_experts(path: str, rng: np.random.Generator) -> None:
    array = random_routing(rng, 20, 3, 22, 512)
    with tracefile.TraceWriter(path, num_layers=3, top_k=22, num_experts=512) as writer:
        routed = verl.jagged([writer.append("a", array)])
    assert routed.dtype == torch.int16
    assert np.array_equal(routed[0].numpy(), array)


def test_objects_travel_as_references(batch: Batch, nothing_read: None) -> None:
    objects = verl.object_array(batch.lazy)
    assert (objects.shape, objects.dtype) == ((len(TOKENS),), np.dtype(object))
    data = pickle.dumps(np.concatenate([objects, objects])[[5, 2]])
    assert len(data) < 1000
    assert all(map(is_lazy, pickle.loads(data)))


@pytest.mark.parametrize(
    "options",
    [{}, {"model": torch.nn.Module(), "local_cp_size": 2}],
)
def test_what_lazy_replay_does_not_do(batch: Batch, options: dict[str, Any]) -> None:
    with pytest.raises(tracefile.OptionError, match="use verl's own set_router_replay_data"):
        verl.set_router_replay_data(verl.jagged(batch.lazy), None, SimpleNamespace(fp8=None), **options)
    with pytest.raises(tracefile.OptionError, match="use verl's own set_router_replay_data"):
        verl.set_router_replay_data(
            verl.jagged(batch.lazy), None, SimpleNamespace(fp8="hybrid"), model=torch.nn.Module()
        )


def test_frameworks_are_imported_when_they_are_needed() -> None:
    run_python(
        "import sys, tracefile\n"
        "assert 'tracefile.integrations' not in sys.modules\n"
        "import tracefile.integrations.megatron, tracefile.integrations.verl\n"
        "assert not {'megatron', 'verl', 'tensordict', 'ray'} & {name.split('.')[0] for name in sys.modules}"
    )
