"""One process and its children and threads: what importing starts, what a fork inherits, what closing gives back."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import random
import threading
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support import fork, ids_of, in_fork, join, run_python

import tracefile
from tracefile import decode as decode_module
from tracefile.cache import chunk_cache
from tracefile.segments import segment_pool
from tracefile.shard import ChunkDecoder
from tracefile.source import PreadSource

if TYPE_CHECKING:
    from collections.abc import Iterator

Array = np.ndarray[Any, Any]

MODEL = {"num_layers": 8, "top_k": 4, "num_experts": 200}
SOURCES = ["mmap", "pread"]


def _write(path: str, samples: int, rows: int, **options: Any) -> dict[str, Array]:
    """One segment a sample."""
    values = {}
    with tracefile.TraceWriter(path, **MODEL, **options) as writer:
        for i in range(samples):
            values[f"s{i}"] = ids_of(f"s{i}", rows, **MODEL)
            writer.append(f"s{i}", values[f"s{i}"])
    return values


def test_import_starts_nothing_and_loads_no_zarr() -> None:
    """Compared with what torch and numcodecs, which it needs, load and start by themselves."""
    seen = json.loads(
        run_python(
            """
import json, os, sys, threading
import numpy, torch, numcodecs.blosc, crc32c
def now():
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "children": len(open(f"/proc/self/task/{os.getpid()}/children").read().split()),
        "modules": sorted({name.split(".")[0] for name in sys.modules}),
    }
before = now()
import tracefile
print(json.dumps([before, now()]))
"""
        ).stdout
    )
    before, after = seen
    for what in ("threads", "python threads", "files", "children"):
        assert after[what] == before[what], what
    new = set(after["modules"]) - set(before["modules"])
    assert "tracefile" in new
    assert not {"zarr", "zarrs", "tensorstore", "fsspec", "ray", "typer", "rich", "matplotlib", "hypothesis"} & new
    assert "zarr" not in after["modules"]


def test_what_one_side_needs_is_imported_when_it_is_asked_for() -> None:
    run_python(
        """
import sys, tracefile
later = {"tracefile.writer", "tracefile.loader", "tracefile.sharding"}
assert not later & set(sys.modules)
assert {"TraceWriter", "MicrobatchLoader", "ShardSpec"} <= set(dir(tracefile))
assert not hasattr(tracefile, "TraceReader")
for name in tracefile.__all__:
    getattr(tracefile, name)
assert later <= set(sys.modules)
"""
    )


def test_small_reads_start_no_thread(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracefile.decode._NATIVE_BYTES_PER_THREAD", 64 * 1024)  # other tests have it lower
    values = _write(path, 1, 100)
    before = threading.active_count()

    def work() -> tuple[int, bool]:
        tracefile.configure(decode_threads=4)
        right = np.array_equal(tracefile.open(path)["s0"].numpy(), values["s0"])
        return threading.active_count(), right

    assert in_fork(work) == (1, True)
    assert threading.active_count() == before


# Forks


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("codec", ["fast", "none"])
def test_reading_before_and_after_a_fork(path: str, codec: str, source: str) -> None:
    """The parent has files open, chunks in the cache and decode threads running; the children inherit only files."""
    values = _write(path, 3, 3000, codec=codec, layers_per_chunk=2, rows_per_chunk=64)
    tracefile.configure(decode_threads=4)
    trace = tracefile.open(path, source=source)
    np.testing.assert_array_equal(trace["s0"].numpy(), values["s0"])
    trace["s0"][:, 1].numpy()  # part of each chunk: the rest is kept
    assert chunk_cache.nbytes > 0
    assert any(thread.name.startswith("tracefile-decode") for thread in threading.enumerate())

    def work() -> list[Any]:
        inherited = (chunk_cache.nbytes, len(chunk_cache), threading.active_count())
        right = [
            np.array_equal(experts.numpy(), ids)
            for _ in range(2)
            for experts, ids in [
                (trace["s0"], values["s0"]),
                (trace["s0"][:, 1], values["s0"][:, 1]),
                (trace["s1"], values["s1"]),
                (tracefile.open(path, source=source)["s2"][5:2000, 3:5], values["s2"][5:2000, 3:5]),
            ]
        ]
        grandchild = fork(lambda: np.testing.assert_array_equal(trace["s1"].numpy(), values["s1"]))
        trace.close()
        after_close = np.array_equal(trace_handle.numpy(), values["s2"])
        return [inherited, right, join(grandchild), after_close]

    trace_handle = trace["s2"]
    for _ in range(3):
        assert in_fork(work) == [(0, 0, 1), [True] * 8, [0], True]
        # ... and nothing that the child closed is closed here.
        for sample, ids in values.items():
            np.testing.assert_array_equal(trace[sample].numpy(), ids)


def test_a_forked_child_whose_torch_has_threads(path: str) -> None:
    """A child that multiprocessing forks does not set torch's threads to 1 before it reads."""
    values = _write(path, 1, 3000)
    tracefile.open(path)["s0"].numpy()
    torch.zeros(1_000_000, dtype=torch.uint8).to(torch.int32)  # the parent has used its threads

    def work() -> bool:
        torch.set_num_threads(2)
        return np.array_equal(tracefile.open(path)["s0"].numpy(), values["s0"])

    assert in_fork(work, timeout=5)


