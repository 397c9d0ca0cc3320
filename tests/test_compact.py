"""Compaction: few segments instead of many, the same samples, and every handle that was ever made."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import shutil
import signal
import threading
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from named_samples import SMALL, check_named, ids_named, names
from support import Faults, fork, in_fork, join, random_routing, run_python
from test_durable import record_calls
from test_oracles import READ_ALL, READERS

import tracefile
from tracefile import compact, moved, prefixes
from tracefile.compact import compact_trace
from tracefile.compact_plan import Footprint, plan_merges
from tracefile.format import new_segment_id, staging_path
from tracefile.local_store import LocalStore
from tracefile.merge_writer import MergeWriter
from tracefile.metadata import WeightRange
from tracefile.store import list_segments
from tracefile.testing import RetentionHistory, check_same
from tracefile.verify import verify_trace

if TYPE_CHECKING:
    from pathlib import Path

    from tracefile.compact_plan import CompactReport

Array = np.ndarray[Any, Any]


def _writer(path: str, **options: Any) -> tracefile.TraceWriter:
    return tracefile.TraceWriter(path, **(SMALL | {"layers_per_chunk": 2, "rows_per_chunk": 16} | options))


def _compact(path: str, **options: Any) -> CompactReport:
    return compact_trace(path, **({"min_age": 0, "settle": 0, "min_segments": 2, "durable": False} | options))


def _fill(path: str, samples: list[str], **options: Any) -> list[tracefile.LazyRoutedExperts]:
    with _writer(path, **options) as writer:
        return [writer.append(sample, ids_named(sample)) for sample in samples]


def _check_elsewhere(handles: list[tracefile.LazyRoutedExperts], expected: list[Array]) -> None:
    """Read handles in a fresh interpreter, which knows nothing of the trace."""
    code = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    handles, expected = pickle.load(file)
for handle, ids in zip(handles, expected, strict=True):
    assert (handle.numpy() == ids).all()
"""
    path = f"/tmp/compact-handles-{os.getpid()}.pickle"
    try:
        with open(path, "wb") as file:
            pickle.dump((handles, expected), file)
        run_python(code, path)
    finally:
        os.unlink(path)


# What becomes of a trace


@pytest.mark.parametrize("codec", ["fast", pytest.param("compact", marks=pytest.mark.slow), "none"])
def test_samples_and_handles_stay_what_they_were(path: str, codec: str) -> None:
    samples = names(40)
    handles = _fill(path, samples, codec=codec)
    before = {sample: tracefile.open(path).entry(sample).rows for sample in samples}
    report = _compact(path)
    assert report.before.segments == 40
    assert report.after.segments == len(list_segments(path)) < 6
    assert report.after.bytes < report.before.bytes, "a header and an index less for each"
    assert not report.refused
    assert not report.changed
    check_named(path, samples)
    assert {sample: tracefile.open(path).entry(sample).rows for sample in samples} == before
    _check_elsewhere(handles, [ids_named(sample) for sample in samples])
    assert list(verify_trace(path)) == []
    assert not os.path.exists(staging_path(path))
    again = _compact(path)
    assert again.merged == []
    assert again.after == again.before == report.after


def test_1536_segments(path: str) -> None:
    samples = [f"prompt-{number // 16}/{number % 16}@8" for number in range(1536)]
    handles = _fill(path, samples)
    blobs = [pickle.dumps(handle) for handle in handles]

    def open_seconds() -> float:
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            tracefile.open(path).close()
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    def files() -> int:
        return sum(len(files) for _, _, files in os.walk(path))

    before = files(), open_seconds()
    report = _compact(path)
    after = files(), open_seconds()
    print(f"1,536 segments: {before[0]:,} files, opened in {before[1] * 1e3:.0f} ms; then {after[0]}, {after[1] * 1e3}")
    assert (before[0], after[0]) == (2 + 2 * 1536, 4) == (report.before.files, report.after.files)
    assert after[1] < before[1] / 2
    check_named(path, samples)
    for sample, blob in zip(samples, blobs, strict=True):
        np.testing.assert_array_equal(pickle.loads(blob).numpy(), ids_named(sample))


def test_segments_are_merged_with_their_like(path: str) -> None:
    lengths = (8, 60)  # chunks of 8 rows, and of 16
    samples = [f"{codec}/{number}@{rows}" for codec in ("fast", "none") for rows in lengths for number in range(5)]
    for sample in samples:
        _fill(path, [sample], codec=sample.partition("/")[0])
    report = _compact(path)
    assert [len(merge.replaced) for merge in report.merged] == [5] * 4
    headers = tracefile.open(path).segments.values()
    assert len({(header.geometry, header.codec) for header in headers}) == 4
    check_named(path, samples)


