"""Traces in a real Ray cluster of several nodes with object stores of their own, and no file system between them.

Two learner nodes (the head and another) and rollout nodes. What crosses between nodes is counted in the chunks that
each raylet says it received, which it writes to a file of the session.
"""

from __future__ import annotations

import gc
import os
import pickle
import re
import signal
import time
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from ray_nodes import QUIET, quiet_ray
from support import in_fork, random_routing, run_python, tree

import tracefile
from tracefile.integrations import ray as ray_traces
from tracefile.integrations.ray.keeper import INLINED_BYTES
from tracefile.segment_writer import SegmentWriter
from tracefile.sharding import ShardSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

LAYERS, TOP_K, EXPERTS, ROWS = 47, 4, 64, 40_000
MODEL = {"num_layers": LAYERS, "top_k": TOP_K, "num_experts": EXPERTS}
RANKS = 4
CHUNK_BYTES = 64 * 1024  # in which objects cross; 5 MiB by default
STORE_BYTES = 100 * 2**20

pytestmark = pytest.mark.timeout(300)  # many processes import torch, and the first test starts the cluster


class Nodes(NamedTuple):
    cluster: Any
    learners: list[str]
    rollout: str


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with quiet_ray():
        settings = {
            "object_manager_default_chunk_size": CHUNK_BYTES,
            "debug_dump_period_milliseconds": 100,
            # A node that does not answer is dead after 2 seconds, not 30.
            "health_check_initial_delay_ms": 1000,
            "health_check_period_ms": 500,
            "health_check_timeout_ms": 500,
            "health_check_failure_threshold": 4,
        }
        node = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 1, "_system_config": settings})
        ray.init(address=cluster.address, **QUIET)
        added = [cluster.add_node(num_cpus=1, wait=False, **node) for _ in range(2)]
        cluster.wait_for_nodes()
        yield Nodes(cluster, [cluster.head_node.node_id, added[0].node_id], added[1].node_id)
        ray.shutdown()
        cluster.shutdown()


def on(node: str) -> dict[str, Any]:
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def debug_state(node: str) -> str:
    """What a node's raylet says of itself, from now on. The raylets of a session take turns in one file."""
    session = ray._private.worker.global_worker.node.get_session_dir_path()
    name = os.path.join(session, "logs", "debug_state.txt")
    after, deadline = time.time() + 0.15, time.monotonic() + 60
    while time.monotonic() < deadline:
        with open(name) as file:
            modified = os.fstat(file.fileno()).st_mtime
            text = file.read()
        if modified > after and f"Node ID: {node}" in text and "PullManager:" in text:
            return text
        time.sleep(0.01)
    raise AssertionError(f"no state of node {node}")


def counted(node: str, what: str) -> int:
    (number,) = re.findall(rf"- {re.escape(what)}: (\d+)", debug_state(node))
    return int(number)


def local_objects(nodes: Nodes, expected: list[int] | None = None) -> list[int]:
    """Objects of any size in the stores of the two learner nodes, copies too; as expected, if they come to be so."""
    gc.collect()
    deadline = time.monotonic() + 30
    while True:
        found = [counted(node, "num local plasma objects") for node in nodes.learners]
        if expected is None or found == expected or time.monotonic() > deadline:
            return found


def received_chunks(node: str) -> int:
    return counted(node, "num chunks received total")


def used_bytes() -> dict[str, int]:
    """Bytes in the object store of each node, once what nobody refers to has left it."""
    gc.collect()
    seen: list[dict[str, int]] = []
    while len(seen) < 5 or any(other != seen[-1] for other in seen[-5:]):
        time.sleep(0.1)
        free = ray._private.state.available_resources_per_node()
        seen.append({node: STORE_BYTES - int(each["object_store_memory"]) for node, each in free.items()})
        assert len(seen) < 200
    return seen[-1]


def routing(number: int, rows: int = ROWS) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).integers(0, EXPERTS, (rows, LAYERS, TOP_K), dtype=np.uint8)


def anonymous_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


@pytest.fixture(autouse=True)
def connected(nodes: Nodes) -> None:
    """Tests run in any order, each in the cluster."""


