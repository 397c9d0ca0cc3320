"""Deleting samples and traces, and reclaiming what nothing refers to, under readers and writers at work."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import signal
import threading
import time
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
from support import Faults, fork, in_fork, join

import tracefile
from tracefile import format as format_module
from tracefile.collect import collect
from tracefile.format import ChunkGeometry, ModelConfig, staging_path
from tracefile.local_store import LocalStore
from tracefile.metadata import Moved, SampleEntry, SegmentHeader, Span, TraceHeader
from tracefile.retention import GcPlan, plan_gc
from tracefile.segment_writer import SegmentWriter
from tracefile.segments import segment_pool
from tracefile.store import list_segments, read_trace_header
from tracefile.survey import Survey, take_survey
from tracefile.verify import verify_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefile.gc_result import GcResult
    from tracefile.reclaim import ReclaimingStore


def _check_gone(handle: tracefile.LazyRoutedExperts) -> None:
    """Reading it raises, in a process that does not have the file open."""

    def read() -> bool:
        with pytest.raises(tracefile.SegmentMissingError):
            pickle.loads(pickle.dumps(handle)).numpy()
        return True

    segment_pool.close(handle.selection.rows.segments()[0].trace)
    assert in_fork(read)


# Deleting samples


def test_deleted_samples_are_gone_for_every_reader(path: str) -> None:
    with small_writer(path) as writer:
        handles = {name: writer.append(name, small_ids(name)) for name in "abcd"}
    first, second = tracefile.open(path), tracefile.open(path)
    before = len(list_segments(path))
    assert first.delete_samples(["b", "d", "b"]) == ["b", "d"]
    assert len(list_segments(path)) == before + 1, "one commit"
    assert list(first) == ["a", "c"]
    assert "b" in second  # as of its last refresh
    assert second.refresh() == []
    assert list(second) == ["a", "c"]
    with pytest.raises(tracefile.SampleNotFoundError, match="it was deleted") as caught:
        second["b"]
    assert (caught.value.sample, isinstance(caught.value, KeyError)) == ("b", True)
    check_samples(path, {name: small_ids(name) for name in "ac"})
    np.testing.assert_array_equal(handles["b"].numpy(), small_ids("b"))  # until a collection takes the rows
    assert not os.path.exists(staging_path(path))
    assert second.delete_samples("a") == ["a"]
    assert second.delete_samples([]) == []


def test_unknown_samples_are_not_deleted(path: str) -> None:
    with small_writer(path) as writer:
        writer.append("a", small_ids("a"))
    trace = tracefile.open(path)
    before = list_segments(path)
    with pytest.raises(tracefile.SampleNotFoundError, match=r"no sample 'x', 'y'; nothing was deleted") as caught:
        trace.delete_samples(["a", "x", "y"])
    assert caught.value.sample == "x"
    with pytest.raises(tracefile.SampleIdError):
        trace.delete_samples(["a", 7])  # type: ignore[list-item]
    assert list_segments(path) == before
    assert trace.delete_samples(["a", "x"], missing_ok=True) == ["a"]
    assert trace.delete_samples(["a", "x"], missing_ok=True) == []
    assert len(list_segments(path)) == len(before) + 1
    trace.close()
    with pytest.raises(tracefile.ClosedError):
        trace.delete_samples("a")


def test_a_deleted_sample_appended_again_is_a_new_one(path: str) -> None:
    with small_writer(path, share_prefixes=False) as writer:
        writer.append("a", small_ids("a"))
        trace = tracefile.open(path)
        trace.delete_samples("a")
        with pytest.raises(tracefile.SampleGapError) as caught:
            writer.append("a", small_ids("b"), start=10)
        assert vars(caught.value)["rows"] == 0
        with pytest.raises(tracefile.SampleNotFoundError):
            writer.truncate("a", 3)
        with pytest.raises(tracefile.WaitTimeoutError):
            trace.wait("a", timeout=0.05)
        came: list[Any] = []
        waiting = threading.Thread(target=lambda: came.extend(trace.wait("a", timeout=60)))
        waiting.start()
        writer.append("a", small_ids("b"), start=0)
        waiting.join()
        np.testing.assert_array_equal(came[0].numpy(), small_ids("b"))
    check_samples(path, {"a": small_ids("b")})


def test_followers_do_not_get_what_was_deleted(path: str) -> None:
    with small_writer(path) as writer:
        trace = tracefile.open(path)
        for name in "abc":
            writer.append(name, small_ids(name))
        tracefile.open(path).delete_samples("b")
        follower = trace.follow(timeout=0.1)
        assert [sample for sample, _ in follower] == ["a", "c"]
        writer.append("b", small_ids("x"))
        assert [sample for sample, _ in trace.follow(timeout=0.1)] == ["b"]


def test_deleting_what_a_host_with_a_clock_ahead_wrote(path: str) -> None:
    def ahead() -> None:
        now = time.time_ns
        format_module.time.time_ns = lambda: now() + 3_600_000_000_000
        with small_writer(path) as writer:
            writer.append("a", small_ids("a"))

    assert join(fork(ahead)) == [0]
    trace = tracefile.open(path)
    trace.delete_samples("a")
    assert "a" not in trace
    assert "a" not in tracefile.open(path)


@pytest.mark.parametrize("again", [False, True])
def test_a_segment_that_was_begun_before_the_deletion_comes_late(path: str, again: bool, monkeypatch: Any) -> None:
    """Its append was under way, so it counts as deleted with the rest; what is begun later counts."""
    with small_writer(path) as writer:
        writer.append("a", small_ids("a"))
        real = LocalStore.publish

        def late(*arguments: Any, **options: Any) -> Any:
            monkeypatch.undo()
            tracefile.open(path).delete_samples("a")
            return real(*arguments, **options)

        monkeypatch.setattr(LocalStore, "publish", late)
        writer.append_many([("a", small_ids("late")), ("b", small_ids("b"))])
        check_samples(path, {"b": small_ids("b")})
        if again:
            writer.append("a", small_ids("again"))
        # However long ago that was, the deletion stays as long as what it deletes is listed.
        collect_later(monkeypatch, 3 * DAY)
        for _ in range(3):
            collect_now(path)
            check_samples(path, {"b": small_ids("b")} | ({"a": small_ids("again")} if again else {}))


# What is reclaimed, and what is not


def test_what_was_replaced_or_deleted_goes_after_the_grace(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_writer(path) as writer:
        old = writer.append("a", small_ids("old"))
        gone = writer.append("b", small_ids("b"))
        writer.append("a", small_ids("a"))
        stays = writer.append("c", small_ids("c"))
    tracefile.open(path).delete_samples("b")
    assert collect(path).freed_bytes == 0
    for handle, name in ((old, "old"), (gone, "b")):
        np.testing.assert_array_equal(handle.numpy(), small_ids(name))
    tracefile.open(path).close()
    collect_later(monkeypatch, 601)
    bytes_of = {segment: header.shard_bytes for segment, header in tracefile.open(path).segments.items()}
    (found,) = collect(path, dry_run=True).traces
    assert set(found.segments) == {segment_of(old), segment_of(gone)}
    assert set(found.segments) < set(list_segments(path)), "nothing was removed"
    (done,) = collect(path, settle=0).traces
    assert (done.segments, done.freed_bytes) == (found.segments, found.freed_bytes)
    assert done.freed_bytes == sum(bytes_of[segment] for segment in done.segments)
    assert done.total_bytes == sum(bytes_of.values())
    assert segment_of(stays) in list_segments(path)
    check_samples(path, {"a": small_ids("a"), "c": small_ids("c")})
    _check_gone(old)
    assert collect(path, settle=0).freed_bytes == 0


def test_rows_that_others_name_stay(path: str) -> None:
    prompt = small_ids("prompt", 300)
    with small_writer(path) as writer:
        group = {f"g/{i}": np.concatenate([prompt, small_ids(f"g/{i}", 9)]) for i in range(4)}
        handles = {name: writer.append(name, ids) for name, ids in group.items()}
        first = segment_of(handles["g/0"])
        writer.append("turns", small_ids("turn 1"))
        writer.append("turns", small_ids("turn 2"), start=30)
        writer.append("cut", small_ids("cut"))
        writer.truncate("cut", 7)
        writer.append("lazy", torch.cat([handles["g/1"][290:305], torch.from_numpy(small_ids("lazy", 3))]))
    trace = tracefile.open(path)
    trace.delete_samples(["g/0", "g/1"])
    expected = {name: group[name] for name in ("g/2", "g/3")} | {
        "turns": np.concatenate([small_ids("turn 1")[:30], small_ids("turn 2")]),
        "cut": small_ids("cut")[:7],
        "lazy": np.concatenate([group["g/1"][290:305], small_ids("lazy", 3)]),
    }
    check_samples(path, expected)
    (done,) = collect_now(path).traces
    assert first in list_segments(path), "the prompt lies there"
    assert done.segments == []
    assert done.partial_segments > 0
    assert 0 < done.partial_bytes < done.total_bytes
    check_samples(path, expected)
    trace.delete_samples(["g/2", "g/3", "lazy"])
    collect_now(path)
    assert first not in list_segments(path)
    check_samples(path, {name: expected[name] for name in ("turns", "cut")})


def test_deletions_are_forgotten_when_nothing_recalls_what_they_deleted(path: str, monkeypatch: Any) -> None:
    with small_writer(path) as writer:
        writer.append("a", small_ids("a"))
        writer.append("b", small_ids("b"))
    tracefile.open(path).delete_samples("a")
    assert len(collect_now(path).traces[0].segments) == 1
    assert len(list_segments(path)) == 2
    collect_now(path)
    assert len(list_segments(path)) == 2, "a revision that was begun before it may still be published"
    collect_later(monkeypatch, DAY + 60)
    collect_now(path)
    assert len(list_segments(path)) == 1
    check_samples(path, {"b": small_ids("b")})


def _survey(*headers: SegmentHeader) -> Survey:
    return Survey("t.trace", TraceHeader("u", CONFIG), {header.id: header for header in headers})


CONFIG = ModelConfig(4, 2, 64)


def _header(number: int, samples: dict[str, list[tuple[int, int, int]]], **options: Any) -> SegmentHeader:
    """Segment ``number``, made so many seconds after the epoch; samples by spans of numbered segments."""
    entries = {
        sample: SampleEntry(
            sample,
            tuple(Span(_name(segment), start, stop) for segment, start, stop in spans),
            origin=options.get("origins", {}).get(sample, ""),
        )
        for sample, spans in samples.items()
    }
    options.pop("origins", None)
    made = {"created": float(number)}
    return SegmentHeader(_name(number), "u", CONFIG, 100, ChunkGeometry(4, 8), "fast", 1000, entries, made, **options)


def _name(number: int) -> str:
    return f"{number * 10**9:016x}-{'0' * 12}"


def _goes(plan: GcPlan) -> list[int]:
    return [int(segment[:16], 16) // 10**9 for segment in plan.segments]


def test_a_revision_is_needed_until_the_grace_has_passed_since_it_was_replaced() -> None:
    survey = _survey(*(_header(number, {"a": [(number, 0, 100)]}) for number in (100, 200, 300)))
    assert _goes(plan_gc(survey, now=305, grace=10)) == [100]
    assert _goes(plan_gc(survey, now=311, grace=10)) == [100, 200]
    assert _goes(plan_gc(survey, now=305, grace=200)) == []
    assert _goes(plan_gc(survey, now=305, grace=0)) == [100, 200]


def test_rows_that_moved_are_needed_where_they_were_and_where_they_are() -> None:
    moved = (Moved(_name(1), 0, 100, 0),)
    both = [_header(1, {"a": [(1, 0, 100)]}), _header(5, {}, moved=moved), _header(6, {"b": [(1, 0, 40)]})]
    for headers in (both, both[1:]):  # before the one that was replaced is deleted, and after
        gone = _header(7, {}, deleted={"a": ""})
        assert _goes(plan_gc(_survey(*headers, gone), now=9, grace=0)) == []
        later = _survey(*headers, gone, _header(8, {"b": [(8, 0, 1)]}))
        assert 5 in _goes(plan_gc(later, now=10**6, grace=0))
    chained = _header(6, {}, moved=(Moved(_name(5), 0, 100, 0),))
    assert _goes(plan_gc(_survey(both[1], chained, _header(7, {"b": [(1, 0, 40)]})), now=9, grace=0)) == []


def test_revisions_listed_by_a_replacement_count_as_of_their_commit() -> None:
    replacement = _header(50, {"a": [(50, 0, 100)]}, origins={"a": _name(10)})
    deleted = _header(20, {}, deleted={"a": ""})
    assert _goes(plan_gc(_survey(deleted, replacement), now=10**6, grace=0)) == [50]
    assert _goes(plan_gc(_survey(replacement), now=10**6, grace=0)) == []
    again = _header(30, {"a": [(30, 0, 100)]})
    assert _goes(plan_gc(_survey(deleted, again, replacement), now=10**6, grace=0)) == [50]


def test_a_damaged_document_may_be_what_needs_a_segment(path: str) -> None:
    with small_writer(path) as writer:
        writer.append("a", small_ids("a"))
        writer.append("a", small_ids("b"))
        broken = segment_of(writer.append("c", small_ids("c")))
    with open(f"{path}/segments/{broken}/zarr.json", "r+b") as file:
        file.write(b"x")
    before = list_segments(path)
    with pytest.raises(tracefile.MetadataDamagedError):
        collect_now(path)
    assert list_segments(path) == before
    (found,) = collect(os.path.dirname(path), grace=0, settle=0).traces
    assert found.error is not None
    assert list_segments(path) == before


def test_what_killed_writers_left(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed() -> None:
        writer = small_writer(path)
        writer.append("a", small_ids("a"))
        monkeypatch.setattr(LocalStore, "publish", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        writer.append("b", small_ids("b"))

    assert join(fork(killed)) == [-signal.SIGKILL]
    store = LocalStore()
    (left,) = store.leftovers(path)
    assert left.nbytes > 0
    assert not left.finished
    assert collect_now(path).traces[0].leftovers == [], "its writer may be alive"
    # One that is at work, as against one that has not touched its segment for a day.
    for parent, _, files in os.walk(os.path.join(staging_path(path), left.name)):
        for name in (parent, *(os.path.join(parent, file) for file in files)):
            os.utime(name, (time.time() - 2 * DAY,) * 2)
    building = store.begin(path, "live")
    found = collect_now(path, dry_run=True)
    assert found.traces[0].leftovers == [left.name]
    assert os.path.isdir(os.path.join(staging_path(path), left.name))
    done = collect_now(path)
    assert done.traces[0].leftovers == [left.name]
    assert done.freed_bytes == left.nbytes
    assert os.listdir(staging_path(path)) == ["live"]
    assert os.path.isdir(building)
    check_samples(path, {"a": small_ids("a")})


# Readers


@pytest.mark.parametrize("source", ["mmap", "pread"])
def test_readers_of_what_is_reclaimed(path: str, source: str) -> None:
    """In other processes: one that has the file open finishes, another gets a clear error."""
    with small_writer(path) as writer:
        writer.append("a", small_ids("a", 5000))
        writer.append("b", small_ids("b", 5000))
    ready, done = os.pipe(), os.pipe()

    def read(opened: bool) -> None:
        trace = tracefile.open(path, source=source)
        handle = trace["a"]
        if opened:
            assert handle[:3].numpy().shape == (3, 4, 2)
        os.write(ready[1], b"r")
        os.read(done[0], 1)
        tracefile.clear_cache()
        if opened:
            np.testing.assert_array_equal(handle.numpy(), small_ids("a", 5000))
        else:
            with pytest.raises(tracefile.SegmentMissingError) as caught:
                handle.numpy()
            assert caught.value.segment == segment_of(handle)
        np.testing.assert_array_equal(trace["b"].numpy(), small_ids("b", 5000))
        trace.refresh()
        assert list(trace) == ["b"]

    readers = [fork(lambda opened=opened: read(opened)) for opened in (True, False)]  # type: ignore[misc]
    for _ in readers:
        os.read(ready[0], 1)
    tracefile.open(path).delete_samples("a")
    assert len(collect_now(path).traces[0].segments) == 1
    os.write(done[1], b"gg")
    assert join(*readers) == [0, 0]


# Writers that name rows at the very moment


@pytest.mark.parametrize("naming", NAMING)
def test_a_writer_names_what_is_aside(path: str, naming: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between taking aside and looking again: it brings the segment back, and the collection leaves it."""
    writer, handle, prompt = share(path)
    expected = np.concatenate([prompt, small_ids("end", 9)])

    def settle(self: ReclaimingStore, trace: str) -> float:
        assert self.aside(path) == [segment_of(handle)]
        assert segment_of(handle) not in list_segments(path)
        np.testing.assert_array_equal(NAMING[naming](writer, handle, prompt).numpy(), expected)
        return 0.0

    monkeypatch.setattr(LocalStore, "settle", settle)
    (done,) = collect(path, grace=0).traces
    assert (done.segments, done.brought_back) == ([], [segment_of(handle)])
    check_samples(path, {"new": expected, "stays": small_ids("stays")})
    writer.close()


