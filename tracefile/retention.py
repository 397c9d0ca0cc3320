"""What may go from a trace, and which traces may go. Pure: planned from documents; :mod:`tracefile.collect` does it.

A segment stays while a revision needs it: as the one that lists it, or as one that has rows of it, which may be those
of another sample that begins alike. A revision is needed while it is its sample's newest, and for a grace time after
it was replaced or deleted, for those who have just looked it up. A segment that says that samples were deleted stays
while an older revision of them is listed anywhere, and for a day, in case one is still being published.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tracefile.survey import count_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tracefile.metadata import SampleEntry, SegmentHeader
    from tracefile.survey import Survey

#: How long a revision that was replaced or deleted keeps its rows.
GRACE_SECONDS = 600.0
#: How long a segment may be in the making, and what is left of a killed writer lies in its staging directory.
UNFINISHED_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What may go from one trace.

    Attributes
    ----------
    segments : dict of str to int
        The segments of which nothing is needed, and the bytes of their shard files.
    doomed : dict of str to str
        Samples that are to be deleted for that, oldest first, and what comes right after their newest revision: those
        that are committed meanwhile are to stay.
    grace : float
        What was planned with, in seconds: none, where less was to stay than with it.
    total_bytes : int
        Of all shard files.
    partial_segments : int
        Segments that stay, and of which some rows are needed no more.
    partial_bytes : int
        About what these rows take; compaction would free it.
    """

    segments: dict[str, int]
    doomed: dict[str, str]
    grace: float
    total_bytes: int
    partial_segments: int
    partial_bytes: int

    @property
    def freed_bytes(self) -> int:
        """Bytes of the shard files that may go."""
        return sum(self.segments.values())


class _Listed(NamedTuple):
    """A revision, by a segment that lists it."""

    origin: str
    listed_in: str
    entry: SampleEntry


@dataclass(slots=True)
class _Sample:
    listed: list[_Listed] = field(default_factory=list)
    deletions: list[str] = field(default_factory=list)


def made_at(segment: str, header: SegmentHeader | None = None) -> float:
    """When a segment was made, in seconds since the epoch: as its document says, or else its id."""
    created = None if header is None else header.writer.get("created")
    if isinstance(created, int | float) and not isinstance(created, bool):
        return float(created)
    return int(segment[:16], 16) / 1e9 if re.fullmatch("[0-9a-f]{16}", segment[:16]) else 0.0


def newest_data(headers: Iterable[SegmentHeader]) -> float | None:
    """When the newest of segments that list samples was made; ``None`` without any."""
    return max((made_at(header.id, header) for header in headers if header.samples), default=None)


def plan_gc(
    survey: Survey,
    *,
    now: float,
    grace: float = GRACE_SECONDS,
    unfinished: float = UNFINISHED_SECONDS,
    max_bytes: int | None = None,
    older_than: float | None = None,
    doomed: Mapping[str, str] | None = None,
) -> GcPlan:
    """Plan what may go from a trace.

    Parameters
    ----------
    survey : Survey
        Without damage: a damaged document may be the one that needs a segment.
    now : float
        Seconds since the epoch.
    grace : float
        For how many seconds a revision that was replaced or deleted keeps its rows.
    unfinished : float
        For how many seconds a segment that was begun may still be published.
    max_bytes : int, optional
        Where the shard files take more, do without the grace, and then delete the oldest samples. Those that would
        free nothing, because newer ones need the same segments, are spared.
    older_than : float, optional
        Delete samples whose newest revision is older than so many seconds.
    doomed : mapping of str to str, optional
        Samples that were deleted by an earlier plan: their revisions up to there have no grace.

    Returns
    -------
    GcPlan

    Examples
    --------
    >>> import numpy as np, tempfile, tracefile
    >>> from tracefile.store import read_trace_header
    >>> from tracefile.survey import take_survey
    >>> path = tempfile.mkdtemp() + "/step_1.trace"
    >>> with tracefile.TraceWriter(path, num_layers=2, top_k=2, num_experts=8) as writer:
    ...     _ = writer.append("a", np.zeros((3, 2, 2), int)), writer.append("a", np.ones((4, 2, 2), int))
    >>> survey = take_survey(path, read_trace_header(path))
    >>> len(plan_gc(survey, now=0).segments), len(plan_gc(survey, now=2e9 * 2, grace=60).segments)
    (0, 1)
    """
    plan = _Planner(survey.segments, now, grace, unfinished).plan(None, older_than, doomed or {})
    if max_bytes is not None and plan.total_bytes - plan.freed_bytes > max_bytes:
        plan = _Planner(survey.segments, now, 0.0, unfinished).plan(max_bytes, older_than, doomed or {})
    return plan


