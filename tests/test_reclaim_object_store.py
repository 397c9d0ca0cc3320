"""``tracefile gc`` over an object store: marks instead of renames, killed and interrupted between any two requests."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import json
import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from collecting import (
    DAY,
    NAMING,
    check_samples,
    collect_later,
    collect_now,
    race,
    segment_of,
    share,
    small_ids,
    small_traces,
    small_writer,
    trace_of_everything,
)
from support import fork, in_fork, join
from typer.testing import CliRunner

import tracefile
from tracefile import object_reclaim
from tracefile.cli import app
from tracefile.collect import collect
from tracefile.format import new_segment_id
from tracefile.object_client import ObjectClient, client
from tracefile.object_store import ObjectStore
from tracefile.segment_writer import SegmentWriter
from tracefile.segments import segment_pool
from tracefile.store import list_segments, read_trace_header
from tracefile.summary import summarize
from tracefile.survey import take_survey
from tracefile.verify import verify_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from object_server import S3Bucket

    from tracefile.gc_result import GcResult


store = ObjectStore()


@pytest.fixture
def url(bucket: S3Bucket) -> str:
    return f"{bucket.url}/run/step_1.trace"


# The protocol: any two operations, the first held, or killed, after each of its requests


class _Killed(BaseException):
    pass


class _Requests:
    """Holds or kills what runs in its context after the ``at``-th request."""

    current: contextvars.ContextVar[_Requests | None] = contextvars.ContextVar("current", default=None)

    def __init__(self, at: int, kill: bool) -> None:
        self.at, self.kill, self.count = at, kill, 0
        self.met = threading.Event()
        self.go_on: Future[None] = Future()

    async def step(self) -> None:
        self.count += 1
        if self.count == self.at:
            self.met.set()
            if not self.kill:
                await asyncio.wrap_future(self.go_on)
        if self.kill and self.count >= self.at:
            raise _Killed

    def run(self, work: Callable[[], Any]) -> Any:
        """What ``work`` returns; ``_Killed`` if it came to that."""
        token = self.current.set(self)
        try:
            return work()
        except _Killed:
            return _Killed
        finally:
            self.current.reset(token)
            self.met.set()


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ObjectClient._ask

    async def ask(self: ObjectClient, *arguments: Any, **options: Any) -> Any:
        mine = _Requests.current.get()
        if mine is not None and mine.kill and mine.count >= mine.at:
            raise _Killed  # none comes through any more
        try:
            return await real(self, *arguments, **options)
        finally:
            if mine is not None:
                await mine.step()

    monkeypatch.setattr(ObjectClient, "_ask", ask)


@pytest.fixture
def memory() -> str:
    """A bucket of obstore's own store in memory, which answers at once."""
    client._stores["s3://memory"] = client.obstore().store.MemoryStore()
    object_reclaim._conditional.discard("s3://memory")
    return "s3://memory"


