"""What several test files need: synthetic routing, and work done in other processes."""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import time
import traceback
import warnings
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

import tracefile

if TYPE_CHECKING:
    from collections.abc import Callable


class Shape(NamedTuple):
    name: str
    num_layers: int
    top_k: int
    num_experts: int


#: The model shapes that rollouts come in.
MODEL_SHAPES = [
    Shape("GLM-4.7-Flash", 47, 4, 64),
    Shape("Qwen3-30B-A3B", 48, 8, 128),
    Shape("Qwen3-235B-A22B", 94, 8, 128),
    Shape("Qwen3.5-35B-A3B", 40, 8, 256),
    Shape("DeepSeek-V3", 61, 8, 256),
    Shape("Moonlight", 26, 6, 64),
    Shape("Kimi-K2", 61, 8, 384),
    Shape("Qwen3-Next", 48, 10, 512),
    Shape("Nemotron", 52, 22, 512),
    Shape("just-over-uint8", 3, 2, 257),
]


def random_routing(
    rng: np.random.Generator, rows: int, num_layers: int, top_k: int, num_experts: int, dtype: Any = np.int32
) -> np.ndarray[Any, Any]:
    """``[rows, num_layers, top_k]`` ids; the largest id is among them, experts of one token and layer differ."""
    first = rng.integers(0, num_experts, (rows, num_layers, 1))
    step = rng.integers(1, max(2, num_experts // top_k), (rows, num_layers, 1))
    ids = (first + np.arange(top_k) * step) % num_experts
    if ids.size:
        ids[-1, -1, -1] = num_experts - 1
    return ids.astype(dtype)


def run_python(code: str, *arguments: str, check: bool = True, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter; its output is captured."""
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=100, **kwargs
    )
    if check and result.returncode:
        raise AssertionError(f"exit {result.returncode}\n{result.stdout}\n{result.stderr}")
    return result


def ids_of(sample: str, rows: int, num_layers: int, top_k: int, num_experts: int) -> np.ndarray[Any, Any]:
    """Routing that follows from the sample's id, so that any process can tell what a sample must hold."""
    rng = np.random.default_rng(zlib.crc32(sample.encode()))
    return random_routing(rng, rows, num_layers, top_k, num_experts)


def fork(work: Callable[[], object]) -> int:
    """Start ``work`` in a forked child, which exits with 0 once it returns and with 1 if it raises.

    The child's torch uses one thread, as in DataLoader's workers: OpenMP does not survive a fork.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn where the parent has threads
        pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        torch.set_num_threads(1)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def join(*pids: int, timeout: float = 60) -> list[int]:
    """Wait for forked children: their exit codes, negative for a signal. Kills those that outlive ``timeout``."""
    deadline = time.monotonic() + timeout
    codes = []
    for pid in pids:
        done = status = 0
        while not done:
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done and time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                done, status = os.waitpid(pid, 0)
            elif not done:
                time.sleep(0.002)
        codes.append(os.waitstatus_to_exitcode(status))
    return codes


def in_fork(work: Callable[[], Any], timeout: float = 60) -> Any:
    """What ``work`` returns in a forked child, which gets ``timeout`` seconds."""
    reader, writer = os.pipe()

    def report() -> None:
        os.close(reader)
        with open(writer, "wb") as pipe:
            pickle.dump(work(), pipe)

    pid = fork(report)
    os.close(writer)
    with open(reader, "rb") as pipe:
        ready, _, _ = select.select([pipe], [], [], timeout)
        answer = pipe.read() if ready else b""
    assert join(pid, timeout=5 if ready else 0) == [0]
    return pickle.loads(answer)


def tree(directory: str) -> dict[str, bytes]:
    """Every file below ``directory`` by its relative name, with its bytes; directories end in a slash."""
    found: dict[str, bytes] = {}
    for parent, directories, files in os.walk(directory):
        for name in directories:
            found[os.path.relpath(os.path.join(parent, name), directory) + "/"] = b""
        for name in files:
            with open(os.path.join(parent, name), "rb") as file:
                found[os.path.relpath(file.name, directory)] = file.read()
    return found


class Faults:
    """Does something at the ``at``-th call that changes the file system below a directory.

    Counts what Python audits, and writes and syncs. For a forked child only: an audit hook stays for the life of a
    process.
    """

    _EVENTS = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link"})

    def __init__(self, below: str, act: Callable[[], None]) -> None:
        self._below = below
        self._act = act
        self._at = -1
        self._count = 0
        self._met: list[str] = []
        sys.addaudithook(self._audit)
        for name in ("writev", "write", "fsync"):
            setattr(os, name, self._guarded(getattr(os, name), name))

    def arm(self, at: int) -> None:
        self._at, self._count, self._met = at, 0, []

    def disarm(self) -> list[str]:
        """Which call it was, if it came to that."""
        self._at = -1
        return self._met

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        reading = event == "open" and arguments[1] in ("r", "rb")
        if event in self._EVENTS and not reading and str(arguments[0]).startswith(self._below):
            self._step(event)

    def _guarded(self, function: Any, name: str) -> Any:
        def guarded(*arguments: Any) -> Any:
            self._step(name)
            return function(*arguments)

        return guarded

    def _step(self, what: str) -> None:
        if self._at >= 0:
            self._count += 1
            if self._count == self._at:
                self._met.append(what)
                self._act()


def write_long_sample(path: str) -> np.ndarray[Any, Any]:
    """A trace of one sample, "long": 188 MB as uint8, 752 MB as int32. Returns the block that it repeats 200 times."""
    block = np.random.default_rng(1).integers(0, 64, (5000, 47, 4), dtype=np.uint8)
    rows = np.broadcast_to(block, (200, *block.shape)).reshape(-1, 47, 4)
    with tracefile.TraceWriter(path, num_layers=47, top_k=4, num_experts=64, codec="none") as writer:
        writer.append("long", rows)
    return block