def test_how_large_they_become(path: str) -> None:
    samples = [f"s{number}@64" for number in range(30)]
    _fill(path, samples, codec="none")
    size = next(iter(tracefile.open(path).segments.values())).shard_bytes
    report = _compact(path, target_bytes=10 * size)
    assert [len(merge.replaced) for merge in report.merged] == [10, 10, 10]
    assert _compact(path, target_bytes=10 * size).merged == [], "they are not small any more"
    check_named(path, samples)


def test_what_is_not_worth_it(path: str) -> None:
    _fill(path, ["a@9", "b@9", "c@9"])
    assert _compact(path, min_segments=4).merged == []
    assert compact_trace(path).merged == [], "all of them are younger than a minute"
    plan = _compact(path, dry_run=True)
    assert plan.after.segments == 1
    assert len(list_segments(path)) == 3
    assert _compact(path).after == Footprint(1, 4, plan.merged[0].bytes - 2 * (64 + 4))
    for wrong in ({"target_bytes": 0}, {"min_segments": 1}, {"min_age": -1}, {"settle": -1}):
        with pytest.raises(tracefile.OptionError):
            _compact(path, **wrong)


def test_segments_without_rows_go_along(path: str) -> None:
    with _writer(path) as writer:
        for number in range(4):
            writer.append(f"{number}@0", ids_named(f"{number}@0"))
        first = writer.append("a@30", ids_named("a@30"))
    assert _compact(path).after == Footprint(1, 4, tracefile.open(path).segments.popitem()[1].shard_bytes)
    with _writer(path) as writer:
        writer.truncate("a@30", 7)
        writer.truncate("a@30", 5)
    _compact(path)
    trace = tracefile.open(path)
    assert len(trace.segments) == 1
    np.testing.assert_array_equal(trace["a@30"].numpy(), ids_named("a@30")[:5])
    np.testing.assert_array_equal(first.numpy(), ids_named("a@30"))
    only_empty = f"{path}.2"
    _fill(only_empty, ["x@0", "y@0"])
    assert _compact(only_empty).after == Footprint(1, 3, 0)
    assert sorted(tracefile.open(only_empty)) == ["x@0", "y@0"]


@pytest.mark.parametrize("reader", READERS)
def test_other_readers_open_what_was_merged(tmp_path: Path, reader: str) -> None:
    root, out = tmp_path / "traces", tmp_path / "out"
    root.mkdir()
    out.mkdir()
    expected = {}
    for codec in ("fast", "none"):
        path = str(root / codec)
        _fill(path, names(12), codec=codec)
        old = tracefile.open(path)
        _compact(path)
        _compact(path, drop_unreachable=True)
        new = tracefile.open(path)
        for header in new.segments.values():
            ids = np.full((5, header.rows, 2), 255, np.uint8)
            for sample, entry in header.samples.items():
                for span in entry.spans:
                    ids[:, span.start : span.stop] = old[sample].numpy().swapaxes(0, 1)
            expected[f"{codec}+{header.id}.npy"] = ids
    run_python(READ_ALL, reader, str(root), str(out))
    assert sorted(os.listdir(out)) == sorted(expected)
    for name, ids in expected.items():
        np.testing.assert_array_equal(np.load(out / name), ids)


# Revisions, shared rows, what the documents say


def test_revisions_and_what_writers_do_with_them_later(path: str) -> None:
    with _writer(path) as writer:
        first = writer.append("a", np.full((20, 5, 2), 1), weight_version=1)
        second = writer.append("a", np.full((10, 5, 2), 2), start=15, weight_version=2)
        other = writer.append("b", np.full((9, 5, 2), 3), weight_version="x")
        versions = {sample: tracefile.open(path).weight_versions(sample) for sample in ("a", "b")}
        opened = tracefile.open(path)
        assert _compact(path).after.segments < 3
        # Writers and readers from before know nothing of it.
        third = writer.append("a", np.full((4, 5, 2), 4), start=24)
        fork_ = writer.append("c", torch.cat([first[:18], other[2:5]]))
        writer.truncate("b", 4)
    assert {sample: opened.weight_versions(sample) for sample in ("a", "b")} == versions
    assert opened.refresh() == ["a", "c", "b"]
    again = tracefile.open(path)
    for trace in (again, opened):
        assert trace.weight_versions("a", 0, 24) == [*versions["a"][:1], WeightRange(15, 24, 2)]
        assert trace.weight_versions("c") == [(0, 18, 1), (18, 21, "x")]
        assert trace["a"][:, 0, 0].tolist() == [1] * 15 + [2] * 9 + [4] * 4
        assert trace["c"][:, 0, 0].tolist() == [1] * 18 + [3] * 3
        assert trace["b"][:, 0, 0].tolist() == [3] * 4
    _compact(path)
    _compact(path)
    expected = [1] * 20, [1] * 15 + [2] * 10, [3] * 9, [1] * 15 + [2] * 9 + [4] * 4, [1] * 18 + [3] * 3
    handles = [first, second, other, third, fork_]
    for handle, ids in zip(handles, expected, strict=True):
        assert handle[:, 0, 0].tolist() == ids
    _check_elsewhere(handles, [handle.numpy() for handle in handles])
    assert list(verify_trace(path)) == []


