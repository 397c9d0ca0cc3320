"""What a writer refuses, and what a file system refuses it: an error that says where, and nothing written."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import resource
import shutil
import subprocess
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support import Faults, ids_of, in_fork, random_routing, run_python, tree

import tracefile
from tracefile.format import staging_path
from tracefile.store import unfinished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Array = np.ndarray[Any, Any]

SMALL = {"num_layers": 4, "top_k": 2, "num_experts": 64}
#: Global ids that differ from the positions, to see which of them a message gives.
LAYER_IDS = (10, 11, 12, 13)


def _writer(path: str, **options: Any) -> tracefile.TraceWriter:
    return tracefile.TraceWriter(path, **(SMALL | {"layer_ids": LAYER_IDS, "rows_per_chunk": 32} | options))


@pytest.fixture
def writer(path: str) -> Iterator[tracefile.TraceWriter]:
    """A writer whose trace holds one sample already."""
    with _writer(path) as writer:
        writer.append("before", ids_of("before", 5, **SMALL))
        yield writer


@contextlib.contextmanager
def _nothing_written(writer: tracefile.TraceWriter) -> Iterator[None]:
    """What is on disk is the same afterwards, and the writer goes on working."""
    before = tree(writer.path)
    yield
    assert tree(writer.path) == before
    assert list(unfinished(writer.path)) == []
    ids = ids_of("after", 40, writer.config.num_layers, writer.config.top_k, writer.config.num_experts)
    np.testing.assert_array_equal(writer.append("after", ids).numpy(), ids)
    assert list(tracefile.open(writer.path)) == ["before", "after"]


@pytest.mark.parametrize(
    ("dtype", "wrong"),
    [
        ("int8", -2),
        ("int8", -128),
        ("int8", 64),
        ("int8", 127),
        ("uint8", 64),
        ("uint8", 255),
        ("int16", -1),
        ("int16", 64),
        ("int16", -32_768),
        ("int16", 256),  # 0 in a byte
        ("uint16", 65_535),
        ("int32", 64),
        ("int32", -1),
        ("int32", 2**16 + 3),
        ("int32", -(2**31)),
        ("int64", 2**32),  # 0 in 32 bits
        ("int64", 2**32 + 5),
        ("int64", 2**63 - 1),
        ("int64", -(2**63)),
        ("int64", -(2**32)),
        ("uint32", 2**32 - 1),
        ("uint64", 2**63),
        ("uint64", 2**64 - 1),
        (">i4", 64),
        (">i4", -7),
        (">i8", 2**32),
        (">u2", 64),
    ],
)
@pytest.mark.parametrize("token", [0, 31, 32, 99])
def test_an_id_out_of_range(writer: tracefile.TraceWriter, dtype: str, wrong: int, token: int) -> None:
    ids = ids_of("x", 100, **SMALL).astype(dtype)
    ids[token, 2, 1] = wrong
    with _nothing_written(writer):
        with pytest.raises(tracefile.ExpertIdError) as caught:
            writer.append_many([("good", ids_of("good", 90, **SMALL)), ("prompt-7/3", ids)])
        error = caught.value
        assert (error.sample, error.token, error.layer, error.expert) == ("prompt-7/3", token, 2, wrong)
        assert isinstance(error, ValueError)
        for part in ("'prompt-7/3'", f"token {token}", "layer 2", "global id 12", f"expert {wrong} ", "[0, 64)"):
            assert part in str(error)


@pytest.mark.parametrize(
    ("dtype", "num_experts", "wrong"),
    [
        ("int8", 129, -127),  # 129 as an unsigned byte
        ("int8", 200, -100),  # 156 as an unsigned byte: in range there
        ("int8", 256, -100),
        ("int8", 256, -1),
        ("uint8", 200, 200),
        ("uint8", 255, 255),
        ("int16", 256, 256),
        ("int16", 512, -300),
        ("int16", 40_000, -25_536),  # 40,000 as unsigned 16 bits
        ("int16", 65_535, -1),
        ("uint16", 65_535, 65_535),
        ("int32", 256, 256),
        ("int32", 65_535, 65_535),
        ("int64", 65_535, 65_536),
    ],
)
def test_ids_that_another_signedness_or_width_would_let_pass(
    path: str, dtype: str, num_experts: int, wrong: int
) -> None:
    ids = np.zeros((40, 4, 2), dtype)
    ids[35, 3, 0] = wrong
    with _writer(path, num_experts=num_experts) as writer:
        writer.append("before", ids[:3])
        with _nothing_written(writer):
            with pytest.raises(tracefile.ExpertIdError) as caught:
                writer.append("x", ids)
            assert (caught.value.token, caught.value.layer, caught.value.expert) == (35, 3, wrong)


@pytest.mark.parametrize("where", ["one id", "one layer", "all but one id"])
def test_minus_one_in_part_of_a_row(writer: tracefile.TraceWriter, where: str) -> None:
    ids = ids_of("x", 60, **SMALL)
    ids[10] = -1  # a missing row is no mistake
    row = ids[40]
    if where == "one id":
        row[1, 1] = -1
    elif where == "one layer":
        row[1] = -1
    else:
        keep = int(row[3, 1])
        row[...] = -1
        row[3, 1] = keep
    with _nothing_written(writer):
        with pytest.raises(tracefile.ExpertIdError, match="never captured must be -1 throughout") as caught:
            writer.append("x", ids)
        assert (caught.value.token, caught.value.expert) == (40, -1)
        assert caught.value.layer == (0 if where == "all but one id" else 1)


def test_the_first_wrong_id_is_named(writer: tracefile.TraceWriter) -> None:
    ids = ids_of("x", 60, **SMALL)
    ids[50, 0, 0] = 999
    ids[45, 3, 1] = 777
    ids[45, 3, 0] = 666
    with pytest.raises(tracefile.ExpertIdError) as caught:
        writer.append("x", ids)
    assert (caught.value.token, caught.value.layer, caught.value.expert) == (45, 3, 666)


@pytest.mark.parametrize(
    "shape",
    [(), (8,), (10,), (10, 4), (10, 2), (10, 9), (10, 4, 3), (10, 5, 2), (4, 10, 2), (10, 2, 4), (1, 10, 4, 2), (0,)],
)
@pytest.mark.parametrize("library", ["numpy", "torch", "list"])
def test_wrong_shapes(writer: tracefile.TraceWriter, shape: tuple[int, ...], library: str) -> None:
    ids: Any = np.zeros(shape, np.int64)
    ids = {"numpy": lambda: ids, "torch": lambda: torch.from_numpy(ids), "list": ids.tolist}[library]()
    with _nothing_written(writer):
        with pytest.raises(tracefile.RoutedExpertsShapeError, match=r"\[tokens, 4, 2\] or \[tokens, 8\]") as caught:
            writer.append("x", ids)
        assert caught.value.sample == "x"
        assert str(list(shape)) in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros((3, 4, 2), np.float32),
        lambda: np.zeros((0, 4, 2), np.float64),
        lambda: np.zeros((3, 4, 2), bool),
        lambda: np.zeros((3, 4, 2), object),
        lambda: np.zeros((3, 4, 2), complex),
        lambda: np.zeros((3, 4, 2), "m8[s]"),
        lambda: np.full((3, 4, 2), "7"),
        lambda: np.zeros((3, 4), [("a", "i4"), ("b", "i4")]),
        lambda: torch.zeros(3, 4, 2),
        lambda: torch.zeros(3, 4, 2, dtype=torch.bfloat16),
        lambda: torch.zeros(3, 4, 2, dtype=torch.bool),
        lambda: torch.zeros(3, 4, 2, dtype=torch.complex64),
        lambda: [[[0.0, 1.0]] * 4],
        lambda: [[[0, 1]] * 4, [[0, 1]] * 3],
        lambda: [[[0, 1]] * 3 + [[0]]],
        lambda: [[[0, 2**70]] * 4],
        lambda: [[[True, False]] * 4],
        lambda: None,
        lambda: "ids",
        lambda: {"ids": 1},
        lambda: object(),
    ],
)
def test_what_is_no_array_of_integers(writer: tracefile.TraceWriter, make: Callable[[], Any]) -> None:
    with _nothing_written(writer):
        with pytest.raises(tracefile.RoutedExpertsTypeError, match="sample 'x'") as caught:
            writer.append("x", make())
        assert caught.value.sample == "x"
        assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("bad", [None, 7, b"bytes", ("a",), "lone surrogate \ud800", float("nan")])
def test_sample_ids_that_are_no_text(writer: tracefile.TraceWriter, bad: Any) -> None:
    with _nothing_written(writer), pytest.raises(tracefile.SampleIdError, match="a sample id is a string"):
        writer.append_many([("fine", np.zeros((1, 4, 2), int)), (bad, np.zeros((1, 4, 2), int))])


def test_the_same_id_twice_in_one_segment(writer: tracefile.TraceWriter) -> None:
    with _nothing_written(writer):
        with pytest.raises(tracefile.DuplicateSampleError, match="'a' is there twice") as caught:
            writer.append_many([(name, np.zeros((1, 4, 2), int)) for name in ("a", "b", "a")])
        assert caught.value.sample == "a"


def test_a_source_of_samples_that_fails(writer: tracefile.TraceWriter) -> None:
    def samples() -> Iterator[tuple[str, Array]]:
        yield "a", np.zeros((1, 4, 2), int)
        raise ZeroDivisionError("the engine died")

    with _nothing_written(writer), pytest.raises(ZeroDivisionError):
        writer.append_many(samples())


def test_a_closed_writer(path: str) -> None:
    with _writer(path) as writer:
        pass
    writer.close()
    for act in (lambda: writer.append("a", np.zeros((1, 4, 2), int)), lambda: writer.append_many([])):
        with pytest.raises(tracefile.ClosedError, match="closed; open another") as caught:
            act()
        assert caught.value.path == path
    assert list(tracefile.open(path)) == []
    assert not os.path.exists(staging_path(path))


@pytest.mark.parametrize(
    "change",
    [{"num_layers": 5, "layer_ids": None}, {"top_k": 3}, {"num_experts": 65}, {"layer_ids": None}],
    ids=lambda change: next(iter(change)),
)
def test_a_second_writer_of_another_configuration(writer: tracefile.TraceWriter, change: dict[str, Any]) -> None:
    with _nothing_written(writer):
        with pytest.raises(tracefile.ConfigurationMismatchError) as caught:
            _writer(writer.path, **change)
        error = caught.value
        assert error.theirs == writer.config
        assert error.ours != writer.config
        assert str(error.theirs) in str(error)
        assert str(error.ours) in str(error)
        assert error.path == writer.path


def test_a_second_writer_may_compress_and_cut_otherwise(path: str) -> None:
    rng = np.random.default_rng(1)
    samples = {}
    for codec in ("fast", "compact", "none"):
        for rows_per_chunk in (8, 64):
            with _writer(path, codec=codec, rows_per_chunk=rows_per_chunk) as writer:
                name = f"{codec}-{rows_per_chunk}"
                samples[name] = random_routing(rng, 100, **SMALL)
                writer.append(name, samples[name])
    trace = tracefile.open(path)
    assert list(trace) == list(samples)
    for name, ids in samples.items():
        np.testing.assert_array_equal(trace[name].numpy(), ids)


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 0},
        {"num_layers": -1},
        {"num_layers": 2.0},
        {"num_layers": True},
        {"num_layers": "4"},
        {"top_k": 0},
        {"top_k": 65},
        {"num_experts": 0},
        {"num_experts": 65_536},
        {"num_experts": 64.0},
        {"layer_ids": (1, 2, 3)},
        {"layer_ids": (1, 2, 3, 3)},
        {"layer_ids": (-1, 2, 3, 4)},
        {"layer_ids": (0.5, 1.5, 2.5, 3.5)},
        {"layer_ids": "abcd"},
        {"codec": "gzip"},
        {"codec": ""},
        {"source": "http"},
        {"layers_per_chunk": 0},
        {"layers_per_chunk": -1},
        {"layers_per_chunk": 1.5},
        {"rows_per_chunk": 0},
        {"rows_per_chunk": -8},
        {"rows_per_chunk": True},
    ],
    ids=str,
)
def test_options_out_of_range(path: str, options: dict[str, Any]) -> None:
    with pytest.raises(tracefile.OptionError) as caught:
        _writer(path, **options)
    assert isinstance(caught.value, ValueError)
    assert not os.path.lexists(path)
    assert not os.path.lexists(staging_path(path))


def _a_file(path: str) -> None:
    with open(path, "w") as file:
        file.write("not a trace")


def _a_directory_with_something(path: str) -> None:
    os.mkdir(path)
    _a_file(os.path.join(path, "notes.txt"))


def _a_zarr_node(kind: str) -> Callable[[str], None]:
    def make(path: str) -> None:
        run_python(
            f"import sys, zarr; zarr.{kind}",
            path,
        )

    return make


@pytest.mark.parametrize(
    "make",
    [
        _a_file,
        _a_directory_with_something,
        _a_zarr_node("open_group(sys.argv[1], mode='w', attributes={'made by': 'another'})"),
        _a_zarr_node("create_array(sys.argv[1], shape=(4,), dtype='u1')"),
        _a_zarr_node("open_group(sys.argv[1], mode='w', zarr_format=2)"),
    ],
    ids=["file", "directory", "group", "array", "group-v2"],
)
def test_something_else_is_at_the_path(path: str, make: Callable[[str], None]) -> None:
    make(path)
    before = tree(os.path.dirname(path))
    for act in (_writer, tracefile.open):
        with pytest.raises(tracefile.NotATraceError) as caught:
            act(path)
        assert caught.value.path == path
        assert path in str(caught.value)
    assert tree(os.path.dirname(path)) == before


def test_an_empty_directory_and_absent_parents_are_fine(tmp_path: Path) -> None:
    (tmp_path / "empty.trace").mkdir()
    for path in (tmp_path / "empty.trace", tmp_path / "a" / "b" / "c.trace"):
        with _writer(str(path)) as writer:
            writer.append("a", np.zeros((1, 4, 2), int))
        assert list(tracefile.open(path)) == ["a"]
        assert sorted(os.listdir(path.parent)) == sorted({path.name} | ({"a"} & set(os.listdir(path.parent))))


# What the file system refuses


def test_a_file_that_may_not_grow(writer: tracefile.TraceWriter) -> None:
    """EFBIG in the middle of a shard file, after part of it was written."""
    rng = np.random.default_rng(1)
    large = rng.integers(0, 64, (5000, 4, 2))

    def limited() -> tuple[bytes, dict[str, bytes], list[str]]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            writer.append("large", large)
        except tracefile.PublishError as error:
            return pickle.dumps(error), tree(writer.path), list(unfinished(writer.path))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            np.testing.assert_array_equal(writer.append("from the child", large).numpy(), large)
        raise AssertionError("no error")

    before = tree(writer.path)
    pickled, after, left = in_fork(limited)
    error = pickle.loads(pickled)
    assert error.errno == errno.EFBIG
    assert error.path == writer.path
    assert (after, left) == (before, [])
    np.testing.assert_array_equal(tracefile.open(writer.path)["from the child"].numpy(), large)


def test_a_full_file_system(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", mount], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a file system here; RLIMIT_FSIZE and injected errors stand in for it")
    try:
        path = str(mount / "full.trace")
        rng = np.random.default_rng(1)
        small, large = (rng.integers(0, 64, (rows, 4, 2)) for rows in (50, 20_000))
        with _writer(path, codec="none") as writer:
            writer.append("before", small)
            ballast = mount / "ballast"
            ballast.write_bytes(b"\1" * 120 * 1024)
            before = tree(path)
            with pytest.raises(tracefile.PublishError, match="free space or write elsewhere") as caught:
                writer.append("large", large)
            assert caught.value.errno == errno.ENOSPC
            assert isinstance(caught.value, OSError)
            assert tree(path) == before
            assert list(unfinished(path)) == []
            np.testing.assert_array_equal(writer.append("small", small).numpy(), small)
            ballast.unlink()
            np.testing.assert_array_equal(writer.append("large", large).numpy(), large)
        assert list(tracefile.open(path)) == ["before", "small", "large"]
        # nor can a trace be made where there is no room for its first file
        ballast.write_bytes(b"")
        with ballast.open("r+b", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"\1" * 4096):
                pass
        with pytest.raises(tracefile.PublishError) as caught:
            _writer(str(mount / "second.trace"))
        assert caught.value.errno == errno.ENOSPC
        assert sorted(os.listdir(mount)) == ["ballast", "full.trace"]
        tracefile.open(path).close()
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


@pytest.fixture
def shared_directory() -> Iterator[str]:
    """A directory that a user without privileges can reach, but not write to."""
    directory = tempfile.mkdtemp()
    os.chmod(directory, 0o755 if os.geteuid() == 0 else 0o555)
    yield directory
    os.chmod(directory, 0o755)
    shutil.rmtree(directory)


def _without_privileges(act: Callable[[], Any]) -> Any:
    """What ``act`` returns for a user who may not write everywhere."""

    def work() -> Any:
        if os.geteuid() == 0:
            os.setegid(65_534)
            os.seteuid(65_534)
        return act()

    return in_fork(work)


def _error_of(act: Callable[[], Any]) -> tracefile.TraceError | None:
    try:
        act()
    except tracefile.TraceError as error:
        return error
    return None


def test_a_parent_directory_without_permission(shared_directory: str) -> None:
    path = os.path.join(shared_directory, "a.trace")
    error = _without_privileges(lambda: _error_of(lambda: _writer(path)))
    assert isinstance(error, tracefile.PublishError)
    assert error.errno == errno.EACCES
    assert "parent directory must be writable" in str(error)
    assert os.listdir(shared_directory) == []


def test_a_writable_trace_in_a_parent_without_permission(shared_directory: str) -> None:
    path = os.path.join(shared_directory, "a.trace")
    os.chmod(shared_directory, 0o755)
    with _writer(path):
        pass
    for directory in (path, os.path.join(path, "segments")):
        os.chmod(directory, 0o777)
    os.chmod(shared_directory, 0o755 if os.geteuid() == 0 else 0o555)
    before = tree(shared_directory)
    error = _without_privileges(lambda: _error_of(lambda: _writer(path).append("a", np.zeros((1, 4, 2), int))))
    assert isinstance(error, tracefile.PublishError)
    assert error.errno == errno.EACCES
    assert "parent directory must be writable" in str(error)
    assert tree(shared_directory) == before


def _fail() -> None:
    raise OSError(errno.EIO, "injected")


def _every_fault(directory: str, attempt: Callable[[], Any], check: Callable[[OSError], None]) -> list[str]:
    """Make each call that ``attempt`` makes into the file system fail in turn, until an attempt meets none."""
    faults = Faults(directory, _fail)
    met = []
    for at in range(1, 200):
        faults.arm(at)
        try:
            attempt()
        except OSError as error:
            caught: OSError | None = error
        else:
            caught = None
        met += faults.disarm()
        if caught is not None:
            check(caught)
        elif len(met) < at:
            return met
    raise AssertionError("every attempt failed")


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("rows", [0, 100])
def test_every_call_of_append_may_fail(path: str, rows: int, durable: bool) -> None:
    ids = ids_of("x", rows, **SMALL)
    with _writer(path, durable=durable) as writer:
        writer.append("before", ids_of("before", 5, **SMALL))

    def work() -> list[str]:
        writer = _writer(path, durable=durable)
        reference = tree(path)

        def check(error: OSError) -> None:
            assert isinstance(error, tracefile.PublishError), error
            assert error.errno == errno.EIO
            assert list(unfinished(path)) == [], error
            if error.segment is not None:  # the one step after the rename: visible, and the error says so
                assert durable
                assert f"segment {error.segment} of {path} is visible" in str(error)
                assert "append its samples again" in str(error)
                np.testing.assert_array_equal(tracefile.open(path)["x"].numpy(), ids)
                shutil.rmtree(os.path.join(path, "segments", error.segment))
            assert tree(path) == reference

        met = _every_fault(os.path.dirname(path), lambda: writer.append("x", ids), check)
        writer.close()
        return met

    met = in_fork(work)
    assert len(met) >= (12 if durable else 6), met
    trace = tracefile.open(path)
    np.testing.assert_array_equal(trace["x"].numpy(), ids)
    assert not os.path.exists(staging_path(path))


@pytest.mark.parametrize("durable", [False, True])
def test_every_call_of_creating_a_trace_may_fail(path: str, durable: bool) -> None:
    directory = os.path.dirname(path)

    def work() -> list[str]:
        def check(error: OSError) -> None:
            assert isinstance(error, tracefile.PublishError), error
            assert error.errno == errno.EIO
            # Either nothing is there, or (where syncing the parent failed) a whole and empty trace that can be joined.
            assert os.listdir(directory) in ([], [os.path.basename(path)])
            if os.path.exists(path):
                assert durable
                assert list(tracefile.open(path)) == []
                shutil.rmtree(path)

        def attempt() -> None:
            _writer(path, durable=durable).close()

        return _every_fault(directory, attempt, check)

    met = in_fork(work)
    assert len(met) >= (10 if durable else 6), met
    assert list(tracefile.open(path)) == []


def test_a_file_system_that_writes_less_than_asked(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial writes are legal; a writer goes on where one stopped."""
    real_writev, real_write = os.writev, os.write
    rng = np.random.default_rng(1)
    calls = 0

    def writev(fd: int, pieces: list[bytes]) -> int:
        nonlocal calls
        calls += 1
        everything = b"".join(pieces)
        return real_write(fd, everything[: int(rng.integers(1, len(everything) + 1))])

    monkeypatch.setattr(os, "writev", writev)
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, bytes(data)[: int(rng.integers(1, 400))]))
    samples = {f"s{i}": ids_of(f"s{i}", 300, **SMALL) for i in range(20)}
    for codec in ("fast", "none"):
        with _writer(path, codec=codec, rows_per_chunk=16) as writer:
            writer.append_many(samples.items())
        trace = tracefile.open(path)
        for sample, ids in samples.items():
            np.testing.assert_array_equal(trace[sample].numpy(), ids)
    assert calls >= 2
    monkeypatch.setattr(os, "writev", real_writev)


