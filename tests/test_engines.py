"""Every engine's form, written here anew from what its server does, comes back as the rows that went in."""

from __future__ import annotations

import base64
import glob
import io
import os
import pickle
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from support import MODEL_SHAPES, Shape, ids_of, random_routing

import tracefile
from tracefile.engines import EngineName, EngineRows, decode
from tracefile.errors import EngineOutputError

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]

#: Not in the repository; present where the project is developed.
REAL_TRACES = os.path.join(os.path.dirname(__file__), "..", "..", "shared", "traces")
CONFIG = tracefile.ModelConfig(num_layers=5, top_k=3, num_experts=100)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def npy(ids: Array) -> bytes:
    file = io.BytesIO()
    np.save(file, ids)
    return file.getvalue()


def unsigned(ids: Array, num_experts: int) -> Array:
    return ids.astype("<u1" if num_experts <= 256 else "<u2")


def nemo_rl_text(ids: Array, num_experts: int) -> str:
    """A row for every token; the last one's is filled in."""
    name, code = ("int8", "b") if num_experts <= 128 else ("int16", "h")
    filler = np.broadcast_to(np.arange(ids.shape[2]), (1, *ids.shape[1:]))
    rows = np.concatenate([ids, filler])
    data = struct.pack(f"<{rows.size}{code}", *rows.ravel().tolist())
    return f"nrlre1:{name}:{'x'.join(map(str, rows.shape))}:{b64(data)}"


def skyrl_envelope(ids: Array) -> dict[str, Any]:
    largest = int(ids.max(initial=0))
    dtype = "uint8" if largest < 2**8 else "int16" if largest < 2**15 else "int32"
    return {"data": b64(ids.astype(dtype).tobytes()), "shape": list(ids.shape), "dtype": dtype}


def prime_rl_envelope(ids: Array, num_experts: int) -> dict[str, Any]:
    narrow = unsigned(ids, num_experts)
    return {"data": b64(narrow.tobytes()), "shape": list(ids.shape), "start": 0, "dtype": narrow.dtype.name}


class Form(NamedTuple):
    name: str
    engine: EngineName
    encode: Callable[[Array, int], Any]


FORMS = [
    Form("sglang-text", "sglang", lambda ids, experts: b64(ids.astype("<i4").tobytes())),
    Form("sglang-bytes", "sglang", lambda ids, experts: base64.b64encode(ids.astype("<i4").tobytes())),
    Form("sglang-memoryview", "sglang", lambda ids, experts: memoryview(base64.b64encode(ids.astype("<i4").tobytes()))),
    Form(
        "sglang-meta-info",
        "sglang",
        lambda ids, experts: {"routed_experts": b64(ids.astype("<i4").tobytes()), "prompt_tokens": 3},
    ),
    Form(
        "sglang-narrow",
        "sglang",
        lambda ids, experts: {
            "routed_experts": b64(unsigned(ids, experts).tobytes()),
            "routed_experts_dtype": unsigned(ids, experts).dtype.name,
        },
    ),
    Form("sglang-tensor", "sglang", lambda ids, experts: torch.from_numpy(ids.astype(np.int32))),
    Form("sglang-flat-tensor", "sglang", lambda ids, experts: torch.from_numpy(ids.astype(np.int32)).ravel()),
    Form(
        "sglang-2d", "sglang", lambda ids, experts: ids.astype(np.int32).reshape(len(ids), ids.shape[1] * ids.shape[2])
    ),
    Form("vllm-array", "vllm", unsigned),
    Form("vllm-npy", "vllm", lambda ids, experts: b64(npy(unsigned(ids, experts)))),
    Form("vllm-choice", "vllm", lambda ids, experts: {"routed_experts": b64(npy(ids.astype(np.int32))), "index": 0}),
    Form("vllm-envelope", "vllm", prime_rl_envelope),
    Form("lmdeploy-array", "lmdeploy", lambda ids, experts: ids.astype(np.uint16)),
    Form("lmdeploy-lists", "lmdeploy", lambda ids, experts: {"routed_experts": ids.tolist()}),
    Form("megatron-array", "megatron", lambda ids, experts: ids.astype(np.int16)),
    Form("megatron-http", "megatron", lambda ids, experts: ["ndarray", {"data": ids.tolist(), "dtype": "int16"}]),
    Form("megatron-lists", "megatron", lambda ids, experts: ids.tolist()),
    Form("nemo-rl-text", "nemo-rl", nemo_rl_text),
    Form("nemo-rl-bytes", "nemo-rl", lambda ids, experts: nemo_rl_text(ids, experts).encode()),
    Form("skyrl-envelope", "skyrl", lambda ids, experts: skyrl_envelope(ids)),
    Form("skyrl-array", "skyrl", lambda ids, experts: ids.astype(np.int16)),
]
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)


