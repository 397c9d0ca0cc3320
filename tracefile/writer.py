"""The rollout side: :class:`TraceWriter` appends samples to a trace.

Any number of writers, in any number of processes and hosts that share the file system, work on one path
without knowing of each other. What ``append`` returns is committed: visible to every reader, whole.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tracefile.append_queue import AppendQueue
from tracefile.encode import as_rows
from tracefile.errors import (
    ClosedError,
    DuplicateSampleError,
    OptionError,
    SampleGapError,
    SampleIdError,
    SampleNotFoundError,
)
from tracefile.format import DEFAULT_CODEC, ModelConfig, check_codec, chosen_geometry
from tracefile.lazy import LazyRoutedExperts
from tracefile.newest import NewestRevisions
from tracefile.publish import create_trace
from tracefile.quota import Quota, check_quota
from tracefile.revision import (
    Gap,
    Keep,
    Part,
    check_continuation,
    count_rows,
    cut,
    missing_rows,
    parts_of_entry,
    parts_of_rows,
    revise,
)
from tracefile.runs import TraceRef
from tracefile.segment_writer import SegmentWriter
from tracefile.settings import settings
from tracefile.source import check_source_kind
from tracefile.store import absolute_path, store_for
from tracefile.validate import check_validate

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from tracefile.quota import QuotaMode


class TraceWriter:
    """Appends samples to a trace, which is created if it is not there.

    Parameters
    ----------
    path : str or path-like
        The trace's directory, usually ``*.trace``. Its parent directory must be writable: segments are built in
        a sibling directory and renamed into place.
    num_layers, top_k, num_experts : int
        The model configuration: layers and experts per token of the arrays to come, and how many experts there
        are. ``num_experts`` decides the stored dtype: uint8 up to 256, else uint16.
    layer_ids : sequence of int, optional
        The global id of each layer, where the arrays hold a subset of the layers. Default ``range(num_layers)``.
    codec : {"fast", "compact", "none"}
        Blosc lz4 with bitshuffle; Blosc zstd, smaller and slower; or no compression.
    durable : bool
        Flush files and directories to the device before a segment becomes visible, so that it survives a crash
        of the machine and not only of the process.
    layers_per_chunk, rows_per_chunk : int, optional
        The chunk geometry; the default suits all of the usual ways to read.
    source : {"auto", "mmap", "pread"}
        How the lazy tensors that ``append`` returns will read.
    share_prefixes : bool
        Whether a sample that begins with rows that this writer wrote already (a group's prompt, a session's earlier
        turns) names those instead of storing them again.
    validate : {"warn", "strict", "off"}
        What to do about signs of a bad capture, which :mod:`tracefile.validate` lists: record them where ``tracefile
        inspect`` shows them, refuse the sample, or not look. Ids outside ``[0, num_experts)`` are always refused.
    dense_layers : sequence of int, optional
        Global ids of layers that are no MoE layers, and zero in every row. Default: leading ones that are.
    async_threads : int
        How many appends of coroutines are carried out at once. With one, the default, in the order of the calls;
        more are for file systems that take long to answer.
    quota_bytes : int, optional
        What the shard files of the trace may take, by all of its writers; default ``tracefile.settings().quota_bytes``,
        which is none. Writers do not lock each other out: each may publish the one segment that it is at.
    quota : {"error", "wait"}
        When it is reached: raise :class:`~tracefile.errors.QuotaExceededError`, before anything is encoded where that
        is known, or wait until samples were deleted and ``tracefile gc`` has made room.
    quota_timeout : float, optional
        How long to wait, in seconds, before raising it; default for ever.

    Raises
    ------
    ConfigurationMismatchError
        The trace that is there has another model configuration.
    OptionError, NotATraceError, PublishError

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> path = tempfile.mkdtemp() + "/step_1.trace"
    >>> with TraceWriter(path, num_layers=3, top_k=2, num_experts=64) as writer:
    ...     experts = writer.append("prompt-7/3", np.arange(30).reshape(5, 3, 2))
    >>> experts.shape, experts[1:3, 0].tolist()
    (torch.Size([5, 3, 2]), [[6, 7], [12, 13]])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        num_layers: int,
        top_k: int,
        num_experts: int,
        layer_ids: Sequence[int] | None = None,
        codec: str = DEFAULT_CODEC,
        durable: bool = False,
        layers_per_chunk: int | None = None,
        rows_per_chunk: int | None = None,
        source: str = "auto",
        share_prefixes: bool = True,
        validate: str = "warn",
        dense_layers: Sequence[int] | None = None,
        async_threads: int = 1,
        quota_bytes: int | None = None,
        quota: QuotaMode = "error",
        quota_timeout: float | None = None,
    ) -> None:
        self._closed = True
        self.path = absolute_path(path)
        self.config = ModelConfig(num_layers, top_k, num_experts, () if layer_ids is None else tuple(layer_ids))
        self.codec = check_codec(codec)
        self.durable = durable
        self.geometry = chosen_geometry(self.config, layers_per_chunk, rows_per_chunk)
        kind = check_source_kind(source)
        quota_bytes = settings().quota_bytes if quota_bytes is None else quota_bytes
        check_quota(quota_bytes, quota, quota_timeout)
        self._queue = AppendQueue(self.path, async_threads)
        header = create_trace(self.path, self.config, durable=durable)
        self._ref = TraceRef(self.path, header.uuid, kind)
        self._segments = SegmentWriter(
            self._ref,
            self.config,
            self.geometry,
            self.codec,
            durable=durable,
            share_prefixes=share_prefixes,
            validate=check_validate(validate),
            dense_layers=dense_layers,
            quota=None if quota_bytes is None else Quota(self._ref, self.config, quota_bytes, quota, quota_timeout),
        )
        self._newest = NewestRevisions(self.path)
        self._closed = False

    def append(
        self,
        sample_id: str,
        routed_experts: Any,
        *,
        start: int | None = None,
        keep: Keep = "last",
        gap: Gap = "error",
        weight_version: int | str | None = None,
        num_tokens: int | None = None,
    ) -> LazyRoutedExperts:
        """Write one sample, or continue one; when this returns, it is committed.

        A sample id that the trace has already gets a newer revision: who opens the trace from now on sees the
        new rows, and handles made before keep the old ones. Rows that the trace holds already are named, not
        written again: those that ``start`` keeps, those of a lazy tensor of this trace, and, as far as this writer
        wrote them, the first rows that the sample shares with another (``share_prefixes``).

        Parameters
        ----------
        sample_id : str
        routed_experts : array_like or torch.Tensor
            ``[tokens, num_layers, top_k]`` or ``[tokens, num_layers * top_k]``, any integer dtype, contiguous
            or not. A row that is -1 throughout was never captured: it is recorded as missing. Lazy tensors too, for
            instance ``torch.cat([experts[:k], new_rows])``.
        start : int, optional
            Continue the sample: rows ``[0, start)`` stay, ``routed_experts`` begins at row ``start``. To replace a
            turn's last row, which had no route until the next turn gave it one, ``start`` is one before the end.
            Default: a new sample, or a whole new revision.
        keep : {"last", "first"}
            Of rows that both have, which win: the new ones, and the sample ends where they do; or the old ones. A row
            that was never captured gives way to one that was.
        gap : {"error", "missing"}
            Where ``start`` lies beyond the sample's end: refuse, or record the rows between as missing.
        weight_version : int or str, optional
            The version of the policy's weights that made the new rows; see :meth:`Trace.weight_versions
            <tracefile.trace.Trace.weight_versions>`. Rows that are not written again keep theirs.
        num_tokens : int, optional
            Tokens of the whole sample. Engines return a row for each, or one fewer: another count is a sign of a bad
            capture.

        Returns
        -------
        LazyRoutedExperts
            The whole sample, ``[tokens, num_layers, top_k]``, picklable in a few hundred bytes.

        Raises
        ------
        ExpertIdError
            An id lies outside ``[0, num_experts)``. Nothing is written.
        CaptureError
            There are signs of a bad capture, and ``validate="strict"``. Nothing is written.
        SampleGapError
            ``start`` lies beyond the end. Nothing is written.
        RoutedExpertsTypeError, RoutedExpertsShapeError, SampleIdError, OptionError, ClosedError
        QuotaExceededError
            The trace would be larger than ``quota_bytes``. Nothing is published.
        SegmentMissingError
            Rows that ``start`` or a lazy tensor keeps were deleted meanwhile. Nothing is published.
        PublishError
            The file system refused, or the trace was deleted. Nothing is published.

        Examples
        --------
        >>> import numpy as np, tempfile
        >>> path = tempfile.mkdtemp() + "/step_1.trace"
        >>> writer = TraceWriter(path, num_layers=1, top_k=1, num_experts=9)
        >>> turn_1 = writer.append("session-4", np.full((4, 1, 1), 1), weight_version=7)
        >>> turn_2 = writer.append("session-4", np.full((3, 1, 1), 2), start=3, weight_version=8)
        >>> turn_1.flatten().tolist(), turn_2.flatten().tolist()
        ([1, 1, 1, 1], [1, 1, 1, 2, 2, 2])
        """
        check_sample_id(sample_id)
        self._check_open()
        parts = self._parts(sample_id, routed_experts)
        if start is not None:
            parts = self._continued(sample_id, parts, start, keep, gap)
        return self._write({sample_id: parts}, weight_version, num_tokens)[0]

    def append_many(
        self, samples: Iterable[tuple[str, Any]], *, weight_version: int | str | None = None
    ) -> list[LazyRoutedExperts]:
        """Write many samples as one segment: all of them become visible at once, or none.

        Parameters
        ----------
        samples : iterable of (str, array)
            As for :meth:`append`.
        weight_version : int or str, optional
            As for :meth:`append`, of all of them.

        Returns
        -------
        list of LazyRoutedExperts
            In the order of ``samples``.

        Raises
        ------
        DuplicateSampleError
            A sample id is there twice.
        ExpertIdError, RoutedExpertsTypeError, RoutedExpertsShapeError, SampleIdError, ClosedError, PublishError
            As for :meth:`append`; nothing of the segment is published.
        """
        self._check_open()
        parts: dict[str, list[Part]] = {}
        for sample_id, routed_experts in samples:
            check_sample_id(sample_id)
            if sample_id in parts:
                raise DuplicateSampleError(
                    f"sample {sample_id!r} is there twice; nothing was written", sample=sample_id
                )
            parts[sample_id] = self._parts(sample_id, routed_experts)
        return self._write(parts, weight_version) if parts else []

    def truncate(self, sample_id: str, rows: int) -> LazyRoutedExperts:
        """Cut a sample to its first rows: a newer revision, of rows that are there.

        Parameters
        ----------
        sample_id : str
        rows : int
            How many rows to keep.

        Raises
        ------
        SampleNotFoundError, ClosedError, PublishError
        OptionError
            The sample has fewer rows.
        """
        check_sample_id(sample_id)
        self._check_open()
        old = parts_of_entry(self._newest.entry(sample_id))
        if not 0 <= rows <= count_rows(old):
            raise OptionError(f"sample {sample_id!r} has {count_rows(old)} rows; it cannot be cut to {rows}")
        return self._write({sample_id: cut(old, 0, rows)}, None)[0]

    def _parts(self, sample_id: str, routed_experts: Any) -> list[Part]:
        if isinstance(routed_experts, LazyRoutedExperts):
            selection = routed_experts.selection
            whole = selection.layers == tuple(range(self.config.num_layers)) and len(selection.lead) == 1
            if whole and selection.config == self.config:
                size = self.config.num_layers, self.config.top_k
                parts = parts_of_rows(selection.rows, self._ref.uuid, *size)
                if parts is not None:
                    return parts
            # Of another trace: read, with what was never captured as -1, whatever rendering its reader chose.
            routed_experts = routed_experts.filled("minus_one").materialize(device="cpu", dtype=torch.int32)
        return [as_rows(routed_experts, self.config, sample_id)]

    def _continued(self, sample_id: str, new: list[Part], start: int, keep: Keep, gap: Gap) -> list[Part]:
        check_continuation(start, keep, gap)
        try:
            old = parts_of_entry(self._newest.entry(sample_id))
        except SampleNotFoundError:
            old = []
        rows = count_rows(old)
        if start > rows:
            if gap == "error":
                raise SampleGapError(
                    f"sample {sample_id!r} has {rows} rows, and rows from {start} on would leave a gap; pass"
                    " gap='missing' to record it as never captured",
                    path=self.path,
                    sample=sample_id,
                    start=start,
                    rows=rows,
                )
            old = [*old, missing_rows(start - rows, self.config.num_layers, self.config.top_k)]
        return revise(old, new, start, keep)

    def _write(
        self, samples: dict[str, list[Part]], weight_version: int | str | None, num_tokens: int | None = None
    ) -> list[LazyRoutedExperts]:
        if weight_version is not None and (
            isinstance(weight_version, bool) or not isinstance(weight_version, int | str)
        ):
            raise OptionError(f"weight_version must be an integer or a string, not {weight_version!r}")
        written = self._segments.write(samples, weight_version, num_tokens)
        return [LazyRoutedExperts.from_rows(rows, self.config) for rows in written]

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the writer of {self.path} is closed; open another", path=self.path)

    async def append_async(self, sample_id: str, routed_experts: Any, **options: Any) -> LazyRoutedExperts:
        """Like :meth:`append`, for coroutines: encodes and writes in a thread, and the event loop goes on meanwhile.

        When this returns, the sample is committed. A slow disk is felt here, so await it inside of whatever bounds
        the number of rollouts: an array that waits is not copied, nor is it let go.

        Cancelled before its turn has come, it writes nothing. Cancelled later, it raises
        :class:`asyncio.CancelledError` once the thread is done with it (tens of milliseconds, on a disk that
        answers); the sample is then published whole, or, if writing failed, not at all.

        Parameters
        ----------
        sample_id, routed_experts, **options
            As for :meth:`append`. Leave the array as it is until this returns or raises.

        Returns
        -------
        LazyRoutedExperts

        Raises
        ------
        TraceError
            As :meth:`append` does.

        Examples
        --------
        >>> import asyncio, numpy as np, tempfile
        >>> async def rollout(path):
        ...     async with TraceWriter(path, num_layers=3, top_k=2, num_experts=64) as writer:
        ...         turns = (writer.append_async(f"{n}", np.full((5, 3, 2), n)) for n in range(4))
        ...         return await asyncio.gather(*turns)
        >>> [experts[0, 0].tolist() for experts in asyncio.run(rollout(tempfile.mkdtemp() + "/step_1.trace"))]
        [[0, 0], [1, 1], [2, 2], [3, 3]]
        """
        return await self._queue.run(partial(self.append, sample_id, routed_experts, **options), [routed_experts])

    async def append_many_async(self, samples: Iterable[tuple[str, Any]], **options: Any) -> list[LazyRoutedExperts]:
        """Like :meth:`append_many`, for coroutines; all else as for :meth:`append_async`.

        Parameters
        ----------
        samples : iterable of (str, array)
            Exhausted here and now, not in the thread.
        **options
            As for :meth:`append_many`.
        """
        samples = list(samples)
        return await self._queue.run(partial(self.append_many, samples, **options), [array for _, array in samples])

    def flush(self) -> None:
        """Wait for the appends of coroutines that are under way or wait their turn.

        Their errors go to those who await them. What ``append`` has returned needs no flush.
        """
        self._queue.flush()

    async def flush_async(self) -> None:
        """Like :meth:`flush`, for coroutines; tasks of this event loop that were created before are waited for too."""
        await self._queue.flush_async()

    def close(self) -> None:
        """Leave the trace. What was appended is committed already; closing twice is fine.

        Appends of coroutines that are under way or wait their turn are carried out first. In an event loop, which
        this would hold up, use ``async with``, or ``await flush_async()`` before.
        """
        self._queue.close()
        if not self._closed:
            self._closed = True
            self._segments.close()
            store_for(self.path).leave(self.path)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> TraceWriter:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.flush_async()
        finally:
            self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<TraceWriter {self.path}: {self.config}, codec {self.codec}{state}>"


def check_sample_id(sample_id: object) -> None:
    """Raise :class:`SampleIdError` unless ``sample_id`` is a string that UTF-8 can hold."""
    try:
        if isinstance(sample_id, str):
            sample_id.encode()
            return
    except UnicodeEncodeError:
        pass
    raise SampleIdError(f"a sample id is a string (that UTF-8 can hold), not {sample_id!r}")
