"""Appends of coroutines: the loop goes on, what is cancelled or fails is whole or absent, and memory is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support import fork, ids_of, in_fork, join, run_python

import tracefile
from tracefile.format import staging_path
from tracefile.store import unfinished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SMALL = {"num_layers": 4, "top_k": 2, "num_experts": 64}


def _writer(path: str, **options: Any) -> tracefile.TraceWriter:
    return tracefile.TraceWriter(path, **(SMALL | {"rows_per_chunk": 32} | options))


def _ids(sample: str, rows: int = 70) -> np.ndarray[Any, Any]:
    return ids_of(sample, rows, **SMALL)


def _check(path: str, samples: list[str]) -> None:
    """The trace holds exactly these samples, whole, and nothing is left in staging."""
    trace = tracefile.open(path)
    assert sorted(trace) == sorted(samples)
    for sample in samples:
        np.testing.assert_array_equal(trace[sample].numpy(), _ids(sample), err_msg=sample)
    assert list(unfinished(path)) == []


def _append(writer: tracefile.TraceWriter, sample: str) -> asyncio.Task[tracefile.LazyRoutedExperts]:
    return asyncio.create_task(writer.append_async(sample, _ids(sample)), name=sample)


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tracefile-append")]


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


class _Disk:
    """A disk on which publishing takes until it is let through, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = 0  # how many publishers have come to it, so far
        self.error: OSError | None = None
        self._passes = threading.Semaphore(0)
        self._rename = os.rename
        monkeypatch.setattr(os, "rename", self._held_rename)

    def _held_rename(self, source: str, target: str, **options: int) -> None:
        self.held += 1
        assert self._passes.acquire(timeout=30)
        if self.error is not None:
            raise self.error
        self._rename(source, target, **options)

    def let(self, publishers: int = 1) -> None:
        self._passes.release(publishers)


@pytest.fixture
def writer(path: str) -> Iterator[tracefile.TraceWriter]:
    with _writer(path) as writer:
        yield writer
    assert _threads() == []
    assert not os.path.exists(staging_path(path))


@pytest.fixture
def disk(writer: tracefile.TraceWriter, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Disk]:
    disk = _Disk(monkeypatch)
    yield disk
    disk.let(1000)  # whatever a failed test left


# Many at once


@pytest.mark.parametrize("threads", [1, 3])
def test_many_coroutines(path: str, threads: int) -> None:
    async def coroutine(who: int) -> None:
        for turn in range(5):
            samples = [f"{who}/{turn}/{i}" for i in range(1 + turn % 3)]
            if len(samples) == 1:
                returned = [await writer.append_async(samples[0], _ids(samples[0]))]
            else:
                returned = await writer.append_many_async((sample, _ids(sample)) for sample in samples)
            for sample, experts in zip(samples, returned, strict=True):
                np.testing.assert_array_equal(experts.numpy(), _ids(sample))
            seen.update(trace.refresh())
            assert seen.issuperset(samples)  # committed by now

    async def main() -> None:
        async with writer:
            await asyncio.gather(*(coroutine(who) for who in range(16)))
            assert len(_threads()) <= threads

    writer = _writer(path, async_threads=threads)
    trace = tracefile.open(path)
    seen: set[str] = set()
    asyncio.run(main())
    _check(path, [f"{who}/{turn}/{i}" for who in range(16) for turn in range(5) for i in range(1 + turn % 3)])


def test_one_thread_keeps_the_order_of_the_calls(path: str, writer: tracefile.TraceWriter) -> None:
    async def main() -> None:
        await asyncio.gather(*(_append(writer, f"{number}") for number in range(30)))
        # Two revisions of one sample, without waiting for the first: the second is what a reader gets.
        await asyncio.gather(writer.append_async("x", _ids("old")), writer.append_async("x", _ids("new")))

    asyncio.run(main())
    trace = tracefile.open(path)
    assert list(trace) == [*(f"{number}" for number in range(30)), "x"]
    np.testing.assert_array_equal(trace["x"].numpy(), _ids("new"))


