"""Small traces to collect garbage in, and what must hold of them afterwards."""

from __future__ import annotations

import os
import pickle
import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from support import fork, ids_of, join

import tracefile
from tracefile.collect import collect
from tracefile.verify import verify_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


def share(path: str) -> tuple[tracefile.TraceWriter, tracefile.LazyRoutedExperts, np.ndarray[Any, Any]]:
    """A writer that knows a prefix which no sample has any more, a handle of it, and its rows."""
    writer = small_writer(path)
    prompt = small_ids("prompt", 300)
    handle = writer.append("a", prompt)
    handle.numpy()  # open, so that reading it tells nothing
    writer.append("stays", small_ids("stays"))
    tracefile.open(path).delete_samples("a")
    return writer, handle, prompt


def small_traces(directory: str, names: list[str]) -> list[str]:
    """Several traces of one sample; their paths."""
    paths = [f"{directory}/{name}" for name in names]
    for path in paths:
        with small_writer(path) as writer:
            writer.append("a", small_ids(path))
    return paths


def _work(path: str, who: int, seconds: float, acts: Sequence[str], log: str) -> None:
    """A writer that appends, shares, continues, deletes and reuses; what holds afterwards goes to ``log``."""
    rng = random.Random(who)
    prompt = small_ids(f"prompt {who}", 200)
    mine: dict[str, Any] = {}
    handles: list[tuple[Any, Any]] = []
    trace = tracefile.open(path)
    end = time.monotonic() + seconds
    with small_writer(path) as writer:
        step = 0
        while time.monotonic() < end:
            step += 1
            name = f"{who}/{rng.randrange(6)}"
            act = rng.choice(acts)
            new = small_ids(f"{who} {step}", rng.randrange(1, 60))
            try:
                if act == "append":
                    handle, ids = writer.append(name, new), new
                elif act == "share":
                    ids = np.concatenate([prompt, new])
                    handle = writer.append(name, ids)
                elif act == "go on":
                    old = mine.get(name, new[:0])
                    start = rng.randrange(len(old) + 1)
                    ids = np.concatenate([old[:start], new])
                    handle = writer.append(name, new, start=start)
                elif act == "lazy" and handles:
                    old, old_ids = rng.choice(handles[-10:])
                    ids = np.concatenate([old_ids, new])
                    handle = writer.append(name, torch.cat([old, torch.from_numpy(new)]))
                elif act == "many":
                    ids = np.concatenate([prompt[:150], new])
                    handle, _ = writer.append_many([(name, ids), (f"{who}/x", new)])
                    mine[f"{who}/x"] = new
                elif act == "delete" and name in mine:
                    trace.delete_samples(name)
                    del mine[name]
                    continue
                else:
                    continue
            except tracefile.SegmentMissingError:
                assert act == "lazy", act  # its handle's rows were deleted; all else is at hand, or lives
                continue
            mine[name] = ids
            handles.append((handle, ids))
            np.testing.assert_array_equal(handle.numpy(), ids)
    with open(log, "wb") as file:
        pickle.dump((mine, step), file)


def race(
    path: str, directory: Any, *, writers: int, seconds: float, acts: Sequence[str], meanwhile: Callable[[], None]
) -> tuple[dict[str, Any], list[int]]:
    """Writers at work on a trace, each in a process, and what goes on meanwhile, again and again, in this one.

    Returns
    -------
    expected : dict
        What the samples hold then.
    steps : list of int
        How much each writer did.
    """
    logs = [os.path.join(directory, f"log{who}") for who in range(writers)]
    pids = [
        fork(lambda who=who: _work(path, who, seconds, acts, logs[who]))  # type: ignore[misc]
        for who in range(writers)
    ]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        meanwhile()
    assert join(*pids) == [0] * writers
    expected: dict[str, Any] = {}
    steps = []
    for log in logs:
        with open(log, "rb") as file:
            mine, step = pickle.load(file)
        steps.append(step)
        expected |= mine
    return expected, steps
