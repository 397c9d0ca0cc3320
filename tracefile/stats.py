"""Counters of what reading has cost, per trace and for the whole process."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace


@dataclass(slots=True)
class ReadStats:
    """What reading has cost so far.

    Attributes
    ----------
    bytes_read : int
        Encoded bytes taken from shard files.
    bytes_decoded : int
        Bytes that they decoded to.
    bytes_moved : int
        Bytes that went from host memory to another device, in the width in which they travelled.
    chunks_decoded : int
    cache_hits : int
        Chunks that were needed and found decoded.
    reads : int
        Materializations.
    """

    bytes_read: int = 0
    bytes_decoded: int = 0
    bytes_moved: int = 0
    chunks_decoded: int = 0
    cache_hits: int = 0
    reads: int = 0

    def add(self, other: ReadStats) -> None:
        self.bytes_read += other.bytes_read
        self.bytes_decoded += other.bytes_decoded
        self.bytes_moved += other.bytes_moved
        self.chunks_decoded += other.chunks_decoded
        self.cache_hits += other.cache_hits
        self.reads += other.reads

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def copy(self) -> ReadStats:
        return replace(self)