def test_shared_prefixes(path: str, rng: np.random.Generator) -> None:
    prompt = random_routing(rng, 300, **SMALL)
    answers = [np.concatenate([prompt, random_routing(rng, 20 + n, **SMALL)]) for n in range(12)]
    with _writer(path, share_prefixes=True) as writer:
        for number, ids in enumerate(answers[:6]):
            writer.append(f"{number}", ids)
        _compact(path)
        for number, ids in enumerate(answers[6:], 6):  # the writer's index names what is gone
            writer.append(f"{number}", ids)
    rows = sum(header.rows for header in tracefile.open(path).segments.values())
    assert rows < 2 * 304 + 12 * 48
    for _ in range(2):
        trace = tracefile.open(path)
        for number, ids in enumerate(answers):
            np.testing.assert_array_equal(trace[f"{number}"].numpy(), ids)
        assert list(verify_trace(path)) == []
        _compact(path)


def test_findings_belong_to_the_revision_that_has_them(path: str) -> None:
    wrong = ids_named("x@40")
    wrong[10] = 3  # the same expert twice
    with _writer(path, validate="warn") as writer:
        writer.append("x", wrong)
        writer.append("y", wrong)
        writer.append("y", ids_named("x@40"))
    assert [len(header.findings) for header in tracefile.open(path).segments.values()] == [1, 1, 0]
    _compact(path)
    (header,) = tracefile.open(path).segments.values()
    assert {finding["sample"] for finding in header.findings} == {"x"}


def test_late_commits_and_deletions_count_as_before(path: str) -> None:
    def commit(segment: str, sample: str, value: int) -> None:
        with mock.patch("tracefile.segment_writer.new_segment_id", return_value=segment), _writer(path) as writer:
            writer.append(sample, np.full((9, 5, 2), value))

    early, late = new_segment_id(), None
    commit(new_segment_id(), "a", 1)
    commit(new_segment_id(), "b", 1)
    between = new_segment_id()
    commit(new_segment_id(), "b", 2)
    tracefile.open(path).delete_samples("a")
    commit(new_segment_id(), "c", 1)
    late = new_segment_id()
    _compact(path)
    commit(early, "a", 7)  # before it was deleted
    commit(between, "b", 7)  # between its revisions
    commit(late, "c", 7)  # after its revision, and before it was merged
    for _ in range(2):
        trace = tracefile.open(path)
        assert {sample: trace[sample][0, 0, 0].item() for sample in trace} == {"b": 2, "c": 7}
        _compact(path)
    assert list(verify_trace(path)) == []
    commit(new_segment_id(), "a", 8)
    assert sorted(tracefile.open(path)) == ["a", "b", "c"]


