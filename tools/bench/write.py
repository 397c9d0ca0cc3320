"""How fast writing is: GB of int32 input per second and core, tracefile beside the least it could take and others.

    .venv/bin/python tools/bench/write.py

One sample of about 32k tokens is narrowed, encoded and committed. By default a writer also looks for signs of a bad
capture, and for prefixes that it has written already, of which there are none here: these are rows of their own.

The limit does each necessary thing once, in large steps: narrow, copy transposed into chunks, compress, write; it
checks no ids, no sums, writes no index and commits nothing. zarr-python and tensorstore write the same array with the
same chunks and codecs; ``np.save`` writes the int32 ids as they are. All end in the page cache; what was written is
read back and compared.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numcodecs import blosc
from rich.console import Console
from rich.table import Table

sys.path.insert(0, os.path.dirname(__file__))
from timing import side_by_side
from workload import SHAPES, ModelShape, synthetic_routing

import tracefile
from tracefile.encode import as_words
from tracefile.format import CODECS, ChunkGeometry, default_geometry

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = 32_749
console = Console(width=110)


def write_limit(path: str, ids: np.ndarray[Any, Any], config: tracefile.ModelConfig, codec: str) -> None:
    """Narrow, transpose, compress, write: each once."""
    geometry = default_geometry(config)
    rows_per_chunk, layers_per_chunk = geometry.rows_per_chunk, geometry.layers_per_chunk
    settings = CODECS[codec]  # type: ignore[index]
    narrow = as_words(ids.astype(config.dtype))
    chunk = np.zeros((layers_per_chunk, rows_per_chunk, config.top_k), config.dtype)
    words = as_words(chunk)
    with open(path, "wb", buffering=2**20) as file:
        for row in range(0, len(ids), rows_per_chunk):
            rows = narrow[row : row + rows_per_chunk]
            for layer in range(0, config.num_layers, layers_per_chunk):
                part = rows[:, layer : layer + layers_per_chunk].swapaxes(0, 1)
                np.copyto(words[: part.shape[0], : part.shape[1]], part)
                if settings is None:
                    file.write(chunk.tobytes())
                else:
                    file.write(
                        blosc.compress(
                            chunk,
                            settings.cname.encode(),
                            settings.clevel,
                            settings.shuffle_code,
                            0,
                            settings.typesize,
                        )
                    )


def shapes_of(
    config: tracefile.ModelConfig, geometry: ChunkGeometry
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The inner chunk's and the shard's shape."""
    layers = geometry.layer_chunks(config.num_layers) * geometry.layers_per_chunk
    inner = (geometry.layers_per_chunk, geometry.rows_per_chunk, config.top_k)
    return inner, (layers, geometry.align(TOKENS), config.top_k)


def write_zarr(path: str, ids: np.ndarray[Any, Any], config: tracefile.ModelConfig, codec: str) -> None:
    import zarr
    from zarr.codecs import BloscCodec, Crc32cCodec

    settings = CODECS[codec]  # type: ignore[index]
    inner, shard = shapes_of(config, default_geometry(config))
    compressors: list[Any] = [Crc32cCodec()]
    if settings is not None:
        blosc_codec = BloscCodec(
            cname=settings.cname,  # type: ignore[arg-type]
            clevel=settings.clevel,
            shuffle=settings.shuffle,
            typesize=settings.typesize,
        )
        compressors.insert(0, blosc_codec)
    array = zarr.create_array(
        path,
        shape=(config.num_layers, len(ids), config.top_k),
        chunks=inner,
        shards=shard,
        dtype=config.dtype,
        fill_value=config.fill_value,
        compressors=compressors,
    )
    array[:] = ids.astype(config.dtype).transpose(1, 0, 2)


