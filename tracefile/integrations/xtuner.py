"""XTuner: routed experts travel as references behind Ray object refs, as the train worker expects them.

XTuner's train worker tells padding by its type: what is a ``torch.Tensor`` in ``rollout_routed_experts`` before
``ray.get`` is replaced by random experts, without a word. A lazy tensor is a Tensor, so it must never be put into
``RolloutState.routed_experts`` itself; it must be what an object ref there refers to. From there on XTuner's own
code works on it: one ref or a list of refs (the turns of a session, shared between samples), offloaded or not.

A user changes a few lines. Where rollouts come from, either an agent loop::

    class TracedAgentLoop(SingleTurnAgentLoop):
        async def generate_sample(self, rollout_state, **kwargs):
            rollout_state = await super().generate_sample(rollout_state, **kwargs)
            return await self.refs.replace(rollout_state)  # self.refs = RolloutRefs(TraceWriter(path, ...))

or, nearer to the source and with nothing else in the object store, the three places that hand new routing to
``ray.put`` (``rl/rollout/worker.py``; ``rl/rollout/session_server.py`` twice, for a turn's prompt and response)::

    routed_experts = self.refs.put(uid, routed_experts)

Where the model is built, in the train worker, unless ``FSDPConfig(torch_compile=False)``: the compiler cannot trace
reading from disk, so the experts of a layer are read just before its compiled forward::

    self._engine = self._build_engine(worker_cfg)
    read_before_layers(self._engine.model)

XTuner frees the refs that it has consumed (``ray.internal.free``), as before; that frees a few hundred bytes each.
The rows stay until the trace is deleted, which is the user's to do, once the steps that train on it are done.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from tracefile.errors import OptionError
from tracefile.lazy import LazyRoutedExperts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ray import ObjectRef

    from tracefile.writer import TraceWriter

State = TypeVar("State")


class RolloutRefs:
    """Writes the routed experts of rollouts to a trace, and gives out Ray object refs to the lazy tensors.

    Parameters
    ----------
    writer : TraceWriter
        Of a trace with ``num_layers=num_hidden_layers``, ``top_k=num_experts_per_tok`` and
        ``num_experts=n_routed_experts`` of the model; one writer per rollout process, all on one path. With each
        new trace make a new RolloutRefs: it keeps the refs that :meth:`replace` made, for states that share them.
    """

    def __init__(self, writer: TraceWriter) -> None:
        self.writer = writer
        self._written: dict[str, asyncio.Task[ObjectRef[Any]]] = {}

    def put(self, sample_id: str, routed_experts: Any) -> ObjectRef[Any]:
        """Instead of ``ray.put(routed_experts)``.

        Parameters
        ----------
        sample_id : str
            Names the rows in the trace. The same name again is a newer revision; refs of the old one stay good.
        routed_experts : array or Tensor
            ``[tokens, layers, top_k]`` or ``[tokens, layers * top_k]``.

        Returns
        -------
        ObjectRef
            Of a LazyRoutedExperts. The object is small enough to be sent along, not through the object store.

        Raises
        ------
        TraceError
            As :meth:`~tracefile.TraceWriter.append`.
        """
        import ray

        return ray.put(self.writer.append(sample_id, routed_experts))

    async def replace(self, state: State, sample_id: str | None = None) -> State:
        """Move the routed experts of a finished ``RolloutState`` to the trace; the state refers to them there.

        Refs that several states share are written once. Object refs that it replaces are dropped, not freed:
        Ray frees the arrays when nobody else holds them. A rollout that XTuner resumes later (partial rollout)
        comes out of it as an array again, and is written whole when it is handed in again.

        Parameters
        ----------
        state : xtuner.v1.data_proto.rl_data.RolloutState
            Its ``routed_experts`` may be an array, an object ref, a list of object refs, or None.
        sample_id : str, optional
            Default: the state's ``rollout_id``. The parts of a list get ``/0``, ``/1``, ... after it.

        Returns
        -------
        RolloutState
            The same object.

        Raises
        ------
        OptionError
            The state has no ``rollout_id``, and no ``sample_id`` is given.
        TraceError
            As :meth:`put`; the state is left as it was.
        """
        experts: Any = getattr(state, "routed_experts", None)
        if experts is None:
            return state
        if sample_id is None:
            rollout_id = getattr(state, "rollout_id", None)
            if rollout_id is None:
                raise OptionError("this rollout has no rollout_id to name its rows by; pass sample_id")
            sample_id = str(rollout_id)
        if isinstance(experts, list):
            parts = [self._replaced(f"{sample_id}/{number}", part) for number, part in enumerate(experts)]
            new: Any = await asyncio.gather(*parts)
        else:
            new = await self._replaced(sample_id, experts)
        state.routed_experts = new  # type: ignore[attr-defined]
        return state

    async def _replaced(self, sample_id: str, experts: Any) -> ObjectRef[Any]:
        import ray

        if not isinstance(experts, ray.ObjectRef):
            return await asyncio.to_thread(self.put, sample_id, experts)
        key = experts.hex()
        if key not in self._written:
            # A task, so that states which share a ref and are replaced at the same time wait for the same write.
            self._written[key] = asyncio.ensure_future(self._rewritten(sample_id, experts))
        return await asyncio.shield(self._written[key])

    async def _rewritten(self, sample_id: str, ref: ObjectRef[Any]) -> ObjectRef[Any]:
        experts = await ref
        if isinstance(experts, LazyRoutedExperts):
            return ref
        return await asyncio.to_thread(self.put, sample_id, experts)


def read_before_layers(model: torch.nn.Module) -> int:
    """Have each MoE layer of XTuner's read its routed experts just before its forward, as an ordinary tensor.

    Without it, each operation of a layer's that needs them reads them, and ``torch.compile``, which cannot trace
    that, fails. Only the rows of this rank and that layer are read, and moved in the stored width; gradient
    checkpointing reads again. Routing that is not lazy is left alone.

    Parameters
    ----------
    model : torch.nn.Module
        Its MoE layers are the modules that have a ``layer_idx`` and a ``gate`` of their own.

    Returns
    -------
    int
        How many layers that is.

    Examples
    --------
    >>> import tempfile, tracefile
    >>> from types import SimpleNamespace
    >>> class Layer(torch.nn.Module):  # what matters here of xtuner's MoEDecoderLayer
    ...     def __init__(self, layer_idx):
    ...         super().__init__()
    ...         self.layer_idx, self.gate = layer_idx, torch.nn.Identity()
    ...
    ...     def forward(self, hidden_states, seq_ctx):
    ...         return seq_ctx.rollout_routed_experts[:, self.layer_idx, :]
    >>> model = torch.nn.Sequential(Layer(0), Layer(1))
    >>> read_before_layers(model)
    2
    >>> path = tempfile.mkdtemp() + "/step_1.trace"
    >>> with tracefile.TraceWriter(path, num_layers=2, top_k=2, num_experts=8) as writer:
    ...     experts = writer.append("a", torch.arange(8).view(2, 2, 2))
    >>> seq_ctx = SimpleNamespace(rollout_routed_experts=experts.to(torch.long))
    >>> model[1](torch.ones(2, 4), seq_ctx=seq_ctx)
    tensor([[2, 3],
            [6, 7]])
    >>> seq_ctx.rollout_routed_experts
    <LazyRoutedExperts 2 x 2 x 2 int64 (uint8 on disk), 2 rows of 1 segment, nothing read>
    """
    # Not hasattr: wrappers for gradient checkpointing pass on what their module has.
    layers = [module for module in model.modules() if "layer_idx" in vars(module) and "gate" in module._modules]
    for layer in layers:
        _Reader(layer)
    return len(layers)


class _Reader:
    """Puts the values of one layer into a layer's sequence contexts while its forward runs."""

    def __init__(self, layer: torch.nn.Module) -> None:
        # Lists of what to undo, one per forward that is running: a checkpointed layer may run within a backward.
        self._lazy: list[list[tuple[Any, LazyRoutedExperts]]] = []
        layer.register_forward_pre_hook(self._read, with_kwargs=True)
        layer.register_forward_hook(self._restore, always_call=True)

    def _read(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        replaced: list[tuple[Any, LazyRoutedExperts]] = []
        self._lazy.append(replaced)
        device = next((x.device for x in _leaves((args, kwargs)) if isinstance(x, torch.Tensor)), None)
        for context in _leaves((args, kwargs)):
            experts = getattr(context, "rollout_routed_experts", None)
            if isinstance(experts, LazyRoutedExperts) and layer.layer_idx < experts.shape[1]:
                picked = cast("LazyRoutedExperts", experts[:, layer.layer_idx])
                values = picked.materialize(device=device)
                replaced.append((context, experts))
                # The layer picks its own from among all layers; the others have no memory of their own.
                context.rollout_routed_experts = values[:, None, :].expand(experts.shape)

    def _restore(self, layer: Any, args: Any, output: Any) -> None:
        if self._lazy:  # none if a hook before ours failed
            for context, experts in self._lazy.pop():
                context.rollout_routed_experts = experts


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        yield value
        return
    for part in value:
        yield from _leaves(part)
