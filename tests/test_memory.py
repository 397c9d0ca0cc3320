"""Host memory: a rank's heap is bounded by its own shard, a writer's by one segment, whatever the payload.

``RssAnon`` counts what a process has allocated; file pages that the kernel could drop are not in it.
"""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from support import run_python

import tracefile

LAYERS, TOP_K, EXPERTS, ROWS = 47, 4, 64, 4000

# Ranks are forked from a process that has imported everything; they inherit its memory, the same for all.
_RANKS = """
import json, os, sys, torch
torch.set_num_threads(1)
import tracefile
path, samples = sys.argv[1], int(sys.argv[2])

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

def shard(parts, cp_rank, tp_rank):
    local = []
    for part in parts:
        half = -(-len(part) // 4)
        part = torch.nn.functional.pad(part, (0, 0, 0, 0, 0, 4 * half - len(part)))
        local += [part[half * cp_rank : half * (cp_rank + 1)], part[half * (3 - cp_rank) : half * (4 - cp_rank)]]
    buffer = torch.cat(local)
    size = -(-len(buffer) // 4)
    return buffer[size * tp_rank : size * (tp_rank + 1)]

def rank(number):
    trace = tracefile.open(path)
    names = list(trace)[:samples]
    peak = total = 0
    for first in range(0, samples, 4):
        local = shard([trace[name] for name in names[first : first + 4]], number // 4, number % 4)
        for layer in range(local.shape[1]):
            total += int(local[:, layer].materialize().sum())
        peak = max(peak, anonymous())
    os.write(1, json.dumps([peak, total]).encode() + b"\\n")  # whole: ranks share the pipe

for first in range(0, 8, 2):
    children = []
    for number in (first, first + 1):
        child = os.fork()
        if child == 0:
            rank(number)
            os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def trace_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("memory") / "t.trace")
    rng = np.random.default_rng(0)
    with tracefile.TraceWriter(path, num_layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS) as writer:
        for number in range(64):
            writer.append(f"s{number:03}", rng.integers(0, EXPERTS, (ROWS + number, LAYERS, TOP_K), dtype=np.uint8))
    return path


def run_ranks(path: str, samples: int) -> list[tuple[int, int]]:
    """Eight rank processes, two at a time: KiB of peak RssAnon and a sum of the values, of each."""
    output = run_python(_RANKS, path, str(samples)).stdout
    results = [tuple(json.loads(line)) for line in output.splitlines()]
    assert len(results) == 8
    return results


def test_peak_memory_does_not_grow_with_the_samples(trace_path: str) -> None:
    few, many = run_ranks(trace_path, 8), run_ranks(trace_path, 64)
    payload_kib = 64 * ROWS * LAYERS * TOP_K * 4 // 1024
    assert payload_kib > 150 * 1024
    peaks = [max(peak for peak, _ in ranks) for ranks in (few, many)]
    assert abs(peaks[1] - peaks[0]) < 8 * 1024, f"KiB of RssAnon with 8 and with 64 samples: {peaks}"
    trace = tracefile.open(trace_path)
    for samples, ranks in ((8, few), (64, many)):
        total = sum(int(trace[name].materialize().sum()) for name in list(trace)[:samples])
        assert sum(rank[1] for rank in ranks) == total


_LIMITED = """
import resource, sys, torch, tracefile
torch.set_num_threads(1)
trace = tracefile.open(sys.argv[1])
trace["s000"].split(8)[0].materialize()  # whatever starts with the first operation and read has started
with open("/proc/self/status") as status:
    held = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + 64 * 2**20,) * 2)
total = 0
for experts in trace.values():
    for rows in experts.split(500):
        total += int(rows.materialize(dtype=torch.uint8).sum())
print(total)
try:
    held = [experts.materialize() for experts in trace.values()]
except (RuntimeError, MemoryError):
    print("the limit holds")
