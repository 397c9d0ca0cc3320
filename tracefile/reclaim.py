"""Taking segments away under writers that may name their rows at this moment, without locks.

A segment that nothing refers to can be named again at any time: by a prefix that its writer remembers, by a lazy
tensor that somebody appends. So who takes a segment away and who publishes one that names its rows each look at what
the other did, after they did their own part:

- Who takes away sets the segment aside, waits for what is being published, and looks at the whole trace again. What
  is needed by now is brought back; the rest is dropped, and removed.
- Who publishes looks, right before and after, whether the segments that it names are there. One that is aside it
  brings back itself; of bringing back and dropping, one happens. If a segment is gone for good, what was published is
  withdrawn, and written again with the rows in it, where they are at hand.

In a directory, aside is another place, and what happens is a rename; in an object store, it is a mark, and what happens
is an object that is written only if there is none (:mod:`tracefile.object_reclaim`).

Either the one sees the other's segment, or the other sees that one of its own is gone. Who is killed in between leaves
a segment aside, where the next to need it, or the next collection, finds it.
"""

from __future__ import annotations

import abc
import errno
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracefile.errors import OptionError, PublishError, SegmentMissingError
from tracefile.metadata import SegmentHeader
from tracefile.moved import Relocations
from tracefile.store import Store, list_segments, read_segment_headers, store_for

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracefile.metadata import Span, TraceHeader


#: How often a trace is listed again, because segments vanished that were listed.
_LISTINGS = 5


@dataclass(frozen=True, slots=True)
class Leftover:
    """What lies in a trace's staging directory.

    Attributes
    ----------
    name : str
    nbytes : int
    changed : float
        Seconds since the epoch, by the file system's clock, of the last change to any of its files.
    finished : bool
        Whether nobody can need it: something that was deleted, and whose removal was interrupted.
    """

    name: str
    nbytes: int
    changed: float
    finished: bool


class ReclaimingStore(Store):
    """A store from which segments can be taken away in two steps, and traces as a whole."""

    #: How long to wait between taking aside and looking again: longer than it takes a writer that has looked
    #: whether a segment is there to publish one that names it.
    settle_seconds: float = 1.0

    def check_deletable(self, trace: str) -> None:
        """See that things can be deleted there at all.

        Raises
        ------
        OptionError
        """

    def settle(self, trace: str) -> float:
        """``settle_seconds``, or longer where others see late what happens to a trace."""
        return self.settle_seconds

    @abc.abstractmethod
    def set_aside(self, trace: str, segment: str) -> str:
        """Have who looks at a segment bring it back, or else find it gone. It may be invisible from now on.

        Returns
        -------
        str
            What :meth:`drop` is to be given, or nothing if it is not there.

        Raises
        ------
        OptionError
            The store can't do that.
        """

    @abc.abstractmethod
    def aside(self, trace: str) -> list[str]:
        """The segments that are aside."""

    @abc.abstractmethod
    def bring_back(self, trace: str, segment: str) -> bool:
        """Make a segment visible again if it is aside; whether it is visible now."""

    def bring_back_all(self, trace: str, segments: Iterable[str]) -> dict[str, bool]:
        """:meth:`bring_back` of several, in this order. Where each takes a round trip: together."""
        return {segment: self.bring_back(trace, segment) for segment in segments}

    @abc.abstractmethod
    def drop(self, trace: str, segment: str, mark: str = "") -> bool:
        """Remove a segment that is aside; ``False`` if it is not, because somebody brought it back.

        Parameters
        ----------
        trace, segment : str
        mark : str
            What :meth:`set_aside` returned: if the segment was brought back and set aside by others since, it stays.
        """

    @abc.abstractmethod
    def changed(self, path: str) -> float:
        """When a file was last changed, in seconds since the epoch, by the store's clock."""

    @abc.abstractmethod
    def leftovers(self, trace: str) -> list[Leftover]:
        """What is being built, or was left by killed processes. What is aside is not among it."""

    @abc.abstractmethod
    def remove_leftover(self, trace: str, name: str) -> None:
        """Remove one of them. Raises nothing."""

    @abc.abstractmethod
    def traces(self, directory: str) -> list[str]:
        """The paths of what may be traces in a directory, sorted.

        Raises
        ------
        OSError
            There is no such directory.
        """

    @abc.abstractmethod
    def delete_trace(self, trace: str) -> None:
        """Make a trace invisible at once, and remove it. Its writers' next segments are refused.

        Raises
        ------
        OSError
        """

    @abc.abstractmethod
    def sweep(self, directory: str, before: float) -> list[str]:
        """Remove what is left beside a directory's traces, which are gone: where their removal was interrupted, and
        what lies in their staging directories and was last changed ``before``; the names of these traces."""


def reclaiming_store(path: str) -> ReclaimingStore:
    """The store of a trace, if segments can be taken from it.

    Raises
    ------
    OptionError
    """
    store = store_for(path)
    if not isinstance(store, ReclaimingStore):
        raise OptionError(
            f"{path}: nothing can be reclaimed from a {type(store).__name__} yet, only from directories and object"
            " stores; delete old traces there with the store's own tools"
        )
    store.check_deletable(path)
    return store


def lost_segments(path: str, header: TraceHeader, spans: Iterable[Span]) -> set[str]:
    """Of segments whose rows somebody names, those that are gone for good. What is aside is brought back.

    Parameters
    ----------
    path : str
    header : TraceHeader
    spans : iterable of Span
        What is named.
    """
    store = store_for(path)
    if not isinstance(store, ReclaimingStore):
        return set()
    spans = list(spans)
    there = store.bring_back_all(path, {span.segment for span in spans})
    if all(there.values()):
        return set()
    # Rows that compaction moved are read where they are now.
    for _ in range(_LISTINGS):
        found = list(read_segment_headers(path, header, list_segments(path)).values())
        if not any(isinstance(each, SegmentMissingError) for each in found):
            break  # else one was replaced since it was listed, and who replaced it is listed now
    relocations = Relocations.of(each for each in found if isinstance(each, SegmentHeader))
    lost = set()
    for span in spans:
        if not there[span.segment]:
            now = {piece.segment for piece in relocations.resolve(span)}
            if span.segment in now or not all(store.bring_back_all(path, now).values()):
                lost.add(span.segment)
    return lost


def uuid_in(root: bytes) -> object:
    """The uuid that a root document gives; ``None`` if it is damaged, which is for readers to say."""
    try:
        return json.loads(root)["attributes"]["tracefile"]["uuid"]
    except (ValueError, KeyError, TypeError):
        return None


def is_of(document: bytes, root: bytes) -> bool:
    """Whether a segment belongs to the trace with this root document, as far as that can be told."""
    uuid = uuid_in(root)
    return uuid is None or f'"trace":"{uuid}"'.encode() in document


def deleted_under_writer(trace: str, *, replaced: bool) -> PublishError:
    """What a writer is told of a trace that was deleted, and of which another may be in its place."""
    why = "was deleted, and another was made in its place," if replaced else "was deleted"
    return PublishError(
        f"{trace} {why} under this writer; nothing of this segment was published. Open another writer to go on",
        path=trace,
        errno=errno.ENOENT,
    )