def small_ids(rows: int) -> Array:
    return ids_of("a", rows, CONFIG.num_layers, CONFIG.top_k, CONFIG.num_experts)


def buffer_of(array: Array) -> object:
    """What owns an array's memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.base


@every_form
@pytest.mark.parametrize("shape", MODEL_SHAPES, ids=lambda shape: shape.name)
def test_every_form_and_model_shape(rng: np.random.Generator, shape: Shape, form: Form) -> None:
    config = tracefile.ModelConfig(*shape[1:])
    for rows in (37, 1, 0):
        ids = random_routing(rng, rows, *shape[1:])
        decoded = decode(form.encode(ids, shape.num_experts), form.engine, config=config, num_tokens=rows + 1)
        np.testing.assert_array_equal(decoded.rows, ids)
        assert decoded.rows.dtype.kind in "iu"
        assert (decoded.start, decoded.stop, decoded.missing) == (0, rows, ())


@every_form
def test_without_the_number_of_tokens(form: Form) -> None:
    ids = small_ids(20)
    decoded = decode(form.encode(ids, CONFIG.num_experts), form.engine, config=CONFIG)
    np.testing.assert_array_equal(decoded.rows, ids)


@every_form
def test_a_wrong_number_of_rows_is_noticed(form: Form) -> None:
    output = form.encode(small_ids(20), CONFIG.num_experts)
    for num_tokens in (0, 1, 19, 23):
        if form.engine == "skyrl" and num_tokens == 23:
            continue  # a prefix
        with pytest.raises(EngineOutputError, match=f"of {num_tokens} tokens; got 2[01] rows") as caught:
            decode(output, form.engine, config=CONFIG, num_tokens=num_tokens)
        assert caught.value.engine == form.engine  # type: ignore[attr-defined]


@every_form
def test_what_is_decoded_can_be_appended(path: str, form: Form) -> None:
    ids = small_ids(50)
    with tracefile.TraceWriter(path, num_layers=5, top_k=3, num_experts=100, rows_per_chunk=16) as writer:
        output = form.encode(ids, CONFIG.num_experts)
        writer.append("a", decode(output, form.engine, config=writer.config, num_tokens=51).rows)
    np.testing.assert_array_equal(tracefile.open(path)["a"].numpy(), ids)


def real_traces() -> list[Any]:
    files = sorted(glob.glob(os.path.join(REAL_TRACES, "*.npz")))
    marks = () if files else pytest.mark.skip(reason="no real traces here (shared/traces)")
    return [pytest.param(file, id=os.path.basename(file)) for file in files] or [pytest.param("", marks=marks)]


@pytest.mark.parametrize("file", real_traces())
def test_real_traces_through_every_form_and_back(path: str, file: str) -> None:
    with np.load(file) as data:
        if "ids" not in data:
            pytest.skip("a table of loads, not a trace")
        ids, num_experts = data["ids"], int(data["num_experts"])
        lengths = data["seq_len"].tolist() if "seq_len" in data else [400, 2000]
    sequences = np.split(ids, np.cumsum(lengths))[:-1]
    sequences = [sequence[:400] for sequence in sequences if len(sequence)][:3]
    with tracefile.TraceWriter(path, num_layers=ids.shape[1], top_k=ids.shape[2], num_experts=num_experts) as writer:
        for form in FORMS:
            for number, sequence in enumerate(sequences):
                output = form.encode(sequence, num_experts)
                decoded = decode(output, form.engine, config=writer.config, num_tokens=len(sequence) + 1)
                assert decoded.missing == ()
                writer.append(f"{form.name}/{number}", decoded.rows)
    trace = tracefile.open(path)
    for form in FORMS:
        for number, sequence in enumerate(sequences):
            np.testing.assert_array_equal(trace[f"{form.name}/{number}"].numpy(), sequence)


# Where rows begin


@pytest.mark.parametrize("said_by", ["meta_info", "request", "both"])
def test_sglang_starts_where_it_was_asked_to(said_by: str) -> None:
    ids = small_ids(30)
    meta_info: dict[str, Any] = {"routed_experts": b64(ids[12:].astype("<i4").tobytes())}
    if said_by != "request":
        meta_info["routed_experts_start_len"] = 12
    start = {"meta_info": None, "request": 12, "both": 5}[said_by]
    decoded = decode(meta_info, "sglang", config=CONFIG, num_tokens=31, start=start)
    assert (decoded.start, decoded.stop) == (12, 30)
    np.testing.assert_array_equal(decoded.rows, ids[12:])


@pytest.mark.parametrize("start", [1, 12, 29, 30, 31, 500])
def test_sglang_that_ignores_the_start_is_told_by_its_rows(start: int) -> None:
    ids = small_ids(30)
    decoded = decode(torch.from_numpy(ids), "sglang", config=CONFIG, num_tokens=31, start=start)
    assert (decoded.start, decoded.stop) == (0, 30)
    np.testing.assert_array_equal(decoded.rows, ids)


@pytest.mark.parametrize("start", [30, 31, 500])
def test_sglang_moves_a_start_beyond_the_end_to_the_end(start: int) -> None:
    decoded = decode("", "sglang", config=CONFIG, num_tokens=31, start=start)
    assert (decoded.start, decoded.stop) == (30, 30)


def test_the_start_of_a_vllm_envelope_goes_before_the_requests() -> None:
    ids = small_ids(30)
    envelope = prime_rl_envelope(ids[9:], 100) | {"start": 9}
    assert decode(envelope, "vllm", config=CONFIG, num_tokens=31, start=4).start == 9
    del envelope["start"]
    assert decode(envelope, "vllm", config=CONFIG, num_tokens=31, start=9).start == 9
    assert decode(b64(npy(ids[9:])), "vllm", config=CONFIG, num_tokens=31, start=9).stop == 30


def test_the_oldest_vllm_envelope_has_no_dtype_and_is_uint8() -> None:
    ids = small_ids(30)
    envelope = {"data": b64(ids.astype(np.uint8).tobytes()), "shape": [30, 5, 3]}
    np.testing.assert_array_equal(decode(envelope, "vllm", config=CONFIG, num_tokens=31).rows, ids)


@pytest.mark.parametrize("engine", ["vllm", "skyrl", "nemo-rl"])
def test_a_row_for_the_last_token_is_left_out(engine: EngineName) -> None:
    ids = small_ids(31)
    decoded = decode(ids, engine, config=CONFIG, num_tokens=31)
    np.testing.assert_array_equal(decoded.rows, ids[:30])
    assert np.shares_memory(decoded.rows, ids)


def test_no_tokens_no_rows() -> None:
    assert len(decode(small_ids(0), "vllm", config=CONFIG, num_tokens=0).rows) == 0
    with pytest.raises(EngineOutputError, match=r"expected 0 rows, \[0, 0\) of 0 tokens; got 1 rows"):
        decode(small_ids(1), "vllm", config=CONFIG, num_tokens=0)


def test_skyrl_may_return_a_prefix() -> None:
    ids = small_ids(12)
    decoded = decode(skyrl_envelope(ids), "skyrl", config=CONFIG, num_tokens=31)
    np.testing.assert_array_equal(decoded.rows, ids)
    assert decoded.stop == 12


# Rows that were not captured


def test_rows_of_minus_one_are_reported_and_become_missing(path: str) -> None:
    ids = small_ids(40)
    ids[[0, 1, 17, 38, 39]] = -1
    for number, output in enumerate(
        (b64(ids[8:].astype("<i4").tobytes()), torch.from_numpy(ids[8:]), ids[8:].astype(">i2"))
    ):
        decoded = decode(output, "sglang" if number < 2 else "megatron", config=CONFIG, num_tokens=41, start=8)
        assert decoded.missing == ((17, 18), (38, 40))
    text = nemo_rl_text(ids, 100)
    decoded = decode(text, "nemo-rl", config=CONFIG)
    assert (decoded.missing, decoded.rows.dtype) == (((0, 2), (17, 18), (38, 40)), np.int8)
    with tracefile.TraceWriter(path, num_layers=5, top_k=3, num_experts=100) as writer:
        writer.append("a", decoded.rows)
    assert tracefile.open(path).entry("a").missing == decoded.missing


def test_sglang_leaves_dense_layers_zero_in_rows_that_it_did_not_capture(path: str) -> None:
    ids = small_ids(40)
    ids[:, :2] = 0
    whole = ids.copy()
    ids[5:9, 2:] = -1
    before = ids.copy()
    decoded = decode(ids, "sglang", config=CONFIG, num_tokens=41)
    np.testing.assert_array_equal(ids, before)
    assert decoded.missing == ((5, 9),)
    assert (decoded.rows[5:9] == -1).all()
    np.testing.assert_array_equal(np.delete(decoded.rows, slice(5, 9), 0), np.delete(whole, slice(5, 9), 0))
    with tracefile.TraceWriter(path, num_layers=5, top_k=3, num_experts=100) as writer:
        assert (~writer.append("a", decoded.rows).valid).nonzero().ravel().tolist() == [5, 6, 7, 8]


def test_a_row_that_is_minus_one_in_part_is_left_to_the_writer(path: str) -> None:
    ids = small_ids(10)
    ids[3, 2:] = -1  # but layers 0 and 1 were captured
    ids[3, :2] = [[4, 5, 6], [0, 1, 2]]
    decoded = decode(ids, "sglang", config=CONFIG)
    assert decoded.missing == ()
    with (
        tracefile.TraceWriter(path, num_layers=5, top_k=3, num_experts=100) as writer,
        pytest.raises(tracefile.ExpertIdError, match="token 3, layer 2"),
    ):
        writer.append("a", decoded.rows)


def test_with_one_expert_a_token_zeros_may_be_routing() -> None:
    config = tracefile.ModelConfig(num_layers=3, top_k=1, num_experts=4)
    ids = np.array([[[0], [0], [-1]], [[-1], [-1], [-1]]], np.int32)
    assert decode(ids, "sglang", config=config).missing == ((1, 2),)
    lmdeploy = np.array([[[65535], [2], [3]], [[65535], [65535], [65535]]], np.uint16)
    decoded = decode(lmdeploy, "lmdeploy", config=config)
    assert (decoded.rows.tolist(), decoded.missing) == ([[[0], [2], [3]], [[-1], [-1], [-1]]], ((1, 2),))


def test_a_layer_that_lmdeploy_captured_for_some_tokens_is_not_dense() -> None:
    ids = small_ids(20).astype(np.uint16)
    ids[0, 1] = 65535
    assert (decode(ids, "lmdeploy", config=CONFIG).rows[0, 1] == -1).all()


def test_unsigned_rows_are_never_missing() -> None:
    config = tracefile.ModelConfig(num_layers=2, top_k=2, num_experts=256)
    assert decode(np.full((4, 2, 2), 255, np.uint8), "vllm", config=config).missing == ()


@pytest.mark.parametrize("as_lists", [False, True])
def test_lmdeploys_mark_of_nothing_captured(path: str, as_lists: bool) -> None:
    """GLM's dense layers are 65535 with LMDeploy."""
    ids = small_ids(20)
    ids[:, :2] = 0
    output = ids.astype(np.uint16)
    output[:, :2] = 65535
    output[[6, 7, 19]] = 65535
    decoded = decode(output.tolist() if as_lists else output, "lmdeploy", config=CONFIG, num_tokens=21)
    assert decoded.missing == ((6, 8), (19, 20))
    with tracefile.TraceWriter(path, num_layers=5, top_k=3, num_experts=100) as writer:
        filled = writer.append("a", decoded.rows).filled("minus_one")
    ids[[6, 7, 19]] = -1
    np.testing.assert_array_equal(filled.numpy(), ids)


