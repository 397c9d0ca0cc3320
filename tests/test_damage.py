"""Files that are not what a writer published: an error of the right kind that says where, never wrong ids.

What could crash the process (a page of a mapping that is gone, a Blosc header that lies) is read in a forked child,
so that a signal fails one test.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import random
import shutil
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from crc32c import crc32c
from support import ids_of, in_fork, run_python

import tracefile
from tracefile import documents, errors, metadata
from tracefile.format import HEADER_BYTES
from tracefile.metadata import SegmentHeader, TraceHeader
from tracefile.shard import encode_index, index_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Array = np.ndarray[Any, Any]

SMALL = {"num_layers": 3, "top_k": 2, "num_experts": 16}
WIDE = {"num_layers": 3, "top_k": 2, "num_experts": 300}
CODECS = ["fast", "compact", "none"]
SOURCES = ["mmap", "pread"]
ABSENT = 2**64 - 1


class Damaged:
    """A small trace of two segments, and ways to damage it."""

    def __init__(self, path: str, codec: str, model: dict[str, int], rows: int = 20) -> None:
        self.path = path
        self.model = model
        self.values: dict[str, Array] = {}
        self.segments: list[str] = []
        with tracefile.TraceWriter(path, **model, codec=codec, layers_per_chunk=2, rows_per_chunk=16) as writer:
            for samples in (("a", "b"), ("c", "d")):
                ids = {sample: ids_of(sample, rows, **model) for sample in samples}
                writer.append_many(ids.items())
                self.values |= ids
        with tracefile.open(path) as trace:
            self.segments = list(trace.segments)
            self.headers = dict(trace.segments)
            self.root = TraceHeader(trace.uuid, trace.config)

    def document(self, number: int = 0) -> str:
        return os.path.join(self.path, "segments", self.segments[number], "zarr.json")

    def shard(self, number: int = 0) -> str:
        return os.path.join(self.path, "segments", self.segments[number], "c", "0", "0", "0")

    def read(self, source: str = "mmap", samples: str = "abcd") -> dict[str, Array]:
        """Open the trace anew and read samples of it."""
        trace = tracefile.open(self.path, source=source)
        try:
            return {sample: trace[sample].numpy() for sample in samples}
        finally:
            trace.close()

    def check(self, values: dict[str, Array]) -> None:
        for sample, ids in values.items():
            np.testing.assert_array_equal(ids, self.values[sample])

    def chunks(self, number: int = 0) -> tuple[list[int], list[int]]:
        """Offsets and lengths of a shard file's chunks."""
        layer_chunks, row_chunks = self.headers[self.segments[number]].grid
        tail = index_bytes(layer_chunks * row_chunks)
        with open(self.shard(number), "rb") as file:
            raw = file.read()
        table = np.frombuffer(raw[-tail:-4], "<u8").reshape(-1, 2)
        return table[:, 0].tolist(), table[:, 1].tolist()

    def rewrite_index(self, change: Callable[[list[int], list[int]], object], number: int = 0) -> None:
        """Change the index and make its checksum good."""
        offsets, lengths = self.chunks(number)
        size = index_bytes(len(offsets))
        change(offsets, lengths)
        with open(self.shard(number), "r+b") as file:
            file.seek(-size, os.SEEK_END)
            file.write(encode_index(offsets, lengths))

    def rewrite_chunk(self, chunk: int, change: Callable[[bytes], bytes], number: int = 0) -> None:
        """Change a chunk's payload and make every checksum, the index and the document good."""
        offsets, lengths = self.chunks(number)
        with open(self.shard(number), "rb") as file:
            raw = file.read()
        pieces, at = [raw[:HEADER_BYTES]], HEADER_BYTES
        for i in sorted(range(len(offsets)), key=offsets.__getitem__):
            payload = raw[offsets[i] : offsets[i] + lengths[i] - 4]
            if i == chunk:
                payload = change(payload)
            pieces.append(payload + struct.pack("<I", crc32c(payload)))
            offsets[i], lengths[i] = at, len(pieces[-1])
            at += lengths[i]
        pieces.append(encode_index(offsets, lengths))
        with open(self.shard(number), "wb") as file:
            file.write(b"".join(pieces))
        self.publish(dataclasses.replace(self.headers[self.segments[number]], shard_bytes=len(b"".join(pieces))))

    def publish(self, header: SegmentHeader) -> None:
        """Replace a segment's document by a sound one."""
        with open(os.path.join(self.path, "segments", header.id, "zarr.json"), "wb") as file:
            file.write(documents.encode(documents.segment_document(header)))

    def rewrite_document(self, change: Callable[[dict[str, Any]], object], number: int = 0) -> None:
        """Change a segment's document and make its checksum good."""
        with open(self.document(number)) as file:
            document = json.load(file)
        change(document)
        with open(self.document(number), "w") as file:
            json.dump(documents.sealed(document), file)


@pytest.fixture
def damaged(path: str) -> Damaged:
    return Damaged(path, "fast", SMALL)


@pytest.fixture(params=CODECS)
def in_each_codec(path: str, request: pytest.FixtureRequest) -> Damaged:
    return Damaged(path, request.param, WIDE if request.param == "compact" else SMALL)