@ray.remote
class Rollout:
    """Writes samples, one segment each."""

    def write(self, path: str, numbers: range, rows: int = ROWS) -> dict[str, Any]:
        with tracefile.TraceWriter(path, **MODEL, codec="none") as writer:
            return {"experts": [writer.append(f"s{number}", routing(number, rows)) for number in numbers]}

    def open_writer(self, path: str) -> None:
        self.writer = tracefile.TraceWriter(path, **MODEL)

    def append(self, sample: str, rows: Any, **options: Any) -> Any:
        return self.writer.append(sample, rows, **options)

    def run(self, work: Callable[[], Any]) -> Any:
        return work()

    def pid(self) -> int:
        return os.getpid()


@ray.remote
class Rank:
    """A learner's rank."""

    def read(self, batch: dict[str, list[Any]], rank: int) -> tuple[int, list[int]]:
        """Its rows of each sample, layer by layer: the peak of RssAnon in KiB, and a checksum for each sample."""
        torch.set_num_threads(1)
        spec = ShardSpec(cp_size=2, cp_rank=rank // 2, tp_size=2, tp_rank=rank % 2)
        peak, sums = 0, []
        for experts in batch["experts"]:
            shard, checksum = spec.apply([experts], [len(experts)]), 0
            for layer in range(LAYERS):
                checksum = zlib.crc32(shard[:, layer].materialize(dtype=torch.uint8).numpy(), checksum)
                peak = max(peak, anonymous_kib())
            sums.append(checksum)
        return peak, sums

    def read_file(self, path: str, rank: int) -> tuple[int, list[int]]:
        with tracefile.open(path) as trace:
            return self.read({"experts": list(trace.values())}, rank)

    def hold(self, *anything: Any) -> Any:
        self.held = anything
        return anything

    def sums(self, *lazies: Any) -> list[int]:
        return [int(experts.materialize(dtype=torch.uint8).sum()) for experts in lazies]

    def run(self, work: Callable[[], Any]) -> Any:
        return work()


@pytest.fixture(scope="module")
def rollout(nodes: Nodes) -> Any:
    return Rollout.options(**on(nodes.rollout)).remote()


@pytest.fixture(scope="module")
def ranks(nodes: Nodes) -> list[Any]:
    """Those of the first node, then those of the second."""
    return [Rank.options(**on(node)).remote() for node in nodes.learners for _ in range(RANKS)]


def segment_bytes(lazies: list[Any]) -> dict[Any, int]:
    """The objects that lazy tensors name, and the bytes of each."""
    refs = {segment.handle.ref for experts in lazies for segment in experts.selection.rows.segments()}
    places = ray.experimental.get_object_locations(list(refs))
    return {ref: place["object_size"] for ref, place in places.items()}


def test_two_nodes_of_four_ranks(
    nodes: Nodes, rollout: Any, ranks: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    numbers = range(7)
    files = str(tmp_path_factory.mktemp("files") / "t.trace")
    with tracefile.TraceWriter(files, **MODEL, codec="none") as writer:
        for number in numbers[:6]:
            writer.append(f"s{number}", routing(number))
    batch = ray.get(rollout.write.remote("ray://step_1", numbers))
    stored = segment_bytes(batch["experts"])
    assert len(stored) == len(numbers)
    in_files = sum(len(data) for name, data in tree(files).items() if "/c/" in name) // 6
    assert all(0 < nbytes - in_files < 4096 for nbytes in stored.values()), "as in files, each once, and its document"
    unneeded = batch["experts"].pop()
    needed = segment_bytes(batch["experts"])
    before = [received_chunks(node) for node in nodes.learners]
    jobs = [(rank, number % RANKS) for number, rank in enumerate(ranks)]
    from_files = ray.get([rank.read_file.remote(files, number) for rank, number in jobs])
    assert [received_chunks(node) for node in nodes.learners] == before
    from_ray = ray.get([rank.read.remote(batch, number) for rank, number in jobs])
    chunks = sum(-(-nbytes // CHUNK_BYTES) for nbytes in needed.values())
    crossed = [received_chunks(node) - was for node, was in zip(nodes.learners, before, strict=True)]
    assert crossed == [chunks, chunks], f"chunks of 64 KiB to each node, for 4 ranks; {sum(needed.values())} bytes"
    assert [sums for _, sums in from_ray] == [sums for _, sums in from_files]
    assert len({tuple(sums) for _, sums in from_ray}) == RANKS
    peaks = [(ray_peak, file_peak) for (ray_peak, _), (file_peak, _) in zip(from_ray, from_files, strict=True)]
    assert all(ray_peak - file_peak < 8 * 1024 for ray_peak, file_peak in peaks), f"KiB of RssAnon: {peaks}"
    copies = ray.experimental.get_object_locations([*needed, *segment_bytes([unneeded])])
    learners = {ref.hex(): set(place["node_ids"]) & set(nodes.learners) for ref, place in copies.items()}
    assert [len(learners[ref.hex()]) for ref in needed] == [2] * len(needed)
    assert sum(map(len, learners.values())) == 2 * len(needed), "what nobody needs goes nowhere"


def test_lazy_tensors_travel_in_whatever_ray_carries(rollout: Any, ranks: list[Any]) -> None:
    (experts,) = ray.get(rollout.write.remote("ray://step_2", range(1), 2000))["experts"]
    expected = [int(routing(0, 2000).sum()), int(routing(0, 2000)[5:9].sum())]
    shard = torch.cat([experts[5:7], experts[7:9]])
    assert ray.get(ranks[0].sums.remote(experts, shard)) == expected
    boxed = ray.put({"a": [experts, {"b": (shard,)}]})
    del experts, shard
    through = ray.get(ranks[5].hold.remote(boxed))[0]
    del boxed
    assert ray.get(ranks[1].sums.remote(through["a"][0], through["a"][1]["b"][0])) == expected
    assert [int(x.materialize().sum()) for x in (through["a"][0], through["a"][1]["b"][0])] == expected
    ray.get(ranks[5].hold.remote())


def test_the_object_store_is_empty_once_the_lazy_tensors_are_gone(nodes: Nodes, rollout: Any, ranks: list[Any]) -> None:
    empty, before = local_objects(nodes, [0, 0]), used_bytes()
    assert max(before.values()) < 2**20, "after the tests before this one, whose segments are still open here and there"
    batch = ray.get(rollout.write.remote("ray://step_3", range(2)))
    size = sum(segment_bytes(batch["experts"]).values())
    ray.get([ranks[number].hold.remote(batch["experts"][1]) for number in (0, 4)])
    ray.get([rank.read.remote(batch, 0) for rank in ranks])
    assert local_objects(nodes) == [number + 2 for number in empty]
    view = batch["experts"][0][10:20]
    batch.clear()
    ray.get(ranks[0].hold.remote())
    assert used_bytes()[nodes.rollout] - before[nodes.rollout] > 0.99 * size
    assert local_objects(nodes) == [number + 2 for number in empty], "a slice of one, and another process's tensor"
    del view
    half = [number + 1 for number in empty]
    assert local_objects(nodes, half) == half
    ray.get(ranks[4].hold.remote())
    assert local_objects(nodes, empty) == empty, "though all ranks have the segments open"
    assert max(used_bytes().values()) < 2**20


@pytest.mark.slow
def test_a_trace_larger_than_the_object_store_is_spilled(nodes: Nodes, rollout: Any, ranks: list[Any]) -> None:
    before = counted(nodes.rollout, "cumulative spill requests")
    numbers = range(18)
    batch = ray.get(rollout.write.remote("ray://step_4", numbers))
    assert sum(segment_bytes(batch["experts"]).values()) > 1.2 * STORE_BYTES
    assert counted(nodes.rollout, "cumulative spill requests") > before
    with tracefile_settings(ranks[4], max_open_segments=4):
        assert ray.get(ranks[4].sums.remote(*batch["experts"])) == [int(routing(number).sum()) for number in numbers]
    assert used_bytes()[nodes.rollout] < STORE_BYTES


def tracefile_settings(rank: Any, **changes: Any) -> Any:
    import contextlib

    @contextlib.contextmanager
    def changed() -> Iterator[None]:
        before = ray.get(rank.run.remote(lambda: tracefile.configure(**changes)))
        yield
        ray.get(rank.run.remote(lambda: tracefile.configure(**{name: getattr(before, name) for name in changes})))

    return changed()


def test_a_killed_writer_and_a_killed_node(nodes: Nodes, ranks: list[Any]) -> None:
    node = nodes.cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
    doomed = Rollout.options(**on(node.node_id)).remote()
    experts = ray.get(doomed.write.remote("ray://step_6", range(3)))["experts"]
    expected = [int(routing(number).sum()) for number in range(3)]
    pid = ray.get(doomed.pid.remote())
    ray.kill(doomed)
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    # Its process is gone, and what it wrote is there.
    assert ray.get(ranks[0].sums.remote(experts[0])) == expected[:1]
    assert ray.get(ranks[4].sums.remote(experts[1])) == expected[1:2]
    (raylet,) = node.all_processes["raylet"]
    os.kill(raylet.process.pid, signal.SIGSTOP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACEFILE_RAY_TIMEOUT", "0.3")
        with pytest.raises(tracefile.StoreError, match=r"did not reach this node within 0\.3 s") as hung:
            experts[2].materialize()
    assert not isinstance(hung.value, tracefile.DamagedTraceError)
    nodes.cluster.remove_node(node, allow_graceful=False)
    started = time.monotonic()
    with pytest.raises(tracefile.SegmentMissingError, match="is lost: no node that had a copy is left") as caught:
        ray.get(ranks[0].sums.remote(experts[2]))
    assert time.monotonic() - started < 30
    with pytest.raises(tracefile.SegmentMissingError):
        experts[2].materialize()
    (segment,) = experts[2].selection.rows.segments()
    error = pickle.loads(pickle.dumps(caught.value.cause))
    assert (error.path, error.segment) == ("ray://step_6", segment.id)
    assert "have a new writer write its samples again" in str(error)
    # The others are on one node each: processes that had not opened them have them from there.
    for rank in (ranks[1], ranks[5], ranks[0]):
        assert ray.get(rank.sums.remote(*experts[:2])) == expected[:2]


def test_only_ray_can_carry_what_lives_by_reference(path: str, rollout: Any) -> None:
    (experts,) = ray.get(rollout.write.remote("ray://step_7", range(1), 300))["experts"]
    with pytest.raises(tracefile.LazyTensorError, match="keep\\('ray://step_7'\\)"):
        pickle.dumps(experts)
    with pytest.raises(tracefile.LazyTensorError):
        torch.save([experts], path)
    import copy

    copied = copy.deepcopy([experts])
    assert torch.equal(copied[0].materialize(), experts.materialize())
    assert experts.selection.rows.segments() == copied[0].selection.rows.segments()


def test_a_trace_that_is_kept_by_name(rollout: Any, ranks: list[Any]) -> None:
    ray_traces.keep("ray://kept/step_1")
    ray.get(rollout.write.remote("ray://kept/step_1", range(2)))
    empty = used_bytes()
    trace = tracefile.open("ray://kept/step_1")
    assert used_bytes() == empty, "opening and listing bring documents, not segments"
    assert (list(trace), len(trace["s1"])) == (["s0", "s1"], ROWS)
    experts = pickle.loads(pickle.dumps(trace["s1"]))
    assert int(experts.materialize(dtype=torch.uint8).sum()) == int(routing(1).sum())

    def shape() -> Any:
        with tracefile.open("ray://kept/step_1") as opened:
            return opened.wait("s0", timeout=30)[0].shape

    assert ray.get(ranks[4].run.remote(shape)) == (ROWS, LAYERS, TOP_K)
    ray_traces.delete("ray://kept/step_1")
    trace.close()
    tracefile.clear_cache()
    with pytest.raises(tracefile.TraceNotFoundError):
        tracefile.open("ray://kept/step_1")
    with pytest.raises(tracefile.SegmentMissingError):
        experts.materialize()
    assert max(used_bytes().values()) < 2**20


def test_samples_continue_while_their_tensors_live(rollout: Any) -> None:
    ids = routing(1, 900)
    ray.get(rollout.open_writer.remote("ray://session"))
    first = ray.get(rollout.append.remote("a", ids[:500]))
    with pytest.raises(tracefile.SampleGapError):
        ray.get(rollout.append.remote("a", ids[500:], start=500))  # it is only here that a tensor of it is held

    def turns() -> list[Any]:
        writer = tracefile.TraceWriter("ray://session_2", **MODEL)
        last = writer.append("a", ids[:300])
        for stop in (600, 900):
            last = writer.append("a", ids[len(last) : stop], start=len(last))
        whole = writer.append("b", ids)  # of which every row is there
        writer.truncate("a", 450)
        continued = writer.append("a", ids[450:460], start=450)
        return [last, whole, continued, list(tracefile.open("ray://session_2"))]

    last, whole, continued, names = ray.get(rollout.run.remote(turns))
    assert names == ["a", "b"]
    assert (len(last), len(whole), len(continued)) == (900, 900, 460)
    assert len(last.selection.rows.segments()) == 3
    for experts in (first, last, whole, continued):
        assert np.array_equal(experts.numpy(), ids[: len(experts)])


def test_prefixes_are_shared_with_what_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = random_routing(np.random.default_rng(1), 1000, 2, 2, 16)
    with tracefile.TraceWriter("ray://shared", num_layers=2, top_k=2, num_experts=16) as writer:
        held = [writer.append("a", ids)]
        held.append(writer.append("b", ids))
        assert held[0].selection.rows.segments() == held[1].selection.rows.segments()
        held.clear()
        gc.collect()
        held.append(writer.append("c", ids))
        assert np.array_equal(held[0].numpy(), ids), "stored anew"
        original = SegmentWriter._write_sample

        def let_go(self: Any, *arguments: Any) -> Any:
            held.clear()  # as another thread may, once the prefix is found
            gc.collect()
            return original(self, *arguments)

        monkeypatch.setattr(SegmentWriter, "_write_sample", let_go)
        last = writer.append("d", np.concatenate([ids, ids[:10]]))
        assert len(last.selection.rows.segments()) == 2
        assert np.array_equal(last.numpy(), np.concatenate([ids, ids[:10]]))


def test_segments_of_all_sizes(nodes: Nodes, rollout: Any, ranks: list[Any]) -> None:
    ray.get(rollout.open_writer.remote("ray://sizes"))
    lazies, arrays = [], []
    for rows in (0, 1, 40, 100, 400, 540, 600, 1500):
        arrays.append(routing(rows, rows))
        lazies.append(ray.get(rollout.append.remote(f"{rows}", arrays[-1])))
    sizes = segment_bytes(lazies)
    assert min(sizes.values()) < 16 * 1024
    assert max(sizes.values()) > 1.5 * INLINED_BYTES
    places = ray.experimental.get_object_locations(list(sizes))
    assert all(places[ref]["node_ids"] for ref, nbytes in sizes.items() if nbytes > 16 * 1024), "shared by a node"
    assert ray.get(ranks[4].sums.remote(*lazies)) == [int(array.sum()) for array in arrays]
    for experts, array in zip(lazies, arrays, strict=True):
        assert np.array_equal(experts.numpy(), array)


@pytest.mark.slow
def test_where_ray_is_not(nodes: Nodes, rollout: Any) -> None:
    code = "import tracefile; tracefile.open('ray://step_1')"
    result = run_python(code, check=False)
    assert "OptionError: ray://step_1 lives in a Ray cluster; connect to it first" in result.stderr
    code = "import sys, tracefile; print([name for name in sys.modules if name.split('.')[0] == 'ray'])"
    assert run_python(code).stdout == "[]\n"
    held, other = ray.get(rollout.write.remote("ray://step_8", range(2), 300))["experts"]
    expected = int(held.materialize().sum())

    def child() -> list[Any]:
        tracefile.clear_cache()
        found: list[Any] = [int(held.materialize().sum())]
        for work in (lambda: other.materialize(), lambda: tracefile.open("ray://step_8")):
            try:
                work()
            except Exception as error:
                found.append(str(error))
        return found

    assert in_fork(child)[0] == expected, "what was mapped before is shared"
    assert all("forked process" in message for message in in_fork(child)[1:])


def test_a_killed_keeper(ranks: list[Any]) -> None:
    """Its segments die with it, as Ray has it; with the next write there is another."""
    model = {"num_layers": 2, "top_k": 2, "num_experts": 16}
    ids = random_routing(np.random.default_rng(0), 9000, **model)
    with tracefile.TraceWriter("ray://step_9", **model) as writer:
        first, held = writer.append("a", ids), writer.append("b", ids[::-1])
        assert np.array_equal(held.numpy(), ids[::-1])
        ray.kill(ray.get_actor("tracefile", namespace="tracefile"))
        second = writer.append("c", ids[::2])
        assert np.array_equal(second.numpy(), ids[::2])
    with pytest.raises(tracefile.SegmentMissingError, match="the actor that owned it was killed"):
        ray.get(ranks[4].run.remote(first.numpy))
    assert np.array_equal(held.numpy(), ids[::-1]), "what is mapped stays"
    assert np.array_equal(ray.get(ranks[4].run.remote(second.numpy)), ids[::2])
    with pytest.raises(tracefile.TraceNotFoundError):
        tracefile.open("ray://step_9")


@pytest.mark.parametrize("path", ["ray://", "ray:///", "ray://a/segments/b"])
def test_paths_that_name_no_trace(path: str) -> None:
    with pytest.raises(tracefile.OptionError, match="names no trace"):
        tracefile.open(path)