def test_lmdeploy_with_more_experts_than_int16_holds() -> None:
    config = tracefile.ModelConfig(num_layers=2, top_k=2, num_experts=60_000)
    ids = np.array([[[59_999, 1], [40_000, 2]]], np.uint16)
    np.testing.assert_array_equal(decode(ids, "lmdeploy", config=config).rows, ids)


# Layers


def moe_only(*layer_ids: int) -> tracefile.ModelConfig:
    return tracefile.ModelConfig(num_layers=len(layer_ids), top_k=3, num_experts=100, layer_ids=layer_ids)


@pytest.mark.parametrize("engine", ["sglang", "vllm", "lmdeploy", "skyrl"])
def test_a_trace_of_moe_layers_takes_a_view_of_all_layers(engine: EngineName) -> None:
    ids = small_ids(20).astype(np.uint16)
    decoded = decode(ids, engine, config=moe_only(2, 3, 4), layer_ids=range(5), num_tokens=21)
    np.testing.assert_array_equal(decoded.rows, ids[:, 2:])
    assert np.shares_memory(decoded.rows, ids)


def test_layers_go_by_global_id_in_the_traces_order() -> None:
    ids = small_ids(20)
    decoded = decode(ids, "vllm", config=moe_only(13, 10, 12), layer_ids=[10, 11, 12, 13, 14])
    np.testing.assert_array_equal(decoded.rows, ids[:, [3, 0, 2]])


