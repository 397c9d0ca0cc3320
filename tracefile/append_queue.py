"""Appends of coroutines: threads carry them out, so that the event loop goes on while a sample is encoded.

A coroutine waits until its segment is published, which is what slows a rollout down to its disk. Nothing is copied
before a thread takes an append up, so what waits in line costs a reference to an array that its caller holds anyway,
and the buffers in use are those of the threads, however many coroutines wait.

Nothing here belongs to one event loop: a place in line is a :class:`concurrent.futures.Future`, and whoever waits
for it is told through its own loop. Coroutines of several loops, in several threads, may share a writer.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tracefile.errors import ClosedError, OptionError
from tracefile.forking import tell_after_fork
from tracefile.lazy import LazyRoutedExperts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")

_running = threading.local()


def is_cancelled() -> bool:
    """Whether the coroutine that awaits what this thread does was cancelled, so that waiting is no use any more."""
    cancelled: threading.Event | None = getattr(_running, "cancelled", None)
    return cancelled is not None and cancelled.is_set()


def _run_cancellable(call: Callable[[], T], cancelled: threading.Event) -> T:
    _running.cancelled = cancelled
    try:
        return call()
    finally:
        _running.cancelled = None


class AppendQueue:
    """Runs calls in threads, first come, first served. Safe for threads and fork; starts no thread until used.

    Parameters
    ----------
    path : str
        The trace, for messages.
    threads : int
        How many calls run at once, at most. One carries them out in the order in which they came.

    Raises
    ------
    OptionError

    Examples
    --------
    >>> queue = AppendQueue("t.trace", threads=1)
    >>> asyncio.run(queue.run(lambda: 6 * 7))
    42
    >>> queue.close()
    """

    def __init__(self, path: str, threads: int) -> None:
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise OptionError(f"async_threads must be an integer of at least 1, not {threads!r}")
        self._path = path
        self._threads = threads
        self._closed = False
        self.after_fork()
        tell_after_fork(self)

    def after_fork(self) -> None:
        """Start afresh, also in a forked child: it has none of the threads, and what waited is its parent's."""
        # The pool's threads end when it is collected, and at the interpreter's exit once they have done what waits.
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="tracefile-append")
        self._unfinished: set[Future[Any]] = set()

    async def run(self, call: Callable[[], T], arrays: Iterable[object] = ()) -> T:
        """Await ``call()``, made in a thread.

        A cancellation takes back a call that has not begun, at once. For one that has begun it waits, and raises
        then: whoever gets :class:`asyncio.CancelledError` may reuse the arrays and append the same sample again.

        Parameters
        ----------
        call : callable
        arrays : iterable
            What the call reads. CUDA tensors among them may still be in the making on the current stream.

        Raises
        ------
        ClosedError
            The queue is closed.
        BaseException
            Whatever ``call`` raises.
        """
        held = [_after_streams(call, arrays)]
        cancelled = threading.Event()
        future: Future[T] | None = None
        try:
            future = self._submit(lambda: _run_cancellable(held.pop(), cancelled))
            await _settled(future, cancelled)
            return future.result()
        finally:
            if future is None or future.cancel():
                held.clear()  # the pool keeps its place in line until that comes up; the arrays go now
            del future  # an exception in it refers to this frame

    def _submit(self, call: Callable[[], T]) -> Future[T]:
        try:
            future = self._pool.submit(call)
        except RuntimeError:
            if not self._closed:
                raise
            raise ClosedError(f"the writer of {self._path} is closed; open another", path=self._path) from None
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        return future

    def flush(self) -> None:
        """Wait for every call that is running or in line. What they raise, their own coroutines get."""
        concurrent.futures.wait(list(self._unfinished))

    async def flush_async(self) -> None:
        """Like :meth:`flush`, for coroutines. Cancelling it cancels nothing else."""
        await asyncio.sleep(0)  # tasks that were created before get in line first
        unfinished = [_arrival(future) for future in list(self._unfinished)]
        if unfinished:
            await asyncio.wait(unfinished)

    def close(self) -> None:
        """Take no more calls, and wait for those that are running or in line."""
        self._closed = True
        self._pool.shutdown()


def _arrival(future: Future[Any]) -> asyncio.Future[None]:
    """Something of the running loop that is done once ``future`` is. Cancelling it leaves ``future`` alone."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[None] = loop.create_future()

    def arrive() -> None:
        if not arrived.done():
            arrived.set_result(None)

    def tell(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # that loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(arrive)

    future.add_done_callback(tell)
    return arrived


async def _settled(future: Future[Any], told: threading.Event) -> None:
    """Wait for ``future``, even when cancelled, unless it can be taken back; sets ``told`` then."""
    arrived = _arrival(future)
    cancelled: tuple[Any, ...] | None = None
    while not future.done():
        try:
            await asyncio.wait([arrived])
        except asyncio.CancelledError as error:
            if future.cancel():
                raise
            cancelled = error.args
            told.set()
    if cancelled is not None:
        raise asyncio.CancelledError(*cancelled)


def _after_streams(call: Callable[[], T], arrays: Iterable[object]) -> Callable[[], T]:
    """``call``, after what the current CUDA streams have yet to write into ``arrays``: a thread has its own stream."""
    tensors = [a for a in arrays if isinstance(a, torch.Tensor) and not isinstance(a, LazyRoutedExperts)]
    events = [torch.cuda.current_stream(d).record_event() for d in {t.device for t in tensors if t.is_cuda}]
    if not events:
        return call

    def wait_and_call() -> T:
        for event in events:
            event.synchronize()
        return call()

    return wait_and_call
