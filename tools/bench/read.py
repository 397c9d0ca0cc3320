"""How long reading takes: tracefile beside the least it could take, other Zarr readers, and slicing in RAM.

    .venv/bin/python tools/bench/read.py            # every pattern, both model shapes
    .venv/bin/python tools/bench/read.py --sweep    # chunk geometries and codecs: what the defaults rest on

Patterns, on samples of about 32k tokens:

(a) the shard of one rank of cp 2 (zigzag) x tp 4, of a microbatch of one sample and of four
(b) one pipeline stage's 12 layers of a sample
(c) a shard layer by layer
(d) whole samples
(e) in the sweep: as (a), of eight samples of about 4k tokens

The limit is a bare loop over just the chunks that are needed: check the crc32c, let numcodecs decode into
memory that is there already. Every result is compared with the ids that were written.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from crc32c import crc32c
from numcodecs import blosc
from rich.console import Console
from rich.table import Table

sys.path.insert(0, os.path.dirname(__file__))
from timing import Timing, side_by_side
from workload import SHAPES, ModelShape, synthetic_routing

import tracefile
from tracefile import native
from tracefile.format import segment_path
from tracefile.segments import OpenSegment, segment_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TOKENS = 32_749  # rows of a sample: no multiple of anything
SHORT_TOKENS = 4_093
CP, TP = 2, 4
CP_RANK, TP_RANK = 0, 1
console = Console(width=110)


@dataclass(frozen=True)
class Piece:
    """Rows ``[start, stop)`` of a sample, or padding rows (``sample`` is None)."""

    sample: int | None
    start: int
    stop: int


def rank_pieces(tokens: Sequence[int]) -> list[Piece]:
    """The shard of one rank: zigzag context parallelism per sample, then its piece of the local buffer."""
    local: list[tuple[int, int]] = []
    for sample, count in enumerate(tokens):
        half = -(-count // (2 * CP))
        padded = 2 * CP * half
        for start in (half * CP_RANK, padded - half * (CP_RANK + 1)):
            local += [(sample, row) for row in range(start, start + half)]
    size = -(-len(local) // TP)
    rows = local[size * TP_RANK : size * (TP_RANK + 1)]
    pieces: list[Piece] = []
    for sample, row in rows:
        name = sample if row < tokens[sample] else None
        last = pieces[-1] if pieces else None
        if last is not None and last.sample == name and last.stop == row:
            pieces[-1] = Piece(name, last.start, row + 1)
        else:
            pieces.append(Piece(name, row, row + 1))
    return pieces


def pad_cat_slice(samples: Sequence[torch.Tensor]) -> torch.Tensor:
    """What a framework does to get the same shard, on lazy or on ordinary tensors."""
    local = []
    for sample in samples:
        half = -(-len(sample) // (2 * CP))
        padded = 2 * CP * half
        whole = torch.nn.functional.pad(sample, (0, 0, 0, 0, 0, padded - len(sample)))
        local += [
            whole[half * CP_RANK : half * (CP_RANK + 1)],
            whole[padded - half * (CP_RANK + 1) : padded - half * CP_RANK],
        ]
    buffer = torch.cat(local)
    size = -(-buffer.shape[0] // TP)
    return buffer[size * TP_RANK : size * (TP_RANK + 1)].contiguous()


class Files:
    """Samples of one model shape written to a trace, and other ways to read the same files."""

    def __init__(
        self, directory: str, shape: ModelShape, arrays: Sequence[np.ndarray[Any, Any]], **options: Any
    ) -> None:
        self.shape = shape
        self.arrays = arrays
        path = os.path.join(directory, f"{shape.name}-{len(os.listdir(directory))}.trace")
        with tracefile.TraceWriter(path, **shape.options, **options) as writer:
            self.lazies = [writer.append(f"sample-{i}", array) for i, array in enumerate(arrays)]
        refs = [lazy.selection.rows.segments()[0] for lazy in self.lazies]
        self.segments = [segment_pool.get(ref.trace, writer.config, ref.id) for ref in refs]
        self.array_paths = [segment_path(ref.trace.path, ref.id) for ref in refs]

    @property
    def stored_bytes(self) -> int:
        return sum(segment.header.shard_bytes for segment in self.segments)

    def limit(self, wanted: Sequence[tuple[int, range, Sequence[int]]]) -> Callable[[], None]:
        """The bare loop: rows and layers of samples, each chunk that they touch checked and decoded."""
        todo: list[tuple[memoryview, int, int]] = []
        for sample, rows, layers in wanted:
            segment: OpenSegment = self.segments[sample]
            geometry = segment.header.geometry
            view = segment.source.read(0, segment.source.size) if segment.source is not None else memoryview(b"")
            for row_chunk in range(rows.start // geometry.rows_per_chunk, -(-rows.stop // geometry.rows_per_chunk)):
                for layer_chunk in sorted({layer // geometry.layers_per_chunk for layer in layers}):
                    number = layer_chunk * segment.row_chunks + row_chunk
                    todo.append((view, segment.index.offsets[number], segment.index.lengths[number]))
        chunk_bytes = self.segments[0].decoder.chunk_bytes
        memory = np.empty((len(todo), chunk_bytes), np.uint8)
        memory.fill(0)
        compressed = self.segments[0].decoder.codec is not None

        def loop() -> None:
            for (view, offset, nbytes), into in zip(todo, memory, strict=True):
                end = offset + nbytes - 4
                payload = view[offset:end]
                if crc32c(payload) != int.from_bytes(view[end : end + 4], "little"):
                    raise AssertionError("crc")
                if compressed:
                    blosc.decompress(payload, into)
                else:
                    into[:] = np.frombuffer(payload, np.uint8)

        return loop


def peers(files: Files) -> dict[str, Callable[[int, slice, slice], np.ndarray[Any, Any]]]:
    """Other readers of the same arrays: rows and layers of a sample as ``[layers, rows, top_k]``."""
    import tensorstore
    import zarr
    import zarrs  # noqa: F401  registers its pipeline

    zarr_arrays = [zarr.open_array(path, mode="r") for path in files.array_paths]
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        zarrs_arrays = [zarr.open_array(path, mode="r") for path in files.array_paths]
    # Chunks are not to be found decoded; everybody reads from the page cache.
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
    stores = [
        tensorstore.open(
            {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}, open=True, context=context
        ).result()
        for path in files.array_paths
    ]
    return {
        "zarr-python": lambda sample, rows, layers: np.asarray(zarr_arrays[sample][layers, rows]),
        "zarrs": lambda sample, rows, layers: np.asarray(zarrs_arrays[sample][layers, rows]),
        "tensorstore": lambda sample, rows, layers: stores[sample][layers, rows].read().result(),
    }


def layer_major(shape: Sequence[int], dtype: np.dtype[Any]) -> torch.Tensor:
    """Memory for ``[rows, layers, top_k]`` as tracefile fills it fastest, touched already."""
    rows, layers, top_k = shape
    return torch.from_numpy(np.zeros((layers, rows, top_k), dtype)).permute(1, 0, 2)


THREADS = tracefile.settings().decode_threads


def prepare(contender: str) -> None:
    """Before each run: nothing is decoded yet, and as many threads as the contender's name says."""
    tracefile.clear_cache()
    tracefile.configure(decode_threads=1 if "1 thread" in contender else THREADS)


