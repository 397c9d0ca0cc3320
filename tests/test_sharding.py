"""Shards of every parallel layout against pad, concatenate and slice of eager tensors, written here anew."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tracefile
from tracefile.sharding import RowRange, ShardSpec

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, TOP_K, EXPERTS = 3, 2, 8


def routing(rows: int, sample: int) -> torch.Tensor:
    """Rows that say where they come from, as far as ids below EXPERTS can."""
    numbers = torch.arange(rows * LAYERS * TOP_K, dtype=torch.int32) * 5 + sample * 3
    return (numbers % EXPERTS).view(rows, LAYERS, TOP_K)


class Batch(NamedTuple):
    lazy: list[tracefile.LazyRoutedExperts]
    eager: list[torch.Tensor]
    tokens: list[int]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> tracefile.Trace:
    path = str(tmp_path_factory.mktemp("sharding") / "t.trace")
    with tracefile.TraceWriter(path, num_layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS, rows_per_chunk=8) as writer:
        writer.append_many([(f"{rows}-{sample}", routing(rows, sample)) for rows in range(40) for sample in range(4)])
    return tracefile.open(path)


def batch(trace: tracefile.Trace, rows: list[int], extra: int = 0) -> Batch:
    lazy = [trace[f"{count}-{sample}"] for sample, count in enumerate(rows)]
    return Batch(lazy, [routing(count, sample) for sample, count in enumerate(rows)], [r + extra for r in rows])


def spread(rows: int) -> torch.Tensor:
    return (torch.arange(rows * LAYERS * TOP_K, dtype=torch.int32) % EXPERTS).reshape(rows, LAYERS, TOP_K)


FILLS: dict[str, Callable[[int], torch.Tensor]] = {
    "spread": spread,
    "zeros": lambda rows: torch.zeros(rows, LAYERS, TOP_K, dtype=torch.int32),
    "minus_one": lambda rows: torch.full((rows, LAYERS, TOP_K), -1, dtype=torch.int32),
    "arange": lambda rows: torch.arange(TOP_K, dtype=torch.int32).repeat(rows, LAYERS, 1),
}


# The layouts, from their formulas: one function a layout, nothing shared with the library.


def zigzag_then_sequence_parallel(
    samples: list[torch.Tensor], fill: Any, cp: int, r: int, tp: int, t: int, per_sample: int, align: int
) -> torch.Tensor:
    local = []
    for x in samples:
        if cp > 1 or per_sample > 1:
            padded = per_sample * math.ceil(len(x) / per_sample)
            x = torch.cat([x, fill(padded - len(x))])
        if cp > 1:
            h = len(x) // (2 * cp)
            x = torch.cat([x[h * r : h * (r + 1)], x[len(x) - h * (r + 1) : len(x) - h * r]])
        local.append(x)
    buffer = torch.cat(local)
    buffer = torch.cat([buffer, fill(-len(buffer) % align)])
    return buffer[len(buffer) // tp * t : len(buffer) // tp * (t + 1)]


def contiguous_then_sequence_parallel(
    samples: list[torch.Tensor], fill: Any, cp: int, r: int, tp: int, t: int, align: int
) -> torch.Tensor:
    whole = torch.cat(samples)
    whole = torch.cat([whole, fill(-len(whole) % (cp * align))])
    mine = torch.chunk(whole, cp)[r] if len(whole) else whole
    return torch.chunk(mine, tp)[t] if len(mine) else mine


LENGTHS = st.lists(st.integers(0, 39), min_size=1, max_size=4)
GROUPS = [(cp, tp) for cp in (1, 2, 3, 4) for tp in (1, 2, 3, 4)]


def check_all_ranks(
    case: Batch, make: Callable[[int, int], ShardSpec], expected: Callable[[int, int], torch.Tensor], cp: int, tp: int
) -> None:
    before = tracefile.process_stats().reads
    shards = {}
    for r, t in itertools.product(range(cp), range(tp)):
        spec = make(r, t)
        shards[r, t] = spec.apply(case.lazy, case.tokens)
        assert isinstance(shards[r, t], tracefile.LazyRoutedExperts)
    assert tracefile.process_stats().reads == before
    seen: list[tuple[int, int]] = []
    for (r, t), shard in shards.items():
        spec = make(r, t)
        wanted = expected(r, t)
        assert torch.equal(shard, wanted), (r, t)
        assert torch.equal(spec.apply(case.eager, case.tokens, num_experts=EXPERTS), wanted)
        ranges = spec.row_ranges(case.tokens)
        assert sum(stop - start for _, start, stop in ranges) == len(wanted)
        row = 0
        for sample, start, stop in ranges:
            if sample is not None:
                seen += [(sample, i) for i in range(start, stop)]
                assert torch.equal(wanted[row : row + stop - start], case.eager[sample][start:stop])
            row += stop - start
    assert sorted(seen) == [(s, i) for s, x in enumerate(case.eager) for i in range(len(x))]


@pytest.mark.parametrize(("cp", "tp"), GROUPS)
@settings(max_examples=12, deadline=None)
@given(rows=LENGTHS, fill=st.sampled_from(list(FILLS)), multiplier=st.sampled_from([1, 1, 2, 3]), by_tp=st.booleans())
def test_zigzag(
    trace: tracefile.Trace, cp: int, tp: int, rows: list[int], fill: str, multiplier: int, by_tp: bool
) -> None:
    case = batch(trace, rows)
    per_sample = (2 * cp if cp > 1 else 1) * (tp if by_tp else 1)
    check_all_ranks(
        case,
        lambda r, t: ShardSpec(
            cp_size=cp,
            cp_rank=r,
            tp_size=tp,
            tp_rank=t,
            padding=fill,  # type: ignore[arg-type]
            sample_multiple=per_sample if by_tp else None,
            buffer_multiple=tp * multiplier,
        ),
        lambda r, t: zigzag_then_sequence_parallel(case.eager, FILLS[fill], cp, r, tp, t, per_sample, tp * multiplier),
        cp,
        tp,
    )


@pytest.mark.parametrize(("cp", "tp"), GROUPS)
@settings(max_examples=12, deadline=None)
@given(rows=LENGTHS, fill=st.sampled_from(list(FILLS)), multiplier=st.sampled_from([1, 1, 2, 3]))
def test_contiguous(trace: tracefile.Trace, cp: int, tp: int, rows: list[int], fill: str, multiplier: int) -> None:
    case = batch(trace, rows)
    check_all_ranks(
        case,
        lambda r, t: ShardSpec(
            cp_size=cp,
            cp_rank=r,
            cp_layout="contiguous",
            tp_size=tp,
            tp_rank=t,
            padding=fill,  # type: ignore[arg-type]
            buffer_multiple=tp * multiplier,
        ),
        lambda r, t: contiguous_then_sequence_parallel(case.eager, FILLS[fill], cp, r, tp, t, tp * multiplier),
        cp,
        tp,
    )


@pytest.mark.parametrize(("cp", "tp"), GROUPS)
@settings(max_examples=8, deadline=None)
@given(rows=LENGTHS)
def test_sequence_major_batches(trace: tracefile.Trace, cp: int, tp: int, rows: list[int]) -> None:
    case = batch(trace, rows)

    def expected(r: int, t: int) -> torch.Tensor:
        unit = 2 * cp if cp > 1 else 1
        longest = unit * math.ceil(max(rows) / unit)
        grid = torch.stack([torch.cat([x, FILLS["zeros"](longest - len(x))]) for x in case.eager])  # [B, S]
        if cp > 1:
            h = longest // (2 * cp)
            grid = torch.cat([grid[:, h * r : h * (r + 1)], grid[:, longest - h * (r + 1) : longest - h * r]], 1)
        more = -grid.shape[1] % tp
        grid = torch.cat([grid, FILLS["zeros"](len(rows) * more).view(len(rows), more, LAYERS, TOP_K)], 1)
        size = grid.shape[1] // tp
        return grid[:, size * t : size * (t + 1)].transpose(0, 1).reshape(-1, LAYERS, TOP_K)

    check_all_ranks(
        case,
        lambda r, t: ShardSpec(cp_size=cp, cp_rank=r, tp_size=tp, tp_rank=t, padding="zeros", batch="sequence_major"),
        expected,
        cp,
        tp,
    )


@settings(max_examples=40, deadline=None)
@given(rows=LENGTHS, group=st.sampled_from(GROUPS), layout=st.sampled_from(["zigzag", "contiguous"]))
def test_a_row_short_of_the_tokens(
    trace: tracefile.Trace, rows: list[int], group: tuple[int, int], layout: str
) -> None:
    """slime: every sample gets one padding row before anything else."""
    cp, tp = group
    case = batch(trace, rows, extra=1)
    longer = [torch.cat([x, spread(1)]) for x in case.eager]

    def expected(r: int, t: int) -> torch.Tensor:
        if layout == "zigzag":
            return zigzag_then_sequence_parallel(longer, spread, cp, r, tp, t, 2 * cp if cp > 1 else 1, tp)
        return contiguous_then_sequence_parallel(longer, spread, cp, r, tp, t, tp)

    check_all_ranks(
        case,
        lambda r, t: ShardSpec(
            cp_size=cp,
            cp_rank=r,
            cp_layout=layout,  # type: ignore[arg-type]
            tp_size=tp,
            tp_rank=t,
            rows="tokens-1",
        ),
        expected,
        cp,
        tp,
    )


def test_layers_go_by_global_id(tmp_path: Any) -> None:
    """A pipeline stage's MoE layers, of a trace that holds all hidden layers and of one that holds MoE layers only."""
    every = torch.arange(5 * 6 * 2).view(5, 6, 2) % 61
    with tracefile.TraceWriter(str(tmp_path / "all"), num_layers=6, top_k=2, num_experts=61) as writer:
        whole = writer.append("a", every)
    with tracefile.TraceWriter(
        str(tmp_path / "moe"), num_layers=4, top_k=2, num_experts=61, layer_ids=[1, 3, 4, 5]
    ) as writer:
        moe_only = writer.append("a", every[:, [1, 3, 4, 5]])
    spec = ShardSpec(layer_ids=(3, 4))
    for experts in (whole, moe_only):
        shard = spec.apply([experts], [5])
        assert isinstance(shard, tracefile.LazyRoutedExperts)
        assert shard.layer_ids == (3, 4)
        assert torch.equal(shard, every[:, 3:5].to(torch.int32))
    assert torch.equal(spec.apply([every], [5]), every[:, 3:5])
    with pytest.raises(tracefile.OptionError, match=r"layers \[2\] are not among"):
        ShardSpec(layer_ids=(1, 2)).apply([moe_only], [5])


