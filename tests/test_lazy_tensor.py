"""A lazy tensor in the hands of code that expects a tensor."""

from __future__ import annotations

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from support import random_routing

import tracefile
from tracefile import LazyRoutedExperts

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, TOP_K, EXPERTS, ROWS = 6, 4, 64, 40


class Sample(NamedTuple):
    lazy: LazyRoutedExperts
    eager: torch.Tensor


@pytest.fixture
def sample(path: str, rng: np.random.Generator) -> Sample:
    array = random_routing(rng, ROWS, LAYERS, TOP_K, EXPERTS)
    with tracefile.TraceWriter(path, num_layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS) as writer:
        return Sample(writer.append("a", array), torch.from_numpy(array))


def reads() -> int:
    return tracefile.process_stats().reads


def test_it_is_a_tensor(sample: Sample) -> None:
    lazy, eager = sample
    assert isinstance(lazy, torch.Tensor)
    assert torch.is_tensor(lazy)
    assert lazy.dtype == torch.int32
    assert lazy.stride() == eager.stride()
    assert lazy.is_contiguous()
    assert lazy.nbytes == eager.nbytes
    assert lazy.device.type == "cpu"
    assert not lazy.requires_grad
    assert len(lazy) == ROWS


STAYS_LAZY: dict[str, Callable[[torch.Tensor], Any]] = {
    "the way of frameworks": lambda x: torch.as_tensor(x, dtype=torch.long).detach().cpu().contiguous(),
    "as_tensor": torch.as_tensor,
    "clone": torch.clone,
    "data": lambda x: x.data,
    "long": lambda x: x.long(),
    "short": lambda x: x.short(),
    "to uint8": lambda x: x.to(torch.uint8),
    "to by keyword": lambda x: x.to(device="cpu", dtype=torch.int64, non_blocking=True, copy=True),
    "negative rows": lambda x: x[-5:-1],
    "empty rows": lambda x: x[30:3],
    "rows and layers": lambda x: x[3:20, 1:4],
    "every other row": lambda x: x[::2],
    "every other layer": lambda x: x[:, ::2],
    "one layer": lambda x: x[:, 2],
    "last layer": lambda x: x[:, -1],
    "one row": lambda x: x[7],
    "ellipsis": lambda x: x[..., :],
    "row list": lambda x: x[[3, 3, -1, 0]],
    "row array": lambda x: x[np.array([5, 2])],
    "row mask": lambda x: x[torch.arange(ROWS) % 3 == 0],
    "layer list": lambda x: x[:, [4, 0]],
    "layer mask": lambda x: x[:, torch.tensor([True, False, True, False, False, True])],
    "index_select rows": lambda x: x.index_select(0, torch.tensor([1, 5])),
    "index_select layers": lambda x: torch.index_select(x, 1, torch.tensor([1, 5])),
    "rows of a batch": lambda x: x[torch.tensor([[1, 2], [3, 4]])],
    "narrow": lambda x: x.narrow(0, 3, 9),
    "split": lambda x: x.split([10, 30])[1],
    "chunk": lambda x: x.chunk(3)[2],
    "tensor_split": lambda x: x.tensor_split((3, 9))[1],
    "unbind layers": lambda x: x.unbind(1)[3],
    "iteration": lambda x: list(x)[4],
    "cat": lambda x: torch.cat([x, x[:3]]),
    "cat along layers of one": lambda x: torch.cat([x]),
    "concat of narrower ints": lambda x: torch.cat([x, torch.zeros(2, LAYERS, TOP_K, dtype=torch.uint8)]),
    "pad rows": lambda x: torch.nn.functional.pad(x, (0, 0, 0, 0, 2, 3), value=5),
    "stack": lambda x: torch.stack([x, x]),
    "batch of one": lambda x: x.unsqueeze(0)[:, 3:9].squeeze(0),
    "batch index": lambda x: torch.stack([x, x])[1],
    "flatten": lambda x: x.flatten(1),
    "reshape": lambda x: x.reshape(-1, LAYERS * TOP_K),
    "reshape and back": lambda x: x.reshape(-1, LAYERS * TOP_K).view(-1, LAYERS, TOP_K),
    "reshape to a batch": lambda x: x.view(4, 10, LAYERS, TOP_K),
    "None index": lambda x: x[None],
    "dtype by string": lambda x: x.type(torch.int64),
    "numpy concatenate": lambda x: np.concatenate([x, x], axis=0)[1:],  # type: ignore[call-overload]
    "numpy concatenate with an array": lambda x: np.concatenate(  # type: ignore[call-overload]
        [x, np.zeros((2, LAYERS, TOP_K), np.int32)]
    ),
}


