"""One training step on one rank: gradients accumulated over its microbatches, summed over all ranks.

The loss is the sum over all tokens that the model generated in the step, divided by their number, whichever
microbatch or rank a token came to lie in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tracefile.diagnostics import snapshot
from train_r3_job.batch import pack
from train_r3_job.losses import policy_loss, rloo_advantages
from train_r3_job.model import native
from train_r3_job.parallel import ShardedAttention
from train_r3_job.routing import Replay, Routing, Source
from train_r3_job.shard import Shard, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from train_r3_job.batch import Sample
    from train_r3_job.model import Choose, Model
    from train_r3_job.parallel import Place


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How a step is computed.

    Attributes
    ----------
    pack_tokens : int
        The most tokens of a microbatch.
    clip : float
        Of the importance ratio.
    routing : {"tracefile", "eager", "native"}
    checkpointed : bool
        Recompute activations.
    compare : bool
        Also see what importance ratios native routing would give: one more forward of each microbatch.
    prefetch, budget_bytes : int
        Of the loader.
    """

    pack_tokens: int = 512
    clip: float = 0.2
    routing: Routing = "tracefile"
    checkpointed: bool = True
    compare: bool = True
    prefetch: int = 2
    budget_bytes: int = 8 * 2**20


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step; the same on every rank, but for ``diagnostics``.

    Attributes
    ----------
    loss : float
    tokens : int
        That the model generated.
    microbatches : int
        Over all data parallel ranks.
    agreement : float
        Share of rows times layers whose native experts are those of the trace; NaN if nothing was replayed.
    ratio, ratio_off, ratio_most : float
        Of the importance ratio between learner and rollout: the mean, the mean distance of its logarithm from 0, and
        the largest.
    clipped : float
        Share of tokens with a ratio outside of the clip range.
    native_ratio_off, native_ratio_most : float
        The same with native routing; NaN without ``compare``.
    diagnostics : dict of str to float
        :func:`tracefile.diagnostics.snapshot` at the step's end. ``most_active_chunks`` and ``most_active_bytes`` are
        the most that were held after any of its forwards.
    """

    loss: float
    tokens: int
    microbatches: int
    agreement: float
    ratio: float
    ratio_off: float
    ratio_most: float
    clipped: float
    native_ratio_off: float
    native_ratio_most: float
    diagnostics: dict[str, float]


class _Tally:
    """Sums and maxima over this rank's tokens, to be reduced over all ranks at once."""

    def __init__(self, sums: Sequence[str], maxima: Sequence[str]) -> None:
        self.sums = dict.fromkeys(sums, 0.0)
        self.maxima = dict.fromkeys(maxima, 0.0)

    def ratios(self, ratio: Tensor, clip: float, prefix: str = "") -> None:
        off = ratio.log().abs()
        self.sums[prefix + "ratio"] += float(ratio.sum())
        self.sums[prefix + "off"] += float(off.sum())
        self.sums[prefix + "count"] += len(ratio)
        self.sums[prefix + "clipped"] += int(((ratio - 1).abs() > clip).sum())
        self.maxima[prefix + "most"] = max(self.maxima[prefix + "most"], float(off.max()) if len(off) else 0.0)

    def reduced(self, place: Place) -> dict[str, float]:
        sums = place.sum(torch.tensor(list(self.sums.values()), dtype=torch.float64)).tolist()
        maxima = place.max(torch.tensor(list(self.maxima.values()), dtype=torch.float64)).tolist()
        return dict(zip([*self.sums, *self.maxima], [*sums, *maxima], strict=True))


