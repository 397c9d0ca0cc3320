"""verl: ``routed_experts`` in its jagged and padded forms, lazy; its replay mask; its Megatron routers.

verl carries routing as a jagged nested tensor ``[batch, tokens of each, layers, top_k]`` in its TensorDicts, and
takes it apart with ``unbind``, ``values`` and slices, all of which stay lazy. What changes is where a batch is made::

    from tracefile.integrations.verl import jagged

    batch["routed_experts"] = jagged(samples, num_tokens)  # lazy tensors, and the tokens of each sequence

It has to be there before ``left_right_2_no_padding``, which leaves nested routing alone. verl's Megatron engine then
reads its context parallel share of all layers, one microbatch at a time. So that routers read only their own rows and
layers, when they need them, let the engine use this module's function, which has the same parameters::

    import tracefile.integrations.verl
    import verl.workers.engine.megatron.transformer_impl as engine

    engine.set_router_replay_data = tracefile.integrations.verl.set_router_replay_data

Two places read everything and are to be kept from lazy tensors: pickling a ``DataProto`` packs the tensors of its
``batch`` into one buffer (let them travel in ``non_tensor_batch``, as :func:`object_array`), and
``AgentLoopOutput.as_dict`` copies into a new tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from tracefile.errors import OptionError, RoutedExpertsShapeError
from tracefile.integrations import megatron
from tracefile.lazy import LazyRoutedExperts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefile.sharding import ShardSpec


def jagged(
    samples: Sequence[LazyRoutedExperts], num_tokens: Sequence[int] | None = None, *, fill: str = "error"
) -> torch.Tensor:
    """A batch as a jagged nested tensor, with nothing read.

    Parameters
    ----------
    samples : sequence of LazyRoutedExperts
        ``[rows, layers, top_k]`` each.
    num_tokens : sequence of int, optional
        Tokens of each sequence: rows are cut to as many, or followed by zeros, as verl does. Default: the rows.
    fill : str
        How rows that were never captured are rendered. With "zeros" they replay expert 0, unless they are masked
        out: see :func:`replay_mask`.

    Returns
    -------
    torch.Tensor
        Nested, int16 where that holds the ids.

    Examples
    --------
    >>> import numpy as np, tempfile, torch, tracefile
    >>> path = tempfile.mkdtemp() + "/step_1.trace"
    >>> with tracefile.TraceWriter(path, num_layers=3, top_k=2, num_experts=64) as writer:
    ...     samples = [writer.append(str(rows), np.full((rows, 3, 2), [rows, 7])) for rows in (4, 2)]
    >>> routed_experts = jagged(samples, num_tokens=[5, 3])
    >>> routed_experts.is_nested, routed_experts.dtype, len(routed_experts.unbind())
    (True, torch.int16, 2)
    >>> ids = routed_experts.values().to(torch.int64)[3:7, 1]
    >>> ids
    <LazyRoutedExperts 4 x 2 int64 (uint8 on disk), 3 rows of 2 segments, 1 padding row, nothing read>
    >>> ids.tolist()
    [[4, 7], [0, 0], [2, 7], [2, 7]]
    """
    parts: list[torch.Tensor] = [
        JaggedRoutedExperts.of(_fitted(_narrow(sample, fill), 0, tokens, tokens))
        for sample, tokens in zip(samples, _counts(samples, num_tokens), strict=True)
    ]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def padded(
    samples: Sequence[LazyRoutedExperts], attention_mask: torch.Tensor, *, fill: str = "error"
) -> LazyRoutedExperts:
    """A batch padded to one length, with nothing read.

    Parameters
    ----------
    samples : sequence of LazyRoutedExperts
        ``[rows, layers, top_k]`` each.
    attention_mask : torch.Tensor
        ``[batch, seq]``: prompts are padded on the left, responses on the right. A sample's rows begin where its
        ones do.
    fill : str
        As for :func:`jagged`.

    Returns
    -------
    LazyRoutedExperts
        ``[batch, seq, layers, top_k]``, int16 where that holds the ids; zeros where the mask is zero and where a
        sample has no row for a token.
    """
    parts: list[torch.Tensor] = [
        _fitted(_narrow(sample, fill), start, stop, attention_mask.shape[1])
        for sample, (start, stop) in zip(samples, _spans(attention_mask), strict=True)
    ]
    batch = torch.stack(parts)
    assert isinstance(batch, LazyRoutedExperts)
    return batch


def unpadded(routed_experts: torch.Tensor, attention_mask: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The samples of a batch, one ``[tokens, layers, top_k]`` each; lazy, if the batch is.

    Parameters
    ----------
    routed_experts : torch.Tensor
        Jagged, or padded ``[batch, seq, layers, top_k]``.
    attention_mask : torch.Tensor
        ``[batch, seq]``, for a padded batch.
    """
    if routed_experts.is_nested:
        return list(routed_experts.unbind())
    if attention_mask is None:
        raise OptionError("a padded batch needs its attention_mask")
    return [routed_experts[i, start:stop] for i, (start, stop) in enumerate(_spans(attention_mask))]


def replay_mask(samples: Sequence[LazyRoutedExperts], num_tokens: Sequence[int] | None = None) -> torch.Tensor:
    """Which rows of a batch have routing to replay: jagged, bool, like :func:`jagged` of the same arguments.

    False where routing was never captured, and for tokens that have no row (the last one, trailing tool output).
    Reads nothing.
    """
    counts = _counts(samples, num_tokens)
    masks = [F.pad(x.valid[:n], (0, max(n - len(x), 0))) for x, n in zip(samples, counts, strict=True)]
    return torch.nested.as_nested_tensor(masks, layout=torch.jagged)


