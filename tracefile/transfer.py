"""Copy a trace from one store to another, segment by segment, with every chunk verified on the way.

A published trace carries no paths, so that the copy is the same bytes under the same names. What is there already is
left alone: a copy that was stopped goes on, and a second one brings what was committed since.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tracefile.errors import (
    DamagedTraceError,
    OptionError,
    PublishError,
    SegmentMissingError,
    ShardDamagedError,
    StoreError,
    TraceError,
    TraceMismatchError,
    TraceNotFoundError,
)
from tracefile.format import METADATA_NAME, SEGMENTS_NAME, SHARD_NAME, new_segment_id, segment_path
from tracefile.local_store import write_file
from tracefile.publish import building, refusals
from tracefile.segments import OpenSegment
from tracefile.shard_copy import copy_shard
from tracefile.store import absolute_path, list_segments, read_trace_header, store_for
from tracefile.survey import Range, take_survey, union

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tracefile.metadata import SegmentHeader
    from tracefile.survey import Survey


@dataclass(frozen=True, slots=True)
class LostRows:
    """Rows ``[start, stop)`` of a sample's newest revision that cannot be read, of some layers or all."""

    sample: str
    start: int
    stop: int


@dataclass(slots=True)
class CopyReport:
    """What :func:`copy_trace` did.

    Attributes
    ----------
    source, target : str
    segments, bytes : int
        That were copied; bytes of shard files.
    present : int
        Segments that were there already.
    damaged : dict of str to list of str
        What is wrong with segments of the source.
    lost : list of LostRows
        Whose rows that costs.
    held_back : list of str
        Segments that were not copied because of damage.
    """

    source: str
    target: str
    segments: int = 0
    bytes: int = 0
    present: int = 0
    damaged: dict[str, list[str]] = field(default_factory=dict)
    lost: list[LostRows] = field(default_factory=list)
    held_back: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


