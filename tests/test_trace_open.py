"""A trace opened for reading: what it lists, when it sees what is new, and which files that touches."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
from support import ids_of, random_routing, run_python

import tracefile
from tracefile import documents
from tracefile.format import CODECS, BloscSettings, ChunkGeometry, new_segment_id, shard_header
from tracefile.local_store import LocalStore
from tracefile.metadata import SampleEntry, SegmentHeader, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Array = np.ndarray[Any, Any]

SMALL = {"num_layers": 3, "top_k": 2, "num_experts": 64}

#: Runs each piece of code, in a fresh state, and prints the events below the first argument that it caused.
WATCH = """
import json, os, pickle, sys
import numpy, torch, tracefile
torch.set_num_threads(1)
root, handle, *pieces = sys.argv[1:]
for piece in pieces:
    if os.fork():
        assert os.wait()[1] == 0
        continue
    events, watching, names = [], False, {"root": root, "handle": bytes.fromhex(handle)}
    def hook(event, details):
        if watching and event in ("open", "os.listdir", "os.scandir", "os.walk", "glob.glob"):
            if str(details[0]).startswith(root):
                events.append([event, os.path.relpath(details[0], root)])
    sys.addaudithook(hook)
    watching = True
    exec(piece, globals(), names)
    watching = False
    print(json.dumps([names["result"], events]), flush=True)
    os._exit(0)
