"""Noticing what is committed to a trace: when to look at it again, and an iterator over what is new.

A commit is a rename into ``segments/``. Linux reports it to who watches that directory (inotify), through the
library inotify_simple where it is installed (the extra ``follow``). A watch sees what this host does and not what
others do on a file system that they share, and its queue can overflow; so looking at intervals goes on beside it:
once a second, and where there is no watch, or one that cannot be trusted, every 5 to 50 ms. On a local file system
that is one ``stat`` as long as nothing changes. The watch is there before the first look, so that no commit falls
between the two. No thread is started, here or by the library.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tracefile.errors import ClosedError
from tracefile.lazy import LazyRoutedExperts
from tracefile.source import is_shared
from tracefile.store import store_for

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from tracefile.metadata import SampleEntry
    from tracefile.trace import Trace

#: Seconds between looks beside a trusted watch.
WATCHED_POLL_SECONDS = 1.0
#: Looking in vain takes at most one part in so many of a core, however many segments there are to list.
_COST_FACTOR = 10
#: No local file system's clock is coarser: a directory's time may not show the second of two changes that are closer.
_CLOCK_RESOLUTION_NS = 2_000_000_000
#: How long nobody asks whether the trace was closed or the caller wants to stop.
_SLICE_SECONDS = 0.05


def _watch(directory: str) -> Any:
    """An inotify watch on what is renamed into a directory; ``None`` where there can be none."""
    try:
        from inotify_simple import INotify, flags
    except ImportError:
        return None
    inotify = None
    try:
        inotify = INotify()
        inotify.add_watch(directory, flags.MOVED_TO | flags.ONLYDIR)
    except OSError:  # the user's limit of watches is reached, the directory is gone, no inotify in this kernel
        if inotify is not None:
            inotify.close()
        return None
    return inotify


class Watcher:
    """Tells when to look at a directory, or at what is none, again. For one thread; starts anew after a fork.

    Parameters
    ----------
    directory : str or None
    poll_seconds : (float, float)
        Between looks without a trusted watch: doubled from the first to the second while nothing comes.
    """

    def __init__(self, directory: str | None, poll_seconds: tuple[float, float]) -> None:
        self._directory = directory
        self._poll_seconds = poll_seconds
        self._inotify: Any = None
        self._pid = 0
        self._between = poll_seconds
        self._pause = 0.0
        self._due = 0.0
        self._shared = True
        # The directory's time before it is listed, and before it was: only if a later change must show another.
        self._time: int | None = None
        self._listed_time: int | None = None

    def _start(self) -> None:
        self.close()
        self._inotify = None if self._directory is None else _watch(self._directory)
        self._shared = self._directory is None or is_shared(self._directory)
        self._listed_time = None
        trusted = self._inotify is not None and not self._shared
        self._between = (WATCHED_POLL_SECONDS, WATCHED_POLL_SECONDS) if trusted else self._poll_seconds
        self._pause = 0.0
        self._pid = os.getpid()

    def wait(self, seconds: float) -> list[str] | None:
        """Wait for news.

        Returns
        -------
        list of str or None
            Names that came into the directory, or none of them after ``seconds``. ``None``: list the directory,
            and say so with :meth:`listed`; always at first.
        """
        if self._pid != os.getpid():  # after a fork, too: events that a child takes are lost to its parent
            self._start()
            self._may_have_changed()
            return None
        pause = max(0.0, min(seconds, self._due - time.monotonic()))
        names: list[str] = []
        if self._inotify is None:
            time.sleep(pause)
        else:
            names = [event.name for event in self._inotify.read(timeout=math.ceil(pause * 1000))]
            if "" in names:  # it is about the watch: too many events, or the directory is gone
                self._pid = 0
                return self.wait(0)
        if time.monotonic() < self._due:
            return names
        if self._may_have_changed():
            return None
        self._schedule(0.0)
        return names

    def _may_have_changed(self) -> bool:
        """Whether the directory must be listed; to be followed by that."""
        if self._directory is None or self._shared:
            return True  # what a host knows of a directory's time may be old
        self._time = None
        try:
            modified = os.stat(self._directory).st_mtime_ns
        except OSError:
            return True
        if time.time_ns() - modified > _CLOCK_RESOLUTION_NS:
            self._time = modified
        return modified != self._listed_time

    def listed(self, cost: float, *, news: bool, whole: bool) -> None:
        """The directory was listed.

        Parameters
        ----------
        cost : float
            The processor time that it took, in seconds.
        news : bool
            Whether there was something new: if so, there may soon be more.
        whole : bool
            Whether all was well: if not, list it again, whether it changes or not.
        """
        self._listed_time = self._time if whole else None
        if news:
            self._pause, cost = 0.0, 0.0
        self._schedule(cost)

    def _schedule(self, cost: float) -> None:
        """Decide when to look again."""
        shortest, longest = self._between
        self._pause = min(max(shortest, 2 * self._pause), longest)
        self._due = time.monotonic() + max(self._pause, _COST_FACTOR * cost)

    def close(self) -> None:
        """Let go of the watch; waiting again would start another."""
        self._pid = 0
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def watch_segments(trace: Trace) -> Watcher:
    store = store_for(trace.path)
    return Watcher(store.watched_directory(trace.path), store.poll_seconds)


def looks(trace: Trace, watcher: Watcher, timeout: float | None) -> Iterator[Mapping[str, Exception]]:
    """Look at a trace whenever it may have news, until ``timeout``; the last look is after that.

    Yields
    ------
    mapping of str to Exception
        The segments that are damaged, and have been for a while, as far as this look saw. At first, and now and
        then while there is nothing to see, it is empty without a look.
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    yield {}
    expired = False
    while not expired:
        started = time.monotonic()
        expired = started >= deadline
        names = watcher.wait(max(0.0, min(_SLICE_SECONDS, deadline - started)))
        if expired:
            names = None
        damaged: Mapping[str, Exception] = {}
        if names is None or names:
            before, started = len(trace.segments), time.thread_time()
            trace._check_open()
            damaged = trace._visible.look(names)
            if names is None:
                cost, news = time.thread_time() - started, len(trace.segments) > before
                watcher.listed(cost, news=news, whole=not trace._visible.damaged_since)
        yield damaged


