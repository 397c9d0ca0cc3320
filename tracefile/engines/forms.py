"""The form in which each engine, or the framework around it, hands out routed experts.

Read in their sources, August 2026; each function says where. A form yields rows ``[rows, layers, top_k]`` in the
engine's own width, and where they start if the output says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from tracefile.engines.payload import (
    INTEGER_DTYPES,
    Array,
    Wanted,
    as_array,
    describe,
    dtype_named,
    from_base64,
    from_buffer,
    from_npy,
    is_index,
    shaped,
    short,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

EngineName = Literal["sglang", "vllm", "lmdeploy", "megatron", "nemo-rl", "skyrl"]
ENGINE_NAMES: tuple[EngineName, ...] = get_args(EngineName)

#: The key that SGLang's meta_info and LMDeploy's, and the choices of vLLM and SkyRL, have in common.
KEY = "routed_experts"
_NEMO_RL = re.compile(r"nrlre1:([^:]{0,32}):([0-9]{1,18})x([0-9]{1,18})x([0-9]{1,18}):", re.ASCII)
_Text: TypeAlias = str | bytes | bytearray | memoryview


class Form(NamedTuple):
    """Rows as they came. ``start``: the first row's position, where the output says it."""

    rows: Array
    start: int | None = None


def sglang(output: object, around: Mapping[str, object], wanted: Wanted) -> Form:
    """Flat base64 of int32 without a shape; a tensor from engines that skip the tokenizer.

    All hidden layers, zeros where a layer is dense; rows ``[routed_experts_start_len, tokens - 1)``. Servers may
    narrow to uint8 or uint16 and then say so in ``routed_experts_dtype``; they keep int32 when a -1 is among the
    ids. Sources: sglang ``srt/state_capturer/{base,routed_experts}.py``, ``srt/managers/tokenizer_manager.py``,
    pull request 31219 (narrow dtypes).
    """
    start = _start(around.get("routed_experts_start_len"), wanted)
    if isinstance(output, _Text):
        name = around.get("routed_experts_dtype")
        dtype = dtype_named("int32" if name is None else name, ("int32", "uint16", "uint8"), wanted)
        return Form(from_buffer(from_base64(output, wanted), dtype, None, wanted), start)
    return Form(shaped(as_array(output, wanted), wanted, flat=True), start)


def vllm(output: object, around: Mapping[str, object], wanted: Wanted) -> Form:
    """A numpy array, base64 of a ``.npy`` file, or an envelope ``{data, shape, start, dtype}``.

    All hidden layers, zeros where a layer is dense or was not captured; uint8 up to 256 experts, else uint16
    (int32 in older versions). Only the envelope, which is prime-rl's and Dynamo's, says where rows start; its
    oldest version has no dtype and is uint8. Versions that split off ``prompt_routed_experts`` give two outputs,
    the second of which starts at the prompt's length. Sources: vllm ``outputs.py``,
    ``model_executor/layers/fused_moe/routed_experts_capturer.py``, ``entrypoints/serve/disagg/serving.py`` (npy);
    prime-rl ``inference/vllm/routed_experts.py``; Dynamo pull request 10529.
    """
    if isinstance(output, _Text):
        return Form(from_npy(from_base64(output, wanted, "base64 of a .npy file"), wanted))
    if isinstance(output, Mapping):
        name = output.get("dtype")
        dtype = dtype_named("uint8" if name is None else name, INTEGER_DTYPES, wanted)
        return Form(_envelope(output, dtype, wanted), _start(output.get("start"), wanted))
    return Form(shaped(as_array(output, wanted), wanted))


def lmdeploy(output: object, around: Mapping[str, object], wanted: Wanted) -> Form:
    """A uint16 array, or over HTTP nested lists; rows ``[0, tokens - 1)``, all hidden layers.

    GLM's dense layers are 65535 (those of other models are whatever memory held), so rows are read as int16, -1,
    where ids fit into that. Sources: lmdeploy ``pytorch/messages.py``, ``pytorch/models/glm_moe_dsa.py``,
    ``pytorch/engine/engine_instance.py``, ``serve/openai/protocol.py``.
    """
    if isinstance(output, str):
        raise wanted.error(
            "a uint16 array or nested lists",
            f"{describe(output)}: with enable_transfer_obj_ref it is a key of the server's object store, to be"
            " fetched first",
        )
    rows = shaped(as_array(output, wanted, np.dtype(np.uint16)), wanted)
    if rows.dtype.kind == "u" and rows.dtype.itemsize == 2 and wanted.num_experts <= 2**15:
        rows = rows.view(rows.dtype.str.replace("u", "i"))
    return Form(rows)