def test_the_loop_goes_on_while_the_disk_stands_still(path: str, writer: tracefile.TraceWriter, disk: _Disk) -> None:
    async def main() -> None:
        tasks = [_append(writer, f"{number}") for number in range(20)]
        await _until(lambda: disk.held == 1)
        for _ in range(200):
            await asyncio.sleep(0)
        # The rollouts wait, and only one of them takes up memory and disk.
        assert not any(task.done() for task in tasks)
        assert disk.held == len(list(unfinished(path))) == len(_threads()) == 1
        assert list(tracefile.open(path)) == []
        disk.let(20)
        await asyncio.gather(*tasks)

    asyncio.run(main())
    _check(path, [f"{number}" for number in range(20)])


def test_loops_in_several_threads_share_a_writer(path: str, writer: tracefile.TraceWriter) -> None:
    errors: list[BaseException] = []
    start = threading.Barrier(4)

    async def main(who: int) -> None:
        for turn in range(4):
            await asyncio.gather(*(_append(writer, f"{who}/{turn}/{n}") for n in range(5)))
        await writer.flush_async()

    def work(who: int) -> None:
        try:
            start.wait()
            asyncio.run(main(who))
            asyncio.run(main(who + 4))  # a second loop in the same thread
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert _threads() == ["tracefile-append_0"]
    _check(path, [f"{who}/{turn}/{n}" for who in range(8) for turn in range(4) for n in range(5)])


def test_options_pass_through(path: str) -> None:
    class Recording(tracefile.TraceWriter):
        def append(self, *arguments: Any, **options: Any) -> Any:
            return arguments, options, threading.current_thread()

        append_many = append

    async def main() -> None:
        ids = _ids("a")
        async with Recording(path, **SMALL) as writer:
            for call in (
                writer.append_async("a", ids, start=3, weight_version="7"),
                writer.append_many_async(iter([("a", ids)]), start=3, weight_version="7"),
            ):
                arguments, options, thread = await call
                assert arguments in [("a", ids), ([("a", ids)],)]
                assert options == {"start": 3, "weight_version": "7"}
                assert thread is not threading.current_thread()

    asyncio.run(main())


@pytest.mark.parametrize("threads", [0, -1, True, 2.0, "2", None])
def test_a_number_of_threads_that_cannot_be(path: str, threads: Any) -> None:
    with pytest.raises(tracefile.OptionError, match="async_threads"):
        _writer(path, async_threads=threads)
    assert not os.path.exists(path)


# Errors


def test_errors_reach_those_who_await_them(path: str, writer: tracefile.TraceWriter) -> None:
    bad = _ids("bad")
    bad[50, 3, 1] = 64

    async def main() -> list[Any]:
        return await asyncio.gather(
            writer.append_async("a", _ids("a")),
            writer.append_async("bad", bad),
            writer.append_many_async([("b", _ids("b")), ("bad", bad)]),
            writer.append_async("c", _ids("c")),
            writer.append_async(7, _ids("c")),  # type: ignore[arg-type]
            writer.append_async("flat", _ids("a").ravel()),
            writer.append_many_async([("e", _ids("e")), ("e", _ids("e"))]),
            writer.append_async("d", _ids("d"), no_such_option=1),
            writer.append_async("d", _ids("d")),
            return_exceptions=True,
        )

    results = asyncio.run(main())
    assert [type(result) for result in results] == [
        tracefile.LazyRoutedExperts,
        tracefile.ExpertIdError,
        tracefile.ExpertIdError,
        tracefile.LazyRoutedExperts,
        tracefile.SampleIdError,
        tracefile.RoutedExpertsShapeError,
        tracefile.DuplicateSampleError,
        TypeError,
        tracefile.LazyRoutedExperts,
    ]
    assert (results[1].sample, results[1].token, results[1].layer, results[1].expert) == ("bad", 50, 3, 64)
    _check(path, ["a", "c", "d"])