def copy_trace(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    verify: bool = True,
    skip_damaged: bool = False,
    durable: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> CopyReport:
    """Copy a trace, or what a copy of it lacks, to another path, of any store.

    The source may be written to, and compacted, meanwhile: what is there when it is looked at is copied. Segments
    become visible in the order of their making, but for those whose rows others refer to, which come before.

    Parameters
    ----------
    source, target : str or path-like
    verify : bool
        Check the checksum of every chunk on the way.
    skip_damaged : bool
        What to do about damage in the source. By default, the copy ends before the first damaged segment, whatever
        else is damaged is found, and the report lists it. Otherwise damaged chunks are copied as they are, so that
        the copy fails where the source does, and is whole but for that.
    durable : bool
        Flush each segment to the disk before it becomes visible.
    on_progress : callable, optional
        Called with the bytes that were dealt with, and all of them.

    Returns
    -------
    CopyReport
        Nothing is lost and nothing is held back if its ``damaged`` is empty.

    Raises
    ------
    TraceMismatchError
        Another trace is at ``target``.
    MetadataDamagedError
        A document of the source is damaged: which samples it lists is not known, so nothing is copied.
    ShardDamagedError, MetadataDamagedError
        The target has a segment that is not what the source has.
    TraceNotFoundError, NotATraceError, FormatVersionError, OptionError, PublishError, StoreError

    Examples
    --------
    >>> import numpy as np, tempfile, tracefile
    >>> path = tempfile.mkdtemp() + "/step_1.trace"
    >>> with tracefile.TraceWriter(path, num_layers=2, top_k=2, num_experts=8) as writer:
    ...     _ = writer.append("a", np.full((9, 2, 2), 5))
    >>> copy_trace(path, path + "-copy").segments, copy_trace(path, path + "-copy").present
    (1, 1)
    >>> tracefile.open(path + "-copy")["a"][8, 0].tolist()
    [5, 5]
    """
    source, target = absolute_path(source), absolute_path(target)
    if source == target:
        raise OptionError(f"{source} cannot be copied to itself")
    return _Copy(source, target, verify, skip_damaged, durable, on_progress).run()


class _Vanished(Exception):
    """A segment of the source was deleted while it was read."""


class _Copy:
    """One copy of one trace."""

    def __init__(
        self,
        source: str,
        target: str,
        verify: bool,
        skip_damaged: bool,
        durable: bool,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self.source, self.target = source, target
        self.verify = verify
        self.skip_damaged = skip_damaged
        self.durable = durable
        self.on_progress = on_progress
        self.done = self.total = 0
        self.report = CopyReport(source, target)
        self.header = read_trace_header(source)
        self.seen: set[str] = set()

    def run(self) -> CopyReport:
        self._create()
        there = set(list_segments(self.target))
        while True:
            survey = take_survey(self.source, self.header)
            for error in survey.damaged.values():
                raise error
            self._note_absent(survey)
            segments = [each for each in _in_order(survey) if each.id not in self.seen]
            self.total += sum(header.shard_bytes for header in segments)
            vanished = bool(survey.vanished)
            try:
                for header in segments:
                    try:
                        self._deal_with(survey, header, header.id in there)
                    except _Vanished:
                        vanished = True
                    self.seen.add(header.id)
            finally:
                store_for(self.target).leave(self.target)
            if not vanished:
                return self.report
            # What replaces it is there by now, or its samples were deleted.

    def _create(self) -> None:
        """Make the target a trace, the same one."""
        try:
            theirs = read_trace_header(self.target)
        except TraceError as error:
            if not isinstance(error, TraceNotFoundError) and not store_for(self.target).is_vacant(self.target):
                raise
            names = METADATA_NAME, f"{SEGMENTS_NAME}/{METADATA_NAME}"
            files = {name: store_for(self.source).read(os.path.join(self.source, name)) for name in names}
            with refusals(self.target):
                store_for(self.target).create(self.target, files, durable=self.durable)
            theirs = read_trace_header(self.target)
        if theirs != self.header:
            raise TraceMismatchError(
                f"{self.target} is another trace ({theirs.uuid}) than {self.source} ({self.header.uuid}); copy to"
                " another path",
                path=self.target,
                ours=self.header.uuid,
                theirs=theirs.uuid,
            )

    def _note_absent(self, survey: Survey) -> None:
        for segment in survey.absent():
            if segment not in self.report.damaged:
                where = segment_path(self.source, segment)
                self._damage(survey, segment, [f"{where} is gone, and samples of other segments have rows in it"], None)

    def _damage(self, survey: Survey, segment: str, messages: list[str], chunks: list[Range] | None) -> None:
        """Note what is wrong with a segment, and whose rows lie in these ranges of its rows, or in all of it."""
        self.report.damaged[segment] = messages
        for holding in survey.holdings().get(segment, ()):
            if holding.superseded:
                continue
            for start, stop in [(0, holding.stop)] if chunks is None else union(chunks):
                low, high = max(start, holding.start), min(stop, holding.stop)
                if low < high:
                    shift = holding.first - holding.start
                    self.report.lost.append(LostRows(holding.sample, low + shift, high + shift))

    def _deal_with(self, survey: Survey, header: SegmentHeader, there: bool) -> None:
        began = self.done
        if there:
            self._check_present(header)
            self.report.present += 1
        elif self.report.damaged and not self.skip_damaged:
            # Publishing what is newer would have the older revisions of the samples that are missing pass for them.
            self.report.held_back.append(header.id)
            if self.verify and header.rows:
                self._read_all(survey, header, None)
        else:
            self._copy(survey, header)
        self.done = began + header.shard_bytes
        self._progressed(0)

    def _document(self, trace: str, segment: str) -> bytes:
        return store_for(trace).read(os.path.join(segment_path(trace, segment), METADATA_NAME))

    def _read_document(self, segment: str) -> bytes:
        try:
            return self._document(self.source, segment)
        except (FileNotFoundError, NotADirectoryError):
            raise _Vanished from None

    def _check_present(self, header: SegmentHeader) -> None:
        """See whether a segment of the target is what the source has, by its document and its size."""
        directory = segment_path(self.target, header.id)
        remedy = "remove the segment's directory there, and copy again"
        if self._document(self.target, header.id) != self._read_document(header.id):
            where = os.path.join(directory, METADATA_NAME)
            raise ShardDamagedError(f"{where} is not that of the source; {remedy}", path=where, segment=header.id)
        if header.rows:
            where = os.path.join(directory, SHARD_NAME)
            try:
                size = store_for(self.target).size(where)
            except FileNotFoundError:
                size = -1
            if size != header.shard_bytes and not (size < 0 and self.skip_damaged and self._is_unreadable(header)):
                what = "is not there" if size < 0 else f"has {size} bytes, and the source's {header.shard_bytes}"
                raise ShardDamagedError(f"{where} {what}; {remedy}", path=where, segment=header.id)

    def _is_unreadable(self, header: SegmentHeader) -> bool:
        """Whether the source's shard file is one that is not copied."""
        try:
            OpenSegment(self.source, self.header, header.id, "pread")
        except DamagedTraceError:
            return True
        return False

    def _copy(self, survey: Survey, header: SegmentHeader) -> None:
        store, document = store_for(self.target), self._read_document(header.id)
        # Not under its own name: another copy may be at it, or was killed.
        with building(self.target, new_segment_id()) as build:
            sound = not header.rows or self._read_all(survey, header, os.path.join(build, SHARD_NAME))
            if not sound and not self.skip_damaged:
                store.discard(build)
                self.report.held_back.append(header.id)
                return
            write_file(os.path.join(build, METADATA_NAME), document, self.durable)
            if store.publish(self.target, header.id, build, durable=self.durable) is not None:
                store.delete(self.target, header.id)
                raise OptionError(
                    f"{self.target}: segments there live as long as somebody refers to them; have the trace kept before"
                    " it is copied to"
                )
            store.discard(build)  # another copy was faster
        self.report.segments += 1
        self.report.bytes += header.shard_bytes if header.rows else 0

    def _read_all(self, survey: Survey, header: SegmentHeader, to: str | None) -> bool:
        """Read a shard file, verify it, and write it, if it can be read at all; whether it is sound."""
        try:
            opened = OpenSegment(self.source, self.header, header.id, "pread")
            damaged = copy_shard(
                opened,
                to,
                trace=self.target,
                verify=self.verify,
                durable=self.durable,
                on_read=self._progressed,
            )
        except (StoreError, PublishError):
            raise
        except (DamagedTraceError, OSError) as error:
            if isinstance(error, SegmentMissingError) and store_for(self.source).is_gone(self.source, header.id):
                raise _Vanished from None
            if to is not None and os.path.exists(to):
                os.unlink(to)
            self._damage(survey, header.id, [str(error)], None)
            return False
        if damaged:
            size = header.geometry.rows_per_chunk
            chunks = [each.number % opened.row_chunks for each in damaged]
            rows = [(chunk * size, (chunk + 1) * size) for chunk in chunks]
            self._damage(survey, header.id, [each.message for each in damaged], rows)
        return not damaged

    def _progressed(self, nbytes: int) -> None:
        self.done += nbytes
        if self.on_progress is not None:
            self.on_progress(min(self.done, self.total), self.total)


def _in_order(survey: Survey) -> list[SegmentHeader]:
    """The segments by id, but each after those that its samples have rows in."""
    ordered: dict[str, SegmentHeader] = {}
    begun: set[str] = set()

    def needs(segment: str) -> tuple[str, Iterator[str]]:
        begun.add(segment)
        entries = survey.segments[segment].samples.values()
        return segment, iter(sorted({span.segment for entry in entries for span in survey.spans_of(entry)}))

    for first in survey.segments:
        path = [] if first in begun else [needs(first)]  # by hand: references may be deep
        while path:
            segment, needed = path[-1]
            # Compaction makes circles; there is no order in these.
            following = next((each for each in needed if each in survey.segments and each not in begun), None)
            if following is not None:
                path.append(needs(following))
            else:
                ordered[segment] = survey.segments[segment]
                path.pop()
    return list(ordered.values())