class _Segment:
    """A segment that two collections have set aside, as raw objects."""

    def __init__(self, memory: str) -> None:
        self.memory = memory
        self.trace = f"{memory}/{new_segment_id()}"
        self.id = new_segment_id()
        below = f"{self.trace}/segments/{self.id}"
        client.run(client.put(f"{self.trace}/zarr.json", b"{}"))
        client.run(client.put(f"{below}/c/0/0/0", b"shard"))
        client.run(client.put(f"{below}/zarr.json", b"document"))
        self.marks = [store.set_aside(self.trace, self.id) for _ in range(2)]

    def names(self) -> list[str]:
        """All of its objects, and what the store notes about it."""
        below = (f"{self.trace}/segments", f"{self.memory}/.{self.trace.rpartition('/')[2]}.staging")
        return sorted(each.name for where in below for each in client.run(client.list(where)))

    def operations(self) -> dict[str, Callable[[], bool | None]]:
        def complete() -> None:
            for each in store.leftovers(self.trace):
                if each.finished:
                    store.remove_leftover(self.trace, each.name)

        return {
            "drop": lambda: store.drop(self.trace, self.id, self.marks[0]),
            "drop by another": lambda: store.drop(self.trace, self.id, self.marks[1]),
            "bring back": lambda: store.bring_back(self.trace, self.id),
            "complete": complete,
        }

    def check(self, outcomes: list[tuple[str, Any]]) -> None:
        """What was told holds, and the next collection leaves nothing but the segment, or nothing."""
        back = [told for name, told in outcomes if name == "bring back"]
        dropped = [told for name, told in outcomes if name.startswith("drop")]
        assert not (True in back and True in dropped), outcomes
        visible = store.bring_back(self.trace, self.id)
        if True in back:
            assert visible, outcomes
        if True in dropped:
            assert not visible, outcomes
        for each in store.leftovers(self.trace):
            assert each.finished or each.nbytes == 0, (each, outcomes)
            store.remove_leftover(self.trace, each.name)
        assert store.bring_back(self.trace, self.id) == visible
        names = self.names()
        assert [name.split("/")[-1] for name in names] == (["0", "zarr.json"] if visible else []), (names, outcomes)
        assert store.aside(self.trace) == []
        assert not store.drop(self.trace, self.id, self.marks[0]), "it was brought back, or is gone"


_OPERATIONS = ["drop", "drop by another", "bring back", "complete"]


@pytest.mark.parametrize("kill", [False, True], ids=["held", "killed"])
@pytest.mark.parametrize("second", _OPERATIONS)
@pytest.mark.parametrize("first", _OPERATIONS)
def test_two_operations(memory: str, stepped: None, first: str, second: str, kill: bool) -> None:
    for at in range(1, 40):
        segment = _Segment(memory)
        operations, requests = segment.operations(), _Requests(at, kill)
        with ThreadPoolExecutor(1) as thread:
            begun = thread.submit(requests.run, operations[first])
            assert requests.met.wait(30)
            ended = begun.done()
            done = [(second, operations[second]())]
            requests.go_on.set_result(None)
            done.append((first, begun.result(30)))
        segment.check(done)
        if (ended and not kill) or (kill and done[1][1] is not _Killed):
            break
    assert at > 1


def test_a_third_one(memory: str, stepped: None) -> None:
    """Somebody brings it back and cleans up while another, who has seen its mark, has not decided yet."""
    for at, order in itertools.product(range(1, 6), itertools.permutations(["drop", "bring back", "complete"])):
        segment = _Segment(memory)
        operations, requests = segment.operations(), _Requests(at, False)
        with ThreadPoolExecutor(1) as thread:
            begun = thread.submit(requests.run, operations["bring back"])
            assert requests.met.wait(30)
            done = [(name, operations[name]()) for name in order[:2]]
            requests.go_on.set_result(None)
            done.append(("bring back", begun.result(30)))
        segment.check(done)


def test_set_aside_again(memory: str) -> None:
    """Who set it aside before it was brought back does not drop what others have set aside since."""
    segment = _Segment(memory)
    assert store.bring_back(segment.trace, segment.id)
    mark = store.set_aside(segment.trace, segment.id)
    assert not store.drop(segment.trace, segment.id, segment.marks[0])
    assert store.segments(segment.trace) == [segment.id], "a segment that is aside is visible, and whole"
    assert store.unfinished(segment.trace) == []
    assert store.drop(segment.trace, segment.id, mark)
    assert segment.names() == []
    assert store.set_aside(segment.trace, segment.id) == ""
    assert store.is_gone(segment.trace, segment.id)


# What is reclaimed, and what is not


