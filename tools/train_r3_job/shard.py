"""This rank's part of a packed microbatch, row by row: what it computes on, and what its loss needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefile import ShardSpec
    from train_r3_job.batch import Sample

PADDING = -1


class Rows(NamedTuple):
    """Which rows of a microbatch a rank has, int64 ``[rows]`` each.

    Attributes
    ----------
    samples : Tensor
        The sample's number in the microbatch, or -1: padding.
    positions : Tensor
        Within the sample.
    """

    samples: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's rows of a microbatch, all ``[rows]``; a row's loss is about the token that follows it.

    Attributes
    ----------
    positions : Tensor
        int64; within the sample.
    tokens, labels : Tensor
        int64; ``labels`` is the token after, on whichever rank that one may lie.
    loss_mask : Tensor
        bool; whether the model generated the token after.
    routed : Tensor
        bool; whether the trace has this row: neither padding nor a sample's last token.
    rollout_logprobs, advantages : Tensor
        float64.
    """

    positions: Tensor
    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    routed: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor

    @classmethod
    def cut(cls, samples: Sequence[Sample], advantages: Sequence[float], rows: Rows) -> Shard:
        """Those rows of the microbatch."""
        lengths = torch.tensor([len(sample) for sample in samples])
        starts = lengths.cumsum(0) - lengths
        number, position = rows
        real = number != PADDING
        row = torch.where(real, starts[number] + position, 0)  # in all samples, one after the other
        last = position == lengths[number] - 1
        following = torch.where(real & ~last, row + 1, 0)

        tokens = torch.cat([sample.tokens for sample in samples])
        generated = torch.cat([sample.generated for sample in samples])
        logprobs = torch.cat([sample.logprobs for sample in samples]).double()
        return cls(
            positions=position,
            tokens=torch.where(real, tokens[row], 0),
            labels=tokens[following],
            loss_mask=generated[following] & real & ~last,
            routed=real & ~last,
            rollout_logprobs=logprobs[following],
            advantages=torch.tensor(advantages, dtype=torch.float64)[number],
        )


def rows_of(lengths: Sequence[int], spec: ShardSpec) -> Rows:
    """The rows of the rank that ``spec`` describes."""
    numbers, positions = [], []
    for sample, start, stop in replace(spec, rows="tokens").row_ranges(lengths):
        numbers.append(torch.full((stop - start,), PADDING if sample is None else sample))
        positions.append(torch.arange(start, stop))
    return Rows(torch.cat(numbers), torch.cat(positions))
