"""What lies in a trace's directory, damage included: each segment's document, or what is wrong with it.

:func:`tracefile.open` refuses a trace with a damaged segment, because a sample that silently falls back to an
older revision is wrong data. What looks for damage has to go on instead. A trace may be written to, or cleaned
up, meanwhile: a segment whose directory is gone by the time it is read has vanished, and is not damaged.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tracefile.documents import parse_segment_header
from tracefile.errors import MetadataDamagedError, OptionError, SegmentMissingError, StoreError, TraceError
from tracefile.format import METADATA_NAME, ModelConfig, segment_path
from tracefile.metadata import SegmentHeader, TraceHeader
from tracefile.moved import Relocations
from tracefile.revisions import Newest
from tracefile.store import list_segments, read_segment_headers, store_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tracefile.metadata import SampleEntry, Span

Range = tuple[int, int]


class Revision(NamedTuple):
    """One revision of a sample: the segment whose index lists it, and whether a later one replaced it."""

    listed_in: str
    entry: SampleEntry
    superseded: bool


@dataclass(frozen=True, slots=True)
class Holding:
    """Rows of one segment that one revision of a sample consists of.

    Attributes
    ----------
    sample : str
    listed_in : str
        The segment whose index lists this revision; another one than the rows' where samples share rows.
    superseded : bool
    start, stop : int
        Rows of the segment.
    first : int
        The sample's row that lies at ``start``.
    missing : tuple of (int, int)
        Those of these rows that were never captured, as ranges of the sample's rows.
    """

    sample: str
    listed_in: str
    superseded: bool
    start: int
    stop: int
    first: int
    missing: tuple[Range, ...]

    def captured(self, start: int, stop: int) -> Iterator[Range]:
        """The captured rows among ``[start, stop)``, as ranges of the segment's rows."""
        start, stop = max(start, self.start), min(stop, self.stop)
        shift = self.start - self.first
        for gap_start, gap_stop in self.missing:
            if start < min(gap_start + shift, stop):
                yield start, min(gap_start + shift, stop)
            start = max(start, gap_stop + shift)
        if start < stop:
            yield start, stop


@dataclass(slots=True)
class Survey:
    """A trace's segments as they were found.

    Attributes
    ----------
    path : str
    header : TraceHeader
    segments : dict of str to SegmentHeader
        The sound ones, in the order of their ids.
    damaged : dict of str to TraceError
        What is wrong with the documents of the others.
    vanished : list of str
        Segments that were listed and gone when they were to be read.
    """

    path: str
    header: TraceHeader
    segments: dict[str, SegmentHeader] = field(default_factory=dict)
    damaged: dict[str, TraceError] = field(default_factory=dict)
    vanished: list[str] = field(default_factory=list)
    _relocations: Relocations | None = field(default=None, repr=False)

    def samples(self) -> dict[str, Revision]:
        """The revision of each sample that counts, in the order in which the samples came."""
        newest = {each.entry.id: each for each in self.revisions() if not each.superseded}
        return {sample: newest[sample] for sample in Newest(self.segments.values()).entries}

    def revisions(self) -> Iterator[Revision]:
        """Every revision of every sample, each once, oldest first."""
        newest = Newest(self.segments.values()).entries
        seen: set[tuple[str, str]] = set()
        for segment, header in self.segments.items():
            for sample, entry in header.samples.items():
                # A segment that was not deleted yet and the one that replaces it list the same revisions.
                revision = sample, header.origin_of(entry)
                if revision not in seen:
                    seen.add(revision)
                    yield Revision(segment, entry, newest.get(sample) is not entry)

    def spans_of(self, entry: SampleEntry) -> Iterator[Span]:
        """Where a sample's rows are: those of segments that are gone, in the segments that replace them."""
        for span in entry.spans:
            if span.segment in self.segments or span.segment in self.damaged:
                yield span
            else:
                yield from self.relocations.resolve(span)

    @property
    def relocations(self) -> Relocations:
        """What the sound segments say about rows that moved."""
        if self._relocations is None:
            self._relocations = Relocations.of(self.segments.values())
        return self._relocations

    def holdings(self) -> dict[str, list[Holding]]:
        """Whose rows each segment holds; also of segments that are damaged or absent.

        Rows of a segment that was replaced are those of the segment that has them now.
        """
        held: dict[str, list[Holding]] = {}
        for listed_in, entry, superseded in self.revisions():
            first = 0
            for span in self.spans_of(entry):
                last = first + span.stop - span.start
                missing = tuple((a, b) for a, b in entry.missing if a < last and b > first)
                holding = Holding(entry.id, listed_in, superseded, span.start, span.stop, first, missing)
                held.setdefault(span.segment, []).append(holding)
                first = last
        return held

    def absent(self) -> list[str]:
        """Segments that samples have rows in and that are not there.

        Rows that only superseded revisions have are not missed: retention may have deleted them.
        """
        return sorted(
            segment
            for segment, holdings in self.holdings().items()
            if segment not in self.segments
            and segment not in self.damaged
            and not all(holding.superseded for holding in holdings)
        )

    def is_gone(self, segment: str) -> bool:
        """Whether nothing is left of a segment."""
        return store_for(self.path).is_gone(self.path, segment)


