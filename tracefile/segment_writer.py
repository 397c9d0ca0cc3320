"""One segment: its samples encoded, its document made, all of it published at once or not at all."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from tracefile.encode import SampleEncoder
from tracefile.errors import SegmentMissingError
from tracefile.format import (
    SHARD_NAME,
    ChunkGeometry,
    CodecName,
    ModelConfig,
    new_segment_id,
)
from tracefile.metadata import SegmentHeader, Span, TraceHeader, WeightRange
from tracefile.prefixes import PrefixChain, PrefixIndex, Sharing
from tracefile.publish import building, this_writer, write_document
from tracefile.read import read_rows
from tracefile.reclaim import lost_segments
from tracefile.revision import Kept, entry_of
from tracefile.runs import Rows, SegmentRef, StoredRun
from tracefile.shard_file import ShardFile
from tracefile.store import store_for
from tracefile.validate import CaptureCheck, ValidateMode, capture_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tracefile.metadata import SampleEntry
    from tracefile.quota import Quota
    from tracefile.revision import Part
    from tracefile.runs import TraceRef
    from tracefile.validate import CaptureFinding

    Array = np.ndarray[Any, Any]


class _RowsGone(Exception):
    """Rows that a segment names were deleted before it was published."""

    def __init__(self, segments: set[str]) -> None:
        super().__init__(segments)
        self.segments = segments


class SegmentWriter:
    """Writes the segments of one writer. Safe for threads.

    Parameters
    ----------
    trace : TraceRef
    config : ModelConfig
    geometry : ChunkGeometry
        Of long samples; a segment of short ones has smaller chunks.
    codec : str
    durable : bool
    share_prefixes : bool
        Whether rows that this writer wrote already are found at the beginning of other samples.
    validate : {"strict", "warn", "off"}
    dense_layers : sequence of int, optional
        See :class:`~tracefile.validate.CaptureCheck`.
    quota : Quota, optional
    """

    def __init__(
        self,
        trace: TraceRef,
        config: ModelConfig,
        geometry: ChunkGeometry,
        codec: CodecName,
        *,
        durable: bool,
        share_prefixes: bool,
        validate: ValidateMode,
        dense_layers: Sequence[int] | None,
        quota: Quota | None = None,
    ) -> None:
        self._trace = trace
        self._quota = quota
        self._config = config
        self._geometry = geometry
        self._codec: CodecName = codec
        self._durable = durable
        self._validate: ValidateMode = validate
        self._dense_layers = dense_layers
        self._new_check()  # what is wrong with its options is said here and now
        self._prefixes = PrefixIndex(config, self._read) if share_prefixes else None
        # Encoders that nobody is using: each has buffers, which two threads must not share.
        self._encoders: deque[SampleEncoder] = deque()

    def _new_check(self) -> CaptureCheck | None:
        return None if self._validate == "off" else CaptureCheck(self._config, dense_layers=self._dense_layers)

    def write(
        self,
        samples: Mapping[str, Sequence[Part]],
        weight_version: int | str | None = None,
        num_tokens: int | None = None,
    ) -> list[Rows]:
        """Publish a segment that lists ``samples``, each of ``num_tokens`` tokens, if that is said.

        Returns
        -------
        list of Rows
            Of each sample.

        Raises
        ------
        ExpertIdError, CaptureError, QuotaExceededError, PublishError
        SegmentMissingError
            Rows that the samples are to keep were deleted meanwhile.
        """
        if self._quota is not None and any(
            isinstance(part, np.ndarray) for parts in samples.values() for part in parts
        ):
            self._quota.admit(0)
        while True:
            try:
                return self._write(samples, weight_version, num_tokens)
            except _RowsGone as gone:
                lost = gone.segments
            kept = [part for parts in samples.values() for part in parts if isinstance(part, Kept)]
            for segment in lost & {part.span.segment for part in kept}:
                raise SegmentMissingError(
                    f"rows that a sample was to keep are gone with segment {segment} of {self._trace.path}: they were"
                    " deleted meanwhile. Nothing was published; append the sample whole",
                    path=self._trace.path,
                    segment=segment,
                )
            if self._prefixes is not None:
                self._prefixes.forget_segments(lost)  # and write them again

    def _check_rows(self, entries: Mapping[str, SampleEntry], segment: str) -> None:
        spans = {span for entry in entries.values() for span in entry.spans if span.segment != segment}
        if spans:
            lost = lost_segments(self._trace.path, TraceHeader(self._trace.uuid, self._config), spans)
            if lost:
                raise _RowsGone(lost)

    def _write(
        self, samples: Mapping[str, Sequence[Part]], weight_version: int | str | None, num_tokens: int | None
    ) -> list[Rows]:
        path, segment = self._trace.path, new_segment_id()
        store = store_for(path)
        sharing = Sharing(self._prefixes) if self._prefixes is not None else None
        with building(path, segment) as build:
            shard_path = os.path.join(build, SHARD_NAME)
            begun = {sample: _BegunSample(parts, sharing) for sample, parts in samples.items()}
            longest = max((each.longest for each in begun.values()), default=0)
            with (
                self._encoder_for(longest) as encoder,
                ShardFile(shard_path, segment, encoder.geometry, self._config.num_layers, self._durable) as shard,
            ):
                entries = {}
                findings: list[CaptureFinding] = []
                for sample, each in begun.items():
                    if encoder.check is not None:
                        encoder.check.begin(sample)
                    entries[sample] = entry = self._write_sample(sample, each, segment, encoder, shard, sharing)
                    if encoder.check is not None:
                        found = encoder.check.finish(num_tokens=num_tokens, rows=entry.rows)
                        if found and self._validate == "strict":
                            raise capture_error(found)
                        findings += found
            header = SegmentHeader(
                segment,
                self._trace.uuid,
                self._config,
                shard.rows,
                encoder.geometry,
                self._codec,
                shard.nbytes,
                entries,
                this_writer(),
                () if weight_version is None or not shard.rows else (WeightRange(0, shard.rows, weight_version),),
                tuple(finding.as_json() for finding in findings),
            )
            write_document(build, header, durable=self._durable)
            # What a store wants held of a segment is held from its publication on, and of others from before it.
            if self._quota is not None:
                self._quota.admit(shard.nbytes)
            store.upload(path, segment, build)  # so that little time passes between looking and publishing
            self._check_rows(entries, segment)
            handles = {name: store.handle(path, name) for name in _named(entries.values()) - {segment}}
            handles[segment] = published = store.publish(path, segment, build, durable=self._durable)
            if published is not None:
                for spans in (entry.spans for entry in entries.values()):
                    # It lists samples, even if all of a sample's rows are in others.
                    if spans and all(span.segment != segment for span in spans):
                        held = handles[spans[-1].segment]
                        if held is not None:
                            held.hold(published)
            try:
                self._check_rows(entries, segment)
            except _RowsGone:
                store.delete(path, segment)
                raise
        if self._quota is not None:
            self._quota.published(segment, shard.nbytes)
        if sharing is not None:
            sharing.commit()
        return [Rows.of_sample(entry, self._trace, lambda _, name: handles[name]) for entry in entries.values()]

    def close(self) -> None:
        """Let the encoders' buffers go."""
        self._encoders.clear()

    @contextlib.contextmanager
    def _encoder_for(self, longest: int) -> Iterator[SampleEncoder]:
        geometry = self._geometry.fitted(longest)
        try:
            encoder = self._encoders.pop()
        except IndexError:
            encoder = None
        if encoder is None or encoder.geometry != geometry:
            encoder = SampleEncoder(self._config, geometry, self._codec, self._new_check())
        yield encoder
        self._encoders.append(encoder)

    def _write_sample(
        self,
        sample: str,
        begun: _BegunSample,
        segment: str,
        encoder: SampleEncoder,
        shard: ShardFile,
        sharing: Sharing | None,
    ) -> SampleEntry:
        begun.share_again()  # samples of this segment that came before it
        kept: list[Kept] = []
        rows = 0
        for number, part in enumerate(begun.parts):
            if isinstance(part, Kept):
                kept.append(part)
            elif len(part):
                chain = begun.chain if number == begun.shared else None
                start = shard.write_rows(len(part), encoder.chunks(part, sample, rows, chain))
                kept.append(Kept(Span(segment, start, start + len(part)), tuple(encoder.missing)))
            rows += len(part)
        entry = entry_of(sample, kept)
        if sharing is not None and begun.chain is not None:
            sharing.note(entry, begun.given, begun.chain)
        return entry

    def _read(self, parts: Sequence[Kept]) -> Array:
        runs = [StoredRun(SegmentRef(self._trace, p.span.segment), p.span.start, p.span.stop) for p in parts]
        rows = Rows.of(runs)
        layers = tuple(range(self._config.num_layers))
        out = np.empty((len(layers), len(rows), self._config.top_k), self._config.dtype)
        read_rows(rows, layers, self._config, out, keep=False)
        return out.transpose(1, 0, 2)


def _named(entries: Iterable[SampleEntry]) -> set[str]:
    return {span.segment for entry in entries for span in entry.spans}


class _BegunSample:
    """A sample's parts, of which the first, where it is new, may turn out to be shared with other samples.

    Attributes
    ----------
    given, parts : list
        What was given, and the same with the shared rows named instead.
    shared : int
        How many of ``parts`` are shared.
    chain : PrefixChain or None
        Of the rows that are shared.
    """

    def __init__(self, parts: Sequence[Part], sharing: Sharing | None) -> None:
        self.given = self.parts = list(parts)
        self.shared = 0
        self.chain: PrefixChain | None = None
        self._sharing = sharing
        self.share_again()

    @property
    def longest(self) -> int:
        return max((len(part) for part in self.parts if isinstance(part, np.ndarray)), default=0)

    def share_again(self) -> None:
        """Look for the longest prefix that is known by now."""
        rows = self.given[0] if self.given else None
        if self._sharing is not None and isinstance(rows, np.ndarray):
            shared, self.chain = self._sharing.find(rows)
            self.shared = len(shared)
            self.parts = [*shared, rows[sum(map(len, shared)) :], *self.given[1:]]
