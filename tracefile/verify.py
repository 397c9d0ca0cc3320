"""Read everything that a trace holds, once, and say what of it is damaged and whose rows that costs.

:func:`verify_trace` never stops at damage: it yields a :class:`Finding` and goes on. It reads with ``pread``,
whatever the file system, because a bad sector under a mapping is a signal and not an error, and it holds a few
MiB of a shard file at a time.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from tracefile.errors import (
    ChunkDamagedError,
    FormatVersionError,
    NotATraceError,
    SegmentMissingError,
    ShardDamagedError,
    TraceError,
    TraceNotFoundError,
)
from tracefile.findings import Finding, FindingKind, SampleRows, Tally
from tracefile.format import (
    CODECS,
    HEADER_BYTES,
    METADATA_NAME,
    SEGMENTS_NAME,
    SHARD_NAME,
    is_segment_id,
    segment_path,
    shard_header,
)
from tracefile.shard import ChunkDecoder, ShardIndex, check_header, index_bytes
from tracefile.source import merge_ranges
from tracefile.store import absolute_path, read_trace_header, store_for
from tracefile.survey import (
    Holding,
    Range,
    absence,
    listed_segments,
    raise_unanswered,
    recovered_header,
    take_survey,
    union,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tracefile.metadata import SegmentHeader, TraceHeader
    from tracefile.source import Source
    from tracefile.survey import Survey

Array: TypeAlias = "np.ndarray[Any, Any]"


def verify_trace(
    path: str | os.PathLike[str],
    *,
    tally: Tally | None = None,
    on_progress: Callable[[Tally], None] | None = None,
) -> Iterator[Finding]:
    """Check everything in a trace: documents, shard files, every chunk, every captured id.

    Parameters
    ----------
    path : str or path-like
    tally : Tally, optional
        Counts what is read.
    on_progress : callable, optional
        Called with the tally after each read.

    Yields
    ------
    Finding
        In the order of the segments; none for a sound trace.

    Raises
    ------
    TraceNotFoundError, NotATraceError, FormatVersionError
        Before anything was yielded: there is no trace that could be verified.
    StoreError
        The store does not answer; what was not looked at yet may be sound or not.

    Examples
    --------
    >>> import numpy as np, tempfile, tracefile
    >>> path = tempfile.mkdtemp() + "/step_1.trace"
    >>> with tracefile.TraceWriter(path, num_layers=2, top_k=2, num_experts=8) as writer:
    ...     _ = writer.append("a", np.zeros((3, 2, 2), int))
    >>> list(verify_trace(path))
    []
    """
    path = absolute_path(path)
    tally = Tally() if tally is None else tally
    header, finding = _root(path)
    if finding is not None:
        yield finding
    else:
        yield from _group_finding(path)
    if header is None:
        for segment in listed_segments(path):
            where = os.path.join(segment_path(path, segment), METADATA_NAME)
            message = f"{where} is damaged too; restore the file. Which samples the segment lists is not known"
            yield Finding("segment-metadata", message, where, segment)
        return
    try:
        survey = take_survey(path, header)
    except (TraceError, OSError) as error:
        raise_unanswered(error)
        yield Finding("trace-metadata", str(error), os.path.join(path, SEGMENTS_NAME))
        return
    yield from _group_finding(os.path.join(path, SEGMENTS_NAME))
    held = survey.holdings()
    samples = survey.samples()
    tally.segments = len(survey.segments) + len(survey.damaged)
    tally.samples, tally.rows = len(samples), sum(revision.entry.rows for revision in samples.values())
    tally.total_chunks = sum(layers * rows for layers, rows in (each.grid for each in survey.segments.values()))
    for segment in sorted({*survey.segments, *survey.damaged}):
        holdings = held.get(segment, [])
        if segment in survey.damaged:
            yield _damaged_document(survey, segment, holdings)
        else:
            yield from _SegmentCheck(survey, survey.segments[segment], holdings, tally, on_progress).findings()
    for segment in survey.absent():
        where, message = segment_path(path, segment), absence(survey, segment)
        yield Finding(
            "segment-absent", message, where, segment, None, header.config.layer_ids, _sample_rows(held[segment])
        )
    tally.vanished += len(survey.vanished)


def _group_finding(path: str) -> Iterator[Finding]:
    if refusal := _zarr_refusal("group", path):
        where = os.path.join(path, METADATA_NAME)
        yield Finding("zarr-metadata", f"{where}: zarr refuses this group ({refusal}); restore the file", where)


def _root(path: str) -> tuple[TraceHeader | None, Finding | None]:
    """The root document; where it is damaged, what the segments' documents say it was."""
    where = os.path.join(path, METADATA_NAME)
    try:
        return read_trace_header(path), None
    except (TraceNotFoundError, FormatVersionError):
        raise
    except (TraceError, OSError) as error:
        raise_unanswered(error)
        segments = listed_segments(path)
        if isinstance(error, NotATraceError) and not segments:
            raise
        header = recovered_header(path, segments)
        if header is not None:
            rest = "the segments were checked against each other, and layers are named by position"
        else:
            rest = "no data could be checked"
        damage = f"{where} is missing or holds something else; restore the file"
        what = damage if isinstance(error, NotATraceError) else str(error)
        return header, Finding("trace-metadata", f"{what}. Meanwhile {rest}", where)