"""


def _watched(path: str, *pieces: str, handle: bytes = b"") -> Iterator[tuple[Any, list[tuple[str, str]]]]:
    """What each piece of code leaves in ``result``, and which files and directories of the trace it touched.

    Each starts in a process in which nothing of the trace is open; ``handle`` is there, pickled.
    """
    for line in run_python(WATCH, path, handle.hex(), *pieces).stdout.splitlines():
        result, events = json.loads(line)
        yield result, [(event, name) for event, name in events]


def _ids(sample: str, rows: int = 20) -> Array:
    return ids_of(sample, rows, **SMALL)


def _writer(path: str) -> tracefile.TraceWriter:
    return tracefile.TraceWriter(path, **SMALL, rows_per_chunk=16)


@pytest.fixture
def written(path: str) -> str:
    with _writer(path) as writer:
        writer.append("b", _ids("b"))
        writer.append_many([("a", _ids("a")), ("", _ids("", 1)), ("c/1", _ids("c/1", 0))])
    return path


# A mapping


def test_a_mapping_of_ids_to_lazy_tensors(written: str) -> None:
    trace = tracefile.open(written)
    assert isinstance(trace, Mapping)
    assert list(trace) == list(trace.keys()) == ["b", "a", "", "c/1"]
    assert len(trace) == 4
    assert bool(trace)
    assert "a" in trace
    assert "" in trace
    assert "z" not in trace
    assert 7 not in trace
    assert None not in trace
    assert trace.get("z") is None
    assert trace.get("z", 7) == 7
    assert {sample: tuple(experts.shape) for sample, experts in trace.items()} == {
        "b": (20, 3, 2),
        "a": (20, 3, 2),
        "": (1, 3, 2),
        "c/1": (0, 3, 2),
    }
    assert all(isinstance(experts, tracefile.LazyRoutedExperts) for experts in trace.values())
    assert trace["a"].dtype == torch.int32
    for sample in trace:
        np.testing.assert_array_equal(trace[sample].numpy(), _ids(sample, len(trace[sample])))
    assert trace == trace
    assert trace != tracefile.open(written)
    assert len({trace, tracefile.open(written)}) == 2
    assert repr(trace) == f"<Trace {written}: 4 samples in 2 segments, 3 layers x top-2 of 64 experts>"
    with trace:
        pass
    assert repr(trace).endswith(", closed>")


def test_an_empty_trace(path: str) -> None:
    _writer(path).close()
    trace = tracefile.open(path)
    assert (len(trace), list(trace), bool(trace), trace.refresh()) == (0, [], False, [])


@pytest.mark.parametrize("missing", ["z", "A", "a ", 7, None, ("a",)])
def test_an_unknown_id(written: str, missing: Any) -> None:
    trace = tracefile.open(written)
    with pytest.raises(tracefile.SampleNotFoundError, match="if it was committed since, call refresh") as caught:
        trace[missing]
    assert (caught.value.path, caught.value.sample) == (written, missing)
    assert isinstance(caught.value, KeyError)
    assert repr(missing) in str(caught.value)
    assert written in str(caught.value)


@pytest.mark.parametrize("as_path", [str, os.fspath, lambda p: p + "/", lambda p: os.path.relpath(p)])
def test_ways_to_name_a_path(written: str, as_path: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tracefile.open(as_path(written))
    assert trace.path == written
    handle = pickle.dumps(trace["a"])
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(pickle.loads(handle).numpy(), _ids("a"))


def test_paths_that_are_no_trace(tmp_path: Path) -> None:
    with pytest.raises(tracefile.TraceNotFoundError, match="it appears when its first writer opens it") as caught:
        tracefile.open(tmp_path / "none.trace")
    assert caught.value.path == str(tmp_path / "none.trace")
    assert isinstance(caught.value, FileNotFoundError)
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "directory").mkdir()
    for name in ("file", "directory"):
        with pytest.raises(tracefile.NotATraceError, match=name):
            tracefile.open(tmp_path / name)
    with pytest.raises(tracefile.TraceNotFoundError):
        tracefile.open(tmp_path / "file" / "inside.trace")


@pytest.mark.parametrize("options", [{"source": "ftp"}, {"fill": "zero"}, {"fill": None}])
def test_options(written: str, options: dict[str, Any]) -> None:
    with pytest.raises(tracefile.OptionError):
        tracefile.open(written, **options)


def test_a_fill_for_all_of_its_tensors(path: str) -> None:
    ids = _ids("a")
    ids[3:5] = -1
    with _writer(path) as writer:
        writer.append("a", ids)
    np.testing.assert_array_equal(tracefile.open(path, fill="minus_one")["a"].numpy(), ids)
    zeros = tracefile.open(path, fill="zeros")["a"].numpy()
    assert not zeros[3:5].any()
    np.testing.assert_array_equal(np.delete(zeros, [3, 4], 0), np.delete(ids, [3, 4], 0))
    with pytest.raises(tracefile.MissingRowsError, match=r"\[3, 5\)") as caught:
        tracefile.open(path)["a"].numpy()
    assert caught.value.rows == [(3, 5)]  # type: ignore[attr-defined]


# What is new


def test_refresh_sees_what_was_committed_since(written: str) -> None:
    trace = tracefile.open(written)
    assert trace.refresh() == []
    with _writer(written) as writer:
        writer.append("d", _ids("d"))
        assert "d" not in trace
        assert trace.refresh() == ["d"]
        assert trace.refresh() == []
        writer.append_many([("f", _ids("f")), ("e", _ids("e"))])
        writer.append("g", _ids("g"))
        assert trace.refresh() == ["f", "e", "g"]
    assert list(trace) == ["b", "a", "", "c/1", "d", "f", "e", "g"]
    for sample in "defg":
        np.testing.assert_array_equal(trace[sample].numpy(), _ids(sample))


def test_the_newest_revision_wins_and_handles_keep_theirs(written: str) -> None:
    trace = tracefile.open(written)
    old = trace["a"]
    pickled = pickle.dumps(old)
    with _writer(written) as writer:
        writer.append_many([("a", _ids("second", 7)), ("new", _ids("new"))])
        np.testing.assert_array_equal(trace["a"].numpy(), _ids("a"))  # as of the last refresh
        assert trace.refresh() == ["a", "new"]
        np.testing.assert_array_equal(trace["a"].numpy(), _ids("second", 7))
        writer.append("a", _ids("third", 33))
        writer.append("a", _ids("fourth", 2))
    assert trace.refresh() == ["a"]
    assert list(trace) == ["b", "a", "", "c/1", "new"]
    for opened in (trace, tracefile.open(written)):
        np.testing.assert_array_equal(opened["a"].numpy(), _ids("fourth", 2))
    np.testing.assert_array_equal(old.numpy(), _ids("a"))
    np.testing.assert_array_equal(pickle.loads(pickled).numpy(), _ids("a"))


def _publish(path: str, segment: str, samples: dict[str, Array]) -> None:
    """Write a segment under an id of one's own choice, as a host whose clock is off would."""
    uuid = tracefile.open(path).uuid
    with _writer(path) as writer:
        before = set(os.listdir(os.path.join(path, "segments")))
        writer.append_many(samples.items())
        (made,) = set(os.listdir(os.path.join(path, "segments"))) - before
    directory = os.path.join(path, "segments", made)
    header = tracefile.open(path).segments[made]
    shard = os.path.join(directory, "c", "0", "0", "0")
    with open(shard, "r+b") as file:
        file.write(shard_header(segment))
    samples_there = {
        sample: SampleEntry(sample, tuple(Span(segment, s.start, s.stop) for s in entry.spans), entry.missing)
        for sample, entry in header.samples.items()
    }
    renamed = dataclasses.replace(header, id=segment, samples=samples_there)
    assert renamed.trace_uuid == uuid
    with open(os.path.join(directory, "zarr.json"), "wb") as file:
        file.write(documents.encode(documents.segment_document(renamed)))
    os.rename(directory, os.path.join(path, "segments", segment))


