"""A trace in an object store: S3, Google Cloud Storage, Azure, and, for reading, a web server.

Commit is the upload of a segment's document: its shard goes first, and nobody lists a segment without a document.
Reading asks for ranges: those of one read that lie close are one request, all requests of it go out together, and
the gaps that are fetched along stay a fraction of what is needed. What is fetched may be kept in a directory of the
node (:mod:`tracefile.node_cache`); documents are not, so that what was deleted is seen to be.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import tempfile
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from tracefile.errors import (
    NotATraceError,
    OptionError,
    PublishError,
    SegmentMissingError,
    ShardDamagedError,
    StoreError,
    TraceError,
    TraceNotFoundError,
)
from tracefile.format import METADATA_NAME, SEGMENTS_NAME, SHARD_NAME, is_segment_id, segment_path
from tracefile.node_cache import node_cache
from tracefile.object_client import ObjectMoved, Place, client
from tracefile.store import Store, register_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from tracefile.node_cache import CachedFile
    from tracefile.object_client import Fetched
    from tracefile.source import Source, SourceKind

Range = tuple[int, int]

#: Gaps up to here are fetched along rather than asked around, and all of them at most so large a part of what is
#: needed. What else is fetched, documents and indexes, is small beside it: together less than half.
_GAP_BYTES = 64 * 1024
_GAP_SHARE = 0.4
#: More than this is several requests, which go side by side.
_REQUEST_BYTES = 4 * 1024 * 1024
#: What one reader has under way, or fetched and not used yet.
_AHEAD_BYTES = 64 * 1024 * 1024


class Request(NamedTuple):
    """The bytes ``[start, stop)``; ``ranges`` of them, as positions, are wanted."""

    start: int
    stop: int
    ranges: range


def plan_requests(ranges: Sequence[Range]) -> list[Request]:
    """Which requests to make for ``(offset, nbytes)`` ranges; neighbours in the sequence may share one.

    Examples
    --------
    >>> plan_requests([(0, 1000), (1100, 1000), (9000, 1000)])
    [Request(start=0, stop=2100, ranges=range(0, 2)), Request(start=9000, stop=10000, ranges=range(2, 3))]
    """
    gaps = [
        (after[0] - before[0] - before[1], position)
        for position, (before, after) in enumerate(itertools.pairwise(ranges))
    ]
    budget = int(sum(nbytes for _, nbytes in ranges) * _GAP_SHARE)
    joined = set()
    for gap, position in sorted(gap for gap in gaps if 0 <= gap[0] <= _GAP_BYTES):
        budget -= gap
        if budget < 0:
            break
        joined.add(position)
    requests: list[Request] = []
    for position, (offset, nbytes) in enumerate(ranges):
        if position - 1 in joined and offset + nbytes - requests[-1].start <= _REQUEST_BYTES:
            last = requests[-1]
            requests[-1] = Request(last.start, offset + nbytes, range(last.ranges.start, position + 1))
        else:
            requests.append(Request(offset, offset + nbytes, range(position, position + 1)))
    return requests


class ObjectSource:
    """A shard in an object store. Holds nothing open; what it reads fails if the object has another size.

    Parameters
    ----------
    path : str
    size : int
    segment : str
    cached : bool
        Whether the node's cache may be used.
    """

    kind = "object"

    def __init__(self, path: str, size: int, segment: str, *, cached: bool = True) -> None:
        self.path = path
        self.size = size
        self.segment = segment
        self._cached = cached

    def check_size(self) -> None:
        pass  # each answer tells the size

    def close(self) -> None:
        pass

    def read(self, offset: int, nbytes: int) -> memoryview:
        (data,) = self.read_many([(offset, nbytes)])
        return data

    def read_many(self, ranges: Sequence[Range]) -> Iterator[memoryview]:
        cache = node_cache() if self._cached else None
        file = None if cache is None else cache.file(self.path, self.segment)
        for part in _parts(ranges):
            if file is None:
                yield from self._fetch(part)
            else:
                yield from self._fetch_or_keep(part, file)

    def _fetch(self, ranges: Sequence[Range]) -> Iterator[memoryview]:
        requests = plan_requests(ranges)
        futures = [client.start(client.get(self.path, each.start, each.stop, size=self.size)) for each in requests]
        try:
            for request, future in zip(requests, futures, strict=True):
                data = self._answer(future)
                for offset, nbytes in ranges[request.ranges.start : request.ranges.stop]:
                    yield data[offset - request.start : offset - request.start + nbytes]
        finally:
            for future in futures:
                future.cancel()  # those that nobody waits for any more

    def _fetch_or_keep(self, ranges: Sequence[Range], file: CachedFile) -> list[memoryview]:
        """From the node's cache, and into it."""
        found = {each: file.get(*each) for each in ranges}
        missing = [each for each, data in found.items() if data is None]
        while missing:
            with file.claims(missing) as mine:
                # Who held them until now may have put them there.
                found.update((each, file.get(*each)) for each in mine)
                wanted = [each for each in mine if found[each] is None]
                for each, data in zip(wanted, self._fetch(wanted), strict=True):
                    found[each] = data
                    file.put(each[0], data)
            missing = [each for each in missing if found[each] is None]
        return [data for data in map(found.__getitem__, ranges) if data is not None]

    def _answer(self, future: Future[Fetched]) -> memoryview:
        try:
            return future.result().data
        except FileNotFoundError:
            raise self.missing() from None
        except ObjectMoved as error:
            raise self.moved(error.args[0]) from None
        except StoreError as error:
            error.segment = self.segment
            raise

    def missing(self) -> SegmentMissingError:
        return SegmentMissingError(
            f"{self.path} is gone: segment {self.segment} was deleted or not copied whole; restore it",
            path=self.path,
            segment=self.segment,
        )

    def moved(self, size: int) -> ShardDamagedError:
        return ShardDamagedError(
            f"{self.path} has {size} bytes, but segment {self.segment} was published with {self.size}: truncated or"
            " overwritten; restore it",
            path=self.path,
            segment=self.segment,
        )