def _damaged_document(survey: Survey, segment: str, holdings: list[Holding]) -> Finding:
    error = survey.damaged[segment]
    where = error.path or os.path.join(segment_path(survey.path, segment), METADATA_NAME)
    message = f"{error.message}. Which samples the segment lists is not known"
    return Finding(
        "segment-metadata", message, where, segment, None, survey.header.config.layer_ids, _sample_rows(holdings)
    )


def _sample_rows(holdings: Iterable[Holding], start: int = 0, stop: int | None = None) -> tuple[SampleRows, ...]:
    """The samples' rows that lie in rows ``[start, stop)`` of the holdings' segment; the newest revisions first."""
    found: dict[tuple[bool, str, str], list[Range]] = {}
    for holding in holdings:
        low, high = max(start, holding.start), holding.stop if stop is None else min(stop, holding.stop)
        if low < high:
            shift = holding.first - holding.start
            key = (holding.superseded, holding.sample, holding.listed_in)
            found.setdefault(key, []).append((low + shift, high + shift))
    return tuple(
        SampleRows(sample, first, last, listed_in, superseded)
        for (superseded, sample, listed_in), ranges in sorted(found.items(), key=lambda item: item[0][0])
        for first, last in union(ranges)
    )


class _SegmentCheck:
    """The check of one segment whose document is sound."""

    def __init__(
        self,
        survey: Survey,
        header: SegmentHeader,
        holdings: list[Holding],
        tally: Tally,
        on_progress: Callable[[Tally], None] | None,
    ) -> None:
        self.survey = survey
        self.header = header
        self.holdings = holdings
        self.tally = tally
        self.on_progress = on_progress
        self.directory = segment_path(survey.path, header.id)
        self.path = os.path.join(self.directory, SHARD_NAME)
        self.layer_chunks, self.row_chunks = header.grid
        self.decoder = ChunkDecoder(
            CODECS[header.codec],
            header.geometry.chunk_bytes(header.config),
            row_chunks=self.row_chunks,
            segment=header.id,
            path=self.path,
        )
        geometry = header.geometry
        self.chunk_shape = (geometry.layers_per_chunk, geometry.rows_per_chunk, header.config.top_k)
        #: Per chunk along rows: who has rows in it.
        self.holders: dict[int, list[Holding]] = {}
        for holding in holdings:
            last = min(holding.stop, header.rows)
            for row_chunk in range(holding.start // geometry.rows_per_chunk, geometry.row_chunks(last)):
                self.holders.setdefault(row_chunk, []).append(holding)

    def findings(self) -> Iterator[Finding]:
        seen = self.tally.chunks
        refusal = _zarr_refusal("array", self.directory)
        if refusal and not self.survey.is_gone(self.header.id):
            where = os.path.join(self.directory, METADATA_NAME)
            message = f"{where}: zarr refuses this array ({refusal}); restore the file"
            yield Finding("zarr-metadata", message, where, self.header.id)
        beyond = _sample_rows(self.holdings, self.header.rows)
        if beyond:
            message = f"{self.directory} has {self.header.rows} rows, and samples have rows beyond them"
            yield Finding(
                "span-range", message, self.directory, self.header.id, None, self.header.config.layer_ids, beyond
            )
        if self.header.rows:
            yield from self._shard_findings()
        # What a damaged shard file kept from being read counts as dealt with.
        self.tally.chunks = seen + self.layer_chunks * self.row_chunks
        self._report()

    def _report(self) -> None:
        if self.on_progress is not None:
            self.on_progress(self.tally)

    def _shard_findings(self) -> Iterator[Finding]:
        header = self.header
        try:
            source = store_for(self.path).open_source(
                self.path, kind="pread", size=header.shard_bytes, segment=header.id
            )
        except SegmentMissingError as error:
            if self.survey.is_gone(header.id):
                self.survey.vanished.append(header.id)
            else:
                yield self._whole("shard-missing", str(error))
            return
        except (ShardDamagedError, OSError) as error:
            raise_unanswered(error)
            yield self._whole("shard-damaged", f"{error}{self._whose()}")
            return
        try:
            size = header.shard_bytes
            tail = index_bytes(self.layer_chunks * self.row_chunks)
            try:
                check_header(source.read(0, min(HEADER_BYTES, size)), header.id, self.path)
            except (TraceError, OSError) as error:
                raise_unanswered(error)
                whose = self._whose()
                yield self._whole("shard-damaged", f"{error}{whose}")
                if whose:
                    return  # its chunks are another segment's
            try:
                index = ShardIndex.parse(
                    source.read(max(0, size - tail), min(tail, size)),
                    chunks=self.layer_chunks * self.row_chunks,
                    shard_bytes=size,
                    segment=header.id,
                    path=self.path,
                )
            except (TraceError, OSError) as error:
                raise_unanswered(error)
                yield self._whole("shard-index", str(error))
                return
            yield from self._chunk_findings(source, index)
        finally:
            source.close()

    def _whole(self, kind: FindingKind, message: str) -> Finding:
        layers = self.header.config.layer_ids
        return Finding(kind, message, self.path, self.header.id, None, layers, _sample_rows(self.holdings))

    def _whose(self) -> str:
        """Which other segment the file says that it belongs to."""
        try:
            raw = store_for(self.path).read(self.path, HEADER_BYTES)
        except OSError:
            return ""
        name = raw.rstrip(b"\0").rpartition(b"\0")[2].decode("ascii", "replace")
        if name == self.header.id or not is_segment_id(name) or raw != shard_header(name):
            return ""
        return f". By its header it is the shard file of segment {name}"

    def _chunk_findings(self, source: Source, index: ShardIndex) -> Iterator[Finding]:
        present = [number for number, length in enumerate(index.lengths) if length]
        for number, length in enumerate(index.lengths):
            if not length:
                yield self._chunk("chunk-missing", self.decoder.missing(*self.decoder.position(number)).message, number)
        present.sort(key=index.offsets.__getitem__)
        places = [(index.offsets[number], index.lengths[number]) for number in present]
        for first, last, start, stop in merge_ranges(places):
            try:
                block: memoryview | None = source.read(start, stop - start)
            except (TraceError, OSError) as error:
                raise_unanswered(error)
                block = None  # something in there cannot be read: find out what
            for number, (offset, length) in zip(present[first:last], places[first:last], strict=True):
                try:
                    if block is None:
                        encoded = source.read(offset, length)
                    else:
                        encoded = block[offset - start : offset - start + length]
                    decoded = self.decoder.decode(number, encoded)
                except ChunkDamagedError as error:
                    yield self._chunk("chunk-damaged", error.message, number)
                except (TraceError, OSError) as error:
                    raise_unanswered(error)
                    why = getattr(error, "strerror", None) or error
                    damaged = self.decoder.damaged(number, f"cannot be read ({why})")
                    yield self._chunk("chunk-damaged", damaged.message, number)
                else:
                    chunk = np.frombuffer(decoded, self.header.config.dtype).reshape(self.chunk_shape)
                    finding = self._wrong_ids(number, chunk)
                    if finding is not None:
                        yield finding
                self.tally.chunks += 1
                self.tally.bytes_read += length
            self._report()

    def _place(self, number: int) -> tuple[tuple[int, int], int, int, tuple[int, ...]]:
        """A chunk's position, its rows ``[start, stop)`` of the segment, and its layers' global ids."""
        layer, row = self.decoder.position(number)
        rows, layers = self.header.geometry.rows_per_chunk, self.header.geometry.layers_per_chunk
        ids = self.header.config.layer_ids[layer * layers : (layer + 1) * layers]
        return (layer, row), row * rows, min((row + 1) * rows, self.header.rows), ids

    def _chunk(self, kind: FindingKind, message: str, number: int) -> Finding:
        message = message.replace(" (tracefile verify lists them)", "")
        position, start, stop, layers = self._place(number)
        samples = _sample_rows(self.holders.get(position[1], ()), start, stop)
        return Finding(kind, message, self.path, self.header.id, position, layers, samples)

    def _wrong_ids(self, number: int, chunk: Array) -> Finding | None:
        """The captured ids of a chunk ``[layers, rows, top_k]`` that no expert has."""
        config = self.header.config
        if config.num_experts > config.fill_value:
            return None  # every value that the dtype holds is an expert
        position, start, stop, layers = self._place(number)
        holders = self.holders.get(position[1], ())
        chunk = chunk[: len(layers)]
        captured = union(part for holding in holders for part in holding.captured(start, stop))
        if all(int(chunk[:, low - start : high - start].max()) < config.num_experts for low, high in captured):
            return None
        wrong = np.zeros(chunk.shape, bool)
        for low, high in captured:
            inside = slice(low - start, high - start)
            wrong[:, inside] = chunk[:, inside] >= config.num_experts
        layer, row, slot = np.argwhere(wrong)[0].tolist()
        rows = np.flatnonzero(wrong.any(axis=(0, 2))) + start
        ranges = union((each, each + 1) for each in rows.tolist())
        message = (
            f"{self.path}: chunk (layers {position[0]}, rows {position[1]}) of segment {self.header.id} holds"
            f" {int(wrong.sum())} ids outside [0, {config.num_experts}) in captured rows, the first of them"
            f" {int(chunk[layer, row, slot])} in row {start + row} of the segment, layer {layers[layer]}. Its checksum"
            " is right, so it was written so; drop these rows"
        )
        return Finding(
            "expert-ids",
            message,
            self.path,
            self.header.id,
            position,
            tuple(layers[i] for i in np.flatnonzero(wrong.any(axis=(1, 2))).tolist()),
            tuple(rows for low, high in ranges for rows in _sample_rows(holders, low, high)),
        )


def _zarr_refusal(node: Literal["array", "group"], path: str) -> str:
    """Why zarr does not open the node at ``path``; empty where it does."""
    import zarr  # only here: zarr starts an event loop in a thread, and nothing else needs it
    from zarr.core.buffer import default_buffer_prototype

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            document = default_buffer_prototype().buffer.from_bytes(
                store_for(path).read(os.path.join(path, METADATA_NAME))
            )
            store = zarr.storage.MemoryStore({METADATA_NAME: document}, read_only=True)
            if node == "array":
                zarr.open_array(store, mode="r")
            else:
                zarr.open_group(store, mode="r")
        except Exception as error:  # whatever it is: zarr, on this document, gives no array
            return f"{type(error).__name__}: {error}"
    return ""
