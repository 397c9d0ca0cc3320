"""Where traces live: the interface of a store, which store a path belongs to, and what all stores have in common.

A trace is a few files by name: its root document, and for each segment a document and a shard file. A store
publishes segments whole, lists and deletes them, and reads files and ranges of files; nothing above it knows whether
that is a directory, an object store or a cluster's memory. Nothing that is visible is ever modified, so no store
needs locks, and readers and writers need no coordination.
"""

from __future__ import annotations

import abc
import importlib
import os
from typing import TYPE_CHECKING, ClassVar

from tracefile import documents
from tracefile.errors import (
    MetadataDamagedError,
    NotATraceError,
    OptionError,
    SegmentMissingError,
    TraceError,
    TraceNotFoundError,
)
from tracefile.format import METADATA_NAME, SEGMENTS_NAME, is_segment_id, segment_path
from tracefile.metadata import SegmentHeader

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tracefile.metadata import TraceHeader
    from tracefile.source import Source, SourceKind


#: How often a file is looked for that is not there although its segment is.
READS = 3


class Handle(abc.ABC):
    """What a lazy tensor holds where a segment lives only as long as it is referred to."""

    @abc.abstractmethod
    def hold(self, other: Handle) -> None:
        """Have another segment live as long as this one does in this process."""


class Store(abc.ABC):
    """Keeps traces. One object serves a process, all of its threads, and its forked children.

    Paths are the trace's, as :meth:`absolute` gives it, with names joined to it by ``/``. What fails raises an
    ``OSError``: ``FileNotFoundError`` or ``NotADirectoryError`` where there is nothing, and a
    :class:`~tracefile.errors.TraceError` that is one where there is more to say.

    Attributes
    ----------
    round_trips : bool
        Whether opening and reading a segment takes round trips, so that several are better read at the same time.
    poll_seconds : (float, float)
        How long who waits for samples pauses between looks, at first and at most.
    """

    round_trips: ClassVar[bool] = False
    poll_seconds: ClassVar[tuple[float, float]] = (0.005, 0.05)

    @abc.abstractmethod
    def absolute(self, path: str) -> str:
        """The one name of the trace that a user calls ``path``, good in every process."""

    @abc.abstractmethod
    def read(self, path: str, nbytes: int | None = None) -> bytes:
        """A file, or its first ``nbytes``."""

    def read_all(self, paths: Sequence[str]) -> list[bytes | OSError]:
        """Several files, or what kept each from being read. Where each takes a round trip: together."""
        found: list[bytes | OSError] = []
        for path in paths:
            try:
                found.append(self.read(path))
            except OSError as error:
                found.append(error)
        return found

    def read_root(self, trace: str) -> bytes:
        """The root document of a trace.

        Raises
        ------
        TraceNotFoundError, NotATraceError
            There is nothing, or something else.
        """
        try:
            return self.read(os.path.join(trace, METADATA_NAME))
        except FileNotFoundError:
            raise TraceNotFoundError(
                f"no trace at {trace}; it appears when its first writer opens it", path=trace
            ) from None

    @abc.abstractmethod
    def size(self, path: str) -> int:
        """The bytes of a file."""

    def sizes(self, paths: Sequence[str]) -> list[int | OSError]:
        """The bytes of several files, or what kept each from being known. Where each takes a round trip: together."""
        found: list[int | OSError] = []
        for path in paths:
            try:
                found.append(self.size(path))
            except OSError as error:
                found.append(error)
        return found

    @abc.abstractmethod
    def open_source(self, path: str, *, kind: SourceKind, size: int, segment: str) -> Source:
        """Open a shard file of ``size`` bytes for reading.

        Raises
        ------
        SegmentMissingError
            There is no such file.
        ShardDamagedError
            It has another size.
        """

    @abc.abstractmethod
    def segments(self, trace: str) -> list[str]:
        """The names of what is visible among a trace's segments, in any order."""

    @abc.abstractmethod
    def is_gone(self, trace: str, segment: str) -> bool:
        """Whether nothing is left of a segment."""

    def gone(self, trace: str, segments: Sequence[str]) -> set[str]:
        """Those of several segments of which nothing is left. Where each takes a round trip: together."""
        return {segment for segment in segments if self.is_gone(trace, segment)}

    @abc.abstractmethod
    def create(self, trace: str, files: Mapping[str, bytes], *, durable: bool) -> bool:
        """Publish the first files of a trace, by name, at once; ``False`` if somebody else was first."""

    def is_vacant(self, trace: str) -> bool:
        """Whether a trace can be created where something is that is none."""
        return False

    @abc.abstractmethod
    def begin(self, trace: str, segment: str) -> str:
        """A new local directory to build a segment in; to be handed to :meth:`publish` or :meth:`discard`."""

    def upload(self, trace: str, segment: str, build: str) -> None:  # noqa: B027 - most stores have nothing to do
        """What takes long of :meth:`publish`, ahead of it; :meth:`discard` takes it back. Optional.

        Raises
        ------
        PublishError
        """

    @abc.abstractmethod
    def publish(self, trace: str, segment: str, build: str, *, durable: bool) -> Handle | None:
        """Make a segment visible, at once and whole; its directory ``build`` is gone then.

        Returns
        -------
        Handle or None
            What :meth:`handle` gives of it.

        Raises
        ------
        PublishError
            It is visible, but the store does not vouch that it will survive a crash.
        """

    def handle(self, trace: str, segment: str) -> Handle | None:
        """What a lazy tensor must hold for the segment to live; ``None`` where a name is enough.

        Raises
        ------
        SegmentMissingError
            It would be needed, and this process has it no more.
        """
        return None

    @abc.abstractmethod
    def discard(self, build: str) -> None:
        """Remove a segment that was being built. Raises nothing."""

    @abc.abstractmethod
    def delete(self, trace: str, segment: str) -> None:
        """Make a segment invisible at once, and remove its files. Fine if it is gone already."""

    def delete_all(self, trace: str, segments: Sequence[str]) -> None:
        """Delete several segments, in this order as far as others can see."""
        for segment in segments:
            self.delete(trace, segment)

    def unfinished(self, trace: str) -> list[str]:
        """What is being built for a trace, or was left by killed writers, as far as this process can see."""
        return []

    def leave(self, trace: str) -> None:  # noqa: B027 - most stores have nothing to do
        """A writer of the trace closes: remove what it needed and nobody else does. Raises nothing."""

    def watched_directory(self, trace: str) -> str | None:
        """The local directory that changes when a segment becomes visible, if there is one."""
        return None


