"""Reading ahead: units of a known order of use, read by a thread before they are asked for, within a byte budget."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from tracefile.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from tracefile.schedule import Stage, Unit, UnitOrder


@dataclass(slots=True)
class Loaded:
    """What one unit holds.

    Attributes
    ----------
    values : torch.Tensor
        ``[layers, rows, top_k]``, narrow.
    chunks : int
        From how many chunks it came.
    ready : torch.cuda.Event or None
        When the values have arrived on their CUDA device.
    """

    values: torch.Tensor
    chunks: int
    ready: torch.cuda.Event | None = None


@dataclass(slots=True)
class LoaderStats:
    """What a loader holds and has done.

    Attributes
    ----------
    active_bytes, active_chunks : int
        Held now, or being read: bytes, and the chunks that they came from.
    peak_bytes, peak_chunks : int
        The most of these so far.
    units_read : int
        Groups of layers of a microbatch that were read.
    gets, waits : int
        How often values were asked for, and how often they were not there yet.
    wait_seconds : float
        Spent waiting for values, all together.
    """

    active_bytes: int = 0
    active_chunks: int = 0
    peak_bytes: int = 0
    peak_chunks: int = 0
    units_read: int = 0
    gets: int = 0
    waits: int = 0
    wait_seconds: float = 0.0


class ReadAhead:
    """Holds units and reads those that come next. Safe for threads and fork.

    Parameters
    ----------
    read : callable
        Reads a unit.
    nbytes : callable
        Bytes that a unit takes, known before it is read.
    budget : int
        The most bytes to hold, those being read included. No unit exceeds it.
    depth : int
        Steps to read ahead; 0 starts no thread, and a unit is read when it is asked for.
    """

    def __init__(
        self, read: Callable[[Unit], Loaded], nbytes: Callable[[Unit], int], budget: int, depth: int, order: UnitOrder
    ) -> None:
        self._read = read
        self._nbytes = nbytes
        self._budget = budget
        self._depth = depth
        self._order = order
        self._stopped = False
        self._stats = LoaderStats()
        self._reset()
        _instances.add(self)

    def _reset(self) -> None:
        """Hold nothing and run no thread; also in a forked child, where the lock may be held by nobody."""
        self._changed = threading.Condition()
        self._held: dict[Unit, Loaded] = {}
        self._reading: set[Unit] = set()
        self._failed: dict[Unit, BaseException] = {}
        self._cursor = 0
        self._thread: threading.Thread | None = None
        self._count()

    def begin(self, order: UnitOrder) -> None:
        """Start a pass over ``order``. What is held and used in it stays."""
        with self._changed:
            self._check_open()
            self._order = order
            self._cursor = 0
            self._failed.clear()
            self._drop_done()
            self._wake()

    def get(self, unit: Unit, stage: Stage | None) -> Loaded:
        """The unit, read now if it has to be.

        Raises
        ------
        ClosedError
        TraceError
            Whatever reading it raised, here or ahead; asking again reads again.
        """
        began = time.perf_counter()
        waited = False
        try:
            with self._changed:
                self._check_open()
                self._move_to(self._order.find(unit, stage, self._cursor))
                while True:
                    if unit in self._failed:
                        raise self._failed.pop(unit)
                    if unit in self._held:
                        return self._held[unit]
                    waited = True
                    if unit not in self._reading and self._make_room(unit, None):
                        self._reading.add(unit)
                        self._count()
                        break
                    # It is being read, or something else is that has to leave again for it.
                    self._changed.wait()
                    self._check_open()
            return self._read_into_place(unit)
        finally:
            self._stats.gets += 1
            self._stats.waits += waited
            self._stats.wait_seconds += time.perf_counter() - began if waited else 0.0

    def finish(self, position: int) -> None:
        """Everything before ``position`` of the pass is done."""
        with self._changed:
            if not self._stopped:
                self._move_to(position)

    def release(self, units: Iterable[Unit]) -> None:
        """Drop units, whatever uses they still have."""
        with self._changed:
            for unit in units:
                self._held.pop(unit, None)
            self._count()
            self._wake()

    def stop(self, *, wait: bool = True) -> None:
        """Drop everything and end the thread; what it is reading now, it still reads."""
        with self._changed:
            self._stopped = True
            self._held.clear()
            self._count()
            thread = self._thread
            self._changed.notify_all()
        if wait and thread is not None and thread is not threading.current_thread():
            thread.join()

    @property
    def stopped(self) -> bool:
        return self._stopped

    def stats(self) -> LoaderStats:
        with self._changed:
            return replace(self._stats)

    def _check_open(self) -> None:
        if self._stopped:
            raise ClosedError("the loader has been closed")

    def _move_to(self, position: int | None) -> None:
        if position is not None and position > self._cursor:
            self._cursor = position
            self._drop_done()
        self._wake()

    def _drop_done(self) -> None:
        for unit in [u for u in self._held if self._order.next_use(u, self._cursor) == len(self._order)]:
            del self._held[unit]
        self._count()

    def _wake(self) -> None:
        if self._depth and self._thread is None and not self._stopped:
            self._thread = threading.Thread(target=self._work, name="tracefile-read-ahead", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _make_room(self, unit: Unit, position: int | None) -> bool:
        """Drop what is used last until ``unit`` fits; for one used at ``position``, only what is used after it."""
        needed = self._nbytes(unit) - (self._budget - self._stats.active_bytes)
        if needed <= 0:
            return True
        uses = {held: self._order.next_use(held, self._cursor) for held in self._held}
        dropped = []
        for held in sorted(uses, key=uses.__getitem__, reverse=True):
            if needed <= 0 or (position is not None and uses[held] <= position):
                break
            dropped.append(held)
            needed -= self._nbytes(held)
        if needed > 0:
            return False
        for held in dropped:
            del self._held[held]
        self._count()
        return True

    def _count(self) -> None:
        stats = self._stats
        stats.active_bytes = sum(map(self._nbytes, self._held)) + sum(map(self._nbytes, self._reading))
        stats.active_chunks = sum(loaded.chunks for loaded in self._held.values())
        stats.peak_bytes = max(stats.peak_bytes, stats.active_bytes)
        stats.peak_chunks = max(stats.peak_chunks, stats.active_chunks)

    def _read_into_place(self, unit: Unit) -> Loaded:
        changed = self._changed
        loaded = None
        try:
            loaded = self._read(unit)
            return loaded
        finally:
            with changed:
                self._reading.discard(unit)
                if loaded is not None and not self._stopped:
                    self._held[unit] = loaded
                    self._stats.units_read += 1
                self._count()
                changed.notify_all()

    def _next_unit(self) -> Unit | None:
        """What to read now: the unit that is used first of those that are not held, if there is room for it."""
        for position in self._order.ahead(self._cursor, self._depth):
            unit = self._order.units[position]
            if unit not in self._held and unit not in self._reading and unit not in self._failed:
                return unit if self._make_room(unit, position) else None
        return None

    def _work(self) -> None:
        while True:
            with self._changed:
                while (unit := self._next_unit()) is None and not self._stopped:
                    self._changed.wait()
                if unit is None or self._stopped:
                    return
                self._reading.add(unit)
                self._count()
            try:
                self._read_into_place(unit)
            except BaseException as error:
                with self._changed:
                    self._failed[unit] = error  # for whoever asks for it
                    self._changed.notify_all()
            del unit


_instances: weakref.WeakSet[ReadAhead] = weakref.WeakSet()


def held_ahead() -> LoaderStats:
    """What the loaders of this process hold and have done, all together."""
    total = LoaderStats()
    for instance in list(_instances):
        stats = instance.stats()
        for item in fields(LoaderStats):
            setattr(total, item.name, getattr(total, item.name) + getattr(stats, item.name))
    return total


def _after_fork() -> None:
    for instance in list(_instances):
        instance._reset()


def _at_exit() -> None:
    for instance in list(_instances):
        instance.stop()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
