"""Merge many small segments of a trace into few. Encoded chunks are copied as they are, and checked on the way.

A merged segment is published before those that it replaces are taken away. Its document lists their samples, each as
of the segment that it was committed with, and says where their rows lie now, so that a trace with both reads right,
handles that were made before stay good, and a run that was killed loses nothing: the next one goes on. Writers,
readers and other runs need not be told: what two runs merged at the same time is there twice until a later run. Rows
that are dropped are an exception to none of that: an original that has them is set aside first, and brought back if
somebody has named them meanwhile; see :mod:`tracefile.replaced`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tracefile.compact_plan import CompactReport, Footprint, Merge, plan_merges
from tracefile.errors import OptionError, TraceError
from tracefile.format import new_segment_id
from tracefile.merge import deletions
from tracefile.merge_writer import ChangedError, MergeWriter, RefusedError, check_published
from tracefile.metadata import SegmentHeader
from tracefile.reclaim import ReclaimingStore
from tracefile.replaced import Removal, still_needed, without_loss
from tracefile.source import is_shared
from tracefile.store import absolute_path, list_segments, read_segment_headers, read_trace_header, store_for
from tracefile.survey import Survey, take_survey, union

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from tracefile.merge_writer import Sources
    from tracefile.metadata import Span, TraceHeader

TARGET_BYTES = 256 * 1024 * 1024
#: Originals of which something was dropped go in about so many rounds: each takes a look at the whole trace, and the
#: longer it takes until they go, the more of it is there twice.
_ROUNDS = 16


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
        late what others do. Originals of which something was dropped are set aside then, and deleted after as long
        again; by default, after what the store takes to publish what may name them
        (:meth:`~tracefile.reclaim.ReclaimingStore.settle`).
    drop_unreachable : bool
        Leave out rows that no newest revision of a sample has. Reading them through older handles raises
        :class:`~tracefile.errors.SegmentMissingError` then. A writer that makes a sample of them at the same time
        either keeps them, and their segment stays, or its ``append`` raises that.
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
    TraceNotFoundError, NotATraceError, FormatVersionError
    OptionError
        Also for ``drop_unreachable`` in a store from which segments cannot be taken in two steps
        (:class:`~tracefile.reclaim.ReclaimingStore`): what a writer names at that moment would be lost.
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
    header, store = read_trace_header(path), store_for(path)
    aside = 0.0
    if isinstance(store, ReclaimingStore):
        aside = store.settle(path) if settle is None else settle
        if drop_unreachable:
            store.set_aside(path, new_segment_id())  # there is none: it only says whether it can do that
        if not dry_run:
            store.bring_back_all(path, sorted(store.aside(path)))  # a run was killed
    elif drop_unreachable:
        raise OptionError(
            f"{path}: rows cannot be dropped from a {type(store).__name__} while others may write to it; compact it"
            " without drop_unreachable, or copy the trace to a directory first"
        )
    if settle is None:
        directory = store.watched_directory(path)
        settle = 60.0 if directory is not None and is_shared(directory) else 1.0
    removal = Removal(path, header, settle=settle, settle_aside=aside)
    run = _Compaction(
        path, header, removal, target_bytes, min_segments, min_age, drop_unreachable, durable, on_progress
    )
    return run.plan_only() if dry_run else run.run()


class _Compaction:
    """One run over one trace."""

    def __init__(
        self,
        path: str,
        header: TraceHeader,
        removal: Removal,
        target_bytes: int,
        min_segments: int,
        min_age: float,
        drop: bool,
        durable: bool,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self.path = path
        self.header = header
        self.store = store_for(path)
        self.target_bytes = target_bytes
        self.min_segments = min_segments
        self.min_age = min_age
        self.drop = drop
        self.on_progress = on_progress
        self.done = self.total = 0
        self.survey = take_survey(path, header)
        if drop and self.survey.damaged:
            raise next(iter(self.survey.damaged.values()))
        before = Footprint.of(self.survey.segments.values())
        self.report = CompactReport(path, before, before)
        self.published: list[SegmentHeader] = []
        # What others published since the survey.
        self.seen_since: set[str] = set()
        self.replaced_since: set[str] = set()
        self.wanted_since: set[Span] = set()
        self.deleted = deletions(self.survey.segments.values())
        self.removal = removal
        self._take_replaced_out()
        self.kept = self._kept_chunks() if drop else None
        self.newest = {
            sample: self.survey.segments[revision.listed_in].origin_of(revision.entry)
            for sample, revision in (self.survey.samples() if drop else {}).items()
        }
        self.writer = MergeWriter(
            path,
            header,
            durable=durable,
            chunks_of=self._chunks_of,
            is_listed=self._is_listed,
            on_copied=self._progressed,
        )

    def _take_replaced_out(self) -> None:
        """Take those out of the survey that an earlier run has replaced and not deleted, or another run will delete."""
        segments = self.survey.segments
        going: dict[str, SegmentHeader] = {}
        whole: set[str] = set()
        for header in segments.values():
            replaced = [segments[old] for old in header.replaces if old in segments]
            if replaced:
                try:
                    check_published(self.path, self.header, header)
                except (TraceError, OSError):
                    continue  # the others are all that there is
                going.update((each.id, each) for each in replaced)
                whole |= without_loss(header, replaced, self.deleted)
        # What was dropped may be wanted since, by who found it in the original.
        stay = still_needed(segments, going) if going else set()
        if self.survey.damaged or not isinstance(self.store, ReclaimingStore):
            stay |= going.keys() - whole
        going = {old: header for old, header in going.items() if old not in stay}
        self.removal.add(going.values(), whole)
        self.report.finished = sorted(going)
        left = {segment: header for segment, header in segments.items() if segment not in going}
        self.survey = Survey(self.path, self.header, left, self.survey.damaged)

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
                self.removal.advance(at_least=1 + report.before.segments // _ROUNDS)
            self.removal.advance()
        finally:
            self.removal.bring_back()
            self.store.leave(self.path)
        kept = self.removal.kept
        report.changed += kept
        report.finished = [segment for segment in report.finished if segment not in kept]
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
                merged = self.writer.write(
                    group, [*self.survey.segments.values(), *self.published], self._check_unchanged
                )
            except RefusedError as refused:
                self.report.refused[refused.segment] = refused.message
                group = [header for header in group if header.id != refused.segment]
                self.done = began
                continue
            except ChangedError:
                self.report.changed += [header.id for header in group]
                break
            replaced = tuple(header.id for header in group)
            self.report.merged.append(Merge(merged.id, replaced, merged.shard_bytes))
            self.published.append(merged)
            self.removal.add(group, without_loss(merged, group, self.deleted))
            break
        self.done = began + size
        self._progressed(0)

    def _is_listed(self, sample: str, origin: str) -> bool:
        if origin <= self.deleted.get(sample, ""):
            return False
        return not self.drop or self.newest.get(sample) == origin

    def _check_unchanged(self, sources: Sources) -> None:
        """Look once more before publishing: most of the time has passed since the survey."""
        listed = set(list_segments(self.path))
        if any(header.id not in listed for header, _ in sources):
            raise ChangedError
        self._see_news(listed)
        kept = {header.id: union((block.start, block.stop) for block in blocks) for header, blocks in sources}
        if not self.replaced_since.isdisjoint(kept):
            raise ChangedError
        for span in self.wanted_since:
            ranges = kept.get(span.segment)
            if ranges is not None and not any(low <= span.start and span.stop <= high for low, high in ranges):
                raise ChangedError

    def _see_news(self, listed: set[str]) -> None:
        """Read what others published since the survey."""
        seen = {*self.survey.segments, *self.survey.damaged, *self.report.finished, *self.seen_since}
        seen.update(header.id for header in self.published)
        for segment, found in read_segment_headers(self.path, self.header, listed - seen).items():
            if isinstance(found, SegmentHeader):
                self.seen_since.add(segment)
                self.replaced_since.update(found.replaces)
                spans = (span for entry in found.samples.values() for span in entry.spans)
                pieces = (piece for span in spans for piece in self.survey.relocations.resolve(span))
                self.wanted_since.update(piece for piece in pieces if piece.segment in self.survey.segments)

    def _progressed(self, nbytes: int) -> None:
        self.done += nbytes
        if self.on_progress is not None:
            self.on_progress(min(self.done, self.total), self.total)