@pytest.mark.parametrize("name", STAYS_LAZY)
def test_stays_lazy(sample: Sample, name: str) -> None:
    operation = STAYS_LAZY[name]
    before = reads()
    result = operation(sample.lazy)
    assert reads() == before
    assert isinstance(result, LazyRoutedExperts)
    expected = operation(sample.eager)
    expected = torch.from_numpy(expected) if isinstance(expected, np.ndarray) else expected
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert torch.equal(result, expected)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda x: x + 1,
    "comparison": lambda x: x == 3,
    "equal": lambda x: torch.equal(x, x.clone()),
    "count_nonzero": lambda x: torch.count_nonzero(x[:, 2, :]),
    "sum": lambda x: x.sum(),
    "float": lambda x: x.float(),
    "to bool": lambda x: x.to(torch.bool),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "slots": lambda x: x[..., :2],
    "gather": lambda x: torch.randn(ROWS, LAYERS, EXPERTS, generator=torch.Generator().manual_seed(0)).gather(
        2, x.long()
    ),
    "embedding table": lambda x: torch.arange(EXPERTS)[x.long()],
    "one_hot": lambda x: torch.nn.functional.one_hot(x[:, 0].long(), EXPERTS),
    "bincount": lambda x: torch.bincount(x.flatten(), minlength=EXPERTS),
    "histc": lambda x: torch.histc(x[:, 1].float(), EXPERTS, 0, EXPERTS),
    "item": lambda x: x[3, 2, 1].item(),
    "tolist": lambda x: x[:3].tolist(),
    "strange view": lambda x: x.view(-1, 2),
    "cat along layers": lambda x: torch.cat([x, x], 1),
    "cat with floats": lambda x: torch.cat([x, torch.zeros(1, LAYERS, TOP_K)]),
    "boolean of two dims": lambda x: x[torch.ones(ROWS, LAYERS, dtype=torch.bool)],
    "pad with layers": lambda x: torch.nn.functional.pad(x, (0, 0, 1, 1)),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "where": lambda x: torch.where(x > 3, x, 0),
    "unique": lambda x: torch.unique(x),
    "asarray": lambda x: np.asarray(x),
    "asarray of another dtype": lambda x: np.asarray(x, dtype=np.int64),
    "numpy function": lambda x: np.stack([x, x]),  # type: ignore[call-overload]
    "numpy method": lambda x: x.numpy(),
    "from_dlpack": torch.from_dlpack,
    "torch.tensor from numpy": lambda x: torch.tensor(np.asarray(x)),
    "contains": lambda x: 3 in x,
    "any": lambda x: bool((x > 1).any()),
    "nested": lambda x: torch.nested.as_nested_tensor([x[:3], x[3:9]], layout=torch.jagged).values(),
}


@pytest.mark.parametrize("name", READS)
def test_reads_and_gives_plain_results(sample: Sample, name: str) -> None:
    operation = READS[name]
    before = reads()
    result = operation(sample.lazy)
    assert reads() > before
    assert not isinstance(result, LazyRoutedExperts)
    expected = operation(sample.eager)
    assert type(result) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)
    else:
        np.testing.assert_array_equal(result, expected)


def test_only_what_was_given_is_read(sample: Sample) -> None:
    tracefile.configure(materialize_limit=5 * TOP_K * 4)
    assert int(sample.lazy[3:8, 2].sum()) == int(sample.eager[3:8, 2].sum())
    with pytest.raises(tracefile.MaterializeLimitError, match="over the limit") as raised:
        sample.lazy[3:9, 2].sum()
    assert isinstance(raised.value, MemoryError)
    assert (raised.value.wanted, raised.value.limit) == (6 * TOP_K * 4, 5 * TOP_K * 4)  # type: ignore[attr-defined]


