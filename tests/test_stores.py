"""What every store must do: writing, reading, slicing, waiting, damage, deleting. store_kinds.py has the stores."""

from __future__ import annotations

import json
import pickle
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray_nodes import ray_node  # noqa: F401
from store_kinds import KINDS, StoreKind
from support import ids_of, run_python
from test_lazy_programs import Pair, _operation
from typer.testing import CliRunner

import tracefile
from tracefile import errors
from tracefile.cli import app
from tracefile.lazy import LazyRoutedExperts
from tracefile.load import expert_load
from tracefile.store import list_segments, store_for
from tracefile.survey import take_survey
from tracefile.verify import verify_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Array = np.ndarray[Any, Any]
MODEL = {"num_layers": 5, "top_k": 2, "num_experts": 16}
LENGTHS = {"a": 20, "b": 33, "c": 0, "d": 7}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreKind]:
    made = KINDS[request.param](request, tmp_path)
    yield made
    made.close()


class Written:
    """A trace of two segments: a and b, c and d."""

    def __init__(self, kind: StoreKind) -> None:
        self.kind = kind
        self.path = kind.path()
        self.values = {sample: ids_of(sample, rows, **MODEL) for sample, rows in LENGTHS.items()}
        with kind.writer(self.path) as writer:
            handles = []
            for samples in (("a", "b"), ("c", "d")):
                handles += writer.append_many([(sample, self.values[sample]) for sample in samples])
        self.handles = dict(zip(LENGTHS, handles, strict=True))
        with kind.open(self.path) as trace:
            self.segments = list(trace.segments)

    def shard(self, number: int = 0) -> str:
        return f"segments/{self.segments[number]}/c/0/0/0"

    def document(self, number: int = 0) -> str:
        return f"segments/{self.segments[number]}/zarr.json"

    def change(self, name: str, how: Callable[[bytes], bytes]) -> None:
        self.kind.write(self.path, name, how(self.kind.read(self.path, name)))

    def check(self, sample: str, experts: torch.Tensor) -> None:
        np.testing.assert_array_equal(experts.numpy(), self.values[sample])


@pytest.fixture
def written(kind: StoreKind) -> Written:
    return Written(kind)


def test_round_trip(written: Written) -> None:
    with written.kind.open(written.path) as trace:
        assert list(trace) == list(LENGTHS)
        for sample in LENGTHS:
            written.check(sample, trace[sample])
            written.check(sample, written.handles[sample])
        both = torch.cat([trace["b"], trace["d"]])[10:36, 1:4]
        np.testing.assert_array_equal(both, np.concatenate([written.values["b"], written.values["d"]])[10:36, 1:4])
        assert trace.stats.chunks_decoded > 0
    assert written.kind.names(written.path) == sorted(
        ["zarr.json", "segments/zarr.json", *map(written.document, range(2)), *map(written.shard, range(2))]
    )


@pytest.mark.parametrize("codec", ["compact", "none"])
def test_wide_ids(kind: StoreKind, codec: str) -> None:
    ids = ids_of("w", 100, 3, 4, 512)
    with kind.writer(kind.path(), num_layers=3, top_k=4, num_experts=512, codec=codec) as writer:
        writer.append("w", ids)
    with kind.open(kind.path()) as trace:
        np.testing.assert_array_equal(trace["w"][30:70], ids[30:70])
        np.testing.assert_array_equal(trace["w"], ids)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_programs(written: Written, data: st.DataObject) -> None:
    """Random programs of tensor operations give what they give on eager tensors."""
    pool = [Pair(written.handles[sample], torch.from_numpy(ids)) for sample, ids in written.values.items()]
    pair = data.draw(st.sampled_from(pool))
    for _ in range(data.draw(st.integers(1, 6))):
        _, operation = _operation(data.draw, pair.eager, pool)
        pair = operation(pair)
        if isinstance(pair.lazy, LazyRoutedExperts):
            pool.append(pair)
    assert torch.equal(pair.lazy, pair.eager)


def test_revisions(kind: StoreKind) -> None:
    path = kind.path()
    first, more = ids_of("first", 20, **MODEL), ids_of("more", 9, **MODEL)
    with kind.writer(path) as writer, kind.writer(path) as other:
        one = writer.append("a", first, weight_version=1)
        two = other.append("a", more, start=15, weight_version=2)
        three = writer.truncate("a", 18)
        revised = np.concatenate([first[:15], more])
        for handle, ids in ((one, first), (two, revised), (three, revised[:18])):
            np.testing.assert_array_equal(handle, ids)
        with pytest.raises(errors.SampleGapError):
            writer.append("a", more, start=50)
    with kind.open(path) as trace:
        np.testing.assert_array_equal(trace["a"], revised[:18])
        assert [(each.start, each.stop, each.version) for each in trace.weight_versions("a")] == [
            (0, 15, 1),
            (15, 18, 2),
        ]


