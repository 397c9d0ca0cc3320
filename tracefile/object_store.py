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
from tracefile.object_reclaim import ObjectReclaim
from tracefile.reclaim import deleted_under_writer, is_of
from tracefile.store import register_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from tracefile.node_cache import CachedFile
    from tracefile.object_client import Fetched, Listed
    from tracefile.source import Source, SourceKind

Range = tuple[int, int]

#: In a directory that a segment is built in: where its shard was uploaded to, and that nothing but its document is to
#: be published.
_UPLOADED, _CHECKED = "uploaded", "checked"

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


class ObjectStore(ObjectReclaim):
    """Buckets. A path is a URL, as obstore takes it."""

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
        if not _is_web(trace) and any(each.name != first for each in client.run(client.list(trace, limit=2))):
            raise NotATraceError(f"{trace} has objects, but no {METADATA_NAME}: not a trace", path=trace)
        raise TraceNotFoundError(f"no trace at {trace}; it appears when its first writer opens it", path=trace)

    def size(self, path: str) -> int:
        return client.run(client.size(path))

    def sizes(self, paths: Sequence[str]) -> list[int | OSError]:
        return client.run(client.sizes(paths)) if paths else []

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

    def objects(self, trace: str) -> dict[str, list[Listed]]:
        below = os.path.join(trace, SEGMENTS_NAME)
        try:
            listed = client.run(client.list(below))
        except StoreError as error:
            if not _is_web(trace):
                raise
            raise StoreError(
                f"{trace}: this web server does not list what it has, which opening a trace takes (WebDAV's PROPFIND);"
                " handles of samples can be read from it all the same",
                path=trace,
                attempts=1,
            ) from error
        if not listed:
            raise FileNotFoundError(errno.ENOENT, "no objects", below)
        found: dict[str, list[Listed]] = {}
        for each in listed:
            segment, _, rest = each.name.partition("/")
            if rest and is_segment_id(segment):
                found.setdefault(segment, []).append(each._replace(name=rest))
        return found

    def segments(self, trace: str) -> list[str]:
        return [segment for segment, found in self.objects(trace).items() if _is_segment(found)]

    def is_gone(self, trace: str, segment: str) -> bool:
        # Without a document there is no segment, whatever else is left of it.
        return bool(self.gone(trace, [segment]))

    def gone(self, trace: str, segments: Sequence[str]) -> set[str]:
        there = client.run(client.exist([os.path.join(segment_path(trace, each), METADATA_NAME) for each in segments]))
        return {segment for segment, exists in zip(segments, there, strict=True) if not exists}

    def create(self, trace: str, files: Mapping[str, bytes], *, durable: bool) -> bool:
        self.check_deletable(trace)
        self.check_vacant(trace)
        for name, data in files.items():
            if name != METADATA_NAME:
                client.run(client.put(os.path.join(trace, name), data))
        return client.run(client.put_new(os.path.join(trace, METADATA_NAME), files[METADATA_NAME]))

    def begin(self, trace: str, segment: str) -> str:
        self.check_deletable(trace)
        build = tempfile.mkdtemp(prefix=f"tracefile-{segment}-")
        os.makedirs(os.path.join(build, os.path.dirname(SHARD_NAME)))
        return build

    def upload(self, trace: str, segment: str, build: str) -> None:
        document, root = _read(build, METADATA_NAME), client.start(client.get(os.path.join(trace, METADATA_NAME)))
        try:
            if os.path.exists(os.path.join(build, SHARD_NAME)):
                target = segment_path(trace, segment)
                with open(os.path.join(build, _UPLOADED), "w") as file:
                    file.write(target)
                client.run(client.put_file(os.path.join(target, SHARD_NAME), os.path.join(build, SHARD_NAME)))
                os.unlink(os.path.join(build, SHARD_NAME))
            _check_of(trace, document, root)
        except OSError as error:
            self.discard(build)
            if isinstance(error, PublishError):
                raise
            raise _publish_error(trace, segment, error, "nothing of") from error
        with open(os.path.join(build, _CHECKED), "w"):
            pass

    def publish(self, trace: str, segment: str, build: str, *, durable: bool) -> None:
        if not os.path.exists(os.path.join(build, _CHECKED)):
            self.upload(trace, segment, build)
        data, url = _read(build, METADATA_NAME), os.path.join(segment_path(trace, segment), METADATA_NAME)
        try:
            client.run(client.put(url, data))
        except OSError as error:
            # Either the store has it and the answer was lost, or nothing is to be seen of it.
            try:
                there = self.read(url) == data
            except OSError as second:
                there, known = False, isinstance(second, FileNotFoundError)
            else:
                known = True
            if not there:
                with contextlib.suppress(OSError):
                    self.delete(trace, segment)
                raise _publish_error(trace, segment, error, "nothing of" if known else "perhaps") from error
        try:
            _check_of(trace, data, client.start(client.get(os.path.join(trace, METADATA_NAME))))
        except PublishError:
            with contextlib.suppress(OSError):
                self.delete(trace, segment)
            raise
        except OSError:
            pass  # a moment ago the trace was there; what is deleted later does not count for this segment
        _remove_tree(build)

    def discard(self, build: str) -> None:
        with contextlib.suppress(OSError):
            target = _read(build, _UPLOADED).decode()
            if not client.run(client.exist([os.path.join(target, METADATA_NAME)]))[0]:  # as far as is known
                client.run(client.delete([os.path.join(target, SHARD_NAME)]))
        _remove_tree(build)

    def delete(self, trace: str, segment: str) -> None:
        self.check_deletable(trace)
        target = segment_path(trace, segment)
        # The document first: without one there is no segment.
        client.run(client.delete([os.path.join(target, METADATA_NAME)]))
        rest = client.run(client.list(target))
        client.run(client.delete([os.path.join(target, each.name) for each in rest]))

    def unfinished(self, trace: str) -> list[str]:
        try:
            return sorted(segment for segment, found in self.objects(trace).items() if not _is_segment(found))
        except (OSError, TraceError):
            return []

    def check_deletable(self, trace: str) -> None:
        if _is_web(trace):
            raise OptionError(f"{trace} cannot be written to: a web server's traces are for reading")


def _is_segment(objects: Sequence[Listed]) -> bool:
    return any(each.name == METADATA_NAME for each in objects)


def _read(build: str, name: str) -> bytes:
    with open(os.path.join(build, name), "rb") as file:
        return file.read()


def _remove_tree(build: str) -> None:
    shutil.rmtree(build, ignore_errors=True)


def _check_of(trace: str, document: bytes, root: Future[Fetched]) -> None:
    """See that a segment's trace is there still, by its root document that was asked for."""
    try:
        found = bytes(root.result().data)
    except FileNotFoundError:
        raise deleted_under_writer(trace, replaced=False) from None
    if not is_of(document, found):
        raise deleted_under_writer(trace, replaced=True)


def _publish_error(trace: str, segment: str, error: OSError, how_much: str) -> PublishError:
    return PublishError(
        f"cannot write to {trace}: {error}; {how_much} this segment was published; append its samples again once that"
        " is mended",
        path=trace,
        segment=segment,
        errno=error.errno,
    )


def _is_web(path: str) -> bool:
    return path.startswith(("http://", "https://"))


_store = ObjectStore()
for _scheme in ("s3", "s3a", "gs", "az", "abfs", "abfss", "http", "https"):
    register_store(_scheme, _store)