def test_factories_read_nothing(sample: Sample) -> None:
    lazy, eager = sample
    before = reads()
    for make in (torch.empty_like, torch.zeros_like, torch.ones_like):
        made = make(lazy)
        assert type(made) is torch.Tensor
        assert (made.shape, made.dtype) == (eager.shape, eager.dtype)
    assert torch.full_like(lazy, 7, dtype=torch.int64).unique().tolist() == [7]
    assert lazy.new_zeros(3).dtype == torch.int32
    assert torch.arange(5, dtype=lazy.dtype, device=lazy.device).tolist() == [0, 1, 2, 3, 4]
    assert reads() == before


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x.zero_(),
        lambda x: x.fill_(3),
        lambda x: x.__setitem__(0, 1),
        lambda x: x.__setitem__((slice(None), 1), torch.zeros(ROWS, TOP_K, dtype=torch.int32)),
        lambda x: x[3:5].copy_(torch.zeros(2, LAYERS, TOP_K, dtype=torch.int32)),
        lambda x: torch.add(x.clone(), 1, out=x),
        lambda x: x.index_fill_(0, torch.tensor([0]), 1),
        lambda x: x.resize_(3),
        lambda x: x.data_ptr(),
        lambda x: x.untyped_storage(),
        lambda x: x.storage(),
    ],
)
def test_writing_is_refused(sample: Sample, write: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(tracefile.LazyTensorError, match=r"materialize\(\)") as raised:
        write(sample.lazy)
    assert isinstance(raised.value, TypeError)
    assert torch.equal(sample.lazy, sample.eager)


def test_it_is_not_constructed() -> None:
    with pytest.raises(tracefile.LazyTensorError):
        LazyRoutedExperts(3)
    with pytest.raises(tracefile.LazyTensorError):
        LazyRoutedExperts()


def test_out_of_range_is_torchs_error(sample: Sample) -> None:
    for bad in (lambda x: x[ROWS], lambda x: x[:, LAYERS], lambda x: x[[ROWS]], lambda x: x[:, [-LAYERS - 1]]):
        with pytest.raises(IndexError):
            bad(sample.eager)
        with pytest.raises(IndexError):
            bad(sample.lazy)
    for bad in (lambda x: x.view(7, -1), lambda x: x.narrow(0, 30, 20), lambda x: torch.cat([x, x[:, :2]])):
        with pytest.raises(RuntimeError):
            bad(sample.eager)
        with pytest.raises(RuntimeError):
            bad(sample.lazy)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.float32])
def test_materialize_out(sample: Sample, dtype: torch.dtype) -> None:
    outs = {
        "contiguous": torch.empty(ROWS, LAYERS, TOP_K, dtype=dtype),
        "layer by layer": torch.empty(LAYERS, ROWS, TOP_K, dtype=dtype).transpose(0, 1),
        "strided": torch.empty(ROWS, LAYERS, 2 * TOP_K, dtype=dtype)[..., ::2],
    }
    for name, out in outs.items():
        assert sample.lazy.materialize(out=out) is out, name
        assert torch.equal(out, sample.eager.to(dtype)), name
    layer = torch.empty(ROWS, TOP_K, dtype=dtype)
    assert torch.equal(sample.lazy[:, 3].materialize(out=layer), sample.eager[:, 3].to(dtype))
    flat = torch.empty(ROWS, LAYERS * TOP_K, dtype=dtype)
    assert torch.equal(sample.lazy.flatten(1).materialize(out=flat), sample.eager.flatten(1).to(dtype))
    with pytest.raises(tracefile.RoutedExpertsShapeError, match="out has shape"):
        sample.lazy.materialize(out=layer)


def test_materialize_layouts(sample: Sample) -> None:
    by_layer = sample.lazy.materialize()
    assert by_layer[:, 2].is_contiguous()
    by_row = sample.lazy.materialize(contiguous=True)
    assert by_row.is_contiguous()
    assert torch.equal(by_layer, by_row)
    for x in (sample.lazy.flatten(1), sample.lazy[:, 1], sample.lazy.unsqueeze(0), sample.lazy[4]):
        assert torch.equal(x.materialize(), x.materialize(contiguous=True))


