"""Sampling sessions turn by turn from a cache of keys and values, with the routing that was really used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from train_r3_job.model import native
from train_r3_job.task import STOP, Environment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from train_r3_job.model import Choose, Model, ModelShape


@dataclass(slots=True)
class Session:
    """One sample as it grows.

    Attributes
    ----------
    sample_id : str
    group : int
    environment : Environment
    tokens, generated, logprobs : list
        As in :class:`~train_r3_job.batch.Sample`.
    rows : list of Tensor
        int ``[layers, top_k]`` of each token that was fed: all but the last of a turn, whose row comes with the
        next turn.
    """

    sample_id: str
    group: int
    environment: Environment
    tokens: list[int] = field(default_factory=list)
    generated: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add what the environment says."""
        self.tokens += tokens
        self.generated += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)

    def sampled(self, token: int, logprob: float) -> None:
        self.tokens.append(token)
        self.generated.append(True)
        self.logprobs.append(logprob)

    def routed_experts(self, start: int = 0) -> Tensor:
        """``[rows, layers, top_k]`` from row ``start`` on."""
        return torch.stack(self.rows[start:])


class CachedAttention:
    """Attention of new rows to all earlier ones of their session, which it keeps.

    Attributes
    ----------
    sessions, positions : Tensor
        int64 ``[rows]``: whose the rows of the next forward are, and their positions.
    """

    def __init__(self, shape: ModelShape, sessions: int, length: int, dtype: torch.dtype) -> None:
        size = (shape.all_layers, sessions, length, shape.heads, shape.head_width)
        self._keys, self._values = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)
        self._places = torch.arange(length)
        self.sessions = self.positions = torch.zeros(0, dtype=torch.int64)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._keys[layer][self.sessions, self.positions] = key
        self._values[layer][self.sessions, self.positions] = value
        longest = int(self.positions.max()) + 1
        keys = self._keys[layer, :, :longest][self.sessions].transpose(1, 2)
        values = self._values[layer, :, :longest][self.sessions].transpose(1, 2)
        visible = self._places[:longest] <= self.positions[:, None]
        mixed = functional.scaled_dot_product_attention(
            query[:, :, None], keys, values, attn_mask=visible[:, None, None]
        )
        return mixed[:, :, 0]


def noisy(top_k: int, noise: float, generator: torch.Generator) -> Choose:
    """Experts by logits with noise: what other kernels, other parallel sizes or quantized weights come to."""
    if not noise:
        return native(top_k)

    def choose(layer: int, logits: Tensor) -> Tensor:
        disturbed = logits.float() + noise * torch.randn(logits.shape, generator=generator)
        return disturbed.topk(top_k, -1).indices

    return choose


class Generator:
    """Continues sessions, all in one batch.

    Parameters
    ----------
    model : Model
        May be replaced between turns; keys and values that are there stay.
    sessions : sequence of Session
    max_tokens : int
        The longest session.
    noise : float
        Of the router's logits when experts are chosen.
    seed : int
    """

    def __init__(self, model: Model, sessions: Sequence[Session], max_tokens: int, noise: float, seed: int) -> None:
        self.model = model
        self._sessions = sessions
        self._random = torch.Generator().manual_seed(seed)
        self._choose = noisy(model.shape.top_k, noise, self._random)
        dtype = next(model.parameters()).dtype
        self._attention = CachedAttention(model.shape, len(sessions), max_tokens, dtype)

    @torch.inference_mode()
    def turn(self, max_answer: int) -> None:
        """The environment asks, the model answers with up to ``max_answer`` tokens, the environment judges."""
        for session in self._sessions:
            session.extend(session.environment.ask())
        starts = [len(session.tokens) for session in self._sessions]
        running = list(range(len(self._sessions)))
        while running:
            logits = self._feed(running)
            logprobs = logits.float().log_softmax(-1)
            tokens = torch.multinomial(logprobs.exp(), 1, generator=self._random)
            chosen = logprobs.gather(1, tokens)[:, 0].tolist()
            going = []
            for number, token, logprob in zip(running, tokens[:, 0].tolist(), chosen, strict=True):
                session = self._sessions[number]
                session.sampled(token, logprob)
                if token != STOP and len(session.tokens) - starts[number] < max_answer:
                    going.append(number)
            running = going
        for session, start in zip(self._sessions, starts, strict=True):
            session.environment.answer(session.tokens[start:])

    def _feed(self, running: Sequence[int]) -> Tensor:
        """Feed what was not fed yet, and record its routing: logits of the next token ``[sessions, vocab]``."""
        tokens: list[int] = []
        owners: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        for number in running:
            session = self._sessions[number]
            fed = len(session.rows)
            new = session.tokens[fed:]
            tokens += new
            owners += [number] * len(new)
            positions += range(fed, len(session.tokens))
            last.append(len(tokens) - 1)
        attention = self._attention
        attention.sessions, attention.positions = torch.tensor(owners), torch.tensor(positions)
        logits, routing = self.model(torch.tensor(tokens), attention.positions, attention, self._choose)
        for number, rows in zip(owners, torch.stack(routing, 1).unbind(0), strict=True):
            self._sessions[number].rows.append(rows)
        following: Tensor = logits[last]
        return following