class _Planner:
    def __init__(self, headers: Mapping[str, SegmentHeader], now: float, grace: float, unfinished: float) -> None:
        self._headers = headers
        self._now = now
        self._grace = grace
        self._unfinished = unfinished
        self._samples: dict[str, _Sample] = {}
        self._moved_to: dict[str, list[str]] = {}
        for segment, header in headers.items():
            for sample, entry in header.samples.items():
                listed = _Listed(header.origin_of(entry), segment, entry)
                self._samples.setdefault(sample, _Sample()).listed.append(listed)
            for sample, deleted_with in header.deleted.items():
                self._samples.setdefault(sample, _Sample()).deletions.append(deleted_with or segment)
            for each in header.moved:
                self._moved_to.setdefault(each.segment, []).append(segment)

    def plan(self, max_bytes: int | None, older_than: float | None, doomed: Mapping[str, str]) -> GcPlan:
        needed_by: dict[str, list[_Listed]] = {}
        ages: list[tuple[float, str]] = []
        for name, sample in self._samples.items():
            needed = [listed for listed in self._needed(sample) if listed.origin >= doomed.get(name, "")]
            newest = self._newest(sample)
            if newest is not None:
                ages.append((self._made(newest.origin), name))
            if needed:
                needed_by[name] = needed
        chosen: list[str] = []
        if older_than is not None:
            chosen = [name for made, name in sorted(ages) if made < self._now - older_than]
            for name in chosen:
                needed_by.pop(name, None)
        total = sum(header.shard_bytes for header in self._headers.values())
        if max_bytes is not None:
            rest = [name for _, name in sorted(ages) if name in needed_by]
            chosen += self._choose(needed_by, rest, total - max_bytes)
        needed = [listed for each in needed_by.values() for listed in each]
        stays = {segment for listed in needed for segment in self._segments_of(listed)}
        stays.update(segment for segment, header in self._headers.items() if self._tells(header))
        goes = {segment: self._headers[segment].shard_bytes for segment in self._headers if segment not in stays}
        partial = self._partial(needed, goes)
        ends = {name: f"{newest.origin}-" for name in chosen if (newest := self._newest(self._samples[name]))}
        return GcPlan(goes, ends, self._grace, total, len(partial), sum(partial.values()))

    def _made(self, origin: str) -> float:
        return made_at(origin, self._headers.get(origin))

    def _newest(self, sample: _Sample) -> _Listed | None:
        newest = max(sample.listed, key=lambda listed: listed.origin, default=None)
        deleted = max(sample.deletions, default="")
        return newest if newest is not None and newest.origin > deleted else None

    def _needed(self, sample: _Sample) -> Iterator[_Listed]:
        """The revisions that count, or did not long ago."""
        if not sample.listed:
            return
        replacing = sorted({*(listed.origin for listed in sample.listed), *sample.deletions})
        times = [self._made(origin) for origin in replacing]
        for listed in sample.listed:
            later = [time for origin, time in zip(replacing, times, strict=True) if origin > listed.origin]
            # `>=`: what happened at this very moment may have come after.
            if not later or (self._grace > 0 and min(later) >= self._now - self._grace):
                yield listed

    def _segments_of(self, listed: _Listed) -> Iterator[str]:
        """The segments that a revision needs; where rows moved, those where they were and those where they are."""
        pending = [listed.listed_in, *(span.segment for span in listed.entry.spans)]
        seen: set[str] = set()
        while pending:
            segment = pending.pop()
            if segment not in seen:
                seen.add(segment)
                pending += self._moved_to.get(segment, ())
                yield segment

    def _tells(self, header: SegmentHeader) -> bool:
        """Whether it must go on saying that samples were deleted."""
        if not header.deleted:
            # What lists nothing and says nothing is of no use, but somebody may be about to use it.
            return not header.samples and self._now - made_at(header.id, header) < self._unfinished
        if self._now - made_at(header.id, header) < self._unfinished:
            return True
        return any(
            listed.origin < (deleted_with or header.id)
            for sample, deleted_with in header.deleted.items()
            for listed in self._samples[sample].listed
        )

    def _choose(self, needed_by: dict[str, list[_Listed]], candidates: Sequence[str], excess: int) -> list[str]:
        """Delete the oldest samples until ``excess`` bytes are free; they are taken out of ``needed_by``."""
        uses = {
            name: {segment for listed in needed for segment in self._segments_of(listed) if segment in self._headers}
            for name, needed in needed_by.items()
        }
        users = Counter(segment for used in uses.values() for segment in used)
        excess -= sum(header.shard_bytes for segment, header in self._headers.items() if segment not in users)
        chosen = []
        for name in candidates:
            if excess <= 0:
                break
            chosen.append(name)
            for segment in uses[name]:
                users[segment] -= 1
                if not users[segment]:
                    excess -= self._headers[segment].shard_bytes
        for name in reversed(list(chosen)):
            if all(users[segment] or not self._headers[segment].shard_bytes for segment in uses[name]):
                chosen.remove(name)
                users.update(uses[name])
            else:
                del needed_by[name]
        return chosen

    def _partial(self, needed: Iterable[_Listed], goes: Mapping[str, int]) -> dict[str, int]:
        """Of the segments that stay with rows that nobody needs: about the bytes that these take."""
        live: dict[str, list[tuple[int, int]]] = {}
        own: dict[str, list[tuple[int, int]]] = {}
        for listed in needed:
            for span in listed.entry.spans:
                live.setdefault(span.segment, []).append((span.start, span.stop))
        for segment, header in self._headers.items():
            if segment not in goes:
                own[segment] = [
                    (span.start, span.stop)
                    for entry in header.samples.values()
                    for span in entry.spans
                    if span.segment == segment
                ]
        partial = {}
        for segment, ranges in own.items():
            rows = count_rows([*ranges, *live.get(segment, ())])
            dead = rows - count_rows(live.get(segment, ()))
            if dead > 0:
                partial[segment] = self._headers[segment].shard_bytes * dead // rows
        return partial


