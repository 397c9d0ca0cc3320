"""``tracefile copy``: a trace from one store to another."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from tracefile._version import __version__
from tracefile.cli.console import DAMAGED, Bar, count, indented, printable, reported_errors, size, stdout
from tracefile.transfer import copy_trace

if TYPE_CHECKING:
    from rich.console import Console

    from tracefile.transfer import CopyReport

EPILOG = (
    "Exit codes: 0 the copy is whole and sound, 1 the source is damaged, 2 wrong usage, or another trace is at the"
    " target, or a store refused."
)


def copy(
    source: Annotated[str, typer.Argument(metavar="SRC", help="The trace.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="Where its copy is, or will be.")],
    verify: Annotated[bool, typer.Option(help="Verify the checksum of every chunk on the way.")] = True,
    skip_damaged: Annotated[
        bool,
        typer.Option("--skip-damaged", help="Copy damaged chunks as they are, and say which samples' rows those are."),
    ] = False,
    durable: Annotated[bool, typer.Option("--durable", help="Flush each segment to the disk.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")] = False,
) -> None:
    """Copy a trace to another path: directories and object stores, either way.

    The copy is the same trace, byte for byte. Segments that DST has already are skipped, so that running it again
    goes on where it was stopped, or brings what was written to SRC since. Where SRC is damaged, the copy ends before
    that, and all the damage is listed.
    """
    with reported_errors():
        began = time.monotonic()
        with Bar("Copying") as bar:
            report = copy_trace(
                source, target, verify=verify, skip_damaged=skip_damaged, durable=durable, on_progress=bar.update
            )
        seconds = time.monotonic() - began
    if as_json:
        typer.echo(json.dumps({"tracefile": __version__, "seconds": seconds, **report.as_dict()}))
    else:
        _show(stdout(), report, seconds, skip_damaged)
    if report.damaged:
        raise typer.Exit(DAMAGED)


def _show(console: Console, report: CopyReport, seconds: float, skip_damaged: bool) -> None:
    title, style = ("damaged  ", "bold red") if report.damaged else ("copied  ", "bold green")
    console.print(
        Text().append(title, style).append(f"{printable(report.source)} to {printable(report.target)}"), soft_wrap=True
    )
    console.print(
        f"{count(report.segments, 'segment')}, {size(report.bytes)}, in {seconds:.1f} s"
        + (f"; {count(report.present, 'segment')} there already" if report.present else "")
    )
    for segment, messages in report.damaged.items():
        console.print(Text().append("segment ", "dim").append(segment, "bold"), soft_wrap=True)
        for message in messages:
            indented(console, Text(printable(message)))
    for rows in report.lost:
        line = Text().append("sample ", "dim").append(printable(rows.sample), "bold")
        console.print(line.append(f" rows [{rows.start:,}, {rows.stop:,})"), soft_wrap=True)
    if report.held_back:
        console.print(
            f"{count(len(report.held_back), 'segment')} not copied: restore what is damaged and copy again, or copy it"
            " as it is with --skip-damaged"
        )
    elif report.damaged and skip_damaged:
        console.print("damage was copied as it is: reading these rows fails at the target too")