def _each_flip(name: str, every_bit: bool) -> Iterator[tuple[int, int]]:
    """Flip each bit of a file in turn, and flip it back; or only two bits, and all, of each byte."""
    with open(name, "r+b", buffering=0) as file:
        raw = file.read()
        for position, byte in enumerate(raw):
            bits = range(8) if every_bit else (position % 8, (position + 3) % 8)
            for mask in [*(1 << bit for bit in bits), 0xFF]:
                os.pwrite(file.fileno(), bytes([byte ^ mask]), position)
                yield position, mask
            os.pwrite(file.fileno(), bytes([byte]), position)
    with open(name, "rb") as file:
        assert file.read() == raw


EXTENT = pytest.mark.parametrize(
    "every_bit", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some bits", "every bit"]
)


@EXTENT
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("codec", CODECS)
def test_each_flipped_byte_of_a_shard_file(path: str, codec: str, source: str, every_bit: bool) -> None:
    damaged = Damaged(path, codec, {"num_layers": 3, "top_k": 2, "num_experts": 8}, rows=9)
    offsets, lengths = damaged.chunks()
    row_chunks = damaged.headers[damaged.segments[0]].grid[1]
    index_start = os.path.getsize(damaged.shard()) - index_bytes(len(offsets))
    assert index_start == HEADER_BYTES + sum(lengths)
    with tracefile.open(path, source=source) as trace:
        handles = [trace["a"], trace["b"]]
    for position, mask in _each_flip(damaged.shard(), every_bit):
        try:
            for experts in handles:
                experts.numpy()
        except tracefile.TraceError as error:
            kind, where, chunk = type(error), (error.path, error.segment), error.chunk
        else:
            raise AssertionError(f"byte {position} ^ {mask} was not noticed")
        assert where == (damaged.shard(), damaged.segments[0])
        hit = [i for i in range(len(offsets)) if 0 <= position - offsets[i] < lengths[i]]
        expected = (
            (tracefile.ChunkDamagedError, divmod(hit[0], row_chunks)) if hit else (tracefile.ShardDamagedError, None)
        )
        assert (kind, chunk) == expected, (position, mask)
        trace.close()  # what is open of a segment is not checked again
    damaged.check(damaged.read(source))


def _check_flipped_document(
    damaged: Damaged, name: str, every_bit: bool, allowed: tuple[type[tracefile.TraceError], ...]
) -> None:
    refused = flips = 0
    for position, mask in _each_flip(name, every_bit):
        flips += 1
        try:
            trace = tracefile.open(damaged.path)
        except allowed as error:
            named, message = str(error.path), str(error)
        else:
            named = message = ""
        if named:
            assert named in (name, damaged.path)
            assert named in message
            refused += 1
            continue
        # The flip hit something that the reader does not rely on.
        assert (trace.uuid, trace.config) == (damaged.root.uuid, damaged.root.config), (position, mask)
        assert {s: trace.entry(s) for s in trace} == {
            s: entry for header in damaged.headers.values() for s, entry in header.samples.items()
        }
        damaged.check({sample: trace[sample].numpy() for sample in trace})
        trace.close()
    assert flips >= refused > flips // 2


@EXTENT
def test_each_flipped_byte_of_the_root_document(path: str, every_bit: bool) -> None:
    damaged = Damaged(path, "fast", SMALL, rows=9)
    allowed = (tracefile.MetadataDamagedError, tracefile.FormatVersionError, tracefile.NotATraceError)
    _check_flipped_document(damaged, os.path.join(path, "zarr.json"), every_bit, allowed)


@EXTENT
def test_each_flipped_byte_of_a_segment_document(path: str, every_bit: bool) -> None:
    damaged = Damaged(path, "none", WIDE, rows=9)
    allowed = (tracefile.MetadataDamagedError, tracefile.FormatVersionError)
    _check_flipped_document(damaged, damaged.document(1), every_bit, allowed)


@pytest.mark.parametrize("source", SOURCES)
def test_each_flipped_byte_of_a_document_behind_a_handle(damaged: Damaged, source: str) -> None:
    """A handle opens its segment by itself, without a listing."""
    with tracefile.open(damaged.path, source=source) as trace:
        handle = trace["c"]
    with open(damaged.document(1), "r+b", buffering=0) as file:
        raw = file.read()
        for position in range(0, len(raw), 7):
            os.pwrite(file.fileno(), bytes([raw[position] ^ 0x10]), position)
            try:
                values = handle.numpy()
            except (tracefile.MetadataDamagedError, tracefile.FormatVersionError) as error:
                named = (error.path, error.segment)
            else:
                np.testing.assert_array_equal(values, damaged.values["c"])
                named = (damaged.document(1), damaged.segments[1])
            assert named == (damaged.document(1), damaged.segments[1])
            trace.close()
            os.pwrite(file.fileno(), raw[position : position + 1], position)


@pytest.mark.parametrize("source", SOURCES)
def test_a_shard_file_cut_short(in_each_codec: Damaged, source: str) -> None:
    damaged = in_each_codec
    with open(damaged.shard(), "rb") as file:
        raw = file.read()
    for length in sorted({*range(0, len(raw), 7), *range(60, 70), *range(len(raw) - 70, len(raw))}):
        with open(damaged.shard(), "wb") as file:
            file.write(raw[:length])
        with pytest.raises(tracefile.ShardDamagedError, match=f"has {length} bytes, but .* with {len(raw)}") as caught:
            damaged.read(source, "a")
        assert (caught.value.path, caught.value.segment) == (damaged.shard(), damaged.segments[0])
        if length % 50 == 0:
            damaged.check(damaged.read(source, "cd"))
    for extra in (b"\0", b"\0" * 4096, raw):
        with open(damaged.shard(), "wb") as file:
            file.write(raw + extra)
        with pytest.raises(tracefile.ShardDamagedError):
            damaged.read(source, "a")