class TraceAge(NamedTuple):
    """A trace among others."""

    path: str
    newest: float
    nbytes: int


_STEP = re.compile(r"(\d+)\D*$")


def step_of(path: str) -> int | None:
    """The step number in a trace's name: its last number.

    Examples
    --------
    >>> step_of("/data/run-7/step_000123.trace"), step_of("/data/run-7/final.trace")
    (123, None)
    """
    found = _STEP.search(path.rstrip("/").rpartition("/")[2])
    return None if found is None else int(found[1])


def order_traces(traces: Sequence[TraceAge]) -> tuple[list[TraceAge], str]:
    """Traces, oldest first, and by what that goes: ``"step"`` if each has a number in its name, else ``"time"``."""
    steps = {trace.path: step_of(trace.path) for trace in traces}
    if all(step is not None for step in steps.values()):
        return sorted(traces, key=lambda trace: (steps[trace.path] or 0, trace.newest, trace.path)), "step"
    return sorted(traces, key=lambda trace: (trace.newest, trace.path)), "time"


def choose_traces(
    traces: Sequence[TraceAge],
    *,
    now: float,
    keep_steps: int | None = None,
    max_bytes: int | None = None,
    older_than: float | None = None,
) -> dict[str, str]:
    """Which of several traces are to be deleted as a whole.

    Parameters
    ----------
    traces : sequence of TraceAge
    now : float
        Seconds since the epoch.
    keep_steps : int, optional
        How many of the newest to keep.
    max_bytes : int, optional
        Delete the oldest until the others take no more; the newest stays in any case.
    older_than : float, optional
        Delete those whose newest data are older than so many seconds.

    Returns
    -------
    dict of str to str
        Paths, oldest first, and which rule it was.

    Examples
    --------
    >>> traces = [TraceAge(f"/data/step_{step}.trace", 1000.0 + step, 50) for step in (8, 9, 10)]
    >>> choose_traces(traces, now=2000, keep_steps=2)
    {'/data/step_8.trace': 'keep-steps'}
    >>> choose_traces(traces, now=2000, max_bytes=60)
    {'/data/step_8.trace': 'max-bytes', '/data/step_9.trace': 'max-bytes'}
    """
    ordered, _ = order_traces(traces)
    chosen: dict[str, str] = {}
    if keep_steps is not None:
        chosen.update((trace.path, "keep-steps") for trace in ordered[: max(0, len(ordered) - keep_steps)])
    if older_than is not None:
        for trace in ordered:
            if trace.newest < now - older_than:
                chosen.setdefault(trace.path, "older-than")
    if max_bytes is not None:
        total = sum(trace.nbytes for trace in ordered if trace.path not in chosen)
        for trace in ordered[:-1]:
            if total > max_bytes and trace.path not in chosen:
                chosen[trace.path] = "max-bytes"
                total -= trace.nbytes
    return {trace.path: chosen[trace.path] for trace in ordered if trace.path in chosen}
