"""slime: samples' routed experts go to a trace, and ``Sample.rollout_routed_experts`` becomes a lazy tensor.

None of slime's code changes. Two of its extension points are handed samples before their routed experts travel;
a user sets one of them:

``--rollout-sample-hook-path tracefile.integrations.slime.write_sample``
    Each sample as it is generated, and each leg of a partial rollout: the rollout manager never holds more than
    what is in flight. Called by slime's own rollout functions (``slime.rollout.sglang_rollout``, and
    ``slime.rollout.fully_async_rollout`` through it), also around a ``--custom-generate-function-path``.
``--custom-rollout-log-function-path tracefile.integrations.slime.write_rollout``
    All samples of a step at once, whatever ``--rollout-function-path`` made them. slime's own logging goes on.
    A user who has a function there already calls :func:`write_rollout` from it.

Where traces go, one per rollout step, is a template like those of slime's debug dumps, either in the YAML file of
``--custom-config-path``::

    tracefile_path: /shared/traces/step_{rollout_id:06d}.trace
    tracefile_fill: spread  # optional: what rows become that the engine did not capture; reading them is an error

or in the environment of the rollout manager (``TRACEFILE_SLIME_PATH``, ``TRACEFILE_SLIME_FILL``). Learner ranks
read the same path. A step's trace may be deleted once the samples that were begun or written in it are trained on.

In the learner nothing has to be set: routers pop lazy tensors, which read themselves. To have them read ahead of
time, by a :class:`~tracefile.MicrobatchLoader` that slime's ``RoutingReplay`` closes after the step, set::

    --custom-megatron-before-log-prob-hook-path tracefile.integrations.slime.before_log_prob
    --custom-megatron-before-train-step-hook-path tracefile.integrations.slime.before_train_step

``--save-debug-rollout-data`` then dumps references, which ``--load-debug-rollout-data`` can follow for as long as
the traces are there. With :func:`write_rollout` alone the dump, which slime makes before, holds the values.

With ``--rollout-data-transport nixl``, Ray moves ordinary tensors on their own; lazy ones stay where they are in the
object, as references.

slime's other extension points do not serve: ``--rollout-sample-filter-path``, ``--rollout-all-samples-process-path``
and ``--buffer-filter-path`` are not told the rollout id; ``--custom-reward-post-process-path`` and
``--custom-convert-samples-to-train-data-path`` replace work of slime's own; ``--rollout-data-postprocess-path`` runs
in the learner.

Examples
--------
What slime calls with either flag set:

>>> import asyncio, tempfile, torch, tracefile
>>> from types import SimpleNamespace
>>> args = SimpleNamespace(num_layers=3, moe_router_topk=2, num_experts=64)  # slime's, from its command line
>>> args.tracefile_path = tempfile.mkdtemp() + "/step_{rollout_id:06d}.trace"
>>> sample = SimpleNamespace(group_index=0, index=5, rollout_routed_experts=torch.arange(24).view(4, 3, 2))
>>> asyncio.run(write_sample(args, sample, rollout_id=12))
>>> sample.rollout_routed_experts
<LazyRoutedExperts 4 x 3 x 2 int32 (uint8 on disk), 4 rows of 1 segment, nothing read>
>>> write_rollout(12, args, [sample])  # it is written already
False
>>> list(tracefile.open(trace_path(args, 12)))
['0/5']
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from tracefile.errors import OptionError
from tracefile.fill import check_fill
from tracefile.lazy import LazyRoutedExperts
from tracefile.loader import MicrobatchLoader
from tracefile.writer import TraceWriter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_SEGMENT_SAMPLES = 16  # of write_rollout: the memory of so many samples is given back at a time
_OPEN_TRACES = 4  # of write_sample: asynchronous rollouts may finish samples of the step before


async def write_sample(args: Any, sample: Any, *, rollout_id: int | None = None, evaluation: bool = False) -> None:
    """For ``--rollout-sample-hook-path``: write one sample, and leave a lazy tensor in it.

    The event loop goes on meanwhile. A sample that is resumed later (``--partial-rollout``) is written to the trace
    of the step that resumed it, whole, but for rows that this trace has already; what an aborted one has is left
    alone if slime would drop it.

    Parameters
    ----------
    args : Namespace
        slime's arguments: ``num_layers``, ``moe_router_topk``, ``num_experts``, and where the trace goes.
    sample : slime.utils.types.Sample
    rollout_id : int
    evaluation : bool
        Samples of an evaluation are left alone: nobody trains on them.

    Raises
    ------
    OptionError
        It is not said where traces go.
    TraceError
        As :meth:`~tracefile.TraceWriter.append`; the sample is left as it was.
    """
    if evaluation or not _is_pending(sample) or (_is_aborted(sample) and not getattr(args, "partial_rollout", True)):
        return
    sample.rollout_routed_experts = await asyncio.to_thread(_write_one, args, sample, rollout_id)


def write_rollout(
    rollout_id: int, args: Any, samples: Iterable[Any], rollout_extra_metrics: Any = None, rollout_time: Any = None
) -> bool:
    """For ``--custom-rollout-log-function-path``: write all samples of a step, and leave lazy tensors in them.

    Samples that are in a trace already stay there. Nothing is written if no sample has routed experts.

    Parameters
    ----------
    rollout_id : int
    args : Namespace
        As for :func:`write_sample`.
    samples : iterable of slime.utils.types.Sample
        Also nested, as rollout functions return them.
    rollout_extra_metrics, rollout_time
        What slime passes; not used.

    Returns
    -------
    bool
        False: slime goes on with its own logging.

    Raises
    ------
    OptionError, TraceError
        As :func:`write_sample`.
    """
    pending = [sample for sample in _flat(samples) if _is_pending(sample)]
    if not pending:
        return False
    with _open_writer(args, trace_path(args, rollout_id)) as writer:
        names: Counter[str] = Counter()
        for first in range(0, len(pending), _SEGMENT_SAMPLES):
            batch = pending[first : first + _SEGMENT_SAMPLES]
            written = writer.append_many((_name(sample, names), sample.rollout_routed_experts) for sample in batch)
            for sample, experts in zip(batch, written, strict=True):
                sample.rollout_routed_experts = experts.filled(_fill(args))
    return False


def trace_path(args: Any, rollout_id: int | None) -> str:
    """Where the trace of a rollout step goes.

    Raises
    ------
    OptionError
        Neither ``tracefile_path`` nor ``TRACEFILE_SLIME_PATH`` is set, or it is not a template of ``rollout_id``.
    """
    template = getattr(args, "tracefile_path", None) or os.environ.get("TRACEFILE_SLIME_PATH")
    if not template:
        raise OptionError(
            "it is not said where slime's traces go: set tracefile_path in the file of --custom-config-path, or"
            " TRACEFILE_SLIME_PATH, to a template such as /shared/traces/step_{rollout_id:06d}.trace"
        )
    try:
        path = str(template).format(rollout_id=rollout_id)
    except (LookupError, TypeError, ValueError) as error:
        raise OptionError(
            f"{template!r} does not make a path of rollout_id={rollout_id}: {error}; the template is one such as"
            " /shared/traces/step_{rollout_id:06d}.trace"
        ) from None
    if path == template:
        raise OptionError(f"{template!r} has no {{rollout_id}}; each step has a trace of its own")
    return path


def before_log_prob(args: Any, model: Any, store_prefix: str = "") -> None:
    """For ``--custom-megatron-before-log-prob-hook-path``: read ahead for the pass that computes log-probabilities.

    Parameters
    ----------
    args : Namespace
        ``tracefile_prefetch`` and ``tracefile_budget_bytes``, if set, are the loader's.
    model, store_prefix
        What slime passes. Passes of other models than the actor route natively.
    """
    if not store_prefix:
        _read_ahead(args, "forward")


def before_train_step(args: Any, rollout_id: int, step_id: int, *_: Any) -> None:
    """For ``--custom-megatron-before-train-step-hook-path``: read ahead for the training pass.

    Parameters
    ----------
    args : Namespace
        As for :func:`before_log_prob`.
    rollout_id, step_id : int
        The pass begins with the first of a rollout's steps.
    """
    if step_id == 0:
        _read_ahead(args, "backward")


def _read_ahead(args: Any, release_stage: str) -> None:
    from slime.utils.routing_replay import RoutingReplay

    options = {
        option: getattr(args, f"tracefile_{option}")
        for option in ("prefetch", "budget_bytes")
        if getattr(args, f"tracefile_{option}", None) is not None
    }
    pipeline = getattr(args, "pipeline_model_parallel_size", 1) or 1
    if pipeline > 1:
        from megatron.core import parallel_state

        options["warmup"] = pipeline - parallel_state.get_pipeline_model_parallel_rank() - 1
    read_ahead(RoutingReplay, release_stage, **options)


def read_ahead(routing_replay: Any, release_stage: str, **options: Any) -> MicrobatchLoader | None:
    """Start a pass of the loader over what slime's routers have recorded; the first time, make it.

    Parameters
    ----------
    routing_replay : type
        slime's ``RoutingReplay``. What its routers recorded is replaced by the loader's lazy tensors, and the loader
        becomes one of its lazy resources, so that ``clear_all`` closes it.
    release_stage : {"forward", "backward"}
        As for :meth:`MicrobatchLoader.begin_pass`.
    **options
        As for :class:`~tracefile.MicrobatchLoader`.

    Returns
    -------
    MicrobatchLoader or None
        ``None`` where nothing lazy was recorded.
    """
    routers = routing_replay.all_routing_replays
    recorded = [router.top_indices_list for router in routers]
    if not recorded or not all(isinstance(item, LazyRoutedExperts) for items in recorded for item in items):
        return None
    loader = next((each for each in routing_replay.lazy_resources if isinstance(each, MicrobatchLoader)), None)
    if loader is None:
        options.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
        loader = MicrobatchLoader(list(zip(*recorded, strict=True)), **options)
        for microbatch in loader:
            for items, layer in zip(recorded, microbatch, strict=True):
                items[microbatch.number] = layer
        routing_replay.register_lazy_resource(loader)
    loader.begin_pass(release_stage)
    return loader


def _write_one(args: Any, sample: Any, rollout_id: int | None) -> LazyRoutedExperts:
    writer, name = _traces.writer_for(args, trace_path(args, rollout_id), sample)
    return writer.append(name, sample.rollout_routed_experts).filled(_fill(args))


class _Traces:
    """The traces that this process writes samples to, newest last. Those of steps long past are closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[str, tuple[TraceWriter, Counter[str]]] = OrderedDict()

    def writer_for(self, args: Any, path: str, sample: Any) -> tuple[TraceWriter, str]:
        with self._lock:
            if path not in self._open:
                self._open[path] = (_open_writer(args, path), Counter())
                while len(self._open) > _OPEN_TRACES:
                    self._open.popitem(last=False)[1][0].close()
            writer, names = self._open[path]
            return writer, _name(sample, names)


