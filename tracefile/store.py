"""A trace's directory: create, publish, list, and open segments.

Commit is a rename: a writer builds a segment in the staging directory beside the trace and renames it into
``segments/``. Nothing that is visible is ever modified, so there are no locks, and readers and writers on any
number of hosts that share the file system need no coordination.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import stat
import threading
import uuid as uuid_module
from collections import OrderedDict
from typing import TYPE_CHECKING

from tracefile import metadata
from tracefile.cache import chunk_cache
from tracefile.errors import (
    ConfigurationMismatchError,
    MetadataDamagedError,
    NotATraceError,
    PublishError,
    SegmentMissingError,
    ShardDamagedError,
    TraceNotFoundError,
)
from tracefile.format import (
    CODECS,
    HEADER_BYTES,
    METADATA_NAME,
    SEGMENTS_NAME,
    SHARD_NAME,
    ModelConfig,
    is_segment_id,
    new_segment_id,
    segment_path,
    staging_path,
)
from tracefile.metadata import SegmentHeader, TraceHeader
from tracefile.settings import mapped_path, on_change, settings
from tracefile.shard import ChunkDecoder, ShardIndex, check_header, index_bytes
from tracefile.source import Source, check_source_kind, open_source
from tracefile.stats import ReadStats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefile.runs import TraceRef

_serial = itertools.count()


def read_file(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def fsync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: str, data: bytes, durable: bool) -> None:
    with open(path, "xb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def read_trace_header(path: str) -> TraceHeader:
    """Read the root document of the trace at ``path``.

    Raises
    ------
    TraceNotFoundError, NotATraceError, MetadataDamagedError, FormatVersionError
    """
    where = os.path.join(path, METADATA_NAME)
    raw = _read_root(path, where)
    try:
        return metadata.parse_trace_header(raw, where)
    except MetadataDamagedError as error:
        if metadata.is_another_node(raw):
            raise NotATraceError(f"{path} holds another kind of Zarr node, not a trace", path=path) from error
        raise


def _read_root(path: str, where: str) -> bytes:
    for _ in range(2):
        try:
            return read_file(where)
        except (FileNotFoundError, NotADirectoryError):
            pass
        try:
            mode = os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            raise TraceNotFoundError(
                f"no trace at {path}; it appears when its first writer opens it", path=path
            ) from None
        if not stat.S_ISDIR(mode):
            raise NotATraceError(f"{path} is a file; a trace is a directory", path=path)
        # A directory: the first writer may have renamed it into place between the two looks, so look again.
    raise NotATraceError(f"{path} is a directory without {METADATA_NAME}: not a trace", path=path)


def _existing_header(path: str) -> TraceHeader | None:
    """The header of the trace at ``path``; ``None`` where one can be created."""
    try:
        return read_trace_header(path)
    except TraceNotFoundError:
        return None
    except NotATraceError:
        if not os.path.isdir(path):
            raise
        names = os.listdir(path)
        if not names:
            return None  # an empty directory made beforehand is a fine place
        if METADATA_NAME in names:
            return read_trace_header(path)  # another writer may have replaced the empty directory since
        raise


def create_trace(path: str, config: ModelConfig, *, durable: bool) -> TraceHeader:
    """Create the trace at ``path``, or join the one that is there.

    Any number of processes may do this at once: the directory is built in staging and renamed into place, and
    who comes second finds the first one's.

    Raises
    ------
    ConfigurationMismatchError
        The trace that is there has another model configuration.
    NotATraceError
        Something else is at the path.
    PublishError
        The file system refused.
    """
    header = _existing_header(path)
    if header is None:
        header = _publish_root(path, TraceHeader(uuid_module.uuid4().hex, config), durable)
    if header.config != config:
        raise ConfigurationMismatchError(
            f"{path} holds {header.config}; this writer was opened with {config}. Write another configuration to"
            " another path",
            path=path,
            ours=config,
            theirs=header.config,
        )
    return header


def _publish_root(path: str, header: TraceHeader, durable: bool) -> TraceHeader:
    staging = staging_path(path)
    build = os.path.join(staging, f"root-{new_segment_id()}")
    try:
        make_build_directory(path, os.path.join(build, SEGMENTS_NAME))
        write_file(os.path.join(build, METADATA_NAME), metadata.encode(metadata.group_document(header)), durable)
        write_file(
            os.path.join(build, SEGMENTS_NAME, METADATA_NAME),
            metadata.encode(metadata.group_document()),
            durable,
        )
        if durable:
            fsync_directory(os.path.join(build, SEGMENTS_NAME))
            fsync_directory(build)
        try:
            os.rename(build, os.path.realpath(path))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            header = read_trace_header(path)  # another writer was first
        if durable:
            fsync_directory(os.path.dirname(os.path.realpath(path)))
    except OSError as error:
        if isinstance(error, TraceNotFoundError | PublishError):
            raise
        raise publish_error(path, error) from error
    finally:
        shutil.rmtree(build, ignore_errors=True)
        remove_staging_if_empty(path)
    return header


def publish_error(path: str, error: OSError) -> PublishError:
    remedy = {
        errno.ENOSPC: "free space or write elsewhere",
        errno.EDQUOT: "the quota is used up",
        errno.EACCES: "the trace's parent directory must be writable too, because segments are built beside it",
        errno.EROFS: "the file system is mounted read-only",
    }.get(error.errno or 0, "nothing of this segment was published; append again once that is mended")
    message = f"cannot write to {path}: {error.strerror or error}; {remedy}"
    return PublishError(message, path=path, errno=error.errno)  # a detail, so that it survives pickling


def make_build_directory(trace_path: str, directory: str) -> None:
    """Make a directory below the trace's staging directory."""
    for _ in range(100):
        try:
            os.makedirs(directory)
        except FileNotFoundError:
            continue  # another writer, closing, removed the empty staging directory in between
        return
    raise OSError(errno.ENOENT, "the staging directory keeps vanishing", staging_path(trace_path))


