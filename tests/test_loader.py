"""MicrobatchLoader: right values in any order, never over budget, ahead of time, and gone when it is done."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support import in_fork, random_routing

import tracefile
from tracefile import MicrobatchLoader, ShardSpec, process_stats
from tracefile.ahead import held_ahead
from tracefile.schedule import Step, UnitOrder, layer_groups, one_forward_one_backward

LAYERS, TOP_K, EXPERTS = 10, 4, 64
SPEC = ShardSpec(cp_size=2, cp_rank=1, tp_size=2, tp_rank=0, layer_ids=tuple(range(1, LAYERS)))


class Work:
    """Microbatches of one rank: its shards, lazy, and what they must hold."""

    def __init__(self, path: str, microbatches: int, rows: int = 300) -> None:
        rng = np.random.default_rng(7)
        self.shards, self.expected = [], []
        self.path = path
        with tracefile.TraceWriter(
            path, num_layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS, layers_per_chunk=4, rows_per_chunk=64
        ) as writer:
            for number in range(microbatches):
                arrays = [random_routing(rng, rows + 13 * i + number, LAYERS, TOP_K, EXPERTS) for i in range(2)]
                lengths = [len(array) for array in arrays]
                lazies = [writer.append(f"{number}/{i}", array) for i, array in enumerate(arrays)]
                self.shards.append(SPEC.apply(lazies, lengths))
                eager = [torch.from_numpy(array) for array in arrays]
                self.expected.append(SPEC.apply(eager, lengths, num_experts=EXPERTS).long())

    def layer_bytes(self) -> int:
        return max(shard.shape[0] for shard in self.shards) * TOP_K

    def train(self, loader: MicrobatchLoader) -> None:
        """A training pass, each value checked."""
        for microbatch in loader:
            expected = self.expected[microbatch.number]
            for layer in range(LAYERS - 1):
                assert torch.equal(microbatch.layer(layer), expected[:, layer])
            for layer in reversed(range(LAYERS - 1)):
                assert torch.equal(microbatch.layer(layer, "backward"), expected[:, layer])


@pytest.fixture
def work(path: str) -> Work:
    return Work(path, 6)


def read_ahead_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tracefile-read-ahead"]


def settle(loader: MicrobatchLoader) -> None:
    """Wait until the loader's thread has nothing left to do."""
    deadline, before = time.monotonic() + 10, -1
    while time.monotonic() < deadline:
        time.sleep(0.05)
        now = loader.stats().units_read
        if now == before:
            return
        before = now


@pytest.mark.parametrize("prefetch", [0, 2, 9])
@pytest.mark.parametrize("layers_in_budget", [1, 3, 1000])
def test_passes_within_every_budget(work: Work, prefetch: int, layers_in_budget: int) -> None:
    budget = layers_in_budget * work.layer_bytes()
    with MicrobatchLoader(work.shards, prefetch=prefetch, budget_bytes=budget) as loader:
        loader.begin_pass("forward")
        for microbatch in loader:
            for layer, layer_id in enumerate(microbatch.layer_ids):
                assert layer_id == layer + 1
                values = microbatch.layer(layer)
                assert torch.equal(values, work.expected[microbatch.number][:, layer])
                assert values.dtype == torch.int64
        loader.begin_pass("backward")
        work.train(loader)
        work.train(loader)  # nobody said that a pass begins: right all the same
        stats = loader.stats()
    assert 0 < stats.peak_bytes <= budget
    assert loader.stats().active_bytes == loader.stats().active_chunks == 0
    assert not read_ahead_threads()


def test_a_budget_too_small_for_one_layer(work: Work) -> None:
    budget = work.layer_bytes() - 1
    with pytest.raises(
        tracefile.LoaderBudgetError, match=r"one layer of microbatch \d takes .* budget_bytes"
    ) as caught:
        MicrobatchLoader(work.shards, budget_bytes=budget)
    assert isinstance(caught.value, MemoryError)
    assert caught.value.budget == budget < caught.value.wanted
    assert "microbatch" in vars(pickle.loads(pickle.dumps(caught.value)))


