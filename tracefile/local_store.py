"""A trace as a directory, on a disk of this host or one that hosts share.

Commit is a rename: a writer builds a segment in the staging directory beside the trace and renames it into
``segments/``; deleting is the rename back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from typing import TYPE_CHECKING

from tracefile.errors import NotATraceError, PublishError, TraceNotFoundError
from tracefile.format import METADATA_NAME, SEGMENTS_NAME, SHARD_NAME, new_segment_id, segment_path, staging_path
from tracefile.source import open_source
from tracefile.store import Store, register_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracefile.source import Source, SourceKind


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


class LocalStore(Store):
    """Directories."""

    def absolute(self, path: str) -> str:
        return os.path.abspath(path.removeprefix("file://"))

    def read(self, path: str, nbytes: int | None = None) -> bytes:
        with open(path, "rb") as file:
            return file.read() if nbytes is None else file.read(nbytes)

    def read_root(self, trace: str) -> bytes:
        where = os.path.join(trace, METADATA_NAME)
        for _ in range(2):
            try:
                return self.read(where)
            except (FileNotFoundError, NotADirectoryError):
                pass
            try:
                mode = os.stat(trace).st_mode
            except (FileNotFoundError, NotADirectoryError):
                raise TraceNotFoundError(
                    f"no trace at {trace}; it appears when its first writer opens it", path=trace
                ) from None
            if not stat.S_ISDIR(mode):
                raise NotATraceError(f"{trace} is a file; a trace is a directory", path=trace)
            # A directory: the first writer may have renamed it into place between the two looks, so look again.
        raise NotATraceError(f"{trace} is a directory without {METADATA_NAME}: not a trace", path=trace)

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def open_source(self, path: str, *, kind: SourceKind, size: int, segment: str) -> Source:
        return open_source(path, kind=kind, size=size, segment=segment)

    def segments(self, trace: str) -> list[str]:
        with os.scandir(os.path.join(trace, SEGMENTS_NAME)) as entries:
            return [entry.name for entry in entries]

    def is_gone(self, trace: str, segment: str) -> bool:
        return not os.path.lexists(segment_path(trace, segment))

    def is_vacant(self, trace: str) -> bool:
        return os.path.isdir(trace) and not os.listdir(trace)  # made beforehand

    def create(self, trace: str, files: Mapping[str, bytes], *, durable: bool) -> bool:
        build = os.path.join(staging_path(trace), f"root-{new_segment_id()}")
        try:
            for name, data in files.items():
                path = os.path.join(build, name)
                if not os.path.isdir(os.path.dirname(path)):
                    _make_staged(trace, os.path.dirname(path))
                write_file(path, data, durable)
            if durable:
                _fsync_directories(build)
            try:
                os.rename(build, os.path.realpath(trace))
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return False
            if durable:
                fsync_directory(os.path.dirname(os.path.realpath(trace)))
        finally:
            shutil.rmtree(build, ignore_errors=True)
            self.leave(trace)
        return True

    def begin(self, trace: str, segment: str) -> str:
        build = os.path.join(staging_path(trace), segment)
        try:
            _make_staged(trace, os.path.join(build, os.path.dirname(SHARD_NAME)))
        except BaseException:
            self.discard(build)
            raise
        return build

    def publish(self, trace: str, segment: str, build: str, *, durable: bool) -> None:
        target = segment_path(trace, segment)
        if durable:
            _fsync_directories(build)
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
                    f"segment {segment} of {trace} is visible, but the file system did not confirm that it would"
                    f" survive a crash ({error.strerror or error}); append its samples again",
                    path=trace,
                    segment=segment,
                    errno=error.errno,
                ) from error

    def discard(self, build: str) -> None:
        shutil.rmtree(build, ignore_errors=True)

    def delete(self, trace: str, segment: str) -> None:
        # Away as a whole first: what is deleted file by file would be seen damaged.
        aside = os.path.join(staging_path(trace), f"deleted-{segment}")
        _make_staged(trace, staging_path(trace))
        try:
            os.rename(segment_path(trace, segment), aside)
        except FileNotFoundError:
            pass
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            self.leave(trace)

    def unfinished(self, trace: str) -> list[str]:
        try:
            return sorted(os.listdir(staging_path(trace)))
        except OSError:
            return []

    def leave(self, trace: str) -> None:
        with contextlib.suppress(OSError):  # other writers build there, or it is gone already
            os.rmdir(staging_path(trace))

    def watched_directory(self, trace: str) -> str | None:
        return os.path.join(trace, SEGMENTS_NAME)


def _fsync_directories(root: str) -> None:
    for directory, _, _ in os.walk(root, topdown=False):
        fsync_directory(directory)


def _make_staged(trace: str, directory: str) -> None:
    """Make a directory below the trace's staging directory."""
    for _ in range(100):
        try:
            os.makedirs(directory, exist_ok=directory == staging_path(trace))
        except FileNotFoundError:
            continue  # another writer, closing, removed the empty staging directory in between
        return
    raise OSError(errno.ENOENT, "the staging directory keeps vanishing", staging_path(trace))


_store = LocalStore()
for _scheme in ("", "file"):
    register_store(_scheme, _store)
