"""The two actors behind ``ray://`` traces. They travel by value, so that neither process imports torch or tracefile.

Ray frees an object when nobody refers to it, and loses it when its owner dies, wherever its copies are. What
``ray.put`` makes is owned by the process that calls it, on a node that may be killed; what a task returns is owned by
who called the task. So one :class:`Keeper`, on the head node, has a :class:`Loader` on the writer's node return the
segment: the bytes stay where they were written until a node wants them, and live wherever a copy does.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from typing import Any, TypeAlias

#: What an object begins with: the bytes of the segment's document, and of its shard file (-1: it has none).
HEADER = "<qq"
HEADER_BYTES = struct.calcsize(HEADER)
#: What a task returns travels in Ray's messages, to each process by itself, unless it is larger than this (Ray's
#: ``max_direct_call_object_size``). Segments that are not much smaller are filled up, so that a node shares them.
INLINED_BYTES = 100 * 1024
FILLED_BYTES = 16 * 1024

#: A segment's document, the bytes of its shard file, and, in a list, the reference to its object.
Found: TypeAlias = "tuple[bytes, int, list[Any]]"


class Loader:
    """Takes finished segments from a node's disk into its object store."""

    def load(self, document: str, shard: str) -> tuple[Any, tuple[bytes, int]]:
        """A segment as one array of bytes; its document, and the size of its shard file."""
        import numpy as np

        with open(document, "rb") as file:
            described = file.read()
        shard_bytes = os.path.getsize(shard) if os.path.exists(shard) else -1
        begin = HEADER_BYTES + len(described)
        size = begin + max(0, shard_bytes)
        data = np.zeros(INLINED_BYTES + 1 if FILLED_BYTES <= size <= INLINED_BYTES else size, np.uint8)
        view = data.data
        struct.pack_into(HEADER, view, 0, len(described), shard_bytes)
        view[HEADER_BYTES:begin] = described
        if shard_bytes > 0:
            with open(shard, "rb") as file:
                if file.readinto(view[begin:size]) != shard_bytes:
                    raise OSError(f"{shard} changed while it was read")
        return data, (described, shard_bytes)


@dataclass
class _Trace:
    files: dict[str, bytes] = field(default_factory=dict)
    kept: bool = False
    segments: dict[str, Found] = field(default_factory=dict)


class Keeper:
    """Owns the segments of all ``ray://`` traces of a cluster, and knows by name those that are to be kept.

    Of a trace that is not kept it holds the root documents and nothing else: its segments live as long as references.
    """

    def __init__(self) -> None:
        self._traces: dict[str, _Trace] = {}
        self._loaders: dict[str, Any] = {}

    def _loader(self, node: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node not in self._loaders:
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            self._loaders[node] = ray.remote(Loader).options(num_cpus=0, scheduling_strategy=strategy).remote()
        return self._loaders[node]

    async def create(self, trace: str, files: dict[str, bytes]) -> bool:
        """Take in the root documents of a trace; false if there are some."""
        known = self._traces.setdefault(trace, _Trace())
        if known.files:
            return False
        known.files = files
        return True

    async def files(self, trace: str) -> dict[str, bytes]:
        """The root documents of a trace; none if there is no such trace."""
        known = self._traces.get(trace)
        return known.files if known is not None else {}

    async def store(self, trace: str, segment: str, node: str, document: str, shard: str) -> tuple[bool, list[Any]]:
        """Take over a segment from files on a node: whether its trace is kept, and the reference to it."""
        import ray

        for attempt in (1, 2):
            data, meta = self._loader(node).load.options(num_returns=2).remote(document, shard)
            try:
                described, shard_bytes = await meta  # the data are there then, too
                break
            except ray.exceptions.RayActorError:
                # Killed, alone: the node lives, for the writer that asks is there.
                self._loaders.pop(node, None)
                if attempt == 2:
                    raise
        known = self._traces.setdefault(trace, _Trace())
        if known.kept:
            known.segments[segment] = described, shard_bytes, [data]
        return known.kept, [data]

    async def listed(self, trace: str) -> tuple[bool, list[str]]:
        """Whether a trace is kept, and the segments that are."""
        known = self._traces.get(trace)
        return (known.kept, list(known.segments)) if known is not None else (False, [])

    async def find(self, trace: str, segments: list[str]) -> list[Found | None]:
        """Segments that are kept."""
        known = self._traces.get(trace)
        return [None if known is None else known.segments.get(segment) for segment in segments]

    async def keep(self, trace: str) -> None:
        self._traces.setdefault(trace, _Trace()).kept = True

    async def forget(self, trace: str, segment: str | None) -> None:
        """Drop what is held of a segment, or of a trace."""
        if segment is None:
            self._traces.pop(trace, None)
        elif trace in self._traces:
            self._traces[trace].segments.pop(segment, None)
