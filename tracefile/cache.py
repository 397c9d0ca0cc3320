"""Decoded chunks kept for reuse, with a byte budget for the whole process.

Reading a shard layer by layer asks for each chunk once per layer; the cache makes that one decoding. A chunk
goes when its last layer has been taken, so that what a rank is done with does not pile up, or when the budget
needs its room, least recently used first.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from tracefile.settings import on_change, settings

if TYPE_CHECKING:
    from collections.abc import Callable

Key = tuple[int, int]  # an open segment's serial number, a chunk's number in its grid

#: Keep a chunk until its room is needed, whatever is taken from it.
ALWAYS = -1


class _Held:
    """A chunk, and which of its layers are still to be taken."""

    __slots__ = ("chunk", "layers")

    def __init__(self, chunk: np.ndarray[Any, Any], layers: int) -> None:
        self.chunk = chunk
        self.layers = layers


class ChunkCache:
    """A least-recently-used cache of decoded chunks. Safe for threads.

    Parameters
    ----------
    budget : callable
        Gives the byte budget in force.
    """

    def __init__(self, budget: Callable[[], int]) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._chunks: OrderedDict[Key, _Held] = OrderedDict()
        self.nbytes = 0
        self.peak_nbytes = 0
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        # Another thread of the parent may have held the lock, with the books half made.
        self._lock = threading.Lock()
        self._chunks = OrderedDict()
        self.nbytes = 0
        self.peak_nbytes = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def accepts(self, nbytes: int) -> bool:
        """Whether the budget allows a chunk of so many bytes."""
        return nbytes <= self._budget()

    def take(self, key: Key, layers: int) -> np.ndarray[Any, Any] | None:
        """The chunk, if it is held; ``layers`` of it (a bit each) are then taken."""
        with self._lock:
            held = self._chunks.get(key)
            if held is None:
                return None
            if held.layers != ALWAYS:
                held.layers &= ~layers
            if held.layers:
                self._chunks.move_to_end(key)
            else:
                self.nbytes -= self._chunks.pop(key).chunk.nbytes
            return held.chunk

    def put(self, key: Key, chunk: np.ndarray[Any, Any], layers: int) -> None:
        """Keep a chunk until ``layers`` of it (a bit each) have been taken, or :data:`ALWAYS`."""
        budget = self._budget()
        if chunk.nbytes > budget:
            return  # lowered meanwhile
        if _is_borrowed(chunk):
            chunk = chunk.copy()
        with self._lock:
            if key not in self._chunks:
                self._shrink(budget - chunk.nbytes)
                self._chunks[key] = _Held(chunk, layers)
                self.nbytes += chunk.nbytes
                self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    def _shrink(self, budget: int) -> None:
        while self.nbytes > budget:
            self.nbytes -= self._chunks.popitem(last=False)[1].chunk.nbytes

    def trim(self) -> None:
        """Give back what lies over the budget, after it was lowered."""
        with self._lock:
            self._shrink(self._budget())

    def drop(self, segment: int | None = None) -> None:
        """Forget the chunks of one open segment, or all."""
        with self._lock:
            for key in [k for k in self._chunks if segment is None or k[0] == segment]:
                self.nbytes -= self._chunks.pop(key).chunk.nbytes

    def usage(self, segments: set[int]) -> tuple[int, int]:
        """How many chunks of these open segments are held, and their bytes."""
        with self._lock:
            held = [item.chunk.nbytes for key, item in self._chunks.items() if key[0] in segments]
        return len(held), sum(held)


def _is_borrowed(chunk: np.ndarray[Any, Any]) -> bool:
    """Whether the chunk is a view of a source's bytes (nothing was decoded), which hold more than the chunk."""
    owner: Any = chunk
    while isinstance(getattr(owner, "base", None), np.ndarray):
        owner = owner.base
    return isinstance(owner.base, memoryview)


#: The cache of this process.
chunk_cache = ChunkCache(lambda: settings().cache_bytes)
on_change(chunk_cache.trim)


def clear_cache() -> None:
    """Forget every decoded chunk of this process."""
    chunk_cache.drop()
