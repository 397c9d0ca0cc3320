"""Payloads to arrays: base64, raw buffers, ``.npy``, arrays and nested lists.

What a payload claims (a shape, a dtype) is compared with the bytes that came before anything is made of them, so
that a lying header allocates nothing. Arrays are views of what came wherever its bytes allow. No payload is ever
unpickled, and no header is evaluated as Python, which is what numpy's own reader does.
"""

from __future__ import annotations

import base64
import re
import reprlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from tracefile.errors import EngineOutputError

if TYPE_CHECKING:
    from collections.abc import Iterable

Array: TypeAlias = "np.ndarray[Any, Any]"

_NPY_MAGIC = b"\x93NUMPY"
#: Bytes of the header's length by major version. Version 3 exists for the names of structured fields only.
_NPY_LENGTH_BYTES = {1: 2, 2: 4}
_NPY_DESCR = re.compile(r"""['"]descr['"]\s*:\s*(?:['"]([^'"]*)['"]|\[)""")
_NPY_FORTRAN = re.compile(r"""['"]fortran_order['"]\s*:\s*(True|False)""")
_NPY_SHAPE = re.compile(r"""['"]shape['"]\s*:\s*\(([0-9,\s]*)\)""")
_DIMENSION = re.compile(r"\s*[0-9]{1,18}\s*")
#: As numpy's own reader; what numpy writes for integers takes 118 bytes.
_NPY_MAX_HEADER = 10_000
_INTEGER_DESCR = re.compile(r"[<>=|]?[iu][1248]")
INTEGER_DTYPES = ("uint8", "uint16", "int8", "int16", "int32", "int64", "uint32", "uint64")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an engine's output must come to: rows of ``num_layers x top_k`` ids."""

    engine: str
    num_layers: int
    top_k: int
    num_experts: int

    def __str__(self) -> str:
        return f"[rows, {self.num_layers}, {self.top_k}]"

    def error(self, expected: str, got: str) -> EngineOutputError:
        return EngineOutputError(
            f"output of {self.engine}: expected {expected}; got {got}",
            engine=self.engine,
            expected=expected,
            got=got,
        )

    def shape_error(self, shape: Iterable[object]) -> EngineOutputError:
        shape = list(shape)
        hint = ""
        if len(shape) == 3 and shape[2] == self.top_k:
            hint = " (where the engine returns other layers than the trace holds, layer_ids= says which)"
        return self.error(f"shape {self}", f"shape {shape}{hint}")


def from_base64(text: object, wanted: Wanted, what: str = "base64 text") -> bytes:
    """The bytes that base64 text stands for; ``text`` is ``str`` or bytes-like."""
    if not isinstance(text, str | bytes | bytearray | memoryview):
        raise wanted.error(what, describe(text))
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise wanted.error(what, f"{describe(text)} ({error})") from None


def dtype_named(name: object, allowed: tuple[str, ...], wanted: Wanted) -> np.dtype[Any]:
    """The little-endian dtype of a name that travelled with a payload."""
    if not isinstance(name, str) or name not in allowed:
        raise wanted.error(f"a dtype among {', '.join(allowed)}", f"dtype {short(name)}")
    return np.dtype(name).newbyteorder("<")


def from_buffer(data: bytes, dtype: np.dtype[Any], shape: object, wanted: Wanted) -> Array:
    """``[rows, num_layers, top_k]`` over ``data``, read-only; without a shape, the length says how many rows."""
    row_bytes = wanted.num_layers * wanted.top_k * dtype.itemsize
    if shape is None:
        rows, rest = divmod(len(data), row_bytes)
        if rest:
            expected = f"a multiple of {row_bytes:,} bytes ({dtype.name} {wanted})"
            raise wanted.error(expected, f"{len(data):,} bytes, {len(data) / row_bytes:.2f} rows")
    else:
        rows = _declared_rows(shape, wanted)
        if len(data) != rows * row_bytes:
            expected = f"{rows * row_bytes:,} bytes ({dtype.name} [{rows}, {wanted.num_layers}, {wanted.top_k}])"
            raise wanted.error(expected, f"{len(data):,} bytes")
    return np.ndarray((rows, wanted.num_layers, wanted.top_k), dtype, data)