_traces = _Traces()


def _open_writer(args: Any, path: str) -> TraceWriter:
    return TraceWriter(path, num_layers=args.num_layers, top_k=args.moe_router_topk, num_experts=args.num_experts)


def _fill(args: Any) -> str:
    fill = getattr(args, "tracefile_fill", None) or os.environ.get("TRACEFILE_SLIME_FILL") or "error"
    return check_fill(fill)


def _is_pending(sample: Any) -> bool:
    """Whether a sample has routed experts that are not, or not all, in a trace."""
    experts = sample.rollout_routed_experts
    if isinstance(experts, LazyRoutedExperts):
        # A resumed sample: slime has concatenated new rows to those that were written.
        return experts.selection.rows.padding_bytes > 0
    return experts is not None


def _is_aborted(sample: Any) -> bool:
    status = getattr(sample, "status", None)
    return getattr(status, "value", status) == "aborted"


def _name(sample: Any, names: Counter[str]) -> str:
    """``group/index``; samples that one rollout fanned out into share it, and are numbered."""
    parts = [getattr(sample, part, None) for part in ("group_index", "index")]
    name = "/".join(str(part) for part in parts if part is not None) or str(getattr(sample, "session_id", None))
    names[name] += 1
    return name if names[name] == 1 else f"{name}#{names[name]}"


def _flat(samples: Iterable[Any]) -> Iterator[Any]:
    for sample in samples:
        if isinstance(sample, (list, tuple)):
            yield from _flat(sample)
        else:
            yield sample