def test_refresh_wait_follow(kind: StoreKind) -> None:
    path = kind.path()
    values = {name: ids_of(name, 10, **MODEL) for name in "pqrs"}
    with kind.writer(path) as writer:
        trace = kind.open(path)
        assert trace.refresh() == []
        writer.append("p", values["p"])
        assert trace.refresh() == ["p"]
        with pytest.raises(errors.WaitTimeoutError) as caught:
            trace.wait(["p", "z"], timeout=0.05)
        assert vars(caught.value)["missing"] == ["z"]

        def write() -> None:
            for name in "qrs":
                time.sleep(0.05)
                writer.append(name, values[name])

        thread = threading.Thread(target=write)
        thread.start()
        (waited,) = trace.wait("q", timeout=30)
        np.testing.assert_array_equal(waited, values["q"])
        with trace.follow(existing=True, timeout=30) as follower:
            for name in "pqrs":
                sample, experts = next(follower)
                assert sample == name
                np.testing.assert_array_equal(experts, values[name])
        thread.join()
    trace.close()


def test_writers_in_several_processes(kind: StoreKind) -> None:
    """They create the trace at once, and each writes."""
    path = kind.path()

    def write(number: int) -> None:
        with kind.writer(path) as writer:
            for turn in range(3):
                writer.append(f"{number}/{turn}", ids_of(f"{number}/{turn}", 12, **MODEL))

    kind.in_processes(*(partial(write, number) for number in range(3)))
    with kind.open(path) as trace:
        assert sorted(trace) == [f"{number}/{turn}" for number in range(3) for turn in range(3)]
        for sample, experts in trace.items():
            np.testing.assert_array_equal(experts, ids_of(sample, 12, **MODEL))
    assert store_for(path).unfinished(path) == []


def test_another_configuration(written: Written) -> None:
    with pytest.raises(errors.ConfigurationMismatchError):
        written.kind.writer(written.path, num_layers=6)


def test_nothing_there(kind: StoreKind) -> None:
    with pytest.raises(errors.TraceNotFoundError):
        kind.open(kind.path("none.trace"))


def test_something_else_there(kind: StoreKind) -> None:
    kind.write(kind.path("else.trace"), "notes.txt", b"no trace")
    with pytest.raises(errors.NotATraceError):
        kind.open(kind.path("else.trace"))
    with pytest.raises(errors.NotATraceError):
        kind.writer(kind.path("else.trace"))
    kind.write(kind.path("array.trace"), "zarr.json", b'{"zarr_format": 3, "node_type": "array"}')
    with pytest.raises((errors.NotATraceError, errors.MetadataDamagedError)):
        kind.open(kind.path("array.trace"))