def check(actual: Any, expected: np.ndarray[Any, Any], what: str) -> None:
    if not np.array_equal(np.asarray(actual), expected):
        raise AssertionError(f"{what} read other ids than were written")


def report(title: str, timings: dict[str, Timing], base: str) -> None:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("median", justify="right")
    table.add_column(f"times {base}", justify="right")
    for name, timing in timings.items():
        ratio = timing.times(timings[base])
        table.add_row(name, f"{timing.median * 1e3:.2f} ms", f"{ratio:.2f}")
    console.print(table)


Contenders = dict[str, "Callable[[], Any]"]


def shard_contenders(files: Files, samples: int, against: bool) -> Contenders:
    """Pattern (a)."""
    pieces = rank_pieces([len(array) for array in files.arrays[:samples]])
    eager = [torch.from_numpy(array) for array in files.arrays[:samples]]
    expected = pad_cat_slice(eager).numpy()
    lazy = pad_cat_slice(files.lazies[:samples])
    assert isinstance(lazy, tracefile.LazyRoutedExperts)
    out = layer_major(lazy.shape, files.segments[0].header.config.dtype)
    layers = range(files.shape.num_layers)
    own = [(p.sample, range(p.start, p.stop), layers) for p in pieces if p.sample is not None]

    def ours() -> torch.Tensor:
        return lazy.materialize(out=out)

    contenders: Contenders = {
        "limit": files.limit(own),
        "tracefile, 1 thread": ours,
        "tracefile": ours,
    }
    check(ours(), expected, "tracefile")
    if against:
        for name, read in peers(files).items():

            def run(read: Any = read) -> list[np.ndarray[Any, Any]]:
                return [read(s, slice(rows.start, rows.stop), slice(None)) for s, rows, _ in own]

            contenders[name] = run
            parts = [part.transpose(1, 0, 2) for part in run()]
            padding = [np.zeros((p.stop - p.start, *expected.shape[1:]), np.uint8) for p in pieces if p.sample is None]
            check(np.concatenate([*parts, *padding]) if len(padding) < 2 else expected, expected, name)
        narrow = torch.uint8 if files.shape.num_experts <= 256 else torch.uint16

        def from_samples(dtype: torch.dtype) -> torch.Tensor:
            return pad_cat_slice(files.lazies[:samples]).materialize(dtype=dtype)  # type: ignore[attr-defined]

        contenders["tracefile, from the samples"] = lambda: from_samples(narrow)
        contenders["tracefile, from the samples, as int32"] = lambda: from_samples(torch.int32)
        contenders["pad, cat, slice int32 in RAM"] = lambda: pad_cat_slice(eager)
    return contenders


