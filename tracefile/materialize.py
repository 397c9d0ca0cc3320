"""From a selection to values in memory: where they go, in which width they travel, in which order they lie.

Decoding leaves the processor's caches cold, and each call into torch then costs tens of microseconds: hence few
of them here, and numpy for what does not need torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from tracefile.encode import as_words
from tracefile.errors import MaterializeLimitError, MissingRowsError, RoutedExpertsShapeError
from tracefile.read import read_rows
from tracefile.runs import holds_range
from tracefile.segments import segment_pool
from tracefile.settings import settings
from tracefile.stats import ReadStats

if TYPE_CHECKING:
    from tracefile.selection import Selection

Array: TypeAlias = "np.ndarray[Any, Any]"

_TORCH_DTYPES = {
    np.dtype(name): getattr(torch, name)
    for name in ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
}
_NUMPY_DTYPES = {dtype: narrow for narrow, dtype in _TORCH_DTYPES.items()}


def holds(selection: Selection, fill: str, dtype: torch.dtype) -> bool:
    """Whether ``dtype`` is an integer dtype that holds every value that the selection can have."""
    return dtype in _NUMPY_DTYPES and holds_range(_NUMPY_DTYPES[dtype], *selection.bounds(fill))


def materialize(
    selection: Selection, fill: str, device: torch.device, dtype: torch.dtype, *, pinned: bool, contiguous: bool
) -> torch.Tensor:
    """Read a selection; see :meth:`LazyRoutedExperts.materialize`."""
    _check_readable(selection, fill, dtype)
    if pinned and torch.cuda.is_available():
        return _through_pinned_memory(selection, fill, device, dtype)
    narrow = selection.read_dtype(fill)
    if device.type == "cpu" and holds(selection, fill, dtype):
        narrow = _NUMPY_DTYPES[dtype]  # nothing has to travel: ids are widened as they are placed
    host = _read(selection, fill, np.empty(selection.array_shape, narrow))
    values = torch.from_numpy(_shaped(selection, host, contiguous))
    if device.type != "cpu":
        values = _move(selection, values, device)
    return values if dtype is _TORCH_DTYPES[narrow] else values.to(dtype)


def materialize_into(selection: Selection, fill: str, out: torch.Tensor) -> torch.Tensor:
    """Read a selection into ``out``, straight where its memory and dtype allow."""
    if out.shape != selection.shape:
        raise RoutedExpertsShapeError(f"out has shape {list(out.shape)}, not {list(selection.shape)}")
    target = _direct_target(selection, fill, out)
    if target is not None:
        _check_readable(selection, fill, out.dtype)
        _read(selection, fill, target)
        return out
    narrow = _TORCH_DTYPES[selection.read_dtype(fill)]
    values = materialize(selection, fill, torch.device("cpu"), narrow, pinned=False, contiguous=False)
    return out.copy_(values if out.device.type == "cpu" else _move(selection, values, out.device))


def read_layers(
    selection: Selection, fill: str, device: torch.device, *, keep: bool = True
) -> tuple[torch.Tensor, int]:
    """Read a selection as it is stored: layer by layer, narrow.

    On the way to a CUDA device it is staged in page-locked memory, and the copy is queued on the current stream.
    ``keep``: whether other reads may want the rest of its chunks.

    Returns
    -------
    values : torch.Tensor
        ``[layers, rows, top_k]`` on ``device``.
    chunks : int
        From how many chunks they came.
    """
    dtype = _TORCH_DTYPES[selection.read_dtype(fill)]
    _check_readable(selection, fill, dtype)
    cuda = device.type == "cuda"
    # The caching host allocator keeps page-locked memory until the queued copy has run.
    host = torch.empty(selection.array_shape, dtype=dtype, pin_memory=cuda)
    chunks = read_rows(selection.rows, selection.layers, selection.config, host.numpy(), fill=fill, keep=keep)
    return (host if device.type == "cpu" else _move(selection, host, device, non_blocking=cuda)), chunks


def widened(selection: Selection, values: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A copy of narrow values on ``device``, widened there."""
    if values.device.type != device.type or (device.type != "cpu" and device.index not in (None, values.device.index)):
        values = _move(selection, values, device)
        return values if values.dtype == dtype else values.to(dtype)
    return values.to(dtype, copy=True)


def _through_pinned_memory(selection: Selection, fill: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The result lies in page-locked memory, or travels to its device from it."""
    if device.type == "cpu":
        return materialize_into(selection, fill, torch.empty(selection.shape, dtype=dtype, pin_memory=True))
    moved, _ = read_layers(selection, fill, device)
    return moved.transpose(0, 1).reshape(selection.shape).to(dtype)


def _check_readable(selection: Selection, fill: str, dtype: torch.dtype) -> None:
    if fill == "error" and not selection.rows.all_stored:
        missing = selection.rows.missing_ranges()
        if missing:
            listed = ", ".join(f"[{start}, {stop})" for start, stop in missing[:5]) + (", ..." if missing[5:] else "")
            raise MissingRowsError(
                f"rows {listed} of this tensor were never captured; leave them out with experts.valid, or choose a"
                " rendering with experts.filled('spread' | 'arange' | 'zeros' | 'minus_one')",
                rows=missing,
            )
    limit = settings().materialize_limit
    if limit is not None:
        wanted = math.prod(selection.shape) * dtype.itemsize
        if wanted > limit:
            raise MaterializeLimitError(
                f"reading {selection.shape} as {dtype} needs {wanted:,} bytes, over the limit of {limit:,}: slice"
                " first, or raise tracefile.configure(materialize_limit=...)",
                wanted=wanted,
                limit=limit,
            )


def _direct_target(selection: Selection, fill: str, out: torch.Tensor) -> Array | None:
    """``out`` seen as ``[layers, rows, top_k]``, if values can be read straight into it."""
    if type(out) is not torch.Tensor or not out.is_cpu or out.is_floating_point():
        return None
    array: Array = out.numpy()
    if array.dtype.kind not in "iu" or not holds_range(array.dtype, *selection.bounds(fill)):
        return None
    if selection.form == "layers" and len(selection.lead) == 1:
        array = array.transpose(1, 0, 2)
    elif selection.form != "layer":
        return None
    return array.reshape(selection.array_shape) if array.flags.c_contiguous else None


def _read(selection: Selection, fill: str, host: Array) -> Array:
    read_rows(selection.rows, selection.layers, selection.config, host, fill=fill)
    return host


def _shaped(selection: Selection, host: Array, contiguous: bool) -> Array:
    """What was read as ``[layers, rows, top_k]``, in the selection's shape."""
    if selection.form == "layers" and not contiguous:
        return np.moveaxis(host.reshape(len(host), *selection.lead, host.shape[2]), 0, -2)
    if len(host) > 1:
        host = np.ascontiguousarray(as_words(host).swapaxes(0, 1)).view(host.dtype)
    return host.reshape(selection.shape)


def _move(
    selection: Selection, values: torch.Tensor, device: torch.device, *, non_blocking: bool = False
) -> torch.Tensor:
    """The one place where values go to another device."""
    segments = selection.rows.segments()
    if segments:
        segment_pool.record(segments[0].trace, ReadStats(bytes_moved=values.nbytes))
    return values.to(device, non_blocking=non_blocking)
