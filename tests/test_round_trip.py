"""What is written is what is read, through tracefile itself."""

from __future__ import annotations

import glob
import os
import tempfile
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support import MODEL_SHAPES, Shape, ids_of, random_routing

import tracefile

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]

#: Not in the repository; present where the project is developed.
REAL_TRACES = os.path.join(os.path.dirname(__file__), "..", "..", "shared", "traces")
SMALL = {"num_layers": 5, "top_k": 3, "num_experts": 100}


def _config(shape: Shape) -> dict[str, int]:
    return {"num_layers": shape.num_layers, "top_k": shape.top_k, "num_experts": shape.num_experts}


def _small_ids(rng: np.random.Generator, rows: int, dtype: Any = np.int32) -> Array:
    return random_routing(rng, rows, *SMALL.values(), dtype=dtype)


@pytest.mark.parametrize("codec", ["fast", "compact", "none"])
@pytest.mark.parametrize("shape", MODEL_SHAPES, ids=lambda shape: shape.name)
def test_every_model_shape(path: str, rng: np.random.Generator, shape: Shape, codec: str) -> None:
    samples = {f"s{rows}": random_routing(rng, rows, *shape[1:]) for rows in (1, 7, 1025, 2500)}
    with tracefile.TraceWriter(path, **_config(shape), codec=codec) as writer:
        for sample, ids in samples.items():
            writer.append(sample, ids)
    trace = tracefile.open(path)
    assert list(trace) == list(samples)
    for sample, ids in samples.items():
        values = trace[sample].numpy()
        assert values.dtype == np.int32
        np.testing.assert_array_equal(values, ids)


def test_stored_dtype_follows_the_declared_experts(path: str) -> None:
    with tracefile.TraceWriter(path, num_layers=1, top_k=1, num_experts=257) as writer:
        experts = writer.append("a", torch.zeros(4, 1, 1, dtype=torch.uint8))
    assert experts.config.dtype == np.uint16
    assert "uint16 on disk" in repr(experts)


@pytest.mark.parametrize("codec", ["fast", "compact", "none"])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 4097])
def test_row_counts_around_chunk_boundaries(path: str, rng: np.random.Generator, rows: int, codec: str) -> None:
    ids = _small_ids(rng, rows)
    with tracefile.TraceWriter(path, **SMALL, codec=codec, layers_per_chunk=2, rows_per_chunk=64) as writer:
        returned = writer.append("a", ids)
    assert returned.shape == ids.shape
    np.testing.assert_array_equal(returned.numpy(), ids)
    np.testing.assert_array_equal(tracefile.open(path)["a"].numpy(), ids)


@pytest.mark.parametrize("num_experts", [128, 512])
def test_a_long_sample(path: str, num_experts: int) -> None:
    ids = ids_of("long", 131_072, 8, 4, num_experts)
    with tracefile.TraceWriter(path, num_layers=8, top_k=4, num_experts=num_experts) as writer:
        writer.append("long", ids)
    experts = tracefile.open(path)["long"]
    np.testing.assert_array_equal(experts.numpy(), ids)
    np.testing.assert_array_equal(experts[100_001:100_003, 3].numpy(), ids[100_001:100_003, 3])


