"""Which revision of a sample counts.

Segments count in the order of their ids, which is that of their making, whenever they become visible; a revision
that compaction moved to another segment counts as of the one that it was committed with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracefile.metadata import SampleEntry, SegmentHeader


class Newest:
    """The newest revision of each sample among segments that come in any order.

    Parameters
    ----------
    headers : iterable of SegmentHeader
        To begin with.
    known : Newest, optional
        An earlier state: of two equal revisions, listed by the segment that it was committed with and by one that
        replaces it, its choice stays, so that nothing passes for news that is none.

    Attributes
    ----------
    entries : dict of str to SampleEntry
        In the order in which the samples came; deleted ones are not there.
    """

    def __init__(self, headers: Iterable[SegmentHeader] = (), known: Newest | None = None) -> None:
        self.entries: dict[str, SampleEntry] = {}
        self._origins: dict[str, str] = {}
        self._deleted: dict[str, str] = {}
        for header in headers:
            self.add(header)
        if known is not None:
            for sample, entry in known.entries.items():
                if self._origins.get(sample) == known._origins[sample]:
                    self.entries[sample] = entry

    def deleted_with(self, sample: str) -> str | None:
        """The segment that a sample was deleted with, if that is the last that is known of it."""
        return None if sample in self.entries else self._deleted.get(sample)

    def origin_of(self, sample: str) -> str:
        """The segment that the revision of a sample which counts was committed with."""
        return self._origins[sample]

    def add(self, header: SegmentHeader) -> None:
        """Take a segment in."""
        for sample, entry in header.samples.items():
            origin = header.origin_of(entry)
            if self._origins.get(sample, "") < origin and self._deleted.get(sample, "") < origin:
                self.entries[sample] = entry
                self._origins[sample] = origin
        for sample, deleted_with in header.deleted.items():
            origin = deleted_with or header.id
            self._deleted[sample] = max(origin, self._deleted.get(sample, ""))
            if sample in self.entries and self._origins[sample] < origin:
                del self.entries[sample], self._origins[sample]
