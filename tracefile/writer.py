"""The rollout side: :class:`TraceWriter` appends samples to a trace.

Any number of writers, in any number of processes and hosts that share the file system, work on one path
without knowing of each other. What ``append`` returns is committed: visible to every reader, whole.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from tracefile import metadata
from tracefile._version import __version__
from tracefile.encode import SampleEncoder, as_rows
from tracefile.errors import ClosedError, DuplicateSampleError, OptionError, PublishError, SampleIdError
from tracefile.format import (
    DEFAULT_CODEC,
    HEADER_BYTES,
    MAX_CHUNK_BYTES,
    METADATA_NAME,
    SHARD_NAME,
    ChunkGeometry,
    ModelConfig,
    check_codec,
    default_geometry,
    new_segment_id,
    shard_header,
    staging_path,
)
from tracefile.lazy import LazyRoutedExperts
from tracefile.metadata import SampleEntry, SegmentHeader, Span
from tracefile.runs import Rows, TraceRef
from tracefile.shard import encode_index
from tracefile.source import check_source_kind
from tracefile.store import (
    create_trace,
    make_build_directory,
    publish_error,
    publish_segment,
    remove_staging_if_empty,
    write_file,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType

    import numpy as np

#: Encoded chunks are handed to the file system in pieces of about this size.
_WRITE_BYTES = 1024 * 1024
_MAX_PIECES = 512  # well below the system's limit for one gathered write


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
    ) -> None:
        self._closed = True
        self.path = os.path.abspath(os.fspath(path))
        self.config = ModelConfig(num_layers, top_k, num_experts, () if layer_ids is None else tuple(layer_ids))
        self.codec = check_codec(codec)
        self.durable = durable
        default = default_geometry(self.config)
        chosen = ChunkGeometry(
            default.layers_per_chunk if layers_per_chunk is None else layers_per_chunk,
            default.rows_per_chunk if rows_per_chunk is None else rows_per_chunk,
        )
        self.geometry = ChunkGeometry(min(chosen.layers_per_chunk, self.config.num_layers), chosen.rows_per_chunk)
        if self.geometry.chunk_bytes(self.config) > MAX_CHUNK_BYTES:
            raise OptionError(
                f"chunks of {self.geometry.layers_per_chunk} layers x {self.geometry.rows_per_chunk} rows hold"
                f" {self.geometry.chunk_bytes(self.config):,} bytes; the most is {MAX_CHUNK_BYTES:,}"
            )
        kind = check_source_kind(source)
        header = create_trace(self.path, self.config, durable=durable)
        self._ref = TraceRef(self.path, header.uuid, kind)
        # Encoders that no append is using: each has buffers, which two threads must not share.
        self._encoders: deque[SampleEncoder] = deque()
        self._closed = False

    def append(self, sample_id: str, routed_experts: Any) -> LazyRoutedExperts:
        """Write one sample; when this returns, it is committed.

        A sample id that the trace has already gets a newer revision: who opens the trace from now on sees the
        new rows, and handles made before keep the old ones.

        Parameters
        ----------
        sample_id : str
        routed_experts : array_like or torch.Tensor
            ``[tokens, num_layers, top_k]`` or ``[tokens, num_layers * top_k]``, any integer dtype, contiguous
            or not. A row that is -1 throughout was never captured: it is recorded as missing.

        Returns
        -------
        LazyRoutedExperts
            ``[tokens, num_layers, top_k]``, picklable in a few hundred bytes.

        Raises
        ------
        ExpertIdError
            An id lies outside ``[0, num_experts)``. Nothing is written.
        RoutedExpertsTypeError, RoutedExpertsShapeError, SampleIdError, ClosedError
        PublishError
            The file system refused. Nothing is published.
        """
        return self.append_many([(sample_id, routed_experts)])[0]

    def append_many(self, samples: Iterable[tuple[str, Any]]) -> list[LazyRoutedExperts]:
        """Write many samples as one segment: all of them become visible at once, or none.

        Parameters
        ----------
        samples : iterable of (str, array)
            As for :meth:`append`.

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
        if self._closed:
            raise ClosedError(f"the writer of {self.path} is closed; open another", path=self.path)
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for sample_id, routed_experts in samples:
            check_sample_id(sample_id)
            if sample_id in arrays:
                raise DuplicateSampleError(
                    f"sample {sample_id!r} is there twice; nothing was written", sample=sample_id
                )
            arrays[sample_id] = as_rows(routed_experts, self.config, sample_id)
        if not arrays:
            return []
        header = self._write_segment(arrays)
        return [
            LazyRoutedExperts.from_rows(Rows.of_sample(entry, self._ref), self.config)
            for entry in header.samples.values()
        ]

    @contextlib.contextmanager
    def _encoder_for(self, longest: int) -> Iterator[SampleEncoder]:
        geometry = self.geometry.fitted(longest)
        try:
            encoder = self._encoders.pop()
        except IndexError:
            encoder = None
        if encoder is None or encoder.geometry != geometry:
            encoder = SampleEncoder(self.config, geometry, self.codec)
        yield encoder
        self._encoders.append(encoder)

    def _write_segment(self, arrays: dict[str, np.ndarray[Any, Any]]) -> SegmentHeader:
        segment = new_segment_id()
        build = os.path.join(staging_path(self.path), segment)
        try:
            shard_path = os.path.join(build, SHARD_NAME)
            make_build_directory(self.path, os.path.dirname(shard_path))
            with (
                self._encoder_for(max(map(len, arrays.values()))) as encoder,
                _ShardFile(shard_path, segment, encoder.geometry, self.config.num_layers, self.durable) as shard,
            ):
                samples = {sample: shard.write_sample(encoder, sample, rows) for sample, rows in arrays.items()}
            header = SegmentHeader(
                segment,
                self._ref.uuid,
                self.config,
                shard.rows,
                encoder.geometry,
                self.codec,
                shard.nbytes,
                samples,
                {
                    "host": socket.gethostname(),
                    "pid": os.getpid(),
                    "version": __version__,
                    "created": time.time_ns() // 1000 / 1e6,
                },
            )
            document = metadata.encode(metadata.segment_document(header))
            write_file(os.path.join(build, METADATA_NAME), document, self.durable)
            publish_segment(self.path, build, segment, durable=self.durable)
        except BaseException as error:
            shutil.rmtree(build, ignore_errors=True)
            if isinstance(error, OSError) and not isinstance(error, PublishError):
                raise publish_error(self.path, error) from error
            raise
        return header

    def close(self) -> None:
        """Leave the trace. What was appended is committed already; closing twice is fine."""
        if not self._closed:
            self._closed = True
            self._encoders.clear()
            remove_staging_if_empty(self.path)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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