def stage_contenders(files: Files, against: bool) -> Contenders:
    """Pattern (b)."""
    stage = range(12, 24)
    lazy = files.lazies[0][:, 12:24]
    out = layer_major(lazy.shape, files.segments[0].header.config.dtype)
    check(lazy.materialize(out=out), files.arrays[0][:, 12:24], "tracefile")
    contenders: Contenders = {
        "limit": files.limit([(0, range(TOKENS), stage)]),
        "tracefile, 1 thread": lambda: lazy.materialize(out=out),
        "tracefile": lambda: lazy.materialize(out=out),
    }
    if against:
        for name, read in peers(files).items():
            contenders[name] = lambda read=read: read(0, slice(None), slice(12, 24))
    return contenders


def by_layer_contenders(files: Files) -> Contenders:
    """Pattern (c): the cache makes it one decoding per chunk."""
    lazy = pad_cat_slice(files.lazies[:1])
    expected = pad_cat_slice([torch.from_numpy(files.arrays[0])])
    layers = range(files.shape.num_layers)
    pieces = [
        (p.sample, range(p.start, p.stop), layers) for p in rank_pieces([len(files.arrays[0])]) if p.sample is not None
    ]
    before = tracefile.process_stats().chunks_decoded
    tracefile.clear_cache()
    for layer in layers:
        check(lazy[:, layer].materialize(), expected[:, layer].numpy(), "tracefile, layer by layer")
    decoded = tracefile.process_stats().chunks_decoded - before
    tracefile.clear_cache()
    lazy.materialize()
    assert decoded == tracefile.process_stats().chunks_decoded - before - decoded, "a chunk was decoded twice"

    def ours() -> None:
        for layer in layers:
            lazy[:, layer].materialize(dtype=torch.uint8)

    return {"limit": files.limit(pieces), "tracefile": ours}


def whole_contenders(files: Files, against: bool) -> Contenders:
    """Pattern (d)."""
    lazy = files.lazies[0]
    out = layer_major(lazy.shape, files.segments[0].header.config.dtype)
    check(lazy.materialize(out=out), files.arrays[0], "tracefile")
    contenders: Contenders = {
        "limit": files.limit([(0, range(TOKENS), range(files.shape.num_layers))]),
        "tracefile, 1 thread": lambda: lazy.materialize(out=out),
        "tracefile": lambda: lazy.materialize(out=out),
    }
    if against:
        for name, read in peers(files).items():
            contenders[name] = lambda read=read: read(0, slice(None), slice(None))
    return contenders