def test_samples_that_fail_while_they_are_listed(path: str, writer: tracefile.TraceWriter) -> None:
    def samples() -> Iterator[tuple[str, Any]]:
        yield "a", _ids("a")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(writer.append_many_async(samples()))
    _check(path, [])


def test_a_full_disk(path: str, writer: tracefile.TraceWriter, disk: _Disk) -> None:
    async def main() -> None:
        tasks = [_append(writer, name) for name in "abc"]
        await _until(lambda: disk.held == 1)
        disk.let()
        await tasks[0]
        disk.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        disk.let()
        with pytest.raises(tracefile.PublishError, match="free space"):
            await tasks[1]
        await _until(lambda: disk.held == 3)
        disk.error = None
        disk.let()
        await tasks[2]

    asyncio.run(main())
    _check(path, ["a", "c"])


@pytest.mark.parametrize("outcome", ["returned", "raised", "cancelled in line"])
def test_what_is_done_holds_no_array(outcome: str, writer: tracefile.TraceWriter, disk: _Disk) -> None:
    """Not even until the garbage collector comes: arrays are large."""

    async def one() -> weakref.ref[Any]:
        ids = _ids("a")
        if outcome == "raised":
            ids[3, 2, 1] = 99
        task = asyncio.create_task(writer.append_async("a", ids))
        await asyncio.sleep(0)
        if outcome == "cancelled in line":
            task.cancel()
        with contextlib.suppress(tracefile.ExpertIdError, asyncio.CancelledError):
            await task
        del task  # it has the error, which has this frame
        return weakref.ref(ids)

    async def main() -> None:
        first = _append(writer, "first")
        await _until(lambda: disk.held == 1)
        if outcome != "cancelled in line":
            disk.let(2)
        gc.collect()
        gc.disable()
        try:
            ids = await one()
            await asyncio.sleep(0)
            await _until(lambda: ids() is None)
        finally:
            gc.enable()
        disk.let()
        await first

    asyncio.run(main())


# Cancellation


def test_cancelled_in_line(path: str, writer: tracefile.TraceWriter, disk: _Disk) -> None:
    async def main() -> None:
        tasks = {name: _append(writer, name) for name in "abcd"}
        await _until(lambda: disk.held == 1)
        for name in "bd":
            tasks[name].cancel("no longer wanted")
        # At once, though the disk stands still.
        for name in "bd":
            with pytest.raises(asyncio.CancelledError):
                await tasks[name]
        disk.let(2)
        await asyncio.gather(tasks["a"], tasks["c"])
        await writer.flush_async()

    asyncio.run(main())
    assert disk.held == 2
    _check(path, ["a", "c"])


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_cancelled_once_begun(path: str, writer: tracefile.TraceWriter, disk: _Disk, fails: bool, times: int) -> None:
    async def main() -> None:
        task = _append(writer, "a")
        await _until(lambda: disk.held == 1)
        for _ in range(times):
            task.cancel()
            for _ in range(20):
                await asyncio.sleep(0)
            # Its array is being read, and what will become of it is open: so it waits.
            assert not task.done()
        if fails:
            disk.error = OSError(errno.EIO, os.strerror(errno.EIO))
        disk.let()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert list(tracefile.open(path)) == ([] if fails else ["a"])

    asyncio.run(main())
    _check(path, [] if fails else ["a"])


def test_cancelled_after_publishing_before_resuming(path: str, writer: tracefile.TraceWriter, disk: _Disk) -> None:
    async def main() -> None:
        task = _append(writer, "a")
        await _until(lambda: disk.held == 1)
        threading.Timer(0.05, disk.let).start()
        writer.flush()  # the loop stands still meanwhile
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    _check(path, ["a"])


def test_cancelled_before_it_started(path: str, writer: tracefile.TraceWriter) -> None:
    async def main() -> None:
        task = _append(writer, "a")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    _check(path, [])


