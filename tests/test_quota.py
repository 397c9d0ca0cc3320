"""A quota on what a trace stores: writers that fail, and writers that wait."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import signal
import threading
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from support import fork, ids_of, join, run_python

import tracefile
from tracefile.collect import collect
from tracefile.encode import SampleEncoder
from tracefile.format import staging_path
from tracefile.quota import Quota
from tracefile.store import list_segments, read_trace_header

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

SMALL = {"num_layers": 4, "top_k": 2, "num_experts": 64}


def _writer(path: str, **options: Any) -> tracefile.TraceWriter:
    return tracefile.TraceWriter(path, **(SMALL | {"rows_per_chunk": 32} | options))


def _ids(name: str, rows: int = 100) -> np.ndarray[Any, Any]:
    return ids_of(name, rows, **SMALL)


def _stored(path: str) -> int:
    return sum(header.shard_bytes for header in tracefile.open(path).segments.values())


def _sizes(path: str) -> list[int]:
    return [header.shard_bytes for header in tracefile.open(path).segments.values()]


def _fill(path: str, samples: int = 4) -> int:
    """A trace of some samples; what it stores."""
    with _writer(path) as writer:
        for number in range(samples):
            writer.append(f"{number}", _ids(f"{number}"))
    return _stored(path)


def test_a_writer_fails_before_it_publishes_too_much(path: str) -> None:
    stored = _fill(path)
    before = list_segments(path)
    with _writer(path, quota_bytes=stored + 10) as writer:
        with pytest.raises(tracefile.QuotaExceededError, match=r"of its quota of .*, and this segment has") as caught:
            writer.append("x", _ids("x"))
        error = caught.value
        assert (vars(error)["quota"], vars(error)["used"]) == (stored + 10, stored)
        assert isinstance(error, OSError)
        assert error.errno == errno.EDQUOT
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        assert list_segments(path) == before
        assert not os.path.exists(staging_path(path))
        writer.append("empty", _ids("x", 0))  # takes nothing
        writer.truncate("1", 5)
        with pytest.raises(tracefile.QuotaExceededError):
            writer.append_many([("x", _ids("x")), ("y", _ids("y"))])
    assert _stored(path) == stored


def test_what_is_over_already_is_not_encoded(path: str) -> None:
    stored = _fill(path)
    with _writer(path, quota_bytes=stored) as writer, mock.patch.object(SampleEncoder, "chunks", side_effect=OSError):
        with pytest.raises(tracefile.QuotaExceededError):
            writer.append("x", _ids("x"))
        assert not os.path.exists(staging_path(path))


def test_up_to_the_last_byte(path: str, tmp_path: Any) -> None:
    total = _fill(str(tmp_path / "as-large.trace"))
    with _writer(path, quota_bytes=total) as writer:
        for number in range(4):
            writer.append(f"{number}", _ids(f"{number}"))
        assert _stored(path) == total
        with pytest.raises(tracefile.QuotaExceededError):
            writer.append("4", _ids("4"))


def test_deleting_and_collecting_makes_room(path: str) -> None:
    stored = _fill(path)
    with _writer(path, quota_bytes=stored + 10) as writer:
        for turn in range(4):
            with pytest.raises(tracefile.QuotaExceededError):
                writer.append(f"new {turn}", _ids(f"new {turn}"))
            tracefile.open(path).delete_samples(f"{turn}")
            with pytest.raises(tracefile.QuotaExceededError):
                writer.append(f"new {turn}", _ids(f"new {turn}"))  # the rows are there yet
            assert collect(path, grace=0, settle=0).freed_bytes > 0
            writer.append(f"new {turn}", _ids(f"{turn}"))
        assert list(tracefile.open(path)) == [f"new {turn}" for turn in range(4)]


def test_the_environment_sets_a_default(path: str) -> None:
    code = """
import sys, numpy as np, tracefile
assert tracefile.settings().quota_bytes == 1000
with tracefile.TraceWriter(sys.argv[1], num_layers=4, top_k=2, num_experts=64) as writer:
    try:
        for number in range(100):
            writer.append(str(number), np.random.default_rng(number).integers(0, 64, (50, 4, 2)))
    except tracefile.QuotaExceededError:
        print(number)
