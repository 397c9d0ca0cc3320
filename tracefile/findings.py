"""What a verification finds, and counts. Pure: no files; :mod:`tracefile.verify` makes these."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

FindingKind = Literal[
    "trace-metadata",  # the root document
    "segment-metadata",  # a segment's document
    "zarr-metadata",  # a document that we read, and zarr refuses
    "shard-missing",
    "shard-damaged",  # truncated, overwritten, or another segment's
    "shard-index",
    "chunk-missing",
    "chunk-damaged",
    "expert-ids",  # ids outside of [0, num_experts) in captured rows
    "segment-absent",  # a sample has rows in a segment that is not there
    "span-range",  # a sample has rows beyond the end of a segment
]


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Rows ``[start, stop)`` of a sample; ``superseded`` where ``listed_in`` lists an older revision of it."""

    sample: str
    start: int
    stop: int
    listed_in: str
    superseded: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """One damaged thing.

    Attributes
    ----------
    kind : str
        One of ``FindingKind``.
    message : str
        What is wrong, in which file, and what to do about it.
    path : str
        The file or directory.
    segment : str or None
    chunk : (int, int) or None
        The chunk's ``(layer, row)`` position in the segment's grid.
    layers : tuple of int
        Global ids of the layers that are affected; empty where no layer was ever named.
    samples : tuple of SampleRows
        The rows that cannot be read, or are wrong, because of it.
    """

    kind: FindingKind
    message: str
    path: str
    segment: str | None = None
    chunk: tuple[int, int] | None = None
    layers: tuple[int, ...] = ()
    samples: tuple[SampleRows, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The finding as plain JSON values."""
        return asdict(self)


@dataclass(slots=True)
class Tally:
    """What a verification has read so far.

    Attributes
    ----------
    segments, samples, rows : int
        Segments; the samples that those list whose document is sound, and rows in their newest revisions.
    chunks, total_chunks : int
        Chunks that were dealt with, of those that the segments' documents declare.
    bytes_read : int
        Encoded bytes taken from shard files.
    vanished : int
        Segments that were removed meanwhile.
    """

    segments: int = 0
    samples: int = 0
    rows: int = 0
    chunks: int = 0
    total_chunks: int = 0
    bytes_read: int = 0
    vanished: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