def test_a_timeout(path: str, writer: tracefile.TraceWriter, disk: _Disk) -> None:
    async def main() -> None:
        first = _append(writer, "a")
        await _until(lambda: disk.held == 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.append_async("b", _ids("b")), 0.01)
        asyncio.get_running_loop().call_later(0.05, disk.let)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await first
        assert first.cancelled()

    asyncio.run(main())
    _check(path, ["a"])


def test_one_failure_cancels_the_group(path: str, writer: tracefile.TraceWriter) -> None:
    bad = np.full((5, 4, 2), 64)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(writer.append_async(f"{number}", bad if number == 5 else _ids(f"{number}")))

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(main())
    assert [type(error) for error in caught.value.exceptions] == [tracefile.ExpertIdError]
    written = list(tracefile.open(path))
    # Those before it, and then what was begun before it was cancelled; asyncio cancels a group in any order.
    assert written[:5] == ["0", "1", "2", "3", "4"]
    assert sorted(written, key=int) == written
    assert "5" not in written
    _check(path, written)


def test_a_coroutine_that_is_dropped(path: str, writer: tracefile.TraceWriter, disk: _Disk) -> None:
    async def main() -> None:
        coroutines = [writer.append_async(name, _ids(name)) for name in "ab"]
        for coroutine in coroutines:
            coroutine.send(None)
        await _until(lambda: disk.held == 1)
        for coroutine in coroutines:
            coroutine.close()  # as when its loop is gone
        disk.let()
        await writer.flush_async()

    asyncio.run(main())
    _check(path, ["a"])


def test_a_loop_that_is_closed_under_an_append(path: str, writer: tracefile.TraceWriter, disk: _Disk) -> None:
    loop = asyncio.new_event_loop()
    reported: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: reported.append(context))
    coroutine = writer.append_async("a", _ids("a"))
    task = loop.create_task(coroutine)
    loop.run_until_complete(_until(lambda: disk.held == 1))
    loop.close()
    disk.let()
    writer.flush()
    _check(path, ["a"])
    coroutine.close()
    del task
    gc.collect()
    assert [context["message"] for context in reported] in ([], ["Task was destroyed but it is pending!"])


# Flush and close


@pytest.mark.parametrize("how", ["flush", "flush_async", "close", "async with"])
def test_waiting_for_what_waits(path: str, writer: tracefile.TraceWriter, disk: _Disk, how: str) -> None:
    async def main() -> None:
        tasks = [_append(writer, name) for name in "abc"]  # not yet started
        if how == "flush_async":
            threading.Timer(0.02, disk.let, [3]).start()
            await writer.flush_async()
        elif how == "async with":
            threading.Timer(0.02, disk.let, [3]).start()
            async with writer:
                pass
        else:
            await _until(lambda: disk.held == 1)
            threading.Timer(0.02, disk.let, [3]).start()
            getattr(writer, how)()
        assert sorted(tracefile.open(path)) == ["a", "b", "c"]
        await asyncio.gather(*tasks)

    asyncio.run(main())
    _check(path, ["a", "b", "c"])


def test_flush_raises_no_error_of_an_append(writer: tracefile.TraceWriter) -> None:
    async def main() -> None:
        await writer.flush_async()
        writer.flush()
        task = asyncio.create_task(writer.append_async("bad", np.full((5, 4, 2), 64)))
        await writer.flush_async()
        with pytest.raises(tracefile.ExpertIdError):
            await task

    asyncio.run(main())


def test_a_cancelled_flush_cancels_nothing_else(path: str, writer: tracefile.TraceWriter, disk: _Disk) -> None:
    async def main() -> None:
        tasks = [_append(writer, name) for name in "ab"]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.flush_async(), 0.02)
        disk.let(2)
        await asyncio.gather(*tasks)

    asyncio.run(main())
    _check(path, ["a", "b"])