@pytest.mark.parametrize("naming", NAMING)
def test_a_writer_publishes_before_the_collection_looks_again(path: str, naming: str, monkeypatch: Any) -> None:
    """It looked before the segment was taken aside, and looks again only after the collection did."""
    writer, handle, prompt = share(path)
    expected = np.concatenate([prompt, small_ids("end", 9)])
    real = LocalStore.publish
    collected: list[GcResult] = []

    def publish(self: Any, *arguments: Any, **options: Any) -> Any:
        def settle(store: ReclaimingStore, trace: str) -> float:
            assert store.aside(path) == [segment_of(handle)]
            real(self, *arguments, **options)
            return 0.0

        monkeypatch.setattr(LocalStore, "settle", settle)
        collected.append(collect(path, grace=0))

    monkeypatch.setattr(LocalStore, "publish", publish)
    np.testing.assert_array_equal(NAMING[naming](writer, handle, prompt).numpy(), expected)
    assert [each.brought_back for each in collected[0].traces] == [[segment_of(handle)]]
    check_samples(path, {"new": expected, "stays": small_ids("stays")})
    writer.close()


@pytest.mark.parametrize("naming", NAMING)
@pytest.mark.parametrize("moment", ["before it looks", "before it publishes", "before it looks again"])
def test_a_writer_finds_that_what_it_names_is_gone(path: str, naming: str, moment: str, monkeypatch: Any) -> None:
    """It writes the rows again where it has them, and raises where it does not; nothing broken stays visible."""
    writer, handle, prompt = share(path)
    expected = np.concatenate([prompt, small_ids("end", 9)])
    real_check, real_publish = SegmentWriter._check_rows, LocalStore.publish
    looks = 0

    def remove() -> None:
        if segment_of(handle) in list_segments(path):
            # Only what the writer had published would have it stay.
            LocalStore().set_aside(path, segment_of(handle))
            LocalStore().drop(path, segment_of(handle))

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
    monkeypatch.setattr(LocalStore, "publish", publish)
    if naming == "prefix":
        np.testing.assert_array_equal(NAMING[naming](writer, handle, prompt).numpy(), expected)
        monkeypatch.undo()
        again = writer.append("more", np.concatenate([prompt, small_ids("more", 9)]))
        assert {segment.id for segment in again.selection.rows.segments()} <= set(list_segments(path))
        check_samples(
            path, {"new": expected, "stays": small_ids("stays"), "more": np.concatenate([prompt, small_ids("more", 9)])}
        )
    else:
        with pytest.raises(tracefile.SegmentMissingError, match="Nothing was published") as caught:
            NAMING[naming](writer, handle, prompt)
        assert caught.value.segment == segment_of(handle)
        check_samples(path, {"stays": small_ids("stays")})
    writer.close()
    assert not os.path.exists(staging_path(path))


