"""How soon a sample is seen by another process: from append returning there to the sample being yielded here.

    .venv/bin/python tools/bench/follow.py

A writer process appends samples of 1,024 tokens (GLM-4.7-Flash) at random intervals, into a trace that has
``--segments`` segments already; two followers see the same commits, one with inotify (the extra ``follow``) and one
that polls. Each notes when it was given a sample, by the clock that the processes of a machine share, and then reads
it; every sample must come once and hold what was written. Below zero is before append returned, which is some time
after the segment became visible. The last column is the processor time that a follower takes
while nothing happens.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Client, Listener
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, os.path.dirname(__file__))
from workload import GLM, synthetic_routing

import tracefile

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

TOKENS = 1024
IDLE_SECONDS = 3.0
WAYS = ("inotify", "polling")
console = Console(width=110)


def routing() -> np.ndarray[Any, Any]:
    return synthetic_routing(GLM, TOKENS, 0)


def rows_of(base: np.ndarray[Any, Any], number: int) -> np.ndarray[Any, Any]:
    """Ids that differ from sample to sample."""
    return (np.roll(base, number, axis=0) + number) % GLM.num_experts


def follow(way: str, path: str, address: str, samples: int) -> None:
    """A follower process: sends what it cost to be idle, then a list of (sample, when, right)."""
    torch.set_num_threads(1)
    if way == "polling":
        sys.modules["inotify_simple"] = None  # type: ignore[assignment]
    else:
        importlib.import_module("inotify_simple")  # without it, this would measure polling
    with Client(address) as pipe, tracefile.open(path) as trace:
        base = routing()
        trace["warm"].numpy()
        list(trace.follow(timeout=0.1))
        used = time.process_time()
        list(trace.follow(timeout=IDLE_SECONDS))
        pipe.send((way, (time.process_time() - used) / IDLE_SECONDS))
        seen = []
        for sample, experts in trace.follow(timeout=60, stop=lambda: len(seen) == samples):
            now = time.monotonic_ns()
            seen.append((sample, now, np.array_equal(experts.numpy(), rows_of(base, int(sample)))))
        pipe.send(seen)


def run(directory: str, samples: int, segments: int, longest: float) -> None:
    path, address = os.path.join(directory, "t.trace"), os.path.join(directory, "socket")
    returned: dict[str, int] = {}
    processes: list[subprocess.Popen[bytes]] = []
    with tracefile.TraceWriter(path, **GLM.options) as writer, Listener(address) as listener:
        for number in range(segments - 1):
            writer.append(f"before-{number}", np.zeros((1, GLM.num_layers, GLM.top_k), np.uint8))
        base = routing()
        writer.append("warm", base)
        pipes: dict[str, Connection] = {}
        idle: dict[str, float] = {}
        for way in WAYS:
            command = [sys.executable, __file__, "--follower", way, path, address, "--samples", str(samples)]
            processes.append(subprocess.Popen(command))
            pipe: Any = listener.accept()
            name, idle[way] = pipe.recv()
            pipes[name] = pipe
        time.sleep(0.5)  # until both have begun to wait
        rng = random.Random(0)
        for number in range(samples):
            time.sleep(rng.uniform(0, longest))
            rows = rows_of(base, number)
            writer.append(str(number), rows)
            returned[str(number)] = time.monotonic_ns()
        table = Table(
            title=f"{samples} samples at intervals of 0 to {longest * 1e3:.0f} ms, {segments:,} segments there",
            title_justify="left",
            title_style="bold",
        )
        for column in ("", "median", "90 %", "99 %", "most", "idle"):
            table.add_column(column, justify="right" if column else "left")
        for way in WAYS:
            seen = pipes[way].recv()
            if [sample for sample, _, _ in seen] != list(returned):
                raise AssertionError(f"{way}: not every sample came once, in order")
            if not all(right for _, _, right in seen):
                raise AssertionError(f"{way}: a sample held other ids than were written")
            latencies = sorted((when - returned[sample]) / 1e6 for sample, when, _ in seen)
            cuts = statistics.quantiles(latencies, n=100, method="inclusive")
            row = (cuts[49], cuts[89], cuts[98], latencies[-1])
            table.add_row(way, *(f"{value:.1f} ms" for value in row), f"{idle[way]:.1%} of a core")
    for process in processes:
        if process.wait(timeout=30):
            raise AssertionError("a follower failed")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--segments", type=int, action="append", help="default: 1 and 1536")
    parser.add_argument("--longest", type=float, default=0.2, help="seconds between appends, at most")
    parser.add_argument("--follower", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.follower:
        follow(*options.follower, options.samples)
        return
    torch.set_num_threads(1)
    for segments in options.segments or (1, 1536):
        with tempfile.TemporaryDirectory() as directory:
            run(directory, options.samples, segments, options.longest)


if __name__ == "__main__":
    main()
