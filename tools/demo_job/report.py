"""The result, for people."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from rich.table import Table

from demo_job.memory import MemoryRecord
from demo_job.parallel import CP_SIZE, RANKS, TP_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from demo_job.job import Options, Pass, Rollouts
    from demo_job.training import Trained

MIB = 2**20


def mib(nbytes: float) -> str:
    size = nbytes / MIB
    return f"{size:,.3f}" if size < 0.1 else f"{size:,.1f}" if size < 1000 else f"{size:,.0f}"


def _spread(values: Iterable[float], unit: float = 1.0, digits: int = 1) -> str:
    ordered = [value / unit for value in sorted(values)]
    return " / ".join(f"{value:,.{digits}f}" for value in (ordered[0], median(ordered), ordered[-1]))


def training_line(trained: Trained) -> str:
    return (
        f"Trained {trained.steps} steps: loss {trained.loss_before:.2f} -> {trained.loss_after:.2f} nats a token; the"
        f" busiest expert of any layer takes {trained.busiest:.1f} times the mean load."
    )


def rollout_line(options: Options, rollouts: Rollouts) -> str:
    results = rollouts.by_process.values()
    generated = sum(result.generated for result in results)
    lengths = sorted(len(lazy) + 1 for lazy in rollouts.handles.values())
    return (
        f"{len(results)} rollout processes wrote {len(lengths)} samples of {lengths[0]:,}-{lengths[-1]:,} tokens"
        f" ({generated:,} of them sampled) x {options.layers} MoE layers x top-{options.top_k} of {options.experts}"
        f" experts into one trace: {mib(rollouts.trace_bytes)} MiB on disk, {mib(rollouts.payload_bytes)} MiB as int32;"
        f" writing took each {max(result.write_s for result in results):.1f} s at most."
        f" A forward pass over a finished sample chooses {min(result.reproduced for result in results):.2%} of the"
        f" experts recorded while it was sampled."
    )


def table(rollouts: Rollouts, eager: Pass, lazy: Pass) -> Table:
    """Both passes, line by line."""
    result = Table(
        title=f"{len(RANKS)} learner ranks (cp {CP_SIZE} zigzag x tp {TP_SIZE}) on one node",
        caption="Per rank: min / median / max. The whole payload travels as .pt files of int32 tensors, which every"
        " rank loads, where a framework has an object store; the trace's handles are pickled. RssAnon is a process's"
        " own memory; the trace's mapped pages are not in it, as all ranks share them in the page cache"
        f" ({mib(rollouts.trace_bytes)} MiB at most).",
        caption_justify="left",
    )
    result.add_column("MiB")
    result.add_column("")
    for title in ("whole payload to every rank", "through tracefile"):
        result.add_column(title, justify="right")

    passes = (eager, lazy)

    def row(label: str, scope: str, value: Callable[[Pass], str], end: bool = False) -> None:
        result.add_row(label, scope, *map(value, passes), end_section=end)

    def ranks(value: Callable[[MemoryRecord, str], float]) -> Callable[[Pass], str]:
        return lambda p: _spread((value(p.memory, rank.name) for rank in RANKS), MIB)

    row("handed over", "per rank", lambda p: mib(p.handed_over_bytes), end=True)
    row("RssAnon at the start", "per rank", ranks(MemoryRecord.start))
    row("RssAnon at its peak", "per rank", ranks(MemoryRecord.peak))
    row("RssAnon, peak over the start", "per rank", ranks(MemoryRecord.growth))
    row("", "node", lambda p: mib(p.memory.node_growth), end=True)
    row("read", "per rank", lambda p: _spread((r.bytes_read for r in p.results.values()), MIB))
    row("", "node", lambda p: mib(sum(r.bytes_read for r in p.results.values())), end=True)
    row("seconds in getting routing", "per rank", lambda p: _spread((r.wall_s for r in p.results.values()), digits=2))
    row("CPU seconds for it", "node", lambda p: f"{sum(r.cpu_s for r in p.results.values()):,.2f}")
    return result


def sentence(eager: Pass, lazy: Pass) -> str:
    """What it comes to."""
    growth = [median(map(p.memory.growth, (rank.name for rank in RANKS))) for p in (eager, lazy)]
    reads = [sum(r.bytes_read for r in p.results.values()) for p in (eager, lazy)]
    tensors = next(iter(eager.results.values())).tensors
    times = f" ({growth[0] / growth[1]:.0f} times less)" if growth[0] > 1.5 * growth[1] else ""
    return (
        f"Every rank got the same routing both ways, bit for bit ({tensors} int32 tensors each): for it, a rank needed"
        f" {mib(growth[1])} MiB of host heap through the trace instead of {mib(growth[0])} MiB{times}, and the node"
        f" read {mib(reads[1])} MiB instead of {mib(reads[0])} MiB."
    )