def test_megatron_returns_moe_layers_only() -> None:
    ids = small_ids(20)
    np.testing.assert_array_equal(decode(ids, "megatron", config=moe_only(3, 4, 5, 6, 7)).rows, ids)
    everything = tracefile.ModelConfig(num_layers=9, top_k=3, num_experts=100)
    with pytest.raises(EngineOutputError, match=r"shape \[rows, 9, 3\]; got shape \[20, 5, 3\] .*layer_ids"):
        decode(ids, "megatron", config=everything)
    ids[4:6] = -1
    decoded = decode(ids, "megatron", config=everything, layer_ids=range(3, 8))
    expected = np.zeros((20, 9, 3), np.int32)
    expected[:, 3:8] = ids
    expected[4:6] = -1
    np.testing.assert_array_equal(decoded.rows, expected)
    assert (decoded.missing, decoded.rows.dtype) == (((4, 6),), ids.dtype)


@pytest.mark.parametrize("layer_ids", [[], [0, 1, 1, 2, 3, 4], [-1, 0, 1, 2, 3, 4], ["a"], [0.5], [3, 4, 5]])
def test_layers_that_make_no_sense(layer_ids: list[Any]) -> None:
    with pytest.raises(tracefile.OptionError, match="layer"):
        decode(small_ids(3), "vllm", config=CONFIG, layer_ids=layer_ids)


