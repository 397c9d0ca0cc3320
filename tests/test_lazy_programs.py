"""Random programs of tensor operations give on lazy tensors what they give on eager ones, and read nothing."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import random_routing

import tracefile
from tracefile import LazyRoutedExperts

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, TOP_K, EXPERTS = 5, 2, 16


class Pair(NamedTuple):
    lazy: torch.Tensor
    eager: torch.Tensor

    def __repr__(self) -> str:
        return repr(self.lazy) if isinstance(self.lazy, LazyRoutedExperts) else f"plain {list(self.lazy.shape)}"


class Samples(NamedTuple):
    trace: tracefile.Trace
    eager: dict[str, torch.Tensor]

    def __repr__(self) -> str:
        return repr(self.trace)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Samples of several lengths, in several segments, in small chunks."""
    path = str(tmp_path_factory.mktemp("programs") / "t.trace")
    rng = np.random.default_rng(7)
    arrays = {f"s{rows}": random_routing(rng, rows, LAYERS, TOP_K, EXPERTS) for rows in (0, 1, 7, 16, 33, 50)}
    with tracefile.TraceWriter(
        path, num_layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS, layers_per_chunk=2, rows_per_chunk=8
    ) as writer:
        writer.append_many([(name, arrays[name]) for name in ("s0", "s33", "s7")])
        for name in ("s1", "s16", "s50"):
            writer.append(name, arrays[name])
    return Samples(tracefile.open(path), {name: torch.from_numpy(array) for name, array in arrays.items()})


_OPERATIONS = [
    "slice", "narrow", "select", "split", "chunk", "tensor_split", "unbind", "index", "mask", "index_select",
    "cat_lazy", "cat_plain", "pad", "stack", "unsqueeze", "squeeze", "flatten", "unflatten", "view", "to", "same",
    "numpy_concatenate", "pickle",
]  # fmt: skip


def _rows_slice(draw: Any, x: torch.Tensor, dim: int) -> Callable[[torch.Tensor], Any]:
    size = x.shape[dim]
    bound = st.none() | st.integers(-size - 2, size + 2)
    start, stop, step = draw(bound), draw(bound), draw(st.sampled_from([None, 1, 1, 2, 3]))
    index = (slice(None),) * dim + (slice(start, stop, step),)
    return lambda t: t[index]


