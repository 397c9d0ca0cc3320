"""Where a shard file's bytes come from: a mapping of the file, or ``pread``.

Both give the same bytes. A mapping costs no copy and no system call for what is in the page cache, but on a
network file system a server that fails turns a page fault into a signal, and page-sized faults make poor
requests; there ``auto`` takes ``pread``, which fails with an error and reads whole ranges. Published files
never change, so a file that has another size than its metadata says is damaged; the size is checked at each
read, because touching a mapping beyond the end of its file kills the process.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from tracefile.errors import OptionError, SegmentMissingError, ShardDamagedError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SourceKind = Literal["auto", "mmap", "pread"]

#: ``pread`` merges ranges that lie closer than this, and reads at most so much at once.
MERGE_GAP_BYTES = 64 * 1024
MERGED_READ_BYTES = 4 * 1024 * 1024
#: How many reads ahead ``pread`` has the file system fetch, so that their latencies overlap.
READS_AHEAD = 8

_NETWORK_FILE_SYSTEMS = {
    "9p", "afs", "beegfs", "ceph", "cifs", "cvmfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
    "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "vboxsf", "wekafs",
}  # fmt: skip


class Source(Protocol):
    """Bytes of one shard file."""

    kind: str
    size: int

    def check_size(self) -> None:
        """Raise :class:`ShardDamagedError` if the file no longer has the size that it had when opened."""
        ...

    def read(self, offset: int, nbytes: int) -> memoryview:
        """The bytes ``[offset, offset + nbytes)``, which must lie within the file."""
        ...

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> Iterator[memoryview]:
        """The bytes of several ``(offset, nbytes)``, in order, each valid as long as somebody holds it."""
        ...

    def close(self) -> None: ...


def check_source_kind(kind: str) -> SourceKind:
    if kind not in get_args(SourceKind):
        raise OptionError(f"source must be one of {', '.join(get_args(SourceKind))}, not {kind!r}")
    return kind  # type: ignore[return-value]


def file_system_type(path: str) -> str:
    """The type of the file system that holds ``path`` as Linux names it; ``""`` where that can't be known."""
    return _type_of_device(os.stat(path).st_dev)


@functools.lru_cache(maxsize=64)
def _type_of_device(device: int) -> str:
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                mount, _, file_system = line.partition(" - ")
                if mount.split(" ", 3)[2] == wanted:
                    return file_system.split(" ", 1)[0]
    except OSError:
        pass
    return ""


def is_network_file_system(fs_type: str) -> bool:
    """Whether to read a file system of this type with ``pread``; unknown ones count as network.

    Examples
    --------
    >>> [is_network_file_system(t) for t in ("ext4", "tmpfs", "nfs4", "fuse.sshfs", "lustre", "")]
    [False, False, True, True, True, True]
    """
    return fs_type in _NETWORK_FILE_SYSTEMS or fs_type.startswith("fuse") or not fs_type


def is_shared(directory: str) -> bool:
    """Whether other hosts may write to what a directory's file system shows, or nobody knows."""
    try:
        return is_network_file_system(file_system_type(directory))
    except OSError:
        return True