#: Where the stores that come with tracefile are; imported when a path of theirs is met.
_MODULES = {
    **dict.fromkeys(("", "file"), "tracefile.local_store"),
    **dict.fromkeys(("s3", "s3a", "gs", "az", "abfs", "abfss", "http", "https"), "tracefile.object_store"),
    "ray": "tracefile.integrations.ray.store",
}
_stores: dict[str, Store] = {}


def register_store(scheme: str, store: Store) -> None:
    """Have paths that begin with ``scheme://`` belong to ``store``. A store's module does so when it is imported."""
    _stores[scheme] = store


def store_for(path: str) -> Store:
    """The store that a trace's path belongs to.

    Raises
    ------
    OptionError
        No store has such paths.

    Examples
    --------
    >>> type(store_for("/data/step_1.trace")).__name__
    'LocalStore'
    >>> store_for("gopher://step_1.trace")
    Traceback (most recent call last):
    tracefile.errors.OptionError: no store is known for gopher://step_1.trace; ...
    """
    scheme, separator, _ = path.partition("://")
    if not separator or "/" in scheme:
        scheme = ""
    store = _stores.get(scheme)
    if store is None:
        if scheme not in _MODULES:
            known = ", ".join(f"{each}://" for each in sorted({*_MODULES, *_stores}) if each)
            raise OptionError(f"no store is known for {path}; there are directories and {known}")
        importlib.import_module(_MODULES[scheme])
        store = _stores[scheme]
    return store