def test_documents_cut_short(damaged: Damaged) -> None:
    root = os.path.join(damaged.path, "zarr.json")
    for name in (root, damaged.document(0), damaged.document(1)):
        with open(name, "rb") as file:
            raw = file.read()
        for length in sorted({*range(0, len(raw), 5), *range(len(raw) - 10, len(raw))}):
            with open(name, "wb") as file:
                file.write(raw[:length])
            with pytest.raises(tracefile.MetadataDamagedError) as caught:
                tracefile.open(damaged.path)
            assert caught.value.path == name
            assert caught.value.segment == next((s for s in damaged.segments if s in name), None)
            if name == root and length % 100 == 0:
                with pytest.raises(tracefile.MetadataDamagedError):
                    tracefile.TraceWriter(damaged.path, **SMALL)
        with open(name, "wb") as file:
            file.write(raw)
    damaged.check(damaged.read())


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("length", [0, 1, 64, 100, 4096, -1])
def test_cut_after_it_was_opened(path: str, length: int, source: str) -> None:
    """Touching a page of a mapping that the file no longer has would kill the process."""
    damaged = Damaged(path, "none", SMALL, rows=4000)

    def work() -> list[str]:
        trace = tracefile.open(path, source=source)
        experts = trace["a"]
        np.testing.assert_array_equal(experts[:16].numpy(), damaged.values["a"][:16])
        os.truncate(damaged.shard(), length if length >= 0 else os.path.getsize(damaged.shard()) - 1)
        kinds = []
        for wanted in (experts, trace["b"], experts[:16], experts[3000:3001, 1], trace["b"][-1:]):
            try:
                wanted.numpy()
                kinds.append("values")
            except tracefile.ShardDamagedError as error:
                kinds.append("refused" if (error.path, error.segment) == (damaged.shard(), damaged.segments[0]) else "")
        return kinds

    assert in_fork(work) == ["refused"] * 5
    damaged.check(damaged.read(source, "cd"))


@pytest.mark.parametrize("source", SOURCES)
def test_overwritten_with_zeros_after_it_was_opened(path: str, source: str) -> None:
    """The size is what it was, so the checksums must tell."""
    damaged = Damaged(path, "none", SMALL, rows=4000)

    def work() -> str:
        trace = tracefile.open(path, source=source)
        trace["a"][:16].numpy()
        size = os.path.getsize(damaged.shard())
        os.truncate(damaged.shard(), 0)
        os.truncate(damaged.shard(), size)
        try:
            trace["a"][1000:].numpy()
        except tracefile.TraceError as error:
            return type(error).__name__
        return "values"

    assert in_fork(work) == "ChunkDamagedError"


