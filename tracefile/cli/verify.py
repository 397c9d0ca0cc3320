"""``tracefile verify``: what in a trace is damaged, and whose rows that costs."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from tracefile._version import __version__
from tracefile.cli.console import DAMAGED, Bar, count, id_ranges, indented, printable, reported_errors, size, stdout
from tracefile.findings import Finding, Tally
from tracefile.store import absolute_path
from tracefile.verify import verify_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from tracefile.findings import SampleRows

EPILOG = "Exit codes: 0 sound, 1 damaged, 2 wrong usage, not a trace, or a format that this release does not read."

_TITLES = {
    "trace-metadata": "damaged root document",
    "segment-metadata": "damaged segment document",
    "zarr-metadata": "document that zarr refuses",
    "shard-missing": "missing shard file",
    "shard-damaged": "damaged shard file",
    "shard-index": "damaged chunk index",
    "chunk-missing": "missing chunk",
    "chunk-damaged": "damaged chunk",
    "expert-ids": "ids that no expert has",
    "segment-absent": "absent segment",
    "span-range": "rows beyond a segment",
}


def verify(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The trace's directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")] = False,
) -> None:
    """Read everything in a trace, and report each damaged thing.

    Checks the documents (by their checksums, and whether zarr accepts them), the shard files, the index and the
    checksum of every chunk, that every captured id is that of an expert, and that every row of every sample is
    there. It does not stop at damage.

    Each finding says what is damaged, the layers (by global id) and the rows of samples that are lost with it.
    A superseded revision is one that a later write of the same sample replaced: only handles made before that
    write still read it.
    """
    with reported_errors():
        path = absolute_path(path)
        tally = Tally()
        found: list[Finding] = []
        console = stdout()
        began = time.monotonic()
        with Bar("Verifying") as bar:
            for finding in verify_trace(
                path, tally=tally, on_progress=lambda tally: bar.update(tally.chunks, tally.total_chunks)
            ):
                found.append(finding)
                if not as_json:
                    with bar.paused():
                        _show(console, path, finding)
    lost = _lost(found)
    if as_json:
        document = {
            "tracefile": __version__,
            "path": path,
            "sound": not found,
            "checked": tally.as_dict(),
            "damaged_samples": lost,
            "findings": [finding.as_dict() for finding in found],
        }
        typer.echo(json.dumps(document))
    else:
        _conclude(console, path, tally, found, lost, time.monotonic() - began)
    if found:
        raise typer.Exit(DAMAGED)


def _lost(found: Sequence[Finding]) -> list[str]:
    """Samples whose newest revision cannot be read whole."""
    return sorted({rows.sample for finding in found for rows in finding.samples if not rows.superseded})


def _show(console: Console, path: str, finding: Finding) -> None:
    title = Text().append(_TITLES[finding.kind], "bold red")
    if finding.chunk is not None:
        title.append(f" (layers {finding.chunk[0]}, rows {finding.chunk[1]})", "bold red")
    if finding.segment is not None:
        title.append(f"  segment {finding.segment}", "bold")
    console.print(title, soft_wrap=True)
    indented(console, Text(printable(finding.message.replace(path + os.sep, ""))))
    if finding.layers:
        one = len(finding.layers) == 1
        indented(console, Text().append(f"layer{'' if one else 's'} {id_ranges(finding.layers)}", "dim"))
    for rows in finding.samples:
        indented(console, _rows(rows))
    console.print()


def _rows(rows: SampleRows) -> Text:
    line = Text().append("sample ", "dim").append(printable(rows.sample), "bold")
    line.append(f" rows [{rows.start:,}, {rows.stop:,})")
    if rows.superseded:
        line.append(f", of the superseded revision in segment {rows.listed_in}", "dim")
    return line


def _conclude(
    console: Console, path: str, tally: Tally, found: Sequence[Finding], lost: Sequence[str], seconds: float
) -> None:
    read = (
        f"{count(tally.segments, 'segment')}, {count(tally.samples, 'sample')}, {count(tally.rows, 'row')},"
        f" {count(tally.total_chunks, 'chunk')}; {size(tally.bytes_read)} read in {seconds:.1f} s"
    )
    if tally.vanished:
        read += f"; {count(tally.vanished, 'segment')} removed meanwhile"
    if not found:
        console.print(Text().append("sound  ", "bold green").append(printable(path)), soft_wrap=True)
        console.print(read)
        return
    console.print(Text().append("damaged  ", "bold red").append(printable(path)), soft_wrap=True)
    console.print(read)
    segments = len({finding.segment for finding in found if finding.segment is not None})
    console.print(f"{count(len(found), 'finding')} in {count(segments, 'segment')}")
    if lost:
        shown = ", ".join(map(printable, lost[:10])) + (", ..." if len(lost) > 10 else "")
        console.print(Text(f"{count(len(lost), 'sample')} cannot be read whole: {shown}"))