def test_a_late_commit_while_it_is_merged(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _fill(path, ["a@9", "b@9"])
    early = new_segment_id()
    with _writer(path) as writer:
        writer.append("a@9", np.zeros((11, 5, 2), int))
    publish = LocalStore.publish

    def late(self: LocalStore, *arguments: Any, **options: Any) -> None:
        monkeypatch.undo()
        with mock.patch("tracefile.segment_writer.new_segment_id", return_value=early), _writer(path) as other:
            other.append("a@9", np.ones((12, 5, 2), int))
        publish(self, *arguments, **options)

    monkeypatch.setattr(LocalStore, "publish", late)
    opened = tracefile.open(path)
    assert _compact(path).after.segments == 2
    assert tracefile.open(path)["a@9"].numpy().tolist() == np.zeros((11, 5, 2), int).tolist()
    assert opened.refresh() == []
    assert opened["a@9"].shape[0] == 11


def test_followers_see_no_news(path: str) -> None:
    samples = names(6)
    _fill(path, samples)
    trace = tracefile.open(path)
    seen = [sample for sample, _ in trace.follow(existing=True, timeout=0.05)]
    follower = trace.follow(timeout=0.3)
    _compact(path)
    _fill(path, ["new@5"])
    assert [sample for sample, _ in follower] == ["new@5"]
    assert seen == samples
    assert trace.refresh() == []


# Rows that are dropped


def test_dropping_what_no_newest_revision_has(path: str) -> None:
    with _writer(path) as writer:
        old = [writer.append(f"{number}", np.full((40, 5, 2), number)) for number in range(10)]
        new = [writer.append(f"{number}", np.full((3, 5, 2), 9), start=20) for number in range(5)]
        gone = [writer.append(f"{number}", np.full((33, 5, 2), 8)) for number in range(5, 8)]
    tracefile.open(path).delete_samples("9")
    stored = _compact(path).after.bytes
    report = _compact(path, drop_unreachable=True)
    assert report.after.bytes < 0.8 * stored
    assert list(verify_trace(path)) == []
    trace = tracefile.open(path)
    assert sorted(trace) == [f"{number}" for number in range(9)]
    for number in range(9):
        rows = [number] * 20 + [9] * 3 if number < 5 else [8] * 33 if number < 8 else [number] * 40
        assert trace[f"{number}"][:, 0, 0].tolist() == rows
    blobs = pickle.dumps((old, new, gone))

    def read() -> list[Any]:
        moved._known.__init__()  # type: ignore[misc]  # as in a process that has read nothing
        tracefile.segments.segment_pool._open.clear()
        found: list[Any] = []
        for handle in (handle for handles in pickle.loads(blobs) for handle in handles):
            try:
                found.append(handle[:, 0, 0].tolist())
            except tracefile.SegmentMissingError as error:
                found.append("gone" if "is gone" in str(error) else str(error))
        return found

    # Chunks of 16 rows: rows [20, 32) share one with rows that stay.
    assert in_fork(read) == (
        ["gone"] * 8 + [[8] * 40, "gone"] + [[number] * 20 + [9] * 3 for number in range(5)] + [[8] * 33] * 3
    )
    assert old[0][:32, 0, 0].tolist() == [0] * 32


def test_rows_that_somebody_wants_meanwhile_are_not_dropped(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with _writer(path) as writer:
        old = writer.append("a", np.full((40, 5, 2), 1))
        writer.append("a", np.full((12, 5, 2), 2))
        check = compact._Compaction._check_unchanged

        def late(self: Any, sources: Any) -> None:
            writer.append("b", old[:30])
            check(self, sources)

        monkeypatch.setattr(compact._Compaction, "_check_unchanged", late)
        report = _compact(path, drop_unreachable=True)
    assert report.merged == []
    assert len(report.changed) == 2
    assert tracefile.open(path)["b"][:, 0, 0].tolist() == [1] * 30


class _Stale:
    """A sample "a" with an old revision, and a writer that appends rows of it as "b" when told to."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.writer = _writer(path)
        self.old = self.writer.append("a", np.full((40, 5, 2), 1))
        self.writer.append("a", np.full((12, 5, 2), 2))

    def append(self) -> None:
        self.writer.append("b", self.old[:30])

    def check(self, **expected: list[int]) -> None:
        """These samples are there and read right, also after more compactions; and then there is one segment."""
        self.writer.close()
        for _ in range(3):
            trace = tracefile.open(self.path)
            assert {sample: trace[sample][:, 0, 0].tolist() for sample in trace} == expected
            assert list(verify_trace(self.path)) == []
            _compact(self.path)
        assert len(list_segments(self.path)) == 1
        assert not os.path.exists(staging_path(self.path))


@pytest.fixture
def stale(path: str) -> _Stale:
    return _Stale(path)


def _before_first(monkeypatch: pytest.MonkeyPatch, stale: _Stale, name: str, act: Any) -> list[str]:
    """Act once, right before a method of the store is first called with one of the segments; with which that was."""
    met: list[str] = []
    original, segments = getattr(LocalStore, name), list_segments(stale.path)

    def first(self: LocalStore, trace: str, segment: str, *arguments: Any) -> Any:
        if not met and segment in segments:
            met.append(segment)
            act()
        return original(self, trace, segment, *arguments)

    monkeypatch.setattr(LocalStore, name, first)
    return met


@pytest.mark.parametrize("name", ["set_aside", "drop"])
def test_rows_that_somebody_finds_in_the_original_stay(
    stale: _Stale, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Before originals are set aside, and between the last look at the trace and their removal."""
    met = _before_first(monkeypatch, stale, name, stale.append)
    report = _compact(stale.path, drop_unreachable=True)
    assert report.changed == met != []
    stale.check(a=[2] * 12, b=[1] * 30)


@pytest.mark.parametrize("when", ["before", "after"])
def test_rows_are_dropped_while_somebody_names_them(stale: _Stale, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """A writer has seen that rows are there, and is about to publish what names them, or did and will look again."""
    publish = LocalStore.publish

    def interleave(self: LocalStore, *arguments: Any, **options: Any) -> None:
        monkeypatch.undo()
        if when == "after":
            publish(self, *arguments, **options)
        with mock.patch.object(compact._Compaction, "_see_news"):  # it has looked before
            _compact(stale.path, drop_unreachable=True)
        if when == "before":
            publish(self, *arguments, **options)

    monkeypatch.setattr(LocalStore, "publish", interleave)
    if when == "before":
        with pytest.raises(tracefile.SegmentMissingError, match="append the sample whole"):
            stale.append()
        stale.check(a=[2] * 12)
    else:
        stale.append()
        stale.check(a=[2] * 12, b=[1] * 30)


def test_rows_that_are_wanted_after_a_run_was_killed(stale: _Stale, monkeypatch: pytest.MonkeyPatch) -> None:
    old = list_segments(stale.path)[0]
    for name, aside in (("set_aside", []), ("drop", [old])):

        def work(name: str = name) -> None:
            _before_first(monkeypatch, stale, name, lambda: os.kill(os.getpid(), signal.SIGKILL))
            _compact(stale.path, drop_unreachable=True)

        assert join(fork(work)) == [-signal.SIGKILL]
        assert LocalStore().aside(stale.path) == aside
        assert tracefile.open(stale.path)["a"][:, 0, 0].tolist() == [2] * 12
    stale.append()
    stale.check(a=[2] * 12, b=[1] * 30)


@pytest.mark.parametrize("drop", [False, True])
def test_what_is_aside_is_finished_by_the_next_run(stale: _Stale, drop: bool) -> None:
    with mock.patch.object(LocalStore, "drop", side_effect=OSError(5, "no")), pytest.raises(OSError, match="no"):
        _compact(stale.path, drop_unreachable=True)
    (old,) = LocalStore().aside(stale.path) or list_segments(stale.path)[:1]
    LocalStore().set_aside(stale.path, old)  # as if it had been killed
    assert _compact(stale.path, drop_unreachable=drop).finished == [old]
    stale.check(a=[2] * 12)


def test_rows_of_segments_that_are_gone_are_wanted(stale: _Stale, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer names what an earlier run has replaced: the segment that has the rows now stays."""
    _compact(stale.path)
    met = _before_first(monkeypatch, stale, "set_aside", stale.append)
    report = _compact(stale.path, drop_unreachable=True)
    assert report.changed == met != []
    stale.check(a=[2] * 12, b=[1] * 30)


def test_a_newer_revision_is_withdrawn(stale: _Stale, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a writer that finds rows gone which it has named: the revision before it counts again."""
    newest = list_segments(stale.path)[1]
    plan = plan_merges
    monkeypatch.setattr(compact, "plan_merges", lambda headers, *given, **options: plan(headers[:1], *given, **options))
    met = _before_first(monkeypatch, stale, "set_aside", lambda: LocalStore().delete(stale.path, newest))
    report = _compact(stale.path, drop_unreachable=True)
    assert len(report.merged) == 1
    assert report.changed == met != []
    monkeypatch.undo()
    stale.check(a=[1] * 40)


# Damage


def test_a_damaged_segment_is_left_as_it_is(path: str) -> None:
    samples = names(8)
    _fill(path, samples)
    victim = tracefile.open(path).entry(samples[3]).spans[0].segment
    shard = f"{path}/segments/{victim}/c/0/0/0"
    with open(shard, "r+b") as file:
        file.seek(80)
        byte = file.read(1)
        file.seek(80)
        file.write(bytes([byte[0] ^ 1]))
    report = _compact(path)
    assert set(report.refused) == {victim}
    assert "fails its checksum" in report.refused[victim]
    assert victim in list_segments(path)
    trace = tracefile.open(path)
    for sample in samples:
        if sample == samples[3]:
            with pytest.raises(tracefile.ChunkDamagedError):
                trace[sample].numpy()
        else:
            np.testing.assert_array_equal(trace[sample].numpy(), ids_named(sample))
    (finding,) = verify_trace(path)
    assert finding.segment == victim
    os.truncate(shard, 100)
    assert set(_compact(path).refused) == {victim}
    _fill(path, names(3, 20))
    assert "has 100 bytes" in _compact(path).refused[victim]
    os.unlink(shard)
    _fill(path, names(3, 30))
    assert victim in _compact(path).refused


def test_a_damaged_document(path: str) -> None:
    _fill(path, names(4))
    victim = list_segments(path)[0]
    with open(f"{path}/segments/{victim}/zarr.json", "r+b") as file:
        file.truncate(50)
    with pytest.raises(tracefile.MetadataDamagedError):
        _compact(path, drop_unreachable=True)
    _compact(path)
    assert victim in list_segments(path)


def test_originals_stay_where_the_merged_segment_is_damaged(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = names(5)
    _fill(path, samples)
    monkeypatch.setattr(LocalStore, "delete_all", mock.Mock(side_effect=OSError(5, "no")))
    with pytest.raises(OSError, match="no"):
        _compact(path)
    monkeypatch.undo()
    (merged,) = [header for header in tracefile.open(path).segments.values() if header.replaces]
    os.truncate(f"{path}/segments/{merged.id}/c/0/0/0", 70)
    assert _compact(path).finished == []
    shutil.rmtree(f"{path}/segments/{merged.id}")
    check_named(path, samples)


# Killed, and together with others


def _kill_at_each_step(path: str, samples: list[str], handles: list[Any], **options: Any) -> list[int]:
    """How many segments a compaction leaves that is killed at each of its steps."""
    backup = f"{path}.backup"
    shutil.copytree(path, backup)
    left = []
    for at in range(1, 1000):

        def work(at: int = at) -> None:
            faults = Faults(os.path.dirname(path), lambda: os.kill(os.getpid(), signal.SIGKILL))
            faults.arm(at)
            _compact(path, **options)

        (code,) = join(fork(work))
        assert code in (0, -signal.SIGKILL)
        trace = tracefile.open(path)
        assert sorted(trace) == sorted(samples)
        left.append(len(trace.segments))
        for sample, handle in zip(samples, handles, strict=True):
            np.testing.assert_array_equal(trace[sample].numpy(), ids_named(sample))
            np.testing.assert_array_equal(pickle.loads(pickle.dumps(handle)).numpy(), ids_named(sample))
        if code == 0:
            break
        _compact(path, **options)  # whatever was left, the next run gets there
        shutil.rmtree(staging_path(path), ignore_errors=True)
        assert len(list_segments(path)) == left[-1] or len(list_segments(path)) == 1
        check_named(path, samples)
        shutil.rmtree(path)
        shutil.copytree(backup, path)
    return left


@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param(more, marks=pytest.mark.slow) for more in ({"durable": True}, {"drop_unreachable": True}))],
    ids=str,
)
def test_killed_at_each_step(path: str, options: dict[str, bool]) -> None:
    samples = [f"s{number}@{number + 9}" for number in range(4)]
    handles = _fill(path, samples)
    with _writer(path) as writer:
        writer.truncate(samples[0], 0)
        again = writer.append(samples[0], ids_named(samples[0]))
    if options.get("drop_unreachable"):
        handles[0] = again
    left = _kill_at_each_step(path, samples, handles, **options)
    assert len(left) > 20
    assert left[0] == 6
    assert left[-1] == 1
    assert {7, 6, 5, 4, 3, 2} <= set(left)


def test_flushed_before_anything_is_deleted(path: str) -> None:
    _fill(path, names(3))
    calls: list[tuple[str, str]] = []
    with record_calls(calls):
        _compact(path, durable=True)
    (merged,) = list_segments(path)
    renames = [number for number, (call, _) in enumerate(calls) if call == "rename"]
    assert os.path.basename(calls[renames[0]][1]) == merged
    assert calls[renames[0] + 1] == ("fsync", f"{path}/segments")
    flushed = [name.partition(merged)[2] for _, name in calls[: renames[0]]]
    assert {"/c/0/0/0", "/zarr.json", ""} <= set(flushed)
    assert len(renames) == 4
    assert all("deleted-" in calls[at][1] for at in renames[1:])


def test_two_runs_that_publish_before_either_deletes(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = names(6)
    handles = _fill(path, samples)
    check = compact._Compaction._check_unchanged
    second: list[Any] = []

    def interleave(self: Any, sources: Any) -> None:
        check(self, sources)
        monkeypatch.undo()
        with mock.patch.object(LocalStore, "delete_all"):  # the other one comes to that later
            second.append(_compact(path))
            second.append(tracefile.open(path))

    monkeypatch.setattr(compact._Compaction, "_check_unchanged", interleave)
    first = _compact(path)
    assert len(first.merged) == len(second[0].merged) == 1
    assert len(list_segments(path)) == 2, "both, and none of the originals"
    # Handles of either one stay good when the two become one.
    between = [trace[sample] for sample in samples for trace in (tracefile.open(path), second[1])]
    rows = [header.rows for header in tracefile.open(path).segments.values()]
    assert _compact(path, target_bytes=1).after.segments == 1
    assert [header.rows for header in tracefile.open(path).segments.values()] == rows[:1], "not twice"
    check_named(path, samples)
    _check_elsewhere(
        [*handles, *between], [ids_named(s) for s in samples] + [ids_named(s) for s in samples for _ in range(2)]
    )
    assert list(verify_trace(path)) == []


def test_what_another_run_did_meanwhile(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = names(6)
    handles = _fill(path, samples)
    copy = MergeWriter._copy

    def interleave(self: MergeWriter, *arguments: Any) -> Any:
        monkeypatch.undo()
        _compact(path)
        return copy(self, *arguments)

    monkeypatch.setattr(MergeWriter, "_copy", interleave)
    report = _compact(path)
    assert report.merged == []
    assert len(report.changed) == 6
    assert report.after.segments == 1
    check_named(path, samples)
    _check_elsewhere(handles, [ids_named(sample) for sample in samples])


def test_compactors_writers_and_readers_at_once(path: str) -> None:
    """Real processes: three compact all the while, two write, one reads what the writers hand it and what it finds."""
    first = names(30)
    handles = _fill(path, first)
    stop = f"{path}.stop"

    def until_stopped(step: Any) -> None:
        while not os.path.exists(stop):
            step()

    def write(who: int) -> None:
        with _writer(path) as writer:
            for number in range(40):
                name = f"w{who}/{number}@{(number * 7) % 50}"
                handle = writer.append(name, ids_named(name))
                np.testing.assert_array_equal(handle.numpy(), ids_named(name))
                writer.append(f"w{who}@30", ids_named("turn@30")[:20])
                writer.append(f"w{who}@30", ids_named("turn@30")[15:], start=15)

    def read() -> None:
        trace = tracefile.open(path)
        for sample in list(trace)[-20:]:
            expected = ids_named("turn@30") if sample.startswith("w") and "/" not in sample else ids_named(sample)
            np.testing.assert_array_equal(trace[sample].numpy(), expected[: len(trace[sample])])
        assert set(first) <= set(trace)

    writers = [fork(lambda who=who: write(who)) for who in range(2)]  # type: ignore[misc]
    others = [fork(lambda: until_stopped(lambda: _compact(path, settle=0.01))) for _ in range(3)]
    others.append(fork(lambda: until_stopped(read)))
    try:
        assert join(*writers, timeout=100) == [0, 0]
    finally:
        open(stop, "w").close()
    assert join(*others) == [0] * 4
    for _ in range(3):
        _compact(path)
    trace = tracefile.open(path)
    written = [f"w{who}/{number}@{(number * 7) % 50}" for who in range(2) for number in range(40)]
    assert sorted(trace) == sorted([*first, *written, "w0@30", "w1@30"])
    for sample in [*first, *written]:
        np.testing.assert_array_equal(trace[sample].numpy(), ids_named(sample))
    for sample in ("w0@30", "w1@30"):
        np.testing.assert_array_equal(trace[sample].numpy(), ids_named("turn@30"))
    _check_elsewhere(handles, [ids_named(sample) for sample in first])
    assert list(verify_trace(path)) == []
    assert (
        sum(header.rows for header in trace.segments.values()) < 3 * sum(len(trace[sample]) for sample in trace) + 4000
    )


def test_opening_while_originals_are_deleted(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = names(6)
    _fill(path, samples)
    trace, fresh = tracefile.open(path), samples[:]
    with _writer(path) as writer:
        writer.append("late@4", ids_named("late@4"))
    segments = LocalStore.segments

    def listed(self: LocalStore, where: str) -> list[str]:
        found = segments(self, where)
        monkeypatch.undo()
        _compact(path)  # between the listing and the reading of the documents
        return found

    monkeypatch.setattr(LocalStore, "segments", listed)
    assert trace.refresh() == ["late@4"]
    monkeypatch.setattr(LocalStore, "segments", listed)
    _fill(path, ["later@4"])
    fresh += ["late@4", "later@4"]
    monkeypatch.setattr(LocalStore, "segments", listed)
    check_named(path, fresh)
    monkeypatch.setattr(LocalStore, "segments", listed)
    assert list(verify_trace(path)) == []


def test_reading_while_it_happens(path: str) -> None:
    """Threads read handles from before, over and over, while the segments go from under them."""
    samples = names(30)
    handles = _fill(path, samples)
    stop = threading.Event()
    errors: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                for sample, handle in zip(samples, handles, strict=True):
                    np.testing.assert_array_equal(handle.numpy(), ids_named(sample))
        except BaseException as error:
            errors.append(error)

    tracefile.configure(max_open_segments=4)
    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for first in (100, 200, 300):
        _compact(path, target_bytes=2000)
        _fill(path, names(10, first))
        time.sleep(0.02)
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_handle_of_what_is_really_gone(path: str) -> None:
    handles = _fill(path, ["a@9", "b@9"])
    _compact(path)
    shutil.rmtree(f"{path}/segments/{list_segments(path)[0]}")
    with pytest.raises(tracefile.SegmentMissingError):
        handles[0].numpy()
    shutil.rmtree(path)
    with pytest.raises(tracefile.SegmentMissingError):
        handles[1].numpy()


def test_a_loader_of_handles_from_before(path: str) -> None:
    samples = [f"s{number}@20" for number in range(6)]
    handles = _fill(path, samples)
    blob = pickle.dumps(handles)
    _compact(path)

    def load() -> list[Any]:
        loader = tracefile.MicrobatchLoader(pickle.loads(blob))
        return [microbatch[3].tolist() for microbatch in loader]

    assert in_fork(load) == [ids_named(sample)[:, 3].tolist() for sample in samples]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOENT])
def test_files_that_a_network_file_system_took_away(path: str, number: int) -> None:
    (handle,) = _fill(path, ["a@9"])
    handle[:1].numpy()
    _fill(path, ["b@9"])
    _compact(path)
    (opened,) = tracefile.segments.segment_pool.opened(handle.selection.rows.segments()[0].trace)
    assert opened.source is not None
    tracefile.clear_cache()
    with mock.patch.object(opened.source, "check_size", side_effect=OSError(number, "stale")):
        np.testing.assert_array_equal(handle.numpy(), ids_named("a@9"))


def test_moves_are_looked_for_once(path: str) -> None:
    samples = names(20)
    handles = _fill(path, samples)
    _compact(path)

    def read() -> int:
        with mock.patch("tracefile.moved.list_segments", side_effect=list_segments) as listed:
            for handle in handles:
                handle.numpy()
            return listed.call_count

    assert in_fork(read) == 1


def test_segments_that_live_by_reference_are_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _fill(path, names(3))
    monkeypatch.setattr(LocalStore, "handle", lambda *_: object())
    with pytest.raises(tracefile.OptionError, match="kept"):
        _compact(path)


def test_plan_of_nothing() -> None:
    assert plan_merges([], {}, target_bytes=1, min_segments=2) == []


# Random histories


class _CompactedHistory(RetentionHistory):
    """With compaction in between, and late commits; prefixes are found from four rows on."""

    def __init__(self) -> None:
        self.block_rows, prefixes.BLOCK_ROWS = prefixes.BLOCK_ROWS, 4
        super().__init__()
        self.since: dict[str, str] = {}  # the id of a segment made right after the newest revision, or its deletion
        self.begun: list[str] = []

    def _committed(self, sample: str, ids: Any, handle: tracefile.LazyRoutedExperts) -> None:
        super()._committed(sample, ids, handle)
        self.since[sample] = new_segment_id()

    @rule(size=st.sampled_from([1, 400, 2000, 2**20]), least=st.integers(2, 4))
    def compact(self, size: int, least: int) -> None:
        if os.path.exists(self.path):
            _compact(self.path, target_bytes=size, min_segments=least)

    @rule(data=st.data())
    def compact_without_deleting(self, data: st.DataObject) -> None:
        """As it is left by a run that is killed."""
        if os.path.exists(self.path):
            with mock.patch.object(LocalStore, "delete_all"):
                _compact(self.path, target_bytes=data.draw(st.sampled_from([400, 2**20])))

    @rule()
    def begin_late(self) -> None:
        self.begun.append(new_segment_id())

    @rule(data=st.data())
    def commit_late(self, data: st.DataObject) -> None:
        """A segment that was begun a while ago; it counts as of then."""
        if not self.begun:
            return
        segment = self.begun.pop(data.draw(st.integers(0, len(self.begun) - 1)))
        sample, ids = self._sample(data), self._draw_routing(data)
        with mock.patch("tracefile.segment_writer.new_segment_id", return_value=segment):
            handle = self._writer(data).append(sample, ids)
        if self.since.get(sample, "") < segment:
            self._committed(sample, ids, handle)
            self.since[sample] = segment
        else:
            self.handles.append((handle, ids))

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        if self.model:
            sample = data.draw(st.sampled_from(sorted(self.model)))
            tracefile.open(self.path).delete_samples(sample)
            del self.model[sample], self.current[sample]
            self.since[sample] = new_segment_id()

    def teardown(self) -> None:
        prefixes.BLOCK_ROWS = self.block_rows
        try:
            if os.path.exists(self.path):
                for handle, ids in self.handles:
                    with contextlib.suppress(*([tracefile.SegmentMissingError] if self._may_be_gone(handle) else [])):
                        check_same(handle, ids)
                _compact(self.path)
                _compact(self.path, drop_unreachable=True)
                self.a_fresh_reader_sees_the_newest()
                assert list(verify_trace(self.path)) == []
        finally:
            super().teardown()


_CompactedHistory.TestCase.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
TestHistory = _CompactedHistory.TestCase
