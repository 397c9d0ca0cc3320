""":class:`LazyRoutedExperts`: a torch Tensor that reads its values when they are needed, and only those.

Frameworks pad, concatenate, slice, pickle and move routed experts through code that expects tensors. A lazy
tensor goes through all of that as a description (a :class:`~tracefile.selection.Selection`) and becomes values
at the first operation that needs them: exactly the rows and layers that are then left.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
import torch

from tracefile.dispatch import dispatch
from tracefile.errors import (
    LazyTensorError,
    OptionError,
)
from tracefile.fill import check_fill
from tracefile.format import ModelConfig
from tracefile.functions import shortcut
from tracefile.materialize import holds, materialize, materialize_into, widened
from tracefile.runs import Rows, decode_rows, encode_rows
from tracefile.schedule import check_stage
from tracefile.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tracefile.schedule import Stage

Array: TypeAlias = "np.ndarray[Any, Any]"


class LazyRoutedExperts(torch.Tensor):
    """Routed experts ``[tokens, layers, top_k]`` that are read when an operation needs values.

    Lazy are: slicing, selecting, splitting and indexing rows and layers; ``cat``, ``stack`` and ``pad`` on rows,
    also with ordinary tensors; reshapes that keep ``[layers, top_k]`` or merge it; ``to``, ``contiguous``,
    ``clone``, ``detach``, ``pin_memory``; ``np.concatenate``; pickling and copying. Everything else reads
    exactly the tensors that it was given and returns a plain tensor. Writing into it is refused.

    ``dtype`` and ``device`` say what values will have; on disk they are uint8 or uint16, and they travel to a
    device in that width and are widened there. Obtained from :class:`~tracefile.TraceWriter` and
    :func:`~tracefile.open`, not constructed.

    Examples
    --------
    >>> import numpy as np, tempfile, torch, tracefile
    >>> path = tempfile.mkdtemp() + "/step_1.trace"
    >>> with tracefile.TraceWriter(path, num_layers=3, top_k=2, num_experts=64) as writer:
    ...     experts = writer.append("a", np.arange(30).reshape(5, 3, 2))
    >>> padding = torch.zeros(3, 3, 2, dtype=experts.dtype)
    >>> local = torch.cat([experts, padding])[4:6, 1]
    >>> local
    <LazyRoutedExperts 2 x 2 int32 (uint8 on disk), 1 row of 1 segment, 1 padding row, nothing read>
    >>> local + 0
    tensor([[26, 27],
            [ 0,  0]], dtype=torch.int32)
    """

    selection: Selection
    pinned: bool
    fill: str
    #: Gives the values for a stage if a loader holds them, else ``None``.
    ahead: Callable[[Stage | None], torch.Tensor | None] | None
    _dtype: torch.dtype
    _device: torch.device

    @staticmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> LazyRoutedExperts:
        raise LazyTensorError("lazy routed experts come from TraceWriter.append or tracefile.open(path)[sample_id]")

    @classmethod
    def _wrap(
        cls, selection: Selection, dtype: torch.dtype, device: torch.device, pinned: bool, fill: str
    ) -> LazyRoutedExperts:
        lazy = torch.Tensor._make_wrapper_subclass(cls, selection.shape, dtype=dtype, device=device)
        lazy.selection = selection
        lazy._dtype, lazy._device = dtype, device
        lazy.pinned = pinned
        lazy.fill = fill
        lazy.ahead = None
        return lazy

    @classmethod
    def from_rows(cls, rows: Rows, config: ModelConfig, *, fill: str = "error") -> LazyRoutedExperts:
        """All layers of a selection of rows, as int32 on the CPU."""
        return cls._wrap(Selection.whole(rows, config), torch.int32, torch.device("cpu"), False, fill)

    def with_selection(
        self,
        selection: Selection,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        pinned: bool | None = None,
        fill: str | None = None,
    ) -> LazyRoutedExperts:
        """The tensor of another selection, otherwise like this one."""
        lazy = self._wrap(
            selection,
            self._dtype if dtype is None else dtype,
            self._device if device is None else device,
            self.pinned if pinned is None else pinned,
            self.fill if fill is None else fill,
        )
        if selection is self.selection and lazy.fill == self.fill:
            lazy.ahead = self.ahead
        return lazy

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = shortcut(LazyRoutedExperts, func, args, kwargs)
        if result is not NotImplemented:
            return result
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if isinstance(result, LazyRoutedExperts):
                return _unlinked(result)
            kind = type(result)
            return kind(map(_unlinked, result)) if kind is tuple or kind is list else result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(LazyRoutedExperts, func, args, kwargs or {})

    # Torch would answer these through __torch_function__, which takes ten times as long.
    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size(self.selection.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    def dim(self) -> int:
        return len(self.selection.shape)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.selection.shape)

    def __len__(self) -> int:
        shape = self.selection.shape
        if not shape:
            raise TypeError("len() of a 0-d tensor")
        return shape[0]

    @property
    def config(self) -> ModelConfig:
        """The model configuration of the trace."""
        return self.selection.config

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Global ids of the layers that are selected."""
        return tuple(self.config.layer_ids[layer] for layer in self.selection.layers)

    @property
    def valid(self) -> torch.Tensor:
        """Bool per row: false where the routing was never captured. Reads nothing."""
        return torch.from_numpy(self.selection.rows.valid()).view(self.selection.lead)

    def filled(self, fill: str) -> LazyRoutedExperts:
        """The same tensor with missing rows rendered by ``fill``.

        Parameters
        ----------
        fill : {"error", "spread", "arange", "zeros", "minus_one"}
            Refuse; experts dealt out evenly; experts ``0..top_k-1``; expert 0; -1.
        """
        return self.with_selection(self.selection, fill=check_fill(fill))

    def holds(self, dtype: torch.dtype) -> bool:
        """Whether ``dtype`` is an integer dtype that holds every value this tensor can have."""
        return holds(self.selection, self.fill, dtype)

    def materialize(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        out: torch.Tensor | None = None,
        pin_memory: bool | None = None,
        contiguous: bool = False,
    ) -> torch.Tensor:
        """Read the values.

        Parameters
        ----------
        device, dtype : optional
            Of the result; default those of this tensor. Values travel in the stored width and are widened there.
        out : torch.Tensor, optional
            Where to put them, of this tensor's shape, any dtype and device.
        pin_memory : bool, optional
            Read into page-locked memory, where there is a CUDA device to lock it for.
        contiguous : bool
            By default the result lies in memory layer by layer (``result[:, layer]`` is contiguous), as it is
            stored. True: row by row, like an ordinary tensor; costs one more copy.

        Returns
        -------
        torch.Tensor
            Plain, of this tensor's shape.

        Raises
        ------
        MissingRowsError
            Rows that were never captured are among them, and ``fill`` is "error".
        MaterializeLimitError
            More bytes than ``materialize_limit`` allows.
        DamagedTraceError
            A segment is missing or damaged.
        """
        if out is not None:
            return materialize_into(self.selection, self.fill, out)
        return self._ids(device, dtype, pin_memory, contiguous)

    def _ids(
        self,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        pin_memory: bool | None = None,
        contiguous: bool = False,
        stage: Stage | None = None,
    ) -> torch.Tensor:
        device = self._device if device is None else torch.device(device)
        dtype = self._dtype if dtype is None else dtype
        held = None if self.ahead is None or pin_memory else self.ahead(stage)
        if held is not None:
            return widened(self.selection, held, device, dtype)
        pinned = self.pinned if pin_memory is None else pin_memory
        return materialize(self.selection, self.fill, device, dtype, pinned=pinned, contiguous=contiguous)

    def materialize_for_routing_replay(self, stage: str) -> torch.Tensor:
        """slime's hook: its ``RoutingReplay`` keeps an object that has this, and calls it when a router pops it.

        Parameters
        ----------
        stage : {"forward", "backward"}
            Which pass pops it. The values are the same; a loader looks ahead accordingly.

        Returns
        -------
        torch.Tensor
            int32 ``[local_rows, top_k]`` on the current device, as slime's routers take it.
        """
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        return self._ids(device, torch.int32, stage=check_stage(stage))

    def numpy(self, *, force: bool = False) -> Array:
        """The values as a numpy array, row by row."""
        if self._device.type != "cpu" and not force:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")
        return self.materialize(device="cpu", contiguous=True).numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("lazy routed experts hold no array that could be shared; reading makes one")
        values = self.numpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    def __array_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """``np.concatenate`` stays lazy; other numpy functions get values."""
        if func is np.concatenate and set(kwargs) <= {"axis"} and len(args) <= 2:
            parts = [torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in args[0]]
            axis = kwargs.get("axis", args[1] if len(args) == 2 else 0)
            if isinstance(axis, int) and all(isinstance(part, torch.Tensor) for part in parts):
                return torch.cat(parts, axis)
        args, kwargs = torch.utils._pytree.tree_map_only(LazyRoutedExperts, np.asarray, (args, kwargs))
        return func(*args, **kwargs)

    def tolist(self) -> Any:
        """The values as nested lists."""
        return self.numpy(force=True).tolist()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickled as a reference: which rows of which trace, and the padding; a few hundred bytes."""
        selection, config = self.selection, self.config
        everything = tuple(range(config.num_layers))
        return rebuild_lazy, (
            1,
            (config.num_layers, config.top_k, config.num_experts),
            None if config.layer_ids == everything else config.layer_ids,
            encode_rows(selection.rows),
            None if selection.layers == everything else selection.layers,
            selection.lead,
            selection.form,
            str(self._dtype).removeprefix("torch."),
            str(self._device),
            self.pinned,
            self.fill,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyRoutedExperts:
        return self.with_selection(self.selection)

    def share_memory_(self) -> LazyRoutedExperts:
        """Nothing to do: other processes get a reference."""
        return self

    def is_shared(self) -> bool:
        return True

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.materialize(contiguous=True).__dlpack__(**kwargs)

    def _no_storage(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise LazyTensorError("lazy routed experts have no storage in memory; call experts.materialize() first")

    data_ptr = untyped_storage = storage = _typed_storage = resize_ = set_ = _no_storage

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        rows = self.selection.rows
        padding = sum(len(run) for run in rows.runs if hasattr(run, "core"))
        missing = sum(stop - start for start, stop in rows.missing_ranges())
        parts = [
            f"{' x '.join(map(str, self.selection.shape))} {str(self._dtype).removeprefix('torch.')}"
            f" ({self.config.dtype} on disk)",
            f"{_count(len(rows) - padding - missing, 'row')} of {_count(len(rows.segments()), 'segment')}",
        ]
        if padding:
            parts.append(_count(padding, "padding row"))
        if missing:
            parts.append(f"{_count(missing, 'missing row')} (fill {self.fill})")
        if self._device.type != "cpu":
            parts.append(f"for {self._device}")
        return f"<LazyRoutedExperts {', '.join(parts)}, nothing read>"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _unlinked(value: Any) -> Any:
    """A lazy tensor without autograd's link to the tensor that it was sliced from, whose padding that would pin."""
    if isinstance(value, LazyRoutedExperts) and value._is_view():
        return value.with_selection(value.selection)
    return value


def rebuild_lazy(
    version: int,
    model: tuple[int, int, int],
    layer_ids: tuple[int, ...] | None,
    rows: tuple[Any, ...],
    layers: tuple[int, ...] | None,
    lead: tuple[int, ...],
    form: Any,
    dtype: str,
    device: str,
    pinned: bool,
    fill: str,
) -> LazyRoutedExperts:
    """Make the lazy tensor that was pickled. Opens nothing."""
    if version != 1:
        raise OptionError(f"this handle was pickled by a newer tracefile (form {version}); upgrade tracefile")
    config = _config(*model, tuple(layer_ids or ()))
    selected = tuple(range(config.num_layers)) if layers is None else tuple(layers)
    selection = Selection(config, decode_rows(rows), selected, tuple(lead), form)
    return LazyRoutedExperts._wrap(selection, getattr(torch, dtype), torch.device(device), pinned, fill)


@functools.lru_cache(maxsize=64)
def _config(num_layers: int, top_k: int, num_experts: int, layer_ids: tuple[int, ...]) -> ModelConfig:
    return ModelConfig(num_layers, top_k, num_experts, layer_ids)


# torch.load(weights_only=True), its default, refuses functions that it does not know.
torch.serialization.add_safe_globals([rebuild_lazy])
