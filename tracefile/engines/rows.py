""":func:`decode`: an engine's output as rows of a sample, in the layers of a trace.

An engine's form (:mod:`~tracefile.engines.forms`) does not say which tokens its rows belong to: the last token has
none, some servers start where they were asked to and some at the beginning, some fill a row in. The number of
tokens decides that. Layers go by global id, never by position.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING

import numpy as np

from tracefile.engines.forms import ENGINE_NAMES, EngineName, read
from tracefile.engines.payload import Array, Wanted, is_index, short
from tracefile.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefile.format import ModelConfig

#: May hold a row for the last token, which was never routed: filled in, or surplus.
_SURPLUS_ROW: frozenset[EngineName] = frozenset({"vllm", "nemo-rl", "skyrl"})


@dataclass(frozen=True, slots=True, eq=False)
class EngineRows:
    """Routed experts that an engine returned.

    Attributes
    ----------
    rows : ndarray
        ``[n, num_layers, top_k]`` of the trace, in the engine's integer width. A view of what the engine returned
        where its bytes allow (read-only over decoded text), so don't write into it.
    start : int
        The row of the sample at which they begin.
    missing : tuple of (int, int)
        Ranges of the sample's rows that the engine marked as not captured. They are -1 throughout in ``rows``,
        which is how a writer recognizes them.
    """

    rows: Array
    start: int
    missing: tuple[tuple[int, int], ...]

    @property
    def stop(self) -> int:
        """One past the sample's last row that is there."""
        return self.start + len(self.rows)

    def __repr__(self) -> str:
        missing = f", missing {list(self.missing)}" if self.missing else ""
        shape = " x ".join(map(str, self.rows.shape))
        return f"<EngineRows {shape} {self.rows.dtype.name}, rows [{self.start}, {self.stop}){missing}>"


def decode(
    output: object,
    engine: EngineName,
    *,
    config: ModelConfig,
    num_tokens: int | None = None,
    start: int | None = None,
    layer_ids: Sequence[int] | None = None,
) -> EngineRows:
    """Decode what an inference engine returned for one sequence.

    The form is checked: text, length, shape, dtype, number of rows. Ids are not: :meth:`TraceWriter.append`
    refuses those outside ``[0, num_experts)``, and rows that are -1 in part. Nothing is ever unpickled.

    Parameters
    ----------
    output
        The engine's routed experts, or the mapping with a key ``routed_experts`` that they came in (SGLang's and
        LMDeploy's ``meta_info``, SGLang's ``sgl_ext``, a choice of vLLM or SkyRL):

        ============ ==============================================================================
        engine       output
        ============ ==============================================================================
        ``sglang``   base64 of int32 (of ``routed_experts_dtype`` if that is there); a tensor
        ``vllm``     an array; base64 of a ``.npy`` file; ``{data, shape, start, dtype}``
        ``lmdeploy`` an array; nested lists
        ``megatron`` an array; ``["ndarray", {data, dtype}]``; nested lists
        ``nemo-rl``  ``nrlre1:<dtype>:<S>x<L>x<K>:<base64>``; nested lists
        ``skyrl``    ``{data, shape, dtype}``; an array
        ============ ==============================================================================

        Text may be ``str`` or bytes-like, arrays may be tensors.
    engine : {"sglang", "vllm", "lmdeploy", "megatron", "nemo-rl", "skyrl"}
    config : ModelConfig
        Of the trace: ``writer.config``.
    num_tokens : int, optional
        Tokens of the sequence, prompt included, whose last has no row. Give it wherever it is known: only then is
        a wrong number of rows noticed, and an SGLang server that returned everything though asked to start later
        (then ``start`` of the result is 0). A row that vLLM or NeMo-RL has for the last token is left out.
    start : int, optional
        The row that the request asked to start at (``routed_experts_start_len``, ``routed_experts_prompt_start``).
        What the output itself says goes before. Default 0.
    layer_ids : sequence of int, optional
        Global ids of the layers in the output, in order, where they are not those of the trace. Layers that the
        trace does not hold are left out. Layers that only the trace holds become zeros, which is right for dense
        ones: a trace of all hidden layers and Megatron, which returns the MoE layers. Default:
        ``config.layer_ids``.

    Returns
    -------
    EngineRows
        Rows ``[start, num_tokens - 1)``; fewer from SkyRL, which may return a prefix.

    Raises
    ------
    EngineOutputError
        The output is not of the engine's form. Attributes ``engine``, ``expected``, ``got``.
    OptionError

    Examples
    --------
    >>> import base64, tracefile
    >>> from tracefile.engines import decode
    >>> config = tracefile.ModelConfig(num_layers=3, top_k=2, num_experts=64)
    >>> ids = np.arange(30, dtype=np.int32).reshape(5, 3, 2)
    >>> meta_info = {"routed_experts": base64.b64encode(ids[2:]).decode(), "routed_experts_start_len": 2}
    >>> decoded = decode(meta_info, "sglang", config=config, num_tokens=6)
    >>> decoded
    <EngineRows 3 x 3 x 2 int32, rows [2, 5)>
    >>> bool((decoded.rows == ids[2:]).all())
    True
    >>> decode(meta_info, "sglang", config=config, num_tokens=7)
    Traceback (most recent call last):
    ...
    tracefile.errors.EngineOutputError: output of sglang: expected 4 rows, [2, 6) of 7 tokens; got 3 rows

    A trace of the MoE layers of a model whose first layer is dense:

    >>> config = tracefile.ModelConfig(num_layers=2, top_k=2, num_experts=64, layer_ids=(1, 2))
    >>> decode(ids, "vllm", config=config, layer_ids=range(3)).rows.shape
    (5, 2, 2)
    """
    if engine not in ENGINE_NAMES:
        raise OptionError(f"engine must be one of {', '.join(ENGINE_NAMES)}, not {engine!r}")
    for name, value in (("num_tokens", num_tokens), ("start", start)):
        if value is not None and not is_index(value):
            raise OptionError(f"{name} must be an integer of 0 or more, not {short(value)}")
    engine_layers = config.layer_ids if layer_ids is None else _check_layers(layer_ids, config)
    wanted = Wanted(engine, len(engine_layers), config.top_k, config.num_experts)
    form = read(output, engine, wanted)
    if engine == "nemo-rl" and num_tokens is None:
        num_tokens = len(form.rows)
    asked = form.start if form.start is not None else start or 0
    rows, first = _place(form.rows, asked, num_tokens, engine, wanted)
    rows = _select_layers(rows, engine_layers, config.layer_ids)
    if engine == "lmdeploy":
        rows = _zero_dense_layers(rows)
    rows, missing = _mark_missing(rows)
    rows = _add_layers(rows, engine_layers, config.layer_ids, missing)
    return EngineRows(rows, first, tuple((first + begin, first + end) for begin, end in missing))


