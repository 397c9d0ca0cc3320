"""What was fetched from object stores, kept in a directory of the node for all of its processes.

A file for each range that somebody wanted, complete from the moment that it has its name, with a checksum at its end
so that a damaged one is fetched again. Published shards never change, so nothing here ever gets old. Locks are for
economy alone: who fetches a range holds a lock on its first byte (of an empty file, per segment) so that others wait
rather than fetch it too; they go with their process, and where there are none everybody fetches. The least recently
used files go when there are too many; a reader finds them gone and fetches.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import itertools
import os
import struct
import time
import warnings
from typing import TYPE_CHECKING

from crc32c import crc32c

from tracefile.settings import on_change, settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Range = tuple[int, int]

_CRC = struct.Struct("<I")
_FLOCK = "hhqqi"
_LOCK_NAME = "lock"
_PARTIAL_SUFFIX = ".partial"
#: What a killed process left half written goes after this time.
_PARTIAL_SECONDS = 600
#: A file's time of use is exact to this; writing it at each use would cost as much as reading.
_USE_SECONDS = 30
#: How long to wait for another process to fetch something before doing so oneself.
_WAIT_SECONDS = 30.0
_POLL_SECONDS = (0.002, 0.05)
#: A process looks at what there is after it has added so large a part of the limit, and then makes so much room.
_LOOK_SHARE = 64
_ROOM_SHARE = 8
_FILE_BYTES = 4096  # what a file takes at least
_names = itertools.count()


class NodeCache:
    """A directory of cached ranges.

    Parameters
    ----------
    directory : str
    limit : int
        Bytes.
    """

    def __init__(self, directory: str, limit: int) -> None:
        self.directory = directory
        self.limit = limit
        self._added = limit  # so that a process looks at its first addition
        self._warned = False

    def file(self, path: str, segment: str) -> CachedFile:
        """What is kept of a segment's shard at ``path``."""
        name = hashlib.sha256(path.encode()).hexdigest()[:16]
        return CachedFile(self, os.path.join(self.directory, f"{segment}-{name}"))

    def added(self, nbytes: int) -> None:
        self._added += max(nbytes, _FILE_BYTES)
        if self._added * _LOOK_SHARE >= self.limit:
            self._added = 0
            self.trim()

    def failed(self, error: OSError) -> None:
        """Say once that nothing can be kept; reading goes on without."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"the node cache cannot be used ({error}); reading goes on without it", stacklevel=2)

    def trim(self) -> None:
        """Remove the least recently used files until there is some room. One process does at a time."""
        try:
            fd = os.open(os.path.join(self.directory, _LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return
        except OSError:
            pass  # no locks here: two at once do no harm
        try:
            files, total = self._files(), 0
            total = sum(nbytes for _, nbytes, _ in files)
            if total <= self.limit - self.limit // _LOOK_SHARE:
                return
            for _, nbytes, path in sorted(files):
                with contextlib.suppress(OSError):
                    os.unlink(path)
                total -= nbytes
                if total <= self.limit - self.limit // _ROOM_SHARE:
                    break
        finally:
            os.close(fd)

    def _files(self) -> list[tuple[float, int, str]]:
        """Time of use, bytes and path of each; removes what killed processes left, and empty directories."""
        found = []
        now = time.time()
        for directory in _entries(self.directory):
            held = 0
            for entry in _entries(directory.path):
                if entry.name == _LOCK_NAME:
                    continue
                try:
                    status = entry.stat()
                    if entry.name.endswith(_PARTIAL_SUFFIX) and now - status.st_mtime > _PARTIAL_SECONDS:
                        os.unlink(entry.path)
                        continue
                except OSError:
                    continue
                held += 1
                found.append((status.st_mtime, -(-status.st_size // _FILE_BYTES) * _FILE_BYTES, entry.path))
            if not held and directory.is_dir():
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(directory.path, _LOCK_NAME))
                with contextlib.suppress(OSError):
                    os.rmdir(directory.path)
        return found


def _entries(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:
        return []


class CachedFile:
    """The cached ranges of one shard."""

    def __init__(self, cache: NodeCache, directory: str) -> None:
        self._cache = cache
        self._directory = directory

    def _path(self, offset: int, nbytes: int) -> str:
        return os.path.join(self._directory, f"{offset}-{nbytes}")

    def get(self, offset: int, nbytes: int) -> memoryview | None:
        """A range, if it is here whole."""
        path = self._path(offset, nbytes)
        try:
            with open(path, "rb", buffering=0) as file:
                data = memoryview(file.read())
                modified = os.fstat(file.fileno()).st_mtime
        except OSError:
            return None
        payload = data[:nbytes]
        if len(data) != nbytes + _CRC.size or crc32c(payload) != _CRC.unpack_from(data, nbytes)[0]:
            with contextlib.suppress(OSError):
                os.unlink(path)
            return None
        if time.time() - modified > _USE_SECONDS:
            with contextlib.suppress(OSError):
                os.utime(path)
        return payload

    def put(self, offset: int, data: memoryview) -> None:
        """Keep a range, if that can be."""
        if len(data) > self._cache.limit:
            return
        path = self._path(offset, len(data))
        partial = f"{path}.{os.getpid()}-{next(_names)}{_PARTIAL_SUFFIX}"
        try:
            os.makedirs(self._directory, exist_ok=True)
            try:
                with open(partial, "xb") as file:
                    file.write(data)
                    file.write(_CRC.pack(crc32c(data)))
                os.replace(partial, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(partial)
                raise
        except FileNotFoundError:
            return  # the directory was empty a moment ago, and another process removed it
        except OSError as error:
            self._cache.failed(error)
            return
        self._cache.added(len(data) + _CRC.size)

    @contextlib.contextmanager
    def claims(self, ranges: Sequence[Range]) -> Iterator[list[Range]]:
        """Claim ranges for fetching, all that nobody else is fetching.

        Yields
        ------
        list of (int, int)
            At least one, for which it may be waited; once that takes too long, all.
        """
        try:
            os.makedirs(self._directory, exist_ok=True)
            fd = os.open(os.path.join(self._directory, _LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._cache.failed(error)
            yield list(ranges)
            return
        try:
            deadline = time.monotonic() + _WAIT_SECONDS
            pause = _POLL_SECONDS[0]
            while not (mine := [each for each in ranges if _lock(fd, each[0])]):
                if time.monotonic() > deadline:
                    mine = list(ranges)
                    break
                time.sleep(pause)
                pause = min(2 * pause, _POLL_SECONDS[1])
            yield mine
        finally:
            _unlock(fd)
            os.close(fd)


def _lock(fd: int, position: int) -> bool:
    """Lock one byte of a file for this opening of it. ``True``, too, where there are no such locks."""
    if not hasattr(fcntl, "F_OFD_SETLK"):
        return True
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, position, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True
    return True


def _unlock(fd: int) -> None:
    """Unlock all: closing does it too, but not while a forked child has the file open."""
    if hasattr(fcntl, "F_OFD_SETLK"):
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))


@functools.lru_cache(maxsize=1)
def _cache_at(directory: str, limit: int) -> NodeCache:
    return NodeCache(directory, limit)


def node_cache() -> NodeCache | None:
    """The cache that the settings name."""
    now = settings()
    if now.node_cache is None or not now.node_cache_bytes:
        return None
    return _cache_at(now.node_cache, now.node_cache_bytes)


on_change(_cache_at.cache_clear)