# Nothing is copied that need not be


@pytest.mark.parametrize(
    "form", [form for form in FORMS if form.name.endswith(("tensor", "2d", "array"))], ids=lambda form: form.name
)
def test_arrays_and_tensors_are_not_copied(form: Form) -> None:
    output = form.encode(small_ids(20), CONFIG.num_experts)
    decoded = decode(output, form.engine, config=CONFIG, num_tokens=21)
    assert np.shares_memory(decoded.rows, np.asarray(output))


@pytest.mark.parametrize("name", ["sglang-text", "sglang-narrow", "vllm-npy", "vllm-envelope", "nemo-rl-text"])
def test_decoded_text_is_not_copied_again(name: str) -> None:
    form = next(form for form in FORMS if form.name == name)
    rows = decode(form.encode(small_ids(20), 100), form.engine, config=CONFIG, num_tokens=21).rows
    assert isinstance(buffer_of(rows), bytes)
    assert not rows.flags.writeable


@pytest.mark.parametrize("dtype", ["<i4", ">i4", ">u2", "|i1", "<i8"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_npy_of_either_order_and_version(dtype: str, order: Any, version: tuple[int, int]) -> None:
    ids = np.asarray(small_ids(20).astype(dtype), order=order)
    file = io.BytesIO()
    np.lib.format.write_array(file, ids, version=version)
    rows = decode(b64(file.getvalue()), "vllm", config=CONFIG, num_tokens=21).rows
    np.testing.assert_array_equal(rows, ids)
    assert (rows.dtype, rows.strides) == (ids.dtype, ids.strides)
    assert isinstance(buffer_of(rows), bytes)


# What is said about it


def test_the_repr_says_what_it_is() -> None:
    ids = small_ids(20)
    ids[3] = -1
    decoded = decode(ids, "sglang", config=CONFIG, start=10)
    assert repr(decoded) == "<EngineRows 20 x 5 x 3 int32, rows [10, 30), missing [(13, 14)]>"
    assert isinstance(decoded, EngineRows)


def test_the_error_pickles_with_what_it_knows() -> None:
    with pytest.raises(EngineOutputError) as caught:
        decode("AAAA", "sglang", config=CONFIG)
    again: Any = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, tracefile.TraceError)
    assert isinstance(again, ValueError)
    assert (str(again), again.engine, again.got) == (str(caught.value), "sglang", "3 bytes, 0.05 rows")
    assert again.expected == "a multiple of 60 bytes (int32 [rows, 5, 3])"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "SGLang"}, "engine must be one of sglang, vllm"),
        ({"engine": ["vllm"]}, "engine must be one of"),
        ({"num_tokens": -1}, "num_tokens must be"),
        ({"num_tokens": 2.0}, "num_tokens must be"),
        ({"start": -3}, "start must be"),
        ({"start": True}, "start must be"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    arguments = {"engine": "vllm"} | options
    with pytest.raises(tracefile.OptionError, match=message):
        decode(small_ids(3), config=CONFIG, **arguments)
