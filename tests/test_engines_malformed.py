"""Engine outputs that are not what they should be: one error that says so, nothing unpickled, nothing misread."""

from __future__ import annotations

import base64
import copy
import io
import pickle
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engines import CONFIG, FORMS, Form, b64, npy, small_ids

import tracefile
from tracefile.engines import EngineName, decode
from tracefile.engines.forms import ENGINE_NAMES
from tracefile.errors import EngineOutputError

IDS = small_ids(6)
INT32 = b64(IDS.astype("<i4").tobytes())
ENVELOPE = {"data": b64(IDS.astype("<u1").tobytes()), "shape": [6, 5, 3], "dtype": "uint8", "start": 0}
NEMO_RL = f"nrlre1:int8:6x5x3:{b64(IDS.astype('i1').tobytes())}"


def npy_with(header: str, data: bytes = IDS.astype("<i4").tobytes(), version: bytes = b"\x01\x00") -> str:
    width = 2 if version[0] == 1 else 4
    return b64(b"\x93NUMPY" + version + len(header).to_bytes(width, "little") + header.encode("latin-1") + data)


def header(descr: str = "'<i4'", fortran: str = "False", shape: str = "(6, 5, 3)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n"


SPRUNG: list[str] = []


class Trap:
    """Unpickling it leaves a mark."""

    def __reduce__(self) -> tuple[Any, ...]:
        return spring, ("sprung",)


def spring(mark: str) -> None:
    SPRUNG.append(mark)


def object_npy() -> bytes:
    array = np.empty((6, 5, 3), object)
    array[:] = Trap()
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def pickles() -> list[tuple[EngineName, object]]:
    plain = pickle.dumps(Trap())
    outputs: list[tuple[EngineName, object]] = []
    for data in (plain, pickle.dumps(IDS), object_npy()):
        for engine in ENGINE_NAMES:
            outputs += [(engine, data), (engine, b64(data)), (engine, {"routed_experts": b64(data)})]
            outputs.append((engine, {"data": b64(data), "shape": [6, 5, 3], "dtype": "object"}))
            outputs.append((engine, {"data": b64(data), "shape": [6, 5, 3], "dtype": "uint8", "start": 0}))
        outputs.append(("nemo-rl", f"nrlre1:int8:6x5x3:{b64(data)}"))
        outputs.append(("megatron", ["ndarray", {"data": data, "dtype": "int16"}]))
    return outputs


def test_nothing_is_ever_unpickled() -> None:
    np.load(io.BytesIO(object_npy()), allow_pickle=True)
    assert SPRUNG == ["sprung"]  # the trap works
    SPRUNG.clear()
    for engine, output in pickles():
        with pytest.raises(EngineOutputError):
            decode(output, engine, config=CONFIG)
    assert SPRUNG == []


def test_a_pickle_and_an_object_array_are_called_that() -> None:
    with pytest.raises(EngineOutputError, match=r"expected a \.npy file .*; got a pickle, which is never loaded"):
        decode(b64(pickle.dumps(Trap())), "vllm", config=CONFIG)
    with pytest.raises(EngineOutputError, match="got object arrays, which are pickles and never loaded"):
        decode(b64(object_npy()), "vllm", config=CONFIG)
    with pytest.raises(EngineOutputError, match="got an object array, which may hold anything"):
        decode(np.full((6, 5, 3), None), "vllm", config=CONFIG)


@pytest.mark.parametrize(
    ("engine", "output", "message"),
    [
        # text
        ("sglang", "AAA", r"expected base64 text; got str of length 3 \(Incorrect padding\)"),
        ("sglang", INT32[:-1], "base64"),
        ("sglang", INT32 + "\n", "base64"),
        ("sglang", "é" + INT32, "base64"),
        ("sglang", b"\x00" * 60, r"expected base64 text; got bytes of length 60"),
        ("sglang", 3, "an integer array .*; got an object of type int"),
        ("sglang", INT32[:-8], r"multiple of 60 bytes \(int32 \[rows, 5, 3\]\); got 354 bytes, 5\.90 rows"),
        ("sglang", {}, r"a mapping with 'routed_experts'; got the keys \(none\)"),
        ("sglang", {"text": "", "id": 1}, "got the keys 'id', 'text'"),
        ("sglang", {"routed_experts": None}, "expected routed experts; got None"),
        ("sglang", None, "expected routed experts; got None"),
        ("sglang", {"routed_experts": INT32, "routed_experts_dtype": "float32"}, "int32, uint16, uint8; got .*float32"),
        ("sglang", {"routed_experts": INT32, "routed_experts_dtype": 4}, "got dtype 4"),
        ("sglang", {"routed_experts": INT32, "routed_experts_dtype": "uint64"}, "got dtype 'uint64'"),
        ("sglang", {"routed_experts": INT32, "routed_experts_start_len": -1}, "a start .* 0 or more; got start -1"),
        ("sglang", {"routed_experts": INT32, "routed_experts_start_len": "1"}, "got start '1'"),
        ("sglang", {"routed_experts": INT32, "routed_experts_start_len": 1.0}, "got start 1.0"),
        ("sglang", {"routed_experts": INT32, "routed_experts_start_len": True}, "got start True"),
        ("sglang", {"data": INT32}, "an integer array"),
        # arrays
        ("sglang", torch.zeros(6, 5, 3), "got Tensor of float32"),
        ("sglang", torch.zeros(6, 5, 3, dtype=torch.bool), "got Tensor of bool"),
        ("sglang", torch.zeros(6, 5, 3, dtype=torch.complex64), "got Tensor of complex64"),
        ("sglang", torch.zeros(6, 5, 3, dtype=torch.int32, device="meta"), "got Tensor of int32"),
        ("sglang", torch.zeros(6, 15, dtype=torch.int32).to_sparse(), "got Tensor of int32"),
        ("sglang", torch.zeros(91, dtype=torch.int32), r"shape \[rows, 5, 3\]; got shape \[91\]"),
        ("sglang", torch.zeros(6, 14, dtype=torch.int32), r"got shape \[6, 14\]"),
        ("sglang", np.zeros(()), "float64"),
        ("sglang", np.zeros((), int), r"got shape \[\]"),
        ("vllm", IDS[:, :4], r"shape \[rows, 5, 3\]; got shape \[6, 4, 3\] .*layer_ids"),
        ("vllm", IDS[:, :, :2], r"got shape \[6, 5, 2\]$"),
        ("vllm", IDS[None], r"got shape \[1, 6, 5, 3\]"),
        ("vllm", IDS.reshape(6, 15), r"got shape \[6, 15\]"),
        ("vllm", IDS.astype(float), "got ndarray of float64"),
        ("vllm", IDS.astype(bool), "got ndarray of bool"),
        ("vllm", IDS.astype("U3"), "got ndarray of <U3"),
        ("vllm", IDS.astype("m8[ns]"), "timedelta64"),
        ("vllm", np.zeros((6, 5, 3), [("a", "O")]), "an object array"),
        ("megatron", [[1, 2], [3]], "got list"),
        ("megatron", [[[1, 2, "x"]]], "got ndarray of"),
        ("megatron", [[[2**70] * 3] * 5], "an object array"),
        ("megatron", [IDS.tolist()], r"got shape \[1, 6, 5, 3\]"),
        ("megatron", ["tensor", IDS.tolist()], "got list"),
        ("megatron", ["ndarray", {"data": IDS.tolist()}], "a dtype among int16, int32; got dtype None"),
        ("megatron", ["ndarray", {"data": None, "dtype": "int16"}], "got None"),
        ("megatron", ["ndarray", {"data": (IDS + 2**15).tolist(), "dtype": "int16"}], "ids that int16 holds; got ids"),
        ("lmdeploy", "0b7c5c3e", "key of the server's object store"),
        ("lmdeploy", np.full((6, 5, 3), -1).tolist(), "ids that uint16 holds; got ids from -1"),
        ("lmdeploy", b"0b7c5c3e", "got bytes of length 8"),
        # .npy
        ("vllm", "", r"a \.npy file .*; got 0 bytes"),
        ("vllm", INT32, r"a \.npy file"),
        ("vllm", b64(b"\x93NUMPY"), r"\.npy version 1 or 2"),
        ("vllm", npy_with(header(), version=b"\x03\x00"), r"\.npy version 1 or 2"),
        ("vllm", npy_with(header(), version=b"\x00\x00"), r"\.npy version 1 or 2"),
        ("vllm", b64(npy(IDS)[:40]), "40 bytes with a header of 118"),
        ("vllm", b64(npy(IDS)[:-4]), r"360 bytes \(int32 \[6, 5, 3\]\) after the .npy header; got 356 bytes"),
        ("vllm", b64(npy(IDS) + b"\0"), "got 361 bytes"),
        ("vllm", npy_with(header("'<f4'")), "got dtype '<f4'"),
        ("vllm", npy_with(header("'<i3'")), "got dtype '<i3'"),
        ("vllm", npy_with(header("'|b1'")), "got dtype"),
        ("vllm", npy_with(header("'|O'")), "object arrays"),
        ("vllm", npy_with(header("[('a', '<i4')]")), "got dtype 'structured'"),
        ("vllm", npy_with(header(fortran="0")), "got the header"),
        ("vllm", npy_with(header(shape="6")), "got the header"),
        ("vllm", npy_with(header(shape="(6, 5)")), r"got shape \[6, 5\]"),
        ("vllm", npy_with(header(shape="()")), r"shape \[rows, 5, 3\]; got shape"),
        ("vllm", npy_with(header(shape="(6 5 3)")), r"got shape"),
        ("vllm", npy_with(header(shape="(6, 3, 5)")), r"got shape \[6, 3, 5\]"),
        ("vllm", npy_with(header(shape="(-6, 5, 3)")), "got the header"),
        ("vllm", npy_with(header(shape="(1000000000000, 5, 3)")), "60,000,000,000,000 bytes"),
        ("vllm", npy_with(header(shape=f"({'9' * 5000}, 5, 3)")), "got shape"),
        ("vllm", npy_with(header(shape="(6,, 5, 3)")), "got shape"),
        ("vllm", npy_with(header() + " " * 10_000), "with a header of 10,"),
        ("vllm", npy_with("__import__('os').abort()"), "got the header"),
        # envelopes
        ("vllm", ENVELOPE | {"start": -1}, "got start -1"),
        ("vllm", ENVELOPE | {"start": [0]}, r"got start \[0\]"),
        ("vllm", ENVELOPE | {"dtype": "object"}, "got dtype 'object'"),
        ("vllm", ENVELOPE | {"dtype": "O"}, "got dtype 'O'"),
        ("vllm", ENVELOPE | {"dtype": "float16"}, "got dtype 'float16'"),
        ("vllm", ENVELOPE | {"dtype": "uint16"}, r"180 bytes \(uint16 \[6, 5, 3\]\); got 90 bytes"),
        ("vllm", ENVELOPE | {"dtype": ["uint8"]}, r"got dtype \['uint8'\]"),
        ("vllm", ENVELOPE | {"shape": None}, "data and shape; got the keys 'data', 'dtype'"),
        ("vllm", ENVELOPE | {"shape": "6x5x3"}, "got shape '6x5x3'"),
        ("vllm", ENVELOPE | {"shape": [6, 15]}, r"got shape \[6, 15\]"),
        ("vllm", ENVELOPE | {"shape": [-6, 5, 3]}, r"got shape \[-6, 5, 3\]"),
        ("vllm", ENVELOPE | {"shape": [6.0, 5, 3]}, r"got shape \[6.0, 5, 3\]"),
        ("vllm", ENVELOPE | {"shape": [True, 5, 3]}, r"got shape \[True, 5, 3\]"),
        ("vllm", ENVELOPE | {"shape": [7, 5, 3]}, "105 bytes .*; got 90 bytes"),
        ("vllm", ENVELOPE | {"shape": [2**62, 5, 3]}, "bytes .*; got 90 bytes"),
        ("vllm", ENVELOPE | {"shape": [2**80, 5, 3]}, "got shape"),
        ("vllm", ENVELOPE | {"shape": [10**5000, 5, 3]}, "got shape"),
        ("vllm", ENVELOPE | {"start": 10**5000}, "got start an object of type int"),
        ("vllm", ENVELOPE | {"data": "!"}, "base64"),
        ("vllm", ENVELOPE | {"data": [1, 2]}, "base64 text; got list"),
        ("skyrl", ENVELOPE | {"dtype": "uint16"}, "uint8, int16, int32; got dtype 'uint16'"),
        ("skyrl", {"data": ENVELOPE["data"], "shape": [6, 5, 3]}, "got dtype None"),
        ("skyrl", ENVELOPE["data"], "got str of length"),
        # NeMo-RL
        ("nemo-rl", NEMO_RL[:-4], "90 bytes .*; got 87 bytes"),
        ("nemo-rl", NEMO_RL + "AAAA", "got 93 bytes"),
        ("nemo-rl", NEMO_RL[:-1], "base64|90 bytes"),
        ("nemo-rl", NEMO_RL.replace("nrlre1", "nrlre2"), "expected nrlre1:.*; got str of length .* 'nrlre2:int8"),
        ("nemo-rl", NEMO_RL.replace("int8", "uint8"), "int8, int16, int32; got dtype 'uint8'"),
        ("nemo-rl", NEMO_RL.replace("int8", "int64"), "got dtype 'int64'"),
        ("nemo-rl", NEMO_RL.replace("int8", ""), "got dtype ''"),
        ("nemo-rl", NEMO_RL.replace("6x5x3", "6x15"), "expected nrlre1:"),
        ("nemo-rl", NEMO_RL.replace("6x5x3", "-6x5x3"), "expected nrlre1:"),
        ("nemo-rl", NEMO_RL.replace("6x5x3", "6x3x5"), r"got shape \[6, 3, 5\]"),
        ("nemo-rl", NEMO_RL.replace("6x5x3", "٦x5x3"), "expected nrlre1:"),
        ("nemo-rl", "nrlre1:int8", "expected nrlre1:"),
        ("nemo-rl", "", "expected nrlre1:"),
        ("nemo-rl", b"\xff\xfe", "expected nrlre1:"),
    ],
)
def test_malformed(engine: EngineName, output: object, message: str) -> None:
    with pytest.raises(EngineOutputError, match=message) as caught:
        decode(output, engine, config=CONFIG)
    assert str(caught.value).startswith(f"output of {engine}: expected ")
    assert len(str(caught.value)) < 400


def test_a_memoryview_without_dimensions() -> None:
    with pytest.raises(EngineOutputError, match="got memoryview of length 4"):
        decode(memoryview(np.array(7, np.int32)), "sglang", config=CONFIG)


def test_lists_nested_beyond_reason() -> None:
    output: list[Any] = []
    for _ in range(50_000):
        output = [output]
    with pytest.raises(EngineOutputError):
        decode(output, "megatron", config=CONFIG)


@pytest.mark.parametrize(
    ("engine", "output"),
    [
        ("vllm", npy_with(header(shape=f"({10**12}, 5, 3)"))),
        ("vllm", ENVELOPE | {"shape": [10**12, 5, 3]}),
        ("skyrl", ENVELOPE | {"shape": [10**12, 5, 3]}),
        ("nemo-rl", NEMO_RL.replace("6x5x3", f"{10**12}x5x3")),
    ],
)
def test_a_claimed_size_allocates_nothing(engine: EngineName, output: object) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(EngineOutputError):
            decode(output, engine, config=CONFIG)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("filling", ["1", "1,", " ", "(", "'descr': ", "'shape': (", "'shape': (1, "])
def test_long_headers_take_no_long_time(filling: str) -> None:
    text = "{'descr': '<i4', 'fortran_order': False, 'shape': (" + filling * (9_000 // len(filling))
    before = time.process_time()
    for output in (npy_with(text), npy_with(text * 100, version=b"\x02\x00")):
        with pytest.raises(EngineOutputError):
            decode(output, "vllm", config=CONFIG)
    assert time.process_time() - before < 1


def check_nothing_but_rows_or_a_trace_error(output: object, engine: EngineName, num_tokens: int | None) -> None:
    try:
        decoded = decode(output, engine, config=CONFIG, num_tokens=num_tokens)
    except tracefile.TraceError:
        return
    assert decoded.rows.shape[1:] == (CONFIG.num_layers, CONFIG.top_k)
    assert decoded.rows.dtype.kind in "iu"
    assert decoded.start >= 0
    if num_tokens is not None:
        assert decoded.stop <= max(0, num_tokens - 1)


bare = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=200),
    st.binary(max_size=200).map(b64),
    st.sampled_from(["int8", "uint8", "int16", "int32", "object", "ndarray", "nrlre1:int8:2x5x3:"]),
)
keys = st.sampled_from(["routed_experts", "data", "shape", "start", "dtype", "routed_experts_start_len", "x"])
anything = st.recursive(
    bare, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=5), max_leaves=30
)
token_counts = st.none() | st.integers(0, 12)


