"""``tracefile compact``: merge many small segments into few."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import tracefile
from tracefile._version import __version__
from tracefile.cli.console import DAMAGED, Bar, count, fail, indented, printable, reported_errors, size, stdout
from tracefile.compact import compact_trace

if TYPE_CHECKING:
    from rich.console import Console

    from tracefile.compact_plan import CompactReport

EPILOG = "Exit codes: 0 done, 1 damaged segments were left as they are, 2 wrong usage, or the store refused."

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(text: str) -> int:
    """
    >>> parse_bytes("256MiB"), parse_bytes("1.5 g"), parse_bytes("4096")
    (268435456, 1610612736, 4096)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no number of bytes; write it like 256MiB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def compact(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The trace.")],
    target_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="How large merged segments become; larger than half of it is not small.")
    ] = "256MiB",
    min_segments: Annotated[int, typer.Option(metavar="N", help="Merge only where at least N become one.")] = 4,
    min_age: Annotated[float, typer.Option(metavar="SECONDS", help="Leave younger segments alone.")] = 60.0,
    settle: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Delete what was replaced so long after that is visible (default 1, and 60 on network file systems);"
            " where rows were dropped, set it aside then, and delete it as long after.",
        ),
    ] = None,
    drop_unreachable: Annotated[
        bool,
        typer.Option(
            "--drop-unreachable",
            help="Leave out rows that no newest revision has; in directories, and object stores with conditional put.",
        ),
    ] = False,
    durable: Annotated[bool, typer.Option(help="Flush to the disk before anything is deleted.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")] = False,
) -> None:
    """Merge many small segments into few, while others read the trace and write to it.

    Handles that were made before keep working. Nothing is decoded: chunks are copied as they are, and their checksums
    are verified on the way. Segments of the same codec and chunk geometry become one; damaged ones are left as they
    are. If it is killed, nothing is lost; run it again.
    """
    with reported_errors():
        target = parse_bytes(target_bytes)
        console = stdout()
        before = _open_seconds(path)
        began = time.monotonic()
        with Bar("Compacting") as bar:
            report = compact_trace(
                path,
                target_bytes=target,
                min_segments=min_segments,
                min_age=min_age,
                settle=settle,
                drop_unreachable=drop_unreachable,
                durable=durable,
                dry_run=dry_run,
                on_progress=bar.update,
            )
        seconds = time.monotonic() - began
        after = None if dry_run or before is None else _open_seconds(path)
    if as_json:
        document: dict[str, Any] = {
            "tracefile": __version__,
            "dry_run": dry_run,
            "seconds": seconds,
            "open_seconds": {"before": before, "after": after},
            **report.as_dict(),
        }
        typer.echo(json.dumps(document))
    else:
        _show(console, report, dry_run, before, after, seconds)
    if report.refused:
        if as_json:
            raise typer.Exit(DAMAGED)
        fail(f"{count(len(report.refused), 'damaged segment')} left as found; run tracefile verify", DAMAGED)


def _open_seconds(path: str) -> float | None:
    """How long opening takes; ``None`` where the trace cannot be opened, since a document is damaged."""
    try:
        began = time.perf_counter()
        tracefile.open(path).close()
    except tracefile.DamagedTraceError:
        return None
    return time.perf_counter() - began


def _show(
    console: Console, report: CompactReport, dry_run: bool, before: float | None, after: float | None, seconds: float
) -> None:
    replaced = sum(len(merge.replaced) for merge in report.merged)
    if dry_run:
        title = f"would merge {count(replaced, 'segment')} into {len(report.merged):,}"
    elif report.merged or report.finished:
        title = f"merged {count(replaced, 'segment')} into {len(report.merged):,} in {seconds:.1f} s"
    else:
        title = "nothing to merge"
    console.print(Text().append(title, "bold").append(f"  {printable(report.path)}"), soft_wrap=True)
    if report.finished:
        what = "would delete" if dry_run else "deleted"
        console.print(f"{what} {count(len(report.finished), 'segment')} that an earlier run had replaced")
    table = Table(box=None, pad_edge=False)
    for name in ("", "before", "after"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("segments", f"{report.before.segments:,}", f"{report.after.segments:,}")
    table.add_row("files", f"{report.before.files:,}", f"{report.after.files:,}")
    table.add_row("shard files", size(report.before.bytes), size(report.after.bytes))
    table.add_row("opening", *("-" if each is None else f"{each * 1e3:,.0f} ms" for each in (before, after)))
    console.print(table)
    if report.changed:
        console.print(
            f"{count(len(report.changed), 'segment')} left for another run: others changed or needed them meanwhile"
        )
    for segment, why in report.refused.items():
        console.print(Text().append("left as found  ", "bold red").append(segment), soft_wrap=True)
        indented(console, Text(printable(why)))