def remove_staging_if_empty(path: str) -> None:
    with contextlib.suppress(OSError):  # other writers build there, or it is gone already
        os.rmdir(staging_path(path))


def publish_segment(trace_path: str, build: str, segment: str, *, durable: bool) -> None:
    """Make a segment that was built in staging visible, at once and whole."""
    target = segment_path(trace_path, segment)
    if durable:
        for directory, _, _ in os.walk(build, topdown=False):
            fsync_directory(directory)
    try:
        os.rename(build, target)
    except OSError:
        # A network file system may have done it and lost the answer; the name is ours alone.
        if not os.path.exists(os.path.join(target, METADATA_NAME)):
            raise
    if durable:
        try:
            fsync_directory(os.path.dirname(target))
        except OSError as error:
            # Readers may have it by now, so it stays; appending the same sample once more does no harm.
            raise PublishError(
                f"segment {segment} of {trace_path} is visible, but the file system did not confirm that it would"
                f" survive a crash ({error.strerror or error}); append its samples again",
                path=trace_path,
                segment=segment,
                errno=error.errno,
            ) from error


def list_segments(trace_path: str) -> list[str]:
    """Ids of the segments that are visible now, sorted."""
    directory = os.path.join(trace_path, SEGMENTS_NAME)
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if is_segment_id(entry.name))
    except (FileNotFoundError, NotADirectoryError):
        raise MetadataDamagedError(f"{directory} is gone; restore the trace from a copy", path=trace_path) from None


def read_segment_header(trace_path: str, header: TraceHeader, segment: str) -> SegmentHeader:
    """Read a segment's document.

    Raises
    ------
    SegmentMissingError, MetadataDamagedError, FormatVersionError
    """
    where = os.path.join(segment_path(trace_path, segment), METADATA_NAME)
    try:
        raw = read_file(where)
    except (FileNotFoundError, NotADirectoryError):
        raise SegmentMissingError(
            f"{where} is gone: segment {segment} was deleted or not copied whole; restore it",
            path=where,
            segment=segment,
        ) from None
    return metadata.parse_segment_header(raw, header, segment, where)


