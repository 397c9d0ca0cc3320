"""Deleting samples: a segment without rows that says so. What they consist of is for a collection to reclaim."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefile.errors import SampleIdError, SampleNotFoundError
from tracefile.format import DEFAULT_CODEC, default_geometry, new_segment_id
from tracefile.metadata import SegmentHeader
from tracefile.publish import building, this_writer, write_document
from tracefile.store import store_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tracefile.trace import Trace


def delete_samples(trace: Trace, ids: str | Iterable[str], *, missing_ok: bool, durable: bool) -> list[str]:
    """What :meth:`tracefile.Trace.delete_samples` says."""
    wanted = list(dict.fromkeys([ids] if isinstance(ids, str) else ids))
    for sample in wanted:
        if not isinstance(sample, str):
            raise SampleIdError(f"a sample id is a string, not {sample!r}")
    trace.refresh()
    found = [sample for sample in wanted if sample in trace]
    unknown = [sample for sample in wanted if sample not in trace]
    if unknown and not missing_ok:
        shown = ", ".join(map(repr, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
        raise SampleNotFoundError(
            f"{trace.path} has no sample {shown}; nothing was deleted. Pass missing_ok=True to delete the others",
            path=trace.path,
            sample=unknown[0],
        )
    if found:
        # Later than what it deletes, also where another host's clock is ahead.
        publish_deletion(
            trace, dict.fromkeys(found, ""), after=max(map(trace._visible.newest.origin_of, found)), durable=durable
        )
        trace.refresh()
    return found


def publish_deletion(trace: Trace, deleted: Mapping[str, str], *, after: str = "", durable: bool = False) -> None:
    """Publish that samples are deleted: what of them was committed before some segment, or this one."""
    header = SegmentHeader(
        new_segment_id(after),
        trace.uuid,
        trace.config,
        0,
        default_geometry(trace.config),
        DEFAULT_CODEC,
        0,
        {},
        this_writer(),
        deleted=dict(deleted),
    )
    store = store_for(trace.path)
    with building(trace.path, header.id) as build:
        write_document(build, header, durable=durable)
        published = store.publish(trace.path, header.id, build, durable=durable)
    if published is not None:
        trace._held.append(published)
    store.leave(trace.path)
