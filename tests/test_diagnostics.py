"""Snapshots tell what reading cost and what the process holds; a sampler records them and disturbs nothing."""

from __future__ import annotations

import json
import math
import os
import pickle
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support import fork, ids_of, in_fork, join, run_python

import tracefile
from tracefile.diagnostics import PlotUnavailableError, Sampler, figure, measure, sampler, snapshot
from tracefile.store import read_trace_header
from tracefile.summary import summarize
from tracefile.survey import take_survey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MODEL = {"num_layers": 8, "top_k": 4, "num_experts": 200}
CHUNK = {"layers_per_chunk": 4, "rows_per_chunk": 64}
CHUNK_BYTES = 4 * 64 * 4

COUNTERS = ["read_bytes", "decoded_bytes", "moved_bytes", "decoded_chunks", "cache_hits", "reads"]
ACTIVE = ["active_chunks", "active_bytes"]
PEAK = ["peak_active_bytes"]
STATUS = ["rss_anon_bytes", "rss_bytes"]
SMAPS = ["uss_bytes", "pss_bytes", "pss_anon_bytes"]
TRACE = ["trace_int32_bytes", "trace_stored_bytes", "trace_samples", "trace_rows"]
CUDA = ["cuda_allocated_bytes", "cuda_reserved_bytes"]

MIB = 2**20


@pytest.fixture
def trace(path: str) -> tracefile.Trace:
    """Two samples, uncompressed, in chunks of 4 layers x 64 rows."""
    with tracefile.TraceWriter(path, **MODEL, **CHUNK, codec="none") as writer:
        for name, rows in (("a", 300), ("b", 100)):
            writer.append(name, ids_of(name, rows, **MODEL))
    return tracefile.open(path)


def _wait_for(condition: Callable[[], bool], timeout: float = 20) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def _field(path: str, name: str) -> int:
    """The sum of a field of a file in /proc, in bytes."""
    with open(path) as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(name)) * 1024


