"""How a trace's experts are loaded: how often each was chosen, per layer.

Read a slice of rows at a time, so that memory stays bounded however long the samples are. What is damaged is
left out, and said so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch

from tracefile.errors import DamagedTraceError, SegmentMissingError, TraceError
from tracefile.lazy import LazyRoutedExperts
from tracefile.runs import Rows, StoredRun
from tracefile.segments import segment_pool
from tracefile.settings import settings
from tracefile.summary import pread_reference
from tracefile.survey import unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tracefile.metadata import SampleEntry
    from tracefile.survey import Survey

Array: TypeAlias = "np.ndarray[Any, Any]"

#: The most bytes of routing that counting has in memory at once, in the stored width.
SLICE_BYTES = 8 * 1024 * 1024


@dataclass(slots=True, eq=False)
class ExpertLoad:
    """How often each expert was chosen, per layer.

    Attributes
    ----------
    layer_ids : tuple of int
        Global ids of the layers.
    counts : ndarray
        int64 ``[layers, num_experts]``.
    rows : int
        Captured rows that were counted.
    uncounted_rows : int
        Captured rows that could not be read.
    wrong_ids : int
        Ids outside of ``[0, num_experts)``, which are not in ``counts``.
    damaged : dict of str to str
        Segments that could not be read whole, and why.
    """

    layer_ids: tuple[int, ...]
    counts: Array
    rows: int = 0
    uncounted_rows: int = 0
    wrong_ids: int = 0
    damaged: dict[str, str] = field(default_factory=dict)

    def imbalance(self, layer: int) -> float | None:
        """The busiest expert's load over the mean load, at position ``layer``; ``None`` where nothing was counted."""
        total = int(self.counts[layer].sum())
        return int(self.counts[layer].max()) * self.counts.shape[1] / total if total else None

    def as_dict(self) -> dict[str, Any]:
        """The load as plain JSON values."""
        return {
            "rows": self.rows,
            "uncounted_rows": self.uncounted_rows,
            "ids_outside": self.wrong_ids,
            "layers": [
                {
                    "layer": layer,
                    "max_over_mean": self.imbalance(position),
                    "idle_experts": int((self.counts[position] == 0).sum()),
                    "counts": self.counts[position].tolist(),
                }
                for position, layer in enumerate(self.layer_ids)
            ],
        }


def expert_load(
    survey: Survey,
    entries: Iterable[SampleEntry],
    *,
    layer: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> ExpertLoad:
    """Count the experts that the captured rows of some samples chose. Rows that several samples share count for each.

    Parameters
    ----------
    survey : Survey
    entries : iterable of SampleEntry
    layer : int, optional
        Position of the one layer to count; default all of them.
    on_progress : callable, optional
        Called with the number of rows that were dealt with since the last call.
    """
    return _LoadCount(survey, layer, on_progress).run(entries)


class _LoadCount:
    def __init__(self, survey: Survey, layer: int | None, on_progress: Callable[[int], None] | None) -> None:
        config = survey.header.config
        self.survey = survey
        self.config = config
        self.layers = slice(None) if layer is None else slice(layer, layer + 1)
        self.on_progress = on_progress
        self.ref = pread_reference(survey)
        layer_ids = config.layer_ids[self.layers]
        self.load = ExpertLoad(layer_ids, np.zeros((len(layer_ids), config.num_experts), np.int64))
        self.dtype: torch.dtype = getattr(torch, config.dtype.name)
        limit = settings().materialize_limit
        budget = SLICE_BYTES if limit is None else min(SLICE_BYTES, limit)
        rows = max(1, budget // (len(layer_ids) * config.top_k * config.dtype.itemsize))
        # Whole chunks, so that none is decoded for two slices.
        chunk = max((each.geometry.rows_per_chunk for each in survey.segments.values()), default=1)
        self.rows = rows if rows < chunk else rows // chunk * chunk

    def run(self, entries: Iterable[SampleEntry]) -> ExpertLoad:
        try:
            for rows in self._slices(entries):
                self._count(rows)
                if self.on_progress is not None:
                    self.on_progress(len(rows))
        finally:
            segment_pool.close(self.ref)
        return self.load

    def _slices(self, entries: Iterable[SampleEntry]) -> Iterator[Rows]:
        """The captured rows, at most ``self.rows`` at once: many short samples, or a part of a long one."""
        gathered: list[Rows] = []
        size = 0
        for entry in entries:
            rows = Rows.of(run for run in Rows.of_sample(entry, self.ref).runs if isinstance(run, StoredRun))
            if size + len(rows) > self.rows:
                yield Rows.concat(gathered)
                gathered, size = [], 0
            if len(rows) > self.rows:
                for start in range(0, len(rows), self.rows):
                    yield rows[start : start + self.rows]
            else:
                gathered.append(rows)
                size += len(rows)
        yield Rows.concat(gathered)

    def _count(self, rows: Rows) -> None:
        if not len(rows):
            return
        try:
            lazy = cast("LazyRoutedExperts", LazyRoutedExperts.from_rows(rows, self.config)[:, self.layers])
            values = lazy.materialize(dtype=self.dtype).numpy()
        except (DamagedTraceError, OSError) as error:
            self._count_piecewise(rows, error)
            return
        experts = self.config.num_experts
        for position, counts in enumerate(self.load.counts):
            found = np.bincount(values[:, position].reshape(-1), minlength=experts)
            counts += found[:experts]
            self.load.wrong_ids += int(found[experts:].sum())
        self.load.rows += len(rows)

    def _count_piecewise(self, rows: Rows, error: DamagedTraceError | OSError) -> None:
        """Count what can be read of a slice that cannot be read whole: chunk by chunk along rows."""
        pieces = list(self._pieces(rows))
        if len(pieces) > 1:
            for piece in pieces:
                self._count(piece)
            return
        for segment in rows.segments():
            gone = isinstance(error, SegmentMissingError) and self.survey.is_gone(segment.id)
            if not gone or segment.id not in self.survey.segments:  # else it vanished since the survey
                known = error if isinstance(error, TraceError) else unreadable(self.survey.path, error, segment.id)
                self.load.damaged.setdefault(segment.id, str(known))
        self.load.uncounted_rows += len(rows)

    def _pieces(self, rows: Rows) -> Iterator[Rows]:
        for run in rows.runs:
            if not isinstance(run, StoredRun):
                continue
            header = self.survey.segments.get(run.segment.id)
            step = header.geometry.rows_per_chunk if header is not None else len(run)
            start = run.start
            while start < run.stop:
                stop = min(run.stop, start // step * step + step)
                yield Rows.of([StoredRun(run.segment, start, stop)])
                start = stop