def test_a_closed_writer_takes_no_more(path: str) -> None:
    async def main() -> None:
        async with _writer(path) as writer:
            await writer.append_async("a", _ids("a"))
        for call in (writer.append_async("b", _ids("b")), writer.append_many_async([("b", _ids("b"))])):
            with pytest.raises(tracefile.ClosedError):
                await call
        await writer.flush_async()
        writer.flush()
        writer.close()

    asyncio.run(main())
    assert _threads() == []
    _check(path, ["a"])


def test_leaving_by_an_error_closes_too(path: str) -> None:
    async def main() -> None:
        async with _writer(path) as writer:
            task = _append(writer, "a")
            try:
                raise ZeroDivisionError
            finally:
                tasks.append(task)

    tasks: list[asyncio.Task[Any]] = []
    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())
    assert not tasks[0].cancelled()
    assert _threads() == []
    _check(path, ["a"])


def test_closed_by_another_thread_meanwhile(path: str) -> None:
    writer = _writer(path)
    committed: list[str] = []

    async def main() -> None:
        async def coroutine(who: int) -> None:
            for turn in range(10_000):
                await writer.append_async(f"{who}/{turn}", _ids(f"{who}/{turn}"))
                committed.append(f"{who}/{turn}")

        results = await asyncio.gather(*map(coroutine, range(4)), return_exceptions=True)
        assert [type(result) for result in results] == [tracefile.ClosedError] * 4

    closer = threading.Timer(0.1, writer.close)
    closer.start()
    asyncio.run(main())
    closer.join()
    _check(path, committed)


# Threads, forks, exits


def test_threads_come_with_the_first_append_and_go_with_the_writer(path: str) -> None:
    writer = _writer(path)
    writer.append("a", _ids("a"))
    assert _threads() == []
    asyncio.run(writer.append_async("b", _ids("b")))
    assert _threads() == ["tracefile-append_0"]
    alive = weakref.ref(writer)
    del writer  # never closed
    gc.collect()
    assert alive() is None
    asyncio.run(_until(lambda: _threads() == []))
    _check(path, ["a", "b"])


def test_a_fork_while_appends_wait(path: str, writer: tracefile.TraceWriter, disk: _Disk) -> None:
    def child() -> list[str]:
        os.rename = disk._rename
        before = _threads()

        async def main() -> None:
            await writer.flush_async()  # what waits is the parent's
            await asyncio.gather(*(_append(writer, name) for name in ("d", "e")))

        asyncio.run(main())
        writer.close()
        return before

    async def main() -> None:
        tasks = [_append(writer, name) for name in "abc"]
        await _until(lambda: disk.held == 1)
        assert in_fork(child, timeout=20) == []
        assert sorted(tracefile.open(path)) == ["d", "e"]
        disk.let(3)
        await asyncio.gather(*tasks)

    asyncio.run(main())
    _check(path, list("abcde"))


def test_forks_while_the_queue_runs(path: str) -> None:
    def child(number: int) -> None:
        asyncio.run(asyncio.wait_for(writer.append_async(f"child/{number}", _ids(f"child/{number}")), 20))

    async def main() -> None:
        async def coroutine(who: int) -> None:
            while len(codes) < 15:
                await writer.append_async("x", _ids("x", 300))

        coroutines = [asyncio.create_task(coroutine(who)) for who in range(8)]
        for number in range(15):
            await asyncio.sleep(0.003 * (number % 4))
            pid = fork(lambda number=number: child(number))  # type: ignore[misc]
            codes.extend(await asyncio.to_thread(join, pid, timeout=30))
        await asyncio.gather(*coroutines)

    codes: list[int] = []
    with _writer(path) as writer:
        asyncio.run(main())
    assert codes == [0] * 15
    assert set(tracefile.open(path)) == {"x", *(f"child/{number}" for number in range(15))}


