"""In which order a learner rank uses its microbatches, and what that says about what to read next. Pure.

A pass is a list of steps: the forward of a microbatch, or its backward, which recomputes activations and so needs
the routing again, last layers first. What is read at once is a unit: neighbouring layers of one microbatch.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

from tracefile.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

Stage = Literal["forward", "backward"]
#: A microbatch's position, and that of one of its layer groups.
Unit: TypeAlias = tuple[int, int]


class Step(NamedTuple):
    """The forward or the backward of one microbatch.

    Attributes
    ----------
    stage : {"forward", "backward"}
    microbatch : int
    """

    stage: Stage
    microbatch: int


def check_stage(stage: str) -> Stage:
    if stage not in get_args(Stage):
        raise OptionError(f"stage must be forward or backward, not {stage!r}")
    return stage  # type: ignore[return-value]


def one_forward_one_backward(microbatches: int, warmup: int = 0) -> list[Step]:
    """The steps of a training pass.

    Parameters
    ----------
    microbatches : int
    warmup : int
        Forwards before the first backward. 0: each microbatch goes forward and backward before the next one
        (gradient accumulation). Megatron's 1F1B schedule has ``pp_size - pp_rank - 1`` on a pipeline stage.

    Examples
    --------
    >>> [f"{step.stage[0]}{step.microbatch}" for step in one_forward_one_backward(3, warmup=1)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    if warmup < 0:
        raise OptionError(f"warmup must not be negative, but is {warmup}")
    warmup = min(warmup, microbatches)
    steps = [Step("forward", i) for i in range(warmup)]
    for i in range(warmup, microbatches):
        steps += [Step("forward", i), Step("backward", i - warmup)]
    return steps + [Step("backward", i) for i in range(microbatches - warmup, microbatches)]


def layer_groups(
    layers: Sequence[int], layers_per_chunk: int, layer_bytes: int, most_bytes: int
) -> list[tuple[int, int]]:
    """Neighbouring layers that are worth reading at once, as ``[start, stop)`` positions.

    Layers of one chunk belong together, since it is decoded whole; fewer where they would exceed ``most_bytes``.

    Examples
    --------
    >>> layer_groups(range(1, 47), 12, layer_bytes=10, most_bytes=1000)
    [(0, 11), (11, 23), (23, 35), (35, 46)]
    """
    most_layers = max(1, most_bytes // layer_bytes) if layer_bytes else len(layers)
    groups: list[tuple[int, int]] = []
    for position, layer in enumerate(layers):
        if groups:
            start, _ = groups[-1]
            if layers[start] // layers_per_chunk == layer // layers_per_chunk and position - start < most_layers:
                groups[-1] = (start, position + 1)
                continue
        groups.append((position, position + 1))
    return groups


class UnitOrder:
    """The units of a pass in the order in which they will be used.

    Parameters
    ----------
    steps : sequence of Step
    groups : sequence of int
        How many units each microbatch has.
    """

    def __init__(self, steps: Sequence[Step], groups: Sequence[int]) -> None:
        self.units: list[Unit] = []
        self.step_numbers: list[int] = []
        self._uses: dict[Unit, list[int]] = {}
        self._stages: dict[Unit, list[Stage]] = {}
        for number, (stage, microbatch) in enumerate(steps):
            if not 0 <= microbatch < len(groups):
                raise OptionError(f"the schedule names microbatch {microbatch}; there are {len(groups)}")
            numbers = range(groups[microbatch])
            for group in numbers if check_stage(stage) == "forward" else reversed(numbers):
                unit = (microbatch, group)
                self._uses.setdefault(unit, []).append(len(self.units))
                self._stages.setdefault(unit, []).append(stage)
                self.units.append(unit)
                self.step_numbers.append(number)

    def __len__(self) -> int:
        return len(self.units)

    def find(self, unit: Unit, stage: Stage | None, at: int) -> int | None:
        """The first use of ``unit`` (in ``stage``, if given) at position ``at`` or later."""
        uses = self._uses.get(unit, [])
        for number in range(bisect_left(uses, at), len(uses)):
            if stage is None or self._stages[unit][number] == stage:
                return uses[number]
        return None

    def next_use(self, unit: Unit, at: int) -> int:
        """The first use of ``unit`` at ``at`` or later; the length of the pass if there is none."""
        found = self.find(unit, None, at)
        return len(self) if found is None else found

    def ahead(self, at: int, depth: int) -> range:
        """Positions from ``at`` up to the end of the step ``depth`` steps later."""
        if at >= len(self):
            return range(0)
        return range(at, bisect_left(self.step_numbers, self.step_numbers[at] + depth + 1))
