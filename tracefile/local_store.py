"""A trace as a directory, on a disk of this host or one that hosts share.

Commit is a rename: a writer builds a segment in the staging directory beside the trace and renames it into
``segments/``; deleting is the rename back. A trace as a whole is renamed away before it is removed, too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from typing import TYPE_CHECKING

from tracefile.errors import NotATraceError, PublishError, TraceNotFoundError
from tracefile.format import (
    METADATA_NAME,
    SEGMENTS_NAME,
    SHARD_NAME,
    is_segment_id,
    new_segment_id,
    segment_path,
    staging_path,
)
from tracefile.reclaim import Leftover, ReclaimingStore, deleted_under_writer, is_of
from tracefile.source import is_shared, open_source
from tracefile.store import register_store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


#: In the staging directory: what was taken aside, and what is being removed.
_ASIDE, _DELETED = "aside-", "deleted-"
#: For so long an NFS client may show a directory as it was (``acdirmax``).
_SHARED_SETTLE_SECONDS = 60.0


class LocalStore(ReclaimingStore):
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
            except OSError:
                # Another writer was first. By what is there, because file systems say so in different ways: SFTP has
                # one error for all.
                if not os.path.exists(os.path.join(trace, METADATA_NAME)):
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
        # Into the directory that was looked into: a trace that is deleted, and made again, meanwhile is another.
        directory = self._open_segments(trace, build)
        try:
            os.rename(build, segment, dst_dir_fd=directory)
        except OSError:
            # A network file system may have done it and lost the answer; the name is ours alone.
            if not os.path.exists(os.path.join(target, METADATA_NAME)):
                raise
        finally:
            os.close(directory)
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

    def _open_segments(self, trace: str, build: str) -> int:
        """A descriptor of the directory that a segment of this very trace goes to."""
        directory = -1
        try:
            directory = os.open(os.path.join(trace, SEGMENTS_NAME), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            root = _read_at(f"../{METADATA_NAME}", directory)
            if is_of(self.read(os.path.join(build, METADATA_NAME)), root):
                return directory
        except BaseException as error:
            if directory >= 0:
                os.close(directory)
            if not isinstance(error, FileNotFoundError) or os.path.lexists(trace):
                raise
            raise deleted_under_writer(trace, replaced=False) from None
        os.close(directory)
        raise deleted_under_writer(trace, replaced=True)

    def discard(self, build: str) -> None:
        shutil.rmtree(build, ignore_errors=True)

    def delete(self, trace: str, segment: str) -> None:
        self.delete_all(trace, [segment])

    def delete_all(self, trace: str, segments: Sequence[str]) -> None:
        staging = staging_path(trace)
        # Away as a whole first: what is deleted file by file would be seen damaged.
        try:
            for segment in segments:
                _rename_staged(trace, segment_path(trace, segment), os.path.join(staging, _DELETED + segment))
        finally:
            for segment in segments:
                _remove_segment(os.path.join(staging, _DELETED + segment))
            self.leave(trace)

    def settle(self, trace: str) -> float:
        return _SHARED_SETTLE_SECONDS if is_shared(trace) else self.settle_seconds

    def set_aside(self, trace: str, segment: str) -> str:
        name = f"{_ASIDE}{segment}.{new_segment_id()}"
        aside = os.path.join(staging_path(trace), name)
        return name if _rename_staged(trace, segment_path(trace, segment), aside) else ""

    def aside(self, trace: str) -> list[str]:
        names = (name.removeprefix(_ASIDE) for name in self.unfinished(trace) if name.startswith(_ASIDE))
        return sorted({name.partition(".")[0] for name in names})

    def _aside(self, trace: str, segment: str) -> list[str]:
        return [name for name in self.unfinished(trace) if name.partition(".")[0] == _ASIDE + segment]

    def bring_back(self, trace: str, segment: str) -> bool:
        target = segment_path(trace, segment)
        for attempt in range(2):
            with contextlib.suppress(OSError):
                # An NFS client asks the server about what is opened, and not about what is looked up.
                os.close(os.open(os.path.join(target, METADATA_NAME), os.O_RDONLY | os.O_CLOEXEC))
                return True
            for name in self._aside(trace, segment) if attempt == 0 else ():
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    os.rename(os.path.join(staging_path(trace), name), target)
        return False

    def drop(self, trace: str, segment: str, mark: str = "") -> bool:
        staging = staging_path(trace)
        names = [mark] if mark else self._aside(trace, segment)
        deleted = os.path.join(staging, _DELETED + segment)
        if not any(_rename_staged(trace, os.path.join(staging, name), deleted) for name in names):
            return False
        _remove_segment(deleted)
        self.leave(trace)
        return True

    def changed(self, path: str) -> float:
        return os.stat(path).st_mtime

    def leftovers(self, trace: str) -> list[Leftover]:
        found = []
        for name in self.unfinished(trace):
            if name.startswith(_ASIDE):
                continue
            nbytes, changed = _measure(os.path.join(staging_path(trace), name))
            if changed:  # else it was published or removed since
                found.append(Leftover(name, nbytes, changed, name.startswith(_DELETED)))
        return found

    def remove_leftover(self, trace: str, name: str) -> None:
        shutil.rmtree(os.path.join(staging_path(trace), name), ignore_errors=True)

    def traces(self, directory: str) -> list[str]:
        with os.scandir(directory) as entries:
            return sorted(
                entry.path
                for entry in entries
                if not entry.name.startswith(".")
                and os.path.isfile(os.path.join(entry.path, METADATA_NAME))
                and os.path.isdir(os.path.join(entry.path, SEGMENTS_NAME))
            )

    def delete_trace(self, trace: str) -> None:
        parent, name = os.path.split(os.path.realpath(trace))
        staging = staging_path(trace)
        away = os.path.join(parent, f".{name}.{_DELETED}{new_segment_id()}")
        os.rename(os.path.join(parent, name), away)
        if os.path.islink(trace):
            os.unlink(trace)
        _remove_tree(away)
        with contextlib.suppress(OSError):  # writers build there, and will find that the trace is gone
            os.rmdir(staging)

    def sweep(self, directory: str, before: float) -> list[str]:
        names = set()
        for name in filter(lambda name: name.startswith("."), os.listdir(directory)):
            trace, _, rest = name[1:].rpartition(f".{_DELETED}")
            if trace and is_segment_id(rest):
                _remove_tree(os.path.join(directory, name))
                names.add(trace)
            trace = name[1:].removesuffix(".staging")
            path = os.path.join(directory, trace)
            if name == f".{trace}.staging" and not os.path.lexists(path):
                for leftover in self.leftovers(path):
                    if leftover.finished or leftover.changed < before:
                        self.remove_leftover(path, leftover.name)
                        names.add(trace)
                for segment in self.aside(path):
                    self.drop(path, segment)
                    names.add(trace)
                self.leave(path)
        return sorted(names)

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


def _read_at(name: str, directory: int) -> bytes:
    with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory), "rb") as file:
        return file.read()


def _rename_staged(trace: str, path: str, target: str) -> bool:
    """Rename to a place in the staging directory; whether it was there."""
    for _ in range(100):
        try:
            os.rename(path, target)
        except (FileNotFoundError, NotADirectoryError):
            if not os.path.lexists(path):
                return False
            _make_staged(trace, os.path.dirname(target))  # who closes removes it while it is empty
        else:
            return True
    raise OSError(errno.ENOENT, "the staging directory keeps vanishing", os.path.dirname(target))


def _remove_segment(path: str) -> None:
    """Remove a segment's directory: what is known to be there by its name, which takes a few calls, then the rest."""
    for name in (METADATA_NAME, SHARD_NAME):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(path, name))
    below = os.path.dirname(SHARD_NAME)
    while below:
        with contextlib.suppress(OSError):
            os.rmdir(os.path.join(path, below))
        below = os.path.dirname(below)
    try:
        os.rmdir(path)
    except FileNotFoundError:
        pass
    except OSError:
        shutil.rmtree(path, ignore_errors=True)


def _remove_tree(path: str) -> None:
    for _ in range(10):
        shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(path):  # else a writer had it open, and has put a segment there since
            return


def _measure(path: str) -> tuple[int, float]:
    """The bytes below a directory, and when the last of it changed."""
    nbytes, changed = 0, 0.0
    for parent, _, files in os.walk(path):
        for each in (parent, *(os.path.join(parent, name) for name in files)):
            with contextlib.suppress(OSError):
                found = os.stat(each)
                changed = max(changed, found.st_mtime)
                nbytes += 0 if each == parent else found.st_size
    return nbytes, changed


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
