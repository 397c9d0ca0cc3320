"""What the commands share: consoles, exit codes, errors in one line, progress, and numbers that read well."""

from __future__ import annotations

import contextlib
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from tracefile.errors import DamagedTraceError, TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SOUND, DAMAGED, USAGE = 0, 1, 2


def stdout() -> Console:
    """Where results go. Neither markup nor highlighting: sample ids are anything that a caller chose."""
    return Console(markup=False, highlight=False, emoji=False)


def fail(message: str, code: int) -> NoReturn:
    """Say in one line on stderr what is wrong, and exit."""
    typer.echo(f"tracefile: {printable(message)}", err=True)
    raise typer.Exit(code)


def indented(console: Console, line: Text, indent: int = 4) -> None:
    """Print under something; wrapped on a terminal, and in one line, which grep finds, elsewhere."""
    if console.is_terminal:
        console.print(Padding(line, (0, 0, 0, indent)))
    else:
        console.print(Text(" " * indent).append_text(line), soft_wrap=True)


@contextlib.contextmanager
def reported_errors() -> Iterator[None]:
    """Turn what can go wrong with a trace into one line on stderr and an exit code."""
    try:
        yield
    except TraceError as error:
        fail(error.message, DAMAGED if isinstance(error, DamagedTraceError) else USAGE)
    except BrokenPipeError:
        raise
    except OSError as error:
        fail(f"{error.filename or 'the trace'} cannot be read ({error.strerror or error})", USAGE)


class Bar:
    """A progress bar on stderr, where that is a terminal.

    Parameters
    ----------
    what : str
        Shown before the bar.
    total : int, optional
    """

    def __init__(self, what: str, total: int | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task(what, total=total)

    def advance(self, steps: int) -> None:
        self._progress.advance(self._task, steps)

    def describe(self, what: str) -> None:
        self._progress.update(self._task, description=what)

    def update(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Take the bar off the terminal while something else is printed."""
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def printable(text: str) -> str:
    """``text`` with what would move a terminal's cursor, or break a line, escaped.

    Examples
    --------
    >>> printable("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def size(nbytes: float) -> str:
    """
    >>> size(900), size(24 * 1024), size(35.25 * 2**30)
    ('900 B', '24.0 KiB', '35.2 GiB')
    """
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:.1f} TiB"


def count(number: int, noun: str) -> str:
    """
    >>> count(1, "sample"), count(2500, "sample"), count(2, "index=indices")
    ('1 sample', '2,500 samples', '2 indices')
    """
    one, _, many = noun.partition("=")
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def id_ranges(ids: Sequence[int]) -> str:
    """
    >>> id_ranges([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    parts: list[list[int]] = []
    for number in sorted(ids):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def moment(seconds: float | None) -> str:
    """A time in UTC, to the second."""
    try:
        return "?" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "?"


def period(first: float | None, last: float | None) -> str:
    """
    >>> period(0, 61)
    '1970-01-01 00:00:00 to 00:01:01'
    """
    begin, end = moment(first), moment(last)
    if begin == end:
        return begin
    return f"{begin} to {end[11:] if begin[:10] == end[:10] else end}"
