"""A run as a picture: reward, router agreement, importance ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from train_r3_job.log import Record

# Blue and vermilion of Okabe and Ito's palette, which colour-blind people tell apart; the dashes do so in grey.
_REPLAY, _NATIVE = ("#0072B2", "-"), ("#D55E00", "--")


def save(path: str, records: Sequence[Record], title: str) -> None:
    """Draw the records of a run over its steps."""
    mpl.rcParams["font.size"] = 10
    figure = Figure(figsize=(12, 3.9), layout="constrained")
    reward, agreement, ratio = figure.subplots(1, 3)
    steps = [record["step"] for record in records]

    def line(axes: mpl.axes.Axes, name: str, style: tuple[str, str], label: str, scale: float = 1.0) -> None:
        values = [record[name] * scale for record in records]
        axes.plot(steps, values, color=style[0], linestyle=style[1], linewidth=1.5, label=label)

    line(reward, "reward", _REPLAY, "each step")
    window = 10
    means = [
        sum(record["reward"] for record in records[max(0, i - window + 1) : i + 1]) / min(i + 1, window)
        for i in range(len(records))
    ]
    reward.plot(steps, means, color="#444444", linewidth=2.2, label=f"mean of {window}")
    reward.set_title("Mean reward", loc="left", fontsize=11)
    reward.set_ylim(0, 1.02)
    line(agreement, "agreement", _REPLAY, "native top-k = trace", 100)
    agreement.set_title("Router agreement (% of tokens x layers)", loc="left", fontsize=11)
    line(ratio, "native_ratio_off", _NATIVE, "native routing")
    line(ratio, "ratio_off", _REPLAY, "as trained")
    ratio.set_title("Mean |log importance ratio|", loc="left", fontsize=11)
    ratio.set_ylim(bottom=0)
    for axes in (reward, agreement, ratio):
        axes.set_xlabel("step")
        axes.grid(True, color="#e0e0e0", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    reward.legend(frameon=False)
    ratio.legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