def test_nothing_is_read_before_a_pass_begins(work: Work) -> None:
    before = process_stats()
    with MicrobatchLoader(work.shards) as loader:
        handles = [list(microbatch) for microbatch in loader[:]]
        assert [handle.shape for handle in handles[0]] == [(work.shards[0].shape[0], TOP_K)] * (LAYERS - 1)
        assert len(loader) == 6
        assert loader[-1].number == 5
        assert process_stats() == before
        assert not read_ahead_threads()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_each_chunk_is_decoded_once_a_pass(work: Work, prefetch: int) -> None:
    tracefile.clear_cache()
    before = process_stats()
    for shard in work.shards:
        shard.materialize()
    tracefile.clear_cache()
    middle = process_stats()
    with MicrobatchLoader(work.shards, prefetch=prefetch) as loader:
        work.train(loader)
    after = process_stats()
    trace = tracefile.open(work.path)
    assert trace.active == (0, 0), "chunks stay in the cache that nobody will ask for"
    assert after.chunks_decoded - middle.chunks_decoded == middle.chunks_decoded - before.chunks_decoded
    assert after.bytes_read - middle.bytes_read == middle.bytes_read - before.bytes_read


def test_it_reads_ahead_and_no_further(work: Work) -> None:
    with MicrobatchLoader(work.shards, prefetch=2, warmup=6) as loader:
        loader.begin_pass()
        settle(loader)
        groups = len(layer_groups(range(1, LAYERS), 4, 1, 1000))
        assert groups == 3
        assert loader.stats().units_read == 3 * groups  # the microbatch in use, and two more
        loader[0].layer(0)
        settle(loader)
        assert loader.stats().waits == 0
        assert loader.stats().units_read == 3 * groups
        loader[1].layer(0)
        settle(loader)
        assert loader.stats().units_read == 4 * groups


def test_what_is_done_is_dropped(work: Work) -> None:
    with MicrobatchLoader(work.shards, prefetch=0) as loader:
        seen = []
        for microbatch in loader:
            seen.append(loader.stats().active_bytes)
            for layer in range(LAYERS - 1):
                microbatch.layer(layer)
            for layer in reversed(range(LAYERS - 1)):
                microbatch.layer(layer, "backward")
        assert seen == [0] * 6
        assert loader.stats().active_bytes == 0
        values = loader[2].layer(1)
        assert loader.stats().active_chunks > 0
        loader[2].release()
        assert loader.stats().active_bytes == 0
        assert torch.equal(loader[2].layer(1), values)


def test_values_are_the_callers_own(work: Work) -> None:
    with MicrobatchLoader(work.shards, dtype=torch.uint8) as loader:
        loader[0].layer(3).fill_(0)
        loader[0][3].materialize(dtype=torch.uint8).fill_(0)
        assert torch.equal(loader[0].layer(3).long(), work.expected[0][:, 3])


def test_handles_find_what_was_read(work: Work) -> None:
    """As slime and Megatron use them: through the lazy tensors alone."""
    with MicrobatchLoader(work.shards, prefetch=2) as loader:
        handles = [list(microbatch) for microbatch in loader[:]]
        loader.begin_pass()
        settle(loader)
        reads = process_stats().reads
        first = handles[0][0].materialize_for_routing_replay("forward")
        assert first.dtype == torch.int32
        scores = torch.rand(first.shape[0], EXPERTS)
        on_device = handles[0][0].detach().to(scores.device).to(torch.int64)
        assert isinstance(on_device, tracefile.LazyRoutedExperts)
        gathered = scores.gather(1, on_device)
        assert torch.equal(gathered, scores.gather(1, work.expected[0][:, 0]))
        assert torch.equal(first.long(), work.expected[0][:, 0])
        assert torch.equal(handles[0][0] + 0, first)
        assert process_stats().reads == reads, "a handle read for itself what the loader held"
        travelled = pickle.loads(pickle.dumps(handles[0][1]))
        assert travelled.ahead is None
        assert torch.equal(travelled.long(), work.expected[0][:, 1])
    for number, layers in enumerate(handles):  # the loader is closed: they read themselves
        for layer, handle in enumerate(layers):
            values = handle.materialize_for_routing_replay("backward")
            assert torch.equal(values.long(), work.expected[number][:, layer])


def test_microbatches_given_layer_by_layer(work: Work) -> None:
    layers = [[shard[:, layer] for layer in range(LAYERS - 1)] for shard in work.shards]
    with MicrobatchLoader(layers) as loader:
        work.train(loader)
    with pytest.raises(tracefile.RoutedExpertsShapeError, match="microbatch 1 are not of the same rows"):
        MicrobatchLoader([layers[0], [layers[1][0], layers[2][1]]])
    with pytest.raises(tracefile.RoutedExpertsShapeError, match="microbatch 0 has shape"):
        MicrobatchLoader([work.shards[0][:, 0]])
    with pytest.raises(tracefile.OptionError, match="microbatch 0 is Tensor"):
        MicrobatchLoader([work.expected[0]])  # type: ignore[list-item]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_damage_reaches_who_asks_for_it(work: Work, prefetch: int) -> None:
    segment = work.shards[3].selection.rows.segments()[0].id
    shard = f"{work.path}/segments/{segment}/c/0/0/0"
    with open(shard, "rb") as file:
        sound = file.read()
    damaged = bytearray(sound)
    for position in range(100, len(sound) - 500, 100):  # in every chunk; the index at the end stays
        damaged[position] ^= 8
    with open(shard, "r+b") as file:
        file.write(damaged)
    with MicrobatchLoader(work.shards, prefetch=prefetch) as loader:
        for microbatch in loader:
            if microbatch.number == 3:
                with pytest.raises(tracefile.ChunkDamagedError, match=segment):
                    [microbatch.layer(layer) for layer in range(LAYERS - 1)]
            else:
                for layer in range(LAYERS - 1):
                    assert torch.equal(microbatch.layer(layer), work.expected[microbatch.number][:, layer])
        with open(shard, "r+b") as file:
            file.write(sound)
        loader.begin_pass()
        work.train(loader)


