"""A trace behind a server that speaks S3: round trips, bytes fetched, a server that fails, and the node's cache."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.server
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support import fork, ids_of, in_fork, join, random_routing, run_python, tree
from typer.testing import CliRunner

import tracefile
from tracefile import errors, node_cache, object_store
from tracefile.cli import app
from tracefile.findings import Tally
from tracefile.object_client import client
from tracefile.runs import Rows, SegmentRef, StoredRun
from tracefile.segments import segment_pool
from tracefile.store import store_for
from tracefile.verify import verify_trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from object_server import Asked, Fault, S3Bucket

Array = np.ndarray[Any, Any]
SMALL = {"num_layers": 5, "top_k": 2, "num_experts": 16}
TOKENS = 32768


@pytest.fixture
def url(bucket: S3Bucket) -> str:
    return f"{bucket.url}/run/step_1.trace"


def _give_up(seconds: float) -> None:
    """After three retries, or some seconds."""
    tracefile.configure(
        object_store_options={
            "retry_config": {"max_retries": 3, "retry_timeout": seconds, "backoff": {"init_backoff": 0.01}},
            "client_options": {"read_timeout": 2},
        }
    )


@pytest.fixture
def impatient() -> None:
    _give_up(60)


@pytest.fixture
def long_sample(bucket: S3Bucket, url: str, rng: np.random.Generator) -> tuple[tracefile.LazyRoutedExperts, Array]:
    """One sample of 32k tokens of the smallest model's shape, 47 layers x top-4 of 64."""
    ids = np.broadcast_to(random_routing(rng, 4096, 47, 4, 64, np.uint8), (8, 4096, 47, 4)).reshape(TOKENS, 47, 4)
    with tracefile.TraceWriter(url, num_layers=47, top_k=4, num_experts=64) as writer:
        experts = writer.append("long", ids)
    return experts, ids


def _forget() -> None:
    """As a process that has read nothing yet."""
    for trace in list(segment_pool._stats):
        segment_pool.close(trace)
    tracefile.clear_cache()


def _needed(experts: tracefile.LazyRoutedExperts, read: Any) -> int:
    """The encoded bytes of the chunks that a read touches, once each."""
    before = tracefile.process_stats().bytes_read
    read(experts)
    return tracefile.process_stats().bytes_read - before


def _rows(*ranges: tuple[int, int]) -> Any:
    return lambda experts: torch.cat([experts[start:stop] for start, stop in ranges]).numpy()


def _zigzag(cp: int, rank: int) -> Sequence[tuple[int, int]]:
    size = TOKENS // (2 * cp)
    return (rank * size, (rank + 1) * size), ((2 * cp - 1 - rank) * size, (2 * cp - rank) * size)


def _tensor_rank(cp: int, rank: int, tp: int, tp_rank: int) -> Any:
    """What a rank of context and sequence parallelism consumes: a part of its zigzag halves."""
    mine = [position for start, stop in _zigzag(cp, rank) for position in range(start, stop)]
    size = len(mine) // tp
    part = mine[tp_rank * size : (tp_rank + 1) * size]
    return _rows((part[0], part[-1] + 1))


SHARDS = {
    "cp 2 x tp 4": _tensor_rank(2, 0, 4, 1),
    "cp 2, zigzag": _rows(*_zigzag(2, 1)),
    "cp 8, zigzag": _rows(*_zigzag(8, 3)),
    "one layer": lambda experts: experts[:, 20].numpy(),
    "a pipeline stage": lambda experts: experts[:, 12:24].numpy(),
    "a stage of one rank": lambda experts: experts[4096:8192, 24:36].numpy(),
    "a few rows": lambda experts: experts[5000:5003].numpy(),
    "all of it": lambda experts: experts.numpy(),
}


