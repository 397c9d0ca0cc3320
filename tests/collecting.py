"""Small traces to collect garbage in, and what must hold of them afterwards."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from support import ids_of

import tracefile
from tracefile.collect import collect
from tracefile.verify import verify_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from tracefile.gc_result import GcResult

SMALL = {"num_layers": 4, "top_k": 2, "num_experts": 64}
DAY = 86_400.0


def small_writer(path: str, **options: Any) -> tracefile.TraceWriter:
    return tracefile.TraceWriter(path, **(SMALL | {"rows_per_chunk": 32} | options))


def small_ids(name: str, rows: int = 40) -> np.ndarray[Any, Any]:
    return ids_of(name, rows, **SMALL)


def collect_now(path: str, **options: Any) -> GcResult:
    """Reclaim at once."""
    return collect(path, **({"grace": 0, "settle": 0} | options))


def check_samples(path: str, samples: dict[str, Any]) -> None:
    """A fresh reader finds exactly these samples, and nothing is damaged."""
    with tracefile.open(path) as trace:
        assert set(trace) == set(samples)
        for sample, ids in samples.items():
            np.testing.assert_array_equal(trace[sample].numpy(), ids, err_msg=sample)
    assert list(verify_trace(path)) == []


def trace_of_everything(path: str) -> dict[str, Any]:
    """A trace with something of everything; what its samples hold."""
    prompt = small_ids("prompt", 300)
    with small_writer(path) as writer:
        for name in ("a", "b"):
            writer.append(name, np.concatenate([prompt, small_ids(name, 9)]))
        writer.append_many([("m", small_ids("m")), ("n", small_ids("n"))])
        writer.append("m", small_ids("m2"))
        writer.append("d", small_ids("d"))
        writer.append("turns", small_ids("turn 1"))
        writer.append("turns", small_ids("turn 2"), start=20)
        writer.append("n", small_ids("n2"))
    tracefile.open(path).delete_samples(["a", "d"])
    return {
        "b": np.concatenate([prompt, small_ids("b", 9)]),
        "m": small_ids("m2"),
        "n": small_ids("n2"),
        "turns": np.concatenate([small_ids("turn 1")[:20], small_ids("turn 2")]),
    }


def segment_of(experts: tracefile.LazyRoutedExperts) -> str:
    (segment,) = experts.selection.rows.segments()
    return segment.id


def collect_later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """For ``collect``, it is later."""
    now = time.time
    monkeypatch.setattr("tracefile.collect.time.time", lambda: now() + seconds)


#: How a writer comes to name rows that are there: ``(writer, a sample's tensor, the rows that it begins with)``.
NAMING: dict[str, Callable[[tracefile.TraceWriter, Any, Any], Any]] = {
    "prefix": lambda writer, handle, prompt: writer.append("new", np.concatenate([prompt, small_ids("end", 9)])),
    "lazy": lambda writer, handle, prompt: writer.append(
        "new", torch.cat([handle, torch.from_numpy(small_ids("end", 9))])
    ),
}
