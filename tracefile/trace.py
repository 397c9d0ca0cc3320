"""The learner side: :func:`open` a trace and look its samples up."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tracefile.errors import ClosedError, SampleNotFoundError
from tracefile.lazy import LazyRoutedExperts
from tracefile.runs import Rows, TraceRef, check_fill
from tracefile.source import check_source_kind
from tracefile.store import list_segments, read_segment_header, read_trace_header, segment_pool

if TYPE_CHECKING:
    from types import TracebackType

    from tracefile.format import ModelConfig
    from tracefile.metadata import SampleEntry, SegmentHeader
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
        self.path = os.path.abspath(path)
        self.fill = check_fill(fill)
        self._header = read_trace_header(self.path)
        self._ref = TraceRef(self.path, self._header.uuid, check_source_kind(source))
        self.segments: dict[str, SegmentHeader] = {}
        self._samples: dict[str, SampleEntry] = {}
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
        # All of them are read before any is taken in: a damaged one must not make the others pass for seen.
        new = {
            segment: read_segment_header(self.path, self._header, segment)
            for segment in list_segments(self.path)
            if segment not in self.segments
        }
        in_order = not self.segments or not new or min(new) > max(self.segments)
        if in_order:
            self.segments.update(new)
            headers = new.values()
        else:
            # A writer whose clock is behind committed late: segments count in the order of their ids.
            self.segments = dict(sorted((self.segments | new).items()))
            self._samples = {}
            headers = self.segments.values()
        for header in headers:
            self._samples.update(header.samples)
        # Of those, a late segment's may be older revisions of what was there.
        return list(
            dict.fromkeys(
                sample
                for header in new.values()
                for sample, entry in header.samples.items()
                if self._samples[sample] is entry
            )
        )

    def entry(self, sample_id: str) -> SampleEntry:
        """Where a sample's rows are.

        Raises
        ------
        SampleNotFoundError, ClosedError
        """
        self._check_open()
        try:
            return self._samples[sample_id]
        except KeyError:
            raise SampleNotFoundError(
                f"{self.path} has no sample {sample_id!r} among {len(self._samples)}; if it was committed since, call"
                " refresh()",
                path=self.path,
                sample=sample_id,
            ) from None

    def __getitem__(self, sample_id: str) -> LazyRoutedExperts:
        rows = Rows.of_sample(self.entry(sample_id), self._ref)
        return LazyRoutedExperts.from_rows(rows, self.config, fill=self.fill)

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._samples

    def __iter__(self) -> Iterator[str]:
        return iter(self._samples)

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def stats(self) -> ReadStats:
        """What reading this trace has cost this process, through any handle."""
        return segment_pool.stats(self._ref)

    @property
    def active(self) -> tuple[int, int]:
        """Decoded chunks of this trace held for reuse, and their bytes."""
        return segment_pool.active(self._ref)

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
