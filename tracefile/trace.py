"""The learner side: :func:`open` a trace and look its samples up."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tracefile.errors import ClosedError, SampleIdError, SampleNotFoundError, SegmentMissingError, WaitTimeoutError
from tracefile.format import is_segment_id
from tracefile.lazy import LazyRoutedExperts
from tracefile.metadata import WeightRange
from tracefile.moved import Relocations
from tracefile.revisions import Newest
from tracefile.runs import Rows, TraceRef, check_fill
from tracefile.segments import segment_pool
from tracefile.source import check_source_kind, is_shared
from tracefile.store import (
    absolute_path,
    list_segments,
    read_segment_header,
    read_segment_headers,
    read_trace_header,
    store_for,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from tracefile.follow import Follower
    from tracefile.format import ModelConfig
    from tracefile.metadata import SampleEntry, SegmentHeader
    from tracefile.stats import ReadStats

#: For how many seconds a segment may be damaged before a follower says so: a network file system can show a rename
#: before it shows what was renamed, and what is being deleted goes file by file.
_DAMAGE_GRACE_SECONDS = 1.0

_taking_in = threading.Lock()


def _after_fork() -> None:
    global _taking_in
    _taking_in = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


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
        self.segments: dict[str, SegmentHeader] = {}
        self._newest = Newest()
        self._arrived: list[SegmentHeader] = []  # in the order in which they were seen, for followers
        self._relocations: Relocations | None = None  # of the segments; made when one is missing
        self._damaged_since: dict[str, float] = {}
        self._held: list[object] = []  # what keeps deletions alive where segments live by being referred to
        self._closed = False
        self.refresh()

    @property
    def uuid(self) -> str:
        return self._header.uuid

    @property
    def config(self) -> ModelConfig:
        return self._header.config

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
        began = time.monotonic()
        while True:
            # All of them are read before any is taken in: a damaged one must not make the others pass for seen.
            new, damaged = self._read_new(list_segments(self.path))
            if not damaged:
                return self._take_in(new)
            if time.monotonic() - began >= _DAMAGE_GRACE_SECONDS or not self._on_shared_file_system():
                raise next(iter(damaged.values()))
            time.sleep(_DAMAGE_GRACE_SECONDS / 20)

    def _on_shared_file_system(self) -> bool:
        directory = store_for(self.path).watched_directory(self.path)
        return directory is not None and is_shared(directory)

    def _read_new(self, segments: Iterable[str]) -> tuple[dict[str, SegmentHeader], dict[str, Exception]]:
        """Of the segments that were not seen yet: the documents of the sound ones, and what is wrong with others."""
        new: dict[str, SegmentHeader] = {}
        damaged: dict[str, Exception] = {}
        unseen = [segment for segment in segments if segment not in self.segments]
        gone: set[str] = set()
        while unseen:
            before = len(gone)
            for segment, found in read_segment_headers(self.path, self._header, unseen).items():
                if isinstance(found, SegmentMissingError) and store_for(self.path).is_gone(self.path, segment):
                    gone.add(segment)  # deleted since it was listed
                elif isinstance(found, Exception):
                    damaged[segment] = found
                else:
                    new[segment] = found
            # What replaces a segment that is gone may be newer than the listing.
            seen = {*self.segments, *new, *damaged, *gone}
            listed = list_segments(self.path) if len(gone) > before else []
            unseen = [segment for segment in listed if segment not in seen]
        return new, damaged

    def _take_in(self, new: dict[str, SegmentHeader]) -> list[str]:
        """Add segments; the ids of samples that are new or have a newer revision."""
        # `segments` last: what is interrupted before that is read and taken in again.
        with _taking_in:
            new = {segment: header for segment, header in new.items() if segment not in self.segments}
            if not self.segments or not new or min(new) > next(reversed(self.segments)):
                for header in new.values():
                    self._newest.add(header)
                self._arrived.extend(new.values())
                self.segments.update(new)
            else:
                # A segment that was begun earlier was committed later: they are listed in the order of their ids.
                segments = dict(sorted((self.segments | new).items()))
                self._newest = Newest(segments.values(), known=self._newest)
                self._arrived.extend(new.values())
                self.segments = segments
            self._relocations = None
        return list(
            dict.fromkeys(
                sample
                for header in new.values()
                for sample, entry in header.samples.items()
                if self._newest.entries.get(sample) is entry
            )
        )

    def _look(self, names: list[str] | None) -> dict[str, Exception]:
        """Take in what is sound of the named segments, or of all; what is damaged, and has been for a while."""
        self._check_open()
        listed = list_segments(self.path) if names is None else sorted(filter(is_segment_id, names))
        new, damaged = self._read_new(listed)
        self._take_in(new)
        now = time.monotonic()
        since = {segment: self._damaged_since.get(segment, now) for segment in damaged}
        self._damaged_since = since if names is None else self._damaged_since | since
        return {segment: error for segment, error in damaged.items() if now - since[segment] >= _DAMAGE_GRACE_SECONDS}

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
                missing = [sample for sample in missing if sample not in self._newest.entries]
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
        return Follower(self, 0 if existing else len(self._arrived), timeout, stop)

    def entry(self, sample_id: str) -> SampleEntry:
        """Where a sample's rows are.

        Raises
        ------
        SampleNotFoundError, ClosedError
        """
        self._check_open()
        try:
            return self._newest.entries[sample_id]
        except KeyError:
            why = f"has no sample {sample_id!r} among {len(self)}; if it was committed since, call refresh()"
            if self._newest.deleted_with(sample_id) is not None:
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
        entry = self.entry(sample_id)
        stop = entry.rows if stop is None else min(stop, entry.rows)
        ranges: list[WeightRange] = []
        first = 0
        if not self._has_segments_of(entry):
            self.refresh()
        for span in self._located(entry).spans:
            header = self.segments.get(span.segment)
            if header is None:
                header = read_segment_header(self.path, self._header, span.segment)
            for low, high, version in header.versions_of(span):
                low, high = max(first + low, start), min(first + high, stop)
                if low >= high:
                    continue
                if ranges and ranges[-1].version == version:
                    ranges[-1] = WeightRange(ranges[-1].start, high, version)
                else:
                    ranges.append(WeightRange(low, high, version))
            first += span.stop - span.start
        return ranges

    def _has_segments_of(self, entry: SampleEntry) -> bool:
        return all(span.segment in self.segments for span in entry.spans)

    def _located(self, entry: SampleEntry) -> SampleEntry:
        """With the spans that lay in segments which were replaced, as far as the trace has seen, where they are now."""
        if self._has_segments_of(entry):
            return entry
        relocations = self._relocations
        if relocations is None:
            self._relocations = relocations = Relocations.of(self.segments.values())
        return replace(entry, spans=tuple(piece for span in entry.spans for piece in relocations.resolve(span)))

    def __getitem__(self, sample_id: str) -> LazyRoutedExperts:
        rows = Rows.of_sample(self._located(self.entry(sample_id)), self._ref, store_for(self.path).handle)
        return LazyRoutedExperts.from_rows(rows, self.config, fill=self.fill)

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._newest.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._newest.entries)

    def __len__(self) -> int:
        return len(self._newest.entries)

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