def test_two_collections_at_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, handle, _ = share(path)
    writer.close()

    def settle(self: ReclaimingStore, trace: str) -> float:
        monkeypatch.undo()
        inner.append(collect_now(path))
        return 0.0

    inner: list[GcResult] = []
    monkeypatch.setattr(LocalStore, "settle", settle)
    outer = collect(path, grace=0)
    removed = [trace.segments for result in (*inner, outer) for trace in result.traces]
    assert list(itertools.chain(*removed)) == [segment_of(handle)], "by one of them"
    assert segment_of(handle) not in list_segments(path)
    check_samples(path, {"stays": small_ids("stays")})
    assert not os.path.exists(staging_path(path))


def test_what_was_set_aside_again_is_not_dropped_by_who_did_before(path: str) -> None:
    """Only the later one has looked at what was published since it was brought back."""
    writer, handle, _ = share(path)
    writer.close()
    store, segment = LocalStore(), segment_of(handle)
    first = store.set_aside(path, segment)
    assert store.bring_back(path, segment)
    second = store.set_aside(path, segment)
    assert not store.drop(path, segment, first)
    assert store.aside(path) == [segment]
    assert store.drop(path, segment, second)
    assert store.set_aside(path, segment) == ""
    assert not os.path.exists(staging_path(path))


