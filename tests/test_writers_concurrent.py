"""Any number of writers on one path, killed at any moment: readers see whole samples, and all that was appended."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from support import Faults, fork, ids_of, in_fork, join

import tracefile
from tracefile.format import staging_path
from tracefile.local_store import LocalStore
from tracefile.shard_file import ShardFile
from tracefile.store import unfinished

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL = {"num_layers": 4, "top_k": 2, "num_experts": 64}
OTHER = SMALL | {"num_experts": 300}


def _writer(path: str, **options: Any) -> tracefile.TraceWriter:
    return tracefile.TraceWriter(path, **(SMALL | {"rows_per_chunk": 32} | options))


def _ids(sample: str) -> np.ndarray[Any, Any]:
    """What the sample of this name holds, whoever wrote it: ``name@rows``."""
    return ids_of(sample, int(sample.rpartition("@")[2]), **SMALL)


def _check(trace: tracefile.Trace, samples: list[str]) -> None:
    for sample in samples:
        np.testing.assert_array_equal(trace[sample].numpy(), _ids(sample), err_msg=sample)


class _Gate:
    """Holds forked children back until all of them are there."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()

    def wait(self) -> None:
        os.close(self._writer)
        os.read(self._reader, 1)

    def open(self) -> None:
        os.close(self._writer)
        os.close(self._reader)


def _together(count: int, work: Callable[[int], object]) -> list[int]:
    """Fork ``count`` children that start ``work(number)`` at the same moment; their process ids."""
    gate = _Gate()

    def run(number: int) -> None:
        gate.wait()
        work(number)

    pids = [fork(lambda number=number: run(number)) for number in range(count)]  # type: ignore[misc]
    gate.open()
    return pids


def _names(who: int, step: int) -> list[str]:
    """Samples of one append: one, or a segment of several."""
    rng = random.Random(1000 * who + step)
    return [f"{who}/{step}/{i}@{rng.randrange(100)}" for i in range(1 if step % 2 else rng.randrange(1, 6))]


def _append(writer: tracefile.TraceWriter, samples: list[str]) -> None:
    if len(samples) == 1:
        returned = [writer.append(samples[0], _ids(samples[0]))]
    else:
        returned = writer.append_many((sample, _ids(sample)) for sample in samples)
    assert [len(experts) for experts in returned] == [len(_ids(sample)) for sample in samples]


def test_eight_writers_make_one_trace(path: str) -> None:
    steps = 12

    def work(who: int) -> None:
        with _writer(path, codec=("fast", "compact", "none")[who % 3]) as writer:
            for step in range(steps):
                _append(writer, _names(who, step))

    pids = _together(8, work)
    batches = [_names(who, step) for who in range(8) for step in range(steps)]
    batch_of = {sample: i for i, batch in enumerate(batches) for sample in batch}

    # A reader that looks all the while sees each batch whole or not at all.
    while not os.path.exists(path):
        time.sleep(0.001)
    trace = tracefile.open(path)
    seen: list[str] = list(trace)
    new, refreshes = seen, 0
    while len(seen) < len(batch_of) and refreshes < 100_000:
        assert sorted(new) == sorted(sample for batch in {batch_of[s] for s in new} for sample in batches[batch])
        _check(trace, new)
        new = trace.refresh()
        seen += new
        refreshes += 1
    assert join(*pids) == [0] * 8
    _check(trace, new)

    assert sorted(seen) == sorted(batch_of)
    again = tracefile.open(path)
    assert sorted(again) == sorted(batch_of)
    _check(again, list(again))
    assert again.uuid == trace.uuid
    assert len(again.segments) == len(batches)
    assert {header.trace_uuid for header in again.segments.values()} == {trace.uuid}
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]


@pytest.mark.parametrize("beforehand", ["nothing", "empty directory"])
def test_creating_at_the_same_moment(path: str, beforehand: str) -> None:
    """Only what goes on around the creation, many times."""
    for attempt in range(6):
        here = f"{path}.{attempt}"
        if beforehand == "empty directory":
            os.mkdir(here)

        def work(who: int, here: str = here) -> None:
            with _writer(here) as writer:
                _append(writer, [f"{who}@3"])

        assert join(*_together(8, work)) == [0] * 8
        trace = tracefile.open(here)
        assert sorted(trace) == [f"{who}@3" for who in range(8)]
        _check(trace, list(trace))
        assert {header.trace_uuid for header in trace.segments.values()} == {trace.uuid}
        assert not os.path.exists(staging_path(here))


