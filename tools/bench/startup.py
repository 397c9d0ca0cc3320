"""What ``import tracefile`` adds to importing torch and numcodecs, and what opening a trace takes.

    .venv/bin/python tools/bench/startup.py

Each import runs in a fresh interpreter, with bytecode compiled beforehand as an installation does. Opening is
measured on 1,536 segments of one sample, on the same after compaction, and on one segment of 10,000 samples; it
includes listing them.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

import tracefile
from tracefile.compact import compact_trace

_IMPORT = """
import sys, time
import numpy, torch, numcodecs.blosc
start = time.perf_counter()
import tracefile
print(time.perf_counter() - start, "zarr" in sys.modules)
"""


def import_seconds(rounds: int = 7) -> float:
    """The median over fresh interpreters."""
    seconds = []
    with tempfile.TemporaryDirectory() as cache:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = cache
        for _ in range(rounds + 1):  # the first one compiles
            result = subprocess.run(
                [sys.executable, "-c", _IMPORT], env=environment, capture_output=True, text=True, check=True
            )
            elapsed, zarr = result.stdout.split()
            assert zarr == "False", "importing tracefile imported zarr"
            seconds.append(float(elapsed))
    return statistics.median(seconds[1:])


def open_seconds(path: str, samples: int) -> float:
    """The median of opening and listing, metadata in the page cache."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        with tracefile.open(path) as trace:
            count = sum(1 for _ in trace)
        seconds.append(time.perf_counter() - start)
        assert count == samples
    return statistics.median(seconds)


def main() -> None:
    print(f"import tracefile, after torch and numcodecs: {import_seconds() * 1e3:.0f} ms")
    ids = np.zeros((8, 47, 4), np.uint8)
    with tempfile.TemporaryDirectory() as directory:
        many, one = os.path.join(directory, "many.trace"), os.path.join(directory, "one.trace")
        with tracefile.TraceWriter(many, num_layers=47, top_k=4, num_experts=64) as writer:
            for number in range(1536):
                writer.append(f"prompt-{number // 16}/{number % 16}", ids)
        with tracefile.TraceWriter(one, num_layers=47, top_k=4, num_experts=64) as writer:
            writer.append_many((f"prompt-{number // 16}/{number % 16}", ids) for number in range(10_000))
        print(f"open 1,536 segments of one sample: {open_seconds(many, 1536) * 1e3:.0f} ms")
        start = time.perf_counter()
        report = compact_trace(many, min_age=0, settle=0)
        seconds = time.perf_counter() - start
        print(
            f"open the same, compacted in {seconds:.1f} s from {report.before.files:,} files to {report.after.files}:"
            f" {open_seconds(many, 1536) * 1e3:.0f} ms"
        )
        print(f"open one segment of 10,000 samples: {open_seconds(one, 10_000) * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
