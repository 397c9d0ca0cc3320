"""What objects with locks and threads do in a forked child, where another thread may have held the lock."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """Something that must start afresh in a child."""

    def after_fork(self) -> None: ...


_living: weakref.WeakSet[Forked] = weakref.WeakSet()


def tell_after_fork(instance: Forked) -> None:
    """Have ``instance.after_fork()`` called in each forked child, for as long as it lives."""
    _living.add(instance)


def _in_child() -> None:
    for instance in list(_living):
        instance.after_fork()


os.register_at_fork(after_in_child=_in_child)
