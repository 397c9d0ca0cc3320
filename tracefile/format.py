"""What is on disk: the model configuration, the chunk geometry, the codecs, the names of files.

Pure: nothing here touches a file. A trace is a directory that any Zarr v3 reader opens::

    step_000123.trace/                  Zarr group; attributes "tracefile": format, uuid, configuration
      zarr.json
      segments/zarr.json                Zarr group
      segments/<segment id>/zarr.json   one Zarr array; attributes "tracefile": writer, index of samples
      segments/<segment id>/c/0/0/0     its one shard file (absent when the segment has no rows)
    .step_000123.trace.staging/         where writers build segments, a sibling that readers never look at

A segment is one array ``[layer, token, topk]``, so that a layer's ``[tokens, top_k]`` lies contiguous
without a transpose. Its dtype follows from the declared number of experts, never from the data. It is one
shard (codec ``sharding_indexed``, index at the end, crc32c) of chunks ``layers_per_chunk x rows_per_chunk x
top_k``, each encoded by ``bytes``, optionally ``blosc``, and ``crc32c``. The shard file begins with a
header that names its segment (Zarr allows unused bytes in a shard), so that files which were swapped are
noticed. A sample's own rows start on a chunk boundary.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import time
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from tracefile.errors import MetadataDamagedError, OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMAT_VERSION = 1
METADATA_NAME = "zarr.json"
SEGMENTS_NAME = "segments"
SHARD_NAME = "c/0/0/0"
#: Identifies the "tracefile" attributes among Zarr conventions.
CONVENTION_UUID = "6f2d4f3e-0f0f-4d0c-9b70-5c1f6b0e2a57"

CodecName = Literal["fast", "compact", "none"]
CODEC_NAMES: tuple[CodecName, ...] = get_args(CodecName)
DEFAULT_CODEC: CodecName = "fast"

#: Chunks hold about this many decoded bytes and this many layers unless the writer is told otherwise.
#: Chosen by ``tools/bench/read.py --sweep``.
TARGET_CHUNK_BYTES = 48 * 1024
TARGET_CHUNK_LAYERS = 12
#: Chunks are decoded whole, and Blosc takes less than 2 GiB.
MAX_CHUNK_BYTES = 256 * 1024 * 1024

HEADER_BYTES = 64
_HEADER_MAGIC = b"tracefile-shard\0"
_SEGMENT_ID = re.compile(r"[0-9a-z][0-9a-z-]{0,46}")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model configuration that every segment of a trace shares.

    Attributes
    ----------
    num_layers : int
        Layers in the routed experts, as the engine returns them (all hidden layers, or MoE layers only).
    top_k : int
        Experts per token and layer.
    num_experts : int
        Ids lie in ``[0, num_experts)``.
    layer_ids : tuple of int
        The global layer id of each of the ``num_layers`` positions, in order.

    Examples
    --------
    >>> ModelConfig(num_layers=47, top_k=4, num_experts=64).dtype
    dtype('uint8')
    >>> ModelConfig(num_layers=48, top_k=10, num_experts=512).dtype
    dtype('uint16')
    """

    num_layers: int
    top_k: int
    num_experts: int
    layer_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_layers", "top_k", "num_experts"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise OptionError(f"{name} must be a positive integer, not {value!r}")
            object.__setattr__(self, name, int(value))
        if self.num_experts > 2**16 - 1:
            raise OptionError(f"num_experts is at most 65535 (uint16, one value kept free), not {self.num_experts}")
        if self.top_k > self.num_experts:
            raise OptionError(f"top_k ({self.top_k}) cannot exceed num_experts ({self.num_experts})")
        try:
            layer_ids = tuple(index(i) for i in self.layer_ids) or tuple(range(self.num_layers))
        except TypeError:
            raise OptionError(f"layer_ids must be integers, not {self.layer_ids!r}") from None
        if len(layer_ids) != self.num_layers or len(set(layer_ids)) != self.num_layers or min(layer_ids) < 0:
            raise OptionError(
                f"layer_ids must name each of the {self.num_layers} layers once by global id, not {self.layer_ids!r}"
            )
        object.__setattr__(self, "layer_ids", layer_ids)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The stored dtype: uint8 up to 256 experts, else uint16."""
        return np.dtype("uint8" if self.num_experts <= 256 else "uint16")

    @property
    def fill_value(self) -> int:
        """What absent rows read as through other Zarr readers: the dtype's maximum, never a real-looking 0."""
        return int(np.iinfo(self.dtype).max)

    @property
    def row_bytes(self) -> int:
        """Stored bytes of one token's routing, before compression."""
        return self.num_layers * self.top_k * self.dtype.itemsize

    def as_json(self) -> dict[str, Any]:
        return {
            "num_layers": self.num_layers,
            "top_k": self.top_k,
            "num_experts": self.num_experts,
            "layer_ids": list(self.layer_ids),
        }

    def __str__(self) -> str:
        layers = "" if self.layer_ids == tuple(range(self.num_layers)) else f", layer ids {list(self.layer_ids)}"
        return f"{self.num_layers} layers x top-{self.top_k} of {self.num_experts} experts{layers}"