@pytest.mark.parametrize("when", ["while it is read", "while it is asked for"])
@pytest.mark.parametrize("look", ["open", "refresh", "survey", "verify"])
def test_a_reader_comes_by_while_a_segment_is_aside(
    path: str, look: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was listed, is out of the way when its document is read, and is back when somebody asks what became of it."""
    with small_writer(path) as writer:
        writer.append("a", small_ids("a"))
        trace = tracefile.open(path)
        segment = segment_of(writer.append("b", small_ids("b")))
    store, read_all, gone = LocalStore(), LocalStore.read_all, LocalStore.gone
    looked: list[bool] = []

    def read_while_aside(self: LocalStore, paths: Sequence[str]) -> list[bytes | OSError]:
        first = not looked and any(segment in each for each in paths)
        if first:
            looked.append(bool(store.set_aside(path, segment)))
        found = read_all(self, paths)
        if first and when == "while it is read":
            store.bring_back(path, segment)
        return found

    def gone_and_back(self: LocalStore, trace: str, segments: Sequence[str]) -> set[str]:
        found = gone(self, trace, segments)
        store.bring_back(path, segment)
        return found

    monkeypatch.setattr(LocalStore, "read_all", read_while_aside)
    monkeypatch.setattr(LocalStore, "gone", gone_and_back)
    if look == "open":
        assert set(tracefile.open(path)) == {"a", "b"}
    elif look == "refresh":
        assert trace.refresh() == ["b"]
    elif look == "survey":
        survey = take_survey(path, read_trace_header(path))
        assert (set(survey.samples()), survey.damaged, survey.vanished) == ({"a", "b"}, {}, [])
    else:
        assert list(verify_trace(path)) == []
    assert looked == [True]


def test_an_interrupted_collection_brings_back_what_is_aside(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, _, _ = share(path)
    writer.close()
    before = list_segments(path)

    def settle(self: ReclaimingStore, trace: str) -> float:
        assert list_segments(path) != before
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStore, "settle", settle)
    with pytest.raises(KeyboardInterrupt):
        collect(path, grace=0)
    assert list_segments(path) == before


# Killed


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_collection_killed_at_each_step(path: str, tmp_path: Any) -> None:
    expected = trace_of_everything(path)
    original = str(tmp_path / "original")
    shutil.copytree(path, original)
    steps, seen = 0, set()
    for at in range(1, 200):
        shutil.rmtree(path)
        shutil.copytree(original, path)

        def work(at: int = at) -> None:
            faults = Faults(str(tmp_path), _die)
            faults.arm(at)
            collect_now(path)

        (code,) = join(fork(work))
        check_samples(path, expected)
        left = LocalStore().aside(path)
        seen.add(len(left))
        if at % 3 == 0:  # somebody continues before the next collection
            with small_writer(path) as writer:
                writer.append("after", small_ids("after"))
        after = {"after": small_ids("after")} if at % 3 == 0 else {}
        collect_now(path)
        check_samples(path, expected | after)
        assert not os.path.exists(staging_path(path)), at
        assert len(list_segments(path)) == 7 + len(after), at
        if code == 0:
            break
        assert code == -signal.SIGKILL
        steps += 1
    assert steps > 10
    assert seen >= {0, 1, 2}, "it was killed with segments aside"


def test_a_writer_needs_what_a_killed_collection_had_aside(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, handle, prompt = share(path)

    def killed() -> None:
        monkeypatch.setattr(LocalStore, "settle", lambda *_: _die())
        collect(path, grace=0)

    assert join(fork(killed)) == [-signal.SIGKILL]
    assert LocalStore().aside(path) == [segment_of(handle)]
    for number, name in enumerate(NAMING):
        experts = NAMING[name](writer, handle, prompt)
        np.testing.assert_array_equal(experts.numpy(), np.concatenate([prompt, small_ids("end", 9)]))
        assert LocalStore().aside(path) == [], number
    writer.close()
    check_samples(path, {"new": np.concatenate([prompt, small_ids("end", 9)]), "stays": small_ids("stays")})


@pytest.mark.parametrize("naming", NAMING)
def test_a_writer_killed_at_each_step_while_what_it_names_is_aside(path: str, naming: str, tmp_path: Any) -> None:
    """What was there before is there after, and what it published can be read."""
    writer, handle, prompt = share(path)
    writer.append("new", small_ids("older"))
    LocalStore().set_aside(path, segment_of(handle))
    state = str(tmp_path / "state")
    os.makedirs(state)
    shutil.copytree(path, f"{state}/trace")
    shutil.copytree(staging_path(path), f"{state}/staging")
    expected = np.concatenate([prompt, small_ids("end", 9)])
    for at in range(1, 100):
        shutil.rmtree(path)
        shutil.rmtree(staging_path(path), ignore_errors=True)
        shutil.copytree(f"{state}/trace", path)
        shutil.copytree(f"{state}/staging", staging_path(path))

        def work(at: int = at) -> None:
            faults = Faults(str(tmp_path), _die)
            faults.arm(at)
            NAMING[naming](writer, handle, prompt)

        (code,) = join(fork(work))
        collect_now(path)
        with tracefile.open(path) as trace:
            rows = trace["new"].numpy()
            np.testing.assert_array_equal(rows, expected if len(rows) == len(expected) else small_ids("older"))
            assert set(trace) == {"new", "stays"}
        assert list(verify_trace(path)) == []
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert at > 8
    shutil.rmtree(staging_path(path), ignore_errors=True)


# Races of processes


@pytest.mark.parametrize("settle", [0.0, 0.03])
def test_writers_and_collections_race(path: str, tmp_path: Any, settle: float) -> None:
    small_writer(path).close()
    removed = 0

    def meanwhile() -> None:
        nonlocal removed
        (done,) = collect(path, grace=0, settle=settle).traces
        removed += len(done.segments)

    acts = ["append", "share", "share", "go on", "delete", "lazy", "many"]
    expected, steps = race(path, tmp_path, writers=3, seconds=5.0, acts=acts, meanwhile=meanwhile)
    assert min(steps) > 10
    assert removed > 20
    check_samples(path, expected)
    collect_now(path)
    check_samples(path, expected)
    assert not os.path.exists(staging_path(path))


# Whole traces


def test_the_newest_steps_are_kept(tmp_path: Any) -> None:
    """By number, whatever their names' order and that of their making."""
    directory = str(tmp_path)
    small_traces(directory, ["step_10.trace", "step_9.trace", "step_11.trace", "step_8.trace"])
    os.makedirs(f"{directory}/step_1.notes")
    found = collect(directory, keep_steps=2, dry_run=True)
    assert len(os.listdir(directory)) == 5
    done = collect(directory, keep_steps=2)
    assert [trace.as_dict() for trace in done.traces] == [trace.as_dict() for trace in found.traces]
    assert done.ordered_by == "step"
    assert [(os.path.basename(t.path), t.deleted_by) for t in done.traces] == [
        ("step_8.trace", "keep-steps"), ("step_9.trace", "keep-steps"), ("step_10.trace", None), ("step_11.trace", None)
    ]  # fmt: skip
    assert sorted(os.listdir(directory)) == ["step_1.notes", "step_10.trace", "step_11.trace"]
    assert done.freed_bytes == sum(trace.total_bytes for trace in done.traces[:2]) > 0


def test_without_numbers_the_newest_data_tell(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = str(tmp_path)
    first, second, third = small_traces(directory, ["z.trace", "y_5.trace", "x.trace"])
    with small_writer(first) as writer:
        writer.append("b", small_ids("b"))  # again the newest
    result = collect(directory, keep_steps=2)
    assert result.ordered_by == "time"
    assert [trace.path for trace in result.traces if trace.deleted_by] == [second]
    collect_later(monkeypatch, 3600)
    with small_writer(third):
        assert collect(directory, older_than=3700).traces[0].deleted_by is None
        assert {trace.deleted_by for trace in collect(directory, older_than=3500).traces} == {"older-than"}
    assert os.listdir(directory) == []


def test_the_oldest_traces_go_until_the_rest_fits(tmp_path: Any) -> None:
    directory = str(tmp_path)
    paths = small_traces(directory, [f"step_{step}.trace" for step in range(5)])
    sizes = [sum(h.shard_bytes for h in tracefile.open(path).segments.values()) for path in paths]
    assert collect(directory, max_bytes=sum(sizes)).freed_bytes == 0
    collect(directory, max_bytes=sum(sizes[3:]))
    assert sorted(os.listdir(directory)) == ["step_3.trace", "step_4.trace"]
    collect(directory, max_bytes=0)
    assert os.listdir(directory) == ["step_4.trace"], "the newest stays"


def test_the_oldest_samples_of_one_trace_go_until_it_fits(path: str) -> None:
    prompt = small_ids("prompt", 200)
    with small_writer(path) as writer:
        for number in range(5):
            writer.append(f"{number}", np.concatenate([prompt, small_ids(f"{number}")]))
        writer.append("0", np.concatenate([prompt, small_ids("newer")]))
    segments = tracefile.open(path).segments.values()
    total = sum(header.shard_bytes for header in segments)
    (done,) = collect(path, max_bytes=total, settle=0).traces
    assert (done.samples, done.freed_bytes) == ([], 0), "it fits, and the older revision has its grace"
    (done,) = collect(path, max_bytes=total - 1, settle=0).traces
    assert done.samples == ["1"], "what was replaced holds the prompt; of samples, the oldest"
    again = sum(header.shard_bytes for header in tracefile.open(path).segments.values())
    assert again < total
    expected = {f"{n}": np.concatenate([prompt, small_ids("newer" if n == 0 else f"{n}")]) for n in (0, 2, 3, 4)}
    check_samples(path, expected)
    (done,) = collect(path, max_bytes=0, settle=0).traces
    assert done.samples == ["2", "3", "4", "0"]
    check_samples(path, {})


def test_samples_that_would_free_nothing_are_spared(path: str) -> None:
    with small_writer(path) as writer:
        writer.append_many([("a", small_ids("a", 10)), ("b", small_ids("b", 10))])
        writer.append("c", small_ids("c", 5000))
        last = writer.append("b", small_ids("b2", 10), start=10)  # keeps the first segment, and so "a" may stay
    total = sum(header.shard_bytes for header in tracefile.open(path).segments.values())
    large = tracefile.open(path).segments[segment_of(tracefile.open(path)["c"])].shard_bytes
    (done,) = collect(path, max_bytes=total - large, settle=0).traces
    assert done.samples == ["c"]
    np.testing.assert_array_equal(last.numpy(), np.concatenate([small_ids("b", 10), small_ids("b2", 10)]))
    check_samples(path, {"a": small_ids("a", 10), "b": np.concatenate([small_ids("b", 10), small_ids("b2", 10)])})


def test_old_samples_of_one_trace(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_writer(path) as writer:
        writer.append("a", small_ids("a"))
        writer.append("b", small_ids("b"))
        time.sleep(0.2)
        between = time.time()
        writer.append("b", small_ids("b2"), start=40)
    collect(path, older_than=time.time() - between + 0.1, settle=0)
    check_samples(path, {"b": np.concatenate([small_ids("b"), small_ids("b2")])})
    assert len(list_segments(path)) == 3, "b has rows of two"


def test_a_sample_that_is_continued_meanwhile_is_not_deleted_for_its_age(path: str, monkeypatch: Any) -> None:
    with small_writer(path) as writer:
        writer.append("a", small_ids("a"))
        writer.append("b", small_ids("b"))
        collect_later(monkeypatch, 3600)

        def settle(self: ReclaimingStore, trace: str) -> float:
            writer.append("a", small_ids("more"), start=0)
            writer.append("b", small_ids("more"), start=20)
            return 0.0

        monkeypatch.setattr(LocalStore, "settle", settle)
        with pytest.raises(tracefile.SampleGapError):  # deleted by then
            collect(path, older_than=1800)
        real = plan_gc

        def plan(*arguments: Any, **options: Any) -> GcPlan:
            found = real(*arguments, **options)
            monkeypatch.setattr("tracefile.collect.plan_gc", real)
            writer.append("c", small_ids("late"), start=20)  # between the plan and the deletion
            return found

        writer.append("c", small_ids("c"))
        monkeypatch.setattr(LocalStore, "settle", lambda *_: 0.0)
        monkeypatch.setattr("tracefile.collect.plan_gc", plan)
        (done,) = collect(path, older_than=1800).traces
    assert set(done.samples) == {"a", "c"}
    check_samples(path, {"c": np.concatenate([small_ids("c")[:20], small_ids("late")])})


def test_a_trace_that_is_deleted_under_its_writer(tmp_path: Any) -> None:
    directory = str(tmp_path / "run")
    (path,) = small_traces(directory, ["step_1.trace"])
    with small_writer(path) as writer:
        writer.append("b", small_ids("b")[:9])
        handle = writer.append("b", small_ids("b"), start=0)
        reader = tracefile.open(path)
        opened = reader["a"]
        opened[:1].numpy()
        small_traces(directory, ["step_2.trace"])
        assert collect(directory, keep_steps=1).traces[0].deleted_by == "keep-steps"
        tracefile.clear_cache()
        np.testing.assert_array_equal(opened.numpy(), small_ids(path))  # has the file open
        _check_gone(handle)
        for act in (
            lambda: writer.append("c", small_ids("c")),
            lambda: writer.append_many([("c", small_ids("c"))]),
            lambda: writer.append("b", small_ids("c"), start=40),
        ):
            with pytest.raises((tracefile.PublishError, tracefile.TraceNotFoundError), match=r"deleted|no trace"):
                act()
            assert os.listdir(directory) == ["step_2.trace"], "nothing half is left"
        for look in (reader.refresh, lambda: reader.wait("z", timeout=5), lambda: tracefile.open(path)):
            with pytest.raises(tracefile.TraceNotFoundError):
                look()
        # Another trace in its place has nothing to do with it.
        with small_writer(path) as other:
            other.append("x", small_ids("x"))
            with pytest.raises(tracefile.PublishError, match="another was made in its place"):
                writer.append("c", small_ids("c"))
        check_samples(path, {"x": small_ids("x")})


def test_a_trace_that_is_replaced_at_the_moment_of_publishing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.rename

    def rename(source: str, target: str, **options: int) -> None:
        monkeypatch.undo()
        LocalStore().delete_trace(path)
        with small_writer(path) as other:
            other.append("x", small_ids("x"))
        real(source, target, **options)

    with small_writer(path) as writer:
        writer.append("a", small_ids("a"))
        monkeypatch.setattr(os, "rename", rename)
        with pytest.raises(tracefile.PublishError):
            writer.append("b", small_ids("b"))
    check_samples(path, {"x": small_ids("x")})
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]


def test_a_deletion_of_traces_killed_at_each_step(tmp_path: Any) -> None:
    directory, copy = str(tmp_path / "run"), str(tmp_path / "copy")
    small_traces(copy, ["step_1.trace", "step_2.trace", "step_3.trace"])
    for at in range(1, 200):
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(copy, directory)

        def work(at: int = at) -> None:
            faults = Faults(directory, _die)
            faults.arm(at)
            collect(directory, keep_steps=1)

        (code,) = join(fork(work))
        for name in os.listdir(directory):
            if not name.startswith("."):
                check_samples(f"{directory}/{name}", {"a": small_ids(f"{copy}/{name}")})
        left = [name for name in os.listdir(directory) if name.startswith(".")]
        assert len(collect(directory, keep_steps=1).swept) == len(left), left
        assert os.listdir(directory) == ["step_3.trace"]
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert at > 8


def test_a_trace_behind_a_link(tmp_path: Any) -> None:
    directory, elsewhere = str(tmp_path / "run"), str(tmp_path / "elsewhere")
    small_traces(elsewhere, ["real.trace"])
    small_traces(directory, ["step_2.trace"])
    os.symlink(f"{elsewhere}/real.trace", f"{directory}/step_1.trace")
    with small_writer(f"{directory}/step_1.trace") as writer:
        writer.append("b", small_ids("b"))
    assert collect(directory, keep_steps=1).traces[0].deleted_by == "keep-steps"
    assert (os.listdir(directory), os.listdir(elsewhere)) == (["step_2.trace"], [])


def test_writers_and_the_deletion_of_their_trace_race(tmp_path: Any) -> None:
    """New traces at the same path, and old writers: nobody's segment lands in another's trace."""
    directory = str(tmp_path)
    path = f"{directory}/step_1.trace"

    def work(who: int) -> None:
        end = time.monotonic() + 4
        made = refused = 0
        while time.monotonic() < end:
            try:
                with small_writer(path) as writer:
                    for step in range(20):
                        writer.append(f"{who}/{step}", small_ids(f"{who}/{step}", 20))
                        made += 1
            except (tracefile.PublishError, tracefile.TraceNotFoundError, tracefile.NotATraceError):
                refused += 1
        assert made > 5
        assert refused > 0

    writers = [fork(lambda who=who: work(who)) for who in range(2)]  # type: ignore[misc]
    end = time.monotonic() + 3.5
    deleted = 0
    while time.monotonic() < end:
        time.sleep(0.05)
        try:
            LocalStore().delete_trace(path)
            deleted += 1
        except FileNotFoundError:
            continue
    assert join(*writers) == [0, 0]
    assert deleted > 3
    with tracefile.open(path) as trace:
        for name in trace:
            np.testing.assert_array_equal(trace[name].numpy(), small_ids(name, 20))
    assert list(verify_trace(path)) == []
    collect(directory, settle=0)
    assert [name for name in os.listdir(directory) if name.startswith(".")] == []


def test_what_collect_refuses(path: str, tmp_path: Any) -> None:
    small_writer(path).close()
    with pytest.raises(tracefile.OptionError, match="one trace"):
        collect(path, keep_steps=1)
    with pytest.raises(tracefile.OptionError, match="for reading"):
        collect("https://127.0.0.1/step_1.trace")
    with pytest.raises(tracefile.TraceNotFoundError):
        collect(str(tmp_path / "nothing"))
    with pytest.raises(tracefile.NotATraceError):
        collect(f"{path}/zarr.json")
    for options in ({"keep_steps": -1}, {"max_bytes": 1.5}, {"grace": -1}, {"older_than": float("nan")}):
        with pytest.raises(tracefile.OptionError):
            collect(str(tmp_path), **options)  # type: ignore[arg-type]


def test_deleting_over_an_object_store(bucket: Any) -> None:
    path = f"{bucket.url}/run/step_1.trace"
    with small_writer(path, quota_bytes=10**6) as writer:
        handles = {name: writer.append(name, small_ids(name)) for name in "abc"}
        trace = tracefile.open(path)
        assert trace.delete_samples(["a", "b"]) == ["a", "b"]
        check_samples(path, {"c": small_ids("c")})
        np.testing.assert_array_equal(handles["a"].numpy(), small_ids("a"))
        writer.append("a", small_ids("again"))
    check_samples(path, {"c": small_ids("c"), "a": small_ids("again")})
    stored = sum(header.shard_bytes for header in tracefile.open(path).segments.values())
    with small_writer(path, quota_bytes=stored + 9) as writer, pytest.raises(tracefile.QuotaExceededError):
        writer.append("d", small_ids("d"))