class _ShardFile:
    """A shard file being written, in staging: gathers encoded chunks, ends with the index."""

    def __init__(self, path: str, segment: str, geometry: ChunkGeometry, num_layers: int, durable: bool) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._path = path
        self._segment = segment
        self._geometry = geometry
        self._durable = durable
        self._pieces: list[bytes] = [shard_header(segment)]
        self._pending = HEADER_BYTES
        self._chunks: list[list[tuple[int, int]]] = [[] for _ in range(geometry.layer_chunks(num_layers))]
        self.nbytes = HEADER_BYTES
        self.rows = 0

    def write_sample(self, encoder: SampleEncoder, sample: str, array: np.ndarray[Any, Any]) -> SampleEntry:
        start = self._geometry.align(self.rows)
        for chunk in encoder.chunks(array, sample):
            nbytes = len(chunk.payload) + len(chunk.checksum)
            self._chunks[chunk.layer_chunk].append((self.nbytes, nbytes))
            self._pieces += (chunk.payload, chunk.checksum)
            self.nbytes += nbytes
            self._pending += nbytes
            if self._pending >= _WRITE_BYTES or len(self._pieces) >= _MAX_PIECES:
                self._flush()
        stop = start + len(array)
        if not len(array):
            return SampleEntry(sample, ())
        self.rows = stop
        return SampleEntry(sample, (Span(self._segment, start, stop),), tuple(encoder.missing))

    def _flush(self) -> None:
        pieces, self._pieces, self._pending = self._pieces, [], 0
        written = os.writev(self._fd, pieces)
        for piece in pieces:  # a partial write is legal: go on where it stopped
            size = len(piece)
            if written < size:
                rest = memoryview(piece)[written:]
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
                written = 0
            else:
                written -= size

    def __enter__(self) -> _ShardFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            os.close(self._fd)

    def _finish(self) -> None:
        if not self.rows:
            # Zarr has no shard file where an array has no elements.
            os.unlink(self._path)
            self.nbytes = 0
            return
        places = [place for row in self._chunks for place in row]
        index = encode_index([offset for offset, _ in places], [nbytes for _, nbytes in places])
        self._pieces.append(index)
        self.nbytes += len(index)
        self._flush()
        if self._durable:
            os.fsync(self._fd)