def patterns(directory: str, shape: ModelShape, rounds: int) -> None:
    arrays = [synthetic_routing(shape, TOKENS, seed) for seed in range(4)]
    files = Files(directory, shape, arrays)
    geometry = files.segments[0].header.geometry
    int32 = sum(array.nbytes for array in arrays)
    console.print(
        f"\n[bold]{shape}[/], {TOKENS} tokens a sample; chunks of {geometry.layers_per_chunk} layers x"
        f" {geometry.rows_per_chunk} rows; {int32 / 2**20:.0f} MiB as int32, {files.stored_bytes / 2**20:.0f} stored;"
        f" native decoder {native.status()}"
    )
    for title, contenders in (
        ("(a) rank shard, cp 2 x tp 4, one sample", shard_contenders(files, 1, True)),
        ("(a) rank shard, cp 2 x tp 4, microbatch of 4 samples", shard_contenders(files, 4, True)),
        ("(b) 12 layers of a sample", stage_contenders(files, True)),
        ("(c) a shard, layer by layer", by_layer_contenders(files)),
        ("(d) whole sample", whole_contenders(files, True)),
    ):
        report(title, side_by_side(contenders, rounds, prepare), "limit")


def sweep(directory: str, shape: ModelShape, rounds: int) -> None:
    """Geometries and codecs, one thread, in units of one reference: decoding a shard of the default geometry.

    The machine's speed drifts over the minutes that this takes; the reference runs beside everything.
    """
    arrays = [synthetic_routing(shape, TOKENS, 0)]
    reference = shard_contenders(Files(directory, shape, arrays), 1, False)["limit"]

    def units(contenders: Contenders) -> float:
        ours = next(run for name, run in contenders.items() if name in ("tracefile, 1 thread", "tracefile"))
        timings = side_by_side({"ours, 1 thread": ours, "reference": reference}, rounds, prepare)
        return timings["ours, 1 thread"].times(timings["reference"])

    candidates: dict[tuple[str, int, int], None] = {}
    for groups in (1, 2, 4, 8, shape.num_layers):
        layers = -(-shape.num_layers // groups)
        for kib in (24, 48, 96):
            rows = 2 ** round(np.log2(kib * 1024 / (layers * shape.top_k)))
            candidates["fast", layers, int(rows)] = None
            if groups == 4 and kib == 48:
                candidates["compact", layers, int(rows)] = candidates["none", layers, int(rows)] = None
    results = []
    for codec, layers, rows in candidates:
        options = {"codec": codec, "layers_per_chunk": layers, "rows_per_chunk": rows}
        files = Files(directory, shape, arrays, **options)
        short = Files(directory, shape, [arrays[0][i * SHORT_TOKENS :][:SHORT_TOKENS] for i in range(8)], **options)
        values = [
            units(shard_contenders(files, 1, False)),
            units(stage_contenders(files, False)),
            units(by_layer_contenders(files)),
            units(whole_contenders(files, False)),
            units(shard_contenders(short, 8, False)),
        ]
        mean = float(np.exp(np.mean(np.log(values))))
        kib = layers * rows * shape.top_k / 1024
        results.append((mean, codec, f"{layers} x {rows}", kib, values, arrays[0].nbytes / files.stored_bytes))
    table = Table(title=f"{shape}: times a shard's bare decoding", title_justify="left", title_style="bold")
    for column in ("codec", "layers x rows", "KiB", "(a)", "(b)", "(c)", "(d)", "(e)", "mean", "int32 / stored"):
        table.add_column(column, justify="right" if column != "codec" else "left")
    for mean, codec, name, kib, values, ratio in sorted(results):
        table.add_row(codec, name, f"{kib:.0f}", *(f"{v:.2f}" for v in values), f"{mean:.2f}", f"{ratio:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="sweep chunk geometries and codecs instead")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="model shape (default: both)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds to take the median of (default 15)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.shape or SHAPES:
        with tempfile.TemporaryDirectory() as directory:
            (sweep if options.sweep else patterns)(directory, SHAPES[name], options.rounds)


if __name__ == "__main__":
    main()