def accumulate(
    model: Model,
    place: Place,
    samples: Sequence[Sample],
    options: StepOptions,
    progress: Callable[[str], None] = lambda text: None,
) -> StepResult:
    """Set the gradients of ``model`` to those of the whole step's loss.

    Parameters
    ----------
    model : Model
        The same weights on every rank.
    place : Place
    samples : sequence of Sample
        All of the step, on every rank the same.
    options : StepOptions
    progress : callable
    """
    advantages = rloo_advantages([sample.reward for sample in samples], [sample.group for sample in samples]).tolist()
    packs = pack([len(sample) for sample in samples], options.pack_tokens)
    own = packs[place.dp_rank :: place.layout.dp]
    specs = place.specs()
    tally = _Tally(
        ["loss", "agreed", "compared"]
        + [prefix + name for prefix in ("", "native ") for name in ("ratio", "off", "count", "clipped")],
        ["most", "native most"],
    )
    tokens = sum(int(sample.generated.sum()) for sample in samples)
    most = {"active_chunks": 0.0, "active_bytes": 0.0}

    def log_probabilities(shard: Shard, attention: ShardedAttention, choose: Choose, checkpointed: bool) -> Tensor:
        logits, _ = model(shard.tokens, shard.positions, attention, choose, checkpointed=checkpointed)
        labelled: Tensor = logits.log_softmax(-1).gather(1, shard.labels[:, None])[:, 0]
        return labelled

    model.zero_grad()
    with Source(
        options.routing,
        [[samples[i] for i in numbers] for numbers in own],
        samples,
        place.spec,
        prefetch=options.prefetch,
        budget_bytes=options.budget_bytes,
    ) as source:
        for number, numbers in enumerate(own):
            chosen, advantage = [samples[i] for i in numbers], [advantages[i] for i in numbers]
            rows = [rows_of([len(sample) for sample in chosen], spec) for spec in specs]
            attention = ShardedAttention(place, rows)
            shard = Shard.cut(chosen, advantage, rows[specs.index(place.spec)])
            mask = shard.loss_mask
            if options.compare:
                with torch.no_grad():
                    logprobs = log_probabilities(shard, attention, native(model.shape.top_k), False)
                    tally.ratios((logprobs - shard.rollout_logprobs).exp()[mask], options.clip, "native ")
            read = source.read(number)
            replay = Replay(read, shard.routed) if read is not None else None
            choose = replay if replay is not None else native(model.shape.top_k)
            logprobs = log_probabilities(shard, attention, choose, options.checkpointed)
            dtype = logprobs.dtype
            losses, ratio = policy_loss(
                logprobs, shard.rollout_logprobs.to(dtype), shard.advantages.to(dtype), options.clip
            )
            loss = torch.where(mask, losses, 0).sum() / tokens
            held = snapshot(prefix="", smaps=False)
            most = {name: max(value, held[name]) for name, value in most.items()}
            if replay is not None:
                replay.stage = "backward"
                tally.sums["agreed"] += replay.agreed
                tally.sums["compared"] += replay.compared
            torch.autograd.backward(loss)
            tally.sums["loss"] += float(loss.detach())
            tally.ratios(ratio[mask].double(), options.clip)
            progress(f"microbatch {number + 1} of {len(own)}")
    _sum_gradients(model, place)
    total = tally.reduced(place)
    diagnostics = snapshot(prefix="", smaps=False)
    diagnostics |= {f"most_{name}": value for name, value in most.items()}
    return StepResult(
        loss=total["loss"],
        tokens=int(total["count"]),
        microbatches=len(packs),
        agreement=_share(total["agreed"], total["compared"]),
        ratio=_share(total["ratio"], total["count"]),
        ratio_off=_share(total["off"], total["count"]),
        ratio_most=total["most"],
        clipped=_share(total["clipped"], total["count"]),
        native_ratio_off=_share(total["native off"], total["native count"]),
        native_ratio_most=total["native most"] if total["native count"] else float("nan"),
        diagnostics=diagnostics,
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def _sum_gradients(model: Model, place: Place) -> None:
    """Of all ranks, as one buffer; an expert that none of this rank's rows went to has none yet."""
    parameters = list(model.parameters())
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    parts = torch.split(place.sum(flat), [p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
