"""Nodes that share a file system over a network: sshfs, each node a mount of its own, each message 10 ms late."""

from __future__ import annotations

import os
import pickle
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from network_mount import Mount, mounted, why_not
from support import fork, in_fork, join, random_routing

import tracefile
from tracefile.segments import segment_pool
from tracefile.verify import verify_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tracefile import LazyRoutedExperts

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "can be mounted")

DELAY = 0.01
#: How long a node's kernel and sshfs may go on showing old names and attributes.
CACHED = 0.5
GLM = {"num_layers": 47, "top_k": 4, "num_experts": 64}


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def nodes(export: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mount, Mount]]:
    """A rollout node and a learner node."""
    mounts = tmp_path_factory.mktemp("nodes")
    with (
        mounted(str(export), str(mounts / "rollout"), delay=DELAY, cache_seconds=CACHED) as rollout,
        mounted(str(export), str(mounts / "learner"), delay=DELAY, cache_seconds=CACHED) as learner,
    ):
        yield rollout, learner


@pytest.fixture(scope="module")
def sample(nodes: tuple[Mount, Mount]) -> tuple[str, np.ndarray]:
    """One of 32k tokens, written by the rollout node, flushed to its device."""
    ids = random_routing(np.random.default_rng(5), 32_768, dtype=np.uint8, **GLM)
    path = nodes[0].path + "/long.trace"
    with tracefile.TraceWriter(path, durable=True, **GLM) as writer:
        writer.append("a", ids)
    return nodes[1].path + "/long.trace", ids