def test_missing_rows_reach_who_asks_for_them(path: str) -> None:
    with tracefile.TraceWriter(path, num_layers=2, top_k=2, num_experts=8) as writer:
        experts = writer.append("a", np.full((4, 2, 2), -1))
    with MicrobatchLoader([experts]) as loader, pytest.raises(tracefile.MissingRowsError):
        loader[0].layer(0)
    with MicrobatchLoader([experts.filled("minus_one")]) as loader:
        assert loader[0].layer(0).tolist() == [[-1, -1]] * 4


def test_the_thread_ends_with_its_loader(work: Work) -> None:
    loader = MicrobatchLoader(work.shards)
    loader.begin_pass()
    assert len(read_ahead_threads()) == 1
    handle = loader[0][0]
    del loader
    gc.collect()
    assert torch.equal(handle.long(), work.expected[0][:, 0])
    assert read_ahead_threads(), "a handle keeps its loader"
    del handle
    gc.collect()
    deadline = time.monotonic() + 10
    while read_ahead_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not read_ahead_threads()


def test_closing(work: Work) -> None:
    loader = MicrobatchLoader(work.shards)
    microbatch = loader[0]
    loader.begin_pass()
    microbatch.layer(0)
    with pytest.raises(RuntimeError, match="of the caller"), loader:
        raise RuntimeError("of the caller")
    assert not read_ahead_threads()
    loader.close()
    with pytest.raises(tracefile.ClosedError):
        microbatch.layer(0)
    with pytest.raises(tracefile.ClosedError):
        loader.begin_pass()
    assert "closed" in repr(loader)


def test_fork_in_the_middle_of_reading(work: Work) -> None:
    with MicrobatchLoader(work.shards, prefetch=5) as loader:
        for _ in range(5):
            loader.begin_pass()
            loader[0].layer(0)

            def child() -> Any:
                assert held_ahead().active_bytes == 0
                work.train(loader)
                loader.begin_pass("forward")
                total = sum(int(microbatch.layer(2).sum()) for microbatch in loader)
                loader.close()
                return total

            assert in_fork(child) == sum(int(expected[:, 2].sum()) for expected in work.expected)
            work.train(loader)


def test_a_loader_travels(work: Work) -> None:
    loader = MicrobatchLoader(work.shards, prefetch=1, dtype=torch.int32, warmup=2)
    with pickle.loads(pickle.dumps(loader)) as copy:
        assert len(copy) == 6
        assert copy[1].layer(0).dtype == torch.int32
        assert torch.equal(copy[1].layer(0).long(), work.expected[1][:, 0])


