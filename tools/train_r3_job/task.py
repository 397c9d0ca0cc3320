"""The task: sums written out in characters. ``"12+7="`` is to be answered with ``"19\\n"``.

In a session of several turns, the environment answers a right sum with the next one, and a wrong one with ``"!"`` and
the same sum again. The reward of a session is the share of its turns that were right.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

ALPHABET = "\n0123456789+=!"
STOP = 0  # the line's end
_TOKENS = {character: token for token, character in enumerate(ALPHABET)}


def encode(text: str) -> list[int]:
    return [_TOKENS[character] for character in text]


def decode(tokens: list[int]) -> str:
    return "".join(ALPHABET[token] for token in tokens)


@dataclass(frozen=True, slots=True)
class Sum:
    """One addition."""

    left: int
    right: int

    @property
    def question(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        return f"{self.left + self.right}\n"


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked.

    Attributes
    ----------
    largest : int
        Numbers are drawn from ``0 .. largest``.
    turns : int
        Answers in a session.
    """

    largest: int
    turns: int

    @property
    def max_answer(self) -> int:
        """The longest answer in tokens, the line's end included, and one more for a wrong one."""
        return len(str(2 * self.largest)) + 1

    @property
    def max_tokens(self) -> int:
        """The longest session."""
        return self.turns * (1 + 2 * len(str(self.largest)) + 2 + self.max_answer)

    def draw(self, rng: np.random.Generator) -> Sum:
        left, right = rng.integers(0, self.largest + 1, 2).tolist()
        return Sum(left, right)

    def prompt(self, seed: int, step: int, number: int) -> Prompt:
        """The ``number``-th prompt of a step: the sums that its sessions are asked in turn."""
        rng = np.random.default_rng((seed, step, number))
        return Prompt(f"prompt-{number}", tuple(self.draw(rng) for _ in range(self.turns)))


@dataclass(frozen=True, slots=True)
class Prompt:
    """Sums that a group of sessions share."""

    name: str
    sums: tuple[Sum, ...]


@dataclass(slots=True)
class Environment:
    """One session: what was asked, and which answers were right."""

    prompt: Prompt
    right: list[bool] = field(default_factory=list)

    @property
    def current(self) -> Sum:
        return self.prompt.sums[sum(self.right)]

    @property
    def done(self) -> bool:
        return len(self.right) == len(self.prompt.sums)

    @property
    def reward(self) -> float:
        return sum(self.right) / len(self.right)

    def ask(self) -> list[int]:
        """Tokens that come next: the first sum, the next one, or the same one again."""
        again = "!" if self.right and not self.right[-1] else ""
        return encode(again + self.current.question)

    def answer(self, tokens: list[int]) -> None:
        """Take the model's answer to what was asked."""
        self.right.append(decode(tokens) == self.current.answer)
