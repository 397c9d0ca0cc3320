"""How to get rows: which chunks a selection touches, and where what it wants of each goes.

The plans say which; those that the cache does not hold are decoded, all together. A chunk of which other layers
are likely to be wanted next is kept in the cache until they have been.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from tracefile.cache import chunk_cache
from tracefile.decode import decode
from tracefile.fill import render_missing
from tracefile.moved import where_they_are
from tracefile.plan import Plan
from tracefile.runs import MissingRun, PaddingRun, Rows, StoredRun
from tracefile.segments import in_threads, segment_pool
from tracefile.stats import ReadStats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from tracefile.format import ModelConfig

Array: TypeAlias = "np.ndarray[Any, Any]"

#: Called with the segment's id and the ``(layer, row)`` positions of the chunks that a read decodes.
chunk_observers: list[Callable[[str, list[tuple[int, int]]], None]] = []


def _place_cached(plan: Plan, out: Array, stats: ReadStats) -> list[int]:
    """Place what the cache holds of a plan's chunks; the others are left to decode, in the order of the file."""
    segment = plan.segment
    assert segment.source is not None
    segment.source.check_size()
    wanted = plan.numbers()
    if len(chunk_cache):
        missed = []
        for number in wanted:
            block = chunk_cache.take((segment.serial, number), plan.layer_chunk(number).wanted)
            if block is None:
                missed.append(number)
            else:
                plan.place(number, block, out)
        stats.cache_hits += len(wanted) - len(missed)
        wanted = missed
    offsets, lengths = segment.index.offsets, segment.index.lengths
    wanted.sort(key=offsets.__getitem__)  # so that a source can merge its reads
    absent = [number for number in wanted if not lengths[number]]
    if absent:
        raise segment.decoder.missing(*segment.decoder.position(absent[0]))
    return wanted


def _execute(plans: Sequence[Plan], out: Array) -> None:
    stats = {plan.ref.trace: ReadStats(reads=1) for plan in plans}
    to_decode = []
    for plan in plans:
        numbers = _place_cached(plan, out, stats[plan.ref.trace])
        if not numbers:
            continue
        to_decode.append((plan, numbers))
        for observe in chunk_observers:
            observe(plan.ref.id, [plan.segment.decoder.position(number) for number in numbers])
    slow = [wanted for wanted in to_decode if wanted[0].takes_round_trips]
    if len(slow) > 1:
        in_threads(lambda wanted: wanted[0].fetch_ahead(wanted[1]), slow)
    if to_decode:
        decode(to_decode, out)
    for plan, numbers in to_decode:
        cost = stats[plan.ref.trace]
        cost.chunks_decoded += len(numbers)
        cost.bytes_read += sum(map(plan.segment.index.lengths.__getitem__, numbers))
        cost.bytes_decoded += len(numbers) * plan.segment.decoder.chunk_bytes
    for trace, cost in stats.items():
        segment_pool.record(trace, cost)


def read_rows(
    rows: Rows, layers: tuple[int, ...], config: ModelConfig, out: Array, *, fill: str = "error", keep: bool = True
) -> int:
    """Read a selection into ``out``.

    Parameters
    ----------
    rows : Rows
    layers : tuple of int
        Positions of the layers, in the order in which they are wanted.
    config : ModelConfig
    out : ndarray
        ``[len(layers), len(rows), top_k]``, C-contiguous, of a dtype that holds what is read.
    fill : str
        How rows that were never captured are rendered; ``"error"`` must not meet any.
    keep : bool
        Whether other reads may want the rest of these chunks.

    Returns
    -------
    int
        How many chunks the selection touches.
    """
    return where_they_are(rows, config, lambda rows: _read_rows(rows, layers, config, out, fill, keep))


def _read_rows(rows: Rows, layers: tuple[int, ...], config: ModelConfig, out: Array, fill: str, keep: bool) -> int:
    flat = out.reshape(len(layers), len(rows) * config.top_k)
    refs = list(dict.fromkeys(run.segment for run in rows.runs if isinstance(run, StoredRun)))
    opened = segment_pool.get_all(refs, config)
    plans = {ref: Plan(ref, segment, layers, keep) for ref, segment in opened.items()}
    for position, run in rows.placed():
        if isinstance(run, StoredRun):
            plans[run.segment].add(run, position)
        else:
            out[:, position : position + len(run)] = _in_memory(run, layers, config, fill).transpose(1, 0, 2)
    if layers:
        _execute(list(plans.values()), flat)
    return sum(len(plan.row_copies) * len(plan.layer_chunks) for plan in plans.values())


def _in_memory(run: PaddingRun | MissingRun, layers: Sequence[int], config: ModelConfig, fill: str) -> Array:
    if isinstance(run, PaddingRun):
        return run.values
    return render_missing(run, fill, layers, config.num_layers, config.top_k, config.num_experts)
