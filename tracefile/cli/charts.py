"""Pictures made of block characters: the load of the experts, and the lengths of the samples."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from tracefile.load import ExpertLoad

Array: TypeAlias = "np.ndarray[Any, Any]"

#: A cell's level is how many of these its load, over the layer's mean load, reaches.
THRESHOLDS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
_BLOCKS, _IDLE_BLOCK = "▁▂▃▄▅▆▇█", "·"
_ASCII, _IDLE_ASCII = "_.-=+*#@", " "
#: Blue below the mean, red above it.
_COLOURS = ("#2166ac", "#4393c3", "#6aaed6", "#8c96a0", "#c2a57a", "#ef8a62", "#e0523f", "#d7191c")
_PARTS = " ▏▎▍▌▋▊▉█"


class HeatMap(NamedTuple):
    """How experts are laid out along a line: ``bin`` experts a cell, a cell ``width`` characters wide."""

    bin: int
    width: int
    cells: int

    @classmethod
    def fit(cls, experts: int, columns: int) -> HeatMap:
        """As many cells as fit into ``columns``; at most four characters each.

        Examples
        --------
        >>> HeatMap.fit(32, 70), HeatMap.fit(512, 70)
        (HeatMap(bin=1, width=2, cells=32), HeatMap(bin=8, width=1, cells=64))
        """
        size = -(-experts // max(1, columns))
        cells = -(-experts // size)
        return cls(size, max(1, min(4, columns // cells)), cells)

    def line(self, counts: Array, *, ascii_only: bool) -> Text:
        """One layer's experts: a cell is as high as the mean load of its experts, and coloured by the busiest."""
        mean = counts.mean()
        glyphs, idle = (_ASCII, _IDLE_ASCII) if ascii_only else (_BLOCKS, _IDLE_BLOCK)
        line = Text()
        for start in range(0, len(counts), self.bin):
            loads = counts[start : start + self.bin] / mean
            if loads.any():
                colour = _COLOURS[bisect_right(THRESHOLDS, loads.max())]
                line.append(glyphs[bisect_right(THRESHOLDS, loads.mean())] * self.width, colour)
            else:
                line.append(idle * self.width, "dim")
        return line

    def axis(self) -> str:
        """The ids of the first experts of some cells, above those."""
        step = -(-8 // self.width)
        line = ""
        for cell in range(0, self.cells, step):
            label = str(cell * self.bin)
            if cell * self.width + len(label) <= self.cells * self.width:
                line = line.ljust(cell * self.width) + label
        return line

    def legend(self, *, ascii_only: bool) -> Text:
        """What the levels mean."""
        glyphs, idle = (_ASCII, _IDLE_ASCII) if ascii_only else (_BLOCKS, _IDLE_BLOCK)
        line = Text().append("load over the layer's mean: ", "dim")
        if not ascii_only:
            line.append(f"{idle} none  ", "dim")
        for level, glyph in enumerate(glyphs):
            line.append(glyph, _COLOURS[level])
            bound = f"<{THRESHOLDS[level]:g}" if level < len(THRESHOLDS) else f">={THRESHOLDS[-1]:g}"
            line.append(f" {bound}  ", "dim")
        return line


def bar(share: float, columns: int, *, ascii_only: bool) -> str:
    """A bar of ``share`` (of 1) of ``columns``, in eighths of a character.

    Examples
    --------
    >>> bar(0.5, 5, ascii_only=False), bar(0.5, 5, ascii_only=True)
    ('██▌', '###')
    """
    if ascii_only:
        return "#" * max(int(share * columns + 0.5), share > 0)
    eighths = max(1, round(share * columns * 8)) if share > 0 else 0
    whole, part = divmod(eighths, 8)
    return _PARTS[8] * whole + (_PARTS[part] if part else "")


def histogram(edges: Sequence[int], counts: Sequence[int], columns: int, *, ascii_only: bool) -> Iterator[Text]:
    """One line per bin: its rows, a bar, how many samples."""
    labels = [f"{low:,}" if high == low + 1 else f"{low:,} - {high - 1:,}" for low, high in pairwise(edges)]
    wide, most = max(map(len, labels)), max(counts)
    room = max(8, columns - wide - len(f"{most:,}") - 3)
    for label, number in zip(labels, counts, strict=True):
        line = Text().append(f"{label:>{wide}}  ", "dim")
        line.append(bar(number / most if most else 0, room, ascii_only=ascii_only), "cyan")
        line.append(f" {number:,}")
        yield line


def expert_bars(load: ExpertLoad, position: int, columns: int, *, ascii_only: bool) -> Iterator[Text]:
    """Every expert of one layer with its count, its share and a bar; side by side where there are many."""
    counts = load.counts[position]
    total, most, mean = int(counts.sum()), int(counts.max()), float(counts.mean())
    abreast = max(1, min(columns // 46, len(counts) // 16))
    lines = -(-len(counts) // abreast)
    wide = len(str(len(counts) - 1))
    number = len(f"{most:,}")
    column = columns // abreast
    room = max(4, column - wide - number - 12)
    for first in range(lines):
        line = Text()
        for expert in range(first, len(counts), lines):
            line.append(" " * ((expert // lines) * column - len(line)))
            load_here = int(counts[expert])
            line.append(f"{expert:>{wide}}", "bold")
            line.append(f" {load_here:>{number},} {load_here / total if total else 0:>7.2%}  ")
            level = bisect_right(THRESHOLDS, load_here / mean) if mean else 0
            line.append(bar(load_here / most if most else 0, room, ascii_only=ascii_only), _COLOURS[level])
        yield line