@pytest.mark.parametrize("lock", ["segments", "cache", "decode threads"])
def test_a_fork_while_another_thread_holds_a_lock(path: str, lock: str) -> None:
    values = _write(path, 2, 2000, layers_per_chunk=2, rows_per_chunk=64)
    tracefile.configure(decode_threads=3)
    trace = tracefile.open(path)
    trace["s0"][:, 0].numpy()
    owner: Any = {"segments": segment_pool, "cache": chunk_cache, "decode threads": decode_module._pool}[lock]
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with owner._lock:
            held.set()
            release.wait()

    def work() -> bool:
        right = np.array_equal(trace["s0"][:, 1].numpy(), values["s0"][:, 1])
        right &= np.array_equal(trace["s1"].numpy(), values["s1"])
        trace.close()
        return right

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    try:
        assert in_fork(work, timeout=20)
    finally:
        release.set()
        holder.join()
    np.testing.assert_array_equal(trace["s1"].numpy(), values["s1"])


def test_forks_while_other_threads_read(path: str) -> None:
    """Locks that a thread of the parent holds at the moment of the fork must not hold up the child."""
    values = _write(path, 4, 1500, layers_per_chunk=2, rows_per_chunk=64)
    tracefile.configure(decode_threads=3, cache_bytes=20_000, max_open_segments=2)
    trace = tracefile.open(path)
    stop, errors = threading.Event(), []

    def read(number: int) -> None:
        rng = random.Random(number)
        try:
            while not stop.is_set():
                sample, start = f"s{rng.randrange(4)}", rng.randrange(1400)
                wanted = trace[sample][start : start + 700, rng.randrange(8)]
                assert len(wanted.numpy()) == len(wanted)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):

            def work() -> None:
                for sample, ids in values.items():
                    np.testing.assert_array_equal(trace[sample].numpy(), ids)
                    np.testing.assert_array_equal(trace[sample][3:900, 2].numpy(), ids[3:900, 2])
                assert chunk_cache.nbytes <= 20_000

            assert join(fork(work), timeout=30) == [0]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []


@pytest.mark.parametrize("workers", [2])
def test_data_loader_workers(path: str, workers: int) -> None:
    values = _write(path, 6, 200)
    trace = tracefile.open(path)
    np.testing.assert_array_equal(trace["s0"].numpy(), values["s0"])
    loader = torch.utils.data.DataLoader(
        [trace[sample] for sample in values],  # type: ignore[arg-type]
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=multiprocessing.get_context("fork"),
    )
    received = list(loader)
    assert all(isinstance(experts, tracefile.LazyRoutedExperts) for experts in received)
    for experts, ids in zip(received, values.values(), strict=True):
        np.testing.assert_array_equal(experts.numpy(), ids)


def test_handles_travel_to_a_spawned_process(path: str) -> None:
    values = _write(path, 2, 300)
    trace = tracefile.open(path)
    local = torch.cat([trace["s1"][100:200], torch.full((5, 8, 4), -1, dtype=torch.int32), trace["s0"][:50]])[:, 2:7]
    handle = pickle.dumps(local)
    result = run_python(
        "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])).numpy().tobytes().hex())", handle.hex()
    )
    expected = np.concatenate([values["s1"][100:200], np.full((5, 8, 4), -1), values["s0"][:50]])[:, 2:7]
    np.testing.assert_array_equal(
        np.frombuffer(bytes.fromhex(result.stdout), np.int32).reshape(expected.shape), expected
    )