def test_copy_into_a_plain_tensor(sample: Sample) -> None:
    target = torch.zeros(ROWS + 2, LAYERS, TOP_K, dtype=torch.int64)
    target[1:-1] = sample.lazy
    assert torch.equal(target[1:-1], sample.eager.long())
    target[0].copy_(sample.lazy[9])
    assert torch.equal(target[0], sample.eager[9].long())


def test_values_that_do_not_fit_wrap_as_eager_ones_do(path: str) -> None:
    ids = np.array([[[0, 127, 128, 255]]])
    with tracefile.TraceWriter(path, num_layers=1, top_k=4, num_experts=256) as writer:
        lazy = writer.append("a", ids)
    assert isinstance(lazy.to(torch.int16), LazyRoutedExperts)
    wrapped = lazy.to(torch.int8)
    assert type(wrapped) is torch.Tensor
    assert torch.equal(wrapped, torch.from_numpy(ids).to(torch.int8))
    padded = torch.cat([lazy, torch.full((1, 1, 4), -1, dtype=torch.int32)])
    assert isinstance(padded, LazyRoutedExperts)
    assert padded.tolist() == [[[0, 127, 128, 255]], [[-1, -1, -1, -1]]]
    assert padded.to(torch.uint8).tolist() == [[[0, 127, 128, 255]], [[255, 255, 255, 255]]]


def test_copies_and_files_are_references(sample: Sample) -> None:
    padded = torch.cat([sample.lazy[2:], torch.full((3, LAYERS, TOP_K), 9, dtype=torch.int64)])
    before = reads()
    buffer = io.BytesIO()
    torch.save({"samples": [padded, sample.lazy]}, buffer)
    assert buffer.tell() < 4096
    buffer.seek(0)
    loaded = torch.load(buffer)["samples"]  # weights_only, its default
    again = [copy.copy(padded), copy.deepcopy(padded), pickle.loads(pickle.dumps(padded)), loaded[0]]
    shared = ForkingPickler.dumps(padded)  # what torch.multiprocessing queues use
    again.append(pickle.loads(shared))
    assert reads() == before
    for x in again:
        assert isinstance(x, LazyRoutedExperts)
        assert x.dtype == torch.int64
        assert torch.equal(x, torch.cat([sample.eager[2:].long(), torch.full((3, LAYERS, TOP_K), 9)]))
    assert torch.equal(loaded[1], sample.eager)


def test_copies_of_nothing(sample: Sample) -> None:
    """No rows, no layers, or padding of no bytes."""
    empty = torch.cat([sample.lazy[:2, :0], torch.zeros((1, 0, TOP_K), dtype=torch.int32)])
    for nothing in (sample.lazy[:0], sample.lazy[:, :0], empty):
        again = pickle.loads(pickle.dumps(nothing))
        assert isinstance(again, LazyRoutedExperts)
        assert again.shape == nothing.shape
        assert again.tolist() == nothing.tolist()


def test_autograd_through_gather(sample: Sample) -> None:
    weights = torch.randn(ROWS, EXPERTS, requires_grad=True)
    weights.gather(1, sample.lazy[:, 2].long()).sum().backward()
    twin = weights.detach().clone().requires_grad_()
    twin.gather(1, sample.eager[:, 2].long()).sum().backward()
    assert weights.grad is not None
    assert torch.equal(weights.grad, twin.grad)


def test_pinned_is_logical(sample: Sample) -> None:
    before = reads()
    pinned = sample.lazy.pin_memory()
    assert isinstance(pinned, LazyRoutedExperts)
    assert pinned.is_pinned()
    assert not sample.lazy.is_pinned()
    assert reads() == before
    assert torch.equal(pinned[3:], sample.eager[3:])
    assert sample.lazy.share_memory_() is sample.lazy