@pytest.mark.parametrize(
    ("num_experts", "top_k", "dtype"),
    [(255, 2, "uint8"), (256, 2, "uint8"), (257, 2, "uint16"), (512, 22, "uint16"), (65_535, 3, "uint16")],
)
def test_every_id_of_a_model(path: str, num_experts: int, top_k: int, dtype: str) -> None:
    """The largest ids included: 255 is a real expert where there are 256, though it looks like the fill value."""
    rows = -(-num_experts // top_k)
    ids = (np.arange(rows * top_k) % num_experts).reshape(rows, 1, top_k)
    with tracefile.TraceWriter(path, num_layers=1, top_k=top_k, num_experts=num_experts) as writer:
        experts = writer.append("a", ids)
    assert experts.config.dtype == dtype
    assert bool(experts.valid.all())
    np.testing.assert_array_equal(experts.numpy(), ids)


def test_rows_of_nothing_but_the_largest_id_are_not_missing(path: str) -> None:
    ids = np.full((9, 2, 2), 255, np.uint8)
    with tracefile.TraceWriter(path, num_layers=2, top_k=2, num_experts=256) as writer:
        experts = writer.append("a", ids)
    assert bool(experts.valid.all())
    np.testing.assert_array_equal(experts.numpy(), ids)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("name", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
@pytest.mark.parametrize("num_experts", [100, 128, 200, 256, 300])
def test_numpy_input_dtypes(path: str, rng: np.random.Generator, num_experts: int, name: str, order: str) -> None:
    dtype = np.dtype(order + name)
    largest = min(num_experts - 1, int(np.iinfo(dtype).max))
    ids = rng.integers(0, largest + 1, (70, 5, 3))
    ids[0, 0, 0], ids[-1, -1, -1] = 0, largest
    given = ids.astype(dtype)
    before = given.copy()
    with tracefile.TraceWriter(path, num_layers=5, top_k=3, num_experts=num_experts, rows_per_chunk=32) as writer:
        experts = writer.append("a", given)
    np.testing.assert_array_equal(experts.numpy(), ids)
    np.testing.assert_array_equal(given, before)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("name", ["i1", "i2", "i4", "i8"])
@pytest.mark.parametrize("num_experts", [100, 256, 300])
def test_rows_of_minus_one_are_missing_in_every_signed_dtype(
    path: str, rng: np.random.Generator, num_experts: int, name: str, order: str
) -> None:
    ids = rng.integers(0, 100, (70, 5, 3)).astype(order + name)
    # at both ends, across the chunk boundary at row 32, and a single one
    holes = [0, 1, 30, 31, 32, 33, 50, 69]
    ids[holes] = -1
    with tracefile.TraceWriter(path, num_layers=5, top_k=3, num_experts=num_experts, rows_per_chunk=32) as writer:
        writer.append("a", ids)
    experts = tracefile.open(path)["a"]
    assert (~experts.valid).nonzero().ravel().tolist() == holes
    assert tracefile.open(path).entry("a").missing == ((0, 2), (30, 34), (50, 51), (69, 70))
    np.testing.assert_array_equal(experts.filled("minus_one").numpy(), ids)
    with pytest.raises(tracefile.MissingRowsError):
        experts.numpy()
    np.testing.assert_array_equal(experts[2:30].numpy(), ids[2:30])


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.uint16,
        torch.int32,
        torch.uint32,
        torch.int64,
        torch.uint64,
    ],
    ids=str,
)
def test_torch_input_dtypes(path: str, rng: np.random.Generator, dtype: torch.dtype) -> None:
    ids = _small_ids(rng, 33)
    with tracefile.TraceWriter(path, **SMALL) as writer:
        experts = writer.append("a", torch.from_numpy(ids).to(dtype))
    np.testing.assert_array_equal(experts.numpy(), ids)


def _transposed(ids: Array) -> Array:
    """Made as ``[top_k, layers, tokens]``, seen as ``[tokens, layers, top_k]``."""
    return np.ascontiguousarray(ids.T).T