"""
    out = run_python(code, path, env=os.environ | {"TRACEFILE_QUOTA_BYTES": "1000"}).stdout
    assert 0 < int(out) < 4
    assert 500 < _stored(path) <= 1000
    tracefile.configure(quota_bytes=10)
    with _writer(path) as writer, pytest.raises(tracefile.QuotaExceededError):
        writer.append("x", _ids("x"))
    with _writer(path, quota_bytes=10**6) as writer:
        writer.append("x", _ids("x"))


@pytest.mark.parametrize(
    "options",
    [{"quota_bytes": -1}, {"quota_bytes": 1.5}, {"quota_bytes": True}, {"quota": "stop"}, {"quota_timeout": -1},
     {"quota_timeout": "1s"}],
)  # fmt: skip
def test_options_of_a_quota(path: str, options: dict[str, Any]) -> None:
    with pytest.raises(tracefile.OptionError, match=next(iter(options))):
        _writer(path, **options)
    assert not os.path.exists(path)
    with pytest.raises(tracefile.OptionError, match="quota_bytes"):
        tracefile.configure(quota_bytes="10GiB")


# Waiting


def _makes_room(path: str, samples: list[str], after: float) -> threading.Thread:
    def run() -> None:
        time.sleep(after)
        tracefile.open(path).delete_samples(samples)
        collect(path, grace=0, settle=0)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_writer_waits_for_room(path: str) -> None:
    stored = _fill(path)
    with _writer(path, quota_bytes=stored, quota="wait", quota_timeout=60) as writer:
        room = _makes_room(path, ["0", "1"], 0.3)
        began = time.monotonic()
        writer.append("x", _ids("0"))
        assert time.monotonic() - began > 0.25
        room.join()
    assert set(tracefile.open(path)) == {"2", "3", "x"}


def test_waiting_ends_with_the_timeout(path: str) -> None:
    stored = _fill(path)
    with _writer(path, quota_bytes=stored, quota="wait", quota_timeout=0.2) as writer:
        began = time.monotonic()
        with pytest.raises(tracefile.QuotaExceededError, match=r"after 0\.2"):
            writer.append("x", _ids("x"))
        assert 0.2 <= time.monotonic() - began < 5
    writer = _writer(path, quota_bytes=stored, quota="wait", quota_timeout=0)
    with writer, pytest.raises(tracefile.QuotaExceededError):
        writer.append("x", _ids("x"))


def test_what_can_never_fit_is_not_waited_for(path: str) -> None:
    with _writer(path, quota_bytes=100, quota="wait") as writer, pytest.raises(tracefile.QuotaExceededError):
        writer.append("x", _ids("x", 5000))
    with _writer(path, quota_bytes=0, quota="wait") as writer, pytest.raises(tracefile.QuotaExceededError):
        writer.append("x", _ids("x"))


def test_waiting_can_be_interrupted(path: str) -> None:
    stored = _fill(path)

    def wait() -> None:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with _writer(path, quota_bytes=stored, quota="wait") as writer:
            with pytest.raises(KeyboardInterrupt):
                writer.append("x", _ids("x"))
            assert not os.path.exists(staging_path(path))

    assert join(fork(wait)) == [0]


async def _refused(writer: tracefile.TraceWriter, name: str) -> None:
    with pytest.raises(tracefile.QuotaExceededError):
        await writer.append_async(name, _ids(name))


def test_coroutines_fail_or_wait_too(path: str) -> None:
    stored = _fill(path)

    async def main() -> None:
        async with _writer(path, quota_bytes=stored) as writer:
            await asyncio.gather(*(_refused(writer, f"x{n}") for n in range(5)))
        async with _writer(path, quota_bytes=stored, quota="wait", quota_timeout=60) as writer:
            appends = [asyncio.create_task(writer.append_async(f"x{n}", _ids(f"{n}"))) for n in range(2)]
            ticks = 0
            while ticks < 20:  # the event loop goes on
                await asyncio.sleep(0.01)
                ticks += 1
            assert not any(each.done() for each in appends)
            room = _makes_room(path, ["0", "1"], 0)
            await asyncio.gather(*appends)
            room.join()

    asyncio.run(main())
    assert set(tracefile.open(path)) == {"2", "3", "x0", "x1"}


def test_a_coroutine_that_waits_can_be_cancelled(path: str) -> None:
    stored = _fill(path)

    async def main() -> None:
        async with _writer(path, quota_bytes=stored, quota="wait") as writer:
            first = asyncio.create_task(writer.append_async("x", _ids("x")))
            second = asyncio.create_task(writer.append_async("y", _ids("y")))
            await asyncio.sleep(0.2)
            for task in (second, first):
                began = time.monotonic()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert time.monotonic() - began < 5
            assert not os.path.exists(staging_path(path))
            # The thread is free again.
            tracefile.open(path).delete_samples(["0", "1"])
            collect(path, grace=0, settle=0)
            await asyncio.wait_for(writer.append_async("z", _ids("0")), 30)

    asyncio.run(main())
    assert set(tracefile.open(path)) == {"2", "3", "z"}


# Several writers, and what it costs


def test_many_writers_share_a_quota(path: str, tmp_path: Any) -> None:
    """Together they pass it by at most one segment each."""
    _fill(str(tmp_path / "other.trace"), 30)
    largest = max(_sizes(str(tmp_path / "other.trace")))
    quota, writers = 40 * largest, 4
    _writer(path).close()

    def work(who: int) -> None:
        with _writer(path, quota_bytes=quota) as writer:
            for step in range(1000):
                try:
                    writer.append(f"{who}/{step}", _ids(f"{who}/{step}"))
                except tracefile.QuotaExceededError:
                    break
            assert step < 999

    assert join(*(fork(lambda who=who: work(who)) for who in range(writers))) == [0] * writers  # type: ignore[misc]
    assert quota - 2 * largest <= _stored(path) <= quota + writers * max(_sizes(path))


def test_the_directory_is_seldom_looked_at(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = 0.0
    real: Callable[[Any], None] = Quota._look

    def look(self: Quota) -> None:
        nonlocal spent
        began = time.thread_time()
        real(self)
        spent += time.thread_time() - began

    with _writer(path) as writer:
        for number in range(500):
            writer.append(f"{number}", _ids("x", 8))
    with _writer(path, quota_bytes=10**9) as writer:
        writer.append("first", _ids("x", 8))  # sees what there is
        monkeypatch.setattr(Quota, "_look", look)
        began = time.thread_time()
        for number in range(300):
            writer.append(f"{number}", _ids("x", 8))
        assert spent < 0.2 * (time.thread_time() - began), "although these segments are tiny, and so their appends fast"


def test_what_a_quota_knows(path: str) -> None:
    stored = _fill(path)
    header = read_trace_header(path)
    with _writer(path) as writer:
        quota = Quota(writer._ref, header.config, stored + 1)
        assert quota.used == 0
        quota.admit(1)
        assert quota.used == stored
        with pytest.raises(tracefile.QuotaExceededError):
            quota.admit(2)
        (first, *_), (size, *_) = list_segments(path), _sizes(path)
        quota.published(first, size)  # known
        assert quota.used == stored
        tracefile.open(path).delete_samples("0")
        collect(path, grace=0, settle=0)
        quota.admit(size)
        assert quota.used == stored - size