def test_a_segment_that_arrives_late_with_an_older_id(written: str) -> None:
    """Its writer's clock is behind: it counts as older, and what it revises is not new."""
    trace = tracefile.open(written)
    _publish(written, "0" * 16 + "-late", {"a": _ids("older", 5), "only here": _ids("only here")})
    assert trace.refresh() == ["only here"]
    for opened in (trace, tracefile.open(written)):
        assert sorted(opened) == sorted(["b", "a", "", "c/1", "only here"])
        assert list(opened.segments) == sorted(opened.segments)
        np.testing.assert_array_equal(opened["a"].numpy(), _ids("a"))
        np.testing.assert_array_equal(opened["only here"].numpy(), _ids("only here"))
    assert list(trace) == list(tracefile.open(written))


def test_a_refresh_that_fails_forgets_nothing(written: str) -> None:
    """One segment is damaged when it is first seen; once it is restored, all that is new is there."""
    trace = tracefile.open(written)
    with _writer(written) as writer:
        for sample in ("d", "e", "f"):
            writer.append(sample, _ids(sample))
    names = [name for name in sorted(os.listdir(os.path.join(written, "segments"))) if name != "zarr.json"]
    document = os.path.join(written, "segments", names[-2], "zarr.json")  # of "e"
    with open(document, "rb") as file:
        sound = file.read()
    with open(document, "wb") as file:
        file.write(sound[:-5])
    for _ in range(2):
        with pytest.raises(tracefile.MetadataDamagedError):
            trace.refresh()
    assert list(trace) == ["b", "a", "", "c/1"]
    with open(document, "wb") as file:
        file.write(sound)
    assert trace.refresh() == ["d", "e", "f"]
    for sample in "def":
        np.testing.assert_array_equal(trace[sample].numpy(), _ids(sample))


def test_what_was_deleted_stays_listed_until_it_is_opened_anew(written: str) -> None:
    trace = tracefile.open(written)
    shutil.rmtree(os.path.join(written, "segments", next(iter(trace.segments))))
    assert trace.refresh() == []
    assert "b" in trace
    with pytest.raises(tracefile.SegmentMissingError):
        trace["b"].numpy()
    assert list(tracefile.open(written)) == ["a", "", "c/1"]


