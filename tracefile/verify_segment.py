"""The verification of one segment: its shard file front to back, every chunk, every captured id."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from tracefile.errors import (
    ChunkDamagedError,
    SegmentMissingError,
    ShardDamagedError,
    TraceError,
)
from tracefile.findings import Finding, FindingKind, SampleRows
from tracefile.format import (
    CODECS,
    HEADER_BYTES,
    METADATA_NAME,
    SHARD_NAME,
    is_segment_id,
    segment_path,
    shard_header,
)
from tracefile.shard import ChunkDecoder, ShardIndex, check_header, index_bytes
from tracefile.source import merge_ranges
from tracefile.store import READS, store_for
from tracefile.survey import (
    Holding,
    Range,
    raise_unanswered,
    union,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tracefile.metadata import SegmentHeader
    from tracefile.source import Source
    from tracefile.survey import Survey

Array: TypeAlias = "np.ndarray[Any, Any]"


def sample_rows(holdings: Iterable[Holding], start: int = 0, stop: int | None = None) -> tuple[SampleRows, ...]:
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


class SegmentCheck:
    """The check of one segment whose document is sound.

    Parameters
    ----------
    survey : Survey
    header : SegmentHeader
    holdings : list of Holding
        The samples' rows that lie in the segment.
    on_read : callable
        Called with how many chunks were dealt with, and how many encoded bytes were read for it.
    """

    def __init__(
        self,
        survey: Survey,
        header: SegmentHeader,
        holdings: list[Holding],
        on_read: Callable[[int, int], None],
    ) -> None:
        self.survey = survey
        self.header = header
        self.holdings = holdings
        self.on_read = on_read
        self.vanished = False
        self._dealt_with = 0  # chunks
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
        """Read the segment. Where it was removed meanwhile, ``vanished`` says so afterwards.

        Raises
        ------
        StoreError
            The store does not answer.
        """
        refusal = zarr_refusal("array", self.directory)
        if refusal and not self.survey.is_gone(self.header.id):
            where = os.path.join(self.directory, METADATA_NAME)
            message = f"{where}: zarr refuses this array ({refusal}); restore the file"
            yield Finding("zarr-metadata", message, where, self.header.id)
        beyond = sample_rows(self.holdings, self.header.rows)
        if beyond:
            message = f"{self.directory} has {self.header.rows} rows, and samples have rows beyond them"
            yield Finding(
                "span-range", message, self.directory, self.header.id, None, self.header.config.layer_ids, beyond
            )
        if self.header.rows:
            yield from self._shard_findings()
        # What a damaged shard file kept from being read counts as dealt with.
        self.on_read(self.layer_chunks * self.row_chunks - self._dealt_with, 0)

    def _shard_findings(self) -> Iterator[Finding]:
        header = self.header
        try:
            source = self._open()
        except SegmentMissingError as error:
            if error.gone:
                self.vanished = True
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

    def _open(self) -> Source:
        store, header = store_for(self.path), self.header
        tries = READS  # a collection may have it out of the way, and bring it back
        while True:
            tries -= 1
            try:
                return store.open_source(self.path, kind="pread", size=header.shard_bytes, segment=header.id)
            except SegmentMissingError as error:
                error.gone = self.survey.is_gone(header.id)
                if error.gone or not tries:
                    raise

    def _whole(self, kind: FindingKind, message: str) -> Finding:
        layers = self.header.config.layer_ids
        return Finding(kind, message, self.path, self.header.id, None, layers, sample_rows(self.holdings))

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
            self._dealt_with += last - first
            self.on_read(last - first, sum(length for _, length in places[first:last]))

    def _place(self, number: int) -> tuple[tuple[int, int], int, int, tuple[int, ...]]:
        """A chunk's position, its rows ``[start, stop)`` of the segment, and its layers' global ids."""
        layer, row = self.decoder.position(number)
        rows, layers = self.header.geometry.rows_per_chunk, self.header.geometry.layers_per_chunk
        ids = self.header.config.layer_ids[layer * layers : (layer + 1) * layers]
        return (layer, row), row * rows, min((row + 1) * rows, self.header.rows), ids

    def _chunk(self, kind: FindingKind, message: str, number: int) -> Finding:
        message = message.replace(" (tracefile verify lists them)", "")
        position, start, stop, layers = self._place(number)
        samples = sample_rows(self.holders.get(position[1], ()), start, stop)
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
            tuple(rows for low, high in ranges for rows in sample_rows(holders, low, high)),
        )


def zarr_refusal(node: Literal["array", "group"], path: str) -> str:
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
