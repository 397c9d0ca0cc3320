"""The ``tracefile`` command: look into a trace, find what is damaged in it, and reclaim what is not needed.

What is gathered lies in :mod:`tracefile.summary`, :mod:`tracefile.load`, :mod:`tracefile.verify` and
:mod:`tracefile.collect`; here it is only shown.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tracefile._version import __version__
from tracefile.cli.compact import EPILOG as COMPACT_EPILOG
from tracefile.cli.compact import compact as compact_command
from tracefile.cli.copy import EPILOG as COPY_EPILOG
from tracefile.cli.copy import copy as copy_command
from tracefile.cli.gc import EPILOG as GC_EPILOG
from tracefile.cli.gc import gc as gc_command
from tracefile.cli.inspect import EPILOG as INSPECT_EPILOG
from tracefile.cli.inspect import inspect as inspect_command
from tracefile.cli.verify import EPILOG as VERIFY_EPILOG
from tracefile.cli.verify import verify as verify_command

app = typer.Typer(
    name="tracefile",
    help="Traces of routed experts: see what one holds, and whether it is sound.",
    epilog="Exit codes: 0 sound, 1 damaged, 2 wrong usage (no such path, not a trace, no such sample or layer).",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("inspect", epilog=INSPECT_EPILOG)(inspect_command)
app.command("gc", epilog=GC_EPILOG)(gc_command)
app.command("verify", epilog=VERIFY_EPILOG)(verify_command)
app.command("compact", epilog=COMPACT_EPILOG)(compact_command)
app.command("copy", epilog=COPY_EPILOG)(copy_command)


def _version(wanted: bool) -> None:
    if wanted:
        from tracefile import native

        typer.echo(f"tracefile {__version__}\nnative decoder: {native.status()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that come before a command."""


def main() -> None:
    """Entry point of the ``tracefile`` script."""
    app(prog_name="tracefile")


__all__ = ["app", "main"]
