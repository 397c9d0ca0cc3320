"""Merge many small segments of a trace into few. Encoded chunks are copied as they are, and checked on the way.

A merged segment is published before those that it replaces are deleted. Its document lists their samples, each as of
the segment that it was committed with, and says where their rows lie now, so that a trace with both reads right,
handles that were made before stay good, and a run that was killed loses nothing: the next one goes on. Writers,
readers and other runs need not be told: what two runs merged at the same time is there twice until a later run.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tracefile import documents
from tracefile._version import __version__
from tracefile.chunks import sound_chunks
from tracefile.compact_plan import plan_merges
from tracefile.encode import EncodedChunk
from tracefile.errors import DamagedTraceError, OptionError, SegmentMissingError, StoreError, TraceError
from tracefile.format import METADATA_NAME, SHARD_NAME, new_segment_id, segment_path
from tracefile.local_store import write_file
from tracefile.merge import Block, SameRows, deletions, merged_header
from tracefile.metadata import SegmentHeader, Span
from tracefile.moved import Relocations
from tracefile.segments import OpenSegment
from tracefile.shard import CRC_BYTES
from tracefile.shard_file import ShardFile
from tracefile.source import is_shared
from tracefile.store import (
    absolute_path,
    list_segments,
    publish_error,
    read_segment_header,
    read_segment_headers,
    read_trace_header,
    store_for,
)
from tracefile.survey import Survey, take_survey, union

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

TARGET_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a trace is on disk: segments, files, bytes of its shard files."""

    segments: int
    files: int
    bytes: int

    @classmethod
    def of(cls, headers: Iterable[SegmentHeader]) -> Footprint:
        headers = list(headers)
        files = 2 + sum(2 if header.rows else 1 for header in headers)
        return cls(len(headers), files, sum(header.shard_bytes for header in headers))


@dataclass(frozen=True, slots=True)
class Merge:
    """A segment that took the place of others; ``segment`` is empty where it was only planned."""

    segment: str
    replaced: tuple[str, ...]
    bytes: int


@dataclass(slots=True)
class CompactReport:
    """What :func:`compact_trace` did.

    Attributes
    ----------
    path : str
    before, after : Footprint
        ``after`` is what the plan comes to, for a dry run.
    merged : list of Merge
    finished : list of str
        Segments that an earlier run had replaced and not deleted, and this one did.
    refused : dict of str to str
        Segments that were left as they are because they are damaged, and what is wrong with them.
    changed : list of str
        Segments that were left as they are because others replaced or deleted some of them meanwhile.
    """

    path: str
    before: Footprint
    after: Footprint
    merged: list[Merge] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