def from_npy(data: bytes, wanted: Wanted) -> Array:
    """The array of a ``.npy`` file, read-only, in C or Fortran order and either byte order.

    The format is numpy's: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
    """
    expected = "a .npy file of an integer array"
    if data[:6] != _NPY_MAGIC:
        kind = "a pickle, which is never loaded" if data[:1] == b"\x80" else f"{len(data):,} bytes that begin with"
        raise wanted.error(expected, f"{kind} {bytes(data[:8])!r}")
    width = _NPY_LENGTH_BYTES.get(data[6] if len(data) > 6 else 0)
    if width is None:
        raise wanted.error(".npy version 1 or 2", f"a header that begins with {bytes(data[:8])!r}")
    begin = 8 + width
    length = int.from_bytes(data[8:begin], "little")
    offset = begin + length
    if length > _NPY_MAX_HEADER or len(data) < offset:
        raise wanted.error(expected, f"{len(data):,} bytes with a header of {length:,}")
    header = data[begin:offset].decode("latin-1")
    descr, fortran, shape = (pattern.search(header) for pattern in (_NPY_DESCR, _NPY_FORTRAN, _NPY_SHAPE))
    if descr is None or fortran is None or shape is None:
        raise wanted.error(expected, f"the header {short(header)}")
    name = descr[1] or "structured"
    if not _INTEGER_DESCR.fullmatch(name):
        what = "object arrays, which are pickles and never loaded" if name.endswith("O") else f"dtype {short(name)}"
        raise wanted.error(expected, what)
    dtype = np.dtype(name)
    sizes = shape[1].rstrip().removesuffix(",").split(",")
    dimensions = [int(size) for size in sizes if _DIMENSION.fullmatch(size)]
    if len(dimensions) != len(sizes):
        raise wanted.error(f"shape {wanted}", f"shape ({short(shape[1])})")
    rows = _declared_rows(dimensions, wanted)
    nbytes = rows * wanted.num_layers * wanted.top_k * dtype.itemsize
    if len(data) - offset != nbytes:
        raise wanted.error(
            f"{nbytes:,} bytes ({dtype.name} {dimensions}) after the .npy header", f"{len(data) - offset:,} bytes"
        )
    order: Any = "F" if fortran[1] == "True" else "C"
    return np.ndarray(tuple(dimensions), dtype, data, offset, order=order)


def as_array(value: object, wanted: Wanted, dtype: np.dtype[Any] | None = None) -> Array:
    """An array, tensor or nested list as ``[rows, num_layers, top_k]``; lists in ``dtype`` if given.

    Arrays and CPU tensors are not copied.
    """
    expected = f"an integer array {wanted}"
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise wanted.error(expected, describe(value))
        try:
            array = value.detach().cpu().numpy()
        except (TypeError, RuntimeError) as error:  # sparse, quantized, on the meta device
            raise wanted.error(expected, f"{describe(value)} ({error})") from None
    elif isinstance(value, np.ndarray):
        array = value
    elif isinstance(value, list | tuple):
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise wanted.error(expected, f"{describe(value)} ({error})") from None
        if not len(value):
            array = np.empty((0, wanted.num_layers, wanted.top_k), np.int64)  # numpy makes an empty list float
    else:
        raise wanted.error(expected, describe(value))
    if array.dtype.kind not in "iu":
        what = "an object array, which may hold anything" if array.dtype.hasobject else describe(array)
        raise wanted.error(expected, what)
    if dtype is not None and not isinstance(value, np.ndarray | torch.Tensor):
        bounds = np.iinfo(dtype)
        if array.size and not bounds.min <= int(array.min()) <= int(array.max()) <= bounds.max:
            raise wanted.error(f"ids that {dtype.name} holds", f"ids from {array.min()} to {array.max()}")
        array = array.astype(dtype)
    return array


def shaped(array: Array, wanted: Wanted, *, flat: bool = False) -> Array:
    """The array itself if it is ``[rows, num_layers, top_k]``; ``flat``: also with axes merged."""
    row = wanted.num_layers * wanted.top_k
    if array.ndim == 3 and array.shape[1:] == (wanted.num_layers, wanted.top_k):
        return array
    if flat and ((array.ndim == 1 and array.size % row == 0) or (array.ndim == 2 and array.shape[1] == row)):
        return array.reshape(array.size // row, wanted.num_layers, wanted.top_k)
    raise wanted.shape_error(array.shape)


def _declared_rows(shape: object, wanted: Wanted) -> int:
    if not isinstance(shape, list | tuple):
        raise wanted.error(f"shape {wanted}", f"shape {short(shape)}")
    if len(shape) != 3 or not all(is_index(dimension) for dimension in shape):
        raise wanted.error(f"shape {wanted}", f"shape {short(list(shape))}")
    if tuple(shape[1:]) != (wanted.num_layers, wanted.top_k):
        raise wanted.shape_error(shape)
    return int(shape[0])


def is_index(value: object) -> bool:
    """A row or a count: an integer from 0 that fits into 64 bits, and is not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= int(value) < 2**63


def describe(value: object) -> str:
    """What a value is, in a few words, for messages."""
    if value is None:
        return "None"
    if isinstance(value, np.ndarray | torch.Tensor):
        return f"{type(value).__name__} of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, str | bytes | bytearray | memoryview):
        length = value.nbytes if isinstance(value, memoryview) else len(value)
        return f"{type(value).__name__} of length {length:,}"
    if isinstance(value, list | tuple | dict):
        return f"{type(value).__name__} {short(value)}"
    return f"an object of type {type(value).__name__}"


#: Of a payload that may be large, deeply nested or both.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlevel = 3


def short(value: object) -> str:
    """The repr of what may be of any size, for messages."""
    try:
        text = _SHORT.repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:96]} ..."