def test_strange_entries_among_the_segments(written: str) -> None:
    """What an editor, a file system or a backup drops there is not taken for a segment."""
    segments = os.path.join(written, "segments")
    for name in (".nfs000000001", ".DS_Store", "zarr.json~", "Upper", "with space", "_x", "a" * 48):
        with open(os.path.join(segments, name), "w") as file:
            file.write("")
    os.mkdir(os.path.join(segments, ".snapshot"))
    trace = tracefile.open(written)
    assert list(trace) == ["b", "a", "", "c/1"]
    assert trace.refresh() == []


# Size


def test_many_segments(path: str) -> None:
    with _writer(path) as writer:
        for number in range(1536):
            writer.append(f"s{number}", _ids(f"s{number}", 2))
    started = time.monotonic()
    trace = tracefile.open(path)
    assert time.monotonic() - started < 30  # a lax bound: it takes tenths of a second
    assert list(trace) == [f"s{number}" for number in range(1536)]
    assert len(trace.segments) == 1536
    with _writer(path) as writer:
        writer.append("last", _ids("last"))
    with mock.patch.object(LocalStore, "read", autospec=True, side_effect=LocalStore.read) as read:
        assert trace.refresh() == ["last"]
    assert read.call_count == 1  # of the new segment's document, and no other
    everything = torch.cat([trace[f"s{number}"] for number in range(1536)])
    expected = np.concatenate([_ids(f"s{number}", 2) for number in range(1536)])
    np.testing.assert_array_equal(everything[1000:2000, 1].numpy(), expected[1000:2000, 1])
    assert trace.stats.reads == 1


def test_one_segment_of_many_samples(path: str) -> None:
    samples = {f"prompt-{i // 16}/{i % 16}": _ids(str(i), i % 5) for i in range(10_000)}
    with tracefile.TraceWriter(path, **SMALL, rows_per_chunk=8) as writer:
        returned = writer.append_many(samples.items())
    trace = tracefile.open(path)
    assert len(trace.segments) == 1
    assert list(trace) == list(samples)
    assert [tuple(experts.shape) for experts in returned] == [ids.shape for ids in samples.values()]
    rng = np.random.default_rng(1)
    for number in rng.choice(10_000, 100, replace=False):
        sample = f"prompt-{number // 16}/{number % 16}"
        np.testing.assert_array_equal(trace[sample].numpy(), samples[sample])
    everything = torch.cat(list(trace.values()))
    np.testing.assert_array_equal(everything.numpy(), np.concatenate(list(samples.values())))
    assert len(pickle.dumps(trace["prompt-500/3"])) < 1000  # whatever the number of samples beside it


# Which files are touched


def _files(path: str, segment: str) -> tuple[str, str]:
    """A segment's document and shard file, relative to the trace."""
    directory = os.path.join("segments", segment)
    return os.path.join(directory, "zarr.json"), os.path.join(directory, "c", "0", "0", "0")


def test_opening_reads_documents_and_no_shard_file(written: str) -> None:
    segments = list(tracefile.open(written).segments)
    ((listed, events),) = _watched(
        written,
        """
trace = tracefile.open(root)
lengths = [len(experts) for experts in trace.values()]
result = [list(trace), lengths, repr(trace["a"][3:5]), trace.stats.bytes_read]
""",
    )
    assert listed[:2] == [["b", "a", "", "c/1"], [20, 20, 1, 0]]
    assert listed[2].endswith("nothing read>")
    assert listed[3] == 0
    documents = [_files(written, segment)[0] for segment in segments]
    assert sorted(name for event, name in events if event == "open") == sorted(["zarr.json", *documents])
    assert [name for event, name in events if event != "open"] == ["segments"]  # one listing

    for segment in segments:  # nor does it ask after them
        shutil.rmtree(os.path.join(written, "segments", segment, "c"))
    trace = tracefile.open(written)
    assert list(trace) == ["b", "a", "", "c/1"]
    assert trace["b"][2:7, 1].shape == (5, 2)
    with pytest.raises(tracefile.SegmentMissingError):
        trace["b"][2:7, 1].numpy()