class TestPaddingStaysCompact:
    """A selection never pins more than its own rows of the padding that was concatenated."""

    def test_narrowed_and_cut(self, sample: Sample) -> None:
        rows = 10_000
        padding = torch.randint(0, EXPERTS, (rows, LAYERS, TOP_K))
        joined = torch.cat([sample.lazy, padding])
        assert joined.dtype == torch.int64
        assert joined.selection.rows.padding_bytes == rows * LAYERS * TOP_K
        local = joined[ROWS + 100 : ROWS + 110]
        del joined
        assert local.selection.rows.padding_bytes == 10 * LAYERS * TOP_K
        assert local._base is None
        base = [run.core.base for run in local.selection.rows.runs]
        assert base == [None]
        assert torch.equal(local, padding[100:110])

    def test_constant_padding_takes_no_room(self, sample: Sample) -> None:
        for value in (0, -1, 63):
            joined = torch.cat([sample.lazy, torch.full((5000, LAYERS, TOP_K), value)])
            assert joined.selection.rows.padding_bytes <= 2
            assert len(pickle.dumps(joined)) < 600
            assert joined[ROWS + 4999].tolist() == [[value] * TOP_K] * LAYERS

    def test_it_is_a_copy(self, sample: Sample) -> None:
        padding = torch.ones(2, LAYERS, TOP_K, dtype=torch.int32)
        joined = torch.cat([sample.lazy, padding])
        padding.fill_(9)
        assert joined[-1].tolist() == [[1] * TOP_K] * LAYERS


class TestMissingRows:
    @pytest.fixture
    def holed(self, path: str, rng: np.random.Generator) -> Sample:
        array = random_routing(rng, ROWS, LAYERS, TOP_K, EXPERTS)
        array[[0, 7, 8, 9, ROWS - 1]] = -1
        with tracefile.TraceWriter(path, num_layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS) as writer:
            return Sample(writer.append("a", array), torch.from_numpy(array))

    def test_valid_reads_nothing(self, holed: Sample) -> None:
        before = reads()
        expected = (holed.eager != -1).all(dim=(1, 2))
        assert torch.equal(holed.lazy.valid, expected)
        assert torch.equal(holed.lazy[5:12].valid, expected[5:12])
        assert torch.equal(torch.stack([holed.lazy, holed.lazy]).valid, torch.stack([expected, expected]))
        assert reads() == before

    def test_reading_one_is_an_error(self, holed: Sample) -> None:
        with pytest.raises(tracefile.MissingRowsError, match=r"rows \[2, 5\)") as raised:
            holed.lazy[5:12].sum()
        assert raised.value.rows == [(2, 5)]  # type: ignore[attr-defined]
        assert torch.equal(holed.lazy[1:7], holed.eager[1:7])
        assert torch.equal(holed.lazy[holed.lazy.valid], holed.eager[holed.lazy.valid])

    def test_renderings(self, holed: Sample) -> None:
        block = torch.arange(3 * LAYERS * TOP_K, dtype=torch.int32).view(3, LAYERS, TOP_K) % EXPERTS
        wanted = {
            "spread": block,
            "arange": torch.arange(TOP_K, dtype=torch.int32).expand(3, LAYERS, TOP_K),
            "zeros": torch.zeros_like(block),
            "minus_one": torch.full_like(block, -1),
        }
        for fill, expected in wanted.items():
            filled = holed.lazy.filled(fill)
            assert torch.equal(filled[7:10], expected), fill
            assert torch.equal(filled[8:11, 2:4], torch.cat([expected[1:, 2:4], holed.eager[10:11, 2:4]])), fill
            assert torch.equal(filled[1:7], holed.eager[1:7]), fill
            assert torch.equal(pickle.loads(pickle.dumps(filled))[7:10], expected), fill
        with pytest.raises(tracefile.OptionError, match="fill must be one of"):
            holed.lazy.filled("random")

    def test_minus_one_needs_a_signed_dtype(self, holed: Sample) -> None:
        lazy = holed.lazy.filled("minus_one")
        assert isinstance(lazy.to(torch.int8), LazyRoutedExperts)
        assert torch.equal(lazy.to(torch.uint8), holed.eager.to(torch.uint8))
        assert torch.equal(lazy, holed.eager)

    def test_open_chooses_a_rendering(self, holed: Sample, path: str) -> None:
        assert torch.equal(tracefile.open(path, fill="minus_one")["a"], holed.eager)