class Follower(Iterator[tuple[str, LazyRoutedExperts]]):
    """Iterates over the samples that are committed to a trace. Made by :meth:`tracefile.Trace.follow`.

    An error, KeyboardInterrupt among them, does not end it: asked for the next sample, it goes on.
    """

    def __init__(
        self, trace: Trace, first: int, timeout: float | None, stop: Callable[[], bool] | threading.Event | None
    ) -> None:
        self._trace = trace
        self._timeout = timeout
        ask: Any = stop  # multiprocessing's events have no class to recognize them by
        self._stop: Callable[[], bool] = (lambda: False) if stop is None else getattr(ask, "is_set", ask)
        self._watcher = watch_segments(trace)
        self._segment = first  # position in the order of arrival of the next segment
        self._entries: deque[SampleEntry] = deque()  # what is left of the one before it
        self._reported: set[str] = set()
        self._ended = False

    def _arrived(self) -> tuple[str, LazyRoutedExperts] | None:
        """The next sample of those that the trace has already."""
        trace = self._trace
        while True:
            while self._entries:
                entry = self._entries.popleft()
                if trace._visible.newest.entries.get(entry.id) is entry:  # else there is a newer revision
                    return entry.id, trace[entry.id]
            if self._segment >= len(trace._visible.arrived):
                return None
            self._entries.extend(trace._visible.arrived[self._segment].samples.values())
            self._segment += 1

    def __next__(self) -> tuple[str, LazyRoutedExperts]:
        with contextlib.suppress(ClosedError):
            for damaged in looks(self._trace, self._watcher, self._timeout):
                if self._ended or self._trace.closed or self._stop():
                    break
                found = self._arrived()
                if found is not None:
                    return found
                for segment, error in damaged.items():
                    if segment not in self._reported:
                        self._reported.add(segment)
                        raise error
        self.close()
        raise StopIteration

    def close(self) -> None:
        """End the iteration."""
        self._ended = True
        self._watcher.close()

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
