"""Waiting for samples and following a trace, by inotify and by polling: nothing missed, nothing twice, nothing held.

Where a test is about noticing, it follows without a timeout, since the last look after one would notice everything.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import inotify_simple
import numpy as np
import pytest
from support import fork, ids_of, in_fork, join, run_python

import tracefile
from tracefile import follow as follow_module
from tracefile import format as format_module
from tracefile import visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

SMALL = {"num_layers": 3, "top_k": 2, "num_experts": 64}


@pytest.fixture(params=["inotify", "polling"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How followers notice, in this process and in those that it forks."""
    if request.param == "polling":
        monkeypatch.setitem(sys.modules, "inotify_simple", None)
    return str(request.param)


@pytest.fixture
def watch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at intervals does not come to the rescue of a watch that misses something."""
    monkeypatch.setattr(follow_module, "WATCHED_POLL_SECONDS", 1000.0)


@pytest.fixture
def writer(path: str) -> Iterator[tracefile.TraceWriter]:
    with _writer(path) as writer:
        yield writer


def _writer(path: str) -> tracefile.TraceWriter:
    return tracefile.TraceWriter(path, **SMALL, rows_per_chunk=16)


def _append(writer: tracefile.TraceWriter, *samples: str) -> None:
    """Each in a segment of its own, with rows that follow from its id."""
    for sample in samples:
        writer.append(sample, ids_of(sample, 5, **SMALL))


def _check(followed: Iterable[tuple[str, tracefile.LazyRoutedExperts]]) -> list[str]:
    """The ids that came, in order; each with the rows that it must have."""
    samples = []
    for sample, experts in followed:
        np.testing.assert_array_equal(experts.numpy(), ids_of(sample, 5, **SMALL))
        samples.append(sample)
    return samples


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def _later(act: Callable[[], object], seconds: float = 0.1) -> Iterator[None]:
    """Do something in another thread while the block runs."""
    timer = threading.Timer(seconds, act)
    timer.start()
    try:
        yield
    finally:
        timer.join()


# Nothing missed, nothing twice


def test_many_writers_and_followers(path: str, way: str) -> None:
    """Two followers of one Trace in two threads and one in another process, while somebody refreshes, too."""
    _writer(path).close()
    trace = tracefile.open(path)
    assert len(trace) == 0
    samples = [f"{number}/{i}" for number in range(4) for i in range(12)]

    def write(number: int) -> None:
        mine = [sample for sample in samples if sample.startswith(f"{number}/")]
        with _writer(path) as writer:
            _append(writer, *mine[:9])
            writer.append_many((sample, ids_of(sample, 5, **SMALL)) for sample in mine[9:])

    def collect(trace: tracefile.Trace) -> list[str]:
        seen: list[str] = []
        with trace.follow(timeout=30, stop=lambda: len(seen) == len(samples)) as follower:
            for sample in follower:
                seen += _check([sample])
        # What any of them took in, all have seen: nothing more is to come.
        return seen + _check(tracefile.open(path).follow(timeout=0))

    def elsewhere() -> None:
        assert sorted(collect(trace)) == sorted(samples)

    inside: list[list[str]] = []
    followers = [threading.Thread(target=lambda: inside.append(collect(trace))) for _ in range(2)]
    children = [fork(elsewhere)]
    for thread in followers:
        thread.start()
    children += [fork(lambda number=number: write(number)) for number in range(4)]  # type: ignore[misc]
    while any(thread.is_alive() for thread in followers):
        trace.refresh()
        time.sleep(0.01)
    assert join(*children) == [0] * 5
    assert [sorted(seen) for seen in inside] == [sorted(samples)] * 2
    for number in range(4):  # of one writer, in the order of its commits
        assert [s for s in inside[0] if s.startswith(f"{number}/")] == [f"{number}/{i}" for i in range(12)]
    assert sorted(trace) == sorted(samples)


def test_what_is_there_and_what_comes(path: str, writer: tracefile.TraceWriter, way: str) -> None:
    _append(writer, "a", "b")
    trace = tracefile.open(path)
    _append(writer, "c")
    follower = trace.follow()
    everything = trace.follow(existing=True)
    assert _check([next(follower)]) == ["c"]  # committed since the trace was opened
    assert trace.refresh() == []
    assert "c" in trace
    assert _check([next(everything) for _ in range(3)]) == ["a", "b", "c"]
    with _later(lambda: _append(writer, "d")):
        assert _check([next(follower)]) == ["d"]
    assert _check([next(everything)]) == ["d"]
    assert _check(trace.follow(timeout=0)) == []
    assert _check(trace.follow(timeout=0, existing=True)) == ["a", "b", "c", "d"]


def test_a_commit_right_after_the_first_listing(
    path: str, writer: tracefile.TraceWriter, monkeypatch: pytest.MonkeyPatch, watch_only: None
) -> None:
    trace = tracefile.open(path)
    real = visible.list_segments

    def list_segments(name: str) -> list[str]:
        listed = real(name)
        monkeypatch.setattr(visible, "list_segments", real)
        _append(writer, "after")
        return listed

    monkeypatch.setattr(visible, "list_segments", list_segments)
    assert _check([next(trace.follow())]) == ["after"]


def test_a_writer_whose_clock_is_behind(path: str, writer: tracefile.TraceWriter, way: str) -> None:
    """Its segment counts as older: what only it has comes, what it revises does not."""
    trace = tracefile.open(path)
    follower = trace.follow(timeout=0.3)
    _append(writer, "a", "b")
    assert _check([next(follower), next(follower)]) == ["a", "b"]

    def late() -> None:
        with (
            mock.patch.object(format_module, "_last_segment_time", 0),
            mock.patch("time.time_ns", return_value=10**15),
            _writer(path) as writer,
        ):
            older = {"a": ids_of("older", 7, **SMALL), "late": ids_of("late", 5, **SMALL)}
            writer.append_many(older.items())

    in_fork(late)
    assert _check([next(follower)]) == ["late"]
    _append(writer, "c")
    assert _check(follower) == ["c"]
    assert sorted(_check(trace.items())) == ["a", "b", "c", "late"]
    assert list(trace) == list(tracefile.open(path))


def test_revisions(path: str, writer: tracefile.TraceWriter, way: str) -> None:
    trace = tracefile.open(path)
    follower = trace.follow(timeout=0.1)
    _append(writer, "a")
    assert _check([next(follower)]) == ["a"]
    writer.append("b", ids_of("replaced before anybody looks", 9, **SMALL))
    writer.append("a", ids_of("a", 7, **SMALL))
    _append(writer, "b")
    seen = list(follower)
    assert [(sample, len(experts)) for sample, experts in seen] == [("a", 7), ("b", 5)]
    assert _check(seen[1:]) == ["b"]


def test_after_a_fork_both_go_on(path: str, writer: tracefile.TraceWriter, watch_only: None) -> None:
    """A child that read its parent's events would take them from it."""
    trace = tracefile.open(path)
    samples = [f"s{i}" for i in range(40)]
    with trace.follow(timeout=30) as follower:
        _append(writer, "before")
        assert _check([next(follower)]) == ["before"]

        def go_on() -> None:
            started = time.monotonic()
            assert _check(next(follower) for _ in samples) == samples
            assert time.monotonic() - started < 25  # the timeout did not come to the rescue

        children = [fork(go_on) for _ in range(2)]
        for sample in samples:
            _append(writer, sample)
            time.sleep(0.005)
        go_on()
    assert join(*children) == [0, 0]


