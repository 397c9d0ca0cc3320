"""The operations that frameworks do most, answered before torch's dispatcher: a third of the time, or less.

A handler gets the function's arguments and returns its result, or ``NotImplemented`` where this call is not of the
common kind; then torch takes its course, and :mod:`tracefile.dispatch` answers operator by operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tracefile.dispatch import cat, constant_pad

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tracefile.lazy import LazyRoutedExperts


def shortcut(cls: type[LazyRoutedExperts], func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
    """The result of ``func``, or ``NotImplemented``."""
    handler = _HANDLERS.get(func)
    if handler is None or torch._C._len_torch_dispatch_stack():
        return NotImplemented  # a dispatch mode wants to see the operators
    try:
        return handler(cls, *args, **(kwargs or {}))
    except TypeError:
        return NotImplemented  # arguments that torch is to word the error for


def _getitem(cls: type[LazyRoutedExperts], x: LazyRoutedExperts, index: Any) -> Any:
    """Slices without a step, and integers."""
    if not isinstance(x, cls):
        return NotImplemented  # the index is lazy
    selection = x.selection
    dim = 0
    for item in index if type(index) is tuple else (index,):
        shape = selection.shape
        if dim >= len(shape):
            return NotImplemented
        if type(item) is slice and item.step is None:
            first, last, _ = item.indices(shape[dim])
            cut = selection.slice(dim, first, max(first, last), 1)
            dim += 1
        elif type(item) is int and -shape[dim] <= item < shape[dim]:
            cut = selection.select(dim, item % shape[dim])
        else:
            return NotImplemented
        if cut is None:
            return NotImplemented
        selection = cut
    return x.with_selection(selection)


def _cat(
    cls: type[LazyRoutedExperts], tensors: Sequence[torch.Tensor], dim: int = 0, *, axis: int | None = None
) -> Any:
    if type(tensors) is not list and type(tensors) is not tuple:
        return NotImplemented
    return cat(cls, tensors, dim if axis is None else axis)


def _pad(
    cls: type[LazyRoutedExperts],
    x: LazyRoutedExperts,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Any:
    if mode != "constant" or not isinstance(x, cls):
        return NotImplemented
    return constant_pad(cls, x, pad, value or 0)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.__getitem__: _getitem,
    torch.cat: _cat,
    torch.concat: _cat,
    torch.concatenate: _cat,
    torch.nn.functional.pad: _pad,
}