@pytest.mark.parametrize("shard", list(SHARDS))
def test_round_trips_and_bytes(
    bucket: S3Bucket,
    long_sample: tuple[tracefile.LazyRoutedExperts, Array],
    shard: str,
) -> None:
    """From a handle and nothing else to values: the document, the index, the chunks."""
    read, (experts, ids) = SHARDS[shard], long_sample
    needed = _needed(experts, read)
    experts = pickle.loads(pickle.dumps(experts))
    _forget()
    with bucket.proxy.rounds() as asked:
        values = read(experts)
    # One after another they would take 36; a thread that is late may make it one or two more than 3.
    assert max(each.round for each in asked) <= 6
    sent = sum(each.sent for each in asked)
    assert needed <= sent <= 1.5 * needed
    # One layer's chunks do not lie side by side.
    assert len(asked) <= (3 + 32 if shard in ("one layer", "a pipeline stage") else 12)
    np.testing.assert_array_equal(values, read(torch.from_numpy(ids)))


def test_an_open_trace_needs_no_more(
    bucket: S3Bucket,
    url: str,
    long_sample: tuple[tracefile.LazyRoutedExperts, Array],
) -> None:
    _forget()
    with tracefile.open(url) as trace:
        with bucket.proxy.rounds() as asked:
            values = trace["long"][20_000:24_000].numpy()
        assert max(each.round for each in asked) <= 3
        np.testing.assert_array_equal(values, long_sample[1][20_000:24_000])
        with bucket.proxy.rounds() as asked:
            trace["long"][100:200].numpy()
        assert {each.round for each in asked} == {1}


def test_a_shard_with_latency(bucket: S3Bucket, long_sample: tuple[tracefile.LazyRoutedExperts, Array]) -> None:
    experts, ids = long_sample
    _forget()
    bucket.proxy.latency = 0.02
    with bucket.proxy.counted() as asked:
        np.testing.assert_array_equal(experts[8192:12288], ids[8192:12288])
    assert len(asked) <= 7


def test_many_segments_take_no_more_rounds(bucket: S3Bucket, url: str) -> None:
    """A microbatch whose samples lie in a segment each."""
    values = {f"s{number}": ids_of(f"s{number}", 40, **SMALL) for number in range(12)}
    with tracefile.TraceWriter(url, **SMALL, share_prefixes=False) as writer:
        handles = [writer.append(sample, ids) for sample, ids in values.items()]
    with bucket.proxy.rounds() as asked:
        found = torch.cat([experts[5:30] for experts in handles]).numpy()
    np.testing.assert_array_equal(found, np.concatenate([ids[5:30] for ids in values.values()]))
    assert {each.round for each in asked} == {1, 2, 3}
    assert len(asked) == 12 * (1 + 2 + 1)
    _forget()
    store_for(url).delete(url, tracefile.open(url).entry("s7").spans[0].segment)
    with pytest.raises(errors.SegmentMissingError):
        torch.cat([experts[5:30] for experts in handles]).numpy()


def test_many_documents_take_few_rounds(bucket: S3Bucket, url: str) -> None:
    with tracefile.TraceWriter(url, **SMALL) as writer:
        for number in range(30):
            writer.append(f"s{number}", np.zeros((2, 5, 2), int))
    with bucket.proxy.rounds() as asked:
        assert len(tracefile.open(url)) == 30
    assert max(each.round for each in asked) <= 3
    assert len(asked) == 32


def test_requests_are_merged() -> None:
    """Small gaps before large ones, within their share; never more than a request's size; in order only."""
    plan = object_store.plan_requests
    assert plan([]) == []
    dense = [(64 + 1000 * i, 1000) for i in range(10_000)]
    merged = plan(dense)
    assert [each.start for each in merged] == [64, 64 + 4_194_000, 64 + 2 * 4_194_000]
    assert sum(len(each.ranges) for each in merged) == len(dense)
    random = np.random.default_rng(3)
    for _ in range(200):
        gaps, sizes = random.integers(0, 3000, 50), random.integers(1, 2000, 50)
        starts = np.cumsum(gaps + np.concatenate([[0], sizes[:-1]]))
        ranges = list(zip(starts.tolist(), sizes.tolist(), strict=True))
        requests = plan(ranges)
        assert 10 * sum(each.stop - each.start for each in requests) <= 14 * sizes.sum()
        assert [position for each in requests for position in each.ranges] == list(range(50))
        for request in requests:
            for start, nbytes in ranges[request.ranges.start : request.ranges.stop]:
                assert request.start <= start
                assert start + nbytes <= request.stop
    assert len(plan([(5000, 10), (0, 10), (5, 10)])) == 3


