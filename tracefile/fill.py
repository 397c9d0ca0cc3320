"""What rows that were never captured are rendered as, where somebody wants values of them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tracefile.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefile.runs import MissingRun

Array: TypeAlias = "np.ndarray[Any, Any]"

#: How they can be rendered; "error" refuses.
FILLS = ("error", "spread", "arange", "zeros", "minus_one")


def check_fill(fill: str) -> str:
    """
    Raises
    ------
    OptionError
        There is no such rendering.
    """
    if fill not in FILLS:
        raise OptionError(f"fill must be one of {', '.join(FILLS)}, not {fill!r}")
    return fill


def render_missing(
    run: MissingRun, fill: str, layers: Sequence[int], num_layers: int, top_k: int, num_experts: int
) -> Array:
    """Rows for a missing run, ``[rows, layers, top_k]`` int64.

    "spread" deals experts out evenly, as slime's padding does: row i, layer l, slot s of the block gets
    ``((i * num_layers + l) * top_k + s) % num_experts``. "arange" gives each row experts ``0..top_k-1``, as
    SkyRL does; "zeros" is the rule of verl, prime-rl and ROLL; "minus_one" that of miles and NeMo-RL.
    """
    shape = (len(run), len(layers), top_k)
    slots = np.arange(top_k, dtype=np.int64)
    if fill == "spread":
        rows = np.arange(run.start, run.stop, dtype=np.int64)[:, None] * num_layers + np.asarray(layers, np.int64)
        return (rows[:, :, None] * top_k + slots) % num_experts
    if fill == "arange":
        return np.broadcast_to(slots, shape)
    return np.full(shape, 0 if fill == "zeros" else -1, np.int64)
