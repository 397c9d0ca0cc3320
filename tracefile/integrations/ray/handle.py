"""What a lazy tensor holds of a segment that lives by being referred to: Ray's reference, one for each process."""

from __future__ import annotations

import os
import struct
import threading
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import ray
import ray.util

from tracefile.errors import LazyTensorError, OptionError, SegmentMissingError, StoreError
from tracefile.forking import tell_after_fork
from tracefile.integrations.ray.keeper import HEADER, HEADER_BYTES
from tracefile.store import Handle

if TYPE_CHECKING:
    from tracefile.source import BufferSource

#: How long to wait for an object or an answer; Ray's own limit for an object is ten minutes.
DEFAULT_TIMEOUT_SECONDS = 120.0


def timeout_seconds() -> float:
    """How long this process waits, by ``TRACEFILE_RAY_TIMEOUT``.

    Raises
    ------
    OptionError
    """
    text = os.environ.get("TRACEFILE_RAY_TIMEOUT")
    if not text:
        return DEFAULT_TIMEOUT_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise OptionError(f"TRACEFILE_RAY_TIMEOUT must be seconds, more than 0, not {text!r}")
    return seconds


class SegmentBytes:
    """A segment as it is mapped into this process: read-only, shared by the processes of the node."""

    def __init__(self, data: Any) -> None:
        view = memoryview(data)
        document, shard = struct.unpack_from(HEADER, view)
        begin = HEADER_BYTES + document
        self.document = bytes(view[HEADER_BYTES:begin])
        #: ``None`` if the segment has no rows.
        self.shard = view[begin : begin + shard] if shard >= 0 else None


def fetch(trace: str, segment: str, ref: Any) -> SegmentBytes:
    """Have Ray bring a segment to this node, if it is not there, and map it.

    Raises
    ------
    SegmentMissingError
        It is lost.
    StoreError
        It does not come in time, or Ray fails otherwise.
    """
    name = f"segment {segment} of {trace}"
    try:
        return SegmentBytes(ray.get(ref, timeout=timeout_seconds()))
    except ray.exceptions.ObjectLostError as error:
        owned = isinstance(error, ray.exceptions.OwnerDiedError)
        why = "the actor that owned it was killed" if owned else "no node that had a copy is left"
        raise SegmentMissingError(
            f"{name} is lost: {why} ({type(error).__name__}); have a new writer write its samples again",
            path=trace,
            segment=segment,
        ) from None
    except ray.exceptions.GetTimeoutError:
        why = f"did not reach this node within {timeout_seconds():g} s; wait longer (TRACEFILE_RAY_TIMEOUT)"
    except ray.exceptions.RayError as error:
        why = f"cannot be had from Ray: {error}"
    raise StoreError(f"{name} {why}, or see `ray status`", path=trace, segment=segment, attempts=1)


class SegmentHandle(Handle):
    """Keeps one segment in the cluster's memory for as long as it lives. One for each segment and process.

    Ray's serializer carries it, in whatever Ray carries, and counts it; any other refuses.
    """

    def __init__(self, trace: str, segment: str, ref: Any) -> None:
        self.trace = trace
        self.segment = segment
        self.ref = ref
        self._pid = os.getpid()
        self._held: list[Handle] = []
        self._sources: list[weakref.ref[BufferSource]] = []

    def hold(self, other: Handle) -> None:
        self._held.append(other)

    def document(self) -> bytes:
        return self._fetch().document

    def shard(self, source: BufferSource | None = None) -> memoryview | None:
        """The shard file's bytes, for a ``source`` that lets them go when this handle dies."""
        shard = self._fetch().shard
        if source is not None:
            self._sources = [known for known in self._sources if known() is not None]
            self._sources.append(weakref.ref(source))
        return shard

    def _fetch(self) -> SegmentBytes:
        if os.getpid() != self._pid:
            raise StoreError(
                f"segment {self.segment} of {self.trace} cannot be had in a forked process, where Ray does not work;"
                " read from it before forking, or use Ray's tasks and actors as workers",
                path=self.trace,
                segment=self.segment,
                attempts=0,
            )
        return fetch(self.trace, self.segment, self.ref)

    def __del__(self) -> None:
        for known in getattr(self, "_sources", ()):
            source = known()
            if source is not None:
                source.let_go()

    def __deepcopy__(self, memo: dict[int, Any]) -> SegmentHandle:
        return self

    def __copy__(self) -> SegmentHandle:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise LazyTensorError(
            f"segment {self.segment} of {self.trace} lives as long as Ray's references to it, which only Ray can"
            " carry: pass the tensor to a task or actor, return it, or ray.put it. To pickle it otherwise, have the"
            f" trace kept by name before it is written: tracefile.integrations.ray.keep({self.trace!r})",
            path=self.trace,
            segment=self.segment,
        )

    def __repr__(self) -> str:
        return f"<SegmentHandle {self.trace} {self.segment}>"


class _Handles:
    """The handles that this process holds. Safe for threads and fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._living: weakref.WeakValueDictionary[tuple[str, str], SegmentHandle] = weakref.WeakValueDictionary()
        self._registered = False
        tell_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held it

    def take_in(self, trace: str, segment: str, ref: Any) -> SegmentHandle:
        """The handle of a segment that this process was given a reference to."""
        with self._lock:
            if not self._registered:
                ray.util.register_serializer(SegmentHandle, serializer=_parts, deserializer=_rebuild)
                self._registered = True
            handle = self._living.get((trace, segment))
            if handle is None:
                handle = self._living[trace, segment] = SegmentHandle(trace, segment, ref)
            return handle

    def get(self, trace: str, segment: str) -> SegmentHandle | None:
        return self._living.get((trace, segment))

    def of(self, trace: str) -> list[SegmentHandle]:
        return [handle for handle in list(self._living.values()) if handle.trace == trace]

    def forget(self, trace: str, segment: str) -> None:
        self._living.pop((trace, segment), None)


#: The handles that this process holds.
handles = _Handles()


def _parts(handle: SegmentHandle) -> tuple[str, str, Any]:
    return handle.trace, handle.segment, handle.ref


def _rebuild(parts: tuple[str, str, Any]) -> SegmentHandle:
    return handles.take_in(*parts)