def test_dead_live_referenced_and_superseded(bucket: S3Bucket, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trace_of_everything(url)
    before = list_segments(url)
    assert collect_now(url, grace=600).freed_bytes == 0
    (found,) = collect_now(url, dry_run=True).traces
    assert list_segments(url) == before
    (done,) = collect_now(url).traces
    assert (done.segments, done.freed_bytes) == (found.segments, found.freed_bytes)
    assert done.freed_bytes > 0
    assert len(done.segments) == 2, "the older ones of m and n, and d; the first has the prompt"
    assert set(list_segments(url)) == set(before) - set(done.segments)
    assert [name for name in bucket.objects.names() if ".staging" in name] == []
    assert [name for name in bucket.objects.names() for segment in done.segments if segment in name] == []
    check_samples(url, expected)
    collect_later(monkeypatch, DAY + 60)
    collect_now(url)
    check_samples(url, expected)
    result = CliRunner().invoke(app, ["gc", url, "--json"])
    assert (result.exit_code, json.loads(result.stdout)["freed_bytes"]) == (0, 0)


def test_two_collections_at_once(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{memory}/run/step_1.trace"
    expected = trace_of_everything(url)
    inner: list[GcResult] = []

    def settle(self: ObjectStore, trace: str) -> float:
        monkeypatch.undo()
        inner.append(collect_now(url))
        return 0.0

    with monkeypatch.context():
        monkeypatch.setattr(ObjectStore, "settle", settle)
        outer = collect(url, grace=0)
    removed = [trace.segments for result in (*inner, outer) for trace in result.traces]
    assert [len(each) for each in removed] == [2, 0]
    check_samples(url, expected)


def test_how_long_it_waits(url: str) -> None:
    assert store.settle(url) == 120
    tracefile.configure(object_store_options={"retry_config": {"retry_timeout": 7}})
    assert store.settle(url) == 14


def test_a_store_without_conditional_put(bucket: S3Bucket, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says so, and one that says nothing and writes what is there already."""
    trace_of_everything(url)
    before = bucket.objects.names()
    object_reclaim._conditional.clear()
    tracefile.configure(object_store_options={"config": {"aws_conditional_put": "disabled"}})
    with pytest.raises(tracefile.OptionError, match="conditional put"):
        collect_now(url)
    tracefile.configure(object_store_options={})

    async def overwrite(url: str, data: bytes) -> bool:
        await client.put(url, data)
        return True

    with monkeypatch.context() as patched:
        patched.setattr(client, "put_new", overwrite)
        with pytest.raises(tracefile.OptionError, match="conditional put"):
            collect_now(url)
    assert bucket.objects.names() == before
    assert collect_now(url).freed_bytes > 0


def test_what_killed_writers_left(bucket: S3Bucket, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_writer(url) as writer:
        writer.append("a", small_ids("a"))

        def killed() -> None:
            real = ObjectStore.upload

            def upload(*arguments: Any) -> None:
                real(*arguments)
                os.kill(os.getpid(), signal.SIGKILL)

            monkeypatch.setattr(ObjectStore, "upload", upload)
            writer.append("b", small_ids("b"))

        assert join(fork(killed)) == [-signal.SIGKILL]
    (left,) = store.leftovers(url)
    assert left.nbytes > 0
    assert not left.finished
    assert abs(left.changed - time.time()) < 60
    assert [left.name] == store.unfinished(url)
    assert collect_now(url).traces[0].leftovers == [], "its writer may be alive"
    collect_later(monkeypatch, DAY + 60)
    assert collect_now(url, dry_run=True).traces[0].leftovers == [left.name]
    done = collect_now(url).traces[0]
    assert (done.leftovers, done.freed_bytes) == ([left.name], left.nbytes)
    assert store.leftovers(url) == []
    check_samples(url, {"a": small_ids("a")})


def test_a_segment_that_is_not_published_is_taken_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shard is uploaded before the last look at what it names."""
    with small_writer(url) as writer:
        handle = writer.append("a", small_ids("a"))
        handle[:1].numpy()
        store.delete(url, segment_of(handle))
        with pytest.raises(tracefile.SegmentMissingError):
            writer.append("b", torch.cat([handle, torch.from_numpy(small_ids("b"))]))
    assert store.leftovers(url) == []


# Readers


def test_readers_of_what_is_reclaimed(url: str) -> None:
    """In other processes: what was fetched is used, what was not is a clear error; never other rows."""
    with small_writer(url) as writer:
        writer.append("a", small_ids("a", 5000))
        writer.append("b", small_ids("b", 5000))
    ready, done = os.pipe(), os.pipe()

    def read(opened: bool) -> None:
        trace = tracefile.open(url)
        handle = trace["a"]
        if opened:
            assert handle[:3].numpy().shape == (3, 4, 2)
        os.write(ready[1], b"r")
        os.read(done[0], 1)
        for part in (handle[:3], handle):
            try:
                np.testing.assert_array_equal(part.numpy(), small_ids("a", 5000)[: len(part)])
                assert opened
                assert len(part) == 3, "the rest is gone"
            except tracefile.SegmentMissingError:
                pass
        np.testing.assert_array_equal(trace["b"].numpy(), small_ids("b", 5000))
        trace.refresh()
        assert list(trace) == ["b"]

    readers = [fork(lambda opened=opened: read(opened)) for opened in (True, False)]  # type: ignore[misc]
    for _ in readers:
        os.read(ready[0], 1)
    tracefile.open(url).delete_samples("a")
    assert len(collect_now(url).traces[0].segments) == 1
    os.write(done[1], b"gg")
    assert join(*readers) == [0, 0]


def test_who_opens_a_trace_while_segments_go(memory: str, stepped: None) -> None:
    """Listed and gone when it is to be read: it was deleted, and is no damage."""
    url = f"{memory}/run/step_1.trace"
    expected = trace_of_everything(url)
    for at in range(1, 6):
        requests = _Requests(at, False)
        with small_writer(url) as writer:
            writer.append("x", small_ids(f"x{at}"))
            writer.append("x", small_ids("x"))
        with ThreadPoolExecutor(1) as thread:
            begun = thread.submit(requests.run, lambda: dict(tracefile.open(url)))
            assert requests.met.wait(30)
            assert collect_now(url).freed_bytes > 0
            requests.go_on.set_result(None)
            found = begun.result(30)
        assert set(found) == {*expected, "x"}
        for sample, ids in (expected | {"x": small_ids("x")}).items():
            np.testing.assert_array_equal(found[sample].numpy(), ids)


# Writers that name rows at the very moment


@pytest.mark.parametrize("naming", NAMING)
def test_a_writer_names_what_is_aside(memory: str, naming: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{memory}/run/step_1.trace"
    writer, handle, prompt = share(url)
    expected = np.concatenate([prompt, small_ids("end", 9)])

    def settle(self: ObjectStore, trace: str) -> float:
        assert self.aside(url) == [segment_of(handle)]
        np.testing.assert_array_equal(NAMING[naming](writer, handle, prompt).numpy(), expected)
        assert self.aside(url) == []
        return 0.0

    monkeypatch.setattr(ObjectStore, "settle", settle)
    (done,) = collect(url, grace=0).traces
    assert (done.segments, done.brought_back) == ([], [segment_of(handle)])
    check_samples(url, {"new": expected, "stays": small_ids("stays")})
    writer.close()


@pytest.mark.parametrize("naming", NAMING)
@pytest.mark.parametrize("moment", ["before it looks", "before it publishes", "before it looks again"])
def test_a_writer_finds_that_what_it_names_is_gone(memory: str, naming: str, moment: str, monkeypatch: Any) -> None:
    """It writes the rows again where it has them, and raises where it does not; nothing broken stays visible."""
    url = f"{memory}/run/step_1.trace"
    writer, handle, prompt = share(url)
    expected = np.concatenate([prompt, small_ids("end", 9)])
    real_check, real_publish = SegmentWriter._check_rows, ObjectStore.publish
    looks = 0

    def remove() -> None:
        mark = store.set_aside(url, segment_of(handle))
        assert not mark or store.drop(url, segment_of(handle), mark)

    def check(self: Any, *arguments: Any) -> None:
        nonlocal looks
        looks += 1
        if (looks, moment) in ((1, "before it looks"), (2, "before it looks again")):
            remove()
        real_check(self, *arguments)

    def publish(self: Any, *arguments: Any, **options: Any) -> Any:
        if moment == "before it publishes":
            remove()
        return real_publish(self, *arguments, **options)

    monkeypatch.setattr(SegmentWriter, "_check_rows", check)
    monkeypatch.setattr(ObjectStore, "publish", publish)
    if naming == "prefix":
        np.testing.assert_array_equal(NAMING[naming](writer, handle, prompt).numpy(), expected)
        check_samples(url, {"new": expected, "stays": small_ids("stays")})
    else:
        with pytest.raises(tracefile.SegmentMissingError, match="Nothing was published") as caught:
            NAMING[naming](writer, handle, prompt)
        assert caught.value.segment == segment_of(handle)
        check_samples(url, {"stays": small_ids("stays")})
    writer.close()
    assert store.leftovers(url) == []


def _dying(at: int, work: Callable[[], Any]) -> int:
    """Run it in another process that is killed after its ``at``-th request; how that ended."""

    def run() -> None:
        real, count = ObjectClient._ask, itertools.count(1)

        async def ask(self: ObjectClient, *arguments: Any, **options: Any) -> Any:
            try:
                return await real(self, *arguments, **options)
            finally:
                if next(count) == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        ObjectClient._ask = ask  # type: ignore[method-assign]
        work()

    (code,) = join(fork(run))
    return code


def _copied(original: str, path: str) -> None:
    names = [each.name for each in client.run(client.list(original))]
    for name in names:
        client.run(client.put(f"{path}/{name}", store.read(f"{original}/{name}")))


def _continue(path: str) -> dict[str, Any]:
    """What a writer that names rows adds."""
    with small_writer(path) as writer:
        writer.append("m", torch.cat([tracefile.open(path)["m"], torch.from_numpy(small_ids("more", 3))]))
    return {"m": np.concatenate([small_ids("m2"), small_ids("more", 3)])}


def _collect_after_a_kill(path: str, expected: dict[str, Any], go_on: bool) -> int:
    """Nothing that counts is lost, and nothing is left; how many segments were aside."""
    left = len(store.aside(path))
    if go_on:
        expected = expected | _continue(path)
    check_samples(path, expected)
    collect_now(path)
    check_samples(path, expected)
    assert len(list_segments(path)) == 7 + go_on
    assert store.aside(path) == []
    assert [each for each in store.leftovers(path) if each.nbytes] == []
    return left


@pytest.mark.slow
def test_a_collection_killed_at_its_requests(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{memory}/run/original.trace"
    expected = trace_of_everything(url)
    seen = set()
    for at in range(1, 100, 2):
        copy = f"{memory}/run/copy-{at}.trace"
        _copied(url, copy)
        with monkeypatch.context() as patched:
            died = _die_at(at, patched, lambda copy=copy: collect_now(copy))  # type: ignore[misc]
        seen.add(_collect_after_a_kill(copy, expected, at % 3 == 0))
        if not died:
            break
    assert at > 20
    assert seen == {0, 1, 2}


def _die_at(at: int, patched: pytest.MonkeyPatch, work: Callable[[], Any]) -> bool:
    """No request comes through after the ``at``-th of all threads; whether it came to that."""
    real, count = ObjectClient._ask, itertools.count(1)

    async def ask(self: ObjectClient, *arguments: Any, **options: Any) -> Any:
        if next(count) > at:
            raise _Killed
        return await real(self, *arguments, **options)

    patched.setattr(ObjectClient, "_ask", ask)
    try:
        work()
    except _Killed:
        return True
    return False


@pytest.mark.parametrize("at", [20])
def test_a_killed_collection(url: str, at: int) -> None:
    """By a signal, over the network."""
    expected = trace_of_everything(url)
    assert _dying(at, lambda: collect_now(url)) == -signal.SIGKILL
    _collect_after_a_kill(url, expected, go_on=True)


# Races of processes


@pytest.mark.slow
def test_writers_and_collections_race(url: str, tmp_path: Any) -> None:
    small_writer(url).close()
    removed = 0

    def meanwhile() -> None:
        nonlocal removed
        (done,) = collect_now(url).traces
        removed += len(done.segments)

    acts = ["append", "share", "share", "delete", "lazy"]
    expected, steps = race(url, tmp_path, writers=2, seconds=8.0, acts=acts, meanwhile=meanwhile)
    assert min(steps) > 3
    assert removed > 2
    check_samples(url, expected)
    collect_now(url)
    check_samples(url, expected)
    assert store.aside(url) == []


# Whole traces


def _below(bucket: S3Bucket, directory: str) -> set[str]:
    prefix = f"{directory.removeprefix(bucket.url)[1:]}/"
    return {name.removeprefix(prefix).split("/")[0] for name in bucket.objects.names(prefix)}


def test_the_newest_steps_are_kept(bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = f"{bucket.url}/run"
    paths = small_traces(directory, ["step_10.trace", "step_9.trace", "step_11.trace"])
    bucket.objects["run/step_1.notes/segments/data"] = b"of others"
    bucket.objects["run/list.txt"] = b"of others"
    bucket.objects["runs/step_2.trace/zarr.json"] = b"of others"
    assert store.traces(directory) == sorted(paths)
    result = CliRunner().invoke(app, ["gc", directory, "--keep-steps", "2", "--dry-run"])
    assert result.stdout.splitlines()[1].split()[:3] == ["step_9.trace", "whole", "(--keep-steps)"]
    before = bucket.objects.names()
    done = collect(f"{directory}/", keep_steps=2)
    assert [(os.path.basename(t.path), t.deleted_by) for t in done.traces] == [
        ("step_9.trace", "keep-steps"), ("step_10.trace", None), ("step_11.trace", None)
    ]  # fmt: skip
    assert bucket.objects.names() == [name for name in before if "step_9.trace" not in name]
    collect_later(monkeypatch, 3600)
    assert {trace.deleted_by for trace in collect(directory, older_than=1800).traces} == {"older-than"}
    assert _below(bucket, directory) == {"step_1.notes", "list.txt"}
    with pytest.raises(tracefile.TraceNotFoundError):
        collect(f"{bucket.url}/nothing")


def test_a_trace_that_is_deleted_under_its_writer(bucket: S3Bucket, url: str) -> None:
    with small_writer(url) as writer:
        opened = writer.append("a", small_ids("a"))
        opened.numpy()
        reader = tracefile.open(url)
        store.delete_trace(url)
        assert bucket.objects.names() == []
        for act in (
            lambda: writer.append("c", small_ids("c")),
            lambda: writer.append_many([("c", small_ids("c"))]),
            lambda: writer.append("a", small_ids("c"), start=20),
        ):
            with pytest.raises((tracefile.PublishError, tracefile.TraceNotFoundError), match=r"deleted|no trace"):
                act()
            assert bucket.objects.names() == [], "nothing half is left"
        for look in (reader.refresh, lambda: tracefile.open(url)):
            with pytest.raises(tracefile.TraceNotFoundError):
                look()
        with pytest.raises(FileNotFoundError):
            store.delete_trace(url)
        with small_writer(url) as other:
            other.append("x", small_ids("x"))
            with pytest.raises(tracefile.PublishError, match="another was made in its place"):
                writer.append("c", small_ids("c"))
        check_samples(url, {"x": small_ids("x")})
        assert store.leftovers(url) == []


@pytest.mark.parametrize("replaced", [False, True])
def test_a_trace_that_is_deleted_between_a_writers_looks(
    bucket: S3Bucket, url: str, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SegmentWriter._check_rows

    def check(self: SegmentWriter, *arguments: Any) -> None:
        monkeypatch.setattr(SegmentWriter, "_check_rows", real)
        store.delete_trace(url)
        if replaced:
            with small_writer(url) as other:
                other.append("x", small_ids("x"))

    with small_writer(url) as writer:
        writer.append("a", small_ids("a"))
        monkeypatch.setattr(SegmentWriter, "_check_rows", check)
        with pytest.raises(tracefile.PublishError, match="was deleted"):
            writer.append("b", small_ids("b"))
    if replaced:
        check_samples(url, {"x": small_ids("x")})
    assert store.leftovers(url) == []
    assert bool(bucket.objects.names()) is replaced


def test_a_deletion_of_a_trace_killed_at_each_request(memory: str, stepped: None) -> None:
    """Nobody makes a trace in what is left; the next collection of the directory completes it."""
    original, directory = f"{memory}/original/t", f"{memory}/run"
    url = f"{directory}/step_1.trace"
    small_traces(f"{memory}/original", ["t"])

    def below() -> set[str]:
        return {each.name for each in client.run(client.list(directory))}

    seen = set()
    for at in range(1, 30):
        _copied(original, url)
        done = _Requests(at, True).run(lambda: store.delete_trace(url))
        there = "step_1.trace/zarr.json" in below()
        seen.add((there, bool(below())))
        if there:
            check_samples(url, {"a": small_ids(original)})
        elif below():
            with pytest.raises(tracefile.NotATraceError, match=r"being deleted|not a trace"):
                small_writer(url)
            assert collect(directory).swept == ["step_1.trace"]
            assert below() == set()
        if done is not _Killed:
            break
        if there:
            store.delete_trace(url)
        assert below() == set()
    assert seen == {(True, True), (False, True), (False, False)}


@pytest.mark.slow
def test_writers_and_the_deletion_of_their_trace_race(bucket: S3Bucket, url: str) -> None:
    """New traces at the same path, and old writers: nobody's segment lands in another's trace."""

    def work(who: int) -> None:
        end = time.monotonic() + 2.5
        refused = 0
        while time.monotonic() < end:
            try:
                with small_writer(url) as writer:
                    for step in range(20):
                        writer.append(f"{who}/{step}", small_ids(f"{who}/{step}", 20))
                        time.sleep(0.1)
            except (tracefile.PublishError, tracefile.TraceNotFoundError, tracefile.NotATraceError):
                refused += 1
        assert refused > 0

    writers = [fork(lambda who=who: work(who)) for who in range(2)]  # type: ignore[misc]
    end = time.monotonic() + 2
    deleted = 0
    while time.monotonic() < end:
        time.sleep(0.2)
        try:
            store.delete_trace(url)
            deleted += 1
        except FileNotFoundError:
            continue
    assert join(*writers) == [0, 0]
    assert deleted > 1
    small_writer(url).close()  # a deletion may have been the last that happened
    assert list(verify_trace(url)) == []


# What it costs


def test_inspecting_many_segments_takes_few_rounds(bucket: S3Bucket, url: str) -> None:
    with small_writer(url, share_prefixes=False) as writer:
        for number in range(15):
            writer.append(f"{number}", small_ids(f"{number}", 8))
    header = read_trace_header(url)
    with bucket.proxy.rounds() as asked:
        facts = summarize(take_survey(url, header))
    names = [name for name in bucket.objects.names() if "segments/1" in name]
    assert facts.bytes_stored == sum(len(bucket.objects[name]) for name in names if name.endswith("c/0/0/0"))
    assert facts.bytes_metadata == sum(len(bucket.objects[name]) for name in names if name.endswith("zarr.json"))
    assert max(each.round for each in asked) <= 7, "one after another would be 30 more"
    assert len(asked) < 15 * 3 + 5


def test_appending_takes_few_requests(bucket: S3Bucket, url: str) -> None:
    """The trace is looked for during the upload, and once more; what is named is looked for twice."""
    with small_writer(url) as writer:
        handle = writer.append("a", small_ids("a"))
        with bucket.proxy.counted() as asked:
            writer.append("b", small_ids("b"))
        assert len(asked) == 4
        with bucket.proxy.counted() as asked:
            writer.append("c", torch.cat([handle, torch.from_numpy(small_ids("c"))]))
        assert len(asked) == 4 + 2 * 2
    _forget(url)
    assert in_fork(lambda: list(tracefile.open(url))) == ["a", "b", "c"]


def _forget(url: str) -> None:
    for trace in list(segment_pool._stats):
        segment_pool.close(trace)


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    assert _Requests.current.get() is None
