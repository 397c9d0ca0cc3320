"""The native decode loop: many chunks checked, decoded and placed in one call, without the interpreter's lock.

An accelerator and nothing else: ``tracefile/_decode.c`` is compiled when the package is built, where there is a C
compiler, and is loaded at the first read that wants it. It calls the functions that the Python path calls, crc32c's
and numcodecs' own, found by their symbols in those packages' modules; before it is used, everything is tried against
the Python functions. Where anything is missing or disagrees, chunks are decoded in Python as before, and
:func:`status` says why.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import crc32c
import numpy as np
from numcodecs import blosc

from tracefile.format import CODECS
from tracefile.settings import settings
from tracefile.shard import encode_chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracefile.format import BloscSettings

Array: TypeAlias = "np.ndarray[Any, Any]"

_DIRECTORY = os.path.dirname(os.path.abspath(__file__))
SOURCE_PATH = os.path.join(_DIRECTORY, "_decode.c")
LIBRARY_PATH = os.path.join(_DIRECTORY, "_decode.so")

# Ids of a stored width are placed as they are, or widened.
_WIDENED = {(1, 1), (1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (2, 8)}


class Library(NamedTuple):
    """The shared library, and the functions that it is to call, as addresses."""

    decode: Callable[[int], int]
    checksum: int
    decompress: int


class Job:
    """Chunks of one geometry to decode, and where they go. Any number of threads may :meth:`run` it at once.

    Parameters
    ----------
    library : Library
    out : ndarray
        ``[layers, columns]``, C-contiguous and writable, in a width that :func:`can_place` allows.
    dtype : dtype
        Of the ids in the chunks.
    chunk_bytes, chunk_width, row_chunks : int
        Decoded bytes of a chunk, ids of one of its layers, chunks along rows in the grid.
    compressed : bool
    numbers, addresses, lengths : sequence of int
        Of each chunk its number in the grid, where it lies encoded, and its encoded bytes with the checksum.
    kept : sequence of int
        Of each chunk, where it is to be put decoded, or 0.
    rows : sequence of int
        ``chunk along rows, column in it, column of the output, columns``, one after the other, ordered by chunk.
    layers : array of int64
        ``chunk along layers, layer of it, layer of the output``, likewise.

    Notes
    -----
    Whoever makes a job keeps the memory alive to which it gives addresses, as long as threads may run it.
    """

    _NEXT, _BAD = 0, 1

    def __init__(
        self,
        library: Library,
        out: Array,
        dtype: np.dtype[Any],
        *,
        chunk_bytes: int,
        chunk_width: int,
        row_chunks: int,
        compressed: bool,
        numbers: Sequence[int],
        addresses: Sequence[int],
        lengths: Sequence[int],
        kept: Sequence[int],
        rows: Sequence[int],
        layers: array[int],
    ) -> None:
        self.chunks = len(numbers)
        if not len(addresses) == len(lengths) == len(kept) == self.chunks:
            raise ValueError(f"{self.chunks} chunks, {len(addresses)} addresses, {len(lengths)} lengths")
        # As the job of _decode.c lies in memory.
        fields = array(
            "q",
            (
                0,
                self.chunks,
                self.chunks,
                chunk_bytes,
                row_chunks,
                chunk_width,
                dtype.itemsize,
                out.shape[1],
                out.dtype.itemsize,
                address_of(out),
                library.checksum,
                library.decompress if compressed else 0,
                len(rows) // 4,
                len(layers) // 3,
                *numbers,
                *addresses,
                *lengths,
                *kept,
                *rows,
            ),
        )
        fields.extend(layers)
        self._fields = fields
        self._address = fields.buffer_info()[0]
        self._decode = library.decode
        self._out = out

    def run(self) -> None:
        """Decode chunks until none is left to take; other threads may still be at work on theirs.

        Raises
        ------
        MemoryError
        """
        if self._decode(self._address):
            raise MemoryError("no memory to decode a chunk into")

    def cancel(self) -> None:
        """Have every thread stop after the chunk that it is at."""
        self._fields[self._NEXT] = self.chunks

    @property
    def bad(self) -> int | None:
        """Once all threads are done: the first chunk that is damaged, if one is."""
        bad = self._fields[self._BAD]
        return bad if bad < self.chunks else None


def can_place(stored: np.dtype[Any], out: Array) -> bool:
    """Whether ids of the ``stored`` dtype can be put into ``out`` natively."""
    flags = out.flags
    return (
        (stored.itemsize, out.dtype.itemsize) in _WIDENED
        and out.dtype.kind in "iu"
        and out.dtype.isnative
        and flags.c_contiguous
        and flags.writeable
    )


def address_of(data: Array) -> int:
    address: int = data.__array_interface__["data"][0]
    return address


_library: Library | None = None
_status: str | None = None  # why not, once loading was tried and failed


def library() -> Library | None:
    """The library, loaded at the first call; ``None`` where it cannot be used or is switched off."""
    global _library, _status
    if not settings().native:
        return None
    if _library is None and _status is None:
        # Without a lock, which a fork could leave held: at worst two threads load it twice.
        try:
            loaded = load(LIBRARY_PATH, SOURCE_PATH)
            check(loaded)
            _library = loaded
        except (OSError, AttributeError, RuntimeError) as error:
            _status = str(error)
    return _library


def status() -> str:
    """Whether chunks are decoded natively in this process, and if not, why not.

    Examples
    --------
    >>> from tracefile import configure
    >>> before = configure(native=False)
    >>> status()
    'off (switched off by TRACEFILE_NATIVE or configure)'
    >>> _ = configure(native=before.native)
    """
    if not settings().native:
        return "off (switched off by TRACEFILE_NATIVE or configure)"
    return "on" if library() is not None else f"off ({_status})"


def load(path: str, source_path: str) -> Library:
    """Load the shared library at ``path``, and find the functions that it is to call.

    Raises
    ------
    OSError, AttributeError, RuntimeError
        It is not there, a function is not there, or it was not built from the source that lies beside it.
    """
    if not os.path.exists(path):
        raise OSError("not built: there was no C compiler when tracefile was installed")
    shared = ctypes.CDLL(path)
    built_from = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(shared, "tracefile_source"))).decode()
    with open(source_path, "rb") as file:
        if hashlib.sha256(file.read()).hexdigest() != built_from:
            raise RuntimeError("built from another version of _decode.c: install tracefile again")
    decode = shared.tracefile_decode
    decode.argtypes = [ctypes.c_void_p]
    decode.restype = ctypes.c_int
    return Library(decode, _checksum_address(), _address(ctypes.CDLL(blosc.__file__), "blosc_decompress_ctx"))


def _checksum_address() -> int:
    """Of the function that the crc32c package chose for this machine."""
    module = ctypes.CDLL(crc32c._crc32c.__file__)
    names = ["_crc32c_hw_adler", "_crc32c_hw_arm64"] if crc32c.hardware_based else ["_crc32c_sw_slicing_by_8"]
    for name in names:
        if hasattr(module, name):
            return _address(module, name)
    raise AttributeError(f"the crc32c package has no symbol {' or '.join(names)}")


def _address(module: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(getattr(module, name), ctypes.c_void_p).value
    if address is None:
        raise AttributeError(f"{module._name}: {name} is null")
    return address


def check(loaded: Library) -> None:
    """Try the library on chunks that the Python functions encoded: sound ones, and one with a flipped bit.

    Raises
    ------
    RuntimeError
        It does not give what was encoded, or does not notice the flipped bit.
    """
    # Lengths for each loop of the checksums, at several alignments; each decompressor.
    uncompressed = [(None, "uint8", 1, 0), (None, "uint8", 331, 1), (None, "uint16", 20_000, 5)]
    compressed = [(CODECS["fast"], "uint16", 4096, 3), (CODECS["compact"], "uint8", 331, 2)]
    for codec, dtype, width, shift in uncompressed + compressed:
        ids = (np.arange(2 * width, dtype=np.uint32) * 40_503 >> 7).astype(dtype).reshape(2, width)
        if not _gives(loaded, codec, ids, shift):
            raise RuntimeError(f"the native decoder fails its self-check ({codec}, {ids.nbytes} bytes)")


def _gives(loaded: Library, codec: BloscSettings | None, ids: Array, shift: int) -> bool:
    """Whether a chunk comes out as it went in, and is refused with a flipped bit."""
    payload, checksum = encode_chunk(ids, codec)
    encoded = np.frombuffer(bytes(shift) + payload + checksum, np.uint8).copy()
    kept = np.zeros_like(ids)
    out = np.zeros((2, ids.shape[1]), np.int32)

    def bad() -> int | None:
        job = Job(
            loaded,
            out,
            ids.dtype,
            chunk_bytes=ids.nbytes,
            chunk_width=ids.shape[1],
            row_chunks=1,
            compressed=codec is not None,
            numbers=[0],
            addresses=[address_of(encoded) + shift],
            lengths=[len(encoded) - shift],
            kept=[address_of(kept)],
            rows=[0, 0, 0, ids.shape[1]],
            layers=array("q", [0, 0, 1, 0, 1, 0]),
        )
        job.run()
        return job.bad

    if bad() is not None or not np.array_equal(out[::-1], ids) or not np.array_equal(kept, ids):
        return False
    encoded[shift + len(payload) // 2] ^= 8
    return bad() == 0
