"""Copies of traces between stores: the same bytes, verified, and gone on with where they were stopped."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
from named_samples import SMALL, check_named, ids_named, names
from ray_nodes import ray_node  # noqa: F401 - a fixture
from store_kinds import KINDS
from support import Faults, fork, join, tree

import tracefile
from tracefile import shard_copy, transfer
from tracefile.compact import compact_trace
from tracefile.local_store import LocalStore
from tracefile.reclaim import ReclaimingStore
from tracefile.store import list_segments, store_for
from tracefile.transfer import copy_trace
from tracefile.verify import verify_trace

if TYPE_CHECKING:
    from pathlib import Path

    from store_kinds import StoreKind


def _writer(path: str, **options: Any) -> tracefile.TraceWriter:
    return tracefile.TraceWriter(path, **(SMALL | {"layers_per_chunk": 2, "rows_per_chunk": 8} | options))


def _fill(path: str, samples: list[str], **options: Any) -> None:
    with _writer(path, **options) as writer:
        for sample in samples:
            writer.append(sample, ids_named(sample))


def _flip(path: str, segment: str, at: int = 70) -> None:
    with open(f"{path}/segments/{segment}/c/0/0/0", "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.fixture
def target(tmp_path: Path) -> str:
    return str(tmp_path / "elsewhere" / "copy.trace")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()


def test_the_same_bytes(path: str, target: str) -> None:
    _fill(path, names(12))
    _fill(path, ["none@0", "long@3000"], codec="none")
    seen: list[tuple[int, int]] = []
    report = copy_trace(path, target, on_progress=lambda *progress: seen.append(progress))
    assert tree(target) == tree(path)
    total = sum(header.shard_bytes for header in tracefile.open(path).segments.values())
    assert (report.segments, report.present, report.bytes) == (14, 0, total)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    assert report.damaged == {}
    assert tracefile.open(target).uuid == tracefile.open(path).uuid
    check_named(target, [*names(12), "none@0", "long@3000"])
    assert os.listdir(os.path.dirname(target)) == ["copy.trace"]
    again = copy_trace(path, target)
    assert (again.segments, again.present, again.bytes) == (0, 14, 0)
    assert tree(target) == tree(path)


def test_large_files_go_in_pieces(path: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_copy, "MERGED_READ_BYTES", 300)
    _fill(path, ["long@700"], codec="none")
    assert copy_trace(path, target).damaged == {}
    assert tree(target) == tree(path)
    (segment,) = list_segments(path)
    size = os.stat(f"{path}/segments/{segment}/c/0/0/0").st_size
    rows = []
    for at in (64, 299, 300, 301, size // 2, size - 3 * 88 * 16 - 5):
        _flip(path, segment, at)
        report = copy_trace(path, f"{target}.{at}", skip_damaged=True)
        assert len(report.damaged[segment]) == 1
        rows.append(report.lost[0])
        assert tree(f"{target}.{at}") == tree(path)
        _flip(path, segment, at)
    assert {lost.sample for lost in rows} == {"long@700"}
    assert all(0 < lost.stop - lost.start <= 8 for lost in rows)


@pytest.mark.parametrize("kind", KINDS)
def test_to_any_store_and_back(kind: str, request: pytest.FixtureRequest, tmp_path: Path, path: str) -> None:
    store: StoreKind = KINDS[kind](request, tmp_path)
    try:
        _fill(path, names(6))
        _fill(path, ["none@0"])
        there, back = store.path("there.trace"), str(tmp_path / "back.trace")
        assert copy_trace(path, there).segments == 7
        samples = [*names(6), "none@0"]
        trace = store.open(there)
        for sample in samples:
            np.testing.assert_array_equal(trace[sample].numpy(), ids_named(sample))
        _fill(path, ["more@9"])
        report = copy_trace(path, there)
        assert (report.segments, report.present) == (1, 7)
        assert copy_trace(there, back).segments == 8
        files = {name: data for name, data in tree(path).items() if not name.endswith("/")}
        assert {name: data for name, data in tree(back).items() if not name.endswith("/")} == files
        assert {name: store.read(there, name) for name in store.names(there)} == files
        # A handle of the trace there, compacted there.
        handles = [trace[sample] for sample in samples]
        compacted = compact_trace(there, min_age=0, settle=0, min_segments=2)
        assert compacted.before.segments == 8
        assert compacted.after.segments == len(list_segments(there)) < 5
        for sample, handle in zip(samples, pickle.loads(pickle.dumps(handles)), strict=True):
            np.testing.assert_array_equal(handle.numpy(), ids_named(sample))
        assert list(verify_trace(there)) == []
        # The copy's copy has the merged segments beside their originals, until it is compacted too.
        assert copy_trace(there, path).segments > 0
        check_named(path, [*samples, "more@9"])
        compact_trace(path, min_age=0, settle=0, min_segments=2)
        assert list_segments(path) == list_segments(there)
        # Rows that are dropped there, or not.
        _fill(there, ["more@9"])
        if isinstance(store_for(there), ReclaimingStore):
            report = compact_trace(there, min_age=0, settle=0, min_segments=2, drop_unreachable=True)
            assert report.changed == []
            assert report.after.bytes < report.before.bytes
        else:
            with pytest.raises(tracefile.OptionError, match="rows cannot be dropped"):
                compact_trace(there, min_age=0, settle=0, min_segments=2, drop_unreachable=True)
        trace = store.open(there)
        for sample in [*samples, "more@9"]:
            np.testing.assert_array_equal(trace[sample].numpy(), ids_named(sample))
    finally:
        store.close()


def test_what_is_written_meanwhile(path: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = names(8)
    _fill(path, samples)
    copied: list[str] = []
    publish = LocalStore.publish

    def step(self: LocalStore, trace: str, segment: str, *arguments: Any, **options: Any) -> None:
        publish(self, trace, segment, *arguments, **options)
        if trace != target:
            return
        copied.append(segment)
        if len(copied) == 2:
            _fill(path, ["new@20"])
        if len(copied) == 4:
            compact_trace(path, min_age=0, settle=0, min_segments=2)

    monkeypatch.setattr(LocalStore, "publish", step)
    report = copy_trace(path, target)
    assert report.damaged == {}
    assert set(list_segments(path)) <= set(list_segments(target)), "what replaced the rest came after"
    assert report.segments < 9
    check_named(target, [*samples, "new@20"])
    assert list(verify_trace(target)) == []


def test_rows_come_before_what_names_them(path: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with _writer(path, share_prefixes=True) as writer:
        base = writer.append("a", ids_named("a@40"))
        writer.append("b", base[:30])
        for number in range(4):
            writer.append("a", ids_named(f"x{number}@9"), start=20 + number)
        writer.truncate("b", 12)
    compact_trace(path, min_age=0, settle=0, min_segments=2, target_bytes=2000)
    with _writer(path) as writer:
        writer.append("c", base[5:25])  # names a segment that was replaced
    publish = LocalStore.publish

    def look(self: LocalStore, trace: str, *arguments: Any, **options: Any) -> None:
        publish(self, trace, *arguments, **options)
        for experts in tracefile.open(target).values():
            experts.numpy()

    monkeypatch.setattr(LocalStore, "publish", look)
    copy_trace(path, target)
    assert tree(target) == tree(path)


def test_killed_at_each_step_and_gone_on(path: str, target: str) -> None:
    samples = ["a@9", "b@0", "c@30"]
    _fill(path, samples)
    steps = 0
    for at in range(1, 500):

        def work(at: int = at) -> None:
            faults = Faults(os.path.dirname(target), lambda: os.kill(os.getpid(), signal.SIGKILL))
            faults.arm(at)
            copy_trace(path, target, durable=True)

        (code,) = join(fork(work))
        if os.path.exists(target):
            assert list(verify_trace(target)) == []
        report = copy_trace(path, target)
        assert report.segments + report.present == 3
        assert tree(target) == tree(path)
        check_named(target, samples)
        shutil.rmtree(os.path.dirname(target))
        os.mkdir(os.path.dirname(target))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        steps += 1
    assert code == 0
    assert steps > 20


def test_copies_at_the_same_time(path: str, target: str) -> None:
    samples = names(12)
    _fill(path, samples)
    pids = [fork(lambda: copy_trace(path, target)) for _ in range(4)]
    assert join(*pids) == [0] * 4
    assert tree(target) == tree(path)
    assert os.listdir(os.path.dirname(target)) == ["copy.trace"]


def test_a_target_that_keeps_nothing(path: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _fill(path, names(2))
    publish = LocalStore.publish
    monkeypatch.setattr(LocalStore, "publish", lambda *given, **options: publish(*given, **options) or object())
    with pytest.raises(tracefile.OptionError, match="kept"):
        copy_trace(path, target)
    assert list_segments(target) == []


def test_a_target_that_is_full(path: str, target: str) -> None:
    _fill(path, ["a@9", "b@9"])
    with (
        mock.patch.object(transfer, "write_file", side_effect=OSError(errno.ENOSPC, "No space left on device")),
        pytest.raises(tracefile.PublishError, match="free space"),
    ):
        copy_trace(path, target)
    assert list_segments(target) == []
    assert os.listdir(os.path.dirname(target)) == ["copy.trace"]
    copy_trace(path, target)
    assert tree(target) == tree(path)


def test_what_is_refused(path: str, target: str) -> None:
    _fill(path, ["a@9", "b@9"])
    with pytest.raises(tracefile.OptionError, match="itself"):
        copy_trace(path, path)
    with pytest.raises(tracefile.TraceNotFoundError):
        copy_trace(f"{path}.none", target)
    assert not os.path.exists(target)
    _fill(target, ["a@9"])
    before = tree(target)
    with pytest.raises(tracefile.TraceMismatchError) as caught:
        copy_trace(path, target)
    assert pickle.loads(pickle.dumps(caught.value)).theirs == tracefile.open(target).uuid
    assert tree(target) == before
    plain = f"{target}.d"
    os.mkdir(plain)
    open(f"{plain}/file", "w").close()
    with pytest.raises(tracefile.NotATraceError):
        copy_trace(path, plain)
    os.unlink(f"{plain}/file")
    assert copy_trace(path, plain).segments == 2, "an empty directory is fine"


def test_a_target_that_is_not_what_it_should_be(path: str, target: str) -> None:
    _fill(path, ["a@9", "b@9"])
    copy_trace(path, target)
    first, second = list_segments(path)
    shard = f"{target}/segments/{first}/c/0/0/0"
    os.truncate(shard, 80)
    with pytest.raises(tracefile.ShardDamagedError, match="has 80 bytes"):
        copy_trace(path, target)
    os.unlink(shard)
    with pytest.raises(tracefile.ShardDamagedError, match="is not there"):
        copy_trace(path, target, skip_damaged=True)
    shutil.rmtree(f"{target}/segments/{first}")
    copy_trace(path, target)
    assert tree(target) == tree(path)
    with open(f"{target}/segments/{second}/zarr.json", "ab") as file:
        file.write(b" ")
    with pytest.raises(tracefile.DamagedTraceError, match="not that of the source"):
        copy_trace(path, target)


# Damage


def _damaged(path: str) -> tuple[list[str], str]:
    """A trace of which the third of five segments has two damaged chunks; another's sample shares its rows."""
    samples = [f"s{number}@30" for number in range(4)]
    _fill(path, samples)
    with _writer(path) as writer:
        writer.append("fork", tracefile.open(path)["s2@30"][10:20])
    victim = tracefile.open(path).entry("s2@30").spans[0].segment
    index = tracefile.segments.OpenSegment(path, tracefile.open(path)._header, victim, "pread").index
    for number in (1, 6):  # rows [8, 16) of layers 0 and 1, rows [16, 24) of layers 2 and 3
        _flip(path, victim, index.offsets[number] + 2)
    return samples, victim