@dataclass(frozen=True, slots=True)
class ChunkGeometry:
    """How a segment is cut into chunks: ``layers_per_chunk x rows_per_chunk x top_k`` ids each."""

    layers_per_chunk: int
    rows_per_chunk: int

    def __post_init__(self) -> None:
        for name in ("layers_per_chunk", "rows_per_chunk"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name} must be a positive integer, not {value!r}")

    def layer_chunks(self, num_layers: int) -> int:
        return -(-num_layers // self.layers_per_chunk)

    def row_chunks(self, rows: int) -> int:
        return -(-rows // self.rows_per_chunk)

    def align(self, rows: int) -> int:
        """The next chunk boundary at or after ``rows``."""
        return self.row_chunks(rows) * self.rows_per_chunk

    def chunk_bytes(self, config: ModelConfig) -> int:
        return self.layers_per_chunk * self.rows_per_chunk * config.top_k * config.dtype.itemsize

    def fitted(self, longest: int) -> ChunkGeometry:
        """The same geometry with no more rows a chunk than the longest sample of a segment needs."""
        return ChunkGeometry(self.layers_per_chunk, min(self.rows_per_chunk, max(8, -(-longest // 8) * 8)))


def default_geometry(config: ModelConfig) -> ChunkGeometry:
    """The chunk geometry that the read benchmark found best over shards, stages, layers and whole samples.

    Layers are dealt evenly, so that the last chunk of layers is hardly padded; rows are a power of two (Blosc
    leaves blocks unshuffled whose size is not a multiple of 16 bytes).

    Examples
    --------
    >>> default_geometry(ModelConfig(num_layers=47, top_k=4, num_experts=64))
    ChunkGeometry(layers_per_chunk=12, rows_per_chunk=1024)
    """
    groups = max(1, round(config.num_layers / TARGET_CHUNK_LAYERS))
    layers = -(-config.num_layers // groups)
    rows = TARGET_CHUNK_BYTES / (layers * config.top_k * config.dtype.itemsize)
    return ChunkGeometry(layers, max(8, 2 ** max(0, round(math.log2(rows)))))


def chosen_geometry(
    config: ModelConfig, layers_per_chunk: int | None = None, rows_per_chunk: int | None = None
) -> ChunkGeometry:
    """What a user says of the chunk geometry, and the default of what is left open.

    Raises
    ------
    OptionError
        There are no such chunks, or they would be too large.

    Examples
    --------
    >>> chosen_geometry(ModelConfig(num_layers=47, top_k=4, num_experts=64), rows_per_chunk=256)
    ChunkGeometry(layers_per_chunk=12, rows_per_chunk=256)
    """
    default = default_geometry(config)
    chosen = ChunkGeometry(
        default.layers_per_chunk if layers_per_chunk is None else layers_per_chunk,
        default.rows_per_chunk if rows_per_chunk is None else rows_per_chunk,
    )
    chosen = ChunkGeometry(min(chosen.layers_per_chunk, config.num_layers), chosen.rows_per_chunk)
    nbytes = chosen.chunk_bytes(config)
    if nbytes > MAX_CHUNK_BYTES:
        raise OptionError(
            f"chunks of {chosen.layers_per_chunk} layers x {chosen.rows_per_chunk} rows hold {nbytes:,} bytes; the"
            f" most is {MAX_CHUNK_BYTES:,}"
        )
    return chosen


@dataclass(frozen=True, slots=True)
class BloscSettings:
    cname: str
    clevel: int
    shuffle: Literal["noshuffle", "shuffle", "bitshuffle"]
    #: Bytes that shuffling takes for one element. 2 also for uint8 ids: Blosc's bit shuffle of single bytes lacks
    #: its fastest path and decodes 1.5 times slower, and comes out as large.
    typesize: int = 2

    @property
    def shuffle_code(self) -> int:
        return ("noshuffle", "shuffle", "bitshuffle").index(self.shuffle)


#: The presets. ``None``: no compression.
CODECS: dict[CodecName, BloscSettings | None] = {
    # Level 1: real routing comes out as small as at level 5, and where rows repeat it decodes faster.
    "fast": BloscSettings("lz4", 1, "bitshuffle"),
    "compact": BloscSettings("zstd", 5, "noshuffle"),
    "none": None,
}


def check_codec(codec: str) -> CodecName:
    if codec not in CODECS:
        raise OptionError(f"codec must be one of {', '.join(CODEC_NAMES)}, not {codec!r}")
    return codec


_last_segment_time = 0


def new_segment_id(after: str = "") -> str:
    """A segment id no other writer will choose.

    Ids made later in one process sort later, even if its clock is set back; between hosts, up to the skew of
    their clocks, unless it is to come ``after`` a known one.
    """
    global _last_segment_time
    if re.fullmatch("[0-9a-f]{16}", after[:16]):
        _last_segment_time = max(_last_segment_time, int(after[:16], 16))
    _last_segment_time = now = max(time.time_ns(), _last_segment_time + 1)
    return f"{now:016x}-{secrets.token_hex(6)}"


def is_segment_id(name: object) -> bool:
    return isinstance(name, str) and _SEGMENT_ID.fullmatch(name) is not None


def staging_path(trace_path: str) -> str:
    """The directory beside a trace in which writers build what they will publish."""
    # Beside the trace itself, not beside a link to it: renaming must not cross file systems.
    parent, name = os.path.split(os.path.realpath(trace_path))
    return os.path.join(parent, f".{name}.staging")


def segment_path(trace_path: str, segment: str) -> str:
    return os.path.join(trace_path, SEGMENTS_NAME, segment)


def shard_header(segment: str) -> bytes:
    """The first bytes of a shard file: a magic and the segment's id."""
    return (_HEADER_MAGIC + segment.encode("ascii")).ljust(HEADER_BYTES, b"\0")


def normalize_ranges(ranges: Sequence[Sequence[int]], rows: int, what: str) -> tuple[tuple[int, int], ...]:
    """Check that ``[start, stop)`` ranges are non-empty, ordered, disjoint and within ``[0, rows)``."""
    result: list[tuple[int, int]] = []
    end = 0
    for item in ranges:
        start, stop = item
        if not (is_count(start) and is_count(stop) and end <= start < stop <= rows):
            raise MetadataDamagedError(f"{what}: [{start}, {stop}) is not an ordered range within {rows} rows")
        result.append((start, stop))
        end = stop
    return tuple(result)


def is_count(value: object) -> bool:
    """A non-negative JSON integer (``True`` is not one)."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
