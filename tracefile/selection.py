"""What a lazy tensor stands for: rows, layers, and the shape in which they are seen. Pure.

A selection's shape is its leading dimensions, which number the rows in order, followed by its form:
``[layers, top_k]``, ``[top_k]`` once a single layer was selected, or ``[layers * top_k]`` once flattened.
Each operation returns the selection that it leads to, or ``None`` where the result is none and values are
needed. Arguments are taken as valid: torch has checked them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from tracefile.runs import PaddingRun, Rows, narrowest_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracefile.format import ModelConfig

Array: TypeAlias = "np.ndarray[Any, Any]"
Form = Literal["layers", "layer", "flat"]


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Rows times layers, seen in a shape.

    Attributes
    ----------
    config : ModelConfig
    rows : Rows
    layers : tuple of int
        Positions of the selected layers among the configuration's.
    lead : tuple of int
        Leading dimensions; their product is the number of rows.
    form : {"layers", "layer", "flat"}
    """

    config: ModelConfig
    rows: Rows
    layers: tuple[int, ...]
    lead: tuple[int, ...]
    form: Form = "layers"

    @classmethod
    def whole(cls, rows: Rows, config: ModelConfig) -> Selection:
        return cls(config, rows, tuple(range(config.num_layers)), (len(rows),))

    @property
    def shape(self) -> tuple[int, ...]:
        layers, top_k = len(self.layers), self.config.top_k
        if self.form == "layers":
            return (*self.lead, layers, top_k)
        return (*self.lead, top_k if self.form == "layer" else layers * top_k)

    @property
    def array_shape(self) -> tuple[int, int, int]:
        """``[layers, rows, top_k]``: how the values are read."""
        return len(self.layers), len(self.rows), self.config.top_k

    def bounds(self, fill: str) -> tuple[int, int]:
        """Smallest and largest value that the selection can hold."""
        if self.rows.all_stored:
            return 0, self.config.num_experts - 1
        low, high = self.rows.bounds()
        if fill == "minus_one" and self.rows.missing_ranges():
            low = min(low, -1)
        return low, max(high, self.config.num_experts - 1)

    def read_dtype(self, fill: str) -> np.dtype[Any]:
        """The narrowest dtype to read into: as stored, unless padding needs more."""
        if self.rows.all_stored:
            return self.config.dtype
        return narrowest_dtype(*self.bounds(fill), self.config.dtype)

    def _is_layer_dim(self, dim: int) -> bool:
        return self.form == "layers" and dim == len(self.lead)

    def _with_rows(self, rows: Rows, lead: tuple[int, ...]) -> Selection:
        return Selection(self.config, rows, self.layers, lead, self.form)

    def _with_lead(self, lead: tuple[int, ...]) -> Selection:
        return Selection(self.config, self.rows, self.layers, lead, self.form)

    def _with_layers(self, positions: Sequence[int], form: Form) -> Selection:
        layers = tuple(self.layers[i] for i in positions)
        return Selection(self.config, self.rows.with_layers(positions), layers, self.lead, form)

    def slice(self, dim: int, start: int, stop: int, step: int) -> Selection | None:
        """``[start:stop:step]`` along ``dim``, ``0 <= start <= stop <= size``."""
        lead = self.lead
        if dim < len(lead):
            if step != 1:
                return self.take(dim, np.arange(start, stop, step))
            size = (*lead[:dim], stop - start, *lead[dim + 1 :])
            inner = math.prod(lead[dim + 1 :])
            if dim == 0:
                return self._with_rows(self.rows[start * inner : stop * inner], size)
            return self._with_rows(self.rows.block_slices(math.prod(lead[:dim]), inner, start, stop), size)
        if self._is_layer_dim(dim):
            return self._with_layers(range(start, stop, step), "layers")
        return self if (start, stop, step) == (0, self.shape[dim], 1) else None

    def select(self, dim: int, index: int) -> Selection | None:
        """Position ``index >= 0`` of ``dim``, which vanishes."""
        if dim < len(self.lead):
            sliced = self.slice(dim, index, index + 1, 1)
            return sliced and sliced._with_lead(self.lead[:dim] + self.lead[dim + 1 :])
        return self._with_layers([index], "layer") if self._is_layer_dim(dim) else None

    def take(self, dim: int, indices: Array) -> Selection | None:
        """Positions ``indices`` (of any shape, non-negative) of ``dim``, which their shape replaces."""
        if dim < len(self.lead):
            rows = self.rows
            if len(self.lead) == 1:
                wanted = indices.reshape(-1)
            else:
                grid = np.arange(len(rows)).reshape(self.lead)
                wanted = grid.take(indices.reshape(-1), axis=dim).reshape(-1)
            return self._with_rows(rows.take(wanted), self.lead[:dim] + indices.shape + self.lead[dim + 1 :])
        if self._is_layer_dim(dim) and indices.ndim == 1:
            return self._with_layers(indices.tolist(), "layers")
        return None

    def mergeable(self, other: Selection) -> bool:
        """Whether rows of both can stand in one selection."""
        return self.config == other.config and self.layers == other.layers and self.form == other.form

    def padding(self, values: Array) -> Selection:
        """A selection like this one of rows in memory; ``values`` has this form."""
        lead = values.shape[: len(self.lead)]
        rows = values.reshape(math.prod(lead), len(self.layers), self.config.top_k)
        return self._with_rows(Rows.of([PaddingRun.of(rows, self.config.dtype)]), lead)

    def constant(self, value: int, lead: tuple[int, ...]) -> Selection:
        """A selection like this one of ``lead`` rows in memory that hold ``value`` throughout."""
        shape = (math.prod(lead), len(self.layers), self.config.top_k)
        return self._with_rows(Rows.of([PaddingRun.constant(value, *shape, self.config.dtype)]), lead)

    @staticmethod
    def concat(parts: Sequence[Selection], dim: int) -> Selection | None:
        """Concatenate along ``dim``; the other dimensions agree."""
        first = parts[0]
        if dim >= len(first.lead) or not all(first.mergeable(part) for part in parts[1:]):
            return None
        lead = (*first.lead[:dim], sum(part.lead[dim] for part in parts), *first.lead[dim + 1 :])
        outer = math.prod(first.lead[:dim])
        if outer == 1:
            return first._with_rows(Rows.concat(part.rows for part in parts), lead)
        sizes = [math.prod(part.lead[dim:]) for part in parts]
        rows = Rows.concat(
            part.rows[i * size : (i + 1) * size] for i in range(outer) for part, size in zip(parts, sizes, strict=True)
        )
        return first._with_rows(rows, lead)

    @staticmethod
    def join_layers(parts: Sequence[Selection]) -> Selection | None:
        """One selection ``[rows, layers, top_k]`` of single layers ``[rows, top_k]`` of the same rows, in order."""
        first = parts[0]
        if any(p.form != "layer" or p.lead != first.lead or p.config != first.config for p in parts):
            return None
        rows = Rows.join_layers([part.rows for part in parts])
        layers = tuple(layer for part in parts for layer in part.layers)
        return None if rows is None else Selection(first.config, rows, layers, first.lead)

    def unsqueeze(self, dim: int) -> Selection | None:
        if dim > len(self.lead):
            return None
        return self._with_lead((*self.lead[:dim], 1, *self.lead[dim:]))

    def squeeze(self, dims: Sequence[int]) -> Selection | None:
        """Drop those of ``dims`` that have length 1."""
        result: Selection = self
        for dim in sorted(dims, reverse=True):
            if result.shape[dim] != 1:
                continue
            if dim < len(result.lead):
                result = result._with_lead(result.lead[:dim] + result.lead[dim + 1 :])
            elif result._is_layer_dim(dim):
                result = replace(result, form="layer")
            else:
                return None
        return result

    def view(self, shape: tuple[int, ...]) -> Selection | None:
        """The same values in another ``shape`` of as many elements, rows in the same order."""
        layers, top_k = len(self.layers), self.config.top_k
        forms: list[tuple[Form, tuple[int, ...]]] = [("layers", (layers, top_k)), ("flat", (layers * top_k,))]
        if layers == 1:
            forms = [("layer", (top_k,))]
        for form, tail in forms:
            lead = shape[: len(shape) - len(tail)]
            if shape[len(lead) :] == tail and math.prod(lead) == len(self.rows):
                return replace(self, lead=lead, form=form)
        return None

    def pad(self, pads: Sequence[tuple[int, int]], value: int) -> Selection | None:
        """Pad with ``value`` (or crop, where negative) by ``(before, after)`` per dimension, first to last."""
        result = self
        for dim, (before, after) in enumerate(pads):
            if (before, after) == (0, 0):
                continue
            if dim >= len(self.lead):
                return None
            size = result.lead[dim]
            cut = result.slice(dim, min(max(-before, 0), size), max(size + min(after, 0), 0), 1)
            if cut is None:
                return None
            parts = [cut]
            if before > 0:
                parts.insert(0, cut.constant(value, (*cut.lead[:dim], before, *cut.lead[dim + 1 :])))
            if after > 0:
                parts.append(cut.constant(value, (*cut.lead[:dim], after, *cut.lead[dim + 1 :])))
            joined = Selection.concat(parts, dim)
            if joined is None:
                return None
            result = joined
        return result

    def each(self, dim: int, make: Callable[[int], Selection | None]) -> list[Selection] | None:
        """``make(i)`` for every position of ``dim``; ``None`` if any has no selection."""
        parts = [make(i) for i in range(self.shape[dim])]
        return None if any(part is None for part in parts) else [part for part in parts if part is not None]
