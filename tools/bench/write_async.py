"""How long an event loop stalls while 64 coroutines append samples, and how much is written meanwhile.

    .venv/bin/python tools/bench/write_async.py

Each coroutine appends samples of about 32k tokens, one after another. Beside them something falls due on the loop
every millisecond; how late the loop gets to it is the stall, so a loop that stands still for a second counts a
thousand times. On a machine that does other things too, part of that is waiting for a core; one column goes
without it. "nothing" is the loop without appends: what its timers cost. In ``to_thread`` each coroutine calls the
synchronous ``append`` through asyncio's own pool. What was written is read back and compared.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, os.path.dirname(__file__))
from workload import SHAPES, ModelShape, synthetic_routing

import tracefile

TOKENS = 32_749
TICK = 0.001
console = Console(width=120)


@dataclass
class Seen:
    """What was measured of one way to append: stalls in seconds, and bytes per second of each round.

    ``own`` are the stalls without what the loop's thread, ready to run, waited for a core.
    """

    stalls: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)


def seconds_queued() -> float:
    """How long this thread has been ready to run, and waited for a core, so far."""
    with open(f"/proc/self/task/{threading.get_native_id()}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9


class Heartbeat:
    """Something that falls due every ``TICK``; remembers how late the loop was for it."""

    def __init__(self) -> None:
        self.stalls: list[float] = []
        self.own: list[float] = []

    async def __aenter__(self) -> Heartbeat:
        self._task = asyncio.create_task(self._beat())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._note()

    def _note(self) -> None:
        now, queued = time.perf_counter(), seconds_queued()
        while self._due <= now:
            self.stalls.append(now - self._due)
            self.own.append(max(0.0, now - self._due - (queued - self._queued)))
            self._due += TICK
        self._queued = queued

    async def _beat(self) -> None:
        self._due, self._queued = time.perf_counter() + TICK, seconds_queued()
        while True:
            await asyncio.sleep(self._due - time.perf_counter())
            self._note()


async def append(writer: tracefile.TraceWriter, sample: str, ids: np.ndarray[Any, Any]) -> Any:
    return writer.append(sample, ids)


async def append_async(writer: tracefile.TraceWriter, sample: str, ids: np.ndarray[Any, Any]) -> Any:
    return await writer.append_async(sample, ids)


async def append_to_thread(writer: tracefile.TraceWriter, sample: str, ids: np.ndarray[Any, Any]) -> Any:
    return await asyncio.to_thread(writer.append, sample, ids)


async def nothing(writer: tracefile.TraceWriter, sample: str, ids: np.ndarray[Any, Any]) -> Any:
    await asyncio.sleep(0.1)


WAYS: dict[str, tuple[Any, int]] = {
    "nothing": (nothing, 1),
    "append_async": (append_async, 1),
    "append_async, 2 threads": (append_async, 2),
    "to_thread(append)": (append_to_thread, 1),
    "append": (append, 1),
}


async def rollout(writer: tracefile.TraceWriter, way: Any, arrays: list[np.ndarray[Any, Any]], turns: int) -> Seen:
    async def coroutine(number: int, ids: np.ndarray[Any, Any]) -> None:
        for turn in range(turns):
            await asyncio.sleep(0)  # as if waiting for an engine
            ids[0, :, 0] = turn  # no two samples begin alike, so no rows are shared
            await way(writer, f"{number}/{turn}", ids)

    began = time.perf_counter()
    async with Heartbeat() as heartbeat:
        await asyncio.gather(*(coroutine(number, ids) for number, ids in enumerate(arrays)))
    elapsed = time.perf_counter() - began
    return Seen(heartbeat.stalls, heartbeat.own, [turns * sum(ids.nbytes for ids in arrays) / elapsed])


def check(path: str, arrays: list[np.ndarray[Any, Any]], turns: int) -> None:
    trace = tracefile.open(path)
    assert len(trace) == turns * len(arrays)
    for number in range(0, len(arrays), 7):
        ids = arrays[number].copy()
        ids[0, :, 0] = turn = number % turns
        assert np.array_equal(trace[f"{number}/{turn}"].numpy(), ids)


def bench(directory: str, shape: ModelShape, options: argparse.Namespace) -> None:
    made = [synthetic_routing(shape, TOKENS, seed) for seed in range(4)]
    arrays = [made[number % 4].copy() for number in range(options.coroutines)]
    for number, ids in enumerate(arrays):
        ids[0, :, 1] = number
    seen = {name: Seen() for name in WAYS}
    for _ in range(options.rounds):
        for name, (way, threads) in WAYS.items():
            path = os.path.join(directory, "t.trace")
            with tracefile.TraceWriter(path, **shape.options, async_threads=threads) as writer:
                once = asyncio.run(rollout(writer, way, arrays, options.turns))
            if way is not nothing:
                check(path, arrays, options.turns)
            shutil.rmtree(path)
            seen[name].stalls += once.stalls
            seen[name].own += once.own
            seen[name].speeds += once.speeds
    title = f"{shape}: {options.coroutines} coroutines x {options.turns} samples of {arrays[0].nbytes / 1e6:.0f} MB"
    table = Table(title=title, title_justify="left")
    for column in ("", "stall: p50", "p99", "p99 on a free core", "longest", "GB/s of input", "of append"):
        table.add_column(column, justify="right" if column else "left")
    for name, one in seen.items():
        median, most, longest = np.quantile(one.stalls, (0.5, 0.99, 1.0))
        stalls = [f"{1e3 * value:.1f} ms" for value in (median, most, np.quantile(one.own, 0.99), longest)]
        ratio = statistics.median(a / b for a, b in zip(one.speeds, seen["append"].speeds, strict=True))
        idle = WAYS[name][0] is nothing
        speed = ("", "") if idle else (f"{statistics.median(one.speeds) / 1e9:.2f}", f"{ratio:.2f}")
        table.add_row(name, *stalls, *speed)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="glm", help="model shape (default glm)")
    parser.add_argument("--coroutines", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4, help="samples that each coroutine appends (default 4)")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    options = parser.parse_args()
    torch.set_num_threads(1)
    directory = tempfile.mkdtemp()
    try:
        bench(directory, SHAPES[options.shape], options)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