@pytest.mark.parametrize("source", SOURCES)
def test_a_flip_after_it_was_opened(in_each_codec: Damaged, source: str) -> None:
    damaged = in_each_codec
    with tracefile.open(damaged.path, source=source) as trace:
        trace["a"][:1, :1].numpy()
        offsets, lengths = damaged.chunks()
        with open(damaged.shard(), "r+b") as file:
            for offset, length in zip(offsets, lengths, strict=True):
                file.seek(offset + length // 2)
                byte = file.read(1)[0]
                file.seek(offset + length // 2)
                file.write(bytes([byte ^ 1]))
        with pytest.raises(tracefile.ChunkDamagedError) as caught:
            trace["b"].numpy()
        assert caught.value.chunk is not None
        assert f"chunk (layers {caught.value.chunk[0]}, rows {caught.value.chunk[1]})" in str(caught.value)
        assert "restore the file" in str(caught.value)


def test_only_the_damaged_chunk_is_lost(damaged: Damaged) -> None:
    offsets, _ = damaged.chunks()
    with open(damaged.shard(), "r+b") as file:
        file.seek(offsets[5] + 3)  # layers 2, the second rows of the grid's four: rows 16 to 20 of "a"
        file.write(b"\xff\xff")
    with tracefile.open(damaged.path) as trace:
        np.testing.assert_array_equal(trace["a"][:16].numpy(), damaged.values["a"][:16])
        np.testing.assert_array_equal(trace["a"][:, :2].numpy(), damaged.values["a"][:, :2])
        np.testing.assert_array_equal(trace["b"].numpy(), damaged.values["b"])
        with pytest.raises(tracefile.ChunkDamagedError) as caught:
            trace["a"][16:, 2].numpy()
        assert caught.value.chunk == (1, 1)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("codec", ["fast", "none"])
@pytest.mark.parametrize("threads", [1, 4])
def test_damage_met_by_decode_threads(path: str, codec: str, source: str, threads: int) -> None:
    damaged = Damaged(path, codec, SMALL, rows=2000)
    offsets, _ = damaged.chunks()
    victim = len(offsets) // 2 - 3
    with open(damaged.shard(), "r+b") as file:
        file.seek(offsets[victim] + 5)
        file.write(b"\xaa\x55\xaa")
    tracefile.configure(decode_threads=threads)
    with pytest.raises(tracefile.ChunkDamagedError) as caught:
        damaged.read(source, "ab")
    assert caught.value.chunk == divmod(victim, damaged.headers[damaged.segments[0]].grid[1])
    damaged.check(damaged.read(source, "cd"))


# Missing and swapped files


def test_a_missing_shard_file(damaged: Damaged) -> None:
    os.unlink(damaged.shard())
    with pytest.raises(tracefile.SegmentMissingError, match="deleted or not copied whole") as caught:
        damaged.read(samples="a")
    assert (caught.value.path, caught.value.segment) == (damaged.shard(), damaged.segments[0])
    assert isinstance(caught.value, FileNotFoundError)
    damaged.check(damaged.read(samples="cd"))


@pytest.mark.parametrize("what", ["segment", "shard directory", "shard, now a directory", "document"])
def test_missing_behind_a_handle(damaged: Damaged, what: str) -> None:
    with tracefile.open(damaged.path) as trace:
        handle = trace["a"]
    directory = os.path.dirname(damaged.document())
    if what == "segment":
        shutil.rmtree(directory)
    elif what == "shard directory":
        shutil.rmtree(os.path.join(directory, "c"))
        with open(os.path.join(directory, "c"), "w") as file:
            file.write("a file where a directory should be")
    elif what == "shard, now a directory":
        os.unlink(damaged.shard())
        os.mkdir(damaged.shard())
    else:
        os.unlink(damaged.document())
    kind = tracefile.ShardDamagedError if what == "shard, now a directory" else tracefile.SegmentMissingError
    with pytest.raises(kind) as caught:
        handle.numpy()
    assert caught.value.segment == damaged.segments[0]
    assert caught.value.path in (damaged.document(), damaged.shard())
    assert str(caught.value.path) in str(caught.value)
    damaged.check({"c": handle_of(damaged, "c").numpy()} if what != "document" else {})


def handle_of(damaged: Damaged, sample: str) -> tracefile.LazyRoutedExperts:
    return tracefile.open(damaged.path)[sample]


def test_a_segment_directory_without_its_document(damaged: Damaged) -> None:
    os.unlink(damaged.document())
    with pytest.raises(tracefile.SegmentMissingError) as caught:
        tracefile.open(damaged.path)
    assert (caught.value.path, caught.value.segment) == (damaged.document(), damaged.segments[0])


@pytest.mark.parametrize("instead", ["nothing", "a file"])
def test_the_directory_of_segments_is_gone(damaged: Damaged, instead: str) -> None:
    directory = os.path.join(damaged.path, "segments")
    shutil.rmtree(directory)
    if instead == "a file":
        with open(directory, "w") as file:
            file.write("")
    with pytest.raises(tracefile.MetadataDamagedError, match="restore the trace") as caught:
        tracefile.open(damaged.path)
    assert caught.value.path == damaged.path


@pytest.mark.parametrize("source", SOURCES)
def test_swapped_shard_files(path: str, source: str) -> None:
    damaged = Damaged(path, "none", SMALL)
    assert os.path.getsize(damaged.shard(0)) == os.path.getsize(damaged.shard(1))
    _swap(damaged.shard(0), damaged.shard(1))
    for number, sample in ((0, "a"), (1, "c")):
        with pytest.raises(tracefile.ShardDamagedError, match="swapped with another") as caught:
            damaged.read(source, sample)
        assert (caught.value.path, caught.value.segment) == (damaged.shard(number), damaged.segments[number])


def _swap(one: str, other: str) -> None:
    os.rename(one, one + ".swap")
    os.rename(other, one)
    os.rename(one + ".swap", other)


@pytest.mark.parametrize("what", ["directories", "documents"])
def test_swapped_segments(path: str, what: str) -> None:
    damaged = Damaged(path, "none", SMALL)
    with tracefile.open(path) as trace:
        handle = trace["c"]
    if what == "directories":
        _swap(os.path.dirname(damaged.document(0)), os.path.dirname(damaged.document(1)))
    else:
        _swap(damaged.document(0), damaged.document(1))
    with pytest.raises(tracefile.MetadataDamagedError, match="renamed or swapped") as caught:
        tracefile.open(path)
    assert (caught.value.path, caught.value.segment) == (damaged.document(0), damaged.segments[0])
    with pytest.raises(tracefile.MetadataDamagedError) as caught:
        handle.numpy()
    assert (caught.value.path, caught.value.segment) == (damaged.document(1), damaged.segments[1])


def test_a_segment_under_another_name(damaged: Damaged) -> None:
    directory = os.path.dirname(damaged.document())
    shutil.copytree(directory, os.path.join(os.path.dirname(directory), "f" * 16 + "-copy"))
    with pytest.raises(tracefile.MetadataDamagedError, match="renamed or swapped"):
        tracefile.open(damaged.path)


def test_a_segment_of_another_trace(damaged: Damaged) -> None:
    other = Damaged(damaged.path + ".other", "fast", SMALL)
    shutil.copytree(os.path.dirname(other.document()), os.path.join(damaged.path, "segments", other.segments[0]))
    with pytest.raises(tracefile.MetadataDamagedError, match="belongs to trace") as caught:
        tracefile.open(damaged.path)
    assert caught.value.segment == other.segments[0]
    assert other.root.uuid in str(caught.value)
    assert damaged.root.uuid in str(caught.value)


def test_the_root_of_another_trace(damaged: Damaged) -> None:
    other = Damaged(damaged.path + ".other", "fast", SMALL)
    shutil.copy(os.path.join(other.path, "zarr.json"), os.path.join(damaged.path, "zarr.json"))
    with pytest.raises(tracefile.MetadataDamagedError, match="belongs to trace"):
        tracefile.open(damaged.path)


# Lies with good checksums


_LYING_INDEXES: dict[str, Callable[[list[int], list[int]], object]] = {
    "offset behind the file": lambda o, n: o.__setitem__(1, 10**6),
    "offset in the index": lambda o, n: o.__setitem__(1, o[1] + sum(n)),
    "offset in the header": lambda o, n: o.__setitem__(1, 0),
    "offset at the end of 64 bits": lambda o, n: o.__setitem__(1, ABSENT - 1),
    "offset beyond 63 bits": lambda o, n: o.__setitem__(1, 2**63 + o[1]),
    "only the offset absent": lambda o, n: o.__setitem__(1, ABSENT),
    "only the length absent": lambda o, n: n.__setitem__(1, ABSENT),
    "length 0": lambda o, n: n.__setitem__(1, 0),
    "length of a checksum": lambda o, n: n.__setitem__(1, 4),
    "length into the index": lambda o, n: n.__setitem__(1, sum(n) + 1),
    "length at the end of 64 bits": lambda o, n: n.__setitem__(1, ABSENT - 1),
    "length that wraps round": lambda o, n: n.__setitem__(1, 2**64 - o[1]),
    "all zero": lambda o, n: [numbers.__setitem__(1, 0) for numbers in (o, n)],
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("lie", _LYING_INDEXES)
def test_an_index_that_points_out_of_its_file(damaged: Damaged, lie: str, source: str) -> None:
    damaged.rewrite_index(_LYING_INDEXES[lie])

    def work() -> tracefile.ShardDamagedError:
        with pytest.raises(tracefile.ShardDamagedError, match="points outside of the file") as caught:
            damaged.read(source, "a")
        return caught.value

    error = in_fork(work)
    assert (error.path, error.segment) == (damaged.shard(), damaged.segments[0])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("change", [-1, 1, -10, 10])
def test_an_index_whose_lengths_are_off(in_each_codec: Damaged, change: int, source: str) -> None:
    damaged = in_each_codec
    damaged.rewrite_index(lambda offsets, lengths: lengths.__setitem__(0, lengths[0] + change))
    with pytest.raises(tracefile.ChunkDamagedError) as caught:
        damaged.read(source, "a")
    assert caught.value.chunk == (0, 0)


@pytest.mark.parametrize("source", SOURCES)
def test_a_chunk_that_was_never_written(in_each_codec: Damaged, source: str) -> None:
    damaged = in_each_codec

    def absent(offsets: list[int], lengths: list[int]) -> None:
        offsets[5] = lengths[5] = ABSENT

    damaged.rewrite_index(absent)
    with tracefile.open(damaged.path, source=source) as trace:
        with pytest.raises(tracefile.ChunkMissingError, match="never written") as caught:
            trace["a"].numpy()
        error = caught.value
        assert (error.path, error.segment, error.chunk) == (damaged.shard(), damaged.segments[0], (1, 1))
        assert isinstance(error, LookupError)
        np.testing.assert_array_equal(trace["a"][:16].numpy(), damaged.values["a"][:16])
        np.testing.assert_array_equal(trace["a"][:, :2].numpy(), damaged.values["a"][:, :2])
        np.testing.assert_array_equal(trace["b"].numpy(), damaged.values["b"])


def _with_fields(**changes: int) -> Callable[[bytes], bytes]:
    """Change fields of a Blosc header."""
    places = {"version": (0, 1), "flags": (2, 1), "typesize": (3, 1), "nbytes": (4, 4), "blocksize": (8, 4)}
    places |= {"cbytes": (12, 4), "first block": (16, 4)}

    def change(payload: bytes) -> bytes:
        raw = bytearray(payload)
        for name, value in changes.items():
            offset, size = places[name]
            raw[offset : offset + size] = (value % 256**size).to_bytes(size, "little")
        return bytes(raw)

    return change


_DECODED = 2 * 16 * 2  # bytes of a chunk of SMALL


@pytest.mark.parametrize(
    "lie",
    [
        _with_fields(nbytes=0),
        _with_fields(nbytes=_DECODED - 1),
        _with_fields(nbytes=_DECODED + 1),
        _with_fields(nbytes=2**31 - 1),
        _with_fields(nbytes=-1),
        _with_fields(cbytes=0),
        _with_fields(cbytes=16),
        _with_fields(cbytes=2**31 - 1),
        _with_fields(cbytes=-1),
        _with_fields(nbytes=2**31 - 1, cbytes=2**31 - 1),
        _with_fields(version=99),
        _with_fields(blocksize=0),
        _with_fields(blocksize=-1),
        _with_fields(blocksize=2**31 - 1),
        lambda payload: payload[:-1],
        lambda payload: payload + b"\0",
        lambda payload: payload[:16],
        lambda payload: payload[:15],
        lambda payload: payload[:1],
        lambda payload: b"\0" * 16,
        lambda payload: b"\xff" * len(payload),
    ],
)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("codec", ["fast", "compact"])
def test_blosc_headers_that_lie(path: str, codec: str, source: str, lie: Callable[[bytes], bytes]) -> None:
    damaged = Damaged(path, codec, SMALL)
    damaged.rewrite_chunk(1, lie)

    def work() -> tracefile.ChunkDamagedError:
        with pytest.raises(tracefile.ChunkDamagedError) as caught:
            damaged.read(source, "a")
        return caught.value

    error = in_fork(work)
    assert (error.path, error.segment, error.chunk) == (damaged.shard(), damaged.segments[0], (0, 1))


@pytest.mark.parametrize("codec", ["fast", "compact"])
@pytest.mark.parametrize("rows", [20, 3000])
def test_blosc_chunks_of_noise_do_not_crash(path: str, codec: str, rows: int) -> None:
    """Headers that agree about sizes, and noise behind them. Which ids that gives nobody can say; no signal does."""
    from tracefile.format import CODECS as BLOSC
    from tracefile.shard import ChunkDecoder, encode_chunk

    chunk = ids_of("noise", rows, **SMALL).astype(np.uint8)
    payload, _ = encode_chunk(chunk, BLOSC[codec])  # type: ignore[index]
    decoder = ChunkDecoder(BLOSC[codec], chunk.nbytes, row_chunks=1, segment="s", path="p")  # type: ignore[index]

    def work() -> int:
        rng = random.Random(1)
        refused = 0
        for _ in range(2000):
            raw = bytearray(payload)
            fields = [0, 1, 2, 3, 8, 9, 10, 11, *range(16, min(40, len(raw)))]
            for _ in range(rng.randrange(1, 6)):
                raw[rng.choice([rng.choice(fields), rng.randrange(16, len(raw))])] = rng.randrange(256)
            try:
                decoder.decode(0, memoryview(bytes(raw) + struct.pack("<I", crc32c(bytes(raw)))))
            except tracefile.ChunkDamagedError:
                refused += 1
        return refused

    assert in_fork(work) > 200


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("change", [lambda p: p[:-1], lambda p: p + b"\0", lambda p: p[:1], lambda p: p * 2])
def test_uncompressed_chunks_of_another_size(path: str, source: str, change: Callable[[bytes], bytes]) -> None:
    damaged = Damaged(path, "none", SMALL)
    damaged.rewrite_chunk(1, change)
    with pytest.raises(tracefile.ChunkDamagedError, match=f"bytes instead of {_DECODED}") as caught:
        damaged.read(source, "a")
    assert caught.value.chunk == (0, 1)
    damaged.check(damaged.read(source, "bcd"))


def _ours(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda document: change(document["attributes"]["tracefile"])


def _first_sample(value: Any) -> Callable[[dict[str, Any]], object]:
    return _ours(lambda ours: ours["samples"].__setitem__(0, value))


_LYING_DOCUMENTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "an array, not a group, of documents": lambda d: d.update(shape=[3]),
    "no shape": lambda d: d.pop("shape"),
    "rows of text": lambda d: d["shape"].__setitem__(1, "64"),
    "negative rows": lambda d: d["shape"].__setitem__(1, -1),
    "rows that are no integer": lambda d: d["shape"].__setitem__(1, 52.0),
    "rows without end": lambda d: d["shape"].__setitem__(1, 2**70),
    "more layers": lambda d: d["shape"].__setitem__(0, 4),
    "another dtype": lambda d: d.update(data_type="uint16"),
    "another fill value": lambda d: d.update(fill_value=0),
    "another separator": lambda d: d["chunk_key_encoding"]["configuration"].update(separator="."),
    "no codecs": lambda d: d.update(codecs=[]),
    "a codec more": lambda d: d["codecs"].append({"name": "gzip"}),
    "index at the start": lambda d: d["codecs"][0]["configuration"].update(index_location="start"),
    "index without a checksum": lambda d: d["codecs"][0]["configuration"]["index_codecs"].pop(),
    "chunks without a checksum": lambda d: d["codecs"][0]["configuration"]["codecs"].pop(),
    "another compressor": lambda d: d["codecs"][0]["configuration"]["codecs"][1].update(name="gzip"),
    "no rows a chunk": lambda d: d["codecs"][0]["configuration"]["chunk_shape"].__setitem__(1, 0),
    "fractional rows a chunk": lambda d: d["codecs"][0]["configuration"]["chunk_shape"].__setitem__(1, 16.0),
    "other top_k a chunk": lambda d: d["codecs"][0]["configuration"]["chunk_shape"].__setitem__(2, 1),
    "another codec's name": _ours(lambda o: o.update(codec="none")),
    "no codec's name": _ours(lambda o: o.update(codec="gzip")),
    "a codec that is a list": _ours(lambda o: o.update(codec=["fast"])),
    "more experts": _ours(lambda o: o.update(num_experts=17)),
    "negative size": _ours(lambda o: o.update(shard_bytes=-1)),
    "no size": _ours(lambda o: o.pop("shard_bytes")),
    "a size of true": _ours(lambda o: o.update(shard_bytes=True)),
    "no samples": _ours(lambda o: o.pop("samples")),
    "samples that are a number": _ours(lambda o: o.update(samples=7)),
    "samples that are an object": _ours(lambda o: o.update(samples={"a": []})),
    "a sample that is null": _first_sample(None),
    "a sample without spans": _first_sample(["a"]),
    "a sample id that is a number": _first_sample([7, [[0, 0, 20]]]),
    "a sample id that is a list": _first_sample([["a"], [[0, 0, 20]]]),
    "a sample id twice": _first_sample(["b", [[0, 0, 20]]]),
    "a span of two": _first_sample(["a", [[0, 20]]]),
    "a span of text": _first_sample(["a", [["0", "0", "20"]]]),
    "a span backwards": _first_sample(["a", [[0, 20, 0]]]),
    "a negative span": _first_sample(["a", [[0, -5, 20]]]),
    "a span behind the rows": _first_sample(["a", [[0, 0, 53]]]),
    "a span of an unknown segment": _first_sample(["a", [[1, 0, 20]]]),
    "a span of a negative segment": _first_sample(["a", [[-1, 0, 20]]]),
    "missing rows behind the rows": _first_sample(["a", [[0, 0, 20]], [[19, 21]]]),
    "missing rows in disorder": _first_sample(["a", [[0, 0, 20]], [[5, 6], [3, 4]]]),
    "missing rows that are empty": _first_sample(["a", [[0, 0, 20]], [[5, 5]]]),
    "missing rows that are numbers": _first_sample(["a", [[0, 0, 20]], [5]]),
    "a reference out of the directory": _ours(lambda o: o.update(references=["../../other.trace/segments/x"])),
    "a reference that is a number": _ours(lambda o: o.update(references=[7])),
    "no references": _ours(lambda o: o.pop("references")),
}


@pytest.mark.parametrize("lie", _LYING_DOCUMENTS)
def test_documents_that_lie(damaged: Damaged, lie: str) -> None:
    damaged.rewrite_document(_LYING_DOCUMENTS[lie])
    with pytest.raises(tracefile.MetadataDamagedError) as caught:
        tracefile.open(damaged.path)
    assert (caught.value.path, caught.value.segment) == (damaged.document(), damaged.segments[0])
    assert damaged.document() in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\0" * 100,
        b"null",
        b"[]",
        b"7",
        b'"tracefile"',
        b"{}",
        b'{"zarr_format":3}',
        b'{"zarr_format":2,"attributes":{"tracefile":{}}}',
        b'{"zarr_format":3,"attributes":[]}',
        b'{"zarr_format":3,"attributes":{"tracefile":null}}',
        b'{"zarr_format":3,"attributes":{"tracefile":{}}}',
        b'{"zarr_format":3,"attributes":{"tracefile":{"format":1}}}',
        b'{"zarr_format":3,"attributes":{"tracefile":{"format":"1"}}}',
        b'{"zarr_format":3,"attributes":{"tracefile":{"format":true}}}',
        b'{"zarr_format":3,"attributes":{"tracefile":{"format":-1}}}',
        b'{"zarr_format":3,"attributes":{"tracefile":{"format":NaN}}}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe\xfd",
        b"\xef\xbb\xbf{}",
        b"1" * 5000,
    ],
    ids=lambda text: repr(text[:60]),
)
def test_documents_of_nonsense(damaged: Damaged, text: bytes) -> None:
    with open(damaged.document(), "wb") as file:
        file.write(text)
    with pytest.raises(tracefile.MetadataDamagedError) as caught:
        tracefile.open(damaged.path)
    assert (caught.value.path, caught.value.segment) == (damaged.document(), damaged.segments[0])

    with open(os.path.join(damaged.path, "zarr.json"), "wb") as file:
        file.write(text)
    for act in (tracefile.open, lambda path: tracefile.TraceWriter(path, **SMALL)):
        with pytest.raises((tracefile.MetadataDamagedError, tracefile.NotATraceError)) as caught_at_root:
            act(damaged.path)
        assert str(caught_at_root.value.path).startswith(damaged.path)


def test_a_later_format_version(damaged: Damaged) -> None:
    def later(document: dict[str, Any]) -> None:
        document["attributes"]["tracefile"].update(format=2, novelty=[1, 2, 3])
        documents.sealed(document)

    damaged.rewrite_document(later, 1)
    with pytest.raises(tracefile.FormatVersionError, match=r"has format version 2; .* upgrade tracefile") as caught:
        tracefile.open(damaged.path)
    assert (caught.value.path, caught.value.segment) == (damaged.document(1), damaged.segments[1])

    root = os.path.join(damaged.path, "zarr.json")
    with open(root) as file:
        document = json.load(file)
    later(document)
    with open(root, "w") as file:
        json.dump(document, file)
    for act in (tracefile.open, lambda path: tracefile.TraceWriter(path, **SMALL)):
        with pytest.raises(tracefile.FormatVersionError) as caught:
            act(damaged.path)
        assert caught.value.path == root


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 100])
def test_a_document_and_a_shard_file_that_agree_on_too_few_bytes(damaged: Damaged, size: int, source: str) -> None:
    os.truncate(damaged.shard(), size)
    damaged.publish(dataclasses.replace(damaged.headers[damaged.segments[0]], shard_bytes=size))
    with pytest.raises((tracefile.ShardDamagedError, tracefile.MetadataDamagedError)) as caught:
        damaged.read(source, "a")
    assert caught.value.segment == damaged.segments[0]