def object_array(samples: Sequence[LazyRoutedExperts]) -> np.ndarray[Any, Any]:
    """Samples for ``DataProto.non_tensor_batch``, where they travel as references (``np.array`` would read them)."""
    array = np.empty(len(samples), dtype=object)
    for i, sample in enumerate(samples):
        array[i] = sample
    return array


def shard_spec(tf_config: Any, **options: Any) -> ShardSpec:
    """The calling rank's shard as verl's Megatron engine packs it.

    Like :func:`tracefile.integrations.megatron.shard_spec`, with each sequence padded with zeros to a multiple of
    ``tp_size * cp_size * 2``, or ``tp_size`` without context parallelism.
    """
    from megatron.core import parallel_state

    tp, cp = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_context_parallel_world_size()
    found = {
        "padding": "zeros",
        "sample_multiple": tp * cp * 2 if cp > 1 else tp,
        "tp_size": tp,
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
    }
    return megatron.shard_spec(tf_config, **{**found, **options})


def set_router_replay_data(
    layers_topk_idx: torch.Tensor,
    attention_mask: torch.Tensor | None,
    tf_config: Any,
    vp_rank: int | None = None,
    replay_mask: torch.Tensor | None = None,
    local_cp_size: int | None = None,
    model: torch.nn.Module | None = None,
) -> None:
    """Give a model's routers the ids that they replay, lazily: in place of verl's function of this name.

    Rows that were never captured are routed natively, whatever ``replay_mask`` says of them. Parameters are verl's.

    Raises
    ------
    OptionError
        No ``model``; or one of verl's options for which rows are packed differently (FP8, dynamic context
        parallelism, ``dsv4_hybrid`` attention): verl's own function takes lazy tensors too.
    """
    if (
        model is None
        or local_cp_size is not None
        or getattr(tf_config, "fp8", None) in ("e4m3", "hybrid")
        or getattr(tf_config, "experimental_attention_variant", None) == "dsv4_hybrid"
    ):
        raise OptionError(
            "lazy replay needs the model, and neither FP8, dynamic context parallelism nor dsv4_hybrid; use verl's"
            " own set_router_replay_data, which reads this rank's rows of all layers"
        )
    samples = unpadded(layers_topk_idx, attention_mask)
    counts = [len(sample) for sample in samples]
    # Each router finds its layer by id, so none are selected here.
    spec = shard_spec(tf_config, layer_ids=None)
    local = spec.apply(samples, counts)
    if not isinstance(local, LazyRoutedExperts):
        raise OptionError("routed experts are not lazy; use verl's own set_router_replay_data")
    mask = None
    valid = local.valid
    if replay_mask is not None:
        rows = [row.reshape(-1, 1, 1) for row in unpadded(replay_mask, attention_mask)]
        mask = spec.apply(rows, counts).reshape(-1)
    if not valid.all():
        valid = valid.to(mask.device) if mask is not None else valid
        mask = valid if mask is None else mask & valid
        local = local.filled("zeros")
    megatron.set_replay_data(local, megatron.decoder_routers(model), replay_mask=mask)


class JaggedRoutedExperts(LazyRoutedExperts):
    """Lazy routed experts that a nested tensor takes as its values.

    torch asks the values of a nested tensor for the size of their storage, to report it as its own: it is 0.
    """

    @classmethod
    def of(cls, experts: LazyRoutedExperts) -> JaggedRoutedExperts:
        values = cls._wrap(experts.selection, experts.dtype, experts.device, experts.pinned, experts.fill)
        assert isinstance(values, JaggedRoutedExperts)
        return values

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._nested_view_from_jagged.default:
            return NotImplemented  # torch then asks the nested tensor, which wraps the values as they are
        return super().__torch_dispatch__(func, types, args, kwargs)

    def untyped_storage(self) -> torch.UntypedStorage:  # type: ignore[override]
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return rebuild_jagged, super().__reduce_ex__(protocol)


def rebuild_jagged(rebuild: Any, arguments: tuple[Any, ...]) -> JaggedRoutedExperts:
    """Make the values that were pickled. Opens nothing."""
    return JaggedRoutedExperts.of(rebuild(*arguments))


torch.serialization.add_safe_globals([rebuild_jagged])


def _narrow(sample: LazyRoutedExperts, fill: str) -> LazyRoutedExperts:
    """Rendered by ``fill``, and int16 as in verl; more experts than that holds stay as they are."""
    filled = sample.filled(fill)
    return filled.with_selection(filled.selection, dtype=torch.int16) if filled.holds(torch.int16) else filled


def _fitted(sample: LazyRoutedExperts, start: int, stop: int, length: int) -> LazyRoutedExperts:
    """``length`` rows, of which those from ``start`` and before ``stop`` are the sample's, and zeros."""
    rows = sample[: stop - start]
    result = F.pad(rows, (0, 0, 0, 0, start, length - start - len(rows)))
    assert isinstance(result, LazyRoutedExperts)
    return result


def _counts(samples: Sequence[LazyRoutedExperts], num_tokens: Sequence[int] | None) -> list[int]:
    counts = [len(sample) for sample in samples] if num_tokens is None else [int(tokens) for tokens in num_tokens]
    if len(counts) != len(samples):
        raise OptionError(f"{len(samples)} samples and {len(counts)} token counts; both must be as many")
    return counts


def _spans(attention_mask: torch.Tensor) -> list[tuple[int, int]]:
    """Where the ones of each row begin and end."""
    spans = []
    for i, row in enumerate(attention_mask.cpu().bool()):
        positions = row.nonzero()
        start, stop = (int(positions[0]), int(positions[-1]) + 1) if len(positions) else (0, 0)
        if stop - start != len(positions):
            raise RoutedExpertsShapeError(f"the ones of row {i} of the attention mask have gaps")
        spans.append((start, stop))
    return spans
