"""Memory over time, both ways, as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from demo_job.report import MIB, mib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from demo_job.job import Pass


class _Style(NamedTuple):
    color: str
    linestyle: str


# Vermilion and blue of Okabe and Ito's palette, which colour-blind people tell apart; the dashes do so in grey.
_EAGER = _Style("#D55E00", "-")
_LAZY = _Style("#0072B2", "--")
_PAYLOAD = _Style("#444444", ":")


def _draw(axes: Axes, seconds: list[float], nbytes: list[int], style: _Style, width: float) -> None:
    axes.plot(seconds, [(value - nbytes[0]) / MIB for value in nbytes], linewidth=width, **style._asdict())


def _peak(axes: Axes, seconds: list[float], nbytes: list[int], style: _Style) -> None:
    """Mark the highest point and say how high it is."""
    at = max(range(len(nbytes)), key=nbytes.__getitem__)
    growth = nbytes[at] - nbytes[0]
    axes.plot([seconds[at]], [growth / MIB], "o", color=style.color, markersize=4.5)
    axes.annotate(
        f"{mib(growth)} MiB",
        (seconds[at], growth / MIB),
        (0, 6),
        textcoords="offset points",
        ha="right",
        color=style.color,
        weight="bold",
    )


def save(path: str, eager: Pass, lazy: Pass, payload_bytes: int) -> None:
    """Draw host heap over its start: the sum over the node, and each rank."""
    mpl.rcParams["font.size"] = 10
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    node, each = figure.subplots(1, 2)
    ranks = len(eager.results)
    for one, style in ((eager, _EAGER), (lazy, _LAZY)):
        seconds, by_rank = one.memory.seconds, one.memory.rss_anon
        _draw(node, seconds, one.memory.node, style, 2.0)
        _peak(node, seconds, one.memory.node, style)
        for values in by_rank.values():
            _draw(each, seconds, values, style, 0.9)
        _peak(each, seconds, by_rank[max(by_rank, key=one.memory.growth)], style)
    last = max(eager.memory.seconds[-1], lazy.memory.seconds[-1])
    for axes, title, count in ((node, f"All {ranks} ranks of the node together", ranks), (each, "Each rank", 1)):
        axes.axhline(payload_bytes * count / MIB, linewidth=1.2, **_PAYLOAD._asdict())
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("time since all ranks started (s)")
        axes.set_ylabel("RssAnon over its value at the start (MiB)")
        axes.set_xlim(0, last * 1.04)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.grid(True, color="#e0e0e0", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        [Line2D([], [], linewidth=1.8, **style._asdict()) for style in (_EAGER, _LAZY, _PAYLOAD)],
        ["whole payload to every rank", "through tracefile", f"size of the int32 payload (left: {ranks} times)"],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    figure.suptitle("Host memory of the learner ranks while they get the routed experts of one step")
    figure.savefig(path, dpi=130)