def test_a_copy_ends_before_damage(path: str, target: str) -> None:
    samples, victim = _damaged(path)
    _flip(path, list_segments(path)[3])
    report = copy_trace(path, target)
    assert list(report.damaged) == [victim, list_segments(path)[3]]
    assert [len(messages) for messages in report.damaged.values()] == [2, 1]
    assert report.held_back == list_segments(path)[2:]
    assert [(lost.sample, lost.start, lost.stop) for lost in report.lost] == [
        ("s2@30", 8, 24),
        ("fork", 0, 10),
        ("s3@30", 0, 8),
    ]
    check_named(target, samples[:2])


def test_damage_can_be_copied_as_it_is(path: str, target: str) -> None:
    _, victim = _damaged(path)
    report = copy_trace(path, target, skip_damaged=True)
    assert list(report.damaged) == [victim]
    assert report.held_back == []
    assert tree(target) == tree(path)
    with pytest.raises(tracefile.ChunkDamagedError):
        tracefile.open(target)["s2@30"].numpy()
    np.testing.assert_array_equal(tracefile.open(target)["s2@30"][:8].numpy(), ids_named("s2@30")[:8])
    assert [f.kind for f in verify_trace(target)] == [f.kind for f in verify_trace(path)] == ["chunk-damaged"] * 2
    assert copy_trace(path, target, skip_damaged=True).present == 5


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_shard_that_cannot_be_read(path: str, target: str, damage: str) -> None:
    _, victim = _damaged(path)
    shard = f"{path}/segments/{victim}/c/0/0/0"
    if damage == "missing":
        os.unlink(shard)
    else:
        os.truncate(shard, 200)
    assert copy_trace(path, target).held_back == list_segments(path)[2:]
    for _ in range(2):
        report = copy_trace(path, target, skip_damaged=True)
        assert [(lost.sample, lost.start, lost.stop) for lost in report.lost] == (
            [] if report.present == 5 else [("s2@30", 0, 30), ("fork", 0, 10)]
        )
    trace = tracefile.open(target)
    with pytest.raises(tracefile.SegmentMissingError):
        trace["s2@30"].numpy()  # and not an older revision
    np.testing.assert_array_equal(trace["s3@30"].numpy(), ids_named("s3@30"))


def test_rows_that_are_gone_from_the_source(path: str, target: str) -> None:
    _, victim = _damaged(path)
    shutil.rmtree(f"{path}/segments/{victim}")
    report = copy_trace(path, target)
    assert list(report.damaged) == [victim]
    assert report.segments == 0
    assert [(lost.sample, lost.start, lost.stop) for lost in report.lost] == [("fork", 0, 10)]
    assert copy_trace(path, target, skip_damaged=True).segments == 4


def test_without_verification_damage_goes_along(path: str, target: str) -> None:
    _damaged(path)
    assert copy_trace(path, target, verify=False).damaged == {}
    assert tree(target) == tree(path)


def test_a_damaged_document_is_refused(path: str, target: str) -> None:
    _fill(path, ["a@9", "b@9"])
    with open(f"{path}/segments/{list_segments(path)[1]}/zarr.json", "r+b") as file:
        file.truncate(30)
    with pytest.raises(tracefile.MetadataDamagedError):
        copy_trace(path, target, skip_damaged=True)
    assert list_segments(target) == []
