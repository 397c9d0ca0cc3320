"""A shard file being written, in staging: gathers encoded chunks, ends with the index."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tracefile.format import HEADER_BYTES, ChunkGeometry, shard_header
from tracefile.shard import encode_index

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from tracefile.encode import EncodedChunk

#: Encoded chunks are handed to the file system in pieces of about this size.
_WRITE_BYTES = 1024 * 1024
_MAX_PIECES = 512  # well below the system's limit for one gathered write


class ShardFile:
    """The shard file of a segment that is being built.

    Attributes
    ----------
    rows, nbytes : int
        Of the segment so far; after the end, of the file. Without rows there is no file.
    """

    def __init__(self, path: str, segment: str, geometry: ChunkGeometry, num_layers: int, durable: bool) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._path = path
        self._geometry = geometry
        self._durable = durable
        self._pieces: list[bytes] = [shard_header(segment)]
        self._pending = HEADER_BYTES
        self._chunks: list[list[tuple[int, int]]] = [[] for _ in range(geometry.layer_chunks(num_layers))]
        self.nbytes = HEADER_BYTES
        self.rows = 0

    def write_rows(self, rows: int, chunks: Iterable[EncodedChunk]) -> int:
        """Write ``rows`` rows, encoded, from the next chunk boundary on.

        Returns
        -------
        int
            The segment's row at which they begin.
        """
        start = self._geometry.align(self.rows)
        for chunk in chunks:
            nbytes = len(chunk.payload) + len(chunk.checksum)
            self._chunks[chunk.layer_chunk].append((self.nbytes, nbytes))
            self._pieces += (chunk.payload, chunk.checksum)
            self.nbytes += nbytes
            self._pending += nbytes
            if self._pending >= _WRITE_BYTES or len(self._pieces) >= _MAX_PIECES:
                self._flush()
        self.rows = start + rows
        return start

    def _flush(self) -> None:
        pieces, self._pieces, self._pending = self._pieces, [], 0
        written = os.writev(self._fd, pieces)
        for piece in pieces:  # a partial write is legal: go on where it stopped
            size = len(piece)
            if written < size:
                rest = memoryview(piece)[written:]
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
                written = 0
            else:
                written -= size

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            os.close(self._fd)

    def _finish(self) -> None:
        if not self.rows:
            # Zarr has no shard file where an array has no elements.
            os.unlink(self._path)
            self.nbytes = 0
            return
        places = [place for row in self._chunks for place in row]
        index = encode_index([offset for offset, _ in places], [nbytes for _, nbytes in places])
        self._pieces.append(index)
        self.nbytes += len(index)
        self._flush()
        if self._durable:
            os.fsync(self._fd)
