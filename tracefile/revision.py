"""What a sample's next revision consists of: rows that the trace has already, and new ones. Pure.

A rollout that resumes, or a session's next turn, continues a sample. Rows that stay are named, not copied; who
holds a handle of an older revision keeps reading that one, since nothing that it names ever changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from tracefile.errors import OptionError
from tracefile.metadata import SampleEntry, Span
from tracefile.runs import MissingRun, PaddingRun, StoredRun

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracefile.runs import Rows

Array: TypeAlias = "np.ndarray[Any, Any]"
Keep = Literal["last", "first"]
Gap = Literal["error", "missing"]


@dataclass(frozen=True, slots=True)
class Kept:
    """Rows of a segment that is there already.

    Attributes
    ----------
    span : Span
    missing : tuple of (int, int)
        Those that were never captured, counted from the span's first row.
    """

    span: Span
    missing: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return self.span.stop - self.span.start

    def cut(self, start: int, stop: int) -> Kept:
        segment, first, _ = self.span.segment, self.span.start, self.span.stop
        missing = tuple(
            (max(a, start) - start, min(b, stop) - start) for a, b in self.missing if a < stop and b > start
        )
        return Kept(Span(segment, first + start, first + stop), missing)


#: Rows of a sample: kept ones, or new ones ``[rows, num_layers, top_k]``, of which those that are -1 throughout
#: were never captured.
Part: TypeAlias = "Kept | Array"


def parts_of_entry(entry: SampleEntry) -> list[Part]:
    """The parts of a sample that is in the trace."""
    parts: list[Part] = []
    first = 0
    for span in entry.spans:
        last = first + span.stop - span.start
        missing = tuple(
            (max(a, first) - first, min(b, last) - first) for a, b in entry.missing if a < last and b > first
        )
        parts.append(Kept(span, missing))
        first = last
    return parts


def parts_of_rows(rows: Rows, trace: str, num_layers: int, top_k: int) -> list[Part] | None:
    """The parts of a selection of all layers of the trace with uuid ``trace``; ``None`` if it has other rows too."""
    parts: list[Part] = []
    for run in rows.runs:
        if isinstance(run, StoredRun):
            if run.segment.trace.uuid != trace:
                return None
            parts.append(Kept(Span(run.segment.id, run.start, run.stop)))
        elif isinstance(run, PaddingRun):
            parts.append(run.values)
        else:
            assert isinstance(run, MissingRun)
            parts.append(missing_rows(len(run), num_layers, top_k))
    return parts


def missing_rows(rows: int, num_layers: int, top_k: int) -> Array:
    """New rows that were never captured."""
    return np.broadcast_to(np.int8(-1), (rows, num_layers, top_k))


def count_rows(parts: Sequence[Part]) -> int:
    return sum(len(part) for part in parts)


def cut(parts: Sequence[Part], start: int, stop: int) -> list[Part]:
    """Rows ``[start, stop)``."""
    found: list[Part] = []
    first = 0
    for part in parts:
        low, high = max(start - first, 0), min(stop - first, len(part))
        if low < high:
            found.append(part.cut(low, high) if isinstance(part, Kept) else part[low:high])
        first += len(part)
    return found


def captured(parts: Sequence[Part]) -> Array:
    """Bool per row: whether it was captured."""
    masks = [np.ones(0, bool)]
    for part in parts:
        mask = np.ones(len(part), bool)
        if isinstance(part, Kept):
            for start, stop in part.missing:
                mask[start:stop] = False
        elif part.dtype.kind == "i":
            mask = ~(part == -1).all(axis=(1, 2))
        masks.append(mask)
    return np.concatenate(masks)


def check_continuation(start: object, keep: str, gap: str) -> None:
    """Check how a sample is to be continued.

    Raises
    ------
    OptionError
    """
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise OptionError(f"start must be an integer of at least 0, not {start!r}")
    for name, value, choices in (("keep", keep, get_args(Keep)), ("gap", gap, get_args(Gap))):
        if value not in choices:
            raise OptionError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def revise(old: Sequence[Part], new: Sequence[Part], start: int, keep: Keep) -> list[Part]:
    """``old``, continued by ``new`` from row ``start`` on, which ``old`` has or which is its end.

    Of rows that both have, the new ones win with ``keep="last"``, and the sample then ends where ``new`` does; with
    ``"first"`` the old ones win. A row that was not captured loses against one that was.
    """
    before, continued = count_rows(old), start + count_rows(new)
    both = min(before, continued)
    parts = cut(old, 0, start)
    old_wins = captured(cut(old, start, both))
    if keep == "last":
        old_wins &= ~captured(cut(new, 0, both - start))
    for first, last, is_old in _runs(np.concatenate([old_wins, np.zeros(continued - both, bool)])):
        parts += cut(old, start + first, start + last) if is_old else cut(new, first, last)
    if keep == "first":
        parts += cut(old, both, before)
    return parts


def _runs(mask: Array) -> Iterator[tuple[int, int, bool]]:
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    for first, last in pairwise(edges):
        if first < last:
            yield first, last, bool(mask[first])


def entry_of(sample: str, parts: Sequence[Kept]) -> SampleEntry:
    """The entry of a sample all of whose rows are in segments; spans that continue each other become one."""
    spans: list[Span] = []
    missing: list[tuple[int, int]] = []
    rows = 0
    for part in parts:
        if not len(part):
            continue
        for a, b in part.missing:
            if missing and missing[-1][1] == rows + a:
                missing[-1] = (missing[-1][0], rows + b)
            else:
                missing.append((rows + a, rows + b))
        rows += len(part)
        last = spans[-1] if spans else None
        if last is not None and (last.segment, last.stop) == (part.span.segment, part.span.start):
            spans[-1] = Span(last.segment, last.start, part.span.stop)
        else:
            spans.append(part.span)
    return SampleEntry(sample, tuple(spans), tuple(missing))