def test_a_rename_whose_answer_was_lost(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may do it, and say that it failed."""
    real = os.rename

    def rename(source: str, target: str, **options: int) -> None:
        real(source, target, **options)
        raise OSError(errno.EIO, "no answer")

    with _writer(path) as writer:
        monkeypatch.setattr(os, "rename", rename)
        ids = ids_of("x", 9, **SMALL)
        np.testing.assert_array_equal(writer.append("x", ids).numpy(), ids)
        monkeypatch.undo()
    assert list(tracefile.open(path)) == ["x"]


def test_a_trace_that_was_deleted_under_its_writer(writer: tracefile.TraceWriter) -> None:
    shutil.rmtree(writer.path)
    with pytest.raises(tracefile.PublishError) as caught:
        writer.append("x", np.zeros((1, 4, 2), int))
    assert caught.value.errno == errno.ENOENT
    assert not os.path.exists(writer.path)
    assert list(unfinished(writer.path)) == []


def test_chunks_too_large_to_decode_are_refused(path: str) -> None:
    with pytest.raises(tracefile.OptionError, match="the most is"):
        tracefile.TraceWriter(path, num_layers=8, top_k=8, num_experts=64, rows_per_chunk=2**23)
    assert not os.path.exists(path)


def test_a_trace_behind_a_link_is_staged_beside_the_trace(path: str, rng: np.random.Generator) -> None:
    """Renaming must not cross file systems, which the link may."""
    real = f"{path}-real"
    os.mkdir(real)
    os.symlink(real, path)
    with tracefile.TraceWriter(path, num_layers=3, top_k=2, num_experts=16) as writer:
        assert staging_path(path) == staging_path(real)
        experts = writer.append("a", random_routing(rng, 5, 3, 2, 16))
    assert list(tracefile.open(real)) == ["a"]
    assert experts[:1].numpy().shape == (1, 3, 2)
