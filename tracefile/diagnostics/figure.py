"""A recording as a picture."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from tracefile.errors import TraceError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

#: What is drawn unless asked otherwise, and how it is called; other processes' ``RssAnon`` too.
_LABELS = {
    "rss_anon_bytes": "RssAnon",
    "uss_bytes": "USS",
    "pss_bytes": "PSS",
    "rss_bytes": "RSS",
    "active_bytes": "decoded chunks kept",
    "cuda_reserved_bytes": "reserved",
    "cuda_allocated_bytes": "allocated",
    "decoded_bytes": "decoded",
    "read_bytes": "read from files",
    "moved_bytes": "moved to a device",
}
_TRAFFIC = ("decoded_bytes", "read_bytes", "moved_bytes")

# Okabe and Ito's colours, which colour-blind people tell apart.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")

_BYTES = ((1, "B"), (2**10, "KiB"), (2**20, "MiB"), (2**30, "GiB"), (2**40, "TiB"))
_SECONDS = ((1, "s"), (60, "min"), (3600, "h"))


class PlotUnavailableError(TraceError, ImportError):
    """Plotting needs matplotlib, which is not installed."""


def _unit(largest: float, units: Sequence[tuple[int, str]], least: float) -> tuple[int, str]:
    """The largest of the units of which there are at least ``least``."""
    return next((unit for unit in reversed(units) if largest >= least * unit[0]), units[0])


def _amount(nbytes: float) -> str:
    size, unit = _unit(nbytes, _BYTES, 1)
    return f"{nbytes / size:,.{0 if size == 1 else 1}f} {unit}"


def _panel_of(name: str) -> str:
    if not name.endswith("_bytes"):
        return "Counts"
    if name in _TRAFFIC:
        return "Bytes since the start"
    return "CUDA memory" if name.startswith("cuda_") else "Host memory"


def draw(
    path: str | os.PathLike[str],
    record: Mapping[str, Sequence[float]],
    peaks: Mapping[str, float],
    keys: Sequence[str] | None,
) -> None:
    """Draw a sampler's record; see :meth:`Sampler.plot`."""
    try:
        from matplotlib.figure import Figure  # not pyplot, which would choose a backend for the process
    except ImportError as error:
        raise PlotUnavailableError("plotting needs matplotlib: pip install 'tracefile[plot]'") from error
    if not keys:
        others = [name for name in record if "/" in name]
        keys = [name for name in _LABELS if name in record] + others
    panels: dict[str, list[str]] = {}
    for title in ("Host memory", "CUDA memory", "Bytes since the start", "Counts"):
        if names := [name for name in keys if _panel_of(name) == title]:
            panels[title] = names
    figure = Figure(figsize=(10, 0.5 + 3 * len(panels)), layout="constrained")
    column = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    size, unit = _unit(record["seconds"][-1], _SECONDS, 5)
    seconds = [value / size for value in record["seconds"]]
    for axes, (title, names) in zip(column, panels.items(), strict=True):
        _draw_panel(axes, title, seconds, {name: record[name] for name in names}, peaks)
    column[-1].set_xlabel(f"time since the start ({unit})")
    column[-1].set_xlim(0, max(seconds[-1], 1e-3))
    figure.align_ylabels()
    figure.savefig(path, dpi=130)


def _draw_panel(
    axes: Axes, title: str, seconds: Sequence[float], lines: Mapping[str, Sequence[float]], peaks: Mapping[str, float]
) -> None:
    starts = {name: values[0] if name in _TRAFFIC else 0.0 for name, values in lines.items()}
    tops = {name: peaks[name] - starts[name] for name in lines}
    size, unit = (1, "") if title == "Counts" else _unit(max(tops.values()), _BYTES, 1)
    ours = itertools.cycle((color, "-") for color in _COLORS)
    theirs = itertools.cycle((color, line) for line in ("--", ":", "-.") for color in reversed(_COLORS))
    for name, values in lines.items():
        process, _, plain = name.rpartition("/")
        color, line = next(theirs if process else ours)
        label = f"{process} {_LABELS.get(plain, plain)}".strip()
        if unit:
            label += f": {'' if name in _TRAFFIC else 'peak '}{_amount(tops[name])}"
        heights = [(value - starts[name]) / size for value in values]
        width = 2.6 if name == "rss_anon_bytes" else 1.5
        axes.plot(seconds, heights, color=color, linestyle=line, linewidth=width, label=label)
    axes.set_title(title, loc="left")
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    if not unit:
        axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(True, color="#e0e0e0", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, frameon=False)
