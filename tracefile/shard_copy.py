"""Copying a shard file front to back, its chunks verified on the way, with little of it in memory."""

from __future__ import annotations

import itertools
import os
from collections import deque
from typing import IO, TYPE_CHECKING, NamedTuple

from tracefile.errors import ChunkDamagedError
from tracefile.publish import refusals
from tracefile.source import MERGED_READ_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from tracefile.segments import OpenSegment


class DamagedChunk(NamedTuple):
    """A chunk, by its number in the shard file's index, and what is wrong with it."""

    number: int
    message: str


def copy_shard(
    opened: OpenSegment,
    to: str | None,
    *,
    trace: str,
    verify: bool,
    durable: bool,
    on_read: Callable[[int], None],
) -> list[DamagedChunk]:
    """Read a shard file, and write it.

    Parameters
    ----------
    opened : OpenSegment
    to : str or None
        The new file; without one, the chunks are only verified.
    trace : str
        Where the copy goes; for what is said if it cannot be written.
    verify : bool
        Check the checksum of every chunk.
    durable : bool
        Flush the new file to the disk.
    on_read : callable
        Called with the number of bytes of each read.

    Returns
    -------
    list of DamagedChunk
        The copy has them too.

    Raises
    ------
    PublishError
        The new file cannot be written.
    OSError, DamagedTraceError
        The shard file cannot be read.
    """
    with _Sink(to, trace, durable) as sink:
        return list(_transfer(opened, sink, verify, on_read))


def _transfer(opened: OpenSegment, sink: _Sink, verify: bool, on_read: Callable[[int], None]) -> Iterator[DamagedChunk]:
    source, index, decoder = opened.source, opened.index, opened.decoder
    assert source is not None
    places = zip(index.offsets, index.lengths, itertools.count(), strict=False)
    chunks = deque(sorted(place for place in places if place[1]) if verify else ())
    if verify:
        for number, length in enumerate(index.lengths):
            if not length:
                yield DamagedChunk(number, decoder.missing(*decoder.position(number)).message)
    held, begin, position = b"", 0, 0  # what chunks that are not checked yet begin in
    while position < source.size:
        block = source.read(position, min(MERGED_READ_BYTES, source.size - position))
        sink.write(block)
        position += len(block)
        on_read(len(block))
        held += block
        while chunks and chunks[0][0] + chunks[0][1] <= position:
            offset, length, number = chunks.popleft()
            inside = memoryview(held)[offset - begin : offset - begin + length] if offset >= begin else None
            try:
                decoder.check(number, source.read(offset, length) if inside is None else inside)
            except ChunkDamagedError as error:
                yield DamagedChunk(number, error.message)
        keep = min(chunks[0][0], position) if chunks else position
        held, begin = held[max(0, keep - begin) :], max(begin, keep)


class _Sink:
    """A new file, or none; what refuses to take bytes is not what they come from."""

    def __init__(self, path: str | None, trace: str, durable: bool) -> None:
        self._path = path
        self._trace = trace
        self._durable = durable
        self._file: IO[bytes] | None = None

    def write(self, data: memoryview) -> None:
        if self._file is not None:
            with refusals(self._trace):
                self._file.write(data)

    def __enter__(self) -> _Sink:
        if self._path is not None:
            with refusals(self._trace):
                self._file = open(self._path, "xb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            with refusals(self._trace), self._file as file:
                if self._durable and kind is None:
                    file.flush()
                    os.fsync(file.fileno())