# Threads


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("codec", ["fast", "none"])
def test_threads_read_overlapping_slices(path: str, codec: str, source: str) -> None:
    """A cache and a pool so small that every read evicts what another is using."""
    values = _write(path, 5, 1000, codec=codec, layers_per_chunk=3, rows_per_chunk=64)
    budget = 3 * 3 * 64 * 4 + 100  # three chunks
    tracefile.configure(cache_bytes=budget, max_open_segments=1, decode_threads=2)
    trace = tracefile.open(path, source=source)
    errors: list[BaseException] = []
    most = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            most[0] = max(most[0], chunk_cache.nbytes)
            time.sleep(0)

    def read(number: int) -> None:
        rng = random.Random(number)
        try:
            for _ in range(60):
                sample, start, layer = f"s{rng.randrange(5)}", rng.randrange(900), rng.randrange(8)
                stop = start + rng.randrange(1, 1000 - start)
                if rng.random() < 0.5:
                    seen, expected = trace[sample][start:stop, layer], values[sample][start:stop, layer]
                else:
                    seen = torch.cat([trace[sample][start:stop], trace["s0"][:70]])[:, layer:]
                    expected = np.concatenate([values[sample][start:stop], values["s0"][:70]])[:, layer:]
                np.testing.assert_array_equal(seen.numpy(), expected)
                if rng.random() < 0.05:
                    trace_of_this_thread = tracefile.open(path, source=source)
                    trace_of_this_thread.close()  # closes what the others are reading
        except BaseException as error:
            errors.append(error)

    watcher = threading.Thread(target=watch)
    watcher.start()
    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    watcher.join()
    assert errors == []
    assert 0 < most[0] <= budget
    assert chunk_cache.nbytes == sum(held.chunk.nbytes for held in chunk_cache._chunks.values())


def test_lowering_a_limit_takes_effect_at_once(path: str) -> None:
    _write(path, 4, 1000, layers_per_chunk=8, rows_per_chunk=64)
    trace = tracefile.open(path)
    for sample in trace:
        trace[sample][:, 0].numpy()
    chunk = 8 * 64 * 4
    assert chunk_cache.nbytes == 4 * 16 * chunk
    tracefile.configure(cache_bytes=5 * chunk)
    assert chunk_cache.nbytes == 5 * chunk
    assert len(segment_pool.opened(trace._ref)) == 4
    tracefile.configure(max_open_segments=2)
    assert len(segment_pool.opened(trace._ref)) == 2
    tracefile.configure(cache_bytes=0)
    assert (chunk_cache.nbytes, len(chunk_cache)) == (0, 0)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("codec", ["fast", "none"])
def test_the_cache_keeps_no_more_than_it_counts(path: str, codec: str, source: str) -> None:
    """A kept chunk must not be a view of a larger read, or of a mapping, that stays alive with it."""
    _write(path, 1, 60_000, codec=codec, layers_per_chunk=8, rows_per_chunk=256)
    tracefile.configure(cache_bytes=100_000, decode_threads=1)
    experts = tracefile.open(path, source=source)["s0"]
    experts[:300, 0].numpy()
    tracemalloc.start()
    try:
        for start in range(0, 60_000, 3000):
            experts[start : start + 2500, 1].numpy()
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 50_000 < chunk_cache.nbytes <= 100_000
    assert held < 200_000
    files = [thing for thing in _mappings() if thing.startswith(path)]
    assert len(files) == (1 if source == "mmap" else 0)


# Files and mappings


def _mappings() -> list[str]:
    with open("/proc/self/maps") as maps:
        return [line.split(None, 5)[5].rstrip("\n") for line in maps if len(line.split(None, 5)) == 6]


def _open_files(path: str) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the listing's own
            continue
    return [name for name in found if name.startswith(path)]


def _held(path: str) -> tuple[int, int]:
    """Open files and mappings below a path."""
    return len(_open_files(path)), len([name for name in _mappings() if name.startswith(path)])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("codec", ["fast", "none"])
def test_closing_a_trace_unmaps_it(path: str, codec: str, source: str) -> None:
    values = _write(path, 5, 300, codec=codec)
    trace = tracefile.open(path, source=source)
    handles = {sample: trace[sample] for sample in trace}
    assert _held(path) == (0, 0)  # opening and looking up open no shard file
    for sample, experts in handles.items():
        np.testing.assert_array_equal(experts[:, 3].numpy(), values[sample][:, 3])
    assert _held(path) == (5, 5 if source == "mmap" else 0)
    assert trace.active[0] > 0
    layer = handles["s0"][:, 3].numpy()

    trace.close()
    assert _held(path) == (0, 0)
    assert trace.active == (0, 0)
    trace.close()
    np.testing.assert_array_equal(layer, values["s0"][:, 3])  # what was read is the caller's

    for act in (lambda: trace["s0"], trace.refresh):
        with pytest.raises(tracefile.ClosedError) as caught:
            act()
        assert caught.value.path == path
    for sample, experts in handles.items():
        np.testing.assert_array_equal(experts.numpy(), values[sample])
    assert _held(path)[0] == 5
    with tracefile.open(path, source=source) as again:
        np.testing.assert_array_equal(again["s4"].numpy(), values["s4"])
    assert _held(path) == (0, 0)