def _flip(at: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[at] ^= 0x10
        return bytes(changed)

    return change


_SHARD_DAMAGE: dict[str, tuple[Callable[[Written], object], type[errors.TraceError], str]] = {
    "flipped chunk": (lambda w: w.change(w.shard(), _flip(100)), errors.ChunkDamagedError, "chunk-damaged"),
    "flipped index": (lambda w: w.change(w.shard(), _flip(-10)), errors.ShardDamagedError, "shard-index"),
    "flipped header": (lambda w: w.change(w.shard(), _flip(30)), errors.ShardDamagedError, "shard-damaged"),
    "cut": (lambda w: w.change(w.shard(), lambda data: data[:-1]), errors.ShardDamagedError, "shard-damaged"),
    "cut to little": (lambda w: w.change(w.shard(), lambda data: data[:30]), errors.ShardDamagedError, "shard-damaged"),
    "empty": (lambda w: w.change(w.shard(), lambda _: b""), errors.ShardDamagedError, "shard-damaged"),
    "grown": (lambda w: w.change(w.shard(), lambda data: data + b"x"), errors.ShardDamagedError, "shard-damaged"),
    "gone": (lambda w: w.kind.remove(w.path, w.shard()), errors.SegmentMissingError, "shard-missing"),
    "another's": (
        lambda w: w.change(w.shard(), lambda data: w.kind.read(w.path, w.shard(1)).ljust(len(data), b"\0")),
        errors.ShardDamagedError,
        "shard-damaged",
    ),
}


@pytest.mark.parametrize("damage", list(_SHARD_DAMAGE))
def test_damaged_shard(written: Written, damage: str) -> None:
    act, expected, finding = _SHARD_DAMAGE[damage]
    act(written)
    with written.kind.open(written.path) as trace:
        with pytest.raises(errors.DamagedTraceError) as caught:
            trace["a"].numpy()
        assert type(caught.value) is expected
        assert caught.value.segment == written.segments[0]
        assert (caught.value.path or "").startswith(written.path)
        again = pickle.loads(pickle.dumps(caught.value))
        assert vars(again) == vars(caught.value)
        written.check("d", trace["d"])
    found = list(verify_trace(written.path))
    assert finding in {each.kind for each in found}
    assert {rows.sample for each in found for rows in each.samples} <= {"a", "b"}


def test_damaged_document(written: Written) -> None:
    written.change(written.document(), _flip(200))
    with pytest.raises(errors.MetadataDamagedError) as caught:
        written.kind.open(written.path)
    assert (caught.value.path or "").startswith(written.path)
    tracefile.clear_cache()
    assert "segment-metadata" in {each.kind for each in verify_trace(written.path)}


def test_document_gone(written: Written) -> None:
    """What handles have said before is an error in whoever opens the segment anew."""
    written.kind.remove(written.path, written.document())

    def read() -> Any:
        with pytest.raises(errors.SegmentMissingError) as caught:
            written.handles["a"].numpy()
        return caught.value.segment

    assert written.kind.in_processes(read) == [written.segments[0]]


def test_damaged_root(written: Written) -> None:
    written.change("zarr.json", _flip(-40))
    with pytest.raises((errors.MetadataDamagedError, errors.NotATraceError)):
        written.kind.open(written.path)
    written.kind.remove(written.path, "zarr.json")
    with pytest.raises(errors.NotATraceError):
        written.kind.open(written.path)
    assert [each.kind for each in verify_trace(written.path)] == ["trace-metadata"]


def test_handles_in_other_processes(written: Written) -> None:
    """In a forked one, and in a fresh one that has nothing but the pickle."""

    def read() -> Array:
        found: Array = written.handles["b"][3:30].numpy()
        return found

    (found,) = written.kind.in_processes(read)
    np.testing.assert_array_equal(found, written.values["b"][3:30])
    written.check("b", written.handles["b"])
    code = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])).tolist())"
    output = run_python(written.kind.prelude + code, pickle.dumps(written.handles["b"][3:30]).hex()).stdout
    assert json.loads(output) == written.values["b"][3:30].tolist()


def test_deleted_segment(written: Written) -> None:
    store = store_for(written.path)
    assert not store.is_gone(written.path, written.segments[0])
    store.delete(written.path, written.segments[0])
    store.delete(written.path, written.segments[0])
    assert store.is_gone(written.path, written.segments[0])
    assert list_segments(written.path) == [written.segments[1]]
    with written.kind.open(written.path) as trace:
        assert list(trace) == ["c", "d"]
        written.check("d", trace["d"])
    assert [name for name in written.kind.names(written.path) if written.segments[0] in name] == []
    with pytest.raises(errors.SegmentMissingError):
        written.handles["a"].numpy()
    assert list(verify_trace(written.path)) == []


def test_what_is_not_published_is_not_seen(written: Written) -> None:
    store = store_for(written.path)
    build = store.begin(written.path, "0000000000000001-0123456789ab")
    with written.kind.open(written.path) as trace:
        assert list(trace.segments) == written.segments
    store.discard(build)
    store.discard(build)
    store.leave(written.path)
    assert store.unfinished(written.path) == []


def test_inspect_verify_load(written: Written) -> None:
    def run(*arguments: str) -> Any:
        result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    facts = run("inspect", written.path)
    assert (facts["path"], facts["segments"], facts["rows"]) == (written.path, 2, sum(LENGTHS.values()))
    shards = sum(len(written.kind.read(written.path, written.shard(number))) for number in range(2))
    assert facts["bytes"]["stored"] == shards
    checked = run("verify", written.path)
    assert checked["sound"]
    assert checked["checked"]["samples"] == 4
    with written.kind.open(written.path) as trace:
        survey = take_survey(written.path, trace._header)
    loads = expert_load(survey, [revision.entry for revision in survey.samples().values()])
    every = np.concatenate(list(written.values.values()))
    expected = np.stack([np.bincount(every[:, layer].ravel(), minlength=16) for layer in range(5)])
    np.testing.assert_array_equal(loads.counts, expected)