@pytest.mark.parametrize("fault", ["reset", "503", "cut off", "too little"])
@pytest.mark.parametrize("times", [1, 2])
def test_what_passes_is_retried(bucket: S3Bucket, url: str, impatient: None, fault: Fault, times: int) -> None:
    ids = ids_of("a", 50, **SMALL)
    with tracefile.TraceWriter(url, **SMALL) as writer:
        experts = writer.append("a", ids)
    bucket.proxy.fail(fault, times, where=lambda method, key: method == "GET" and key.endswith("c/0/0/0"))
    np.testing.assert_array_equal(experts, ids)
    with tracefile.open(url) as trace:
        if fault != "too little":  # of a whole object, that cannot be told
            bucket.proxy.fail(fault, times, where=lambda method, key: method == "GET" and key.endswith("zarr.json"))
        trace.refresh()
        _forget()
        np.testing.assert_array_equal(trace["a"], ids)


@pytest.mark.parametrize("fault", ["reset", "503", "hang", "cut off", "too little"])
def test_what_stays_is_reported(bucket: S3Bucket, url: str, impatient: None, fault: Fault) -> None:
    ids = ids_of("a", 50, **SMALL)
    with tracefile.TraceWriter(url, **SMALL) as writer:
        experts = writer.append("a", ids)
    bucket.proxy.fail(fault, 1000, where=lambda method, key: method == "GET" and key.endswith("c/0/0/0"))
    if fault == "hang":
        _give_up(3)
    began = time.monotonic()
    with pytest.raises(errors.StoreError) as caught:
        experts.numpy()
    assert time.monotonic() - began < 30
    error = caught.value
    assert isinstance(error, OSError)
    assert error.path == f"{url}/segments/{error.segment}/c/0/0/0"
    assert vars(error)["attempts"] >= (1 if fault == "hang" else 3)
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)
    if fault == "503":  # it is no damage, and not taken for some
        result = CliRunner().invoke(app, ["verify", url])
        assert (result.exit_code, result.stdout) == (2, "")
    bucket.proxy.heal()
    np.testing.assert_array_equal(experts, ids)


