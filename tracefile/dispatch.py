"""Torch's operations on lazy tensors: which stay lazy, and what happens to the rest.

A handler gets the operator's arguments and returns its result, or ``NotImplemented`` where this call needs
values; then the lazy arguments, and only those, are materialized, and the operator runs on plain tensors.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from tracefile.errors import LazyTensorError
from tracefile.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracefile.lazy import LazyRoutedExperts

Handler: TypeAlias = "Callable[..., Any]"
_HANDLERS: dict[Any, Handler] = {}
aten = torch.ops.aten


def _handles(*operators: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for operator in operators:
            _HANDLERS[operator] = handler
        return handler

    return register


def _overloads(name: str) -> list[Any]:
    packet = getattr(aten, name, None)  # an operator may be younger than the torch in use
    return [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []


def dispatch(cls: type[LazyRoutedExperts], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator of which at least one argument is lazy."""
    handler = _HANDLERS.get(func)
    if handler is not None:
        result = handler(cls, *args, **kwargs)
        if result is not NotImplemented:
            return result
    _refuse_writes(cls, func, args, kwargs)
    known: dict[int, torch.Tensor] = {}

    def values(lazy: LazyRoutedExperts) -> torch.Tensor:
        if id(lazy) not in known:
            known[id(lazy)] = lazy.materialize(contiguous=True)
        return known[id(lazy)]

    args, kwargs = tree_map_only(cls, values, (args, kwargs))
    if func in _VIEWS:
        func = aten.reshape.default  # what is materialized need not have the strides that the lazy one claimed
    return func(*args, **kwargs)


