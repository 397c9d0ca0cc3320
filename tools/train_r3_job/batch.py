"""What rollouts hand to the learner: samples, and the file that holds those of one step."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    import tracefile


@dataclass(frozen=True, slots=True)
class Sample:
    """One session of a rollout.

    Attributes
    ----------
    sample_id : str
        Under which the trace has its routing.
    group : int
        The prompt that it shares with the others of its group.
    tokens : Tensor
        int64 ``[tokens]``.
    generated : Tensor
        bool ``[tokens]``: by the model, not by the environment.
    logprobs : Tensor
        float32 ``[tokens]``: of each generated token, as the rollout computed it; 0 elsewhere.
    reward : float
    experts : LazyRoutedExperts
        ``[tokens - 1, layers, top_k]``: the last token was sampled, but never fed.
    """

    sample_id: str
    group: int
    tokens: Tensor
    generated: Tensor
    logprobs: Tensor
    reward: float
    experts: tracefile.LazyRoutedExperts

    def __len__(self) -> int:
        return len(self.tokens)


def save(path: str, samples: Sequence[Sample]) -> None:
    """Write a step's samples. Their routing stays in the trace; here are references, 250 bytes each."""
    replace(path, [{name: getattr(sample, name) for name in Sample.__slots__} for sample in samples])


def load(path: str) -> list[Sample]:
    return [Sample(**fields) for fields in torch.load(path, weights_only=True)]


def replace(path: str, content: Any) -> None:
    """``torch.save`` that leaves the file before or the file after, whenever the process is killed."""
    partial = f"{path}.partial"
    torch.save(content, partial)
    os.replace(partial, path)


def pack(lengths: Sequence[int], most_tokens: int) -> list[list[int]]:
    """Microbatches of samples in their order, each of up to ``most_tokens`` tokens, at least one sample.

    Examples
    --------
    >>> pack([5, 4, 9, 2, 12], 10)
    [[0, 1], [2], [3], [4]]
    """
    packs: list[list[int]] = []
    room = 0
    for number, length in enumerate(lengths):
        if not packs or length > room:
            packs.append([])
            room = most_tokens
        packs[-1].append(number)
        room -= length
    return packs