def write_tensorstore(path: str, ids: np.ndarray[Any, Any], config: tracefile.ModelConfig, codec: str) -> None:
    import tensorstore

    settings = CODECS[codec]  # type: ignore[index]
    inner, shard = shapes_of(config, default_geometry(config))
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    if settings is not None:
        options = {"cname": settings.cname, "clevel": settings.clevel, "shuffle": settings.shuffle}
        configuration = {**options, "typesize": settings.typesize, "blocksize": 0}
        codecs.insert(1, {"name": "blosc", "configuration": configuration})
    sharding = {"name": "sharding_indexed", "configuration": {"chunk_shape": inner, "codecs": codecs}}
    store = tensorstore.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": path, "file_io_sync": False},
            "metadata": {
                "shape": [config.num_layers, len(ids), config.top_k],
                "data_type": config.dtype.name,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard}},
                "fill_value": config.fill_value,
                "codecs": [sharding],
            },
            "create": True,
        }
    ).result()
    store.write(ids.astype(config.dtype).transpose(1, 0, 2)).result()


def read_back(path: str) -> np.ndarray[Any, Any]:
    import zarr

    return np.asarray(zarr.open_array(path, mode="r")[:]).transpose(1, 0, 2)


def bench(directory: str, shape: ModelShape, codec: str, rounds: int) -> None:
    ids = synthetic_routing(shape, TOKENS, 0)
    config = tracefile.ModelConfig(**shape.options)
    number = itertools.count()

    def fresh(name: str) -> str:
        return os.path.join(directory, f"{name}-{next(number)}")

    path = os.path.join(directory, "t.trace")
    options: dict[str, Any] = {**shape.options, "codec": codec}
    bare = tracefile.TraceWriter(path, **options, share_prefixes=False, validate="off")
    not_sharing = tracefile.TraceWriter(path, **options, share_prefixes=False)
    writer = tracefile.TraceWriter(path, **options)

    def append(writer: tracefile.TraceWriter) -> None:
        ids[0] = (ids[0] + 1) % shape.num_experts  # another first row each time: nothing is shared
        writer.append(f"sample-{next(number)}", ids)

    contenders: dict[str, Callable[[], Any]] = {
        "limit": lambda: write_limit(fresh("limit"), ids, config, codec),
        "tracefile": lambda: append(bare),
        "tracefile, validating": lambda: append(not_sharing),
        "tracefile, validating, looking for prefixes": lambda: append(writer),
        "tensorstore": lambda: write_tensorstore(fresh("tensorstore"), ids, config, codec),
        "zarr-python": lambda: write_zarr(fresh("zarr"), ids, config, codec),
        "np.save, int32": lambda: np.save(fresh("npy") + ".npy", ids),
    }
    assert np.array_equal(writer.append("check", ids).numpy(), ids)
    for name, write in (("zarr", write_zarr), ("tensorstore", write_tensorstore)):
        path = fresh(name)
        write(path, ids, config, codec)
        assert np.array_equal(read_back(path), ids)
    timings = side_by_side(contenders, rounds)
    table = Table(title=f"{shape}, codec {codec}: {ids.nbytes / 1e6:.0f} MB of int32", title_justify="left")
    for column in ("", "median", "GB/s of input", "times limit", "tracefile is faster by"):
        table.add_column(column, justify="right" if column else "left")
    for name, timing in timings.items():
        table.add_row(
            name,
            f"{timing.median * 1e3:.1f} ms",
            f"{ids.nbytes / timing.median / 1e9:.2f}",
            f"{timing.times(timings['limit']):.2f}",
            f"{timing.times(timings['tracefile']):.2f}",
        )
    console.print(table)
    for each in (bare, not_sharing, writer):
        each.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="model shape (default: both)")
    parser.add_argument("--codec", choices=tuple(CODECS), default="fast")
    parser.add_argument("--rounds", type=int, default=9, help="rounds to take the median of (default 9)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.shape or SHAPES:
        directory = tempfile.mkdtemp()
        try:
            bench(directory, SHAPES[name], options.codec, options.rounds)
        finally:
            shutil.rmtree(directory)


if __name__ == "__main__":
    main()
