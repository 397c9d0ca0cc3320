"""Where a learner rank's routers get their experts from.

``"tracefile"``: from the trace, through a loader that reads this rank's rows ahead. ``"eager"``: every rank holds the
whole step's routing as ordinary tensors and slices its rows, as frameworks do. ``"native"``: what they choose
themselves. The first two are interchangeable, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

import tracefile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from torch import Tensor

    from train_r3_job.batch import Sample

Routing: TypeAlias = Literal["tracefile", "eager", "native"]
#: ``(layer, stage) -> ids`` int64 ``[rows, top_k]``.
Read: TypeAlias = "Callable[[int, str], Tensor]"


@dataclass(slots=True)
class Replay:
    """Replays a microbatch's routing, and counts how often the routers would have chosen the same.

    Attributes
    ----------
    read : callable
    routed : Tensor
        bool ``[rows]``: the rows to count.
    stage : {"forward", "backward"}
        Whether routers ask for the first time, or to compute a layer again.
    agreed, compared : int
        Rows times layers.
    """

    read: Read
    routed: Tensor
    stage: str = "forward"
    agreed: int = field(default=0, init=False)
    compared: int = field(default=0, init=False)

    def __call__(self, layer: int, logits: Tensor) -> Tensor:
        ids = self.read(layer, self.stage)
        if self.stage == "forward":
            native = logits.detach().topk(ids.shape[1], -1).indices
            same = (native.sort(-1).values == ids.sort(-1).values).all(-1)
            self.agreed += int((same & self.routed).sum())
            self.compared += int(self.routed.sum())
        return ids


class Source:
    """The routing of a rank's microbatches in a step; a context, as it may hold a thread.

    Parameters
    ----------
    kind : {"tracefile", "eager", "native"}
    microbatches : sequence of sequence of Sample
        This rank's.
    everything : sequence of Sample
        The whole step; what eager ranks hold.
    spec : ShardSpec
    prefetch, budget_bytes : int
        As for :class:`tracefile.MicrobatchLoader`.
    """

    def __init__(
        self,
        kind: Routing,
        microbatches: Sequence[Sequence[Sample]],
        everything: Sequence[Sample],
        spec: tracefile.ShardSpec,
        *,
        prefetch: int,
        budget_bytes: int,
    ) -> None:
        self._shards: list[Tensor] = []
        self.loader: tracefile.MicrobatchLoader | None = None
        lengths = [[len(sample) for sample in samples] for samples in microbatches]
        if kind == "tracefile":
            lazy: list[Any] = [
                spec.apply([sample.experts for sample in samples], tokens)
                for samples, tokens in zip(microbatches, lengths, strict=True)
            ]
            self.loader = tracefile.MicrobatchLoader(lazy, prefetch=prefetch, budget_bytes=budget_bytes)
        elif kind == "eager":
            held = {sample.sample_id: sample.experts.materialize() for sample in everything}
            experts = everything[0].experts.config.num_experts
            self._shards = [
                spec.apply([held[sample.sample_id] for sample in samples], tokens, num_experts=experts)
                for samples, tokens in zip(microbatches, lengths, strict=True)
            ]

    def read(self, number: int) -> Read | None:
        """How to read microbatch ``number``; ``None``: the routers choose."""
        if self.loader is not None:
            return self.loader[number].layer
        if self._shards:
            shard = self._shards[number]
            return lambda layer, stage: shard[:, layer].to(torch.int64)
        return None

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.loader is not None:
            self.loader.close()
