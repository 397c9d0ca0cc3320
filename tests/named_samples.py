"""Small traces of samples whose names say what they hold: ``name@rows``."""

from __future__ import annotations

from typing import Any

import numpy as np
from support import ids_of

import tracefile

SMALL = {"num_layers": 5, "top_k": 2, "num_experts": 16}


def ids_named(sample: str) -> np.ndarray[Any, Any]:
    """What the sample of this name holds."""
    return ids_of(sample, int(sample.rpartition("@")[2]), **SMALL)


def names(count: int, first: int = 0) -> list[str]:
    """Samples of many lengths."""
    return [f"s{number}@{(7 * number + 9) % 60}" for number in range(first, first + count)]


def check_named(path: str, samples: list[str]) -> None:
    """A fresh reader finds exactly these samples."""
    trace = tracefile.open(path)
    assert sorted(trace) == sorted(samples)
    for sample in samples:
        np.testing.assert_array_equal(trace[sample].numpy(), ids_named(sample), err_msg=sample)
