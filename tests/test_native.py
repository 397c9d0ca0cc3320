"""The native decoder beside the Python one: the same ids, the same errors; and what happens where it cannot be."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import shutil
import struct
import sys
import threading
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import crc32c
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import ids_of, in_fork, random_routing, run_python
from test_damage import CODECS, SMALL, WIDE, Damaged

import tracefile
from tracefile import decode, errors, native
from tracefile.cache import chunk_cache
from tracefile.format import CODECS as BLOSC
from tracefile.segments import segment_pool
from tracefile.shard import encode_chunk

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]

MODELS = [SMALL, WIDE, {"num_layers": 7, "top_k": 3, "num_experts": 256}]
DTYPES = [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32, torch.int64, torch.uint64, torch.float32]


@pytest.fixture(autouse=True)
def is_native() -> None:
    assert native.status() == "on", "run tools/venv.sh where there is a C compiler"


def in_both_ways(read: Callable[[], Any]) -> Any:
    """What ``read`` gives or raises natively, after checking that it is the same in Python."""
    results = []
    for way in (True, False):
        before = tracefile.configure(native=way)
        tracefile.clear_cache()
        try:
            results.append(read())
        except errors.TraceError as error:
            results.append((type(error), str(error), vars(error)))
        finally:
            tracefile.configure(native=before.native)
    natively, in_python = results
    if isinstance(natively, np.ndarray):
        assert natively.dtype == in_python.dtype
        np.testing.assert_array_equal(natively, in_python)
    else:
        assert natively == in_python
    return natively


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The chunks of each native job."""
    jobs: list[int] = []
    run = native.Job.run

    def counting(self: native.Job) -> None:
        jobs.append(self.chunks)
        run(self)

    monkeypatch.setattr(native.Job, "run", counting)
    return jobs


@pytest.mark.parametrize("source", ["mmap", "pread"])
def test_chunks_are_decoded_natively_where_that_is_on(path: str, source: str, counted: list[int]) -> None:
    ids = ids_of("a", 100, **SMALL)
    with tracefile.TraceWriter(path, **SMALL, layers_per_chunk=2, rows_per_chunk=16) as writer:
        writer.append("a", ids)
    tracefile.configure(decode_threads=1)
    experts = tracefile.open(path, source=source)["a"]
    np.testing.assert_array_equal(experts.numpy(), ids)
    assert counted == [14]
    tracefile.configure(native=False)
    np.testing.assert_array_equal(experts.numpy(), ids)
    assert counted == [14]


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    draw = data.draw
    model = draw(st.sampled_from(MODELS))
    rows = [draw(st.integers(1, 70)) for _ in range(draw(st.integers(1, 3)))]
    path = str(tmp_path_factory.mktemp("any") / "t.trace")
    options = {
        "codec": draw(st.sampled_from(CODECS)),
        "layers_per_chunk": draw(st.integers(1, model["num_layers"] + 1)),
        "rows_per_chunk": draw(st.integers(1, 40)),
    }
    arrays = [ids_of(str(i), count, **model) for i, count in enumerate(rows)]
    with tracefile.TraceWriter(path, **model, **options) as writer:
        for i, values in enumerate(arrays):
            writer.append(str(i), values)
    expected = np.concatenate(arrays)
    trace = tracefile.open(path, source=draw(st.sampled_from(["mmap", "pread"])))
    experts = torch.cat([trace[str(i)] for i in range(len(rows))])
    tracefile.configure(
        decode_threads=draw(st.integers(1, 3)), cache_bytes=draw(st.sampled_from([0, 500, 64 * 1024 * 1024]))
    )
    row = st.integers(0, len(expected) - 1)
    chosen: Any = draw(
        st.one_of(st.slices(len(expected)).filter(lambda s: (s.step or 1) > 0), st.lists(row, max_size=9))
    )
    layer = st.integers(0, model["num_layers"] - 1)
    layers: Any = draw(st.one_of(st.just(slice(None)), layer, st.lists(layer, min_size=1, max_size=5)))
    dtype = draw(
        st.sampled_from([d for d in DTYPES if d is torch.float32 or torch.iinfo(d).max >= 2**15 or model is not WIDE])
    )

    def read() -> Array:
        parts = [experts[chosen][:, layers].materialize(dtype=dtype).numpy() for _ in range(2)]  # again: from the cache
        np.testing.assert_array_equal(*parts)
        return parts[0]

    got = in_both_ways(read)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, expected[chosen][:, layers].astype(got.dtype))
    trace.close()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("source", ["mmap", "pread"])