@pytest.mark.parametrize("source", ["mmap", "pread"])
def test_a_handle_opens_its_segments_and_lists_nothing(path: str, source: str) -> None:
    with _writer(path) as writer:
        for number in range(40):
            writer.append(f"s{number}", _ids(f"s{number}"))
    trace = tracefile.open(path, source=source)
    local = torch.cat([trace["s7"], trace["s30"][5:], torch.zeros(4, 3, 2, dtype=torch.int32)])[10:40, 1:]
    segments = [ref.id for ref in local.selection.rows.segments()]
    assert len(segments) == 2
    load = "experts = pickle.loads(handle)\n"
    moved, whole, one_segment, no_segment = _watched(
        path,
        load + "result = list(experts[3:].shape), repr(experts), pickle.dumps(experts[3:]) and 1",
        load + "result = experts.tolist(), experts[0].tolist()",
        load + "result = experts[-8:-4].tolist()",
        load + "result = experts[-4:].tolist(), experts[:0].tolist()",
        handle=pickle.dumps(local),
    )
    assert moved[0][0] == [26, 2, 2]
    assert moved[1] == []  # a handle that is only carried and sliced touches no file

    expected = np.concatenate([_ids("s7"), _ids("s30")[5:], np.zeros((4, 3, 2), int)])[10:40, 1:]
    assert whole[0] == [expected.tolist(), expected[0].tolist()]
    # Each file of its segments once, no listing, and the root document not at all.
    assert whole[1] == [("open", name) for segment in segments for name in _files(path, segment)]

    assert one_segment == (expected[-8:-4].tolist(), [("open", name) for name in _files(path, segments[1])])
    assert no_segment == ([expected[-4:].tolist(), []], [])


def test_a_handle_reads_while_all_else_is_gone(path: str) -> None:
    with _writer(path) as writer:
        handle = pickle.dumps(writer.append("a", _ids("a")))
        writer.append("b", _ids("b"))
    trace = tracefile.open(path)
    mine = pickle.loads(handle).selection.rows.segments()[0].id
    for segment in trace.segments:
        if segment != mine:
            shutil.rmtree(os.path.join(path, "segments", segment))
    os.unlink(os.path.join(path, "segments", "zarr.json"))
    os.unlink(os.path.join(path, "zarr.json"))
    np.testing.assert_array_equal(pickle.loads(handle).numpy(), _ids("a"))


# Samples that share rows: a later release's writer will write these documents, this one reads them


def _refer(path: str, samples: dict[str, SampleEntry], own: Array | None = None, owner: str = "") -> str:
    """A segment whose samples name rows of other segments: a document alone, or rows of its own besides."""
    trace = tracefile.open(path)
    if own is None:
        segment = new_segment_id()
        header = SegmentHeader(
            segment, trace.uuid, trace.config, 0, ChunkGeometry(3, 16), "fast", 0, samples, {"by": "hand"}
        )
        os.mkdir(os.path.join(path, "segments", segment))
    else:
        with _writer(path) as writer:
            writer.append(owner, own)
        (segment,) = set(tracefile.open(path).segments) - set(trace.segments)
        old = tracefile.open(path).segments[segment]
        named = {
            sample: dataclasses.replace(
                entry,
                spans=tuple(dataclasses.replace(s, segment=segment) if s.segment == "self" else s for s in entry.spans),
            )
            for sample, entry in samples.items()
        }
        header = dataclasses.replace(old, samples=named)
    with open(os.path.join(path, "segments", segment, "zarr.json"), "wb") as file:
        file.write(documents.encode(documents.segment_document(header)))
    return segment


