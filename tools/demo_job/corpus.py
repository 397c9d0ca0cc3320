"""The text to learn and to prompt with: Python's language reference, which ships with Python."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor

VOCAB = 128  # ASCII, one token a character
#: A generation stops at the end of a paragraph.
STOP = [ord("\n"), ord("\n")]


def load() -> Tensor:
    """The whole text as tokens ``[tokens]`` int64."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8).long()


def cut(text: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """``length`` tokens from a random place on; past its end the text begins anew."""
    start = int(torch.randint(len(text), (1,), generator=generator))
    return text[(start + torch.arange(length)) % len(text)]