@settings(max_examples=150, deadline=None)
@given(output=anything, engine=st.sampled_from(ENGINE_NAMES), num_tokens=token_counts)
def test_anything_at_all(output: object, engine: EngineName, num_tokens: int | None) -> None:
    check_nothing_but_rows_or_a_trace_error(output, engine, num_tokens)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=400), engine=st.sampled_from(ENGINE_NAMES), num_tokens=token_counts)
def test_random_bytes(data: bytes, engine: EngineName, num_tokens: int | None) -> None:
    for output in (data, b64(data), b64(npy(IDS)[:10] + data), npy_with(header(), data), b64(npy(IDS)[:118] + data)):
        check_nothing_but_rows_or_a_trace_error(output, engine, num_tokens)


def mutate(draw: Any, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.integers(0, len(changed)))
        what = draw(st.sampled_from(["flip", "cut", "insert", "delete"]))
        if what == "flip" and where < len(changed):
            changed[where] ^= 1 << draw(st.integers(0, 7))
        elif what == "cut":
            del changed[where:]
        elif what == "insert":
            changed[where:where] = draw(st.binary(min_size=1, max_size=4))
        else:
            del changed[where : where + draw(st.integers(1, 8))]
    return bytes(changed)


def mutate_one(draw: Any, output: Any) -> Any:
    """The output with one of its parts changed, below base64 or above it."""
    if isinstance(output, dict):
        changed = copy.copy(output)
        key = draw(st.sampled_from(sorted(changed)))
        if draw(st.booleans()):
            changed[key] = mutate_one(draw, changed[key])
        else:
            changed[key] = draw(bare)
        return changed
    if isinstance(output, list):
        return draw(st.sampled_from([output[:1], output[1:], output + output, [*output, draw(bare)]]))
    if isinstance(output, str | bytes):
        raw = output.encode() if isinstance(output, str) else output
        head, separator, text = raw.rpartition(b":")
        try:
            below = base64.b64decode(text, validate=True)
        except ValueError:  # a dtype's name
            below = b""
        if below and draw(st.booleans()):
            return (head + separator + base64.b64encode(mutate(draw, below))).decode()
        return mutate(draw, raw).decode("latin-1")
    return draw(bare)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_mutated_outputs(data: st.DataObject) -> None:
    form: Form = data.draw(st.sampled_from([form for form in FORMS if not form.name.endswith(("tensor", "array"))]))
    output = form.encode(IDS, CONFIG.num_experts)
    if isinstance(output, memoryview):
        output = bytes(output)
    elif isinstance(output, np.ndarray):
        output = output.tolist()
    check_nothing_but_rows_or_a_trace_error(mutate_one(data.draw, output), form.engine, data.draw(token_counts))
