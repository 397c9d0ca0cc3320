"""The learner side: :func:`open` a trace and look its samples up."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from tracefile.errors import ClosedError, SampleIdError, SampleNotFoundError, WaitTimeoutError
from tracefile.fill import check_fill
from tracefile.lazy import LazyRoutedExperts
from tracefile.runs import Rows, TraceRef
from tracefile.segments import segment_pool
from tracefile.source import check_source_kind
from tracefile.store import absolute_path, read_trace_header, store_for
from tracefile.visible import VisibleSegments

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from types import TracebackType

    from tracefile.follow import Follower
    from tracefile.format import ModelConfig
    from tracefile.metadata import SampleEntry, SegmentHeader, WeightRange
    from tracefile.stats import ReadStats


class Trace(Mapping[str, LazyRoutedExperts]):
    """A trace opened for reading: a mapping of sample ids to lazy tensors, as of the last :meth:`refresh`.

    Made by :func:`open`. Listing and looking up read metadata only.

    Attributes
    ----------
    path : str
    uuid : str
    config : ModelConfig
    segments : dict of str to SegmentHeader
        The segments that are visible, in the order in which they were made.
    """

    def __init__(self, path: str, *, source: str = "auto", fill: str = "error") -> None:
        self.path = absolute_path(path)
        self.fill = check_fill(fill)
        self._header = read_trace_header(self.path)
        self._ref = TraceRef(self.path, self._header.uuid, check_source_kind(source))
        self._visible = VisibleSegments(self.path, self._header)
        self._held: list[object] = []  # what keeps deletions alive where segments live by being referred to
        self._closed = False
        self.refresh()

    @property
    def uuid(self) -> str:
        return self._header.uuid

    @property
    def config(self) -> ModelConfig:
        return self._header.config

    @property
    def segments(self) -> dict[str, SegmentHeader]:
        return self._visible.segments

    def refresh(self) -> list[str]:
        """See what was committed since the trace was opened or refreshed.

        Returns
        -------
        list of str
            Ids of the samples that are new or have a newer revision.

        Raises
        ------
        MetadataDamagedError, FormatVersionError, ClosedError
        """
        self._check_open()
        return self._visible.refresh()

    def wait(self, ids: str | Iterable[str], timeout: float | None = None) -> list[LazyRoutedExperts]:
        """Wait until samples are committed, by any process on any host, and :meth:`refresh` the trace meanwhile.

        What the trace has already is not looked for again: call :meth:`refresh` first to get newer revisions.

        Parameters
        ----------
        ids : str or iterable of str
        timeout : float, optional
            Seconds; default for ever.

        Returns
        -------
        list of LazyRoutedExperts
            In the order of ``ids``.

        Raises
        ------
        WaitTimeoutError
            Not all of them came in time; its ``missing`` lists which.
        MetadataDamagedError, SegmentMissingError, FormatVersionError
            Not all of them are there, and a segment cannot be read that may have them.
        SampleIdError, ClosedError

        Examples
        --------
        >>> import numpy as np, tempfile, tracefile
        >>> path = tempfile.mkdtemp() + "/step_1.trace"
        >>> writer = tracefile.TraceWriter(path, num_layers=2, top_k=2, num_experts=8)
        >>> trace = tracefile.open(path)
        >>> _ = writer.append("a", np.zeros((3, 2, 2), int)), writer.append("b", np.zeros((4, 2, 2), int))
        >>> [len(experts) for experts in trace.wait(["b", "a"], timeout=60)]
        [4, 3]
        >>> trace.wait("c", timeout=0.01)
        Traceback (most recent call last):
        tracefile.errors.WaitTimeoutError: ...step_1.trace: 1 of 1 samples were not committed within 0.01 s: 'c'; ...
        """
        from tracefile.follow import looks, watch_segments

        wanted = [ids] if isinstance(ids, str) else list(ids)
        for sample in wanted:
            if not isinstance(sample, str):
                raise SampleIdError(f"a sample id is a string, not {sample!r}")
        self._check_open()
        missing = list(dict.fromkeys(wanted))
        with watch_segments(self) as watcher:
            for damaged in looks(self, watcher, timeout):
                missing = [sample for sample in missing if sample not in self._visible.newest.entries]
                if not missing:
                    return [self[sample] for sample in wanted]
                self._check_open()
                for error in damaged.values():
                    raise error
        shown = ", ".join(map(repr, missing[:5])) + (", ..." if len(missing) > 5 else "")
        raise WaitTimeoutError(
            f"{self.path}: {len(missing)} of {len(wanted)} samples were not committed within {timeout} s: {shown};"
            " see whether their writers are alive, or wait longer",
            path=self.path,
            missing=missing,
        )

    def follow(
        self,
        *,
        existing: bool = False,
        timeout: float | None = None,
        stop: Callable[[], bool] | threading.Event | None = None,
    ) -> Follower:
        """Iterate over the samples that are committed from now on, by any process on any host.

        Each comes once, within milliseconds of its commit, in the order of commit as far as that can be seen; a
        newer revision of a sample comes too, but not one that a newer one has replaced by the time that it would
        come. Looking for them refreshes the trace. Any number of iterators may follow one ``Trace``, each in one
        thread, and each gets every sample, whoever refreshes. After a fork, parent and child go on each by itself.

        inotify tells of commits on this host (``pip install tracefile[follow]``). Without it, and for commits by
        other hosts, the trace is looked at every 5 to 50 ms.

        Parameters
        ----------
        existing : bool
            Start with the samples that the trace has. Otherwise what was committed since the last
            :meth:`refresh` comes first.
        timeout : float, optional
            Seconds to wait for a next sample. The iteration ends when none came; default never.
        stop : callable or threading.Event, optional
            The iteration ends once it returns true or is set, within 50 ms.

        Returns
        -------
        Follower
            An iterator of ``(id, LazyRoutedExperts)``. It ends, too, when the trace is closed; its ``close``
            gives its file descriptor back at once, and so does dropping it. After an error it goes on where it
            was, if asked to.

        Raises
        ------
        MetadataDamagedError, SegmentMissingError, FormatVersionError
            While iterating: a segment cannot be read, and it has been so for a second. Raised once a segment,
            when all samples of others have come.
        ClosedError

        Examples
        --------
        >>> import numpy as np, tempfile, tracefile
        >>> path = tempfile.mkdtemp() + "/step_1.trace"
        >>> with tracefile.TraceWriter(path, num_layers=2, top_k=2, num_experts=8) as writer:
        ...     trace = tracefile.open(path)
        ...     for number in range(3):
        ...         _ = writer.append(f"prompt-{number}", np.zeros((number, 2, 2), int))
        >>> for sample, experts in trace.follow(timeout=0.01):
        ...     print(sample, len(experts))
        prompt-0 0
        prompt-1 1
        prompt-2 2
        """
        from tracefile.follow import Follower

        self._check_open()
        return Follower(self, 0 if existing else len(self._visible.arrived), timeout, stop)

    def entry(self, sample_id: str) -> SampleEntry:
        """Where a sample's rows are.

        Raises
        ------
        SampleNotFoundError, ClosedError
        """
        self._check_open()
        try:
            return self._visible.newest.entries[sample_id]
        except KeyError:
            why = f"has no sample {sample_id!r} among {len(self)}; if it was committed since, call refresh()"
            if self._visible.newest.deleted_with(sample_id) is not None:
                why = f"has no sample {sample_id!r} any more: it was deleted; if it was appended again, call refresh()"
            raise SampleNotFoundError(f"{self.path} {why}", path=self.path, sample=sample_id) from None

    def delete_samples(self, ids: str | Iterable[str], *, missing_ok: bool = False, durable: bool = False) -> list[str]:
        """Delete samples, all at once: who opens or refreshes the trace from now on does not see them.

        Handles stay good until ``tracefile gc`` has reclaimed the rows, and raise
        :class:`~tracefile.errors.SegmentMissingError` then. Appending an id again makes a new sample.

        Parameters
        ----------
        ids : str or iterable of str
        missing_ok : bool
            Delete those that are there, if not all of them are.
        durable : bool
            As for :class:`TraceWriter`.

        Returns
        -------
        list of str
            What was deleted.

        Raises
        ------
        SampleNotFoundError
            One is not there; nothing was deleted.
        SampleIdError, ClosedError, PublishError

        Examples
        --------
        >>> import numpy as np, tempfile, tracefile
        >>> path = tempfile.mkdtemp() + "/step_1.trace"
        >>> with tracefile.TraceWriter(path, num_layers=2, top_k=2, num_experts=8) as writer:
        ...     _ = writer.append("a", np.zeros((3, 2, 2), int)), writer.append("b", np.zeros((4, 2, 2), int))
        >>> trace = tracefile.open(path)
        >>> trace.delete_samples("a")
        ['a']
        >>> list(trace), list(tracefile.open(path))
        (['b'], ['b'])
        """
        from tracefile.deletion import delete_samples

        return delete_samples(self, ids, missing_ok=missing_ok, durable=durable)

    def weight_versions(self, sample_id: str, start: int = 0, stop: int | None = None) -> list[WeightRange]:
        """Which version of the policy's weights made which rows of a sample, as its writer said.

        Parameters
        ----------
        sample_id : str
        start, stop : int
            The rows to tell of; default all.

        Returns
        -------
        list of WeightRange
            ``(start, stop, version)`` of consecutive rows; ``version`` is ``None`` where no writer said.

        Raises
        ------
        SampleNotFoundError, ClosedError
        SegmentMissingError
            A segment that the sample has rows in is gone.

        Examples
        --------
        >>> import numpy as np, tempfile, tracefile
        >>> path = tempfile.mkdtemp() + "/step_1.trace"
        >>> with tracefile.TraceWriter(path, num_layers=2, top_k=2, num_experts=8) as writer:
        ...     _ = writer.append("a", np.zeros((5, 2, 2), int), weight_version=3)
        ...     _ = writer.append("a", np.ones((4, 2, 2), int), start=4, weight_version=4)
        >>> tracefile.open(path).weight_versions("a")
        [WeightRange(start=0, stop=4, version=3), WeightRange(start=4, stop=8, version=4)]
        """
        return self._visible.weight_versions(self.entry(sample_id), start, stop)

    def __getitem__(self, sample_id: str) -> LazyRoutedExperts:
        rows = Rows.of_sample(self._visible.locate(self.entry(sample_id)), self._ref, store_for(self.path).handle)
        return LazyRoutedExperts.from_rows(rows, self.config, fill=self.fill)

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._visible.newest.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._visible.newest.entries)

    def __len__(self) -> int:
        return len(self._visible.newest.entries)

    @property
    def stats(self) -> ReadStats:
        """What reading this trace has cost this process, through any handle."""
        return segment_pool.stats(self._ref)

    @property
    def active(self) -> tuple[int, int]:
        """Decoded chunks of this trace held for reuse, and their bytes."""
        return segment_pool.active(self._ref)

    @property
    def closed(self) -> bool:
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.path} was closed; open it again", path=self.path)

    def close(self) -> None:
        """Close the files that this process has open of the trace, and forget its decoded chunks.

        Lazy tensors taken from it stay good: they are references, and open what they need again.
        """
        self._closed = True
        segment_pool.close(self._ref)

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<Trace {self.path}: {len(self)} samples in {len(self.segments)} segments, {self.config}{state}>"

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other  # comparing values would read everything


def open(path: str | os.PathLike[str], *, source: str = "auto", fill: str = "error") -> Trace:
    """Open a trace for reading.

    Parameters
    ----------
    path : str or path-like
        The trace's directory.
    source : {"auto", "mmap", "pread"}
        How shard files are read. ``auto`` maps them, and takes ``pread`` on network file systems.
    fill : {"error", "spread", "arange", "zeros", "minus_one"}
        What the tensors render rows as that were never captured; ``error`` refuses to read them.

    Raises
    ------
    TraceNotFoundError, NotATraceError, MetadataDamagedError, FormatVersionError, OptionError

    Examples
    --------
    >>> import numpy as np, tempfile, tracefile
    >>> path = tempfile.mkdtemp() + "/step_1.trace"
    >>> with tracefile.TraceWriter(path, num_layers=2, top_k=2, num_experts=8) as writer:
    ...     _ = writer.append("a", np.zeros((3, 2, 2), int))
    >>> with tracefile.open(path) as trace:
    ...     print(list(trace), trace["a"].shape)
    ['a'] torch.Size([3, 2, 2])
    """
    return Trace(os.fspath(path), source=source, fill=fill)