"""


@pytest.mark.parametrize("source", ["mmap", "pread"])
def test_reading_under_a_kernel_limit_far_below_the_payload(trace_path: str, source: str) -> None:
    code = _LIMITED.replace("open(sys.argv[1])", f"open(sys.argv[1], source={source!r})")
    result = subprocess.run([sys.executable, "-c", code, trace_path], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    total, limit = result.stdout.splitlines()
    trace = tracefile.open(trace_path)
    assert int(total) == sum(int(experts.materialize(dtype=None).sum()) for experts in trace.values())
    assert limit == "the limit holds"


_WRITER = """
import sys, numpy as np, torch, tracefile

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

array = np.random.default_rng(0).integers(0, 64, (4000, 47, 4), dtype=np.int32)
handles, sizes = [], []
with tracefile.TraceWriter(sys.argv[1], num_layers=47, top_k=4, num_experts=64) as writer:
    for number in range(120):
        handles.append(writer.append(f"s{number}", array))
        sizes.append(anonymous())
print(sizes[-1] - sizes[10])
"""


def test_a_writers_memory_is_bounded(path: str) -> None:
    result = subprocess.run([sys.executable, "-c", _WRITER, path], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 8 * 1024, "KiB more after 110 more appends of 3 MB"


def test_retained_microbatches_hold_only_their_own_rows(path: str) -> None:
    import torch

    with tracefile.TraceWriter(path, num_layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS) as writer:
        experts = writer.append("a", np.zeros((64, LAYERS, TOP_K), np.uint8))
    retained = []
    for seed in range(20):
        padding = torch.randint(0, EXPERTS, (20_000, LAYERS, TOP_K), generator=torch.Generator().manual_seed(seed))
        retained.append(torch.cat([experts, padding])[32:96])
    del padding
    assert sum(local.selection.rows.padding_bytes for local in retained) == 20 * 32 * LAYERS * TOP_K


_LOADED = """
import json, os, sys, torch
torch.set_num_threads(1)
import tracefile
path, samples, prefetch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

trace = tracefile.open(path)
names = list(trace)[:samples]
spec = tracefile.ShardSpec(cp_size=2, cp_rank=0, tp_size=4, tp_rank=1)
shards = [spec.apply([trace[name]], [len(trace[name])]) for name in names]
peak = total = 0
with tracefile.MicrobatchLoader(shards, prefetch=prefetch, budget_bytes=2**20) as loader:
    for release_stage in ("forward", "backward"):
        loader.begin_pass(release_stage)
        for microbatch in loader:
            for layer in range(len(microbatch)):
                total += int(microbatch.layer(layer).sum())
            if release_stage == "backward":
                for layer in reversed(range(len(microbatch))):
                    total += int(microbatch.layer(layer, "backward").sum())
            peak = max(peak, anonymous())
    held = loader.stats()
print(json.dumps([peak, total, held.peak_bytes, held.peak_chunks]), flush=True)
"""


@pytest.mark.parametrize("prefetch", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_loader_holds_as_much_for_64_microbatches_as_for_8(trace_path: str, prefetch: int) -> None:
    few, many = (json.loads(run_python(_LOADED, trace_path, str(n), str(prefetch)).stdout) for n in (8, 64))
    assert abs(many[0] - few[0]) < 8 * 1024, f"KiB of RssAnon with 8 and with 64 microbatches: {few[0]}, {many[0]}"
    assert max(few[2], many[2]) <= 2**20
    # At most three microbatches, in four groups of layers, each in at most three chunks along rows.
    assert max(few[3], many[3]) <= 3 * 4 * 3
    trace = tracefile.open(trace_path)
    spec = tracefile.ShardSpec(cp_size=2, cp_rank=0, tp_size=4, tp_rank=1)
    for samples, (_, total, _, _) in ((8, few), (64, many)):
        shards = [spec.apply([trace[name]], [len(trace[name])]) for name in list(trace)[:samples]]
        assert total == 3 * sum(int(shard.materialize().sum()) for shard in shards)
