"""From the caller's arrays to chunks: check, narrow, transpose, compress.

Works through a sample a block of rows at a time, so that what one step leaves is still in the processor's
cache when the next one reads it, and so that a writer's heap holds a few chunks, however long the sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from tracefile.errors import ExpertIdError, RoutedExpertsShapeError, RoutedExpertsTypeError
from tracefile.format import CODECS, ChunkGeometry, CodecName, ModelConfig
from tracefile.shard import encode_chunk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefile.prefixes import PrefixChain
    from tracefile.validate import CaptureCheck

Array: TypeAlias = "np.ndarray[Any, Any]"


def as_rows(routed_experts: object, config: ModelConfig, sample: str) -> Array:
    """Routed experts as an integer array ``[tokens, num_layers, top_k]``, without copying where possible.

    Raises
    ------
    RoutedExpertsTypeError, RoutedExpertsShapeError
    """
    if isinstance(routed_experts, torch.Tensor):
        if routed_experts.is_floating_point() or routed_experts.is_complex() or routed_experts.dtype == torch.bool:
            raise _not_integers(sample, str(routed_experts.dtype))
        array = routed_experts.detach().cpu().numpy()
    elif isinstance(routed_experts, np.ndarray):
        array = routed_experts
    else:
        try:
            array = np.asarray(routed_experts)
        except ValueError as error:  # a ragged list
            raise _not_integers(sample, str(error)) from None
        if array.size == 0 and not hasattr(routed_experts, "__array__"):
            array = array.astype(np.int64)  # numpy makes an empty list float
    if array.dtype.kind not in "iu":
        raise _not_integers(sample, str(array.dtype))
    layers, top_k = config.num_layers, config.top_k
    if array.ndim == 2 and array.shape[1] == layers * top_k:
        array = array.reshape(array.shape[0], layers, top_k)
    if array.ndim != 3 or array.shape[1:] != (layers, top_k):
        raise RoutedExpertsShapeError(
            f"sample {sample!r} has shape {list(array.shape)}; expected [tokens, {layers}, {top_k}] or"
            f" [tokens, {layers * top_k}], the configuration of this trace",
            sample=sample,
        )
    return array


def _not_integers(sample: str, what: str) -> RoutedExpertsTypeError:
    return RoutedExpertsTypeError(
        f"sample {sample!r} is of {what}; routed experts are integers (int32, uint8, ...)", sample=sample
    )


class EncodedChunk(NamedTuple):
    """One chunk ready to be written: its place in the grid along layers, its payload and its checksum."""

    layer_chunk: int
    payload: bytes
    checksum: bytes


class SampleEncoder:
    """Encodes samples of one segment, chunk by chunk.

    Attributes
    ----------
    check : CaptureCheck or None
        Sees every block of rows on its way.
    missing : list of (int, int)
        After :meth:`chunks` is exhausted: ranges, within what it was given, of rows that came as all -1, which were
        never captured.
    """

    def __init__(
        self, config: ModelConfig, geometry: ChunkGeometry, codec: CodecName, check: CaptureCheck | None = None
    ) -> None:
        self.config = config
        self.check = check
        self.geometry = geometry
        self._blosc = CODECS[codec]
        shape = (geometry.rows_per_chunk, config.num_layers, config.top_k)
        self._narrow = np.empty(shape, config.dtype)
        self._chunk = np.empty((geometry.layers_per_chunk, geometry.rows_per_chunk, config.top_k), config.dtype)
        # The ids of one token and layer are moved as one word (or a few), not one by one.
        self._narrow_words = as_words(self._narrow)
        self._chunk_words = as_words(self._chunk)
        self.missing: list[tuple[int, int]] = []

    def chunks(
        self, rows: Array, sample: str, first_row: int = 0, chain: PrefixChain | None = None
    ) -> Iterator[EncodedChunk]:
        """The chunks of new rows ``[tokens, num_layers, top_k]`` of a sample, all layers of the first rows first.

        Parameters
        ----------
        rows : ndarray
        sample : str
        first_row : int
            Which row of the sample they begin with.
        chain : PrefixChain, optional
            Gets the rows in their stored form, up to the first that was never captured.

        Raises
        ------
        ExpertIdError
            An id outside ``[0, num_experts)``.
        """
        self.missing = []
        config, geometry = self.config, self.geometry
        per_chunk, layers_per_chunk = geometry.rows_per_chunk, geometry.layers_per_chunk
        for first in range(0, len(rows), per_chunk):
            block = rows[first : first + per_chunk]
            count = len(block)
            captured = self._narrow_block(block, first, sample, first_row)
            if self.check is not None:
                self.check.block(self._narrow[:count], first_row + first, captured)
            if chain is not None:
                chain.update(self._narrow[: count if captured is None else self.missing[0][0] - first])
                if captured is not None:
                    chain.end()
            for number in range(geometry.layer_chunks(config.num_layers)):
                layer = number * layers_per_chunk
                present = min(layers_per_chunk, config.num_layers - layer)
                if count < per_chunk or present < layers_per_chunk:
                    self._chunk.fill(config.fill_value)
                np.copyto(
                    self._chunk_words[:present, :count],
                    self._narrow_words[:count, layer : layer + present].swapaxes(0, 1),
                )
                yield EncodedChunk(number, *encode_chunk(self._chunk, self._blosc))

    def _narrow_block(self, block: Array, first: int, sample: str, first_row: int) -> Array | None:
        """Which rows were captured; ``None``: all."""
        narrow = self._narrow[: len(block)]
        np.copyto(narrow, block, casting="unsafe")
        if self._in_range(block):
            return None
        captured = self._note_missing(block, first)
        wrong = ((block < 0) | (block >= self.config.num_experts)) & captured[:, None, None]
        if wrong.any():
            token, layer, slot = np.argwhere(wrong)[0].tolist()
            raise self._bad_id(int(block[token, layer, slot]), first_row + first + token, layer, sample)
        narrow[~captured] = self.config.fill_value
        return captured

    def _in_range(self, block: Array) -> bool:
        if block.size == 0 or (block.dtype == np.uint8 and self.config.num_experts >= 256):
            return True
        limit = self.config.num_experts
        if block.dtype.kind == "i":
            # As unsigned numbers, negative ids are large ones: one maximum finds both kinds of wrong id.
            bits = 8 * block.dtype.itemsize
            block = block.view(block.dtype.str.replace("i", "u"))
            limit = min(limit, 2 ** (bits - 1))
        return int(block.max()) < limit

    def _note_missing(self, block: Array, first: int) -> Array:
        captured = ~(block == -1).all(axis=(1, 2)) if block.dtype.kind == "i" else np.ones(len(block), bool)
        edges = np.flatnonzero(np.diff(np.concatenate(([1], captured.astype(np.int8), [1]))))
        for start, stop in (edges.reshape(-1, 2) + first).tolist():
            if self.missing and self.missing[-1][1] == start:
                self.missing[-1] = (self.missing[-1][0], stop)
            else:
                self.missing.append((start, stop))
        return captured

    def _bad_id(self, expert: int, token: int, layer: int, sample: str) -> ExpertIdError:
        hint = "; a row that was never captured must be -1 throughout" if expert == -1 else ""
        return ExpertIdError(
            f"sample {sample!r}, token {token}, layer {layer} (global id {self.config.layer_ids[layer]}): expert"
            f" {expert} is outside [0, {self.config.num_experts}); nothing was written{hint}",
            sample=sample,
            token=token,
            layer=layer,
            expert=expert,
        )


def as_words(array: Array) -> Array:
    """View the last axis as machine words, as few as it divides into; contiguous arrays only.

    Examples
    --------
    >>> as_words(np.zeros((2, 3, 4), np.uint8)).dtype, as_words(np.zeros((2, 3, 10), np.uint16)).shape
    (dtype('uint32'), (2, 3, 5))
    """
    width = array.shape[-1] * array.itemsize
    word = next(size for size in (8, 4, 2, 1) if width % size == 0)
    words = array.view(f"u{word}")
    return words[..., 0] if width == word else words