def test_nobody_answers(url: str, impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for act in (lambda: tracefile.open(url), lambda: tracefile.TraceWriter(url, **SMALL)):
        with pytest.raises(errors.StoreError):
            act()


def test_refused_credentials(bucket: S3Bucket, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tracefile.TraceWriter(url, **SMALL).close()
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    tracefile.configure(object_store_options={})
    with pytest.raises(errors.StoreError, match="credentials") as caught:
        tracefile.open(url)
    assert caught.value.errno == errno.EACCES


def test_an_upload_that_fails(bucket: S3Bucket, url: str, impatient: None) -> None:
    """Nothing of the segment is left, and appending again works."""
    ids = ids_of("a", 50, **SMALL)
    with tracefile.TraceWriter(url, **SMALL) as writer:
        for name in ("c/0/0/0", "zarr.json"):
            bucket.proxy.fail("503", 1000, where=lambda method, key, name=name: method == "PUT" and key.endswith(name))
            with pytest.raises(errors.PublishError, match="nothing of"):
                writer.append("a", ids)
            bucket.proxy.heal()
            assert store_for(url).segments(url) == store_for(url).unfinished(url) == []
        writer.append("a", ids)
    np.testing.assert_array_equal(tracefile.open(url)["a"], ids)


def test_an_answer_that_is_lost(bucket: S3Bucket, url: str, impatient: None) -> None:
    """The server has the document, and the writer does not hear of it: it finds out."""
    with tracefile.TraceWriter(url, **SMALL) as writer:
        bucket.proxy.fail("cut off", 1, where=lambda method, key: method == "PUT")
        writer.append("a", ids_of("a", 5, **SMALL))
    assert list(tracefile.open(url)) == ["a"]


def test_a_killed_writer_leaves_nothing_visible(bucket: S3Bucket, url: str, tmp_path: Path) -> None:
    """Killed after its shard is uploaded, before its document is."""
    with tracefile.TraceWriter(url, **SMALL) as writer:
        writer.append("a", ids_of("a", 5, **SMALL))
        bucket.proxy.fail("hang", 1, where=lambda method, key: method == "PUT" and key.endswith("zarr.json"))

        def write() -> None:
            with tracefile.TraceWriter(url, **SMALL) as mine:
                mine.append("b", ids_of("b", 5, **SMALL))

        pid = fork(write)
        deadline = time.monotonic() + 30
        while not store_for(url).unfinished(url):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        assert join(pid) == [-signal.SIGKILL]
        (left,) = store_for(url).unfinished(url)
        assert list(tracefile.open(url)) == ["a"]
        facts = json.loads(CliRunner().invoke(app, ["inspect", url, "--json"]).stdout)
        assert facts["unfinished"] == [left]
        store_for(url).delete(url, left)
        assert store_for(url).unfinished(url) == []
        assert CliRunner().invoke(app, ["verify", url]).exit_code == 0


def test_large_shards_go_up_in_parts(bucket: S3Bucket, url: str, rng: np.random.Generator) -> None:
    ids = rng.integers(0, 64, (50_000, 47, 4), dtype=np.uint8)
    with (
        bucket.proxy.counted() as asked,
        tracefile.TraceWriter(url, num_layers=47, top_k=4, num_experts=64, codec="none") as writer,
    ):
        experts = writer.append("long", ids)
    assert sum("partNumber" in each.query for each in asked) == 2
    np.testing.assert_array_equal(experts[49_000:], ids[49_000:])


def test_a_forked_child_of_one_with_requests_under_way(bucket: S3Bucket, url: str) -> None:
    ids = ids_of("a", 50, **SMALL)
    with tracefile.TraceWriter(url, **SMALL) as writer:
        experts = writer.append("a", ids)
    bucket.proxy.latency = 0.2
    futures = [client.start(client.size(f"{url}/zarr.json")) for _ in range(5)]

    def read() -> Array:
        values: Array = experts[10:20].numpy()
        return values

    np.testing.assert_array_equal(in_fork(read), ids[10:20])
    np.testing.assert_array_equal(in_fork(lambda: in_fork(read)), ids[10:20])
    assert len({future.result(10) for future in futures}) == 1


def test_from_a_coroutine(url: str) -> None:
    """Reading blocks, as ever, but needs no event loop of its own in this thread."""

    async def rollout() -> Array:
        async with tracefile.TraceWriter(url, **SMALL) as writer:
            experts = await writer.append_async("a", ids_of("a", 5, **SMALL))
            values: Array = experts.numpy()
            return values

    np.testing.assert_array_equal(asyncio.run(rollout()), ids_of("a", 5, **SMALL))


def test_nothing_of_it_is_imported_by_default() -> None:
    code = "import sys, threading, tracefile; print('obstore' in sys.modules, threading.active_count())"
    assert run_python(code).stdout.split() == ["False", "1"]


def test_without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("obstore", "obstore.store", "obstore.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(client, "_obstore", None)
    monkeypatch.setattr(client, "_stores", {})
    with pytest.raises(errors.OptionError, match=r"tracefile\[object-store\]"):
        tracefile.open("s3://bucket-without/step_1.trace")


@pytest.mark.parametrize("path", ["s3://bucket", "s3:///key", "s3://bucket/", "s3://bucket/../x", "s3://"])
def test_paths_that_name_no_trace(path: str) -> None:
    with pytest.raises(errors.OptionError, match="names no trace"):
        tracefile.open(path)


@pytest.mark.parametrize(
    "options",
    [{"object_store_options": {"retries": 3}}, {"object_store_options": [1]}, {"node_cache_bytes": -1}],
)
def test_options_that_are_none(options: dict[str, Any]) -> None:
    with pytest.raises(errors.OptionError):
        tracefile.configure(**options)


def test_options_that_obstore_refuses(url: str) -> None:
    tracefile.configure(object_store_options={"client_options": {"no_such_option": 1}})
    with pytest.raises(errors.OptionError, match="obstore does not accept"):
        tracefile.open(url)


def test_options_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys.modules["tracefile.settings"], "_current", None)
    monkeypatch.setenv("TRACEFILE_OBJECT_STORE_OPTIONS", '{"retry_config": {"retry_timeout": 7}}')
    monkeypatch.setenv("TRACEFILE_NODE_CACHE", str(tmp_path))
    monkeypatch.setenv("TRACEFILE_NODE_CACHE_BYTES", "1000")
    now = tracefile.settings()
    assert now.object_store_options == {"retry_config": {"retry_timeout": 7}}
    assert (now.node_cache, now.node_cache_bytes) == (str(tmp_path), 1000)
    monkeypatch.setattr(sys.modules["tracefile.settings"], "_current", None)
    monkeypatch.setenv("TRACEFILE_OBJECT_STORE_OPTIONS", "{")
    with pytest.raises(errors.OptionError, match="TRACEFILE_OBJECT_STORE_OPTIONS"):
        tracefile.settings()


class _RangeHandler(http.server.SimpleHTTPRequestHandler):
    """A web server that knows ranges, as those that serve files do."""

    files: dict[str, bytes] = {}  # noqa: RUF012

    def do_GET(self) -> None:
        data = self.files.get(self.path)
        if data is None:
            self.send_error(404)
            return
        start, stop = 0, len(data)
        if "Range" in self.headers:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            start, stop = int(first), min(stop, int(last) + 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Last-Modified", self.date_time_string())
        self.end_headers()
        self.wfile.write(data[start:stop])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def web_server() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _RangeHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()
    _RangeHandler.files.clear()


def _elsewhere(experts: tracefile.LazyRoutedExperts, path: str) -> tracefile.LazyRoutedExperts:
    """The handle of the same rows in a copy of their trace."""
    rows = experts.selection.rows
    runs = [
        StoredRun(SegmentRef(run.segment.trace._replace(path=path), run.segment.id), run.start, run.stop)
        for run in rows.runs
        if isinstance(run, StoredRun)
    ]
    return tracefile.LazyRoutedExperts.from_rows(Rows.of(runs), experts.selection.config)


def test_a_web_server(web_server: str, path: str, impatient: None) -> None:
    """Handles are read from it; a trace cannot be opened where there is no listing, nor written."""
    with tracefile.TraceWriter(path, **SMALL) as writer:
        experts = writer.append("a", ids_of("a", 50, **SMALL))
    there = f"{web_server}/data/step_1.trace"
    _RangeHandler.files.update((f"/data/step_1.trace/{name}", data) for name, data in tree(path).items())
    handle = _elsewhere(experts, there)
    np.testing.assert_array_equal(handle, ids_of("a", 50, **SMALL))
    with pytest.raises(errors.StoreError, match="does not list"):
        tracefile.open(there)
    with pytest.raises(errors.TraceNotFoundError):
        tracefile.open(f"{web_server}/data/none.trace")
    with pytest.raises(errors.OptionError, match="for reading"):
        tracefile.TraceWriter(f"{web_server}/data/new.trace", **SMALL)


# The node's cache.


@pytest.fixture
def cache(tmp_path: Path) -> str:
    directory = str(tmp_path / "cache")
    tracefile.configure(node_cache=directory)
    return directory


def _shards(asked: Sequence[Asked]) -> list[Asked]:
    return [each for each in asked if each.key.endswith("c/0/0/0")]


def _kept(directory: str) -> dict[str, int]:
    return {
        os.path.join(parent, name): os.path.getsize(os.path.join(parent, name))
        for parent, _, names in os.walk(directory)
        for name in names
        if name != "lock"
    }


def test_fetched_once(
    bucket: S3Bucket,
    cache: str,
    long_sample: tuple[tracefile.LazyRoutedExperts, Array],
) -> None:
    experts, ids = long_sample
    np.testing.assert_array_equal(experts[:8192], ids[:8192])
    _forget()
    with bucket.proxy.counted() as asked:
        np.testing.assert_array_equal(experts[:8192], ids[:8192])
    assert _shards(asked) == []
    _forget()
    with bucket.proxy.counted() as asked:
        np.testing.assert_array_equal(experts[4096:12288], ids[4096:12288])
    assert len(_shards(asked)) <= 2


def test_ranks_of_a_node_fetch_once(
    bucket: S3Bucket,
    cache: str,
    long_sample: tuple[tracefile.LazyRoutedExperts, Array],
) -> None:
    """At the same time, what they have in common."""
    experts, ids = long_sample
    needed = _needed(experts, lambda experts: experts[:16384].numpy())
    for path in _kept(cache):
        os.unlink(path)
    _forget()
    bucket.proxy.latency = 0.1
    barrier = multiprocessing.get_context("fork").Barrier(3)

    def rank() -> None:
        barrier.wait(30)
        np.testing.assert_array_equal(experts[:16384], ids[:16384])

    with bucket.proxy.counted() as asked:
        assert join(*(fork(rank) for _ in range(3))) == [0, 0, 0]
    assert needed <= sum(each.sent for each in _shards(asked)) <= 1.1 * needed


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone"])
def test_damaged_cache_files_are_fetched_again(
    bucket: S3Bucket,
    url: str,
    cache: str,
    damage: str,
) -> None:
    ids = ids_of("a", 50, **SMALL)
    with tracefile.TraceWriter(url, **SMALL) as writer:
        experts = writer.append("a", ids)
    np.testing.assert_array_equal(experts, ids)
    kept = _kept(cache)
    assert len(kept) >= 3
    for path in kept:
        with open(path, "r+b") as file:
            data = bytearray(file.read())
            data[len(data) // 2] ^= 1
            file.seek(0)
            if damage == "flip":
                file.write(data)
            else:
                file.truncate(0 if damage == "empty" else len(data) - 1)
        if damage == "gone":
            os.unlink(path)
    _forget()
    np.testing.assert_array_equal(experts, ids)
    assert _kept(cache) == kept
    _forget()
    with bucket.proxy.counted() as asked:
        np.testing.assert_array_equal(experts, ids)
    assert _shards(asked) == []


def test_verify_looks_at_the_store(bucket: S3Bucket, url: str, cache: str) -> None:
    with tracefile.TraceWriter(url, **SMALL) as writer:
        writer.append("a", ids_of("a", 50, **SMALL)).numpy()
    (key,) = (key for key in bucket.objects.names() if key.endswith("c/0/0/0"))
    data = bytearray(bucket.objects[key])
    data[100] ^= 1
    bucket.objects[key] = bytes(data)
    assert CliRunner().invoke(app, ["verify", url]).exit_code == 1


def test_verify_reads_segments_together(bucket: S3Bucket, url: str) -> None:
    """What it finds comes in the order of the segments; who wants no more of it does not wait for the rest."""
    with tracefile.TraceWriter(url, **SMALL) as writer:
        for number in range(16):
            writer.append(f"s{number}", ids_of(f"s{number}", 50, **SMALL))
    keys = sorted(key for key in bucket.objects.names() if key.endswith("c/0/0/0"))
    for number in (12, 3, 7):
        data = bytearray(bucket.objects[keys[number]])
        data[100] ^= 1
        bucket.objects[keys[number]] = bytes(data)
    tally = Tally()
    with bucket.proxy.rounds() as asked:
        found = list(verify_trace(url, tally=tally))
    assert [each.samples[0].sample for each in found] == ["s3", "s7", "s12"]
    assert (tally.chunks, tally.total_chunks) == (16, 16)
    # One after another, it would be four for each segment.
    assert max(each.round for each in asked) <= 24
    with bucket.proxy.counted() as asked, contextlib.closing(verify_trace(url)) as findings:
        assert next(findings).samples[0].sample == "s3"
    assert {key for key in keys if any(key == each.key for each in asked)} < set(keys)


def test_the_cache_keeps_to_its_limit(tmp_path: Path) -> None:
    """The least recently used go first; several users may be at it."""
    limit = 512 * 1024
    caches = [node_cache.NodeCache(str(tmp_path), limit) for _ in range(2)]
    data = memoryview(bytes(20_000))
    often = caches[0].file("s3://b/t", "s")
    often.put(7, data)
    for number in range(200):
        path = often._path(7, len(data))
        os.utime(path, (time.time() - 100 + number / 10, time.time() - 100 + number / 10))
        assert often.get(7, len(data)) == data
        file = caches[number % 2].file("s3://b/t", f"segment-{number // 20}")
        file.put(number, data)
        assert file.get(number, len(data)) == data
        for name, nbytes in _kept(str(tmp_path)).items():
            assert nbytes == len(data) + 4, name
        assert len(_kept(str(tmp_path))) * 5 * 4096 <= limit
    assert len(_kept(str(tmp_path))) > 15
    assert len(os.listdir(tmp_path)) <= 6  # directories of what is gone are gone
    huge = caches[0].file("s3://b/t", "huge")
    huge.put(0, memoryview(bytes(limit + 1)))
    assert huge.get(0, limit + 1) is None


def test_leftovers_of_killed_processes_go(tmp_path: Path) -> None:
    cache = node_cache.NodeCache(str(tmp_path), 1024 * 1024)
    file = cache.file("s3://b/t", "s")
    file.put(0, memoryview(b"abc"))
    (directory,) = (entry for entry in tmp_path.iterdir() if entry.is_dir())
    old, new = directory / "5-10.1-1.partial", directory / "6-10.1-1.partial"
    for each in (old, new):
        each.write_bytes(b"half")
    os.utime(old, (1, 1))
    cache.trim()
    assert not old.exists()
    assert new.exists()
    assert file.get(0, 3) == b"abc"


def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    file = node_cache.NodeCache(str(tmp_path), 1024 * 1024).file("s3://b/t", "s")
    reader, writer = os.pipe()

    def hold() -> None:
        with file.claims([(0, 10)]):
            os.write(writer, b"x")
            time.sleep(60)

    pid = fork(hold)
    os.read(reader, 1)
    with file.claims([(0, 10), (100, 10)]) as mine:
        assert mine == [(100, 10)]
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    with file.claims([(0, 10)]) as mine:
        assert mine == [(0, 10)]
    join(pid)
    os.close(reader)
    os.close(writer)


def test_a_cache_that_cannot_be_written(bucket: S3Bucket, url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    tracefile.configure(node_cache=str(tmp_path / "file" / "cache"))
    ids = ids_of("a", 50, **SMALL)
    with tracefile.TraceWriter(url, **SMALL) as writer:
        experts = writer.append("a", ids)
    with pytest.warns(UserWarning, match="node cache cannot be used"):
        np.testing.assert_array_equal(experts, ids)
    np.testing.assert_array_equal(experts[3:], ids[3:])
