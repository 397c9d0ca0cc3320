"""``tracefile gc``: delete what a plan of :mod:`tracefile.retention` says, under readers and writers at work."""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from tracefile.deletion import publish_deletion
from tracefile.errors import DamagedTraceError, NotATraceError, OptionError, TraceError, TraceNotFoundError
from tracefile.format import METADATA_NAME
from tracefile.gc_result import GcResult, TraceResult
from tracefile.reclaim import reclaiming_store
from tracefile.retention import (
    GRACE_SECONDS,
    UNFINISHED_SECONDS,
    TraceAge,
    choose_traces,
    newest_data,
    order_traces,
    plan_gc,
)
from tracefile.store import absolute_path, read_trace_header, store_for
from tracefile.survey import Survey, take_survey
from tracefile.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tracefile.reclaim import Leftover, ReclaimingStore
    from tracefile.retention import GcPlan

#: Told what is being done, how much of it is done, and of how much.
OnProgress: TypeAlias = "Callable[[str, int, int], None]"

#: Traces that are collected together.
_BATCH = 16
#: Segments that are set aside, or removed, at a time where that takes round trips.
_THREADS = 16


@dataclass(frozen=True, slots=True)
class GcOptions:
    """How :func:`collect` works; see there."""

    max_bytes: int | None = None
    older_than: float | None = None
    grace: float = GRACE_SECONDS
    unfinished: float = UNFINISHED_SECONDS
    settle: float | None = None
    dry_run: bool = False