def test_two_configurations_race(path: str) -> None:
    """One wins; every writer of the other is told so, and leaves nothing behind."""
    for attempt in range(6):
        here = f"{path}.{attempt}"

        def work(who: int, here: str = here) -> None:
            config = (SMALL, OTHER)[who % 2]
            try:
                writer = _writer(here, **config)
            except tracefile.ConfigurationMismatchError as error:
                configs = tracefile.ModelConfig(**config), tracefile.ModelConfig(**(SMALL, OTHER)[1 - who % 2])
                os._exit(77 if (error.ours, error.theirs) == configs else 78)
            with writer:
                writer.append(f"{who}", ids_of(f"{who}", 5, **config))

        codes = join(*_together(8, work))
        trace = tracefile.open(here)
        winner = [SMALL, OTHER].index({name: getattr(trace.config, name) for name in SMALL})
        assert codes == [0 if who % 2 == winner else 77 for who in range(8)]
        assert sorted(trace) == [str(who) for who in range(winner, 8, 2)]
        for sample in trace:
            np.testing.assert_array_equal(trace[sample].numpy(), ids_of(sample, 5, **(SMALL, OTHER)[winner]))
        assert not os.path.exists(staging_path(here))


@pytest.mark.parametrize("configuration", [SMALL, OTHER], ids=["same", "other"])
def test_another_writer_publishes_the_root_first(
    path: str, configuration: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very moment: between our look at the path and our rename."""
    real = os.rename
    uuids: list[str] = []

    def rename(source: str, target: str) -> None:
        monkeypatch.undo()
        with _writer(target, **configuration):
            uuids.append(tracefile.open(target).uuid)
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    if configuration is SMALL:
        _writer(path).close()
    else:
        with pytest.raises(tracefile.ConfigurationMismatchError):
            _writer(path)
    assert [tracefile.open(path).uuid] == uuids
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]


@pytest.mark.parametrize("act", [tracefile.open, lambda path: _writer(path).close()], ids=["reader", "writer"])
@pytest.mark.parametrize("look", [1, 2])
def test_the_trace_appears_while_one_looks(
    path: str, look: int, act: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between reading ``zarr.json``, in vain, and asking what is at the path."""
    real = LocalStore.read
    looks = 0

    def read(store: LocalStore, name: str) -> bytes:
        nonlocal looks
        looks += 1
        try:
            return real(store, name)
        finally:
            if looks == look:
                monkeypatch.undo()
                _writer(path).close()

    if look == 2:
        os.mkdir(path)
    monkeypatch.setattr(LocalStore, "read", read)
    try:
        act(path)
    except tracefile.NotATraceError:
        assert (act, look) == (tracefile.open, 2)  # it was an empty directory, at the last look too
    assert list(tracefile.open(path)) == []
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]