# Where inotify cannot be had, or does not tell


def test_no_more_watches_for_this_user(path: str, writer: tracefile.TraceWriter) -> None:
    before = _files()
    _append(writer, "a")
    trace = tracefile.open(path)
    with mock.patch.object(inotify_simple.INotify, "add_watch", side_effect=OSError(errno.ENOSPC, "no space")):
        follower = trace.follow()
        with _later(lambda: _append(writer, "b")):
            assert _check([next(follower)]) == ["b"]
    trace.close()
    assert _files() <= before  # fewer where the segments of other tests made room


@pytest.mark.parametrize("shared", [True, False])
def test_a_commit_that_inotify_does_not_tell_of(
    path: str, writer: tracefile.TraceWriter, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another host's. Where the file system is known to be shared, there is no waiting for the second."""
    add_watch, deleted = inotify_simple.INotify.add_watch, inotify_simple.flags.DELETE
    monkeypatch.setattr(
        inotify_simple.INotify, "add_watch", lambda inotify, name, mask: add_watch(inotify, name, deleted)
    )
    monkeypatch.setattr("tracefile.source.is_network_file_system", lambda kind: shared)
    monkeypatch.setattr(follow_module, "WATCHED_POLL_SECONDS", 1000.0 if shared else 0.2)
    trace = tracefile.open(path)
    with _later(lambda: _append(writer, "a"), 0.3):
        assert _check([next(trace.follow())]) == ["a"]


def test_too_many_events(path: str, writer: tracefile.TraceWriter, watch_only: None) -> None:
    """The kernel says that it dropped some: the watch starts anew, and the directory is listed."""
    trace = tracefile.open(path)
    with trace.follow() as follower:
        _append(writer, "a")
        assert _check([next(follower)]) == ["a"]
        dropped = inotify_simple.Event(-1, inotify_simple.flags.Q_OVERFLOW, 0, "")
        real = inotify_simple.INotify.read

        def read(inotify: Any, timeout: int) -> list[Any]:
            return [dropped] if real(inotify, timeout=timeout) else []

        with mock.patch.object(inotify_simple.INotify, "read", read):
            _append(writer, "b", "c")
            assert _check([next(follower), next(follower)]) == ["b", "c"]


@pytest.mark.parametrize("changed", ["now", "long ago"])
def test_how_often_the_directory_is_listed(
    path: str, writer: tracefile.TraceWriter, way: str, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only while its time cannot tell whether it has changed."""
    trace = tracefile.open(path)
    if changed == "long ago":
        os.utime(os.path.join(path, "segments"), (1e9, 1e9))
    listed = 0
    real = visible.list_segments

    def list_segments(name: str) -> list[str]:
        nonlocal listed
        listed += 1
        return real(name)

    monkeypatch.setattr(visible, "list_segments", list_segments)
    assert _check(trace.follow(timeout=0.3)) == []
    if way == "polling" and changed == "now":
        assert 3 <= listed <= 20
    else:
        assert listed == 2  # at first and in the end


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_system_with_a_coarse_clock(
    path: str, writer: tracefile.TraceWriter, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits that the directory's time does not show: soon after each other, or, by another host, at any time."""
    monkeypatch.setitem(sys.modules, "inotify_simple", None)
    monkeypatch.setattr("tracefile.source.is_network_file_system", lambda kind: shared)
    segments = os.path.join(path, "segments")
    now = 1e9 if shared else time.time()

    def append(sample: str) -> None:
        _append(writer, sample)
        os.utime(segments, (now, now))

    os.utime(segments, (now, now))
    trace = tracefile.open(path)
    with trace.follow() as follower:
        for sample in ("a", "b", "c"):
            with _later(lambda sample=sample: append(sample)):  # type: ignore[misc]
                assert _check([next(follower)]) == [sample]


# Damage


@pytest.fixture
def damaged(
    path: str, writer: tracefile.TraceWriter, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[tracefile.Trace, Callable[[], None]]]:
    """A trace opened before "a", "broken" and "b" were committed, and what mends "broken"."""
    monkeypatch.setattr(follow_module, "WATCHED_POLL_SECONDS", 0.2)
    trace = tracefile.open(path)
    _append(writer, "a", "broken", "b")
    segment = tracefile.open(path).entry("broken").spans[0].segment
    document = os.path.join(path, "segments", segment, "zarr.json")

    def mend() -> None:
        os.rename(document + "~", document)

    os.rename(document, document + "~")
    os.utime(os.path.join(path, "segments"), (1e9, 1e9))  # what happens in a segment does not change it
    yield trace, mend
    trace.close()


def test_damage_does_not_hide_what_is_sound(
    writer: tracefile.TraceWriter,
    damaged: tuple[tracefile.Trace, Callable[[], None]],
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(visible, "_DAMAGE_GRACE_SECONDS", 0.3)
    trace, mend = damaged
    follower = trace.follow()
    assert _check([next(follower), next(follower)]) == ["a", "b"]
    with pytest.raises(tracefile.SegmentMissingError):
        next(follower)
    with pytest.raises(tracefile.SegmentMissingError):
        trace.refresh()
    _append(writer, "c")
    assert _check([next(follower)]) == ["c"]  # it is not said twice
    with pytest.raises(tracefile.SegmentMissingError):
        trace.wait(["c", "broken"], timeout=10)
    assert _check(zip("abc", trace.wait(list("abc")), strict=True)) == ["a", "b", "c"]
    with _later(mend):
        assert _check([next(follower)]) == ["broken"]
    assert trace.refresh() == []


def test_damage_that_passes(damaged: tuple[tracefile.Trace, Callable[[], None]], way: str) -> None:
    """A network file system may show a segment before what is in it."""
    trace, mend = damaged
    with _later(mend):
        assert sorted(_check(trace.follow(timeout=0.7))) == ["a", "b", "broken"]


def test_a_trace_that_is_removed(
    path: str, writer: tracefile.TraceWriter, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_module, "WATCHED_POLL_SECONDS", 0.2)
    trace = tracefile.open(path)
    follower = trace.follow()
    with _later(lambda: os.rename(path, path + ".gone")), pytest.raises(tracefile.TraceNotFoundError, match="gone"):
        next(follower)
    os.rename(path + ".gone", path)
    _append(writer, "a")
    assert _check([next(follower)]) == ["a"]


# Ways to end


def _no_later_than(seconds: float, act: Callable[[], Any]) -> Any:
    started = time.monotonic()
    result = act()
    assert time.monotonic() - started < seconds
    return result


def test_idle(path: str, writer: tracefile.TraceWriter, way: str) -> None:
    _append(writer, "a")
    trace = tracefile.open(path)
    follower = trace.follow(existing=True, timeout=0.3)
    started = time.monotonic()
    assert _check(follower) == ["a"]
    assert time.monotonic() - started >= 0.3
    _append(writer, "b")
    assert list(follower) == []  # it has ended


@pytest.mark.parametrize("kind", ["event", "callable"])
def test_stopped(path: str, writer: tracefile.TraceWriter, way: str, kind: str) -> None:
    _append(writer, "a", "b")
    trace = tracefile.open(path)
    event = threading.Event()
    stop = event if kind == "event" else event.is_set
    follower = trace.follow(existing=True, stop=stop)
    assert _check([next(follower), next(follower)]) == ["a", "b"]
    with _later(event.set):
        assert _no_later_than(5, lambda: list(follower)) == []
    assert list(trace.follow(existing=True, stop=stop)) == []


def test_closed(path: str, writer: tracefile.TraceWriter, way: str) -> None:
    before = _files()
    trace = tracefile.open(path)
    follower = trace.follow()
    with _later(trace.close):
        assert _no_later_than(5, lambda: list(follower)) == []
    for act in (trace.follow, lambda: trace.wait("a"), lambda: trace.wait([])):
        with pytest.raises(tracefile.ClosedError):
            act()
    other = tracefile.open(path)
    with _later(other.close), pytest.raises(tracefile.ClosedError):
        other.wait("never")
    assert _files() == before


def test_interrupted(path: str, writer: tracefile.TraceWriter, way: str) -> None:
    """SIGINT ends a wait and an iteration; both can go on, and nothing stays open."""
    trace = tracefile.open(path)
    reader, pipe = os.pipe()

    def elsewhere() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        before = _files()
        follower = trace.follow()
        for act in (lambda: next(follower), lambda: trace.wait("a")):
            try:
                os.write(pipe, b".")
                act()
            except KeyboardInterrupt:
                continue
            raise AssertionError("not interrupted")
        os.write(pipe, b".")
        assert _check([next(follower)]) == ["a"]
        assert _check([("a", *trace.wait("a"))]) == ["a"]
        follower.close()
        trace.close()
        assert _files() <= before  # fewer where the segments of other tests made room

    pid = fork(elsewhere)
    for _ in range(2):
        os.read(reader, 1)
        time.sleep(0.2)
        os.kill(pid, signal.SIGINT)
    os.read(reader, 1)
    _append(writer, "a")
    assert join(pid) == [0]
    os.close(reader)
    os.close(pipe)


def test_nothing_stays_open_or_runs(path: str, writer: tracefile.TraceWriter, way: str) -> None:
    _append(writer, "a")
    trace = tracefile.open(path)
    before, threads = _files(), len(os.listdir("/proc/self/task"))
    for _ in trace.follow(existing=True):
        break  # nobody holds the iterator any more
    for _ in range(3):
        follower = trace.follow(timeout=0.01)
        assert _check(follower) == []
        with pytest.raises(tracefile.WaitTimeoutError):
            trace.wait("never", timeout=0.01)
    with trace.follow(timeout=0.01) as another:
        next(another, None)
        running = trace.follow(timeout=10)
        _append(writer, "b")
        next(running)
        assert _files() == before + (way == "inotify")
        assert len(os.listdir("/proc/self/task")) == threads
    del running
    assert _files() == before


def test_importing_tracefile_loads_none_of_it() -> None:
    run_python("import sys, tracefile; assert not {'tracefile.follow', 'inotify_simple'} & set(sys.modules)")


# Waiting


def test_wait(path: str, writer: tracefile.TraceWriter, way: str) -> None:
    _append(writer, "a", "b")
    trace = tracefile.open(path)
    with mock.patch.object(visible, "list_segments", side_effect=AssertionError):
        assert _check(zip("bab", trace.wait(["b", "a", "b"]), strict=True)) == ["b", "a", "b"]
        assert _check([("a", *trace.wait("a", timeout=0))]) == ["a"]
        assert trace.wait([]) == []
    _append(writer, "c")
    assert _check([("c", *trace.wait("c", timeout=0))]) == ["c"]

    def write() -> None:
        with _writer(path) as writer:
            for sample in ("d", "e", "f"):
                time.sleep(0.05)
                _append(writer, sample)

    pid = fork(write)
    assert _check(zip("fade", trace.wait(iter("fade"), timeout=30), strict=True)) == ["f", "a", "d", "e"]
    assert join(pid) == [0]


def test_wait_in_vain(path: str, writer: tracefile.TraceWriter, way: str) -> None:
    _append(writer, "a")
    trace = tracefile.open(path)
    wanted = ["a", *(f"s{i}" for i in range(7))]
    started = time.monotonic()
    with _later(lambda: _append(writer, "s2")), pytest.raises(tracefile.WaitTimeoutError) as caught:
        trace.wait(wanted, timeout=0.4)
    assert time.monotonic() - started >= 0.4
    assert isinstance(caught.value, TimeoutError)
    missing = ["s0", "s1", "s3", "s4", "s5", "s6"]
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.path, error.missing) == (path, missing)
        assert "6 of 8 samples" in str(error)
        assert "'s0', 's1', 's3', 's4', 's5', ...;" in str(error)
    assert "s2" in trace


@pytest.mark.parametrize("ids", [[7], ["a", None], b"a"])
def test_wait_for_what_is_no_id(path: str, writer: tracefile.TraceWriter, ids: Any) -> None:
    with pytest.raises(tracefile.SampleIdError):
        tracefile.open(path).wait(ids)


def test_it_is_seen_soon(path: str, writer: tracefile.TraceWriter, way: str) -> None:
    """A lax bound; tools/bench/follow.py measures."""
    trace = tracefile.open(path)
    reader, pipe = os.pipe()

    def elsewhere() -> None:
        with trace.follow(timeout=30) as follower:
            for _ in range(15):
                next(follower)
                os.write(pipe, time.monotonic_ns().to_bytes(8, "little"))

    pid = fork(elsewhere)
    latencies = []
    for i in range(15):
        _append(writer, f"s{i}")
        returned = time.monotonic_ns()
        latencies.append(int.from_bytes(os.read(reader, 8), "little") - returned)
    assert join(pid) == [0]
    assert sorted(latencies)[7] < 300e6
    os.close(reader)
    os.close(pipe)
