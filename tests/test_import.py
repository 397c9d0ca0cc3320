"""What ``import tracefile`` costs: little more than torch and numcodecs, and no zarr."""

from __future__ import annotations

import statistics

from support import run_python


def test_import_is_cheap() -> None:
    base = "import numpy, torch, numcodecs.blosc"
    measure = f"{base}; import time; t = time.perf_counter(); import tracefile; print(time.perf_counter() - t)"
    seconds = [float(run_python(measure).stdout) for _ in range(5)]
    # What tracefile adds once torch and numcodecs are there; 50 ms are promised on a quiet machine.
    assert statistics.median(seconds) < 0.25
    loaded = (
        "import sys, tracefile; print(sorted({'zarr', 'typer', 'rich', 'matplotlib', 'asyncio'} & set(sys.modules)))"
    )
    assert "zarr" not in run_python(loaded).stdout