@pytest.mark.parametrize("step", ["create", "append"])
def test_staging_vanishes_between_two_steps(path: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that closes removes the empty staging directory that another has just made or found."""
    real = os.mkdir
    removed = 0

    def mkdir(name: str, *arguments: Any) -> None:
        nonlocal removed
        if os.path.dirname(name) == staging_path(path) and removed < 3:
            removed += 1
            os.rmdir(staging_path(path))
        real(name, *arguments)

    if step == "create":
        monkeypatch.setattr(os, "mkdir", mkdir)
        writer = _writer(path)
    else:
        writer = _writer(path)
        monkeypatch.setattr(os, "mkdir", mkdir)
        _append(writer, ["a@40"])
    monkeypatch.undo()
    assert removed == 3
    _append(writer, ["b@40"])
    writer.close()
    trace = tracefile.open(path)
    _check(trace, list(trace))
    assert not os.path.exists(staging_path(path))


# Killed writers


class _Victim(NamedTuple):
    pid: int
    reports: int


def _start_victim(path: str, who: int) -> _Victim:
    """A child that appends without end and reports, over a pipe, each append that has returned."""
    reader, writer = os.pipe()

    def work() -> None:
        os.close(reader)
        trace_writer = _writer(path, codec=("fast", "none")[who % 2])
        step = 0
        while True:
            samples = _names(who, step)
            _append(trace_writer, samples)
            os.write(writer, f"{step}\n".encode())
            step += 1

    pid = fork(work)
    os.close(writer)
    return _Victim(pid, reader)


def _kill(victim: _Victim) -> int:
    """Kill it; how many of its appends had returned."""
    os.kill(victim.pid, signal.SIGKILL)
    with open(victim.reports) as pipe:
        steps = pipe.read().split()
    assert join(victim.pid) == [-signal.SIGKILL]
    assert steps == [str(step) for step in range(len(steps))]
    return len(steps)


def test_writers_killed_at_random(path: str) -> None:
    rng = random.Random(20261130)
    kills, returned = 60, {}
    with _writer(path) as survivor:
        for first in range(0, kills, 2):
            victims = {who: _start_victim(path, who) for who in (first, first + 1)}
            _append(survivor, [f"survivor/{first}@20"])
            time.sleep(rng.uniform(0.0, 0.025))
            for who, victim in victims.items():
                returned[who] = _kill(victim)

        trace = tracefile.open(path)
        _check(trace, list(trace))
        by_writer: dict[int, set[int]] = {who: set() for who in returned}
        whole: dict[tuple[int, int], list[str]] = {}
        for sample in trace:
            if not sample.startswith("survivor"):
                who, step = (int(part) for part in sample.split("/")[:2])
                by_writer[who].add(step)
                whole.setdefault((who, step), []).append(sample)
        for who, steps in by_writer.items():
            # Nothing that append returned is lost; at most the append during which it was killed is there besides.
            assert steps in (set(range(returned[who])), set(range(returned[who] + 1))), who
        for (who, step), samples in whole.items():
            assert samples == _names(who, step)
        assert [f"survivor/{first}@20" for first in range(0, kills, 2)] == [s for s in trace if s[0] == "s"]
        assert sum(returned.values()) > kills  # they had got to work

    # What they left is beside the trace, where no reader looks; it is not removed under a writer that may be alive.
    left = list(unfinished(path))
    assert not set(left) & set(os.listdir(os.path.join(path, "segments")))
    assert sorted(os.listdir(path)) == ["segments", "zarr.json"]
    with _writer(path) as writer:
        _append(writer, ["after@9"])
    assert list(unfinished(path)) == left
    assert tracefile.open(path)["after@9"].shape[0] == 9


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("samples", [["x@70"], ["x@70", "y@0", "z@33"], ["none@0"]], ids=len)
def test_a_writer_killed_at_each_step_of_append(path: str, samples: list[str], durable: bool) -> None:
    with _writer(path) as writer:
        _append(writer, ["before@9"])
    outcomes = []
    for at in range(1, 100):

        def work(at: int = at) -> None:
            faults = Faults(os.path.dirname(path), lambda: os.kill(os.getpid(), signal.SIGKILL))
            writer = _writer(path, durable=durable)
            faults.arm(at)
            _append(writer, samples)

        (code,) = join(fork(work))
        trace = tracefile.open(path)
        assert list(trace) in (["before@9"], ["before@9", *samples])
        _check(trace, list(trace))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        outcomes.append(len(trace) > 1)
        for segment in list(trace.segments)[1:]:
            shutil.rmtree(os.path.join(path, "segments", segment))
        shutil.rmtree(staging_path(path), ignore_errors=True)
    assert code == 0
    assert len(outcomes) >= (10 if durable else 5)
    # Once it is visible it stays; before the rename, nothing is.
    assert outcomes == sorted(outcomes)
    assert not outcomes[0]


@pytest.mark.parametrize("durable", [False, True])
def test_a_writer_killed_at_each_step_of_creating(path: str, durable: bool) -> None:
    for at in range(1, 100):

        def work(at: int = at) -> None:
            faults = Faults(os.path.dirname(path), lambda: os.kill(os.getpid(), signal.SIGKILL))
            faults.arm(at)
            _writer(path, durable=durable).close()

        (code,) = join(fork(work))
        if os.path.exists(path):
            assert list(tracefile.open(path)) == []
        else:
            with pytest.raises(tracefile.TraceNotFoundError):
                tracefile.open(path)
        with _writer(path) as writer:  # whatever it left, the next writer gets to work
            _append(writer, ["next@5"])
        assert list(tracefile.open(path)) == ["next@5"]
        shutil.rmtree(path)
        shutil.rmtree(staging_path(path), ignore_errors=True)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert code == 0
    assert at >= (10 if durable else 6)


# Forks, threads, moves


def test_a_writer_goes_on_after_a_fork(path: str) -> None:
    writer = _writer(path)
    _append(writer, ["warm up@40"])  # its buffers are made

    def work(who: int) -> None:
        for step in range(20):
            _append(writer, [f"child {who}/{step}@{30 + step}"])
        writer.close()

    pids = _together(3, work)
    for step in range(20):
        _append(writer, [f"parent/{step}@{60 + step}"])
    assert join(*pids) == [0] * 3
    _append(writer, ["parent/last@5"])
    writer.close()
    trace = tracefile.open(path)
    assert len(trace) == 1 + 3 * 20 + 20 + 1
    _check(trace, list(trace))
    assert not os.path.exists(staging_path(path))


def test_threads_share_a_writer(path: str) -> None:
    errors: list[BaseException] = []
    start = threading.Barrier(6)

    def work(who: int) -> None:
        try:
            start.wait()
            for step in range(15):
                _append(writer, [f"{who}/{step}/{i}@{300 + step}" for i in range(1 + step % 2)])
        except BaseException as error:
            errors.append(error)

    with _writer(path) as writer:
        threads = [threading.Thread(target=work, args=(who,)) for who in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    trace = tracefile.open(path)
    assert len(trace) == 6 * (15 + 7)
    _check(trace, list(trace))


def test_two_threads_in_the_middle_of_a_sample(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, without chance: one appends a whole sample while the other is between two of its chunks."""
    real = ShardFile.write_rows
    nested = False

    def write_rows(self: ShardFile, rows: int, chunks: Any) -> int:
        def interrupted() -> Any:
            nonlocal nested
            for number, chunk in enumerate(chunks):
                if rows == 200 and number == 1 and not nested:
                    nested = True
                    _append(writer, ["inner@100"])
                yield chunk

        return real(self, rows, interrupted())

    monkeypatch.setattr(ShardFile, "write_rows", write_rows)
    with _writer(path, layers_per_chunk=1) as writer:
        _append(writer, ["outer@200"])
    monkeypatch.undo()
    assert nested
    trace = tracefile.open(path)
    assert sorted(trace) == ["inner@100", "outer@200"]
    _check(trace, list(trace))


def test_staging_stays_until_the_last_writer_leaves(path: str) -> None:
    first, second = _writer(path), _writer(path)
    _append(first, ["a@5"])
    build = os.path.join(staging_path(path), "in-progress")
    os.makedirs(build)  # of another writer, in the middle of an append
    first.close()
    assert os.path.isdir(build)
    assert list(unfinished(path)) == ["in-progress"]
    os.rmdir(build)
    second.close()
    assert not os.path.exists(staging_path(path))
    assert list(unfinished(path)) == []


def test_leftovers_are_invisible(path: str) -> None:
    """A whole segment, but for the rename."""

    def work() -> None:
        LocalStore.publish = lambda *_, **__: os._exit(9)
        _append(_writer(path), ["half@50"])

    with _writer(path) as writer:
        _append(writer, ["a@5"])
    assert join(fork(work)) == [9]
    (left,) = unfinished(path)
    assert sorted(os.listdir(os.path.join(staging_path(path), left))) == ["c", "zarr.json"]
    assert list(tracefile.open(path)) == ["a@5"]
    assert left not in os.listdir(os.path.join(path, "segments"))


@pytest.mark.parametrize("how", ["move", "copy", "copy with leftovers"])
def test_a_trace_moves_whole(path: str, how: str) -> None:
    with _writer(path) as writer:
        _append(writer, ["a@70"])
        _append(writer, ["b@3", "c@64"])
        handle = pickle.dumps(writer.append("d@9", _ids("d@9")))
    if how == "copy with leftovers":
        os.makedirs(os.path.join(staging_path(path), "in-progress", "c"))
    target = os.path.join(os.path.dirname(path), "elsewhere", "renamed")
    before = tracefile.open(path)
    if how == "move":
        os.mkdir(os.path.dirname(target))
        shutil.move(path, target)
    else:
        shutil.copytree(path, target)
    moved = tracefile.open(target)
    assert moved.uuid == before.uuid
    assert list(moved) == ["a@70", "b@3", "c@64", "d@9"]
    _check(moved, list(moved))
    with _writer(target) as writer:
        _append(writer, ["e@5"])
    assert moved.refresh() == ["e@5"]
    _check(moved, ["e@5"])
    if how == "move":
        # A handle names the path at which it was made; there is nothing there now.
        with pytest.raises(tracefile.SegmentMissingError) as caught:
            in_fork_error(lambda: pickle.loads(handle).numpy())
        assert caught.value.path is not None
        assert caught.value.path.startswith(path)
        assert not os.path.exists(path)
    else:
        np.testing.assert_array_equal(pickle.loads(handle).numpy(), _ids("d@9"))


def in_fork_error(work: Callable[[], Any]) -> None:
    """Raise here what ``work`` raises in a forked child, in which nothing is open yet."""

    def caught() -> BaseException | None:
        try:
            work()
        except BaseException as error:
            return error
        return None

    error = in_fork(caught)
    if error is not None:
        raise error


def test_another_trace_at_the_path_of_a_handle(path: str) -> None:
    """A step's trace deleted and written anew: old handles must not read the new one's rows."""
    with _writer(path) as writer:
        old = pickle.dumps(writer.append("a@9", _ids("a@9")))
    segment = os.listdir(os.path.join(path, "segments"))
    shutil.rmtree(path)
    with _writer(path) as writer:
        writer.append("a@9", 1 - np.minimum(_ids("a@9"), 1))
    with pytest.raises(tracefile.SegmentMissingError) as caught:
        pickle.loads(old).numpy()
    assert caught.value.segment in segment
