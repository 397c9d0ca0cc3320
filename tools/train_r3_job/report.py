"""What a run shows: progress while it lasts, and what came of it."""

from __future__ import annotations

import importlib.util
import math
import os
import time
from statistics import fmean
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from train_r3_job import job

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from rich.console import Console

    from train_r3_job.log import Record

WINDOW = 10


class Shown(job.Progress):
    """Progress bars on a terminal, else a line for each step."""

    def __init__(self, console: Console, options: job.Options) -> None:
        self._console = console
        self._options = options
        self._began = time.monotonic()
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._warm_up = self._bars.add_task("warm-up", total=options.warmup_steps, text="supervised", visible=False)
        self._steps = self._bars.add_task("RL steps", total=options.steps, text="", visible=False)
        self._summary = ""

    def say(self, text: str) -> None:
        """A line that stays."""
        seconds = time.monotonic() - self._began
        self._console.print(f"[dim]{seconds:6.1f} s[/]  {escape(text)}", highlight=False, soft_wrap=True)

    def warm_up(self, step: int, loss: float) -> None:
        last = step == self._options.warmup_steps
        self._bars.update(self._warm_up, completed=step, text=f"loss {loss:.2f}", visible=not last)
        if last:
            self.say(f"warm-up: {step} supervised steps, loss {loss:.2f}")
            self._bars.update(self._steps, visible=True, text="starting Ray and the learner ranks")

    def detail(self, text: str) -> None:
        if text.startswith("learner: "):
            self.say(text)
        self._bars.update(self._steps, visible=True, text=f"{self._summary}  [dim]{escape(text)}[/]")

    def step(self, record: Record) -> None:
        number = int(record["step"]) + 1
        self._summary = f"reward {record['reward']:.2f}, agreement {_percent(record['agreement'])}"
        self._bars.update(self._steps, completed=number, visible=True, text=self._summary)
        if not self._console.is_terminal or number % WINDOW == 0:
            self.say(
                f"step {number} of {self._options.steps}: {self._summary}, |log ratio| {record['ratio_off']:.4f}"
                f" (native {record['native_ratio_off']:.4f})"
            )

    def __enter__(self) -> Shown:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.2%}"


def _mean(records: Sequence[Record], name: str) -> float:
    values = [record[name] for record in records if not math.isnan(record[name])]
    return fmean(values) if values else math.nan


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"


def table(records: Sequence[Record]) -> Table:
    """The first steps next to the last."""
    first, last = records[:WINDOW], records[-WINDOW:]
    result = Table(title_justify="left", title=f"{len(records)} steps; means")
    result.add_column("")
    result.add_column(f"first {len(first)}", justify="right")
    result.add_column(f"last {len(last)}", justify="right")

    def row(label: str, name: str, digits: int, scale: float = 1, end: bool = False) -> None:
        cells = [_number(_mean(part, name) * scale, digits) for part in (first, last)]
        result.add_row(label, *cells, end_section=end)

    row("reward", "reward", 3, end=True)
    row("tokens x layers whose native experts are the trace's (%)", "agreement", 2, 100)
    row("|log importance ratio|, as trained", "ratio_off", 4)
    row("|log importance ratio|, native routing", "native_ratio_off", 4)
    row("ratios that are clipped (%)", "clipped", 2, 100)
    row("steps by which weights of rollouts are older", "staleness", 2)
    row("sessions with rows of two weight versions (%)", "mixed_versions", 1, 100, end=True)
    ranks = sum(name.endswith("/tracefile/read_bytes") for name in records[-1])
    for label, name, digits, scale in (
        ("most chunks held by a rank", "most_active_chunks", 0, 1.0),
        ("most bytes of routing held by a rank (KiB)", "most_active_bytes", 1, 1 / 1024),
        ("host heap of a rank, RssAnon (MiB)", "rss_anon_bytes", 0, 1 / 2**20),
    ):
        names = [f"rank{rank}/tracefile/{name}" for rank in range(ranks)]
        cells = [_number(max(_mean(part, each) for each in names) * scale, digits) for part in (first, last)]
        result.add_row(label, *cells, end_section=name == "rss_anon_bytes")
    row("seconds of a step: training", "train_s", 2)
    row("seconds of a step: waiting for rollouts", "rollout_wait_s", 2)
    return result


def show(console: Console, options: job.Options, outcome: job.Outcome, seconds: float) -> None:
    """The result, and where everything is. Draws the plot, if matplotlib is installed."""
    if not console.is_terminal:
        console.width = 110
    plot = "not drawn: matplotlib is not installed (pip install 'tracefile[plot]')"
    if importlib.util.find_spec("matplotlib") is not None:
        from train_r3_job import figure

        plot = os.path.join(options.out, "train.png")
        layout = options.layout
        figure.save(
            plot,
            outcome.records,
            f"{options.mode} RL, routing {options.step.routing}, dp {layout.dp} x cp {layout.cp} x sp {layout.sp}",
        )
    console.print(table(outcome.records))
    console.print(f"{seconds:.0f} s. Everything is in {escape(options.out)}:", highlight=False, soft_wrap=True)
    places = [("plot", plot), ("log", outcome.log), ("last trace", outcome.last_trace), ("weights", options.checkpoint)]
    if outcome.tensorboard is not None:
        places.append(("TensorBoard", f"tensorboard --logdir {outcome.tensorboard}"))
    for label, place in places:
        console.print(f"  {label:<11} {escape(place)}", highlight=False, soft_wrap=True)
    console.print(
        f"Look into the trace: tracefile inspect {escape(outcome.last_trace)}", highlight=False, soft_wrap=True
    )