@pytest.mark.parametrize("source", SOURCES)
def test_a_document_with_more_rows_than_its_shard_file(damaged: Damaged, source: str) -> None:
    for rows in (10_000, 2**40, 2**62):
        damaged.publish(dataclasses.replace(damaged.headers[damaged.segments[0]], rows=rows))
        with pytest.raises((tracefile.ShardDamagedError, tracefile.MetadataDamagedError)) as caught:
            damaged.read(source, "a")
        assert caught.value.segment == damaged.segments[0]


@pytest.mark.parametrize("source", SOURCES)
def test_a_document_with_enormous_chunks(in_each_codec: Damaged, source: str) -> None:
    """As many chunks as there are, but each of terabytes: refused before memory is asked for."""
    damaged = in_each_codec
    header = damaged.headers[damaged.segments[0]]
    _, row_chunks = header.grid
    geometry = tracefile.ChunkGeometry(2, 2**40)
    damaged.publish(dataclasses.replace(header, geometry=geometry, rows=row_chunks * 2**40))
    with pytest.raises((tracefile.ShardDamagedError, tracefile.MetadataDamagedError, tracefile.ChunkDamagedError)):
        damaged.read(source, "a")


@pytest.mark.parametrize("rows", [0, 10])
def test_a_span_behind_the_rows_of_the_segment_that_it_names(damaged: Damaged, rows: int) -> None:
    """The referenced segment is a sound one that has fewer rows, or none."""
    with tracefile.TraceWriter(damaged.path, **SMALL) as writer:
        short = ids_of("short", rows, **SMALL)
        writer.append("short", short)
    (target,) = set(tracefile.open(damaged.path).segments) - set(damaged.segments)
    header = damaged.headers[damaged.segments[0]]
    spans = (metadata.Span(target, 0, 30),)
    damaged.publish(dataclasses.replace(header, samples={"a": metadata.SampleEntry("a", spans)}))
    with tracefile.open(damaged.path) as trace:
        with pytest.raises(tracefile.DamagedTraceError) as caught:
            trace["a"].numpy()
        assert caught.value.segment == target
        np.testing.assert_array_equal(trace["a"][:rows].numpy(), short)


