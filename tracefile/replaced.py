"""Taking away the segments that merged ones replace.

Where a merged segment has all that an original has, the original is deleted once the merged one has been visible for a
while. Where rows or revisions were dropped, somebody may name them at this very moment, who has found them in the
original: it is set aside first, and brought back if it turns out to be needed; see :mod:`tracefile.reclaim`.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from tracefile.metadata import Span
from tracefile.moved import Relocations
from tracefile.reclaim import reclaiming_store
from tracefile.revisions import Newest
from tracefile.store import store_for
from tracefile.survey import take_survey

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from tracefile.metadata import SegmentHeader, TraceHeader


def without_loss(merged: SegmentHeader, replaced: Iterable[SegmentHeader], deleted: Mapping[str, str]) -> set[str]:
    """Of segments that another replaces, those of which it has all rows, and lists all samples or newer revisions.

    Parameters
    ----------
    merged : SegmentHeader
    replaced : iterable of SegmentHeader
    deleted : mapping of str to str
        The samples that were deleted, and with which segment.
    """
    moves = Relocations([(merged.id, merged.moved)])
    found = set()
    for header in replaced:
        origins = {sample: header.origin_of(entry) for sample, entry in header.samples.items()}
        # What lies between samples, where others have their rows too, need not have moved.
        rows = [span for entry in header.samples.values() for span in entry.spans if span.segment == header.id]
        rows += [Span(header.id, each.first, each.first + each.stop - each.start) for each in header.moved]
        if all(piece.segment != header.id for span in rows for piece in _pieces(moves, span)) and all(
            origin <= deleted.get(sample, "")
            or (sample in merged.samples and origin <= merged.origin_of(merged.samples[sample]))
            for sample, origin in origins.items()
        ):
            found.add(header.id)
    return found


def _pieces(moves: Relocations, span: Span) -> list[Span]:
    return moves.resolve(span) if span.start < span.stop else []


def still_needed(there: Mapping[str, SegmentHeader], going: Mapping[str, SegmentHeader]) -> set[str]:
    """Which segments cannot go from a trace: those that have rows of a sample's newest revision, or alone tell of it.

    Parameters
    ----------
    there, going : mapping of str to SegmentHeader
        All segments, with or without those that are going.
    """
    everything = {**there, **going}
    everything = {segment: everything[segment] for segment in sorted(everything)}
    relocations = Relocations.of(everything.values())
    wanted = _origins(Newest(everything.values()))
    needed: set[str] = set()
    while True:
        told = Newest(header for each, header in everything.items() if each in needed or each not in going)
        found = {
            piece.segment
            for entry in told.entries.values()
            for span in entry.spans
            for piece in _pieces(relocations, span)
        }
        untold = wanted.items() ^ _origins(told).items()
        samples = {sample for sample, _ in untold}
        for segment, header in going.items():
            if not samples.isdisjoint(header.deleted) or any(
                (sample, header.origin_of(header.samples[sample])) in untold
                for sample in samples & header.samples.keys()
            ):
                found.add(segment)
        found = found & going.keys() - needed
        if not found:
            return needed
        needed |= found


def _origins(newest: Newest) -> dict[str, str]:
    return {sample: newest.origin_of(sample) for sample in newest.entries}


class Removal:
    """Takes replaced segments away, when it is time.

    Parameters
    ----------
    path : str
    header : TraceHeader
    settle, settle_aside : float
        How many seconds after their replacement was published they are taken away, and how many seconds after they
        were set aside they are dropped.

    Attributes
    ----------
    kept : list of str
        Those that stay, since somebody needs them.
    """

    def __init__(self, path: str, header: TraceHeader, *, settle: float, settle_aside: float) -> None:
        self.kept: list[str] = []
        self._path = path
        self._header = header
        self._settle = settle
        self._settle_aside = settle_aside
        self._whole: deque[tuple[float, list[str]]] = deque()
        self._partly: deque[tuple[float, list[SegmentHeader]]] = deque()
        self._aside: dict[str, SegmentHeader] = {}
        self._marks: dict[str, str] = {}  # how the store knows that it was us
        self._aside_until = 0.0

    def add(self, replaced: Iterable[SegmentHeader], whole: Collection[str]) -> None:
        """Note segments whose replacement is visible; ``whole`` are those of which it has everything."""
        due = time.monotonic() + self._settle
        headers = {header.id: header for header in replaced}
        at_once = [segment for segment in headers if segment in whole]
        partly = [header for segment, header in headers.items() if segment not in whole]
        if at_once:
            self._whole.append((due, at_once))
        if partly:
            self._partly.append((due, partly))

    def advance(self, at_least: int | None = None) -> None:
        """Do what is due, or everything, and wait for it.

        Parameters
        ----------
        at_least : int, optional
            Do only what is due, and set segments aside once there are so many: each time takes a look at all others.

        Raises
        ------
        OSError
        """
        while True:
            due: list[str] = []
            while self._whole and self._whole[0][0] <= time.monotonic():
                due += self._whole.popleft()[1]
            if due:
                store_for(self._path).delete_all(self._path, due)
            if self._aside and self._aside_until <= time.monotonic():
                self._drop()
            if not self._aside and self._partly:
                self._set_aside(at_least)
            times = [self._whole[0][0]] if self._whole else []
            if self._aside:
                times.append(self._aside_until)
            elif self._partly:
                times.append(self._partly[-1][0])
            if at_least is not None or not times:
                return
            time.sleep(max(0.0, min(times) - time.monotonic()))

    def bring_back(self) -> None:
        """Make visible again what is aside; the oldest first, which others may name."""
        if self._aside:
            reclaiming_store(self._path).bring_back_all(self._path, sorted(self._aside))
            self._aside.clear()

    def _set_aside(self, at_least: int | None) -> None:
        now, store = time.monotonic(), reclaiming_store(self._path)
        due = sum(len(headers) for when, headers in self._partly if when <= now)
        if self._partly[-1][0] > now if at_least is None else due < at_least:
            return
        while self._partly and self._partly[0][0] <= now:
            for header in self._partly.popleft()[1]:
                mark = store.set_aside(self._path, header.id)
                if mark:
                    self._aside[header.id], self._marks[header.id] = header, mark
        self._aside_until = time.monotonic() + self._settle_aside

    def _drop(self) -> None:
        """Look at the whole trace again, and drop what is aside, but for what somebody needs by now."""
        store = reclaiming_store(self._path)
        survey = take_survey(self._path, self._header)
        # What is damaged may be what needs a segment.
        needed = set(self._aside) if survey.damaged else still_needed(survey.segments, self._aside)
        store.bring_back_all(self._path, sorted(needed))
        self.kept += sorted(needed)
        for segment in list(self._aside):
            if segment not in needed and not store.drop(self._path, segment, self._marks[segment]):
                self.kept.append(segment)  # a writer has brought it back
            del self._aside[segment]
