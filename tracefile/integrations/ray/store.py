"""The store of ``ray://`` traces: segments as objects in the object stores of a Ray cluster's nodes."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import ray
import ray.cloudpickle

from tracefile.errors import NotATraceError, OptionError, SegmentMissingError, StoreError, TraceNotFoundError
from tracefile.forking import tell_after_fork
from tracefile.format import METADATA_NAME, SEGMENTS_NAME, SHARD_NAME
from tracefile.integrations.ray import keeper as keeper_module
from tracefile.integrations.ray.handle import fetch, handles, timeout_seconds
from tracefile.source import BufferSource
from tracefile.store import Store, register_store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracefile.integrations.ray.handle import SegmentHandle
    from tracefile.integrations.ray.keeper import Found
    from tracefile.source import Source, SourceKind

_SCHEME = "ray://"
#: Of the keeper, in the Ray namespace of the same name.
ACTOR_NAME = "tracefile"


class RayStore(Store):
    """A Ray cluster. Who uses it must be part of one: the driver, a task or an actor.

    A process sees of a trace what it holds references to, which every lazy tensor has, and what is kept by name.
    """

    round_trips = True
    poll_seconds = (0.02, 0.5)  # each look asks the keeper

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keeper: Any = None
        self._cluster: tuple[str, str] | None = None  # which the keeper is of
        self._forked = False
        self._kept: set[str] = set()  # of the traces that this process uses
        # Of each segment that is being built: what its samples may be found to share rows with. Another thread may let
        # go of the last tensor of it meanwhile.
        self._shareable: dict[str, list[SegmentHandle]] = {}

        tell_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._forked = ray.is_initialized()

    def absolute(self, path: str) -> str:
        name = path.removeprefix(_SCHEME).strip("/")
        if not name or SEGMENTS_NAME in name.split("/"):
            raise OptionError(f"{path!r} names no trace; it is ray://name, where no part of the name is 'segments'")
        return _SCHEME + name

    def call(self, method: str, trace: str, *arguments: Any) -> Any:
        """Have the cluster's keeper do something with a trace; it is started where there is none.

        Raises
        ------
        StoreError
            It does not answer.
        OSError
            What it met itself.
        """
        for last in (False, True):
            try:
                with self._lock:
                    keeper = self._find_keeper(trace)
                answer = getattr(keeper, method).remote(trace, *arguments)
                return ray.get(answer, timeout=timeout_seconds())
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, OSError):
                    raise error.cause from None
                raise OSError(errno.EIO, f"Ray's object store did not take a segment ({error.cause})") from None
            except ray.exceptions.GetTimeoutError:
                why = f"did not answer within {timeout_seconds():g} s (TRACEFILE_RAY_TIMEOUT)"
                break
            except ray.exceptions.RayError as error:
                self._cluster = None  # if it was killed, there may be another, which knows nothing of what was kept
                if last or not isinstance(error, ray.exceptions.ActorDiedError):
                    why = f"cannot be reached: {error}"
                    break
        raise StoreError(
            f"{trace}: the actor {ACTOR_NAME!r} of the Ray cluster {why}; see `ray status`", path=trace, attempts=1
        )

    def _find_keeper(self, trace: str) -> Any:
        if not ray.is_initialized():  # else Ray would start a cluster of its own
            raise OptionError(f"{trace} lives in a Ray cluster; connect to it first: ray.init(address=...)")
        if self._forked:
            raise StoreError(
                f"{trace} cannot be asked for in a forked process, where Ray does not work; use its tasks and actors"
                " as workers",
                path=trace,
                attempts=0,
            )
        context = ray.get_runtime_context()
        cluster = context.gcs_address, context.get_job_id()
        if cluster != self._cluster:
            ray.cloudpickle.register_pickle_by_value(keeper_module)  # type: ignore[no-untyped-call]
            try:
                self._keeper = (
                    ray.remote(keeper_module.Keeper)
                    .options(
                        name=ACTOR_NAME,
                        namespace=ACTOR_NAME,
                        get_if_exists=True,
                        lifetime="detached",  # else it would die with the worker that happened to be first
                        num_cpus=0,
                        resources={"node:__internal_head__": 0.001},  # where all ends if that node does
                    )
                    .remote()
                )
            finally:
                ray.cloudpickle.unregister_pickle_by_value(keeper_module)  # type: ignore[no-untyped-call]
            self._cluster = cluster
        return self._keeper

    def _note(self, trace: str, kept: bool) -> None:
        (self._kept.add if kept else self._kept.discard)(trace)

    def _find(self, trace: str, segments: Sequence[str]) -> list[Found | None]:
        found: list[Found | None] = self.call("find", trace, list(segments)) if segments else []
        return found

    def read_root(self, trace: str) -> bytes:
        files: dict[str, bytes] = self.call("files", trace)
        if METADATA_NAME in files:
            return files[METADATA_NAME]
        if files:
            raise NotATraceError(f"{trace} has no {METADATA_NAME}: not a trace", path=trace)
        raise TraceNotFoundError(f"no trace at {trace}; it appears when its first writer opens it", path=trace)

    def read(self, path: str, nbytes: int | None = None) -> bytes:
        return bytes(self._data(path)[:nbytes])

    def _data(self, path: str) -> bytes | memoryview:
        trace, segment, name = _parts_of(path)
        data: bytes | memoryview | None
        if segment is None:
            data = self.call("files", trace).get(name)
        elif (handle := handles.get(trace, segment)) is not None:
            data = handle.document() if name == METADATA_NAME else handle.shard()
        else:
            (found,) = self._find(trace, [segment])
            if found is not None and name == SHARD_NAME:
                data = fetch(trace, segment, found[2][0]).shard
            else:
                data = found[0] if found is not None else None
        if data is None:
            raise FileNotFoundError(errno.ENOENT, _gone(trace, segment), path)
        return data

    def read_all(self, paths: Sequence[str]) -> list[bytes | OSError]:
        wanted = [_parts_of(path) for path in paths]
        kept: dict[str, list[str]] = {}
        for trace, segment, name in wanted:
            if segment is not None and name == METADATA_NAME and handles.get(trace, segment) is None:
                kept.setdefault(trace, []).append(segment)
        documents: dict[tuple[str, str | None], bytes] = {}
        for trace, segments in kept.items():
            for segment, found in zip(segments, self._find(trace, segments), strict=True):
                if found is not None:
                    documents[trace, segment] = found[0]
        rest = iter(
            super().read_all(
                [p for p, (trace, segment, _) in zip(paths, wanted, strict=True) if (trace, segment) not in documents]
            )
        )
        return [
            documents[trace, segment] if (trace, segment) in documents else next(rest) for trace, segment, _ in wanted
        ]

    def size(self, path: str) -> int:
        trace, segment, name = _parts_of(path)
        if segment is not None and name == SHARD_NAME and handles.get(trace, segment) is None:
            (found,) = self._find(trace, [segment])
            if found is not None and found[1] >= 0:
                return found[1]
        return len(self._data(path))

    def open_source(self, path: str, *, kind: SourceKind, size: int, segment: str) -> Source:
        source = BufferSource(partial(self._shard, path), path, size, segment)
        source.check_size()
        return source

    def _shard(self, path: str, source: BufferSource) -> memoryview:
        trace, segment, _ = _parts_of(path)
        assert segment is not None
        handle = handles.get(trace, segment)
        if handle is not None:
            shard = handle.shard(source)
        else:
            (found,) = self._find(trace, [segment])
            shard = None if found is None else fetch(trace, segment, found[2][0]).shard
        if shard is None:
            raise SegmentMissingError(_gone(trace, segment), path=path, segment=segment)
        return shard

    def handle(self, trace: str, segment: str) -> SegmentHandle | None:
        found = handles.get(trace, segment)
        if found is None and trace not in self._kept and self._find(trace, [segment]) == [None]:
            raise SegmentMissingError(_gone(trace, segment), path=trace, segment=segment)
        return found

    def segments(self, trace: str) -> list[str]:
        kept, segments = self.call("listed", trace)
        self._note(trace, kept)
        return [*segments, *(handle.segment for handle in handles.of(trace))]

    def is_gone(self, trace: str, segment: str) -> bool:
        return handles.get(trace, segment) is None and self._find(trace, [segment]) == [None]

    def create(self, trace: str, files: Mapping[str, bytes], *, durable: bool) -> bool:
        return bool(self.call("create", trace, dict(files)))

    def begin(self, trace: str, segment: str) -> str:
        build = os.path.join(_builds(trace), segment)
        os.makedirs(os.path.join(build, os.path.dirname(SHARD_NAME)))
        self._shareable[build] = handles.of(trace)
        return build

    def publish(self, trace: str, segment: str, build: str, *, durable: bool) -> SegmentHandle | None:
        node = ray.get_runtime_context().get_node_id()
        files = os.path.join(build, METADATA_NAME), os.path.join(build, SHARD_NAME)
        kept, (ref,) = self.call("store", trace, segment, node, *files)
        self._note(trace, kept)
        self.discard(build)
        if kept:
            return None
        handle = handles.take_in(trace, segment, ref)
        for others in list(self._shareable.values()):
            others.append(handle)
        return handle

    def discard(self, build: str) -> None:
        self._shareable.pop(build, None)
        shutil.rmtree(build, ignore_errors=True)

    def delete(self, trace: str, segment: str) -> None:
        self.call("forget", trace, segment)
        handles.forget(trace, segment)

    def unfinished(self, trace: str) -> list[str]:
        try:
            return sorted(os.listdir(_builds(trace)))
        except OSError:
            return []

    def leave(self, trace: str) -> None:
        with contextlib.suppress(OSError):  # other writers build there, or it is gone already
            os.rmdir(_builds(trace))


def _builds(trace: str) -> str:
    """Where this node's writers build segments of a trace."""
    return os.path.join(tempfile.gettempdir(), f"tracefile-ray-{os.getuid()}", quote(trace, safe=""))


def _parts_of(path: str) -> tuple[str, str | None, str]:
    """The trace, the segment if it is a segment's, and the name of a file."""
    trace, found, rest = path.partition(f"/{SEGMENTS_NAME}/")
    if not found:
        trace, _, name = path.rpartition("/")
        return trace, None, name
    segment, _, name = rest.partition("/")
    return (trace, segment, name) if name else (trace, None, f"{SEGMENTS_NAME}/{segment}")


def _gone(trace: str, segment: str | None) -> str:
    if segment is None:
        return f"no trace at {trace}"
    return (
        f"segment {segment} of {trace} is gone: nobody here holds a lazy tensor of it, and it is not kept by name; hold"
        f" on to what append returned, or have the trace kept before it is written:"
        f" tracefile.integrations.ray.keep({trace!r})"
    )


store = RayStore()
register_store("ray", store)