# The errors themselves

_BUILTINS = {
    "TraceNotFoundError": FileNotFoundError,
    "NotATraceError": ValueError,
    "FormatVersionError": ValueError,
    "ConfigurationMismatchError": ValueError,
    "MetadataDamagedError": ValueError,
    "SegmentMissingError": FileNotFoundError,
    "ShardDamagedError": ValueError,
    "ChunkMissingError": LookupError,
    "ChunkDamagedError": ValueError,
    "SampleNotFoundError": KeyError,
    "DuplicateSampleError": ValueError,
    "SampleIdError": TypeError,
    "ExpertIdError": ValueError,
    "RoutedExpertsShapeError": ValueError,
    "RoutedExpertsTypeError": TypeError,
    "MissingRowsError": ValueError,
    "MaterializeLimitError": MemoryError,
    "LazyTensorError": TypeError,
    "ClosedError": ValueError,
    "PublishError": OSError,
    "OptionError": ValueError,
}


def _leaves() -> list[type[tracefile.TraceError]]:
    found, queue = [], [tracefile.TraceError]
    while queue:
        kind = queue.pop()
        below = [k for k in kind.__subclasses__() if k.__module__ == errors.__name__]
        queue += below
        if not below:
            found.append(kind)
    return sorted(found, key=lambda kind: kind.__name__)