def take_survey(path: str, header: TraceHeader) -> Survey:
    """Read the documents of all segments of the trace at ``path``, whatever their state.

    Raises
    ------
    MetadataDamagedError
        The directory of segments itself is gone.
    StoreError
        The store does not answer.
    """
    survey = Survey(path, header)
    pending = list_segments(path)
    known: set[str] = set()
    vanished: set[str] = set()
    while pending:
        referenced: set[str] = set()
        before = len(vanished)
        for segment, found in read_segment_headers(path, header, pending).items():
            if isinstance(found, SegmentHeader):
                survey.segments[segment] = found
                referenced.update(span.segment for entry in found.samples.values() for span in entry.spans)
            elif isinstance(found, SegmentMissingError) and found.gone:
                vanished.add(segment)
            elif isinstance(found, TraceError):
                raise_unanswered(found)
                survey.damaged[segment] = found
            else:
                where = os.path.join(segment_path(path, segment), METADATA_NAME)
                survey.damaged[segment] = unreadable(where, found, segment)
        known.update(survey.segments, survey.damaged)
        if len(vanished) > before:
            referenced.update(list_segments(path))  # what replaces them may be newer than the listing
        # Listing a directory that is being added to may miss a segment and still show later ones that refer to it. And
        # what a collection had out of the way may be back.
        unread = sorted(referenced - known)
        gone = store_for(path).gone(path, unread) if unread else set()
        pending = [segment for segment in unread if segment not in gone]
    survey.vanished = sorted(vanished - known)
    survey.segments = dict(sorted(survey.segments.items()))
    return survey


def listed_segments(path: str) -> list[str]:
    """Ids of the segments that are visible now; none where even the directory cannot be listed."""
    try:
        return list_segments(path)
    except (TraceError, OSError):
        return []


def recovered_header(path: str, segments: list[str]) -> TraceHeader | None:
    """What the root document must have said, but for layer ids, by the first segment with a sound document."""
    for segment in segments:
        where = os.path.join(segment_path(path, segment), METADATA_NAME)
        try:
            raw = store_for(path).read(where)
            document = json.loads(raw)
            layers, _, top_k = document["shape"]
            ours = document["attributes"]["tracefile"]
            header = TraceHeader(ours["trace"], ModelConfig(layers, top_k, ours["num_experts"]))
            parse_segment_header(raw, header, segment, where)
        except (OSError, KeyError, TypeError, ValueError, OptionError):
            continue
        return header
    return None


def absence(survey: Survey, segment: str) -> str:
    """What to say of a segment that samples have rows in and that is not there."""
    where = segment_path(survey.path, segment)
    return f"{where} is gone, and samples of other segments have rows in it; restore the directory"


def raise_unanswered(error: BaseException) -> None:
    """Raise ``error`` if it says nothing of a file: a store was asked, several times, and did not answer."""
    if isinstance(error, StoreError) and hasattr(error, "attempts"):
        raise error


def unreadable(where: str, error: OSError, segment: str) -> MetadataDamagedError:
    """What a document that the file system does not give us is reported as."""
    return MetadataDamagedError(
        f"{where} cannot be read ({error.strerror or error}); restore the file or its permissions",
        path=where,
        segment=segment,
    )


def union(ranges: Iterable[Range]) -> list[Range]:
    """The union of ``[start, stop)`` ranges, ordered and disjoint.

    Examples
    --------
    >>> union([(5, 7), (0, 3), (2, 5), (9, 9)])
    [(0, 7)]
    """
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def count_rows(ranges: Iterable[Range]) -> int:
    """How many rows the union of ``ranges`` has."""
    return sum(stop - start for start, stop in union(ranges))