def test_several_threads_at_once(work: Work) -> None:
    wrong: list[Any] = []

    def use(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(150):
                number, layer = int(rng.integers(6)), int(rng.integers(LAYERS - 1))
                stage = ("forward", "backward")[rng.integers(2)]
                if not torch.equal(loader[number].layer(layer, stage), work.expected[number][:, layer]):
                    wrong.append((number, layer))
        except BaseException as error:
            wrong.append(error)

    budget = 3 * work.layer_bytes()
    with MicrobatchLoader(work.shards, prefetch=2, budget_bytes=budget) as loader:
        threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        assert loader.stats().peak_bytes <= budget


@pytest.fixture(scope="module")
def shared_work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    return Work(str(tmp_path_factory.mktemp("loader") / "t.trace"), 5, rows=70)


@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_of_use(shared_work: Work, data: st.DataObject) -> None:
    """Whatever the schedule says and whatever is asked for: right values, within the budget."""
    work = shared_work
    budget = data.draw(st.integers(1, 12)) * work.layer_bytes()
    steps = st.builds(Step, st.sampled_from(["forward", "backward"]), st.integers(0, 4))
    schedule = data.draw(st.none() | st.lists(steps, max_size=12))
    prefetch = data.draw(st.integers(0, 4))
    with MicrobatchLoader(work.shards, prefetch=prefetch, budget_bytes=budget, schedule=schedule) as loader:
        for _ in range(data.draw(st.integers(1, 25))):
            action = data.draw(st.integers(0, 9))
            number, layer = data.draw(st.integers(0, 4)), data.draw(st.integers(0, LAYERS - 2))
            if action == 0:
                loader.begin_pass(data.draw(st.sampled_from(["forward", "backward"])))
            elif action == 1:
                loader[number].release()
            elif action == 2:
                assert torch.equal(loader[number][layer].long(), work.expected[number][:, layer])
            else:
                values = loader[number].layer(layer, data.draw(st.sampled_from(["forward", "backward"])))
                assert torch.equal(values, work.expected[number][:, layer])
            assert loader.stats().active_bytes <= budget
        assert loader.stats().peak_bytes <= budget


_INTERRUPTED = """
import os, signal, sys, threading, time, torch, tracefile
from tracefile import read
trace = tracefile.open(sys.argv[1])
shards = [trace[name] for name in trace]
decode = read.decode
def slow(*arguments):  # a file system that hangs for a while
    os.write(1, b"reading\\n")  # whole: two threads may come here at once
    time.sleep(float(sys.argv[3]))
    return decode(*arguments)
read.decode = slow
loader = tracefile.MicrobatchLoader(shards, prefetch=int(sys.argv[2]))
try:
    with loader:
        for microbatch in loader:
            for layer in range(len(microbatch)):
                microbatch.layer(layer)
except KeyboardInterrupt:
    left = [t.name for t in threading.enumerate() if t.name == "tracefile-read-ahead"]
    print("interrupted", left, loader.stats().active_bytes, flush=True)
"""


@pytest.mark.parametrize("prefetch", [0, 2])
def test_keyboard_interrupt(work: Work, prefetch: int) -> None:
    command = [sys.executable, "-c", _INTERRUPTED, work.path, str(prefetch), "0.5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        os.kill(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert output.splitlines()[-1] == "interrupted [] 0", errors
    assert process.returncode == 0


def test_schedules() -> None:
    for microbatches in range(6):
        for warmup in range(8):
            steps = one_forward_one_backward(microbatches, warmup)
            for stage in ("forward", "backward"):
                assert [s.microbatch for s in steps if s.stage == stage] == list(range(microbatches))
            ahead = [sum(1 if s.stage == "forward" else -1 for s in steps[: i + 1]) for i in range(len(steps))]
            assert min(ahead, default=0) >= 0
            assert max(ahead, default=0) <= warmup + 1
    with pytest.raises(tracefile.OptionError, match="warmup"):
        one_forward_one_backward(3, -1)


def test_order_of_units() -> None:
    order = UnitOrder([Step("forward", 0), Step("backward", 0), Step("forward", 1)], [2, 1])
    assert order.units == [(0, 0), (0, 1), (0, 1), (0, 0), (1, 0)]
    assert order.find((0, 0), None, 0) == 0
    assert order.find((0, 0), "backward", 0) == 3
    assert order.find((0, 0), "forward", 1) is None
    assert order.next_use((0, 0), 4) == len(order) == 5
    assert list(order.ahead(1, 1)) == [1, 2, 3]
    assert list(order.ahead(5, 1)) == []
    with pytest.raises(tracefile.OptionError, match="microbatch 2"):
        UnitOrder([Step("forward", 2)], [1, 1])
    with pytest.raises(tracefile.OptionError, match="stage"):
        UnitOrder([Step("sideways", 0)], [1])  # type: ignore[arg-type]


@pytest.mark.parametrize("option", [{"prefetch": -1}, {"prefetch": 1.5}, {"budget_bytes": -1}, {"warmup": -2}])
def test_options(work: Work, option: dict[str, Any]) -> None:
    with pytest.raises(tracefile.OptionError, match=next(iter(option))):
        MicrobatchLoader(work.shards, **option)
    with pytest.raises(tracefile.OptionError, match="stage"):
        MicrobatchLoader(work.shards).begin_pass("record")


def test_no_microbatches_and_no_rows(path: str) -> None:
    with MicrobatchLoader([]) as loader:
        assert list(loader) == []
    with tracefile.TraceWriter(path, num_layers=2, top_k=2, num_experts=8) as writer:
        empty = writer.append("a", np.zeros((0, 2, 2), int))
    with MicrobatchLoader([empty]) as loader:
        assert [microbatch.layer(1).shape for microbatch in loader] == [(0, 2)]