def _with_negative_strides(ids: Array) -> Array:
    return np.ascontiguousarray(ids[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]


def _every_other_row(ids: Array) -> Array:
    wide = np.full((2 * len(ids), *ids.shape[1:]), 99, ids.dtype)
    wide[::2] = ids
    return wide[::2]


def _some_layers_of_more(ids: Array) -> Array:
    wide = np.full((len(ids), ids.shape[1] + 4, ids.shape[2]), 99, ids.dtype)
    wide[:, 2:-2] = ids
    return wide[:, 2:-2]


def _some_slots_of_more(ids: Array) -> Array:
    wide = np.full((*ids.shape[:2], 2 * ids.shape[2]), 99, ids.dtype)
    wide[:, :, 1::2] = ids
    return wide[:, :, 1::2]


def _read_only(ids: Array) -> Array:
    ids = ids.copy()
    ids.flags.writeable = False
    return ids


def _unaligned(ids: Array) -> Array:
    raw = np.zeros(ids.nbytes + 1, np.uint8)
    view = raw[1:].view(ids.dtype).reshape(ids.shape)
    view[...] = ids
    return view


def _flat_not_contiguous(ids: Array) -> Array:
    wide = np.full((len(ids), 2 * ids[0].size), 99, ids.dtype)
    wide[:, ::2] = ids.reshape(len(ids), -1)
    return wide[:, ::2]


def _memory_mapped(ids: Array) -> Array:
    with tempfile.NamedTemporaryFile() as file:
        mapped = np.memmap(file.name, ids.dtype, "w+", shape=ids.shape)
        mapped[...] = ids
        return mapped


_LAYOUTS: dict[str, Callable[[Array], Any]] = {
    "fortran order": np.asfortranarray,
    "transposed": _transposed,
    "negative strides": _with_negative_strides,
    "every other row": _every_other_row,
    "some layers of more": _some_layers_of_more,
    "some slots of more": _some_slots_of_more,
    "one row, broadcast": lambda ids: np.broadcast_to(ids[:1], ids.shape),
    "read-only": _read_only,
    "unaligned": _unaligned,
    "memory-mapped": _memory_mapped,
    "flat": lambda ids: ids.reshape(len(ids), -1),
    "flat, not contiguous": _flat_not_contiguous,
    "list": lambda ids: ids.tolist(),
    "flat list": lambda ids: ids.reshape(len(ids), -1).tolist(),
    "tuple": lambda ids: tuple(map(tuple, ids.tolist())),
    "list of arrays": lambda ids: list(ids),
}


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64])
@pytest.mark.parametrize("layout", list(_LAYOUTS))
def test_input_layouts(path: str, rng: np.random.Generator, layout: str, dtype: Any) -> None:
    given = _LAYOUTS[layout](_small_ids(rng, 77, dtype))
    expected = np.array(given).reshape(77, 5, 3)
    with tracefile.TraceWriter(path, **SMALL, rows_per_chunk=32) as writer:
        experts = writer.append("a", given)
    np.testing.assert_array_equal(experts.numpy(), expected)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
        lambda t: torch.cat([t, t])[: len(t)],
        lambda t: torch.stack([t, t], dim=-1)[..., 0],
        lambda t: t.flatten(1),
        lambda t: t[:1].expand(t.shape),
        lambda t: t.flip(0).flip(0),
    ],
    ids=["transposed", "part", "strided", "flat", "expanded", "flipped"],
)
def test_torch_layouts(path: str, rng: np.random.Generator, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    given = view(torch.from_numpy(_small_ids(rng, 77)))
    with tracefile.TraceWriter(path, **SMALL) as writer:
        experts = writer.append("a", given)
    np.testing.assert_array_equal(experts.numpy(), given.reshape(77, 5, 3).numpy())


def test_a_lazy_tensor_can_be_appended(path: str, rng: np.random.Generator) -> None:
    ids = _small_ids(rng, 50)
    with tracefile.TraceWriter(path, **SMALL) as writer:
        first = writer.append("a", ids)
        second = writer.append("b", first[10:20])
    np.testing.assert_array_equal(second.numpy(), ids[10:20])


def test_order_within_top_k_is_kept(path: str) -> None:
    ids = np.array([[[9, 3, 7]] * 5, [[7, 9, 3]] * 5, [[3, 3, 3]] * 5])
    with tracefile.TraceWriter(path, **SMALL) as writer:
        experts = writer.append("a", ids)
    np.testing.assert_array_equal(experts.numpy(), ids)


def test_the_caller_may_reuse_its_array(path: str, rng: np.random.Generator) -> None:
    ids = _small_ids(rng, 40)
    buffer = ids.copy()
    with tracefile.TraceWriter(path, **SMALL) as writer:
        experts = writer.append("a", buffer)
        buffer[...] = 0
        np.testing.assert_array_equal(experts.numpy(), ids)


@pytest.mark.parametrize("codec", ["fast", "compact", "none"])
@pytest.mark.parametrize("shape", [MODEL_SHAPES[0], MODEL_SHAPES[-1]], ids=lambda shape: shape.name)
def test_sources_give_the_same(path: str, shape: Shape, codec: str) -> None:
    samples = {name: ids_of(name, rows, *shape[1:]) for name, rows in (("a", 900), ("b", 1), ("c", 2049))}
    with tracefile.TraceWriter(path, **_config(shape), codec=codec, rows_per_chunk=128) as writer:
        writer.append_many(samples.items())
    for source in ("mmap", "pread", "auto"):
        trace = tracefile.open(path, source=source)
        for sample, ids in samples.items():
            np.testing.assert_array_equal(trace[sample].numpy(), ids)
            np.testing.assert_array_equal(trace[sample][len(ids) // 2 :, 1:3].numpy(), ids[len(ids) // 2 :, 1:3])


@pytest.mark.parametrize("cache_bytes", [0, 3000, 64 * 1024 * 1024])
@pytest.mark.parametrize("threads", [1, 4])
def test_cache_and_threads_change_nothing(path: str, cache_bytes: int, threads: int) -> None:
    ids = ids_of("a", 3000, **SMALL)
    with tracefile.TraceWriter(path, **SMALL, layers_per_chunk=2, rows_per_chunk=64) as writer:
        experts = writer.append("a", ids)
    tracefile.configure(cache_bytes=cache_bytes, decode_threads=threads)
    for _ in range(2):
        np.testing.assert_array_equal(experts.numpy(), ids)
        for layer in range(5):
            np.testing.assert_array_equal(experts[100:2900, layer].numpy(), ids[100:2900, layer])


def test_many_samples_in_one_segment(path: str, rng: np.random.Generator) -> None:
    samples = {f"prompt-{i}/{i % 7}": _small_ids(rng, int(n)) for i, n in enumerate(rng.integers(0, 150, 300))}
    samples |= {"": _small_ids(rng, 3), "日本/é\n\0": _small_ids(rng, 4), "a" * 5000: _small_ids(rng, 5)}
    with tracefile.TraceWriter(path, **SMALL, rows_per_chunk=32) as writer:
        returned = writer.append_many((sample, ids) for sample, ids in samples.items())
    trace = tracefile.open(path)
    assert len(trace.segments) == 1
    assert list(trace) == list(samples)
    for experts, (sample, ids) in zip(returned, samples.items(), strict=True):
        np.testing.assert_array_equal(experts.numpy(), ids)
        np.testing.assert_array_equal(trace[sample].numpy(), ids)


def test_append_many_of_nothing_writes_nothing(path: str) -> None:
    with tracefile.TraceWriter(path, **SMALL) as writer:
        assert writer.append_many([]) == []
    assert tracefile.open(path).segments == {}


def test_layer_ids(path: str, rng: np.random.Generator) -> None:
    ids = _small_ids(rng, 20)
    wanted = (3, 4, 7, 60, 61)
    with tracefile.TraceWriter(path, **SMALL, layer_ids=wanted) as writer:
        experts = writer.append("a", ids)
    trace = tracefile.open(path)
    assert trace.config.layer_ids == experts.layer_ids == trace["a"].layer_ids == wanted
    assert trace["a"][:, 1:4].layer_ids == (4, 7, 60)
    np.testing.assert_array_equal(trace["a"].numpy(), ids)
    for given in (np.array(wanted), torch.tensor(wanted), list(wanted)):  # the same configuration, however given
        tracefile.TraceWriter(path, **SMALL, layer_ids=given).close()


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("layers_per_chunk", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("rows_per_chunk", [1, 7, 8, 4096])
def test_geometries(
    path: str, rng: np.random.Generator, layers_per_chunk: int, rows_per_chunk: int, durable: bool
) -> None:
    samples = {"a": _small_ids(rng, 41), "b": _small_ids(rng, 8), "c": _small_ids(rng, 1)}
    with tracefile.TraceWriter(
        path, **SMALL, layers_per_chunk=layers_per_chunk, rows_per_chunk=rows_per_chunk, durable=durable
    ) as writer:
        writer.append_many(samples.items())
    for sample, ids in samples.items():
        np.testing.assert_array_equal(tracefile.open(path)[sample].numpy(), ids)


def _outs(rows: int) -> dict[str, Callable[[], torch.Tensor]]:
    """Tensors ``[rows, 5, 3]`` to read into, of every kind of memory."""
    return {
        "stored width": lambda: torch.zeros(rows, 5, 3, dtype=torch.uint8),
        "stored width, layer by layer": lambda: torch.zeros(5, rows, 3, dtype=torch.uint8).transpose(0, 1),
        "wider": lambda: torch.zeros(rows, 5, 3, dtype=torch.int64),
        "wider, layer by layer": lambda: torch.zeros(5, rows, 3, dtype=torch.int32).transpose(0, 1),
        "floating point": lambda: torch.zeros(rows, 5, 3, dtype=torch.float32),
        "part of rows": lambda: torch.zeros(rows + 4, 5, 3, dtype=torch.uint8)[2:-2],
        "part of layers": lambda: torch.zeros(rows, 9, 3, dtype=torch.uint8)[:, 2:-2],
        "part of layers, layer by layer": lambda: torch.zeros(9, rows, 3, dtype=torch.uint8)[2:-2].transpose(0, 1),
        "part of slots": lambda: torch.zeros(rows, 5, 6, dtype=torch.uint8)[:, :, ::2],
        "every other row": lambda: torch.zeros(2 * rows, 5, 3, dtype=torch.int16)[::2],
    }


@pytest.mark.parametrize("kind", list(_outs(1)))
def test_reading_into_a_tensor(path: str, rng: np.random.Generator, kind: str) -> None:
    ids = _small_ids(rng, 101)
    with tracefile.TraceWriter(path, **SMALL, layers_per_chunk=2, rows_per_chunk=32) as writer:
        experts = writer.append("a", ids)
    out = _outs(101)[kind]()
    assert experts.materialize(out=out) is out
    np.testing.assert_array_equal(out.numpy(), ids)
    # nothing beside it was touched
    base = out if out._base is None else out._base
    assert int(torch.count_nonzero(base)) == int(np.count_nonzero(ids))


def test_reading_one_layer_into_a_tensor(path: str, rng: np.random.Generator) -> None:
    ids = _small_ids(rng, 101)
    with tracefile.TraceWriter(path, **SMALL) as writer:
        experts = writer.append("a", ids)
    for dtype in (torch.uint8, torch.int64):
        out = torch.zeros(101, 3, dtype=dtype)
        experts[:, 2].materialize(out=out)
        np.testing.assert_array_equal(out.numpy(), ids[:, 2])


def test_a_tensor_of_another_shape_is_refused(path: str, rng: np.random.Generator) -> None:
    with tracefile.TraceWriter(path, **SMALL) as writer:
        experts = writer.append("a", _small_ids(rng, 10))
    for shape in ((10, 5, 4), (11, 5, 3), (10, 15), (1, 10, 5, 3)):
        with pytest.raises(tracefile.RoutedExpertsShapeError):
            experts.materialize(out=torch.zeros(shape, dtype=torch.uint8))


def _real_traces() -> list[str]:
    names = sorted(glob.glob("*.npz", root_dir=REAL_TRACES))
    return [name for name in names if "ids.npy" in zipfile.ZipFile(os.path.join(REAL_TRACES, name)).namelist()]


@pytest.mark.skipif(not _real_traces(), reason=f"no real routing at {os.path.normpath(REAL_TRACES)}")
@pytest.mark.parametrize("codec", ["fast", "compact", "none"])
@pytest.mark.parametrize("name", _real_traces())
def test_real_routing(path: str, name: str, codec: str) -> None:
    with np.load(os.path.join(REAL_TRACES, name)) as data:
        ids, num_experts = data["ids"], int(data["num_experts"])
        lengths = data["seq_len"].tolist() if "seq_len" in data else [len(ids)]
    samples, start = {}, 0
    for i, length in enumerate(lengths):
        samples[f"sequence-{i}"] = ids[start : start + length]
        start += length
    with tracefile.TraceWriter(
        path, num_layers=ids.shape[1], top_k=ids.shape[2], num_experts=num_experts, codec=codec
    ) as writer:
        writer.append_many(samples.items())
    trace = tracefile.open(path)
    for sample, values in samples.items():
        np.testing.assert_array_equal(trace[sample].numpy(), values)
    if codec != "none":
        (header,) = trace.segments.values()
        assert header.shard_bytes < ids.nbytes


@pytest.mark.parametrize("codec", ["fast", "compact"])
def test_codecs_compress(path: str, rng: np.random.Generator, codec: str) -> None:
    """Ids of 64 experts need six bits of the eight."""
    ids = random_routing(rng, 4096, 12, 4, 64)
    with tracefile.TraceWriter(path, num_layers=12, top_k=4, num_experts=64, codec=codec) as writer:
        writer.append("a", ids)
    (segment,) = tracefile.open(path).segments.values()
    assert segment.shard_bytes < 0.78 * ids.size