def _operation(
    draw: Any, x: torch.Tensor, pool: list[Pair], *, rows_only: bool = False
) -> tuple[str, Callable[[Pair], Pair]]:
    """Draw an operation that is legal on ``x``; what it needs besides it draws too."""

    def both(function: Callable[[torch.Tensor], Any]) -> Callable[[Pair], Pair]:
        return lambda pair: Pair(function(pair.lazy), function(pair.eager))

    dims = x.dim()
    dim = draw(st.integers(0, max(dims - 2, 0)))
    size = x.shape[dim] if dims else 0
    name = draw(st.sampled_from(_OPERATIONS))
    if name == "slice" and dims:
        return name, both(_rows_slice(draw, x, dim))
    if name == "narrow" and dims:
        start = draw(st.integers(0, size))
        length = draw(st.integers(0, size - start))
        return name, both(lambda t: t.narrow(dim, start, length))
    if name == "select" and size and dims > 1:
        at = draw(st.integers(-size, size - 1))
        return name, both(lambda t: t.select(dim, at))
    if name in ("split", "chunk", "tensor_split") and dims:
        count = draw(st.integers(1, size + 2))
        which = draw(st.integers(0, 5))

        def part(t: torch.Tensor) -> Any:
            parts = getattr(t, name)(count, dim)
            return parts[which % len(parts)]

        return name, both(part)
    if name == "unbind" and size and dims > 1:
        which = draw(st.integers(0, size - 1))
        return name, both(lambda t: t.unbind(dim)[which])
    if name == "index" and size:
        wanted = draw(st.lists(st.integers(-size, size - 1), max_size=12))
        index = (slice(None),) * dim + (torch.tensor(wanted, dtype=torch.int64),)
        return name, both(lambda t: t[index])
    if name == "mask" and dims:
        mask = torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=torch.bool)
        index = (slice(None),) * dim + (mask,)
        return name, both(lambda t: t[index])
    if name == "index_select" and size:
        rows = torch.tensor(draw(st.lists(st.integers(0, size - 1), max_size=12)), dtype=torch.int64)
        return name, both(lambda t: t.index_select(dim, rows))
    if name == "cat_lazy":
        alike = [p for p in pool if p.eager.dim() == dims and p.eager.shape[1:] == x.shape[1:] and dims]
        others = draw(st.lists(st.sampled_from(alike), max_size=3)) if alike else []
        before = draw(st.booleans())

        def cat(pair: Pair) -> Pair:
            parts = [*others, pair] if before else [pair, *others]
            return Pair(torch.cat([p.lazy for p in parts]), torch.cat([p.eager for p in parts]))

        return name, cat
    if name == "cat_plain" and dims:
        rows = draw(st.integers(0, 4))
        dtype = draw(st.sampled_from([torch.int32, torch.int64, torch.uint8, torch.int16]))
        low = draw(st.sampled_from([0, 0, -1] if dtype != torch.uint8 else [0]))
        values = np.random.default_rng(draw(st.integers(0, 99))).integers(low, EXPERTS, (rows, *x.shape[1:]))
        padding = torch.from_numpy(values).to(dtype)
        return name, both(lambda t: torch.cat([t, padding, t[:1]]))
    if name == "pad" and dims > 1:
        dim = 0 if rows_only else dim
        size = x.shape[dim]
        before, after = draw(st.integers(-2, 3)), draw(st.integers(-2, 3))
        value = draw(st.sampled_from([0, 3] if x.dtype == torch.uint8 else [0, -1, 3]))
        if size + min(before, 0) + min(after, 0) < 0 or size + before + after < 0:
            return "same", both(lambda t: t)
        amounts = [0, 0] * (dims - 1 - dim) + [before, after]
        return name, both(lambda t: torch.nn.functional.pad(t, amounts, value=value))
    if name == "stack" and dims:
        at = draw(st.integers(0, dims - 1))
        return name, both(lambda t: torch.stack([t, t], at))
    if name == "unsqueeze":
        at = draw(st.integers(-dims - 1, dims))
        return name, both(lambda t: t.unsqueeze(at))
    if name == "squeeze":
        return name, both(lambda t: t.squeeze() if not dims or dim == 0 else t.squeeze(dim))
    if name == "flatten" and dims > 1:
        start = draw(st.integers(0, dims - 1))
        end = draw(st.integers(start, dims - 1))
        return name, both(lambda t: t.flatten(start, end))
    if name == "unflatten" and dims and x.shape[-1] % TOP_K == 0:
        return name, both(lambda t: t.unflatten(-1, (t.shape[-1] // TOP_K, TOP_K)))
    if name == "view" and dims:
        last = x.shape[-1]
        return name, both(lambda t: t.contiguous().view(-1, last) if last else t)
    if name == "to":
        dtype = draw(st.sampled_from([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.float32]))
        return name, both(lambda t: t.to(dtype))
    if name == "numpy_concatenate" and dims:
        return name, lambda pair: Pair(
            torch.as_tensor(np.concatenate([pair.lazy, pair.lazy], axis=0)),  # type: ignore[call-overload]
            torch.cat([pair.eager, pair.eager]),
        )
    if name == "pickle":
        return name, lambda pair: Pair(pickle.loads(pickle.dumps(pair.lazy)), pair.eager)
    same = draw(st.sampled_from(["contiguous", "clone", "detach", "cpu"]))
    return same, both(lambda t: getattr(t, same)())


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_programs_equal_eager_ones(samples: Samples, data: st.DataObject) -> None:
    pool = [Pair(samples.trace[name], eager) for name, eager in samples.eager.items()]
    pair = data.draw(st.sampled_from(pool))
    steps = data.draw(st.integers(1, 8))
    for _ in range(steps):
        name, operation = _operation(data.draw, pair.eager, pool)
        pair = operation(pair)
        assert pair.lazy.shape == pair.eager.shape, name
        assert pair.lazy.dtype == pair.eager.dtype, name
        assert pair.lazy.numel() == pair.eager.numel()
        if isinstance(pair.lazy, LazyRoutedExperts):
            assert pair.lazy._base is None, name
            pool.append(pair)
    assert torch.equal(pair.lazy, pair.eager)
    values = pair.lazy.materialize() if isinstance(pair.lazy, LazyRoutedExperts) else pair.lazy
    assert torch.equal(values, pair.eager)
    np.testing.assert_array_equal(np.asarray(pair.lazy), pair.eager.numpy())


# Operations that must not read, whatever the program; slots (the last dimension) are never cut.
_LAZY = {
    "slice", "narrow", "select", "split", "chunk", "tensor_split", "unbind", "index", "mask", "index_select",
    "cat_lazy", "cat_plain", "pad", "numpy_concatenate", "pickle", "contiguous", "clone", "detach", "cpu",
}  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_lazy_programs_read_nothing(samples: Samples, data: st.DataObject) -> None:
    pool = [Pair(samples.trace[name], eager) for name, eager in samples.eager.items()]
    pair = data.draw(st.sampled_from(pool))
    before = tracefile.process_stats()
    for _ in range(data.draw(st.integers(1, 8))):
        if pair.eager.dim() < 2 or not pair.lazy.selection.lead:
            break  # a single row: nothing is left to slice or to put together
        name, operation = _operation(data.draw, pair.eager, pool, rows_only=True)
        if name not in _LAZY:
            continue
        pair = operation(pair)
        assert isinstance(pair.lazy, LazyRoutedExperts), name
        pool.append(pair)
    assert tracefile.process_stats() == before
    assert torch.equal(pair.lazy, pair.eager)