def _place(rows: Array, start: int, num_tokens: int | None, engine: EngineName, wanted: Wanted) -> tuple[Array, int]:
    """The rows that belong to the sequence, and the first one's position in it."""
    if num_tokens is None:
        return rows, start
    last = max(0, num_tokens - 1)
    start = min(start, last)  # as SGLang does
    expected = last - start
    if len(rows) == expected or (engine == "skyrl" and len(rows) < expected):
        return rows, start
    if len(rows) == expected + 1 and num_tokens and engine in _SURPLUS_ROW:
        return rows[:-1], start
    if engine == "sglang" and len(rows) == last:
        return rows, 0
    raise wanted.error(f"{expected} rows, [{start}, {last}) of {num_tokens} tokens", f"{len(rows)} rows")


def _check_layers(layer_ids: Sequence[int], config: ModelConfig) -> tuple[int, ...]:
    try:
        ids = tuple(index(layer) for layer in layer_ids)
    except TypeError:
        raise OptionError(f"layer_ids must be integers, not {layer_ids!r}") from None
    if not ids or len(set(ids)) != len(ids) or min(ids) < 0:
        raise OptionError(f"layer_ids must name each layer of the output once by global id, not {list(ids)}")
    ours, theirs = set(config.layer_ids), set(ids)
    if not (ours <= theirs or theirs <= ours):
        raise OptionError(
            f"of the trace's layers the output lacks {sorted(ours - theirs)}, and has {sorted(theirs - ours)} beside;"
            " one must hold all layers of the other"
        )
    return ids


def _select_layers(rows: Array, theirs: tuple[int, ...], ours: tuple[int, ...]) -> Array:
    if theirs == ours or not set(ours) <= set(theirs):
        return rows
    positions = [theirs.index(layer) for layer in ours]
    first = positions[0]
    if positions == list(range(first, first + len(positions))):
        return rows[:, first : first + len(positions)]
    return rows[:, positions]


def _add_layers(rows: Array, theirs: tuple[int, ...], ours: tuple[int, ...], missing: list[tuple[int, int]]) -> Array:
    if rows.shape[1] == len(ours):
        return rows
    result = np.zeros((len(rows), len(ours), rows.shape[2]), rows.dtype)
    result[:, [ours.index(layer) for layer in theirs]] = rows
    for begin, end in missing:
        result[begin:end] = -1
    return result


def _zero_dense_layers(rows: Array) -> Array:
    """LMDeploy leaves its mark of nothing captured in dense layers, where other engines have zeros."""
    if rows.dtype.kind != "i":
        return rows
    captured = rows[:, -1, 0] != -1  # no known model ends in a dense layer
    dense = (rows[captured.argmax()] == -1).all(axis=1) if captured.any() else np.zeros(rows.shape[1], bool)
    if dense.any():
        dense &= (rows == -1).all(axis=(0, 2))
        whole = (rows == -1).all(axis=(1, 2))
        rows = rows.copy()
        rows[:, dense] = 0
        rows[whole] = -1
    return rows


def _mark_missing(rows: Array) -> tuple[Array, list[tuple[int, int]]]:
    """Ranges of rows that are -1 in every layer that was captured; -1 throughout in the rows returned.

    Since its pull request 36404 SGLang fills -1 into the MoE layers of a token that was not routed, while dense
    layers stay zero.
    """
    if rows.dtype.kind != "i" or not len(rows):
        return rows, []
    candidates = np.flatnonzero(rows[:, -1, 0] == -1)  # again the last layer
    if not len(candidates):
        return rows, []
    block = rows[candidates]
    absent = (block == -1).all(axis=2)
    whole = absent.all(axis=1)
    # With more than one expert a token, no layer that was routed is all zero.
    if rows.shape[2] > 1:
        partly = ~whole & (absent | (block == 0).all(axis=2)).all(axis=1)
        if partly.any():
            rows = rows.copy()
            rows[candidates[partly]] = -1
            whole |= partly
    positions = candidates[whole]
    groups = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
    return rows, [(int(group[0]), int(group[-1]) + 1) for group in groups if len(group)]