_EXIT = """
import asyncio, os, sys, time, numpy as np, tracefile
writer = tracefile.TraceWriter(sys.argv[1], num_layers=4, top_k=2, num_experts=64)
rename = os.rename
os.rename = lambda *names, **options: (time.sleep(0.05), rename(*names, **options))
ids = np.ones((50, 4, 2), np.int32)
loop = asyncio.new_event_loop()
tasks = [loop.create_task(writer.append_async(f"{n}", ids)) for n in range(20)]
loop.run_until_complete(asyncio.sleep(0))
child = os.fork()
if child == 0:
    sys.exit(7)  # not os._exit: all that Python does at an exit
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert not any(task.done() for task in tasks)
"""


def test_the_interpreter_exits_while_appends_wait(path: str) -> None:
    """Its loop was abandoned; what waited in line is written nonetheless, by this process alone."""
    run_python(_EXIT, path)
    trace = tracefile.open(path)
    assert list(trace) == [f"{n}" for n in range(20)]
    assert len(trace.segments) == 20
    assert all((trace[sample].numpy() == 1).all() for sample in trace)
    assert list(unfinished(path)) == []


# Memory

_MEMORY = """
import asyncio, os, shutil, sys, numpy as np, torch, tracefile
torch.set_num_threads(1)
tracefile.configure(cache_bytes=0)  # what was read back to be compared is not the writer's
path, way, tokens, few, many = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
config = {"num_layers": 47, "top_k": 4, "num_experts": 64}
base = np.random.default_rng(0).integers(0, 64, (tokens, 47, 4), dtype=np.int32)
arrays = [base.copy() for _ in range(8 if way == "async" else 1)]
numbers = iter(range(many))
sizes = {}

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

def vary(array, number):
    array[0, 0] = [number % 64, number // 64 % 64, number // 4096, 1]  # begins like no other, so nothing is shared

def note(number, array, experts):
    if number + 1 in (few, many):
        sizes[number + 1] = anonymous()
    if number % 20 == 5:
        for rows in (slice(500), slice(tokens - 500, tokens)):
            assert np.array_equal(experts[rows].numpy(), array[rows])
    if number % 20 == 19:  # the disk need not hold them all
        segments = os.path.join(path, "segments")
        for name in sorted(os.listdir(segments))[:-20]:
            shutil.rmtree(os.path.join(segments, name, "c"), ignore_errors=True)

async def rollout(writer, array):
    for number in numbers:
        vary(array, number)
        note(number, array, await writer.append_async(f"s{number}", array))

async def rollouts():
    async with tracefile.TraceWriter(path, **config) as writer:
        await asyncio.gather(*(rollout(writer, array) for array in arrays))

if way == "async":
    asyncio.run(rollouts())
else:
    with tracefile.TraceWriter(path, **config) as writer:
        for number in numbers:
            vary(arrays[0], number)
            note(number, arrays[0], writer.append(f"s{number}", arrays[0]))
print(sizes[many] - sizes[few])
"""


def _growth(path: str, way: str, tokens: int, few: int, many: int, timeout: float) -> int:
    """KiB of RssAnon that a writer has more after ``many`` appends than after ``few``."""
    command = [sys.executable, "-c", _MEMORY, path, way, *map(str, (tokens, few, many))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


def test_memory_does_not_grow_with_the_samples(path: str) -> None:
    assert _growth(path, "async", 2660, 40, 400, timeout=100) < 8 * 1024  # 2 MB each


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", ["sync", "async"])
def test_memory_after_4000_samples_of_20_mb(path: str, way: str) -> None:
    assert abs(_growth(path, way, 26_600, 40, 4000, timeout=1700)) < 32 * 1024


# CUDA


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_tensor_that_its_stream_has_yet_to_fill(path: str, writer: tracefile.TraceWriter) -> None:
    ids = torch.from_numpy(_ids("a"))

    async def main() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            source = ids.pin_memory().to("cuda", non_blocking=True)
            tensor = torch.zeros_like(source)
            torch.cuda._sleep(500_000_000)
            tensor.copy_(source)
            await writer.append_async("a", tensor)

    asyncio.run(main())
    _check(path, ["a"])