def _parts(ranges: Sequence[Range]) -> Iterator[Sequence[Range]]:
    """Cut a sequence of ranges so that each part fits in memory."""
    first = nbytes = 0
    for position, (_, more) in enumerate(ranges):
        if nbytes + more > _AHEAD_BYTES and position > first:
            yield ranges[first:position]
            first, nbytes = position, 0
        nbytes += more
    yield ranges[first:]


class ObjectStore(Store):
    """Buckets. A path is a URL, as obstore takes it."""

    round_trips: ClassVar[bool] = True
    poll_seconds: ClassVar[tuple[float, float]] = (0.1, 1.0)

    def absolute(self, path: str) -> str:
        where = Place.of(path)
        key = "/".join(part for part in where.key.split("/") if part)
        if where.bucket.endswith("://") or not key or {".", ".."} & set(key.split("/")):
            raise OptionError(f"{path} names no trace; a trace has a URL like s3://bucket/run-1/step_1.trace")
        return f"{where.bucket}/{key}"

    def read(self, path: str, nbytes: int | None = None) -> bytes:
        (found,) = client.run(client.get_all([path], nbytes))
        if isinstance(found, OSError):
            raise found
        return found

    def read_all(self, paths: Sequence[str]) -> list[bytes | OSError]:
        return client.run(client.get_all(paths)) if paths else []

    def read_root(self, trace: str) -> bytes:
        try:
            return self.read(os.path.join(trace, METADATA_NAME))
        except FileNotFoundError:
            pass
        # What the first writer puts there before the root document is no reason to call it something else.
        first = f"{SEGMENTS_NAME}/{METADATA_NAME}"
        if not _is_web(trace) and any(name != first for name, _ in client.run(client.list(trace, limit=2))):
            raise NotATraceError(f"{trace} has objects, but no {METADATA_NAME}: not a trace", path=trace)
        raise TraceNotFoundError(f"no trace at {trace}; it appears when its first writer opens it", path=trace)

    def size(self, path: str) -> int:
        return client.run(client.size(path))

    def open_source(self, path: str, *, kind: SourceKind, size: int, segment: str) -> Source:
        source = ObjectSource(path, size, segment, cached=kind != "pread")
        if kind == "pread":
            # Who asks for this looks for damage, and wants to know at once.
            try:
                actual = self.size(path)
            except FileNotFoundError:
                raise source.missing() from None
            if actual != size:
                raise source.moved(actual)
        return source

    def _objects(self, trace: str) -> dict[str, list[str]]:
        """The objects of each segment, by their names in it. Raises FileNotFoundError where there is nothing."""
        below = os.path.join(trace, SEGMENTS_NAME)
        try:
            names = client.run(client.list(below))
        except StoreError as error:
            if not _is_web(trace):
                raise
            raise StoreError(
                f"{trace}: this web server does not list what it has, which opening a trace takes (WebDAV's PROPFIND);"
                " handles of samples can be read from it all the same",
                path=trace,
                attempts=1,
            ) from error
        if not names:
            raise FileNotFoundError(errno.ENOENT, "no objects", below)
        found: dict[str, list[str]] = {}
        for name, _ in names:
            segment, _, rest = name.partition("/")
            if rest and is_segment_id(segment):
                found.setdefault(segment, []).append(rest)
        return found

    def segments(self, trace: str) -> list[str]:
        return [segment for segment, names in self._objects(trace).items() if METADATA_NAME in names]

    def is_gone(self, trace: str, segment: str) -> bool:
        return not client.run(client.list(segment_path(trace, segment), limit=1))

    def create(self, trace: str, files: Mapping[str, bytes], *, durable: bool) -> bool:
        _check_writable(trace)
        for name, data in files.items():
            if name != METADATA_NAME:
                client.run(client.put(os.path.join(trace, name), data))
        return client.run(client.put_new(os.path.join(trace, METADATA_NAME), files[METADATA_NAME]))

    def begin(self, trace: str, segment: str) -> str:
        _check_writable(trace)
        build = tempfile.mkdtemp(prefix=f"tracefile-{segment}-")
        os.makedirs(os.path.join(build, os.path.dirname(SHARD_NAME)))
        return build

    def publish(self, trace: str, segment: str, build: str, *, durable: bool) -> None:
        target = segment_path(trace, segment)
        document = os.path.join(target, METADATA_NAME)
        with open(os.path.join(build, METADATA_NAME), "rb") as file:
            data = file.read()
        try:
            if os.path.exists(os.path.join(build, SHARD_NAME)):
                client.run(client.put_file(os.path.join(target, SHARD_NAME), os.path.join(build, SHARD_NAME)))
            client.run(client.put(document, data))
        except OSError as error:
            # Either the store has it and the answer was lost, or nothing is to be seen of it.
            try:
                there = self.read(document) == data
            except OSError as second:
                there, known = False, isinstance(second, FileNotFoundError)
            else:
                known = True
            if not there:
                with contextlib.suppress(OSError):
                    self.delete(trace, segment)
                raise PublishError(
                    f"cannot write to {trace}: {error}; {'nothing of' if known else 'perhaps'} this segment was"
                    " published; append its samples again once that is mended",
                    path=trace,
                    segment=segment,
                    errno=error.errno,
                ) from error
        self.discard(build)

    def discard(self, build: str) -> None:
        shutil.rmtree(build, ignore_errors=True)

    def delete(self, trace: str, segment: str) -> None:
        _check_writable(trace)
        target = segment_path(trace, segment)
        # The document first: without one there is no segment.
        client.run(client.delete([os.path.join(target, METADATA_NAME)]))
        rest = client.run(client.list(target))
        client.run(client.delete([os.path.join(target, name) for name, _ in rest]))

    def unfinished(self, trace: str) -> list[str]:
        try:
            return sorted(segment for segment, names in self._objects(trace).items() if METADATA_NAME not in names)
        except (OSError, TraceError):
            return []


def _is_web(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def _check_writable(trace: str) -> None:
    if _is_web(trace):
        raise OptionError(f"{trace} cannot be written to: a web server's traces are for reading")


_store = ObjectStore()
for _scheme in ("s3", "s3a", "gs", "az", "abfs", "abfss", "http", "https"):
    register_store(_scheme, _store)