def absolute_path(path: str | os.PathLike[str]) -> str:
    """The one name of a trace, good in every process."""
    name = os.fspath(path)
    return store_for(name).absolute(name)


def read_trace_header(path: str) -> TraceHeader:
    """Read the root document of the trace at ``path``.

    Raises
    ------
    TraceNotFoundError, NotATraceError, MetadataDamagedError, FormatVersionError
    """
    raw = store_for(path).read_root(path)
    where = os.path.join(path, METADATA_NAME)
    try:
        return documents.parse_trace_header(raw, where)
    except MetadataDamagedError as error:
        if documents.is_another_node(raw):
            raise NotATraceError(f"{path} holds another kind of Zarr node, not a trace", path=path) from error
        raise


def list_segments(trace_path: str) -> list[str]:
    """Ids of the segments that are visible now, sorted.

    Raises
    ------
    MetadataDamagedError
        There is nothing to list.
    TraceNotFoundError
        The trace was deleted.
    """
    try:
        return sorted(filter(is_segment_id, store_for(trace_path).segments(trace_path)))
    except (FileNotFoundError, NotADirectoryError):
        try:
            store_for(trace_path).read_root(trace_path)
        except TraceNotFoundError:
            message = f"{trace_path} is gone: the trace was deleted or moved since it was opened"
            raise TraceNotFoundError(message, path=trace_path) from None
        directory = os.path.join(trace_path, SEGMENTS_NAME)
        raise MetadataDamagedError(f"{directory} is gone; restore the trace from a copy", path=trace_path) from None


def read_segment_header(trace_path: str, header: TraceHeader, segment: str) -> SegmentHeader:
    """Read a segment's document.

    Raises
    ------
    SegmentMissingError, MetadataDamagedError, FormatVersionError
    """
    (found,) = read_segment_headers(trace_path, header, [segment]).values()
    if isinstance(found, SegmentHeader):
        return found
    raise found


def read_segment_headers(
    trace_path: str, header: TraceHeader, segments: Iterable[str]
) -> dict[str, SegmentHeader | TraceError | OSError]:
    """Read the documents of several segments, together; what is wrong with one stands in its place."""
    store, segments = store_for(trace_path), list(dict.fromkeys(segments))
    places = {segment: os.path.join(segment_path(trace_path, segment), METADATA_NAME) for segment in segments}
    raws = dict(zip(segments, store.read_all(list(places.values())), strict=True))
    gone: set[str] = set()
    for _ in range(READS):
        missing = [segment for segment, raw in raws.items() if _is_missing(raw) and segment not in gone]
        if not missing:
            break
        gone |= store.gone(trace_path, missing)
        # What is there after all was out of the way while a collection looked who needs it.
        again = [segment for segment in missing if segment not in gone]
        raws.update(zip(again, store.read_all([places[segment] for segment in again]), strict=True))
    found: dict[str, SegmentHeader | TraceError | OSError] = {}
    for segment, where in places.items():
        raw = raws[segment]
        if isinstance(raw, TraceError):
            found[segment] = raw
        elif _is_missing(raw):
            found[segment] = SegmentMissingError(
                f"{where} is gone: segment {segment} was deleted or not copied whole; restore it",
                path=where,
                segment=segment,
                gone=segment in gone,
            )
        elif isinstance(raw, OSError):
            found[segment] = raw
        else:
            try:
                found[segment] = documents.parse_segment_header(raw, header, segment, where)
            except TraceError as error:
                found[segment] = error
    return found


def _is_missing(raw: bytes | OSError) -> bool:
    return isinstance(raw, FileNotFoundError | NotADirectoryError) and not isinstance(raw, TraceError)


def unfinished(trace_path: str) -> list[str]:
    """Names of segments being built for a trace, or left by killed writers."""
    return store_for(trace_path).unfinished(trace_path)