def collect(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    keep_steps: int | None = None,
    max_bytes: int | None = None,
    older_than: float | None = None,
    grace: float = GRACE_SECONDS,
    unfinished: float = UNFINISHED_SECONDS,
    settle: float | None = None,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> GcResult:
    """Reclaim what nothing refers to, and delete what is old.

    Safe while readers and writers are at work. A reader that has a file open finishes; one that comes later for what
    was deleted gets :class:`~tracefile.errors.SegmentMissingError`. A writer that names rows at the moment at which
    they are deleted either keeps them, or writes them again, or raises: see :mod:`tracefile.reclaim`.

    Parameters
    ----------
    paths : path-like, or iterable of path-like
        Traces, and directories or prefixes of traces.
    keep_steps : int, optional
        Keep the newest so many traces of all that ``paths`` hold, and delete the others.
    max_bytes : int, optional
        Of several traces, delete the oldest until the shard files of the others take no more; the newest stays. Of
        one, named by its path, delete the oldest samples.
    older_than : float, optional
        Of several traces, delete those whose newest data are older than so many seconds; of one, such samples.
    grace : float
        For how many seconds the rows of revisions that were replaced or deleted are left alone; not those that this
        call deletes.
    unfinished : float
        After how many seconds without a change a segment in the making is taken for that of a killed writer.
    settle : float, optional
        For how many seconds to wait for writers that have seen a segment which is being taken away, before it is
        removed. Default 1; 60 on network file systems, whose clients see late what others do; in object stores two of
        the times that a request may be tried (120), which is how long publishing may take.
    dry_run : bool
        Change nothing, and say what would be done.
    on_progress : callable, optional

    Returns
    -------
    GcResult

    Raises
    ------
    TraceNotFoundError, NotATraceError, OptionError
    DamagedTraceError
        A trace that was named is damaged. Damaged ones in directories are left as they are; see ``error``.
    OSError

    Examples
    --------
    >>> import numpy as np, tempfile, tracefile
    >>> directory = tempfile.mkdtemp()
    >>> for step in range(4):
    ...     path = f"{directory}/step_{step}.trace"
    ...     with tracefile.TraceWriter(path, num_layers=2, top_k=2, num_experts=8) as writer:
    ...         _ = writer.append("a", np.zeros((3, 2, 2), int))
    >>> [trace.deleted_by for trace in collect(directory, keep_steps=2).traces]
    ['keep-steps', 'keep-steps', None, None]
    >>> sorted(name for name in os.listdir(directory))
    ['step_2.trace', 'step_3.trace']
    """
    for name, value in (("keep_steps", keep_steps), ("max_bytes", max_bytes)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise OptionError(f"{name} must be an integer of at least 0, not {value!r}")
    for name, seconds in (("older_than", older_than), ("grace", grace), ("unfinished", unfinished), ("settle", settle)):
        if seconds is not None and not seconds >= 0:
            raise OptionError(f"{name} must be seconds, of at least 0, not {seconds!r}")
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    options = GcOptions(max_bytes, older_than, grace, unfinished, settle, dry_run)
    return _Collection([absolute_path(path) for path in given], options, on_progress).run(keep_steps)


class _Collection:
    def __init__(self, paths: list[str], options: GcOptions, on_progress: OnProgress | None) -> None:
        self._paths = paths
        self._options = options
        self._told = on_progress or (lambda what, done, total: None)
        self._now = time.time()

    def run(self, keep_steps: int | None) -> GcResult:
        result = GcResult()
        traces = self._find(result)
        alone = len(self._paths) == 1 and traces == self._paths
        if alone and keep_steps is not None:
            raise OptionError(f"{traces[0]} is one trace; keep_steps chooses among several: name their directory")
        if not alone:
            traces = self._delete_traces(traces, result, keep_steps)
        for first in range(0, len(traces), _BATCH):
            self._told("Collecting", first, len(traces))
            self._collect(traces[first : first + _BATCH], alone, result)
        return result

    def _collect(self, paths: list[str], alone: bool, result: GcResult) -> None:
        """Reclaim from several traces, which takes one wait."""
        begun: list[_Collector] = []
        try:
            for path in paths:
                collector = _Collector(path, self._options, self._now, self._told)
                begun.append(collector)
                with self._reported(path, alone, result):
                    collector.begin(samples=alone)
            self._settle([collector for collector in begun if collector.aside])
            for collector in filter(lambda collector: collector.began, begun):
                with self._reported(collector.path, alone, result):
                    result.traces.append(collector.finish())
        finally:
            for collector in begun:
                collector.bring_back()

    @contextlib.contextmanager
    def _reported(self, path: str, alone: bool, result: GcResult) -> Iterator[None]:
        """Leave a damaged trace as it is, and one that is gone by now."""
        try:
            yield
        except DamagedTraceError as error:
            if alone:
                raise
            result.traces.append(TraceResult(path, error=error.message))
        except (TraceNotFoundError, NotATraceError):
            if alone or _exists(path) or _exists(os.path.join(path, METADATA_NAME)):
                raise

    def _settle(self, collectors: Sequence[_Collector]) -> None:
        """Wait for what is being published by writers that have seen a segment which is aside now."""
        seconds = max((collector.store.settle(collector.path) for collector in collectors), default=0.0)
        if collectors and self._options.settle is not None:
            seconds = self._options.settle
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._told("Waiting for writers", int(10 * (seconds - left)), max(1, int(10 * seconds)))
            time.sleep(min(left, 0.2))

    def _find(self, result: GcResult) -> list[str]:
        traces: list[str] = []
        for path in self._paths:
            store = reclaiming_store(path)
            try:
                read_trace_header(path)
            except NotATraceError:
                if _exists(os.path.join(path, METADATA_NAME)):
                    raise
                try:
                    found = store.traces(path)
                except (FileNotFoundError, NotADirectoryError):
                    found = None
                if found is None:
                    raise
                if not self._options.dry_run:
                    result.swept += store.sweep(path, self._now - self._options.unfinished)
                traces += [each for each in found if self._is_trace(each, result)]
            else:
                traces.append(path)
        return list(dict.fromkeys(traces))

    def _is_trace(self, path: str, result: GcResult) -> bool:
        try:
            read_trace_header(path)
        except NotATraceError:
            return False
        except TraceError as error:
            result.traces.append(TraceResult(path, error=error.message))
            return False
        return True

    def _delete_traces(self, traces: list[str], result: GcResult, keep_steps: int | None) -> list[str]:
        """Delete whole traces; the others, oldest first."""
        ages = []
        for number, path in enumerate(traces):
            self._told("Looking", number, len(traces))
            ages.append(self._age(path))
        ordered, result.ordered_by = order_traces(ages)
        chosen = choose_traces(
            ages,
            now=self._now,
            keep_steps=keep_steps,
            max_bytes=self._options.max_bytes,
            older_than=self._options.older_than,
        )
        sizes = {age.path: age.nbytes for age in ages}
        for number, (path, rule) in enumerate(chosen.items()):
            self._told("Deleting", number, len(chosen))
            if not self._options.dry_run:
                reclaiming_store(path).delete_trace(path)
            result.traces.append(TraceResult(path, rule, sizes[path], sizes[path]))
        return [age.path for age in ordered if age.path not in chosen]

    def _age(self, path: str) -> TraceAge:
        headers = take_survey(path, read_trace_header(path)).segments.values()
        newest = newest_data(headers)
        if newest is None:
            newest = reclaiming_store(path).changed(os.path.join(path, METADATA_NAME))
        return TraceAge(path, newest, sum(header.shard_bytes for header in headers))


def _exists(path: str) -> bool:
    try:
        store_for(path).size(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


class _Collector:
    """Reclaims from one trace: takes away, and removes what nobody needs after a while."""

    def __init__(self, path: str, options: GcOptions, now: float, told: OnProgress) -> None:
        self.path = path
        self.store: ReclaimingStore = reclaiming_store(path)
        self.aside: dict[str, str] = {}  # segments, and how the store knows that it was us
        self._options = options
        self._now = now
        self._told = told
        self.began = False

    def begin(self, *, samples: bool) -> None:
        """Plan, delete samples if ``max_bytes`` and ``older_than`` are about those, and take segments aside."""
        options, store, path = self._options, self.store, self.path
        self._header = read_trace_header(path)
        if not options.dry_run:
            store.bring_back_all(path, store.aside(path))  # a collection was killed
        self._survey = self._look()
        self._plan = self._replan(
            self._survey,
            grace=options.grace,
            max_bytes=options.max_bytes if samples else None,
            older_than=options.older_than if samples else None,
        )
        self._result = TraceResult(
            path,
            total_bytes=self._plan.total_bytes,
            samples=list(self._plan.doomed),
            partial_segments=self._plan.partial_segments,
            partial_bytes=self._plan.partial_bytes,
        )
        self.began = True
        if options.dry_run:
            return
        if self._plan.doomed:
            with Trace(path) as trace:
                publish_deletion(trace, self._plan.doomed, after=max(self._plan.doomed.values()))
        self._together("Taking away", self._set_aside, list(self._plan.segments))

    def finish(self) -> TraceResult:
        """Remove what is still needed by nobody, and what killed processes left."""
        result, planned = self._result, self._plan.segments
        leftovers = [each for each in self.store.leftovers(self.path) if self._is_dead(each)]
        if self._options.dry_run:
            result.segments = list(planned)
        else:
            result.segments = self._remove() if self.aside else []
            for leftover in leftovers:
                self.store.remove_leftover(self.path, leftover.name)
            self.store.leave(self.path)
        result.brought_back = [segment for segment in planned if segment not in result.segments]
        result.leftovers = [each.name for each in leftovers]
        result.freed_bytes = sum(planned[segment] for segment in result.segments)
        result.freed_bytes += sum(each.nbytes for each in leftovers)
        return result

    def bring_back(self) -> None:
        """Make visible again what is aside; the oldest first, which others may name."""
        self.store.bring_back_all(self.path, sorted(self.aside))
        self.aside.clear()

    def _set_aside(self, segment: str) -> None:
        mark = self.store.set_aside(self.path, segment)
        if mark:
            self.aside[segment] = mark

    def _drop(self, segment: str) -> None:
        if self.store.drop(self.path, segment, self.aside[segment]):
            del self.aside[segment]

    def _together(self, what: str, act: Callable[[str], None], segments: list[str]) -> None:
        """Do something with each of several segments; where that takes round trips, with some at a time."""
        with contextlib.ExitStack() as stack:
            done: Iterable[None] = map(act, segments)
            if self.store.round_trips:
                threads = ThreadPoolExecutor(_THREADS)
                stack.callback(threads.shutdown, cancel_futures=True)
                done = threads.map(act, segments)
            for number, _ in enumerate(done):
                self._told(what, number, len(segments))

    def _look(self) -> Survey:
        survey = take_survey(self.path, self._header)
        for error in survey.damaged.values():
            raise error  # it may be what needs a segment
        return survey

    def _replan(self, survey: Survey, **options: Any) -> GcPlan:
        return plan_gc(survey, now=self._now, unfinished=self._options.unfinished, **options)

    def _remove(self) -> list[str]:
        """Remove what is aside, but for what somebody needs by now."""
        again = self._look()
        # As if it were there: what would be needed of it?
        known = {segment: self._survey.segments[segment] for segment in self.aside}
        again.segments = dict(sorted((again.segments | known).items()))
        goes = self._replan(again, grace=self._plan.grace, doomed=self._plan.doomed).segments
        # Another collection may have aside what lists samples that a segment of ours says were deleted.
        others = set(self.store.aside(self.path)) - set(self.aside)
        going = [segment for segment in goes if segment in known and not (others and known[segment].deleted)]
        self._together("Removing", self._drop, going)
        removed = [segment for segment in going if segment not in self.aside]
        self.bring_back()
        return removed

    def _is_dead(self, leftover: Leftover) -> bool:
        return leftover.finished or leftover.changed < self._now - self._options.unfinished