def _change(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    names = [name.rpartition("/")[2] for name in before]
    changes = {name: after["tracefile/" + name] - before["tracefile/" + name] for name in names}
    return {name: change for name, change in changes.items() if change and name in COUNTERS + ACTIVE}


# --- a snapshot


def test_every_value_is_a_finite_float(trace: tracefile.Trace) -> None:
    cuda = CUDA if torch.cuda.is_initialized() else []
    for values, names in (
        (snapshot(), COUNTERS + ACTIVE + PEAK + STATUS + SMAPS + cuda),
        (snapshot(trace), COUNTERS + ACTIVE + PEAK + STATUS + SMAPS + cuda + TRACE),
        (snapshot(smaps=False), COUNTERS + ACTIVE + PEAK + STATUS + cuda),
    ):
        assert set(values) == {"tracefile/" + name for name in names}
        assert all(type(value) is float and math.isfinite(value) and value >= 0 for value in values.values())
        assert json.loads(json.dumps(values)) == values
    assert set(snapshot(prefix="")) == set(COUNTERS + ACTIVE + PEAK + STATUS + SMAPS + cuda)


def test_counters_move_by_what_a_read_took(trace: tracefile.Trace) -> None:
    stored = CHUNK_BYTES + 4  # with its crc32c
    steps: list[tuple[Callable[[], object], dict[str, float]]] = [
        # Rows 0..99 lie in 2 chunks of rows; layer 1 in the first chunk of layers, which is kept for the others.
        (
            lambda: trace["a"][:100, 1].materialize(),
            {
                "read_bytes": 2 * stored,
                "decoded_bytes": 2 * CHUNK_BYTES,
                "decoded_chunks": 2,
                "reads": 1,
                "active_chunks": 2,
                "active_bytes": 2 * CHUNK_BYTES,
            },
        ),
        (lambda: trace["a"][:100, 2].materialize(), {"cache_hits": 2, "reads": 1}),
        # The other two layers are the last that the chunks were kept for.
        (
            lambda: trace["a"][:100, [0, 3]].materialize(),
            {"cache_hits": 2, "reads": 1, "active_chunks": -2, "active_bytes": -2 * CHUNK_BYTES},
        ),
        (
            lambda: trace["b"].materialize("meta", torch.int64),
            {
                "read_bytes": 4 * stored,
                "decoded_bytes": 4 * CHUNK_BYTES,
                "decoded_chunks": 4,
                "reads": 1,
                "moved_bytes": 100 * 8 * 4,
            },
        ),
        (lambda: [trace["a"][5:], torch.cat([trace["a"], trace["b"]]), len(trace)], {}),
    ]
    for read, expected in steps:
        before = snapshot(trace)
        read()
        assert _change(before, snapshot(trace)) == expected


def test_the_size_of_a_trace_comes_from_its_headers(path: str, decoded: list[Any]) -> None:
    with tracefile.TraceWriter(path, **MODEL) as writer:
        writer.append("a", ids_of("a", 300, **MODEL))
        writer.append("a", ids_of("a again", 250, **MODEL))  # only the newest revision counts, but both are stored
        writer.append_many([("b", ids_of("b", 70, **MODEL)), ("empty", np.zeros((0, 8, 4), np.int32))])
        trace = tracefile.open(path)
        shards = [os.path.join(where, name) for where, _, names in os.walk(path) for name in names if name == "0"]
        expected = {
            "trace_samples": 3,
            "trace_rows": 250 + 70,
            "trace_int32_bytes": (250 + 70) * 8 * 4 * 4,
            "trace_stored_bytes": sum(map(os.path.getsize, shards)),
        }
        values = snapshot(trace, prefix="", smaps=False)
        assert {name: values[name] for name in TRACE} == expected
        facts = summarize(take_survey(path, read_trace_header(path)))
        assert (facts.bytes_int32, facts.bytes_stored) == (values["trace_int32_bytes"], values["trace_stored_bytes"])
        writer.append("late", ids_of("late", 10, **MODEL))
    assert snapshot(trace, prefix="", smaps=False)["trace_samples"] == 3
    trace.refresh()
    trace.close()  # a sampler may outlive the trace
    assert snapshot(trace, prefix="", smaps=False)["trace_samples"] == 4
    assert not decoded


def test_memory_is_what_the_kernel_says() -> None:
    values = snapshot(prefix="")
    expected = {
        "rss_anon_bytes": _field("/proc/self/status", "RssAnon"),
        "rss_bytes": _field("/proc/self/status", "VmRSS"),
        "uss_bytes": _field("/proc/self/smaps", "Private_"),
        "pss_bytes": _field("/proc/self/smaps", "Pss:"),
        "pss_anon_bytes": _field("/proc/self/smaps", "Anonymous"),  # nobody shares it, unless pytest was forked
    }
    for name, nbytes in expected.items():
        assert values[name] == pytest.approx(nbytes, abs=4 * MIB), name
    assert values["uss_bytes"] <= values["pss_bytes"] <= values["rss_bytes"]


def test_rss_anon_counts_what_is_allocated_and_no_mapped_file(tmp_path: Path) -> None:
    size = 64 * MIB
    mapped = np.memmap(tmp_path / "file", np.uint8, "w+", shape=size)
    before = snapshot(prefix="")
    assert mapped.max() == 0  # pages all of it in
    paged_in = snapshot(prefix="")
    assert paged_in["rss_bytes"] - before["rss_bytes"] > 60 * MIB
    assert paged_in["uss_bytes"] - before["uss_bytes"] > 60 * MIB
    assert abs(paged_in["rss_anon_bytes"] - before["rss_anon_bytes"]) < 4 * MIB
    allocated = np.ones(size, np.uint8)
    assert snapshot(prefix="")["rss_anon_bytes"] - paged_in["rss_anon_bytes"] > 60 * MIB
    del allocated
    assert abs(snapshot(prefix="")["rss_anon_bytes"] - paged_in["rss_anon_bytes"]) < 4 * MIB


def test_what_the_kernel_does_not_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_status(path: str, mode: str) -> Any:
        if path.endswith("smaps_rollup"):
            raise FileNotFoundError(path)
        return open("/dev/null", mode)

    monkeypatch.setattr(measure, "open", only_status, raising=False)
    assert not set(snapshot(prefix="")) & set(STATUS + SMAPS)


def test_cuda_is_asked_on_all_devices_and_never_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    initialized = torch.cuda.is_initialized()
    snapshot()
    assert torch.cuda.is_initialized() == initialized
    nbytes = [{"allocated_bytes.all.current": 5, "reserved_bytes.all.current": 8}, {}]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_stats", nbytes.__getitem__)
    values = snapshot(prefix="")
    assert [values[name] for name in CUDA] == [5.0, 8.0]

    def refuse(device: int) -> dict[str, int]:
        raise RuntimeError("this allocator does not support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "memory_stats", refuse)
    assert not set(snapshot(prefix="")) & set(CUDA)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_memory_of_the_last_device() -> None:
    code = """
import torch
from tracefile.diagnostics import Sampler, snapshot
assert "tracefile/cuda_allocated_bytes" not in snapshot()
assert not torch.cuda.is_initialized()
held = torch.zeros(2**20, dtype=torch.uint8, device=f"cuda:{torch.cuda.device_count() - 1}")
with Sampler(interval=0.01, smaps=False) as sampler:
    while len(sampler.record["seconds"]) < 5:
        pass
assert set(sampler.record["cuda_allocated_bytes"]) == {2.0**20}
assert min(sampler.record["cuda_reserved_bytes"]) >= 2**20
"""
    run_python(code)


def test_importing_it_costs_nothing() -> None:
    code = """
import sys, threading, tracefile
print("tracefile.diagnostics" in sys.modules)
threads = threading.active_count()
import tracefile.diagnostics
print("matplotlib" in sys.modules, threading.active_count() - threads)
"""
    assert run_python(code).stdout.split() == ["False", "False", "0"]


# --- a sampler


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Snapshots are then of one value, taken from the front of this list; 0 once it is empty."""
    coming: list[float] = []
    monkeypatch.setattr(sampler, "snapshot", lambda *args, **kwargs: {"value": coming.pop(0) if coming else 0.0})
    return coming


def test_it_records_over_time(trace: tracefile.Trace, tmp_path: Path) -> None:
    with Sampler(trace, interval=0.005, smaps=False) as recording:
        assert recording.running
        trace["a"].materialize()
        array = np.ones(64 * MIB, np.uint8)
        before = len(recording.record["seconds"])
        _wait_for(lambda: len(recording.record["seconds"]) > before + 5)
        del array
    assert not recording.running
    record = recording.record
    assert set(record) >= {"seconds", *COUNTERS, *ACTIVE, *STATUS, *TRACE}
    assert len(set(map(len, record.values()))) == 1
    assert record["seconds"] == sorted(record["seconds"])
    assert record["reads"][-1] - record["reads"][0] == 1
    anonymous = record["rss_anon_bytes"]
    assert max(anonymous) - anonymous[0] > 60 * MIB
    assert max(anonymous) - anonymous[-1] > 60 * MIB
    assert recording.peak("rss_anon_bytes") == max(anonymous)
    assert repr(recording) == f"<Sampler {len(anonymous)} snapshots, one in 0.005 s, stopped>"

    recording.save(tmp_path / "record.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    assert {name: [line[name] for line in lines] for name in lines[0]} == record


def test_the_first_and_the_last_snapshot_are_always_taken(counted: list[float]) -> None:
    counted += [1.0, 2.0]
    recording = Sampler(interval=1000)
    assert recording.record["value"] == [1.0]
    recording.close()
    recording.close()
    assert recording.record["value"] == [1.0, 2.0]


def test_it_thins_out_and_remembers_the_peak(counted: list[float]) -> None:
    values = [float(i) for i in range(100)]
    values[3] = 1000.0
    counted += values
    with Sampler(interval=0.0005, max_samples=10) as recording:
        _wait_for(lambda: recording.interval > 0.003)
        assert len(recording.record["value"]) <= 10
    record = recording.record
    assert len(record["seconds"]) <= 10
    assert math.log2(recording.interval / 0.0005) in range(3, 10)
    assert record["value"][0] == 0.0
    assert record["value"] == sorted(set(record["value"]) - {1000.0})
    assert recording.peak("value") == 1000.0


def test_it_slows_down_where_a_snapshot_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*args: Any, **kwargs: Any) -> dict[str, float]:
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass
        return {}

    monkeypatch.setattr(sampler, "snapshot", slow)
    with Sampler(interval=0.001) as recording:
        time.sleep(0.5)
    assert 3 <= len(recording.record["seconds"]) <= 5


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_it_stops_when_the_block_raises(error: type[BaseException], counted: list[float]) -> None:
    counted += [1.0, 2.0]
    with pytest.raises(error), Sampler(interval=1000) as recording:
        raise error
    assert not recording.running
    assert recording.record["value"] == [1.0, 2.0]
    assert "tracefile-sampler" not in [thread.name for thread in threading.enumerate()]


def test_a_forked_child_does_not_record() -> None:
    def child() -> tuple[bool, bool, int]:
        before = len(recording.record["seconds"])
        running = recording.running
        time.sleep(0.02)
        recording.close()
        with Sampler(interval=0.001, smaps=False) as own:
            _wait_for(lambda: len(own.record["seconds"]) > 3)
        return running, repr(recording).endswith("stopped>"), len(recording.record["seconds"]) - before

    with Sampler(interval=0.0002, smaps=False) as recording:
        assert in_fork(child) == (False, True, 0)
        for _ in range(20):  # at any point of the thread's work
            assert join(fork(recording.close), timeout=20) == [0]
        assert recording.running
        before = len(recording.record["seconds"])
        _wait_for(lambda: len(recording.record["seconds"]) > before)


def test_other_processes_are_recorded_while_they_live(tmp_path: Path) -> None:
    (ready, allocated), (go, stop) = os.pipe(), os.pipe()

    def child() -> None:
        os.close(stop)
        held = np.ones(64 * MIB, np.uint8)
        os.write(allocated, b".")
        os.read(go, 1)
        del held

    pid = fork(child)
    os.read(ready, 1)
    with Sampler(interval=0.005, smaps=False, pids={"rank 3": pid}) as recording:
        held = _field(f"/proc/{pid}/status", "RssAnon")
        os.close(stop)
        assert join(pid) == [0]
    for descriptor in (ready, allocated, go):
        os.close(descriptor)
    values = recording.record["rank 3/rss_anon_bytes"]
    assert math.isnan(values[-1])
    assert not math.isnan(values[0])
    assert recording.peak("rank 3/rss_anon_bytes") == pytest.approx(held, abs=MIB)
    recording.save(tmp_path / "record.jsonl")
    last = (tmp_path / "record.jsonl").read_text().splitlines()[-1]
    assert "rank 3/rss_anon_bytes" not in json.loads(last, parse_constant=pytest.fail)
    recording.plot(tmp_path / "record.png")


@pytest.mark.parametrize(
    "options", [{"interval": 0}, {"interval": -1.0}, {"interval": math.nan}, {"interval": math.inf}, {"max_samples": 1}]
)
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(tracefile.OptionError, match=next(iter(options))):
        Sampler(**options)
    assert "tracefile-sampler" not in [thread.name for thread in threading.enumerate()]


# --- a picture


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were saved."""
    from matplotlib.figure import Figure

    figures: list[Any] = []
    save = Figure.savefig

    def saving(self: Any, *args: Any, **kwargs: Any) -> None:
        figures.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", saving)
    return figures


def test_a_plot_has_units_and_what_was_recorded(trace: tracefile.Trace, tmp_path: Path, drawn: list[Any]) -> None:
    with Sampler(trace, interval=0.01) as recording:
        for _ in range(60):  # 10 chunks each time
            trace["a"].materialize()
    recording.plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    record = recording.record
    panels = {axes.get_title("left"): axes for axes in drawn[0].axes if "CUDA" not in axes.get_title("left")}
    memory, traffic = panels.pop("Host memory"), panels.pop("Bytes since the start")
    assert not panels
    assert traffic.get_xlabel() == "time since the start (s)"
    size = {"MiB": MIB, "GiB": 2**30}[memory.get_ylabel()]
    lines = {line.get_label().partition(":")[0]: line for line in memory.lines}
    assert set(lines) == {"RssAnon", "USS", "PSS", "RSS", "decoded chunks kept"}
    np.testing.assert_allclose(lines["RssAnon"].get_ydata(), np.array(record["rss_anon_bytes"]) / size)
    np.testing.assert_allclose(lines["RssAnon"].get_xdata(), record["seconds"])
    assert traffic.get_ylabel() == "KiB"
    totals = {line.get_label(): line.get_ydata() for line in traffic.lines}
    assert list(totals) == ["decoded: 600.0 KiB", "read from files: 602.3 KiB", "moved to a device: 0 B"]
    since = np.array(record["decoded_bytes"]) - record["decoded_bytes"][0]
    np.testing.assert_allclose(totals["decoded: 600.0 KiB"], since / 1024)


def test_a_plot_of_chosen_values(trace: tracefile.Trace, tmp_path: Path, drawn: list[Any]) -> None:
    with Sampler(trace, interval=1000, smaps=False) as recording:
        recording.plot(tmp_path / "one_snapshot.png")
    recording.plot(tmp_path / "chosen.svg", keys=["trace_int32_bytes", "active_chunks", "reads"])
    assert b"<svg" in (tmp_path / "chosen.svg").read_bytes()
    assert [axes.get_title("left") for axes in drawn[1].axes] == ["Host memory", "Counts"]
    assert [line.get_label() for line in drawn[1].axes[0].lines] == ["trace_int32_bytes: peak 50.0 KiB"]
    assert [line.get_label() for line in drawn[1].axes[1].lines] == ["active_chunks", "reads"]
    with pytest.raises(tracefile.OptionError, match="no 'rss' was recorded; there are seconds, read_bytes"):
        recording.plot(tmp_path / "no.png", keys=["reads", "rss"])
    with pytest.raises(tracefile.OptionError, match="no 'rss' was recorded"):
        recording.peak("rss")
    assert not (tmp_path / "no.png").exists()


def test_units_suit_the_largest_value() -> None:
    assert [figure._amount(nbytes) for nbytes in (0.0, 1023.0, 1024.0, 1.5 * MIB, 3.25 * 2**40)] == [
        "0 B",
        "1,023 B",
        "1.0 KiB",
        "1.5 MiB",
        "3.2 TiB",
    ]
    assert [figure._unit(seconds, figure._SECONDS, 5)[1] for seconds in (0.1, 299, 300, 17999, 18000)] == [
        "s",
        "s",
        "min",
        "min",
        "h",
    ]


def test_without_matplotlib_the_error_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Sampler(interval=1000, smaps=False) as recording:
        pass
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotUnavailableError, match=r"pip install 'tracefile\[plot\]'") as caught:
        recording.plot(tmp_path / "memory.png")
    assert isinstance(caught.value, tracefile.TraceError)
    assert isinstance(caught.value, ImportError)
    assert type(pickle.loads(pickle.dumps(caught.value))) is PlotUnavailableError
