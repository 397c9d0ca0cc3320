"""Snapshots over time, taken in a background thread."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from typing import TYPE_CHECKING

from tracefile.diagnostics.figure import draw
from tracefile.diagnostics.measure import kernel_bytes, snapshot
from tracefile.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

    from tracefile.trace import Trace

#: Sampling takes at most one part in this many of a core's time.
_REST = 20


class Sampler:
    """Records snapshots over time in a background thread, from when it is made until it is closed.

    The first is taken at once and the last on closing, also when the block of its ``with`` raises. A forked child
    inherits what was recorded so far and records nothing more.

    Parameters
    ----------
    trace : Trace, optional
        As for :func:`snapshot`.
    interval : float
        Seconds between snapshots. Longer where a snapshot takes so long that it would cost more than 5% of a core.
    max_samples : int
        The most that are kept. Then every second one goes, and the interval doubles.
    smaps : bool
        As for :func:`snapshot`.
    pids : mapping of str to int, optional
        Other processes, of which ``<name>/rss_anon_bytes`` is recorded while they live.

    Attributes
    ----------
    interval : float
        Seconds between snapshots now.

    Raises
    ------
    OptionError

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from tracefile.diagnostics import Sampler
    >>> with Sampler(interval=0.5) as sampler:
    ...     array = np.ones(2**20)
    >>> record = sampler.record
    >>> len(record["seconds"]) == len(record["rss_anon_bytes"]) >= 2
    True
    >>> sampler.peak("rss_anon_bytes") >= 2**23
    True
    >>> sampler.save(tempfile.mkdtemp() + "/memory.jsonl")
    >>> sampler.plot(tempfile.mkdtemp() + "/memory.png")
    """

    def __init__(
        self,
        trace: Trace | None = None,
        *,
        interval: float = 1.0,
        max_samples: int = 2000,
        smaps: bool = True,
        pids: Mapping[str, int] | None = None,
    ) -> None:
        if not 0 < interval < math.inf:
            raise OptionError(f"interval must be a positive number of seconds, not {interval!r}")
        if max_samples < 2:
            raise OptionError(f"max_samples must be at least 2, not {max_samples!r}")
        self.interval = interval
        self._trace, self._smaps, self._max_samples = trace, smaps, max_samples
        self._pids = dict(pids or {})
        self._samples: list[dict[str, float]] = []
        self._peaks: dict[str, float] = {}
        self._owner = os.getpid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tracefile-sampler", daemon=True)
        self._began = time.monotonic()
        self._sample()
        self._thread.start()

    def _sample(self) -> None:
        sample = {"seconds": time.monotonic() - self._began}
        sample |= snapshot(self._trace, prefix="", smaps=self._smaps)
        for name, pid in self._pids.items():
            sample |= kernel_bytes(f"/proc/{pid}/status", {"RssAnon": f"{name}/rss_anon_bytes"})
        for name, value in sample.items():
            self._peaks[name] = max(value, self._peaks.get(name, value))
        if len(self._samples) >= self._max_samples:
            self._samples = self._samples[::2]  # a new list, so that a reader of the old one is not disturbed
            self.interval *= 2
        self._samples.append(sample)

    def _run(self) -> None:
        pause = self.interval
        while not self._stop.wait(pause):
            before = time.thread_time()
            self._sample()
            pause = max(self.interval, _REST * (time.thread_time() - before))

    @property
    def running(self) -> bool:
        """Whether it records; never true in a forked child."""
        return os.getpid() == self._owner and self._thread.is_alive()

    def close(self) -> None:
        """Take the last snapshot and stop. What was recorded stays."""
        if os.getpid() != self._owner or self._stop.is_set():
            return  # in a forked child there is no thread to stop, and its locks may be held for ever
        self._stop.set()
        self._thread.join()
        self._sample()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "running" if self.running else "stopped"
        return f"<Sampler {len(self._samples)} snapshots, one in {self.interval:g} s, {state}>"

    @property
    def record(self) -> dict[str, list[float]]:
        """What was recorded: a list for each name, all equally long; NaN where a value could not be had.

        ``seconds`` is the time since the start. The other names are those of :func:`snapshot`, without a prefix.
        """
        samples = list(self._samples)
        names = dict.fromkeys(name for sample in samples for name in sample)
        return {name: [sample.get(name, math.nan) for sample in samples] for name in names}

    def peak(self, key: str) -> float:
        """The highest value of all snapshots, those that were thinned out included.

        Raises
        ------
        OptionError
            Nothing of this name was recorded.
        """
        _check_names([key], self._peaks)
        return self._peaks[key]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON lines: an object for each snapshot, of the values that could be had."""
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(sample) + "\n" for sample in list(self._samples))

    def plot(self, path: str | os.PathLike[str], keys: Sequence[str] | None = None) -> None:
        """Draw memory over time, and below it what was read, decoded and moved since the start.

        Parameters
        ----------
        path : str or path-like
            The picture's file; its ending says which format.
        keys : sequence of str, optional
            What to draw, by the names of :attr:`record`, instead of that; counts get a panel of their own.

        Raises
        ------
        PlotUnavailableError
            matplotlib is not installed.
        OptionError
            Nothing of that name was recorded.
        """
        record = self.record
        _check_names(keys or (), record)
        draw(path, record, self._peaks, keys)


def _check_names(keys: Iterable[str], recorded: Iterable[str]) -> None:
    recorded = list(recorded)
    unknown = [key for key in keys if key not in recorded]
    if unknown:
        raise OptionError(f"no {', '.join(map(repr, unknown))} was recorded; there are {', '.join(recorded)}")