class OpenSegment:
    """A segment ready to be read: its document, its shard file and the index of its chunks.

    Attributes
    ----------
    serial : int
        Names this opening of it in the chunk cache.
    """

    def __init__(self, trace_path: str, header: TraceHeader, segment: str, source: str) -> None:
        self.serial = next(_serial)
        self.header = read_segment_header(trace_path, header, segment)
        self.path = os.path.join(segment_path(trace_path, segment), SHARD_NAME)
        self.source: Source | None = None
        layer_chunks, self.row_chunks = self.header.grid
        geometry = self.header.geometry
        self.decoder = ChunkDecoder(
            CODECS[self.header.codec],
            geometry.chunk_bytes(header.config),
            row_chunks=max(1, self.row_chunks),
            segment=segment,
            path=self.path,
        )
        chunks = layer_chunks * self.row_chunks
        self.index = ShardIndex([], [])
        if self.header.rows:
            size, tail = self.header.shard_bytes, index_bytes(chunks)
            if size < HEADER_BYTES + tail:
                raise ShardDamagedError(
                    f"{self.path}: {size} bytes cannot hold the {chunks} chunks of segment {segment}; restore the file",
                    path=self.path,
                    segment=segment,
                )
            self.source = open_source(self.path, kind=check_source_kind(source), size=size, segment=segment)
            try:
                check_header(self.source.read(0, HEADER_BYTES), segment, self.path)
                self.index = ShardIndex.parse(
                    self.source.read(size - tail, tail),
                    chunks=chunks,
                    shard_bytes=size,
                    segment=segment,
                    path=self.path,
                )
            except BaseException:
                self.source.close()
                raise

    def __del__(self) -> None:
        # Closing belongs to the last reader: eviction must not pull the file from under a read in progress.
        source = getattr(self, "source", None)
        if source is not None:
            source.close()


class SegmentPool:
    """The open segments of this process, least recently used closed first. Safe for threads and fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[TraceRef, str], OpenSegment] = OrderedDict()
        self._stats: dict[TraceRef, ReadStats] = {}
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()

    def get(self, trace: TraceRef, config: ModelConfig, segment: str) -> OpenSegment:
        """The open segment, opened if need be."""
        key = (trace, segment)
        with self._lock:
            found = self._open.get(key)
            if found is not None:
                self._open.move_to_end(key)
                return found
        opened = OpenSegment(mapped_path(trace.path), TraceHeader(trace.uuid, config), segment, trace.source)
        with self._lock:
            opened = self._open.setdefault(key, opened)
            self._open.move_to_end(key)
        self.trim()
        return opened

    def trim(self) -> None:
        """Close the segments that ``max_open_segments`` has no room for."""
        evicted = []
        with self._lock:
            while len(self._open) > settings().max_open_segments:
                evicted.append(self._open.popitem(last=False)[1])
        for segment in evicted:
            chunk_cache.drop(segment.serial)

    def close(self, trace: TraceRef) -> None:
        """Close what is open of a trace, and forget its decoded chunks."""
        with self._lock:
            closed = [self._open.pop(key) for key in list(self._open) if key[0] == trace]
        for segment in closed:
            chunk_cache.drop(segment.serial)

    def record(self, trace: TraceRef, stats: ReadStats) -> None:
        with self._lock:
            self._stats.setdefault(trace, ReadStats()).add(stats)

    def stats(self, trace: TraceRef | None = None) -> ReadStats:
        """What reading a trace has cost this process; without a trace, all of them."""
        with self._lock:
            if trace is not None:
                return self._stats.get(trace, ReadStats()).copy()
            total = ReadStats()
            for stats in self._stats.values():
                total.add(stats)
            return total

    def active(self, trace: TraceRef) -> tuple[int, int]:
        """Decoded chunks of a trace that are held for reuse, and their bytes."""
        return chunk_cache.usage({segment.serial for segment in self.opened(trace)})

    def opened(self, trace: TraceRef) -> list[OpenSegment]:
        with self._lock:
            return [segment for key, segment in self._open.items() if key[0] == trace]


#: The open segments of this process.
segment_pool = SegmentPool()
on_change(segment_pool.trim)


def unfinished(trace_path: str) -> Iterator[str]:
    """Names of what lies in a trace's staging directory: segments being written, or left by killed writers."""
    try:
        yield from sorted(os.listdir(staging_path(trace_path)))
    except OSError:
        return


def process_stats() -> ReadStats:
    """What reading has cost this process, over all traces."""
    return segment_pool.stats()