def _rank_shard(experts: LazyRoutedExperts) -> LazyRoutedExperts:
    """Of rank 1 of cp 2 (zigzag) x tp 4."""
    quarter = len(experts) // 4
    local = torch.cat([experts[quarter : 2 * quarter], experts[2 * quarter : 3 * quarter]])
    return local[: len(local) // 4]


@pytest.mark.parametrize(
    "shard",
    [_rank_shard, lambda experts: experts[:, 5], lambda experts: experts[:, 24:36], lambda experts: experts[777:778]],
    ids=["cp 2 x tp 4", "one layer", "a pipeline stage", "one row"],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_only_what_is_needed_crosses(
    sample: tuple[str, np.ndarray], shard: Callable[[Any], Any], threads: int, export: Path, tmp_path: Path
) -> None:
    """In few requests: sshfs asks for 32 KiB at a time, the kernel for whole pages, and neither for more."""
    tracefile.configure(decode_threads=threads)
    with (
        mounted(str(export), str(tmp_path / "fresh"), delay=DELAY) as node,
        tracefile.open(f"{node.path}/long.trace") as trace,
    ):
        experts = trace["a"]
        (ref, *_) = experts.selection.rows.segments()
        opened = segment_pool.get(ref.trace, experts.config, ref.id)
        assert opened.source is not None
        assert opened.source.kind == "pread"
        _, reads, crossed = node.counts()
        expected = shard(torch.from_numpy(sample[1].astype(np.int32)))
        np.testing.assert_array_equal(shard(experts).numpy(), expected.numpy())
        needed = trace.stats.bytes_read
        _, reads_now, crossed_now = node.counts()
        chunks = trace.stats.chunks_decoded
        assert crossed_now - crossed <= 1.1 * needed + 2 * 4096 * chunks
        assert reads_now - reads <= needed / 32_768 + 2 * chunks


def test_samples_of_another_node_arrive(nodes: tuple[Mount, Mount]) -> None:
    """Names that the learner's node has cached may be old for a while; that is all."""
    rollout, learner = nodes
    rng = np.random.default_rng(1)
    written = {f"s{number}": random_routing(rng, 40 + number, 3, 2, 64) for number in range(6)}
    with tracefile.TraceWriter(f"{rollout.path}/live.trace", num_layers=3, top_k=2, num_experts=64) as writer:
        writer.append("s0", written["s0"])
        deadline = time.monotonic() + 20 * CACHED
        while not os.path.exists(f"{learner.path}/live.trace/zarr.json") and time.monotonic() < deadline:
            time.sleep(CACHED / 5)
        trace = tracefile.open(f"{learner.path}/live.trace")
        assert list(trace) == ["s0"]

        def write() -> None:
            for name in list(written)[1:]:
                writer.append(name, written[name])
                time.sleep(0.1)

        thread = threading.Thread(target=write)
        thread.start()
        followed: dict[str, LazyRoutedExperts] = {}
        for name, experts in trace.follow(timeout=60, stop=lambda: len(followed) == 5):
            followed[name] = experts
        thread.join()
    assert list(followed) == list(written)[1:]
    for name, experts in zip(trace, trace.wait(list(written), timeout=0), strict=True):
        np.testing.assert_array_equal(experts.numpy(), written[name])


def test_refresh_at_once(nodes: tuple[Mount, Mount]) -> None:
    """Again and again, while another node commits: a segment is seen whole or not at all."""
    rollout, learner = nodes
    tracefile.TraceWriter(f"{rollout.path}/busy.trace", num_layers=3, top_k=2, num_experts=64).close()

    def write() -> None:
        with tracefile.TraceWriter(f"{rollout.path}/busy.trace", num_layers=3, top_k=2, num_experts=64) as writer:
            for number in range(20):
                writer.append(f"s{number}", np.full((5 + number, 3, 2), number))

    time.sleep(2 * CACHED)
    trace = tracefile.open(f"{learner.path}/busy.trace")
    pid = fork(write)
    seen: dict[str, int] = {}
    deadline = time.monotonic() + 60
    while len(seen) < 20 and time.monotonic() < deadline:
        for name in trace.refresh():
            seen[name] = int(trace[name].numpy().mean())
    assert join(pid) == [0]
    assert seen == {f"s{number}": number for number in range(20)}


def test_writers_on_two_nodes(nodes: tuple[Mount, Mount], export: Path) -> None:
    """They create the trace together, and neither waits for the other."""

    def write(node: Mount, name: str) -> None:
        with tracefile.TraceWriter(f"{node.path}/both.trace", num_layers=3, top_k=2, num_experts=64) as writer:
            for number in range(5):
                writer.append(f"{name}{number}", np.full((10, 3, 2), number))

    pids = [fork(lambda node=node, name=name: write(node, name)) for node, name in zip(nodes, "ab", strict=True)]
    assert join(*pids) == [0, 0]
    trace = tracefile.open(export / "both.trace")
    assert sorted(trace) == [f"{name}{number}" for name in "ab" for number in range(5)]
    assert all(int(experts.numpy().mean()) == int(name[1:]) for name, experts in trace.items())
    assert list(verify_trace(export / "both.trace")) == []
    assert not os.path.exists(export / ".both.trace.staging")


def test_handles_of_another_mount(nodes: tuple[Mount, Mount], sample: tuple[str, np.ndarray]) -> None:
    with tracefile.open(sample[0]) as trace:
        handle = pickle.dumps(trace["a"][100:300])
    before = nodes[1].quiet_counts()

    def read() -> bool:
        tracefile.configure(root_map=[(nodes[1].path, nodes[0].path)])
        return np.array_equal(pickle.loads(handle).numpy(), sample[1][100:300])

    assert in_fork(read)
    assert nodes[1].quiet_counts() == before


def test_a_file_server_that_dies(export: Path, tmp_path: Path) -> None:
    """A clear error on either side, no signal, and what was committed stays."""
    ids = random_routing(np.random.default_rng(2), 5000, dtype=np.uint8, **GLM)

    def work() -> list[str]:
        failures = []
        with mounted(str(export), str(tmp_path / "node"), delay=0.002) as node:
            writer = tracefile.TraceWriter(f"{node.path}/dying.trace", **GLM)
            experts = writer.append("a", ids)
            np.testing.assert_array_equal(experts[:5].numpy(), ids[:5])
            node.fail()
            time.sleep(0.2)
            for act in (lambda: experts[2000:].numpy(), lambda: writer.append("b", ids)):
                try:
                    act()
                except tracefile.TraceError as error:
                    failures.append(f"{type(error).__name__} {isinstance(error, OSError)}")
        return failures

    assert in_fork(work) == ["StoreError True", "PublishError True"]
    trace = tracefile.open(export / "dying.trace")
    np.testing.assert_array_equal(trace["a"].numpy(), ids)
    assert list(trace) == ["a"]
