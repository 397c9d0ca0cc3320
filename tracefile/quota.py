"""A quota on what a trace stores: its writers fail early, or wait for room."""

from __future__ import annotations

import errno
import threading
import time
from typing import TYPE_CHECKING, Literal, NoReturn, TypeAlias, get_args

from tracefile.append_queue import is_cancelled
from tracefile.errors import OptionError, QuotaExceededError
from tracefile.forking import tell_after_fork
from tracefile.metadata import SegmentHeader, TraceHeader
from tracefile.store import list_segments, read_segment_headers

if TYPE_CHECKING:
    from tracefile.format import ModelConfig
    from tracefile.runs import TraceRef

QuotaMode: TypeAlias = Literal["error", "wait"]

#: While there is room for a while, looking for what others publish takes at most one part in so many of a core, and
#: does not wait longer than this, nor, at the rate at which others publish, until half of that room is taken.
_COST_FACTOR = 10
_LOOK_SECONDS = 1.0
#: Room for so many segments, the largest so far, of each of the writers so far: with less, each segment takes a look.
_MARGIN_SEGMENTS = 4
#: Who waits for room looks for it at first and at last so often.
_WAIT_SECONDS = (0.02, 1.0)


def check_quota(quota_bytes: object, mode: str, timeout: object) -> None:
    """Check the options of a quota.

    Raises
    ------
    OptionError
    """
    if quota_bytes is not None and (
        isinstance(quota_bytes, bool) or not isinstance(quota_bytes, int) or quota_bytes < 0
    ):
        raise OptionError(f"quota_bytes must be an integer of at least 0, not {quota_bytes!r}")
    if mode not in get_args(QuotaMode):
        raise OptionError(f"quota must be one of {', '.join(get_args(QuotaMode))}, not {mode!r}")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout < 0):
        raise OptionError(f"quota_timeout must be seconds, of at least 0, not {timeout!r}")


class Quota:
    """What one writer knows of how much its trace stores. Safe for threads and fork.

    The shard files of visible segments count, by whichever writer; documents, a kilobyte or two each, do not.
    Writers do not lock each other out: each may publish the one segment that it is at when the quota is reached, and
    more only if others come to publish many times faster than they did right before.

    Parameters
    ----------
    trace : TraceRef
    config : ModelConfig
    limit : int
        In bytes.
    mode : {"error", "wait"}
    timeout : float, optional
        How long to wait, in seconds; default for ever.
    """

    def __init__(
        self, trace: TraceRef, config: ModelConfig, limit: int, mode: QuotaMode = "error", timeout: float | None = None
    ) -> None:
        self.limit = limit
        self._path = trace.path
        self._header = TraceHeader(trace.uuid, config)
        self._mode = mode
        self._timeout = timeout
        self._stored: dict[str, int] = {}  # segment -> bytes
        self._used = 0
        self._writers: set[tuple[object, object]] = set()
        self._largest = 0
        self._looked = 0.0
        self._due = 0.0
        self._rate = 0.0  # bytes per second that others publish
        self._lock = threading.Lock()
        tell_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held it

    @property
    def used(self) -> int:
        """Bytes that the trace stores, as far as was looked."""
        return self._used

    def admit(self, nbytes: int) -> None:
        """Let a segment of ``nbytes`` pass, or one of unknown size that is yet to be encoded (0), or wait for room.

        Raises
        ------
        QuotaExceededError
            There is no room: at once, or after the timeout. Also when the coroutine that waits was cancelled.
        """
        if self._has_room(nbytes):
            return
        if self._mode == "error" or nbytes > self.limit or self.limit == 0:
            self._refuse(nbytes)
        began, pause = time.monotonic(), _WAIT_SECONDS[0]
        while True:
            waited = time.monotonic() - began
            if is_cancelled() or (self._timeout is not None and waited >= self._timeout):
                self._refuse(nbytes, waited)
            left = pause if self._timeout is None else min(pause, self._timeout - waited)
            _sleep(left)
            if self._has_room(nbytes):
                return
            pause = min(2 * pause, _WAIT_SECONDS[1])

    def published(self, segment: str, nbytes: int) -> None:
        """This writer published a segment."""
        with self._lock:
            if segment not in self._stored:
                self._stored[segment] = nbytes
                self._used += nbytes
                self._largest = max(self._largest, nbytes)

    def _fits(self, nbytes: int) -> bool:
        return self._used + nbytes <= self.limit if nbytes else self._used < self.limit

    def _has_room(self, nbytes: int) -> bool:
        with self._lock:
            if self._spare(nbytes) < 0 or time.monotonic() >= self._due:
                self._look()
            return self._fits(nbytes)

    def _spare(self, nbytes: int = 0) -> int:
        """The room, as far as it is more than the margin."""
        margin = _MARGIN_SEGMENTS * max(2, len(self._writers)) * max(self._largest, nbytes)
        return self.limit - self._used - nbytes - margin

    def _look(self) -> None:
        """See what others have published, and what was deleted."""
        now, began, others = time.monotonic(), time.thread_time(), 0
        listed = set(list_segments(self._path))
        for segment in self._stored.keys() - listed:
            self._used -= self._stored.pop(segment)
        new = read_segment_headers(self._path, self._header, sorted(listed - self._stored.keys()))
        for segment, header in new.items():
            if isinstance(header, SegmentHeader):  # what is gone or damaged is for readers to say
                self._stored[segment] = header.shard_bytes
                others += header.shard_bytes
                self._largest = max(self._largest, header.shard_bytes)
                self._writers.add((header.writer.get("host"), header.writer.get("pid")))
        self._used += others
        pause = 0.0  # after the first look, the next segment takes another: it tells the rate
        if self._looked:
            self._rate = max(others / max(now - self._looked, 1e-3), self._rate / 2)
            pause = min(_LOOK_SECONDS, _COST_FACTOR * (time.thread_time() - began))
            if self._rate:
                pause = min(pause, max(0, self._spare()) / 2 / self._rate)
        self._looked, self._due = now, time.monotonic() + pause

    def _refuse(self, nbytes: int, waited: float | None = None) -> NoReturn:
        this = f", and this segment has {nbytes:,}" if nbytes else ""
        since = "" if waited is None else f" after {waited:.3g} s of waiting"
        raise QuotaExceededError(
            f"{self._path} stores {self._used:,} bytes of its quota of {self.limit:,}{this}{since}; nothing was"
            " published. Delete samples and run tracefile gc, or raise quota_bytes (TRACEFILE_QUOTA_BYTES)",
            path=self._path,
            errno=errno.EDQUOT,
            quota=self.limit,
            used=self._used,
        )


def _sleep(seconds: float) -> None:
    """Sleep, unless the coroutine that waits is cancelled."""
    deadline = time.monotonic() + seconds
    while not is_cancelled() and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, 0.05))
