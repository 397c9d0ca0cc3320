"""What of a trace is visible: its segments as of the last look, and which revision of each sample counts by them."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from tracefile.errors import SegmentMissingError
from tracefile.format import is_segment_id
from tracefile.metadata import WeightRange
from tracefile.moved import Relocations
from tracefile.revisions import Newest
from tracefile.source import is_shared
from tracefile.store import list_segments, read_segment_header, read_segment_headers, store_for

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracefile.metadata import SampleEntry, SegmentHeader, TraceHeader

#: For how many seconds a segment may be damaged before a follower says so: a network file system can show a rename
#: before it shows what was renamed, and what is being deleted goes file by file.
_DAMAGE_GRACE_SECONDS = 1.0

_taking_in = threading.Lock()


def _after_fork() -> None:
    global _taking_in
    _taking_in = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class VisibleSegments:
    """The segments of a trace that were visible when somebody looked. Safe for threads.

    Parameters
    ----------
    path : str
    header : TraceHeader

    Attributes
    ----------
    segments : dict of str to SegmentHeader
        In the order of their ids, which is that of their making.
    arrived : list of SegmentHeader
        In the order in which they were seen, for followers.
    newest : Newest
    damaged_since : dict of str to float
        Segments that could not be read at the last look, and since when.
    """

    def __init__(self, path: str, header: TraceHeader) -> None:
        self._path = path
        self._header = header
        self.segments: dict[str, SegmentHeader] = {}
        self.arrived: list[SegmentHeader] = []
        self.newest = Newest()
        self.damaged_since: dict[str, float] = {}
        self._relocations: Relocations | None = None  # of the segments; made when one is missing

    def refresh(self) -> list[str]:
        """Take in what is visible now; a damaged segment is an error, and nothing is taken in then.

        Returns
        -------
        list of str
            Ids of the samples that are new or have a newer revision.

        Raises
        ------
        MetadataDamagedError, FormatVersionError, SegmentMissingError
        """
        began = time.monotonic()
        while True:
            # All of them are read before any is taken in: a damaged one must not make the others pass for seen.
            new, damaged = self._read_new(list_segments(self._path))
            if not damaged:
                return self._take_in(new)
            if time.monotonic() - began >= _DAMAGE_GRACE_SECONDS or not self._on_shared_file_system():
                raise next(iter(damaged.values()))
            time.sleep(_DAMAGE_GRACE_SECONDS / 20)

    def _on_shared_file_system(self) -> bool:
        directory = store_for(self._path).watched_directory(self._path)
        return directory is not None and is_shared(directory)

    def _read_new(self, segments: Iterable[str]) -> tuple[dict[str, SegmentHeader], dict[str, Exception]]:
        """Of the segments that were not seen yet: the documents of the sound ones, and what is wrong with others."""
        new: dict[str, SegmentHeader] = {}
        damaged: dict[str, Exception] = {}
        unseen = [segment for segment in segments if segment not in self.segments]
        gone: set[str] = set()
        while unseen:
            before = len(gone)
            for segment, found in read_segment_headers(self._path, self._header, unseen).items():
                if isinstance(found, SegmentMissingError) and found.gone:
                    gone.add(segment)  # since it was listed
                elif isinstance(found, Exception):
                    damaged[segment] = found
                else:
                    new[segment] = found
            # What replaces a segment that is gone may be newer than the listing.
            seen = {*self.segments, *new, *damaged}
            listed = list_segments(self._path) if len(gone) > before else []
            unseen = [segment for segment in listed if segment not in seen]
        return new, damaged

    def _take_in(self, new: dict[str, SegmentHeader]) -> list[str]:
        """Add segments; the ids of samples that are new or have a newer revision."""
        # `segments` last: what is interrupted before that is read and taken in again.
        with _taking_in:
            new = {segment: header for segment, header in new.items() if segment not in self.segments}
            if not self.segments or not new or min(new) > next(reversed(self.segments)):
                for header in new.values():
                    self.newest.add(header)
                self.arrived.extend(new.values())
                self.segments.update(new)
            else:
                # A segment that was begun earlier was committed later: they are listed in the order of their ids.
                segments = dict(sorted((self.segments | new).items()))
                self.newest = Newest(segments.values(), known=self.newest)
                self.arrived.extend(new.values())
                self.segments = segments
            self._relocations = None
        return list(
            dict.fromkeys(
                sample
                for header in new.values()
                for sample, entry in header.samples.items()
                if self.newest.entries.get(sample) is entry
            )
        )

    def look(self, names: list[str] | None) -> dict[str, Exception]:
        """Take in what is sound of the named segments, or of all; what is damaged, and has been for a while."""
        listed = list_segments(self._path) if names is None else sorted(filter(is_segment_id, names))
        new, damaged = self._read_new(listed)
        self._take_in(new)
        now = time.monotonic()
        since = {segment: self.damaged_since.get(segment, now) for segment in damaged}
        self.damaged_since = since if names is None else self.damaged_since | since
        return {segment: error for segment, error in damaged.items() if now - since[segment] >= _DAMAGE_GRACE_SECONDS}

    def _has_segments_of(self, entry: SampleEntry) -> bool:
        return all(span.segment in self.segments for span in entry.spans)

    def locate(self, entry: SampleEntry) -> SampleEntry:
        """With the spans that lay in segments which were replaced, as far as the trace has seen, where they are now."""
        if self._has_segments_of(entry):
            return entry
        relocations = self._relocations
        if relocations is None:
            self._relocations = relocations = Relocations.of(self.segments.values())
        return replace(entry, spans=tuple(piece for span in entry.spans for piece in relocations.resolve(span)))

    def weight_versions(self, entry: SampleEntry, start: int, stop: int | None) -> list[WeightRange]:
        """Which version of the policy's weights made rows ``[start, stop)`` of a sample.

        Raises
        ------
        SegmentMissingError
            A segment that the sample has rows in is gone.
        """
        stop = entry.rows if stop is None else min(stop, entry.rows)
        ranges: list[WeightRange] = []
        first = 0
        if not self._has_segments_of(entry):
            self.refresh()
        for span in self.locate(entry).spans:
            header = self.segments.get(span.segment)
            if header is None:
                header = read_segment_header(self._path, self._header, span.segment)
            for low, high, version in header.versions_of(span):
                low, high = max(first + low, start), min(first + high, stop)
                if low >= high:
                    continue
                if ranges and ranges[-1].version == version:
                    ranges[-1] = WeightRange(ranges[-1].start, high, version)
                else:
                    ranges.append(WeightRange(low, high, version))
            first += span.stop - span.start
        return ranges