def test_closing_one_trace_leaves_another_open(path: str) -> None:
    values = _write(path, 2, 100)
    _write(path + ".other", 2, 100)
    one, other = tracefile.open(path, source="mmap"), tracefile.open(path + ".other", source="mmap")
    for trace in (one, other):
        for sample in trace:
            trace[sample][:, 2].numpy()
    active = other.active
    assert active[0] == 2
    one.close()
    assert _held(path + "/") == (0, 0)
    assert _held(path + ".other") == (2, 2)
    assert other.active == active
    np.testing.assert_array_equal(other["s1"].numpy(), values["s1"])


@pytest.mark.parametrize("source", SOURCES)
def test_open_files_are_bounded(path: str, source: str) -> None:
    with tracefile.TraceWriter(path, **MODEL) as writer:
        handles = [writer.append(f"s{i}", ids_of(f"s{i}", 9, **MODEL)) for i in range(300)]
    trace = tracefile.open(path, source=source)
    tracefile.configure(max_open_segments=16)
    most = 0
    for i, sample in enumerate(trace):
        np.testing.assert_array_equal(trace[sample][:, 1].numpy(), ids_of(sample, 9, **MODEL)[:, 1])
        if i % 10 == 0:
            most = max(most, *_held(path))
    assert most == 16
    assert _held(path) == (16, 16 if source == "mmap" else 0)
    assert trace.active[0] <= 16
    # A read of many segments at once needs all of them for its duration, and lets go.
    everything = torch.cat([trace[sample] for sample in trace])
    expected = np.concatenate([ids_of(sample, 9, **MODEL) for sample in trace])
    np.testing.assert_array_equal(everything.numpy(), expected)
    assert _held(path)[0] == 16
    trace.close()
    assert _held(path) == (0, 0)
    assert len(handles) == 300


def test_a_failed_open_leaves_nothing_open(path: str) -> None:
    _write(path, 1, 100)
    trace = tracefile.open(path)
    (segment,) = trace.segments
    shard = os.path.join(path, "segments", segment, "c", "0", "0", "0")
    with open(shard, "r+b") as file:
        file.write(b"not a shard file")
    for source in SOURCES:
        experts = tracefile.open(path, source=source)["s0"]
        for _ in range(5):
            with pytest.raises(tracefile.ShardDamagedError):
                experts.numpy()
        gc.collect()
        assert _held(path) == (0, 0)


@pytest.fixture
def counted_closes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """File descriptors that were closed, in order."""
    closed: list[int] = []
    real = os.close

    def close(fd: int) -> None:
        closed.append(fd)
        real(fd)

    monkeypatch.setattr(os, "close", close)
    yield closed
    monkeypatch.undo()


@pytest.mark.parametrize("source", SOURCES)
def test_each_file_is_closed_once(path: str, source: str, counted_closes: list[int]) -> None:
    """Closing a descriptor twice closes what another thread has opened in between."""
    _write(path, 3, 50)
    trace = tracefile.open(path, source=source)
    for sample in trace:
        trace[sample].numpy()
    segments = segment_pool.opened(trace._ref)
    fds = [segment.source.fd for segment in segments if isinstance(segment.source, PreadSource)]
    counted_closes.clear()
    trace.close()
    assert _held(path)[0] == 3  # they are in use here
    for segment in segments:
        assert segment.source is not None
        segment.source.close()
    assert _held(path) == (0, 0)
    del segment, segments
    gc.collect()
    assert sorted(counted_closes) == sorted(fds)  # a mapping's own descriptor was closed when it was made


def test_a_segment_in_use_outlives_its_eviction(path: str) -> None:
    """Evicted in the middle of a read: the reader goes on, and the file is closed after it."""
    values = _write(path, 2, 300, codec="none", layers_per_chunk=1, rows_per_chunk=64)
    tracefile.configure(max_open_segments=1, decode_threads=1, cache_bytes=0, native=False)  # to meet each chunk
    trace = tracefile.open(path, source="mmap")
    trace["s0"][:1, 0].numpy()
    _evict_while_decoding(trace, values)
    gc.collect()
    assert _held(path) == (1, 1)


def _evict_while_decoding(trace: tracefile.Trace, values: dict[str, Array]) -> None:
    (segment,) = segment_pool.opened(trace._ref)
    decode = segment.decoder.decode
    evictions = 0

    class Decoder(ChunkDecoder):
        def decode(self, *arguments: Any) -> Any:
            nonlocal evictions
            if not evictions:
                evictions += 1
                np.testing.assert_array_equal(trace["s1"].numpy(), values["s1"])
                assert segment not in segment_pool.opened(trace._ref)
            return decode(*arguments)

    size = segment.header.geometry.chunk_bytes(segment.header.config)
    names = {"segment": segment.header.id, "path": segment.path}
    segment.decoder = Decoder(None, size, row_chunks=segment.row_chunks, **names)
    np.testing.assert_array_equal(trace["s0"].numpy(), values["s0"])
    assert evictions == 1
