"""``tracefile gc``: reclaim what nothing refers to, and delete what is old."""

from __future__ import annotations

import json
import os
import re
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from tracefile._version import __version__
from tracefile.cli.console import DAMAGED, Bar, count, printable, reported_errors, size, stdout
from tracefile.collect import collect
from tracefile.retention import GRACE_SECONDS, UNFINISHED_SECONDS

if TYPE_CHECKING:
    from rich.console import Console

    from tracefile.gc_result import GcResult, TraceResult

EPILOG = "Exit codes: 0 done, 1 a trace is damaged and was left as it is, 2 wrong usage, or not a trace."

_BYTES = {"": 1, "b": 1} | {
    unit + suffix: base**power
    for power, unit in enumerate("kmgtp", 1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_bytes(text: str) -> int:
    """
    >>> parse_bytes("10GiB"), parse_bytes("1.5 k"), parse_bytes("2MB"), parse_bytes("700")
    (10737418240, 1536, 2000000, 700)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if found is None or found[2] not in _BYTES:
        raise typer.BadParameter(f"{text!r} is no size; give one like 500MB, 10GiB or 1000000")
    return int(float(found[1]) * _BYTES[found[2]])


def parse_seconds(text: str) -> float:
    """
    >>> parse_seconds("2h"), parse_seconds("7d"), parse_seconds("1.5m"), parse_seconds("0")
    (7200.0, 604800.0, 90.0, 0.0)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if found is None or found[2] not in _SECONDS:
        raise typer.BadParameter(f"{text!r} is no duration; give one like 90s, 30m, 2h, 7d or 4w")
    return float(found[1]) * _SECONDS[found[2]]


def gc(
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="Traces, and directories or prefixes of traces.")],
    keep_steps: Annotated[
        int | None,
        typer.Option("--keep-steps", metavar="N", min=0, help="Keep the newest N traces, delete the others."),
    ] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(
            "--max-bytes",
            metavar="SIZE",
            parser=parse_bytes,
            help="Delete the oldest traces until the rest take no more, like 10GiB; of one trace, the oldest samples.",
        ),
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            "--older-than",
            metavar="TIME",
            parser=parse_seconds,
            help="Delete traces whose newest data are older, like 2h or 7d; of one trace, such samples.",
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            metavar="TIME",
            parser=parse_seconds,
            help="How long rows of revisions that were replaced or deleted are left to those who have handles.",
        ),
    ] = f"{GRACE_SECONDS:.0f}s",  # type: ignore[assignment]
    unfinished: Annotated[
        float,
        typer.Option(
            "--unfinished",
            metavar="TIME",
            parser=parse_seconds,
            help="How long a segment that is being written goes without a change before its writer is taken for dead.",
        ),
    ] = f"{UNFINISHED_SECONDS / 3600:.0f}h",  # type: ignore[assignment]
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")] = False,
) -> None:
    """Reclaim what nothing refers to, and delete what is old.

    Without a rule, removes segments of which no row is needed by the newest revision of any sample, and what killed
    writers left. --keep-steps, --max-bytes and --older-than delete whole traces where PATHs hold several, and samples
    where PATH is one trace. Several rules add up.

    Traces are told old from new by the step numbers in their names, if each has one, or else by their newest data.
    Sizes are those of shard files.

    Readers and writers may be at work. Who reads what is deleted gets a clear error, or finishes with the files that
    it has open; a writer to a deleted trace gets a clear error with its next sample.
    """
    began = time.monotonic()
    with reported_errors(), Bar("Collecting") as bar:

        def told(what: str, done: int, total: int) -> None:
            bar.describe(what)
            bar.update(done, total)

        result = collect(
            paths,
            keep_steps=keep_steps,
            max_bytes=max_bytes,
            older_than=older_than,
            grace=grace,
            unfinished=unfinished,
            dry_run=dry_run,
            on_progress=told,
        )
    if as_json:
        document = {
            "tracefile": __version__,
            "dry_run": dry_run,
            "ordered_by": result.ordered_by,
            "freed_bytes": result.freed_bytes,
            "swept": result.swept,
            "traces": [trace.as_dict() for trace in result.traces],
        }
        typer.echo(json.dumps(document))
    else:
        _show(stdout(), result, dry_run, time.monotonic() - began)
    if any(trace.error is not None for trace in result.traces):
        raise typer.Exit(DAMAGED)


def _show(console: Console, result: GcResult, dry_run: bool, seconds: float) -> None:
    changed = [
        trace for trace in result.traces if trace.deleted_by or trace.freed_bytes or trace.samples or trace.segments
    ]
    if changed:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("trace", "would delete" if dry_run else "deleted", "of", "would free" if dry_run else "freed"):
            table.add_column(heading, justify="left" if heading == "trace" or "delete" in heading else "right")
        directories = {os.path.dirname(trace.path) for trace in changed}
        for trace in changed:
            name = os.path.basename(trace.path) if len(directories) == 1 else trace.path
            table.add_row(printable(name), _what(trace), size(trace.total_bytes), size(trace.freed_bytes))
        console.print(table)
    for trace in result.traces:
        for line in _remarks(trace):
            console.print(Text(f"{printable(trace.path)}: {line}"), soft_wrap=True)
    for name in result.swept:
        console.print(Text(f"{printable(name)} was gone; what it had left is removed"), soft_wrap=True)
    if result.ordered_by is not None and any(trace.deleted_by for trace in result.traces):
        by = "the step numbers in their names" if result.ordered_by == "step" else "their newest data"
        console.print(f"old and new by {by}")
    kept = sum(trace.deleted_by is None for trace in result.traces)
    freed = f"{'would free' if dry_run else 'freed'} {size(result.freed_bytes)}"
    console.print(Text().append(freed, "bold green").append(f"; {count(kept, 'trace')} left; {seconds:.1f} s"))


def _what(trace: TraceResult) -> str:
    if trace.deleted_by:
        return f"whole (--{trace.deleted_by})"
    parts = []
    if trace.samples:
        parts.append(count(len(trace.samples), "sample"))
    if trace.segments:
        parts.append(count(len(trace.segments), "segment"))
    if trace.leftovers:
        parts.append(count(len(trace.leftovers), "leftover") + " of killed processes")
    return ", ".join(parts)


def _remarks(trace: TraceResult) -> list[str]:
    remarks = []
    if trace.error is not None:
        remarks.append(f"left as it is: {printable(trace.error)}")
    if trace.brought_back:
        remarks.append(f"{count(len(trace.brought_back), 'segment')} stay: somebody needed them meanwhile")
    if trace.partial_bytes:
        remarks.append(
            f"about {size(trace.partial_bytes)} more in {count(trace.partial_segments, 'segment')} that are needed in"
            " part; tracefile compact frees them"
        )
    return remarks
