"""Megatron-core: this rank's shard from ``parallel_state``, and lazy routing for ``RouterReplay``.

What changes in a training script that replays routing, where ``model_chunk`` has been built with
``moe_enable_routing_replay=True``::

    from tracefile.integrations.megatron import decoder_routers, set_replay_data, shard_spec

    spec = shard_spec(config, rows="tokens-1")  # config: the model's TransformerConfig
    routers = decoder_routers(model_chunk)
    for router in routers.values():
        router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    local = spec.apply(samples, num_tokens)  # for each microbatch: lazy tensors and their numbers of tokens
    set_replay_data(local, routers)  # nothing is read before a router asks for its layer

Megatron keeps all that is set until the backward recompute has popped it; here these are references, and a whole
schedule of them takes no memory. After a pass without backward, ``RouterReplay.clear_global_indices()`` empties the
queues, or the next backward pops what is left. A :class:`~tracefile.MicrobatchLoader` over the shards reads them
ahead of their use; its microbatches are set in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tracefile.errors import OptionError
from tracefile.lazy import LazyRoutedExperts
from tracefile.sharding import ShardSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def moe_layers(config: Any, *, vp_stage: int | None = None, mtp: bool = False) -> tuple[int, ...]:
    """Global ids of this pipeline rank's MoE layers, in the order in which Megatron makes their routers.

    Parameters
    ----------
    config : megatron.core.transformer.TransformerConfig
    vp_stage : int, optional
        Only those of one model chunk. Default: all of this rank's chunks, in their order.
    mtp : bool
        Also the multi-token prediction layers that are built here, as ``num_layers`` and up, which is how Hugging
        Face's configurations number them. By default they are left out: rollouts rarely record them, and they must
        not take a decoder layer's routes.

    Returns
    -------
    tuple of int
        Counted from 0, dense layers included in the count.
    """
    from megatron.core.transformer.multi_token_prediction import get_mtp_num_layers_to_build
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    is_moe = _moe_pattern(config)
    chunks = config.virtual_pipeline_model_parallel_size
    stages = [vp_stage] if vp_stage is not None or not chunks else range(chunks)
    layers: list[int] = []
    for stage in stages:
        first = get_transformer_layer_offset(config, stage)
        layers += [i for i in range(first, first + get_num_layers_to_build(config, stage)) if is_moe[i]]
        if mtp and is_moe[-1]:  # MTP layers are built like the last decoder layer
            layers += range(config.num_layers, config.num_layers + get_mtp_num_layers_to_build(config, stage))
    return tuple(layers)


def _moe_pattern(config: Any) -> list[bool]:
    if not config.num_moe_experts:
        return [False] * config.num_layers
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [i % frequency == 0 for i in range(config.num_layers)]
    if len(frequency) != config.num_layers:
        raise OptionError(f"moe_layer_freq has {len(frequency)} entries for {config.num_layers} layers")
    return [bool(moe) for moe in frequency]


def shard_spec(config: Any, *, vp_stage: int | None = None, mtp: bool = False, **options: Any) -> ShardSpec:
    """The shard of the calling rank, from ``megatron.core.parallel_state`` and the model's configuration.

    Zigzag context parallelism, split once more by tensor parallel ranks if ``config.sequence_parallel``; of the
    layers, those of :func:`moe_layers`.

    Parameters
    ----------
    config : megatron.core.transformer.TransformerConfig
    vp_stage, mtp
        As for :func:`moe_layers`.
    **options
        As for :class:`~tracefile.ShardSpec`; they override what Megatron says.

    Returns
    -------
    ShardSpec
    """
    from megatron.core import parallel_state

    found: dict[str, Any] = {
        "cp_size": parallel_state.get_context_parallel_world_size(),
        "cp_rank": parallel_state.get_context_parallel_rank(),
    }
    if config.sequence_parallel:
        found["tp_size"] = parallel_state.get_tensor_model_parallel_world_size()
        found["tp_rank"] = parallel_state.get_tensor_model_parallel_rank()
    if "layer_ids" not in options:
        found["layer_ids"] = moe_layers(config, vp_stage=vp_stage, mtp=mtp)
    return ShardSpec(**{**found, **options})


def decoder_routers(model: torch.nn.Module) -> dict[int, Any]:
    """The ``RouterReplay`` of each MoE layer of a model chunk's decoder, by global layer id.

    Those of multi-token prediction layers are not among them; without a replay action they route natively.
    ``RouterReplay.set_replay_data`` addresses every router of the process, which is too many where there are MTP
    layers or several model chunks.

    Parameters
    ----------
    model : torch.nn.Module
        Of one model chunk, wrapped or not.
    """
    routers: dict[int, Any] = {}
    for name, module in model.named_modules():
        router = getattr(module, "router_replay", None)
        if router is None or "mtp" in name.split("."):
            continue
        layer = module.layer_number - 1  # Megatron counts from 1
        if layer in routers:
            raise OptionError(f"two routers of the model chunk say that they are of layer {layer}")
        routers[layer] = router
    return routers


def set_replay_data(
    local: torch.Tensor | Sequence[torch.Tensor],
    routers: Mapping[int, Any] | None = None,
    *,
    replay_mask: torch.Tensor | None = None,
) -> None:
    """Give routers the ids that they replay for the next microbatch. Reads nothing.

    Parameters
    ----------
    local : LazyRoutedExperts, sequence of LazyRoutedExperts, or torch.Tensor
        This rank's shard ``[local_rows, layers, top_k]``, or its layers, as a microbatch of a
        :class:`~tracefile.MicrobatchLoader`.
    routers : mapping of int to RouterReplay, optional
        Routers by global layer id, which finds each its layer; see :func:`decoder_routers`. Default: all routers of
        the process in the order of their construction, which must be that of the layers.
    replay_mask : torch.Tensor, optional
        Bool per local row, for verl's ``RouterReplay``: where false, the router chooses.

    Raises
    ------
    OptionError
        The layers are not those of the routers.
    """
    layers: Sequence[torch.Tensor] = local.unbind(1) if isinstance(local, torch.Tensor) else local
    if routers is None:
        from megatron.core.transformer.moe.router_replay import RouterReplay

        count = len(RouterReplay.global_router_replay_instances)
        if count != len(layers) or replay_mask is not None:
            raise OptionError(
                f"{len(layers)} layers for {count} routers; where some belong to other model chunks or to MTP layers,"
                " or with a replay_mask, pass routers=decoder_routers(model_chunk)"
            )
        RouterReplay.set_replay_data([_at_use(layer) for layer in layers])
        return
    by_id = {layer.layer_ids[0]: layer for layer in layers if isinstance(layer, LazyRoutedExperts)}
    lacking = sorted(set(routers) - set(by_id))
    if lacking:
        raise OptionError(
            f"layers {lacking} of the routers are not among those given, {sorted(by_id)}; ordinary tensors do not say"
            " which layer they are of"
        )
    mask = {} if replay_mask is None else {"replay_mask": replay_mask}
    for layer_id, router in routers.items():
        router.set_target_indices(_at_use(by_id[layer_id]), **mask)


def _at_use(layer: torch.Tensor) -> torch.Tensor:
    return ReplayIndices.of(layer) if isinstance(layer, LazyRoutedExperts) else layer.to(torch.int64)


class ReplayIndices(LazyRoutedExperts):
    """Ids of one layer in a router's queue: lazy, int64, and read by ``to``.

    A router moves what it pops to its scores' device, and then uses it in one gather and two scatters, two of which
    autograd keeps for the backward. Left lazy, ids would be read for each; like this they are read once.
    """

    @classmethod
    def of(cls, layer: LazyRoutedExperts) -> ReplayIndices:
        indices = cls._wrap(layer.selection, torch.int64, layer.device, layer.pinned, layer.fill)
        indices.ahead = layer.ahead
        assert isinstance(indices, ReplayIndices)
        return indices

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The values, on the device and of the dtype asked for; int64 if none is."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        return self.materialize(device=device, dtype=dtype)