def _refuse_writes(cls: type[LazyRoutedExperts], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for argument, value in [*zip(func._schema.arguments, args, strict=False)] + [
        (a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs
    ]:
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, cls):
            raise LazyTensorError(
                f"{func} would write into lazy routed experts, which are a read-only reference to a trace; write"
                " into experts.materialize() instead"
            )


def _dim(x: LazyRoutedExperts, dim: int) -> int:
    return dim + x.dim() if dim < 0 else dim


def _lazy_or_not(x: LazyRoutedExperts, selection: Selection | None) -> Any:
    return NotImplemented if selection is None else x.with_selection(selection)


@_handles(aten.slice.Tensor)
def _slice(
    cls: type[LazyRoutedExperts],
    x: LazyRoutedExperts,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    dim = _dim(x, dim)
    first, last, _ = slice(start, end).indices(x.shape[dim])
    return _lazy_or_not(x, x.selection.slice(dim, first, max(first, last), step))


@_handles(aten.select.int)
def _select(cls: type[LazyRoutedExperts], x: LazyRoutedExperts, dim: int, index: int) -> Any:
    dim = _dim(x, dim)
    size = x.shape[dim]
    if not -size <= index < size:
        raise IndexError(f"select(): index {index} out of range for tensor of size {list(x.shape)} at dimension {dim}")
    return _lazy_or_not(x, x.selection.select(dim, index % size))


@_handles(aten.split.Tensor)
def _split(cls: type[LazyRoutedExperts], x: LazyRoutedExperts, split_size: int, dim: int = 0) -> Any:
    size = x.shape[_dim(x, dim)]
    if split_size <= 0:
        return NotImplemented
    return _split_with_sizes(cls, x, [min(split_size, size - i) for i in range(0, max(size, 1), split_size)], dim)


@_handles(aten.split_with_sizes.default)
def _split_with_sizes(cls: type[LazyRoutedExperts], x: LazyRoutedExperts, sizes: Sequence[int], dim: int = 0) -> Any:
    dim = _dim(x, dim)
    if sum(sizes) != x.shape[dim] or min(sizes, default=0) < 0:
        return NotImplemented
    parts, start = [], 0
    for size in sizes:
        part = x.selection.slice(dim, start, start + size, 1)
        if part is None:
            return NotImplemented
        parts.append(x.with_selection(part))
        start += size
    return parts


@_handles(aten.unbind.int)
def _unbind(cls: type[LazyRoutedExperts], x: LazyRoutedExperts, dim: int = 0) -> Any:
    dim = _dim(x, dim)
    parts = x.selection.each(dim, lambda i: x.selection.select(dim, i))
    return NotImplemented if parts is None else [x.with_selection(part) for part in parts]


def _positions(index: torch.Tensor, size: int) -> np.ndarray[Any, Any] | None:
    """An index tensor as non-negative positions; ``None`` if torch should judge it."""
    if index.dtype == torch.bool:
        if index.dim() != 1 or index.shape[0] != size:
            return None
        return np.flatnonzero(index.cpu().numpy())
    if index.dtype not in (torch.int64, torch.int32) or index.dim() == 0:
        return None
    positions = index.cpu().numpy().astype(np.int64)
    if positions.size and not (-size <= positions.min() and positions.max() < size):
        return None
    return np.where(positions < 0, positions + size, positions)


@_handles(aten.index.Tensor)
def _index(cls: type[LazyRoutedExperts], x: LazyRoutedExperts, indices: Sequence[torch.Tensor | None]) -> Any:
    used = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if not isinstance(x, cls) or len(used) != 1 or isinstance(used[0][1], cls):
        return NotImplemented
    dim, index = used[0]
    positions = _positions(index, x.shape[dim])
    return NotImplemented if positions is None else _lazy_or_not(x, x.selection.take(dim, positions))


@_handles(aten.index_select.default)
def _index_select(cls: type[LazyRoutedExperts], x: LazyRoutedExperts, dim: int, index: torch.Tensor) -> Any:
    if not isinstance(x, cls) or isinstance(index, cls) or index.dim() != 1 or index.dtype == torch.bool:
        return NotImplemented
    dim = _dim(x, dim)
    positions = _positions(index, x.shape[dim])
    if positions is None or bool((index < 0).any()):
        return NotImplemented
    return _lazy_or_not(x, x.selection.take(dim, positions))


def _is_id_dtype(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


@_handles(aten.cat.default)
def cat(cls: type[LazyRoutedExperts], tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    tensors = [t for t in tensors if t.shape != (0,)]  # torch ignores these, whatever the other shapes
    lazies = [t for t in tensors if isinstance(t, cls)]
    if not lazies:
        return NotImplemented
    first = lazies[0]
    dim = _dim(first, dim)
    rest = first.shape[:dim] + first.shape[dim + 1 :]
    fills = {lazy.fill for lazy in lazies if lazy.selection.rows.missing_ranges()}
    if len(fills) > 1 or dim >= len(first.selection.lead):
        return NotImplemented
    parts = []
    for tensor in tensors:
        if tensor.dim() != first.dim() or tensor.shape[:dim] + tensor.shape[dim + 1 :] != rest:
            return NotImplemented  # torch words the error
        if tensor.device != first.device or not _is_id_dtype(tensor.dtype):
            return NotImplemented
        if isinstance(tensor, cls):
            parts.append(tensor.selection)
        else:
            # A fresh wrapper's form may differ where one layer was selected; padding takes that of the first.
            parts.append(first.selection.padding(tensor.detach().cpu().numpy()))
    joined = Selection.concat(parts, dim)
    if joined is None:
        return NotImplemented
    dtype = functools.reduce(torch.promote_types, [t.dtype for t in tensors])
    pinned = all(lazy.pinned for lazy in lazies) and len(lazies) == len(tensors)
    return first.with_selection(joined, dtype=dtype, pinned=pinned, fill=next(iter(fills), first.fill))


@_handles(aten.stack.default)
def _stack(cls: type[LazyRoutedExperts], tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    if any(t.shape != tensors[0].shape for t in tensors):
        return NotImplemented
    dim = dim + tensors[0].dim() + 1 if dim < 0 else dim
    return cat(cls, [t.unsqueeze(dim) for t in tensors], dim)


@_handles(aten.constant_pad_nd.default)
def constant_pad(cls: type[LazyRoutedExperts], x: LazyRoutedExperts, pad: Sequence[int], value: float = 0) -> Any:
    if len(pad) % 2 or len(pad) > 2 * x.dim() or value != int(value):
        return NotImplemented
    info = torch.iinfo(x.dtype)
    if not info.min <= value <= info.max:
        return NotImplemented
    pairs = [(0, 0)] * (x.dim() - len(pad) // 2) + [(pad[i], pad[i + 1]) for i in range(len(pad) - 2, -1, -2)]
    if any(size + before + after < 0 for size, (before, after) in zip(x.shape, pairs, strict=True)):
        return NotImplemented
    return _lazy_or_not(x, x.selection.pad(pairs, int(value)))


@_handles(aten.unsqueeze.default)
def _unsqueeze(cls: type[LazyRoutedExperts], x: LazyRoutedExperts, dim: int) -> Any:
    if not -x.dim() - 1 <= dim <= x.dim():
        return NotImplemented
    return _lazy_or_not(x, x.selection.unsqueeze(dim + x.dim() + 1 if dim < 0 else dim))


@_handles(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(cls: type[LazyRoutedExperts], x: LazyRoutedExperts, dim: int | Sequence[int] | None = None) -> Any:
    if dim is None:
        dim = range(x.dim())
    dims = [dim] if isinstance(dim, int) else dim
    if any(not -x.dim() <= d < x.dim() for d in dims):
        return NotImplemented
    return _lazy_or_not(x, x.selection.squeeze([_dim(x, d) for d in dims]))


_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


@_handles(*_VIEWS)
def _view(cls: type[LazyRoutedExperts], x: LazyRoutedExperts, size: Sequence[int]) -> Any:
    shape = tuple(size)
    if -1 in shape:
        known = math.prod(s for s in shape if s != -1)
        if shape.count(-1) > 1 or known == 0 or x.numel() % known:
            return NotImplemented
        shape = tuple(x.numel() // known if s == -1 else s for s in shape)
    if math.prod(shape) != x.numel():
        return NotImplemented
    return _lazy_or_not(x, x.selection.view(shape))


@_handles(aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh.default)
def _same(cls: type[LazyRoutedExperts], x: LazyRoutedExperts, **_: Any) -> Any:
    return x.with_selection(x.selection)


@_handles(aten._to_copy.default)
def _to_copy(
    cls: type[LazyRoutedExperts],
    x: LazyRoutedExperts,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    pin_memory: bool | None = None,
    layout: torch.layout | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Any:
    dtype = x.dtype if dtype is None else dtype
    device = x.device if device is None else torch.device(device)
    if layout not in (None, torch.strided) or device.type == "meta":
        return NotImplemented
    if x.holds(dtype):
        pinned = bool(pin_memory) or (x.pinned and device == x.device)
        return x.with_selection(x.selection, dtype=dtype, device=device, pinned=pinned)
    return x.materialize(device=device, dtype=dtype, contiguous=True)


@_handles(*_overloads("is_pinned"))
def _is_pinned(cls: type[LazyRoutedExperts], x: LazyRoutedExperts, device: Any = None) -> bool:
    return x.pinned


@_handles(*_overloads("_pin_memory"), *_overloads("pin_memory"))
def _pin_memory(cls: type[LazyRoutedExperts], x: LazyRoutedExperts, device: Any = None) -> Any:
    return x.with_selection(x.selection, pinned=True)


@_handles(*_overloads("record_stream"))
def _record_stream(cls: type[LazyRoutedExperts], x: LazyRoutedExperts, stream: Any) -> None:
    return None  # it holds no memory that a stream could be using


@_handles(aten.count_nonzero.default)
def _count_nonzero(cls: type[LazyRoutedExperts], x: LazyRoutedExperts, dim: int | None = None) -> Any:
    # slime validates each layer of each sample with it; torch is ten times slower at it than numpy.
    if dim is not None or x.device.type != "cpu":
        return NotImplemented
    narrow = x.selection.read_dtype(x.fill)
    return torch.tensor(np.count_nonzero(x.materialize(dtype=getattr(torch, narrow.name)).numpy()))


@_handles(aten.copy_.default)
def _copy(cls: type[LazyRoutedExperts], out: torch.Tensor, x: torch.Tensor, non_blocking: bool = False) -> Any:
    if isinstance(out, cls) or not isinstance(x, cls) or out.shape != x.shape or not x.holds(x.dtype):
        return NotImplemented
    return x.materialize(out=out)


def _like(func: Any) -> Handler:
    def run(cls: type[LazyRoutedExperts], x: LazyRoutedExperts, *args: Any, **kwargs: Any) -> Any:
        # Only shape, dtype and device matter: nothing is read, and nothing is allocated for the template.
        if any(isinstance(a, cls) for a in (*args, *kwargs.values())):
            return NotImplemented
        template = torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)
        return func(template, *args, **kwargs)

    return run


for _name in (
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty_strided",
):
    for _operator in _overloads(_name):
        _HANDLERS[_operator] = _like(_operator)
