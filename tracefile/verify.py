"""Read everything that a trace holds, once, and say what of it is damaged and whose rows that costs.

:func:`verify_trace` never stops at damage: it yields a :class:`Finding` and goes on. It reads with ``pread``,
whatever the file system, because a bad sector under a mapping is a signal and not an error, and it holds a few
MiB of a shard file at a time.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import TYPE_CHECKING

from tracefile.errors import (
    FormatVersionError,
    NotATraceError,
    TraceError,
    TraceNotFoundError,
)
from tracefile.findings import Finding, Tally
from tracefile.format import (
    METADATA_NAME,
    SEGMENTS_NAME,
    segment_path,
)
from tracefile.store import absolute_path, read_trace_header, store_for
from tracefile.survey import (
    Holding,
    absence,
    listed_segments,
    raise_unanswered,
    recovered_header,
    take_survey,
)
from tracefile.verify_segment import SegmentCheck, sample_rows, zarr_refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tracefile.metadata import TraceHeader
    from tracefile.survey import Survey

#: Segments that are read at a time where that takes round trips; each holds a few MiB.
_SEGMENTS_AT_ONCE = 8


def verify_trace(
    path: str | os.PathLike[str],
    *,
    tally: Tally | None = None,
    on_progress: Callable[[Tally], None] | None = None,
) -> Iterator[Finding]:
    """Check everything in a trace: documents, shard files, every chunk, every captured id.

    Parameters
    ----------
    path : str or path-like
    tally : Tally, optional
        Counts what is read.
    on_progress : callable, optional
        Called with the tally after each read, one call at a time, from any thread.

    Yields
    ------
    Finding
        In the order of the segments; none for a sound trace.

    Raises
    ------
    TraceNotFoundError, NotATraceError, FormatVersionError
        Before anything was yielded: there is no trace that could be verified.
    StoreError
        The store does not answer; what was not looked at yet may be sound or not.

    Examples
    --------
    >>> import numpy as np, tempfile, tracefile
    >>> path = tempfile.mkdtemp() + "/step_1.trace"
    >>> with tracefile.TraceWriter(path, num_layers=2, top_k=2, num_experts=8) as writer:
    ...     _ = writer.append("a", np.zeros((3, 2, 2), int))
    >>> list(verify_trace(path))
    []
    """
    path = absolute_path(path)
    tally = Tally() if tally is None else tally
    header, finding = _root(path)
    if finding is not None:
        yield finding
    else:
        yield from _group_finding(path)
    if header is None:
        for segment in listed_segments(path):
            where = os.path.join(segment_path(path, segment), METADATA_NAME)
            message = f"{where} is damaged too; restore the file. Which samples the segment lists is not known"
            yield Finding("segment-metadata", message, where, segment)
        return
    try:
        survey = take_survey(path, header)
    except (TraceError, OSError) as error:
        raise_unanswered(error)
        yield Finding("trace-metadata", str(error), os.path.join(path, SEGMENTS_NAME))
        return
    yield from _group_finding(os.path.join(path, SEGMENTS_NAME))
    held = survey.holdings()
    samples = survey.samples()
    tally.segments = len(survey.segments) + len(survey.damaged)
    tally.samples, tally.rows = len(samples), sum(revision.entry.rows for revision in samples.values())
    tally.total_chunks = sum(layers * rows for layers, rows in (each.grid for each in survey.segments.values()))
    yield from _segment_findings(survey, held, tally, on_progress)
    for segment in survey.absent():
        where, message = segment_path(path, segment), absence(survey, segment)
        yield Finding(
            "segment-absent", message, where, segment, None, header.config.layer_ids, sample_rows(held[segment])
        )
    tally.vanished += len(survey.vanished)


def _segment_findings(
    survey: Survey,
    held: Mapping[str, list[Holding]],
    tally: Tally,
    on_progress: Callable[[Tally], None] | None,
) -> Iterator[Finding]:
    """What is wrong with each segment; where reading takes round trips, several are read at a time."""
    counting, stopping = threading.Lock(), threading.Event()

    def on_read(chunks: int, nbytes: int) -> None:
        if stopping.is_set():
            raise CancelledError
        with counting:
            tally.chunks += chunks
            tally.bytes_read += nbytes
            if on_progress is not None:
                on_progress(tally)

    def check(segment: str) -> Iterator[Finding]:
        holdings = held.get(segment, [])
        if segment in survey.damaged:
            yield _damaged_document(survey, segment, holdings)
            return
        checked = SegmentCheck(survey, survey.segments[segment], holdings, on_read)
        yield from checked.findings()
        if checked.vanished:
            survey.vanished.append(segment)

    def check_whole(segment: str) -> list[Finding]:
        return list(check(segment))

    segments = sorted({*survey.segments, *survey.damaged})
    if not store_for(survey.path).round_trips:
        for segment in segments:
            yield from check(segment)
        return
    waiting = iter(segments)
    threads = ThreadPoolExecutor(_SEGMENTS_AT_ONCE, thread_name_prefix="tracefile-verify")
    try:
        # No more than are being read: the findings of a trace that is damaged all over are many.
        under_way = deque(
            threads.submit(check_whole, segment) for segment in itertools.islice(waiting, _SEGMENTS_AT_ONCE)
        )
        while under_way:
            yield from under_way.popleft().result()
            under_way.extend(threads.submit(check_whole, segment) for segment in itertools.islice(waiting, 1))
    finally:
        stopping.set()
        threads.shutdown(cancel_futures=True)


def _group_finding(path: str) -> Iterator[Finding]:
    if refusal := zarr_refusal("group", path):
        where = os.path.join(path, METADATA_NAME)
        yield Finding("zarr-metadata", f"{where}: zarr refuses this group ({refusal}); restore the file", where)


def _root(path: str) -> tuple[TraceHeader | None, Finding | None]:
    """The root document; where it is damaged, what the segments' documents say it was."""
    where = os.path.join(path, METADATA_NAME)
    try:
        return read_trace_header(path), None
    except (TraceNotFoundError, FormatVersionError):
        raise
    except (TraceError, OSError) as error:
        raise_unanswered(error)
        segments = listed_segments(path)
        if isinstance(error, NotATraceError) and not segments:
            raise
        header = recovered_header(path, segments)
        if header is not None:
            rest = "the segments were checked against each other, and layers are named by position"
        else:
            rest = "no data could be checked"
        damage = f"{where} is missing or holds something else; restore the file"
        what = damage if isinstance(error, NotATraceError) else str(error)
        return header, Finding("trace-metadata", f"{what}. Meanwhile {rest}", where)


def _damaged_document(survey: Survey, segment: str, holdings: list[Holding]) -> Finding:
    error = survey.damaged[segment]
    where = error.path or os.path.join(segment_path(survey.path, segment), METADATA_NAME)
    message = f"{error.message}. Which samples the segment lists is not known"
    return Finding(
        "segment-metadata", message, where, segment, None, survey.header.config.layer_ids, sample_rows(holdings)
    )