@pytest.mark.parametrize("source", ["mmap", "pread"])
def test_samples_of_rows_of_other_segments(written: str, source: str) -> None:
    b, rest = tracefile.open(written).segments
    a_start = tracefile.open(written).entry("a").spans[0].start
    samples = {
        "prefix": SampleEntry("prefix", (Span(b, 0, 12),)),
        "both": SampleEntry("both", (Span(b, 3, 20), Span(rest, a_start + 5, a_start + 9))),
        "twice": SampleEntry("twice", (Span(b, 5, 8), Span(b, 5, 8), Span(b, 0, 1))),
        "none": SampleEntry("none", ()),
        "holes": SampleEntry("holes", (Span(b, 0, 10), Span(rest, a_start, a_start + 2)), ((2, 4), (9, 11))),
    }
    _refer(written, samples)
    expected = {
        "prefix": _ids("b")[:12],
        "both": np.concatenate([_ids("b")[3:], _ids("a")[5:9]]),
        "twice": np.concatenate([_ids("b")[5:8], _ids("b")[5:8], _ids("b")[:1]]),
        "none": _ids("b")[:0],
    }
    trace = tracefile.open(written, source=source)
    for sample, ids in expected.items():
        np.testing.assert_array_equal(trace[sample].numpy(), ids)
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(trace[sample])).numpy(), ids)
        np.testing.assert_array_equal(trace[sample][1:-1, 2].numpy(), ids[1:-1, 2])
    holes = np.concatenate([_ids("b")[:10], _ids("a")[:2]])
    holes[[2, 3, 9, 10]] = -1
    np.testing.assert_array_equal(trace["holes"].filled("minus_one").numpy(), holes)
    assert trace["holes"].valid.tolist() == (holes[:, 0, 0] >= 0).tolist()


def test_a_turn_that_keeps_a_prefix_and_adds_rows(written: str) -> None:
    """Rows [0, 15) of the first turn, then rows of its own: and the first turn's revision is replaced."""
    b = tracefile.open(written).entry("b").spans[0].segment
    more = _ids("more", 30)
    spans = (Span(b, 0, 15), Span("self", 0, 30))
    before = tracefile.open(written)
    segment = _refer(written, {"b": SampleEntry("b", spans)}, more, "b")
    assert before.refresh() == ["b"]
    for trace in (before, tracefile.open(written)):
        expected = np.concatenate([_ids("b")[:15], more])
        np.testing.assert_array_equal(trace["b"].numpy(), expected)
        np.testing.assert_array_equal(trace["b"][10:20, 1].numpy(), expected[10:20, 1])
        assert [ref.id for ref in trace["b"].selection.rows.segments()] == [b, segment]


def test_a_referenced_segment_that_is_gone(written: str) -> None:
    b = tracefile.open(written).entry("b").spans[0].segment
    _refer(written, {"prefix": SampleEntry("prefix", (Span(b, 0, 12),)), "none": SampleEntry("none", ())})
    shutil.rmtree(os.path.join(written, "segments", b))
    trace = tracefile.open(written)
    assert trace["none"].numpy().shape == (0, 3, 2)
    with pytest.raises(tracefile.SegmentMissingError) as caught:
        trace["prefix"].numpy()
    assert caught.value.segment == b


def test_a_preset_may_be_tuned_in_a_later_release(path: str, rng: np.random.Generator) -> None:
    """The Blosc settings of a preset are not part of the format: chunks say themselves how they decode."""
    ids = random_routing(rng, 3000, 6, 2, 16)
    other = mock.patch.dict(CODECS, {"fast": BloscSettings("zstd", 3, "noshuffle")})
    with other, tracefile.TraceWriter(path, num_layers=6, top_k=2, num_experts=16) as writer:
        writer.append("a", ids)
    np.testing.assert_array_equal(tracefile.open(path)["a"].numpy(), ids)