def megatron(output: object, around: Mapping[str, object], wanted: Wanted) -> Form:
    """An int16 array (int32 above 32,768 experts), or over HTTP ``["ndarray", {data, dtype}]`` with nested lists.

    Rows ``[0, tokens - 1)``, of MoE layers only. Sources: megatron-core
    ``inference/text_generation_controllers/text_generation_controller.py``, ``inference/inference_request.py``.
    """
    if isinstance(output, list | tuple) and len(output) == 2 and output[0] == "ndarray":
        output = output[1]
    if isinstance(output, Mapping):
        dtype = dtype_named(output.get("dtype"), ("int16", "int32"), wanted)
        return Form(shaped(as_array(output.get("data"), wanted, dtype), wanted))
    return Form(shaped(as_array(output, wanted), wanted))


def nemo_rl(output: object, around: Mapping[str, object], wanted: Wanted) -> Form:
    """``nrlre1:<dtype>:<S>x<L>x<K>:<base64>``, int8, int16 or int32; formerly nested lists.

    A row for every token: one that was not captured is -1 throughout, and the last, which never is, holds
    ``arange(K)``. Sources: NeMo-RL ``utils/routed_experts_codec.py``, ``models/generation/vllm/utils.py``.
    """
    if not isinstance(output, _Text):
        return Form(shaped(as_array(output, wanted, np.dtype(np.int32)), wanted))
    if isinstance(output, memoryview):
        output = output.tobytes()
    text = output if isinstance(output, str) else output.decode("latin-1")
    head = _NEMO_RL.match(text)
    if head is None:
        raise wanted.error("nrlre1:<dtype>:<S>x<L>x<K>:<base64>", f"{describe(output)} that begins {text[:40]!r}")
    dtype = dtype_named(head[1], ("int8", "int16", "int32"), wanted)
    shape = [int(size) for size in head.groups()[1:]]
    return Form(from_buffer(from_base64(text[head.end() :], wanted), dtype, shape, wanted))


def skyrl(output: object, around: Mapping[str, object], wanted: Wanted) -> Form:
    """``{data, shape, dtype}`` with base64 data of uint8, int16 or int32; or the array that its client decodes.

    vLLM's rows, narrowed by the largest id: samples of one model may differ in dtype. Sources: SkyRL
    ``inference_servers/generate_wire.py``, ``utils/routed_experts.py``, ``train/dataset/preprocess.py``.
    """
    if isinstance(output, Mapping):
        dtype = dtype_named(output.get("dtype"), ("uint8", "int16", "int32"), wanted)
        return Form(_envelope(output, dtype, wanted))
    return Form(shaped(as_array(output, wanted), wanted))


FORMS: dict[EngineName, Callable[[object, Mapping[str, object], Wanted], Form]] = {
    "sglang": sglang,
    "vllm": vllm,
    "lmdeploy": lmdeploy,
    "megatron": megatron,
    "nemo-rl": nemo_rl,
    "skyrl": skyrl,
}


def read(output: object, engine: EngineName, wanted: Wanted) -> Form:
    """Rows of an engine's output, given bare or with what is around it (``meta_info``, a choice)."""
    around: Mapping[str, object] = {}
    if isinstance(output, Mapping):
        if KEY in output:
            around, output = output, output[KEY]
        elif "data" not in output:
            raise wanted.error(f"a mapping with {KEY!r}", f"the keys {_keys(output)}")
    if output is None:
        raise wanted.error("routed experts", "None: the request did not ask for them, or ended before any token")
    return FORMS[engine](output, around, wanted)


def _envelope(output: Mapping[str, Any], dtype: np.dtype[Any], wanted: Wanted) -> Array:
    if output.get("data") is None or output.get("shape") is None:
        raise wanted.error("an envelope with data and shape", f"the keys {_keys(output)}")
    return from_buffer(from_base64(output["data"], wanted), dtype, output["shape"], wanted)


def _start(value: object, wanted: Wanted) -> int | None:
    if value is None:
        return None
    if not is_index(value):
        raise wanted.error("a start that is a row, 0 or more", f"start {short(value)}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def _keys(output: Iterable[object]) -> str:
    return ", ".join(sorted(map(repr, output))[:20]) or "(none)"