def test_every_leaf_is_accounted_for() -> None:
    leaves = {kind.__name__ for kind in _leaves()}
    assert leaves <= set(errors.__all__)
    assert leaves <= set(tracefile.__all__)
    assert set(_BUILTINS) <= leaves


@pytest.mark.parametrize("kind", _leaves(), ids=lambda kind: kind.__name__)
def test_errors_travel_whole(kind: type[tracefile.TraceError]) -> None:
    """Ray and multiprocessing pickle errors; what a caller reads off them must arrive."""
    error = kind(
        "message with 'quotes' and\nlines",
        path="/t.trace",
        segment="s",
        chunk=(1, 2),
        sample="a",
        rows=[(0, 3)],
        errno=28,
        wanted=2**40,
        theirs=tracefile.ModelConfig(3, 2, 16),
    )
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        for again in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
            assert type(again) is kind
            assert str(again) == str(error) == "message with 'quotes' and\nlines"
            assert (again.path, again.segment, again.chunk, again.sample) == ("/t.trace", "s", (1, 2), "a")
            assert (again.rows, again.errno, again.wanted) == ([(0, 3)], 28, 2**40)
            assert again.theirs == tracefile.ModelConfig(3, 2, 16)
    bare = pickle.loads(pickle.dumps(kind("only a message")))
    assert (str(bare), bare.path, bare.segment, bare.chunk, bare.sample) == ("only a message", None, None, None, None)
    assert isinstance(error, tracefile.TraceError)
    if kind.__name__ in _BUILTINS:
        assert issubclass(kind, _BUILTINS[kind.__name__])
    builtin = [base for base in kind.__mro__ if base.__module__ == "builtins"]
    assert not {Exception, BaseException, object} >= set(builtin), "also the builtin that fits"


def test_an_error_pickled_by_another_interpreter(damaged: Damaged) -> None:
    os.truncate(damaged.shard(), 10)
    result = run_python(
        """
import pickle, sys, tracefile
try:
    tracefile.open(sys.argv[1])["a"].numpy()
except tracefile.ShardDamagedError as error:
    print(pickle.dumps(error).hex())
""",
        damaged.path,
    )
    error = pickle.loads(bytes.fromhex(result.stdout))
    assert (error.path, error.segment) == (damaged.shard(), damaged.segments[0])
    assert str(error).startswith(f"{damaged.shard()} has 10 bytes")