def compact_trace(
    path: str | os.PathLike[str],
    *,
    target_bytes: int = TARGET_BYTES,
    min_segments: int = 4,
    min_age: float = 60.0,
    settle: float | None = None,
    drop_unreachable: bool = False,
    durable: bool = True,
    dry_run: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> CompactReport:
    """Merge the small segments of a trace into few, while others read it and write to it.

    Samples, and handles of them made before, stay what they are: also handles of older revisions, unless
    ``drop_unreachable``. Segments are merged with those of the same codec and chunk geometry. A damaged segment is
    left as it is.

    Parameters
    ----------
    path : str or path-like
    target_bytes : int
        How large merged segments become. Segments of more than half of that are not small.
    min_segments : int
        Merge only where at least so many become one.
    min_age : float
        Leave segments alone that were committed within so many seconds.
    settle : float, optional
        How many seconds after a merged segment was published those that it replaces are deleted, so that who lists
        the trace at that moment sees one or the other. Default 1, and 60 on network file systems, whose clients see
        late what others do.
    drop_unreachable : bool
        Leave out rows that no newest revision of a sample has. Reading them through older handles raises
        :class:`~tracefile.errors.SegmentMissingError` then, and so does reading a sample that somebody writes, at
        the same time, from an older revision's rows.
    durable : bool
        Flush merged segments to the disk before the others are deleted.
    dry_run : bool
        Only say what would be done.
    on_progress : callable, optional
        Called with the bytes that were dealt with, and all of them.

    Returns
    -------
    CompactReport

    Raises
    ------
    TraceNotFoundError, NotATraceError, FormatVersionError, OptionError
    PublishError
        The store refused. Nothing was deleted that is not replaced.
    MetadataDamagedError
        With ``drop_unreachable``: a document is damaged, so what is reachable is not known.

    Examples
    --------
    >>> import numpy as np, tempfile, tracefile
    >>> path = tempfile.mkdtemp() + "/step_1.trace"
    >>> with tracefile.TraceWriter(path, num_layers=2, top_k=2, num_experts=8) as writer:
    ...     handles = [writer.append(f"{n}", np.full((9, 2, 2), n)) for n in range(8)]
    >>> report = compact_trace(path, min_age=0, settle=0)
    >>> report.before.segments, report.after.segments, handles[5][0, 0].tolist()
    (8, 1, [5, 5])
    """
    if target_bytes < 1 or min_segments < 2 or min_age < 0 or (settle is not None and settle < 0):
        raise OptionError(
            f"target_bytes must be positive, min_segments at least 2, min_age and settle no less than 0; not"
            f" {target_bytes}, {min_segments}, {min_age}, {settle}"
        )
    path = absolute_path(path)
    if settle is None:
        directory = store_for(path).watched_directory(path)
        settle = 60.0 if directory is not None and is_shared(directory) else 1.0
    run = _Compaction(path, target_bytes, min_segments, min_age, settle, drop_unreachable, durable, on_progress)
    return run.plan_only() if dry_run else run.run()


class _Changed(Exception):
    """Somebody else replaced or deleted a segment that was to be merged, or wants rows that were to be dropped."""


class _Refused(Exception):
    """A segment is damaged."""

    def __init__(self, segment: str, message: str) -> None:
        super().__init__(segment, message)
        self.segment = segment
        self.message = message


class _Compaction:
    """One run over one trace."""

    def __init__(
        self,
        path: str,
        target_bytes: int,
        min_segments: int,
        min_age: float,
        settle: float,
        drop: bool,
        durable: bool,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self.path = path
        self.header = read_trace_header(path)
        self.store = store_for(path)
        self.target_bytes = target_bytes
        self.min_segments = min_segments
        self.min_age = min_age
        self.settle = settle
        self.drop = drop
        self.durable = durable
        self.on_progress = on_progress
        self.done = self.total = 0
        self.survey = take_survey(path, self.header)
        if drop and self.survey.damaged:
            raise next(iter(self.survey.damaged.values()))
        before = Footprint.of(self.survey.segments.values())
        self.report = CompactReport(path, before, before)
        self.published: list[SegmentHeader] = []
        # What others published since the survey.
        self.seen_since: set[str] = set()
        self.replaced_since: set[str] = set()
        self.wanted_since: set[Span] = set()
        #: What is to be deleted, and when.
        self.due: deque[tuple[float, tuple[str, ...]]] = deque()
        self.report.finished = self._set_replaced_aside()
        self.deleted = deletions(self.survey.segments.values())
        self.kept = self._kept_chunks() if drop else None
        self.newest = {
            sample: self.survey.segments[revision.listed_in].origin_of(revision.entry)
            for sample, revision in (self.survey.samples() if drop else {}).items()
        }

    def _set_replaced_aside(self) -> list[str]:
        """Take those out of the survey that an earlier run has replaced and not deleted, or another run will delete."""
        segments = self.survey.segments
        replaced = {old for header in segments.values() for old in header.replaces if old in segments}
        sound: set[str] = set()
        for header in segments.values():
            if not replaced.isdisjoint(header.replaces):
                try:
                    self._check_published(header)
                except (TraceError, OSError):
                    continue  # the others are all that there is
                sound.update(header.replaces)
        replaced &= sound
        if replaced:
            # Rows that were dropped may be wanted since, by who found them in the original.
            relocations = self.survey.relocations
            held = self.survey.holdings()
            replaced = {
                old
                for old in replaced
                if not any(
                    piece.segment == old
                    for holding in held.get(old, ())
                    if not holding.superseded
                    for piece in relocations.resolve(Span(old, holding.start, holding.stop))
                )
            }
        self.survey = Survey(
            self.path, self.header, {k: v for k, v in segments.items() if k not in replaced}, self.survey.damaged
        )
        return sorted(replaced)

    def _kept_chunks(self) -> dict[str, list[int]]:
        """The chunks along rows of each segment that some newest revision has rows in."""
        kept: dict[str, list[int]] = {segment: [] for segment in self.survey.segments}
        for segment, holdings in self.survey.holdings().items():
            header = self.survey.segments.get(segment)
            if header is None:
                continue
            size = header.geometry.rows_per_chunk
            reached = union(
                (holding.start // size, -(-holding.stop // size))
                for holding in holdings
                if not holding.superseded and holding.start < holding.stop
            )
            kept[segment] = [chunk for first, last in reached for chunk in range(first, min(last, header.grid[1]))]
        return kept

    def _chunks_of(self, header: SegmentHeader) -> Sequence[int]:
        return range(header.grid[1]) if self.kept is None else self.kept[header.id]

    def _plan(self) -> list[list[SegmentHeader]]:
        now, ours = time.time(), new_segment_id()
        old = [
            header
            for header in self.survey.segments.values()
            if now - header.writer.get("compacted", header.writer.get("created", 0.0)) >= self.min_age
            and header.id < ours  # else a host with a clock that is ahead has made it: its turn will come
        ]
        sizes = {
            header.id: header.shard_bytes * len(self._chunks_of(header)) // max(1, header.grid[1]) for header in old
        }
        return plan_merges(old, sizes, target_bytes=self.target_bytes, min_segments=self.min_segments)

    def plan_only(self) -> CompactReport:
        groups = self._plan()
        report = self.report
        report.merged = [
            Merge("", tuple(header.id for header in group), sum(header.shard_bytes for header in group))
            for group in groups
        ]
        left = dict(self.survey.segments)
        for group in groups:
            for header in group:
                del left[header.id]
        rest = Footprint.of(left.values())
        report.after = Footprint(
            rest.segments + len(groups),
            rest.files + sum(2 if any(header.rows for header in group) else 1 for group in groups),
            rest.bytes + sum(merge.bytes for merge in report.merged),
        )
        return report

    def run(self) -> CompactReport:
        report = self.report
        if report.finished:
            self.due.append((time.monotonic() + self.settle, tuple(report.finished)))
        groups = self._plan()
        self.total = sum(header.shard_bytes for group in groups for header in group)
        if groups and self.store.handle(self.path, groups[0][0].id) is not None:
            raise OptionError(
                f"{self.path}: its segments live as long as somebody refers to them; have the trace kept before it is"
                " compacted"
            )
        try:
            for group in groups:
                self._merge_sound(group)
                self._delete_due()
            while self.due:
                time.sleep(max(0.0, self.due[0][0] - time.monotonic()))
                self._delete_due()
        finally:
            self.store.leave(self.path)
        now = read_segment_headers(self.path, self.header, list_segments(self.path))
        report.after = Footprint.of(header for header in now.values() if isinstance(header, SegmentHeader))
        return report

    def _merge_sound(self, group: Sequence[SegmentHeader]) -> None:
        """Merge those of a group that are sound, and leave the others."""
        group = list(group)
        began = self.done
        size = sum(header.shard_bytes for header in group)
        while len(group) >= min(2, self.min_segments) or (self.drop and group):
            try:
                merged = self._merge(group)
            except _Refused as refused:
                self.report.refused[refused.segment] = refused.message
                group = [header for header in group if header.id != refused.segment]
                self.done = began
                continue
            except _Changed:
                self.report.changed += [header.id for header in group]
                break
            replaced = tuple(header.id for header in group)
            self.report.merged.append(Merge(merged.id, replaced, merged.shard_bytes))
            self.published.append(merged)
            self.due.append((time.monotonic() + self.settle, replaced))
            break
        self.done = began + size
        self._progressed(0)

    def _merge(self, group: Sequence[SegmentHeader]) -> SegmentHeader:
        """Publish the segment that takes the place of a group."""
        segment = new_segment_id()
        build = ""
        try:
            build = self.store.begin(self.path, segment)
            first = next((header for header in group if header.rows), group[0])
            with ShardFile(
                os.path.join(build, SHARD_NAME), segment, first.geometry, self.header.config.num_layers, self.durable
            ) as shard:
                same = SameRows()
                sources = [(header, list(self._copy(header, shard, same))) for header in group]
            merged = merged_header(
                segment,
                sources,
                rows=shard.rows,
                shard_bytes=shard.nbytes,
                known=[*self.survey.segments.values(), *self.published],
                is_listed=self._is_listed,
                writer=self._writer(group),
                replaces=[header.id for header in group],
            )
            document = documents.encode(documents.segment_document(merged))
            write_file(os.path.join(build, METADATA_NAME), document, self.durable)
            self._check_unchanged(sources)
            self.store.publish(self.path, segment, build, durable=self.durable)
        except BaseException as error:
            if build:
                self.store.discard(build)
            if isinstance(error, OSError) and not isinstance(error, TraceError):
                raise publish_error(self.path, error) from error
            raise
        self._check_published(merged)
        return merged

    def _copy(self, header: SegmentHeader, shard: ShardFile, same: SameRows) -> Iterator[Block]:
        """Copy a segment's chunks; where its rows lie then."""
        if not header.rows:
            return
        try:
            opened = OpenSegment(self.path, self.header, header.id, "pread")
        except StoreError:
            raise
        except SegmentMissingError:
            raise self._missing(header) from None
        except (DamagedTraceError, OSError) as error:
            raise _Refused(header.id, str(error)) from error
        size, names = header.geometry.rows_per_chunk, same.names(header)
        wanted = list(self._chunks_of(header))
        for known, numbers in itertools.groupby(wanted, key=lambda number: same.find(names[number])):
            if known is not None:
                for number in numbers:
                    first, rows = known
                    stop = min(number * size + rows, header.rows)
                    yield Block(number * size, stop, first, copied=False)
                continue
            for low, high in union((number, number + 1) for number in numbers):
                start, stop = low * size, min(high * size, header.rows)
                first = shard.write_rows(stop - start, self._encoded(header, opened, low, high))
                for number in range(low, high):
                    same.note(names[number], first + (number - low) * size, min(size, stop - number * size))
                yield Block(start, stop, first)

    def _encoded(self, header: SegmentHeader, opened: OpenSegment, low: int, high: int) -> Iterator[EncodedChunk]:
        layer_chunks, row_chunks = header.grid
        numbers = [layer * row_chunks + row for row in range(low, high) for layer in range(layer_chunks)]
        chunks = sound_chunks(opened, numbers)
        while True:
            try:
                number, encoded = next(chunks)
            except StopIteration:
                return
            except StoreError:
                raise
            except SegmentMissingError:
                raise self._missing(header) from None
            except (DamagedTraceError, OSError) as error:
                raise _Refused(header.id, str(error)) from error
            self._progressed(len(encoded))
            yield EncodedChunk(number // row_chunks, bytes(encoded[:-CRC_BYTES]), bytes(encoded[-CRC_BYTES:]))

    def _missing(self, header: SegmentHeader) -> Exception:
        if self.store.is_gone(self.path, header.id):
            return _Changed()
        return _Refused(header.id, f"{segment_path(self.path, header.id)} has no shard file; restore it")

    def _is_listed(self, sample: str, origin: str) -> bool:
        if origin <= self.deleted.get(sample, ""):
            return False
        return not self.drop or self.newest.get(sample) == origin

    def _writer(self, group: Sequence[SegmentHeader]) -> dict[str, Any]:
        created = [header.writer["created"] for header in group if "created" in header.writer]
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": __version__,
            **({"created": max(created)} if created else {}),
            "compacted": time.time_ns() // 1000 / 1e6,
        }

    def _check_unchanged(self, sources: Sequence[tuple[SegmentHeader, Sequence[Block]]]) -> None:
        """Look once more before publishing: most of the time has passed since the survey."""
        listed = set(list_segments(self.path))
        if any(header.id not in listed for header, _ in sources):
            raise _Changed
        self._see_news(listed)
        kept = {header.id: union((block.start, block.stop) for block in blocks) for header, blocks in sources}
        if not self.replaced_since.isdisjoint(kept):
            raise _Changed
        for span in self.wanted_since:
            ranges = kept.get(span.segment)
            if ranges is not None and not any(low <= span.start and span.stop <= high for low, high in ranges):
                raise _Changed

    def _see_news(self, listed: set[str]) -> None:
        """Read what others published since the survey."""
        seen = {*self.survey.segments, *self.survey.damaged, *self.report.finished, *self.seen_since}
        seen.update(header.id for header in self.published)
        ours = {*self.survey.segments, *self.report.finished}
        for segment, found in read_segment_headers(self.path, self.header, listed - seen).items():
            if isinstance(found, SegmentHeader):
                self.seen_since.add(segment)
                self.replaced_since.update(found.replaces)
                spans = (span for entry in found.samples.values() for span in entry.spans)
                self.wanted_since.update(span for span in spans if span.segment in ours)

    def _check_published(self, header: SegmentHeader) -> None:
        """See that what others are deleted for is there, as far as a look at it tells."""
        found = read_segment_header(self.path, self.header, header.id)
        where = os.path.join(segment_path(self.path, header.id), SHARD_NAME)
        if found.replaces != header.replaces or (header.rows and self.store.size(where) != header.shard_bytes):
            raise SegmentMissingError(f"{where} is not as it was published", path=where, segment=header.id)

    def _delete_due(self) -> None:
        while self.due and self.due[0][0] <= time.monotonic():
            _, segments = self.due.popleft()
            wanted = self._wanted_again() if self.drop else set()
            for segment in segments:
                if segment in wanted:
                    self.report.changed.append(segment)
                else:
                    self.store.delete(self.path, segment)

    def _wanted_again(self) -> set[str]:
        """Segments with rows that were dropped, and that somebody has found in the original and published since."""
        self._see_news(set(list_segments(self.path)))
        relocations = Relocations.of([*self.survey.segments.values(), *self.published])
        pieces = (piece for span in self.wanted_since for piece in relocations.resolve(span))
        return {piece.segment for piece in pieces}

    def _progressed(self, nbytes: int) -> None:
        self.done += nbytes
        if self.on_progress is not None:
            self.on_progress(min(self.done, self.total), self.total)
