"""RLOO: advantages within groups, and the clipped policy-gradient loss of a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def rloo_advantages(rewards: Sequence[float], groups: Sequence[int]) -> Tensor:
    """Each reward less the mean of the others of its group (leave one out), float64 ``[samples]``.

    All samples of a step, wherever its microbatches cut the groups.

    Examples
    --------
    >>> rloo_advantages([1.0, 0.0, 0.5, 1.0, 0.0], [0, 0, 1, 0, 1]).tolist()
    [0.5, -1.0, 0.5, 0.5, -0.5]
    """
    reward = torch.tensor(rewards, dtype=torch.float64)
    names = sorted(set(groups))
    group = torch.tensor([names.index(name) for name in groups])
    size = group.bincount()
    if int(size.min()) < 2:
        raise ValueError("a group of one sample has no others to compare it with; sample at least two of each prompt")
    total = torch.zeros(len(size), dtype=torch.float64).index_add_(0, group, reward)
    others = (total[group] - reward) / (size[group] - 1)
    advantages: Tensor = reward - others
    return advantages


def policy_loss(logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Of each token: the loss, and the importance ratio between this policy and the one that sampled it.

    The ratio is clipped to ``[1 - clip, 1 + clip]`` where that lowers the objective (PPO).
    """
    ratio = (logprobs - rollout_logprobs).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio * advantages, clipped * advantages), ratio.detach()
