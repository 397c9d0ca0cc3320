"""What a compaction is to do, and what it did: which segments it merges, and its report. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tracefile.metadata import SegmentHeader


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a trace is on disk: segments, files, bytes of its shard files."""

    segments: int
    files: int
    bytes: int

    @classmethod
    def of(cls, headers: Iterable[SegmentHeader]) -> Footprint:
        headers = list(headers)
        files = 2 + sum(2 if header.rows else 1 for header in headers)
        return cls(len(headers), files, sum(header.shard_bytes for header in headers))


@dataclass(frozen=True, slots=True)
class Merge:
    """A segment that took the place of others; ``segment`` is empty where it was only planned."""

    segment: str
    replaced: tuple[str, ...]
    bytes: int


@dataclass(slots=True)
class CompactReport:
    """What :func:`~tracefile.compact.compact_trace` did.

    Attributes
    ----------
    path : str
    before, after : Footprint
        ``after`` is what the plan comes to, for a dry run.
    merged : list of Merge
    finished : list of str
        Segments that an earlier run had replaced and not deleted, and this one did.
    refused : dict of str to str
        Segments that were left as they are because they are damaged, and what is wrong with them.
    changed : list of str
        Segments that were left for another run: others replaced or deleted some of them meanwhile, or named rows that
        were to be dropped.
    """

    path: str
    before: Footprint
    after: Footprint
    merged: list[Merge] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


def plan_merges(
    headers: Iterable[SegmentHeader], sizes: Mapping[str, int], *, target_bytes: int, min_segments: int
) -> list[list[SegmentHeader]]:
    """Group the small ones of segments that can be merged, in the order of their ids.

    Parameters
    ----------
    headers : iterable of SegmentHeader
    sizes : mapping of str to int
        How many bytes of each would be copied.
    target_bytes, min_segments : int
        See :func:`tracefile.compact.compact_trace`.
    """
    headers = sorted(headers, key=lambda header: header.id)
    twins = _twins(headers)
    alike: dict[object, list[list[SegmentHeader]]] = {}
    rowless: list[SegmentHeader] = []
    taken: set[str] = set()
    for header in headers:
        if header.id in taken:
            continue
        unit = twins.get(header.id, [header])
        taken.update(each.id for each in unit)
        if not header.rows:
            rowless.append(header)
        elif len(unit) > 1 or 2 * sizes[header.id] <= target_bytes:
            alike.setdefault((header.geometry, header.codec), []).append(unit)
    groups: list[list[SegmentHeader]] = []
    for units in alike.values():
        group: list[SegmentHeader] = []
        size = 0
        for unit in units:
            more = max(sizes[header.id] for header in unit)
            if group and size + more > target_bytes:
                groups.append(group)
                group, size = [], 0
            group, size = group + unit, size + more
        groups.append(group)
    # Those without rows go with any.
    groups.sort(key=len)
    if groups:
        groups[-1] += rowless
    elif rowless:
        groups = [rowless]
    worth = [
        sorted(group, key=lambda header: header.id)
        for group in groups
        if len(group) >= min_segments
        or any(header.id in twins for header in group)
        or _is_worth_rewriting(group, sizes)
    ]
    return sorted(worth, key=lambda group: group[0].id)


def _is_worth_rewriting(group: Sequence[SegmentHeader], sizes: Mapping[str, int]) -> bool:
    """Whether what would be dropped is a quarter or more."""
    return 4 * sum(sizes[header.id] for header in group) <= 3 * sum(header.shard_bytes for header in group) > 0


def _twins(headers: Sequence[SegmentHeader]) -> dict[str, list[SegmentHeader]]:
    """Those that have rows in common, since they were merged from the same segments, and those that have them too."""
    holders: dict[tuple[str, int], list[SegmentHeader]] = {}
    for header in headers:
        for name in {(moved.segment, moved.start) for moved in header.moved}:
            holders.setdefault(name, []).append(header)
    together: dict[str, list[SegmentHeader]] = {}
    for found in holders.values():
        first = found[0]
        for other in found[1:]:
            mine, theirs = together.get(first.id, [first]), together.get(other.id, [other])
            if mine is theirs or (other.geometry, other.codec) != (first.geometry, first.codec):
                continue
            joined = mine + theirs
            together.update((header.id, joined) for header in joined)
    return together
