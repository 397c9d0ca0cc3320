"""Host heap of processes over time, sampled from outside so that measuring costs them nothing.

``RssAnon`` is what a process holds in memory of its own. File pages that it has mapped are not in it: they
belong to the page cache, which all processes share and the kernel may drop.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

INTERVAL_S = 0.02


@dataclass(slots=True)
class MemoryRecord:
    """``RssAnon`` in bytes of each process at each time; the first sample was taken at the start.

    Attributes
    ----------
    seconds : list of float
        Since the start.
    rss_anon : dict of str to list of int
        By process, one value for each time.
    """

    seconds: list[float] = field(default_factory=list)
    rss_anon: dict[str, list[int]] = field(default_factory=dict)

    @property
    def node(self) -> list[int]:
        """The sum over the processes at each time."""
        return [sum(values) for values in zip(*self.rss_anon.values(), strict=True)]

    def start(self, process: str) -> int:
        return self.rss_anon[process][0]

    def peak(self, process: str) -> int:
        return max(self.rss_anon[process])

    def growth(self, process: str) -> int:
        """The peak over the start."""
        return self.peak(process) - self.start(process)

    @property
    def node_growth(self) -> int:
        """The peak of the sum, over the sum at the start."""
        node = self.node
        return max(node) - node[0]


def _read(descriptor: int) -> int:
    for line in os.pread(descriptor, 4096, 0).splitlines():
        if line.startswith(b"RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0  # it has just exited


class MemorySampler:
    """Samples ``RssAnon`` of processes while its context lasts.

    Parameters
    ----------
    pids : mapping of str to int
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self.record = MemoryRecord(rss_anon={name: [] for name in pids})
        self._pids = dict(pids)
        self._descriptors: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)
        self._began = 0.0

    def _sample(self) -> None:
        self.record.seconds.append(time.monotonic() - self._began)
        for name, descriptor in self._descriptors.items():
            self.record.rss_anon[name].append(_read(descriptor))

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._sample()

    def __enter__(self) -> MemorySampler:
        for name, pid in self._pids.items():
            self._descriptors[name] = os.open(f"/proc/{pid}/status", os.O_RDONLY)
        self._began = time.monotonic()
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        try:
            if kind is None:
                self._sample()
        finally:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