@pytest.mark.parametrize("codec", CODECS)
def test_layer_by_layer_through_the_cache(
    path: str,
    codec: str,
    source: str,
    threads: int,
    decoded: list[tuple[str, int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode, "_BATCH_BYTES", 200)  # several batches
    tracefile.configure(decode_threads=threads)
    model = {"num_layers": 6, "top_k": 2, "num_experts": 300}
    ids = ids_of("a", 100, **model)
    with tracefile.TraceWriter(path, **model, codec=codec, layers_per_chunk=3, rows_per_chunk=16) as writer:
        writer.append("a", ids)
    experts = tracefile.open(path, source=source)["a"]
    for layer in range(6):
        np.testing.assert_array_equal(experts[:, layer].numpy(), ids[:, layer])
    assert len(decoded) == len(set(decoded)) == 2 * 7
    assert not len(chunk_cache)


def test_the_cache_stays_within_its_budget(path: str) -> None:
    ids = ids_of("a", 2000, **SMALL)
    with tracefile.TraceWriter(path, **SMALL, layers_per_chunk=3, rows_per_chunk=16) as writer:
        writer.append("a", ids)
    experts = tracefile.open(path)["a"]
    for budget, held in ((95, 0), (96, 1), (1000, 10)):
        tracefile.configure(cache_bytes=budget)
        np.testing.assert_array_equal(experts[:, 0].numpy(), ids[:, 0])
        assert len(chunk_cache) == held
        tracefile.clear_cache()


@pytest.mark.parametrize("source", ["mmap", "pread"])
@pytest.mark.parametrize("codec", CODECS)
def test_every_flipped_byte_of_a_chunk(path: str, codec: str, source: str) -> None:
    damaged = Damaged(path, codec, SMALL, rows=16)
    offsets, lengths = damaged.chunks()
    trace = tracefile.open(path, source=source)
    experts = trace["a"]
    with open(damaged.shard(), "r+b", buffering=0) as file:
        for position in range(offsets[0], offsets[0] + lengths[0]):
            (byte,) = os.pread(file.fileno(), 1, position)
            os.pwrite(file.fileno(), bytes([byte ^ 0x10]), position)
            kind, message, _ = in_both_ways(experts.numpy)
            assert kind is errors.ChunkDamagedError
            assert "fails its checksum" in message
            os.pwrite(file.fileno(), bytes([byte]), position)
    np.testing.assert_array_equal(in_both_ways(experts.numpy), damaged.values["a"])


def _sized(payload: bytes, decoded: int | None = None, encoded: int | None = None) -> bytes:
    """A Blosc chunk that claims other sizes."""
    sizes = struct.unpack_from("<iii", payload, 4)
    claims = (decoded if decoded is not None else sizes[0], sizes[1], encoded if encoded is not None else sizes[2])
    return payload[:4] + struct.pack("<iii", *claims) + payload[16:]


LIES: dict[str, Callable[[bytes], bytes]] = {
    "decoded more": lambda p: _sized(p, decoded=2**20),
    "decoded less": lambda p: _sized(p, decoded=1),
    "decoded negative": lambda p: _sized(p, decoded=-1),
    "encoded more": lambda p: _sized(p, encoded=len(p) + 1),
    "encoded negative": lambda p: _sized(p, encoded=-2),
    "cut by one": lambda p: p[:-1],
    "cut and says so": lambda p: _sized(p[:20], encoded=20),
    "nothing but the header": lambda p: _sized(p[:16], encoded=16),
    "shorter than a header": lambda p: p[:15],
    "one byte": lambda p: p[:1],
    "of zeros": lambda p: bytes(len(p)),
    "block starts far away": lambda p: p[:16] + b"\xff\xff\xff\x7f" + p[20:],
    "no blocks": lambda p: p[:8] + bytes(4) + p[12:],
    "another version": lambda p: b"\x63" + p[1:],
    "not compressed after all": lambda p: p[:2] + bytes([p[2] | 2]) + p[3:],
    "body of ones": lambda p: p[:20] + b"\xff" * (len(p) - 20),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("codec", CODECS)
def test_a_chunk_that_lies_under_a_good_checksum(path: str, codec: str, lie: str) -> None:
    damaged = Damaged(path, codec, WIDE)
    damaged.rewrite_chunk(1, LIES[lie])

    def read() -> list[Any]:
        values: list[Any] = damaged.read("mmap", "ab")["a"].tolist()
        return values

    result = in_fork(lambda: in_both_ways(read))
    # Without compression any ids are as good as others, if there are as many as there should be.
    if codec != "none" or "shorter" in lie or "cut" in lie or lie in ("one byte", "nothing but the header"):
        assert result[0] is errors.ChunkDamagedError
    else:
        assert np.shape(result) == damaged.values["a"].shape


def test_blosc_bodies_at_random(path: str) -> None:
    """Whatever a body with a good checksum holds, both ways say the same of it."""
    rng = np.random.default_rng(7)
    damaged = Damaged(path, "fast", {"num_layers": 3, "top_k": 4, "num_experts": 16}, rows=64)
    original = Path(damaged.shard()).read_bytes()

    def change(payload: bytes) -> bytes:
        body = bytearray(payload)
        for position in rng.integers(16, len(body), 3):
            body[position] = rng.integers(256)
        return bytes(body)

    def each() -> int:
        refused = 0
        for _ in range(60):
            Path(damaged.shard()).write_bytes(original)
            damaged.rewrite_chunk(0, change)
            result = in_both_ways(lambda: damaged.read("mmap", "a")["a"].tolist())
            refused += isinstance(result, tuple)
        return refused

    in_fork(each)


class _Chunks:
    """Encoded chunks in memory, and jobs over them."""

    LAYERS, COLUMNS = 3, 64

    def __init__(self, count: int, codec: str = "fast") -> None:
        rng = np.random.default_rng(count)
        self.codec = BLOSC[codec]  # type: ignore[index]
        self.ids = rng.integers(0, 9, (self.LAYERS, count * self.COLUMNS), dtype=np.uint8)
        self.encoded = []
        for i in range(count):
            block = np.ascontiguousarray(self.ids[:, i * self.COLUMNS : (i + 1) * self.COLUMNS])
            self.encoded.append(np.frombuffer(b"".join(encode_chunk(block, self.codec)), np.uint8).copy())
        self.out = np.zeros(self.ids.shape, np.int64)

    def job(self) -> native.Job:
        library = native.library()
        assert library is not None
        count = len(self.encoded)
        rows = [(i, 0, i * self.COLUMNS, self.COLUMNS) for i in range(count)]
        return native.Job(
            library,
            self.out,
            self.ids.dtype,
            chunk_bytes=self.LAYERS * self.COLUMNS,
            chunk_width=self.COLUMNS,
            row_chunks=count,
            compressed=self.codec is not None,
            numbers=range(count),
            addresses=list(map(native.address_of, self.encoded)),
            lengths=list(map(len, self.encoded)),
            kept=[0] * count,
            rows=[value for row in rows for value in row],
            layers=array("q", [value for layer in range(self.LAYERS) for value in (0, layer, layer)]),
        )


def _in_threads(work: Callable[[], None], count: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("codec", CODECS)
def test_several_threads_on_one_job(codec: str) -> None:
    chunks = _Chunks(400, codec)
    job = chunks.job()
    _in_threads(job.run, 4)
    assert job.bad is None
    np.testing.assert_array_equal(chunks.out, chunks.ids)
    chunks.out[:] = 0
    job.run()  # nothing is left to take
    assert not chunks.out.any()


@pytest.mark.parametrize("codec", CODECS)
def test_the_first_bad_chunk_is_named_whichever_thread_meets_which(codec: str) -> None:
    chunks = _Chunks(100, codec)
    rng = np.random.default_rng(3)
    for _ in range(40):
        bad = sorted(rng.choice(100, rng.integers(1, 5), replace=False).tolist())
        for i in bad:
            chunks.encoded[i][-1] ^= 1
        chunks.out[:] = -1
        job = chunks.job()
        _in_threads(job.run, 3)
        assert job.bad == bad[0]
        whole = bad[0] * chunks.COLUMNS
        np.testing.assert_array_equal(chunks.out[:, :whole], chunks.ids[:, :whole])
        for i in bad:
            assert (chunks.out[:, i * chunks.COLUMNS : (i + 1) * chunks.COLUMNS] == -1).all()
            chunks.encoded[i][-1] ^= 1


def test_a_cancelled_job_stops() -> None:
    chunks = _Chunks(10)
    job = chunks.job()
    job.cancel()
    job.run()
    assert job.bad is None
    assert not chunks.out.any()


def test_a_job_of_uneven_lists_is_refused() -> None:
    chunks = _Chunks(2)
    library = native.library()
    assert library is not None
    with pytest.raises(ValueError, match="2 chunks, 1 addresses"):
        native.Job(
            library, chunks.out, chunks.ids.dtype, chunk_bytes=1, chunk_width=1, row_chunks=1, compressed=False,
            numbers=[0, 1], addresses=[0], lengths=[0, 0], kept=[0, 0], rows=[], layers=array("q"),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("stored", "out", "fits"),
    [
        ("uint8", np.zeros((2, 3), np.int64), True),
        ("uint16", np.zeros((2, 3), np.int16), True),
        ("uint16", np.zeros((2, 3), np.uint8), False),
        ("uint8", np.zeros((2, 3), np.float32), False),
        ("uint8", np.zeros((3, 2), np.uint8).T, False),
        ("uint8", np.zeros((2, 3), ">i4"), False),
        ("uint8", np.frombuffer(bytes(6), np.uint8).reshape(2, 3), False),
    ],
)
def test_outputs_that_can_be_written_natively(stored: str, out: Array, fits: bool) -> None:
    assert native.can_place(np.dtype(stored), out) is fits


def test_an_output_that_is_not_aligned() -> None:
    """Neither do encoded chunks lie aligned in their file."""
    chunks = _Chunks(3, "none")
    chunks.out = np.zeros(chunks.out.nbytes + 1, np.uint8)[1:].view(np.int64).reshape(chunks.out.shape)
    chunks.job().run()
    np.testing.assert_array_equal(chunks.out, chunks.ids)


@pytest.mark.parametrize("codec", CODECS)
def test_a_fork_after_native_reads(path: str, codec: str) -> None:
    model = {"num_layers": 8, "top_k": 4, "num_experts": 200}
    ids = ids_of("a", 2000, **model)
    with tracefile.TraceWriter(path, **model, codec=codec, rows_per_chunk=16) as writer:
        writer.append("a", ids)
    tracefile.configure(decode_threads=3)
    experts = tracefile.open(path)["a"]
    stop = threading.Event()

    def keep_reading() -> None:
        while not stop.is_set():
            np.testing.assert_array_equal(experts.numpy(), ids)

    reader = threading.Thread(target=keep_reading)
    reader.start()
    try:
        for _ in range(5):
            assert in_fork(lambda: np.array_equal(experts.numpy(), ids) and native.status() == "on", timeout=20)
    finally:
        stop.set()
        reader.join()


def test_a_segment_that_is_evicted_during_a_read_stays_until_it_is_done(path: str) -> None:
    from tracefile.read import chunk_observers

    values = {name: ids_of(name, 300, **SMALL) for name in "ab"}
    with tracefile.TraceWriter(path, **SMALL, rows_per_chunk=16) as writer:
        experts = {name: writer.append(name, ids) for name, ids in values.items()}
    tracefile.configure(decode_threads=2)
    met: list[str] = []

    def evict(segment: str, positions: list[tuple[int, int]]) -> None:
        if not met:
            met.append(segment)
            trace = experts["a"].selection.rows.segments()[0].trace
            segment_pool.close(trace)
            gc.collect()

    chunk_observers.append(evict)
    try:
        np.testing.assert_array_equal(experts["a"].numpy(), values["a"])
    finally:
        chunk_observers.remove(evict)
    assert met


def test_no_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = _Chunks(2)
    job = chunks.job()
    monkeypatch.setattr(job, "_decode", lambda address: -1)
    with pytest.raises(MemoryError):
        job.run()


_READS = """
import sys, torch, tracefile
from tracefile import native
torch.set_num_threads(1)
assert native.status() == "on"
tracefile.configure(decode_threads=2)
experts = tracefile.open(sys.argv[1])["a"]
out = torch.empty(experts.shape, dtype=torch.int32)

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

for round in range(150):
    if round == 50:
        before = anonymous()
    experts.materialize(out=out)
    tracefile.clear_cache()
print(anonymous() - before)
"""


def test_native_reads_leave_nothing_behind(path: str) -> None:
    model = {"num_layers": 8, "top_k": 4, "num_experts": 200}
    with tracefile.TraceWriter(path, **model) as writer:
        writer.append("a", random_routing(np.random.default_rng(0), 20_000, **model))
    assert int(run_python(_READS, path).stdout) < 2048, "KiB more after 100 more reads, with 96 KiB of scratch in each"


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_library", None)
    monkeypatch.setattr(native, "_status", None)


def _no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setattr(native, "LIBRARY_PATH", str(tmp_path / "_decode.so"))
    return "not built"


def _no_shared_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    (tmp_path / "_decode.so").write_bytes(b"no library at all")
    monkeypatch.setattr(native, "LIBRARY_PATH", str(tmp_path / "_decode.so"))
    return "_decode.so"


def _another_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    shutil.copy(native.SOURCE_PATH, tmp_path / "_decode.c")
    with open(tmp_path / "_decode.c", "a") as file:
        file.write("\n")
    monkeypatch.setattr(native, "SOURCE_PATH", str(tmp_path / "_decode.c"))
    return "another version"


def _no_checksum(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setattr(crc32c._crc32c, "__file__", native.LIBRARY_PATH)
    return "no symbol"


def _no_decompressor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setattr(native.blosc, "__file__", native.LIBRARY_PATH)
    return "blosc_decompress_ctx"


def _wrong_checksum(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    right = native._checksum_address()
    function = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_ulong)
    # Right but for long chunks.
    wrong = function(lambda crc, data, length: function(right)(crc, data, length) + (length > 30_000))
    monkeypatch.setattr(native, "_checksum_address", lambda: ctypes.cast(wrong, ctypes.c_void_p).value)
    monkeypatch.setattr(native, "_kept_for_the_test", wrong, raising=False)
    return "self-check"


def _blind_checksum(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Takes whatever is there for right."""
    function = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_ulong)
    blind = function(
        lambda crc, data, length: int.from_bytes(ctypes.string_at(data + length, 4), "little") ^ 0xFFFFFFFF
    )
    monkeypatch.setattr(native, "_checksum_address", lambda: ctypes.cast(blind, ctypes.c_void_p).value)
    monkeypatch.setattr(native, "_kept_for_the_test", blind, raising=False)
    return "self-check"


@pytest.mark.parametrize(
    "hinder",
    [
        _no_library, _no_shared_library, _another_source, _no_checksum, _no_decompressor, _wrong_checksum,
        _blind_checksum,
    ],
)  # fmt: skip
@pytest.mark.usefixtures("unloaded")
def test_python_decodes_where_the_library_cannot(
    hinder: Callable[[pytest.MonkeyPatch, Path], str], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = hinder(monkeypatch, tmp_path)
    assert native.status().startswith("off (")
    assert why in native.status()
    assert native.library() is None
    ids = ids_of("a", 100, **SMALL)
    with tracefile.TraceWriter(path, **SMALL) as writer:
        np.testing.assert_array_equal(writer.append("a", ids).numpy(), ids)


@pytest.mark.parametrize(("value", "on"), [("0", False), ("1", True), ("", True)])
def test_the_environment_switches_it_off(value: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEFILE_NATIVE", value)
    monkeypatch.setattr(sys.modules["tracefile.settings"], "_current", None)
    assert tracefile.settings().native is on
    assert native.status() == ("on" if on else "off (switched off by TRACEFILE_NATIVE or configure)")


@pytest.mark.parametrize("value", [2, "yes", None])
def test_the_setting_is_a_truth_value(value: Any) -> None:
    with pytest.raises(errors.OptionError, match="native"):
        tracefile.configure(native=value)


def test_importing_loads_no_library() -> None:
    code = "import tracefile; print('_decode.so' in open('/proc/self/maps').read())"
    assert run_python(code).stdout == "False\n"


def _hook() -> Any:
    path = Path(__file__).parents[1] / "tools" / "build_native.py"
    spec = importlib.util.spec_from_file_location("build_native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_hook_compiles_what_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    target = tmp_path / "_decode.so"
    target.write_bytes(b"what was there before")
    assert _hook().compile_library(Path(native.SOURCE_PATH), target) is None
    assert os.listdir(tmp_path) == ["_decode.so"]
    native.check(native.load(str(target), native.SOURCE_PATH))


@pytest.mark.parametrize(
    ("compiler", "says"),
    [("/nonexistent/cc", "cannot run"), ("false", "exited with 1"), ("cc -Werror -DCRC_BYTES", "rror")],
)
def test_without_a_compiler_the_hook_says_so(
    compiler: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    problem = _hook().compile_library(Path(native.SOURCE_PATH), tmp_path / "_decode.so")
    assert says in problem
    assert "\n" not in problem
    assert not os.listdir(tmp_path)
