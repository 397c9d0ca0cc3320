""":class:`MicrobatchLoader`: the routing of the next microbatches, read while this one is computed.

The loader knows the order in which a rank will use its microbatches, so it reads ahead in a thread of its own,
within a byte budget, and when it needs room drops what will be needed last. What it hands out are lazy tensors
like any others, which find their values held when they are asked for them; so it fits where those do.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import torch

from tracefile.ahead import Loaded, LoaderStats, ReadAhead
from tracefile.errors import ClosedError, LoaderBudgetError, OptionError, RoutedExpertsShapeError
from tracefile.lazy import LazyRoutedExperts
from tracefile.materialize import read_layers, widened
from tracefile.moved import where_they_are
from tracefile.schedule import Stage, Step, Unit, UnitOrder, check_stage, layer_groups, one_forward_one_backward
from tracefile.segments import segment_pool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from tracefile.format import ModelConfig
    from tracefile.runs import Rows
    from tracefile.selection import Selection

DEFAULT_BUDGET_BYTES = 64 * 1024 * 1024


class MicrobatchLoader(Sequence["Microbatch"]):
    """Hands a rank the routing of its microbatches layer by layer, and reads the next ones meanwhile.

    It holds values as narrow as they are stored, on ``device``: on a CUDA device they arrive through page-locked
    memory and are widened there. Whatever is asked for can be asked for again: for the log-probability pass, the
    training pass, and once more when activations are recomputed.

    Parameters
    ----------
    microbatches : sequence
        For each microbatch this rank's shard ``[local_rows, layers, top_k]``, lazy, as
        :meth:`ShardSpec.apply <tracefile.sharding.ShardSpec.apply>` makes it; or a sequence of its layers,
        each lazy ``[local_rows, top_k]``.
    device : torch.device or str
        Where values are held and handed out.
    dtype : torch.dtype
        Of what is handed out; int64 is what ``gather`` takes.
    prefetch : int
        Steps (forwards or backwards of a microbatch) to read ahead of the one in progress. 0: no thread; values
        are read when they are asked for.
    budget_bytes : int
        The most bytes to hold. The chunk cache has a budget of its own (``cache_bytes``).
    warmup : int
        In a training pass, forwards before the first backward; see
        :func:`~tracefile.schedule.one_forward_one_backward`.
    schedule : sequence of Step, optional
        The steps of a training pass, where they are not of that form (interleaved pipelines). A rank that deviates
        from the schedule gets the right values all the same, only later.

    Raises
    ------
    LoaderBudgetError
        One layer of a microbatch exceeds the budget.

    Examples
    --------
    >>> import numpy as np, tempfile, torch, tracefile
    >>> path = tempfile.mkdtemp() + "/step_1.trace"
    >>> with tracefile.TraceWriter(path, num_layers=3, top_k=2, num_experts=64) as writer:
    ...     samples = [writer.append(str(i), np.full((5, 3, 2), [i, i + 1])) for i in range(4)]
    >>> spec = tracefile.ShardSpec(cp_size=2, cp_rank=0)
    >>> shards = [spec.apply([sample], [5]) for sample in samples]
    >>> with tracefile.MicrobatchLoader(shards) as loader:
    ...     for microbatch in loader:
    ...         forward = [microbatch.layer(i) for i in range(3)]
    ...         backward = [microbatch.layer(i, "backward") for i in reversed(range(3))]
    >>> forward[0][:2]
    tensor([[3, 4],
            [3, 4]])
    """

    def __init__(
        self,
        microbatches: Sequence[LazyRoutedExperts | Sequence[LazyRoutedExperts]],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.int64,
        prefetch: int = 2,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
        warmup: int = 0,
        schedule: Sequence[Step] | None = None,
    ) -> None:
        for name, value in (("prefetch", prefetch), ("budget_bytes", budget_bytes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise OptionError(f"{name} must be an integer of at least 0, not {value!r}")
        self.device = torch.device(device)
        self.dtype = dtype
        self._options = {
            "device": device,
            "dtype": dtype,
            "prefetch": prefetch,
            "budget_bytes": budget_bytes,
            "warmup": warmup,
            "schedule": schedule,
        }
        self._shards = [_shard(item, number) for number, item in enumerate(microbatches)]
        self._training = schedule if schedule is not None else one_forward_one_backward(len(self._shards), warmup)
        self._layers_per_chunk = self._find_layers_per_chunk()
        self._groups = [self._group_layers(number, budget_bytes, prefetch) for number in range(len(self._shards))]
        self._order = self._order_of(self._training)
        self._stream: torch.cuda.Stream | None = None
        shards, groups = self._shards, self._groups

        def nbytes(unit: Unit) -> int:
            start, stop = groups[unit[0]][unit[1]]
            return _layer_bytes(shards[unit[0]]) * (stop - start)

        # Bound to a weak reference: the thread must not keep a loader alive that nobody else does.
        itself = weakref.ref(self)

        def read(unit: Unit) -> Loaded:
            loader = itself()
            if loader is None:
                raise ClosedError("the loader is gone")
            return loader._read(unit)

        self._ahead = ReadAhead(read, nbytes, budget_bytes, prefetch, self._order)
        weakref.finalize(self, self._ahead.stop, wait=False)

    def _group_layers(self, number: int, budget: int, prefetch: int) -> list[tuple[int, int]]:
        shard = self._shards[number]
        layer_bytes = _layer_bytes(shard)
        if layer_bytes > budget:
            raise LoaderBudgetError(
                f"one layer of microbatch {number} takes {layer_bytes:,} bytes ({len(shard.selection.rows):,} rows),"
                f" over the loader's budget of {budget:,}: raise budget_bytes, or make the microbatch smaller",
                wanted=layer_bytes,
                budget=budget,
                microbatch=number,
            )
        most = budget // 2 if prefetch else budget  # room for the one in use and the next
        return layer_groups(shard.selection.layers, self._layers_per_chunk, layer_bytes, most)

    def _find_layers_per_chunk(self) -> int:
        """Of the first segment; others may differ, which costs time only."""
        for shard in self._shards:
            if shard.selection.rows.segments():
                return where_they_are(shard.selection.rows, shard.config, partial(_layers_of_first_chunk, shard.config))
        return 1

    def _order_of(self, steps: Sequence[Step]) -> UnitOrder:
        return UnitOrder(steps, [len(groups) for groups in self._groups])

    def begin_pass(self, release_stage: str = "backward") -> None:
        """Start a pass over the microbatches, and reading ahead for it.

        Without it, the first one is a training pass.

        Parameters
        ----------
        release_stage : {"forward", "backward"}
            After which stage a microbatch is done: "forward" in a pass without gradients (log-probabilities),
            where each is used once; "backward" in a training pass.
        """
        steps = self._training
        if check_stage(release_stage) == "forward":
            steps = [Step("forward", number) for number in range(len(self._shards))]
        self._order = self._order_of(steps)
        self._ahead.begin(self._order)

    def close(self) -> None:
        """Stop reading ahead and drop what is held. Lazy tensors that came from the loader then read themselves."""
        self._ahead.stop()

    def __enter__(self) -> MicrobatchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def stats(self) -> LoaderStats:
        """What the loader holds, and how long it was waited for."""
        return self._ahead.stats()

    def __len__(self) -> int:
        return len(self._shards)

    @overload
    def __getitem__(self, number: int) -> Microbatch: ...
    @overload
    def __getitem__(self, number: slice) -> list[Microbatch]: ...
    def __getitem__(self, number: int | slice) -> Microbatch | list[Microbatch]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        position = number + len(self) if number < 0 else number
        if not 0 <= position < len(self):
            raise IndexError(f"microbatch {number} of {len(self)}")
        return Microbatch(self, position, self._shards[position])

    def __iter__(self) -> Iterator[Microbatch]:
        """The microbatches in order; each is done when the next is taken, up to its later steps in the schedule."""
        for number in range(len(self)):
            first = self._order.find((number, 0), "forward", 0)
            if first is not None:
                self._ahead.finish(first)
            yield self[number]
        self._ahead.finish(len(self._order))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._shards, self._options)

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"<MicrobatchLoader of {len(self)} microbatches, {stats.active_bytes:,} bytes of"
            f" {self._options['budget_bytes']:,} held{', closed' if self._ahead.stopped else ''}>"
        )

    def _unit(self, number: int, layer: int) -> tuple[Unit, int]:
        """The unit that holds a layer, and the layer's position in it."""
        for group, (start, stop) in enumerate(self._groups[number]):
            if start <= layer < stop:
                return (number, group), layer - start
        raise IndexError(f"layer {layer} of microbatch {number}")

    def _read(self, unit: Unit) -> Loaded:
        start, stop = self._groups[unit[0]][unit[1]]
        shard = self._shards[unit[0]]
        selection = shard.selection.slice(1, start, stop, 1)
        assert selection is not None
        chunks_of = [layer // self._layers_per_chunk for layer in shard.selection.layers]
        # Another unit takes layers of the same chunks only where the budget split them.
        shared = chunks_of[start] in chunks_of[:start] or chunks_of[stop - 1] in chunks_of[stop:]
        if self.device.type != "cuda":
            return Loaded(*read_layers(selection, shard.fill, self.device, keep=shared))
        with torch.cuda.device(self.device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                values, chunks = read_layers(selection, shard.fill, self.device, keep=shared)
                ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
                ready.record()
        return Loaded(values, chunks, ready)

    def _narrow(self, number: int, layer: int, stage: Stage | None) -> torch.Tensor:
        """``[rows, top_k]`` as it is held."""
        unit, position = self._unit(number, layer)
        loaded = self._ahead.get(unit, stage)
        if loaded.ready is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(loaded.ready)
            loaded.values.record_stream(current)  # what drops it must not give its memory away before it was used
        return loaded.values[position]

    def _held(self, number: int, layer: int, stage: Stage | None) -> torch.Tensor | None:
        try:
            return self._narrow(number, layer, stage)
        except ClosedError:
            return None


def _rebuild(shards: list[LazyRoutedExperts], options: dict[str, Any]) -> MicrobatchLoader:
    return MicrobatchLoader(shards, **options)


class Microbatch(Sequence[LazyRoutedExperts]):
    """One microbatch of a :class:`MicrobatchLoader`: a sequence of its layers, lazy ``[local_rows, top_k]`` each.

    Attributes
    ----------
    number : int
        Its position in the loader.
    layer_ids : tuple of int
        Global ids of its layers, in order.
    """

    def __init__(self, loader: MicrobatchLoader, number: int, shard: LazyRoutedExperts) -> None:
        self._loader = loader
        self._shard = shard
        self.number = number
        self.layer_ids = shard.layer_ids

    def __len__(self) -> int:
        return len(self.layer_ids)

    @overload
    def __getitem__(self, layer: int) -> LazyRoutedExperts: ...
    @overload
    def __getitem__(self, layer: slice) -> list[LazyRoutedExperts]: ...
    def __getitem__(self, layer: int | slice) -> LazyRoutedExperts | list[LazyRoutedExperts]:
        if isinstance(layer, slice):
            return [self[i] for i in range(*layer.indices(len(self)))]
        position = self._position(layer)
        loader, number = self._loader, self.number
        lazy = self._shard[:, position]
        assert isinstance(lazy, LazyRoutedExperts)
        lazy.ahead = lambda stage: loader._held(number, position, stage)
        return lazy

    def layer(self, layer: int, stage: str = "forward") -> torch.Tensor:
        """The values of one layer.

        Parameters
        ----------
        layer : int
            Its position among :attr:`layer_ids`.
        stage : {"forward", "backward"}
            For which stage: the loader reads ahead accordingly.

        Returns
        -------
        torch.Tensor
            ``[local_rows, top_k]`` of the loader's dtype on its device, the caller's own.

        Raises
        ------
        MissingRowsError, DamagedTraceError
            As for :meth:`LazyRoutedExperts.materialize`, also where it was read ahead.
        ClosedError
        """
        loader = self._loader
        values = loader._narrow(self.number, self._position(layer), check_stage(stage))
        return widened(self._shard.selection, values, loader.device, loader.dtype)

    def release(self) -> None:
        """Drop what the loader holds of this microbatch; asking again reads again."""
        self._loader._ahead.release((self.number, group) for group in range(len(self._loader._groups[self.number])))

    def _position(self, layer: int) -> int:
        position = layer + len(self) if layer < 0 else layer
        if not 0 <= position < len(self):
            raise IndexError(f"layer {layer} of {len(self)}")
        return position

    def __repr__(self) -> str:
        return f"<Microbatch {self.number}: {self._shard!r}>"


def _layers_of_first_chunk(config: ModelConfig, rows: Rows) -> int:
    segment = rows.segments()[0]
    return segment_pool.get(segment.trace, config, segment.id).header.geometry.layers_per_chunk


def _layer_bytes(shard: LazyRoutedExperts) -> int:
    selection: Selection = shard.selection
    return len(selection.rows) * selection.config.top_k * selection.read_dtype(shard.fill).itemsize


def _shard(item: LazyRoutedExperts | Sequence[LazyRoutedExperts], number: int) -> LazyRoutedExperts:
    if not isinstance(item, LazyRoutedExperts):
        layers = list(item)
        if not layers or not all(isinstance(layer, LazyRoutedExperts) for layer in layers):
            raise OptionError(
                f"microbatch {number} is {type(item).__name__}, not lazy routed experts nor a sequence of its layers"
            )
        joined = layers[0].selection.join_layers([layer.selection for layer in layers])
        if joined is None or len({layer.fill for layer in layers}) > 1:
            raise RoutedExpertsShapeError(f"the layers of microbatch {number} are not of the same rows")
        return layers[0].with_selection(joined)
    selection = item.selection
    if selection.form != "layers" or len(selection.lead) != 1:
        raise RoutedExpertsShapeError(
            f"microbatch {number} has shape {list(item.shape)}, not [local_rows, layers, top_k]"
        )
    return item