def open_source(path: str, *, kind: SourceKind, size: int, segment: str) -> Source:
    """Open the shard file at ``path``, which must have ``size`` bytes.

    Raises
    ------
    SegmentMissingError
        There is no such file.
    ShardDamagedError
        It has another size.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise SegmentMissingError(
            f"{path} is gone: segment {segment} was deleted or not copied whole; restore it",
            path=path,
            segment=segment,
        ) from None
    except OSError as error:
        raise _unreadable(path, segment, error) from error
    try:
        if kind == "auto":
            kind = "pread" if is_network_file_system(_type_of_device(os.fstat(fd).st_dev)) else "mmap"
        _check_size(os.fstat(fd).st_size, size, path, segment)
        return (MmapSource if kind == "mmap" else PreadSource)(fd, path, size, segment)
    except BaseException:
        os.close(fd)
        raise


def _unreadable(path: str, segment: str, error: OSError) -> StoreError:
    return StoreError(
        f"{path} cannot be read ({error.strerror or error}); see whether its file server answers and lets you, or"
        " restore the file from a copy",
        path=path,
        segment=segment,
        errno=error.errno,
    )


def _check_size(actual: int, size: int, path: str, segment: str) -> None:
    if actual != size:
        raise ShardDamagedError(
            f"{path} has {actual} bytes, but segment {segment} was published with {size}: truncated or overwritten;"
            " restore the file",
            path=path,
            segment=segment,
        )


class MmapSource:
    """A read-only mapping of the file."""

    kind = "mmap"

    def __init__(self, fd: int, path: str, size: int, segment: str) -> None:
        self.path = path
        self.size = size
        self.segment = segment
        self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        self._view = memoryview(self._map)
        os.close(fd)  # the mapping keeps a duplicate

    def check_size(self) -> None:
        _check_size(self._map.size(), self.size, self.path, self.segment)

    def read(self, offset: int, nbytes: int) -> memoryview:
        return self._view[offset : offset + nbytes]

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> Iterator[memoryview]:
        view = self._view
        for offset, nbytes in ranges:
            yield view[offset : offset + nbytes]

    def close(self) -> None:
        # Views that a reader still holds keep the mapping; it goes with the last of them.
        self._view.release()
        with contextlib.suppress(BufferError):
            self._map.close()


class PreadSource:
    """Positioned reads, neighbouring ranges merged."""

    kind = "pread"

    def __init__(self, fd: int, path: str, size: int, segment: str) -> None:
        # Which ranges are wanted is known here; what the kernel would guess beyond them crosses the network in vain.
        _advise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        self.fd = fd
        self.path = path
        self.size = size
        self.segment = segment

    def check_size(self) -> None:
        try:
            size = os.fstat(self.fd).st_size
        except OSError as error:
            raise _unreadable(self.path, self.segment, error) from error
        _check_size(size, self.size, self.path, self.segment)

    def close(self) -> None:
        if self.fd >= 0:
            with contextlib.suppress(OSError):  # a file server that is gone; nothing was written here
                os.close(self.fd)
            self.fd = -1

    def read(self, offset: int, nbytes: int) -> memoryview:
        data = self._pread(offset, nbytes)
        while len(data) < nbytes:  # a network file system may return less than asked
            more = self._pread(offset + len(data), nbytes - len(data))
            if not more:
                self.check_size()
                raise ShardDamagedError(
                    f"{self.path}: read {len(data)} of {nbytes} bytes at {offset}; the file system returned no more",
                    path=self.path,
                    segment=self.segment,
                )
            data += more
        return memoryview(data)

    def _pread(self, offset: int, nbytes: int) -> bytes:
        try:
            return os.pread(self.fd, nbytes, offset)
        except OSError as error:
            raise _unreadable(self.path, self.segment, error) from error

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> Iterator[memoryview]:
        reads = list(merge_ranges(ranges))
        for number, (first, last, start, stop) in enumerate(reads):
            for _, _, low, high in reads[number + READS_AHEAD if number else 1 : number + READS_AHEAD + 1]:
                _advise(self.fd, low, high - low, os.POSIX_FADV_WILLNEED)
            block = self.read(start, stop - start)
            for offset, nbytes in ranges[first:last]:
                yield block[offset - start : offset - start + nbytes]


def _advise(fd: int, offset: int, nbytes: int, advice: int) -> None:
    with contextlib.suppress(OSError):  # advice; a file system may not take it
        os.posix_fadvise(fd, offset, nbytes, advice)


def merge_ranges(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """Group consecutive ``(offset, nbytes)`` ranges into single reads.

    Yields
    ------
    (first, last, start, stop)
        Ranges ``first`` to ``last - 1`` lie in the bytes ``[start, stop)``.

    Examples
    --------
    >>> list(merge_ranges([(64, 100), (164, 100), (10_000_000, 5)]))
    [(0, 2, 64, 264), (2, 3, 10000000, 10000005)]
    """
    first = 0
    while first < len(ranges):
        start, nbytes = ranges[first]
        stop = start + nbytes
        last = first + 1
        while last < len(ranges):
            offset, nbytes = ranges[last]
            low, high = min(start, offset), max(stop, offset + nbytes)
            if offset > stop + MERGE_GAP_BYTES or offset + nbytes + MERGE_GAP_BYTES < start:
                break
            if high - low > MERGED_READ_BYTES:
                break
            start, stop, last = low, high, last + 1
        yield first, last, start, stop
        first = last


class BufferSource:
    """Memory that others share: had with the first read, and again once it was let go.

    Parameters
    ----------
    get : callable
        Gives the bytes, to this source.
    path, size, segment
        As for :func:`open_source`.
    """

    kind = "buffer"

    def __init__(self, get: Callable[[BufferSource], memoryview], path: str, size: int, segment: str) -> None:
        self.path = path
        self.size = size
        self.segment = segment
        self._get = get
        self._view: memoryview | None = None

    def _bytes(self) -> memoryview:
        view = self._view
        if view is None:
            view = self._get(self)
            _check_size(len(view), self.size, self.path, self.segment)
            self._view = view
        return view

    def check_size(self) -> None:
        self._bytes()

    def read(self, offset: int, nbytes: int) -> memoryview:
        return self._bytes()[offset : offset + nbytes]

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> Iterator[memoryview]:
        view = self._bytes()
        for offset, nbytes in ranges:
            yield view[offset : offset + nbytes]

    def let_go(self) -> None:
        """Hold the memory no longer; reads that are under way do."""
        self._view = None

    close = let_go
