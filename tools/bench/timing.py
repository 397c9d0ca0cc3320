"""Timing side by side: contenders run in turn, round after round, and are compared within rounds.

A machine's speed drifts; the ratio of two contenders within one round drifts much less. Quoted are medians.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True)
class Timing:
    """Seconds per round of one contender."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def times(self, other: Timing) -> float:
        """How many times as long as ``other``: the median over rounds."""
        return statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))


def side_by_side(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, before: Callable[[str], Any] | None = None
) -> dict[str, Timing]:
    """Run every contender in turn, round after round.

    Each is run twice in a row and timed the second time, so that it finds the processor's caches as it left them
    itself and not as the contender before it did.

    Parameters
    ----------
    contenders : mapping of str to callable
    rounds : int
    before : callable, optional
        Run before each run with the contender's name, untimed: clears caches, say.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, run in contenders.items():
                for _ in range(2):
                    if before is not None:
                        before(name)
                    start = time.perf_counter()
                    run()
                    elapsed = time.perf_counter() - start
                seconds[name].append(elapsed)
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    return {name: Timing(tuple(values)) for name, values in seconds.items()}