def test_padding_by_tensor_and_by_function(trace: tracefile.Trace) -> None:
    row = torch.tensor([[7, 6], [5, 4], [3, 2]])
    case = batch(trace, [5])
    for rule in (row, lambda rows, layers, top_k: row.expand(rows, layers, top_k)):
        shard = ShardSpec(cp_size=2, cp_rank=0, padding=rule).apply(case.lazy, case.tokens)
        assert torch.equal(shard, torch.cat([case.eager[0][:2], row.expand(2, 3, 2).to(torch.int32)]))


def test_fewer_tokens_than_ranks(trace: tracefile.Trace) -> None:
    """A shard without rows of its own is all padding, and legal."""
    case = batch(trace, [1, 0])
    spec = ShardSpec(cp_size=1, tp_size=4, tp_rank=3)
    shard = spec.apply(case.lazy, case.tokens)
    assert spec.row_ranges(case.tokens) == [RowRange(None, 2, 3)]
    assert torch.equal(shard, spread(3)[2:])


def test_wrong_row_counts_and_options_are_named(trace: tracefile.Trace) -> None:
    case = batch(trace, [5, 7])
    with pytest.raises(tracefile.RoutedExpertsShapeError, match=r"sample 1 .* has 7 rows; 9 tokens"):
        ShardSpec().apply(case.lazy, [5, 9])
    with pytest.raises(tracefile.OptionError, match="needs num_experts"):
        ShardSpec(tp_size=5).apply(case.eager, [5, 7])
    bad: list[dict[str, Any]] = [
        {"cp_size": 2, "cp_rank": 2},
        {"tp_rank": -1},
        {"cp_layout": "zig"},
        {"rows": "all"},
        {"padding": "random"},
        {"batch": "BSHD"},
        {"cp_size": 2, "sample_multiple": 2},
        {"tp_size": 4, "buffer_multiple": 6},
    ]
    for options in bad:
        with pytest.raises(tracefile.OptionError):
            ShardSpec(**options)


def test_it_travels() -> None:
    spec = ShardSpec(cp_size=4, cp_rank=3, layer_ids=(1, 2), rows="tokens-1")
    assert pickle.loads(pickle.dumps(spec)) == spec
    with pytest.raises(AttributeError):
        spec.cp_rank = 1  # type: ignore[misc]
