"""Rows that a writer has written already, found again at the beginning of other samples.

Samples of a group share their prompt, and a session sends its earlier turns again with every new one. A running
checksum over blocks of rows finds the longest prefix that some sample had; what is found is compared, row by row,
before it counts. Pure but for the reading that the comparison asks for.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from crc32c import crc32c

from tracefile.errors import DamagedTraceError
from tracefile.forking import tell_after_fork
from tracefile.revision import count_rows, cut, parts_of_entry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracefile.format import ModelConfig
    from tracefile.metadata import SampleEntry
    from tracefile.revision import Kept, Part

Array: TypeAlias = "np.ndarray[Any, Any]"

#: Shorter prefixes are not looked for.
BLOCK_ROWS = 128
#: Blocks that the index knows, about 250 bytes each; the least recently written are forgotten first.
MAX_BLOCKS = 65_536
_COMPARED_ROWS = 2048

Key: TypeAlias = tuple[int, int]  # rows up to the end of a block, and the checksum of all of them


class PrefixChain:
    """The running checksum of a sample's rows in their stored form.

    Attributes
    ----------
    keys : list of (int, int)
        One for each whole block so far.
    """

    def __init__(self, keys: Sequence[Key] = ()) -> None:
        self.keys = list(keys)
        self._rows, self._checksum = self.keys[-1] if self.keys else (0, 0)
        self._ended = False

    def update(self, rows: Array) -> None:
        """Add rows ``[n, num_layers, top_k]``, contiguous, of the stored dtype."""
        position = 0
        while position < len(rows) and not self._ended:
            taken = min(len(rows) - position, BLOCK_ROWS - self._rows % BLOCK_ROWS)
            self._checksum = crc32c(rows[position : position + taken].data.cast("B"), self._checksum)
            self._rows += taken
            position += taken
            if self._rows % BLOCK_ROWS == 0:
                self.keys.append((self._rows, self._checksum))

    def end(self) -> None:
        """What follows is not to be shared: some of it was never captured."""
        self._ended = True


@dataclass(slots=True, eq=False)
class _Known:
    """A sample whose prefixes are known: its parts, all of them kept once it is committed."""

    entry: SampleEntry
    parts: Sequence[Part]


class PrefixIndex:
    """What one writer has written, by prefix. Safe for threads and fork.

    Parameters
    ----------
    config : ModelConfig
    read : callable
        The rows of parts that are in segments, ``[rows, num_layers, top_k]``.
    """

    def __init__(self, config: ModelConfig, read: Callable[[Sequence[Kept]], Array]) -> None:
        self.config = config
        self.read = read
        self._blocks: dict[Key, _Known] = {}
        self._lock = threading.Lock()
        tell_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held it

    def get(self, key: Key) -> _Known | None:
        return self._blocks.get(key)

    def add(self, blocks: dict[Key, _Known]) -> None:
        with self._lock:
            for key, known in blocks.items():
                self._blocks.pop(key, None)
                self._blocks[key] = known
            while len(self._blocks) > MAX_BLOCKS:
                del self._blocks[next(iter(self._blocks))]

    def forget(self, known: _Known) -> None:
        with self._lock:
            self._blocks = {key: other for key, other in self._blocks.items() if other is not known}

    def forget_segments(self, segments: set[str]) -> None:
        """Know no more of what has rows in segments that are gone."""
        with self._lock:
            self._blocks = {
                key: known
                for key, known in self._blocks.items()
                if not any(span.segment in segments for span in known.entry.spans)
            }


class Sharing:
    """The sharing of one segment's samples with what is committed, and with each other.

    What the segment's own samples hold enters the index with :meth:`commit`, once the segment is published.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._pending: dict[Key, _Known] = {}

    def find(self, rows: Array) -> tuple[list[Part], PrefixChain]:
        """The longest known prefix of new ``rows``, as parts, and the checksum up to its end."""
        chain = PrefixChain()
        found = None
        for first in range(0, len(rows) - BLOCK_ROWS + 1, BLOCK_ROWS):
            chain.update(self._narrow(rows[first : first + BLOCK_ROWS]))
            known = self._pending.get(chain.keys[-1]) or self._index.get(chain.keys[-1])
            if known is None:
                chain.keys.pop()
                break
            found = known
        if found is None:
            return [], PrefixChain()
        # Of the block that was not found, the first rows may still be the same.
        shared = self._common(found, rows[: (len(chain.keys) + 1) * BLOCK_ROWS])
        if shared < BLOCK_ROWS:
            return [], PrefixChain()
        chain = PrefixChain(chain.keys[: shared // BLOCK_ROWS])
        chain.update(self._narrow(rows[len(chain.keys) * BLOCK_ROWS : shared]))
        return cut(parts_of_entry(found.entry), 0, shared), chain

    def note(self, entry: SampleEntry, parts: Sequence[Part], chain: PrefixChain) -> None:
        """A sample of this segment, as it was written: ``parts`` that are new ones are in memory."""
        known = _Known(entry, parts)
        self._pending.update(dict.fromkeys(chain.keys, known))

    def commit(self) -> None:
        for known in set(self._pending.values()):
            known.parts = parts_of_entry(known.entry)
        self._index.add(self._pending)

    def _narrow(self, rows: Array) -> Array:
        return np.ascontiguousarray(rows, self._index.config.dtype)

    def _common(self, known: _Known, rows: Array) -> int:
        """How many first rows are the same, and captured."""
        missing = known.entry.missing
        most = min(len(rows), missing[0][0] if missing else known.entry.rows, count_rows(known.parts))
        for first in range(0, most, _COMPARED_ROWS):
            last = min(most, first + _COMPARED_ROWS)
            done = first
            for part in cut(known.parts, first, last):
                try:
                    values = part if isinstance(part, np.ndarray) else self._index.read([part])
                except (DamagedTraceError, OSError):
                    self._index.forget(known)  # deleted, or damaged: not to be relied on
                    return 0
                # Compared as they came: what is out of range when narrowed might look the same.
                differs = (values != rows[done : done + len(part)]).any(axis=(1, 2))
                if differs.any():
                    return done + int(differs.argmax())
                done += len(part)
        return most
