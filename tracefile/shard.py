"""One shard file: encode chunks, decode and check them, write and read the index. Pure: bytes in, arrays out.

A shard file is a header that names its segment, the encoded chunks, and the index: for every chunk of the
grid, in C order, its offset and length as little-endian uint64, then the crc32c of that. Each encoded chunk
ends with the crc32c of what precedes it, checked before anything is decoded: Blosc trusts its input, and a
damaged chunk handed to it is wrong ids at best and a crash at worst.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from crc32c import crc32c
from numcodecs import blosc

from tracefile.errors import ChunkDamagedError, ChunkMissingError, ShardDamagedError
from tracefile.format import HEADER_BYTES, BloscSettings, shard_header

if TYPE_CHECKING:
    from collections.abc import Sequence

Buffer: TypeAlias = bytes | memoryview

CRC_BYTES = 4
# Blosc's own threads are process-wide and do not survive fork; zarr-python switches them off likewise.
blosc.use_threads = False

_ABSENT = 2**64 - 1
_CRC = struct.Struct("<I")
_BLOSC_SIZES = struct.Struct("<4xi4xi")  # decoded bytes, encoded bytes: fields of a Blosc 1 chunk's header
_BLOSC_HEADER_BYTES = 16


def encode_chunk(chunk: np.ndarray[Any, Any], codec: BloscSettings | None) -> tuple[bytes, bytes]:
    """Encode one C-contiguous chunk: its payload and the checksum that follows it."""
    if codec is None:
        payload: bytes = chunk.tobytes()
    else:
        payload = blosc.compress(chunk, codec.cname.encode(), codec.clevel, codec.shuffle_code, 0, codec.typesize)
    return payload, _CRC.pack(crc32c(payload))


def encode_index(offsets: Sequence[int], lengths: Sequence[int]) -> bytes:
    """The index that ends a shard file; offsets and lengths of the chunks in C order of the grid."""
    table = np.array([offsets, lengths], dtype="<u8").T.tobytes()
    return table + _CRC.pack(crc32c(table))


def index_bytes(chunks: int) -> int:
    return chunks * 16 + CRC_BYTES


class ShardIndex:
    """Where each chunk of a shard file lies, checked against the file's size before anything is used.

    Attributes
    ----------
    offsets, lengths : list of int
        In C order of the chunk grid; a length of 0 marks a chunk that was never written.
    """

    __slots__ = ("lengths", "offsets")

    def __init__(self, offsets: list[int], lengths: list[int]) -> None:
        self.offsets = offsets
        self.lengths = lengths

    @classmethod
    def parse(cls, raw: Buffer, *, chunks: int, shard_bytes: int, segment: str, path: str) -> ShardIndex:
        """Read the index from the last ``index_bytes(chunks)`` bytes of a shard file.

        Raises
        ------
        ShardDamagedError
            Wrong size, wrong checksum, or chunks that lie outside of the file.
        """
        view = memoryview(raw)
        table = view[:-CRC_BYTES]
        if len(view) != index_bytes(chunks) or crc32c(table) != _CRC.unpack(view[-CRC_BYTES:])[0]:
            raise ShardDamagedError(
                f"{path}: the chunk index of segment {segment} fails its checksum; restore the file",
                path=path,
                segment=segment,
            )
        entries = np.frombuffer(table, "<u8").reshape(chunks, 2)
        offsets, lengths = entries[:, 0], entries[:, 1]
        absent = (offsets == _ABSENT) & (lengths == _ABSENT)
        end = np.uint64(shard_bytes - len(view))
        inside = (offsets >= HEADER_BYTES) & (offsets <= end) & (lengths <= end - np.minimum(offsets, end))
        if not np.all(absent | (inside & (lengths > CRC_BYTES))):
            raise ShardDamagedError(
                f"{path}: the chunk index of segment {segment} points outside of the file; restore the file",
                path=path,
                segment=segment,
            )
        return cls(
            np.where(absent, 0, offsets).astype(np.int64).tolist(),
            np.where(absent, 0, lengths).astype(np.int64).tolist(),
        )


def check_header(raw: Buffer, segment: str, path: str) -> None:
    """Check that a shard file begins as that of ``segment`` must.

    Raises
    ------
    ShardDamagedError
    """
    if bytes(raw) != shard_header(segment):
        raise ShardDamagedError(
            f"{path} is not the shard file of segment {segment}: damaged, or swapped with another; restore the file",
            path=path,
            segment=segment,
        )


class ChunkDecoder:
    """Decodes the chunks of one segment.

    Parameters
    ----------
    codec : BloscSettings or None
    chunk_bytes : int
        Decoded size of each chunk.
    layer_chunks, row_chunks : int
        The chunk grid, to name chunks in errors.
    """

    __slots__ = ("chunk_bytes", "codec", "path", "row_chunks", "segment")

    def __init__(
        self, codec: BloscSettings | None, chunk_bytes: int, *, row_chunks: int, segment: str, path: str
    ) -> None:
        self.codec = codec
        self.chunk_bytes = chunk_bytes
        self.row_chunks = row_chunks
        self.segment = segment
        self.path = path

    def decode(self, number: int, encoded: memoryview) -> Buffer:
        """Check and decode chunk ``number`` of the grid.

        Returns
        -------
        bytes or memoryview
            ``chunk_bytes`` bytes, read-only. Of an uncompressed chunk, a view of ``encoded``.

        Raises
        ------
        ChunkDamagedError
            Its checksum is wrong, or it does not decode to its size.
        """
        payload = self.check(number, encoded)
        if self.codec is None:
            if len(payload) != self.chunk_bytes:
                raise self.damaged(number, f"holds {len(payload)} bytes instead of {self.chunk_bytes}")
            return payload
        if len(payload) < _BLOSC_HEADER_BYTES:
            raise self.damaged(number, "is shorter than a Blosc header")
        decoded_bytes, encoded_bytes = _BLOSC_SIZES.unpack_from(payload)
        if decoded_bytes != self.chunk_bytes or encoded_bytes != len(payload):
            raise self.damaged(number, "has a Blosc header that lies about its size")
        try:
            # Into fresh bytes: numcodecs takes longer to look at a destination than malloc to give the same
            # few pages again.
            decoded: bytes = blosc.decompress(payload)
        except (RuntimeError, ValueError) as error:
            raise self.damaged(number, f"does not decode ({error})") from None
        return decoded

    def check(self, number: int, encoded: memoryview) -> memoryview:
        """The payload of an encoded chunk.

        Raises
        ------
        ChunkDamagedError
            Its checksum is wrong.
        """
        payload = encoded[:-CRC_BYTES]
        if crc32c(payload) != _CRC.unpack_from(encoded, len(payload))[0]:
            raise self.damaged(number, "fails its checksum")
        return payload

    def position(self, number: int) -> tuple[int, int]:
        """The ``(layer, row)`` position of a chunk in the grid."""
        return divmod(number, self.row_chunks)

    def damaged(self, number: int, why: str) -> ChunkDamagedError:
        layer, row = self.position(number)
        return ChunkDamagedError(
            f"{self.path}: chunk (layers {layer}, rows {row}) of segment {self.segment} {why}; restore the file"
            " from a copy, or drop its samples (tracefile verify lists them)",
            path=self.path,
            segment=self.segment,
            chunk=(layer, row),
        )

    def missing(self, layer: int, row: int) -> ChunkMissingError:
        return ChunkMissingError(
            f"{self.path}: chunk (layers {layer}, rows {row}) of segment {self.segment} was never written; restore"
            " the file from a copy",
            path=self.path,
            segment=self.segment,
            chunk=(layer, row),
        )
