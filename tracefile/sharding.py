"""Which rows and layers of a microbatch one learner rank consumes.

A shard is a list of row ranges and padding rows, times a list of layers; that covers every parallel layout.
:class:`ShardSpec` says it from the sizes and ranks of the parallel groups. It only computes: applied to lazy
tensors it gives a lazy tensor, applied to ordinary ones an ordinary one, and :meth:`ShardSpec.row_ranges`
needs no tensors at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import torch

from tracefile.errors import OptionError, RoutedExpertsShapeError
from tracefile.lazy import LazyRoutedExperts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

ContextLayout = Literal["zigzag", "contiguous"]
RowCount = Literal["tokens", "tokens-1"]
PaddingName = Literal["spread", "arange", "zeros", "minus_one"]
#: A rule for padding rows: a name, a row ``[layers, top_k]`` to repeat, or a function of the number of rows,
#: of layers and of top_k that gives ``[rows, layers, top_k]``.
PaddingRule: TypeAlias = PaddingName | torch.Tensor | Callable[[int, int, int], torch.Tensor]


class RowRange(NamedTuple):
    """Rows ``[start, stop)`` of a sample, or padding rows.

    Attributes
    ----------
    sample : int or None
        The sample's position in the microbatch; ``None`` for padding rows.
    start, stop : int
        Rows of the sample; for padding, positions within the block of padding that they belong to.
    """

    sample: int | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Where one rank stands in the parallel layout.

    Made by hand, from a device mesh, or from what a framework knows: :func:`tracefile.integrations.megatron.shard_spec`
    and :func:`tracefile.integrations.verl.shard_spec`.

    Parameters
    ----------
    cp_size, cp_rank : int
        Context parallelism (Ulysses or XTuner's sequence parallelism likewise, as ``"contiguous"``).
    cp_layout : {"zigzag", "contiguous"}
        ``"zigzag"``: each sample is padded to a multiple of ``sample_multiple`` and cut into ``2 * cp_size``
        pieces; rank r owns the r-th and the r-th from the end (Megatron's THD). ``"contiguous"``: all samples
        are concatenated and padded, and rank r owns the r-th of ``cp_size`` equal pieces (slime's
        ``allgather_cp``, Ulysses, prime-rl, XTuner).
    tp_size, tp_rank : int
        Tensor parallel ranks that split the local buffer (sequence parallelism); 1 where they do not.
    sample_multiple : int, optional
        Zigzag: what each sample is padded to a multiple of. Default ``2 * cp_size`` (slime), or 1 without context
        parallelism; verl and SkyRL use ``2 * cp_size * tp_size`` (verl 0.9: ``tp_size`` without context parallelism).
    buffer_multiple : int
        What a rank's buffer is padded to a multiple of, before tensor parallel ranks split it; a multiple of
        ``tp_size``. slime: tensor parallel size times ``data_pad_size_multiplier``. Default ``tp_size``.
    layer_ids : tuple of int, optional
        Global ids of the layers that this rank's routers need, in their order (pipeline and virtual pipeline
        stages; MoE layers of a trace that holds all). Default: all layers of the samples.
    rows : {"tokens", "tokens-1"}
        Whether samples have a row for every token, or none for the last one, which then gets a padding row.
    padding : str, tensor or callable
        ``"spread"``: ``arange(rows * layers * top_k) % num_experts``, per block of padding (slime); ``"arange"``:
        experts ``0..top_k-1`` (SkyRL); ``"zeros"`` (verl, prime-rl, ROLL); ``"minus_one"`` (miles, NeMo-RL); a row
        ``[layers, top_k]``; or a function ``(rows, layers, top_k) -> [rows, layers, top_k]``.
    batch : {"packed", "sequence_major"}
        ``"packed"``: samples one after another (THD). ``"sequence_major"``: samples are padded to the longest,
        and the shard runs through the batch for each position, ``[S, B] -> S * B`` (BSHD).

    Raises
    ------
    OptionError
        Ranks outside of their groups, or multiples that the groups do not divide.

    Examples
    --------
    >>> spec = ShardSpec(cp_size=2, cp_rank=0, tp_size=2, tp_rank=1)
    >>> spec.row_ranges([6, 5])
    [RowRange(sample=1, start=0, stop=2), RowRange(sample=None, start=1, stop=3)]
    """

    cp_size: int = 1
    cp_rank: int = 0
    cp_layout: ContextLayout = "zigzag"
    tp_size: int = 1
    tp_rank: int = 0
    sample_multiple: int | None = None
    buffer_multiple: int | None = None
    layer_ids: tuple[int, ...] | None = None
    rows: RowCount = "tokens"
    padding: PaddingRule = "spread"
    batch: Literal["packed", "sequence_major"] = "packed"

    def __post_init__(self) -> None:
        for size, rank in (("cp_size", "cp_rank"), ("tp_size", "tp_rank")):
            if not 0 <= getattr(self, rank) < getattr(self, size):
                raise OptionError(f"{rank} must lie in [0, {size}), not {getattr(self, rank)} of {getattr(self, size)}")
        for name, choices in (("cp_layout", get_args(ContextLayout)), ("rows", get_args(RowCount))):
            if getattr(self, name) not in choices:
                raise OptionError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        if self.batch not in ("packed", "sequence_major"):
            raise OptionError(f"batch must be packed or sequence_major, not {self.batch!r}")
        if isinstance(self.padding, str) and self.padding not in get_args(PaddingName):
            raise OptionError(f"padding must be one of {', '.join(get_args(PaddingName))}, not {self.padding!r}")
        for name, value, divisor in (
            ("sample_multiple", self.sample_multiple, 2 * self.cp_size if self.cp_size > 1 else 1),
            ("buffer_multiple", self.buffer_multiple, self.tp_size),
        ):
            if value is not None and (value < 1 or value % divisor):
                raise OptionError(f"{name} must be a positive multiple of {divisor}, not {value}")
        if self.layer_ids is not None:
            object.__setattr__(self, "layer_ids", tuple(self.layer_ids))

    @classmethod
    def from_device_mesh(
        cls, mesh: DeviceMesh, *, cp_dim: str | None = "cp", tp_dim: str | None = "tp", **options: Any
    ) -> ShardSpec:
        """The spec of this process's place in a device mesh.

        Parameters
        ----------
        mesh : DeviceMesh
        cp_dim, tp_dim : str or None
            Names of the mesh's dimensions for context and for sequence (tensor) parallelism; ``None`` or a name
            that the mesh lacks: not split so.
        **options
            As for :class:`ShardSpec`.
        """
        names = mesh.mesh_dim_names or ()
        for dim, size, rank in ((cp_dim, "cp_size", "cp_rank"), (tp_dim, "tp_size", "tp_rank")):
            if dim is not None and dim in names:
                options[size] = mesh.size(names.index(dim))
                options[rank] = mesh.get_local_rank(dim)
        return cls(**options)

    def row_ranges(self, num_tokens: Sequence[int]) -> list[RowRange]:
        """The rows of this rank's shard, in order.

        Parameters
        ----------
        num_tokens : sequence of int
            Tokens of each sample of the microbatch.
        """
        # A selection of numbered rows goes through the same operations as routing does.
        samples, blocks = [], [0]
        for number, tokens in enumerate(num_tokens):
            rows = tokens - (self.rows == "tokens-1")
            samples.append(torch.stack([torch.full((max(rows, 0),), number), torch.arange(max(rows, 0))], 1))

        def pad(rows: int, like: torch.Tensor) -> torch.Tensor:
            blocks[0] += 1
            return torch.stack([torch.full((rows,), -blocks[0]), torch.arange(rows)], 1)

        ranges: list[tuple[int, int, int]] = []
        for owner, row in self._shard(samples, num_tokens, pad).tolist():
            if ranges and ranges[-1][0] == owner and ranges[-1][2] == row:
                ranges[-1] = (owner, ranges[-1][1], row + 1)
            else:
                ranges.append((owner, row, row + 1))
        return [RowRange(owner if owner >= 0 else None, start, stop) for owner, start, stop in ranges]

    def apply(
        self,
        samples: Sequence[torch.Tensor],
        num_tokens: Sequence[int],
        *,
        num_experts: int | None = None,
    ) -> torch.Tensor:
        """This rank's shard of a microbatch.

        Parameters
        ----------
        samples : sequence of tensor
            ``[rows, layers, top_k]`` of each sample, lazy or not; ``rows`` as ``self.rows`` says.
        num_tokens : sequence of int
            Tokens of each sample.
        num_experts : int, optional
            For the padding rule ``"spread"``; known from lazy samples.

        Returns
        -------
        torch.Tensor
            ``[local_rows, layers, top_k]``; lazy, with nothing read, if the samples are.

        Raises
        ------
        RoutedExpertsShapeError
            A sample's rows are not as many as its tokens ask for.
        OptionError
            No samples, a layer that they do not hold, or ``num_experts`` unknown.
        """
        if not samples or len(samples) != len(num_tokens):
            raise OptionError(
                f"{len(samples)} samples and {len(num_tokens)} token counts; both must be as many, and some"
            )
        lazy = next((sample for sample in samples if isinstance(sample, LazyRoutedExperts)), None)
        if num_experts is None and lazy is not None:
            num_experts = lazy.config.num_experts
        for number, (sample, tokens) in enumerate(zip(samples, num_tokens, strict=True)):
            rows = max(tokens - (self.rows == "tokens-1"), 0)
            if sample.shape[0] != rows:
                raise RoutedExpertsShapeError(
                    f"sample {number} of the microbatch has {sample.shape[0]} rows; {tokens} tokens with"
                    f" rows={self.rows!r} make {rows}"
                )
        local = self._shard(samples, num_tokens, lambda rows, like: self._padding_rows(rows, like, num_experts))
        if self.layer_ids is None:
            return local
        held = lazy.layer_ids if lazy is not None else tuple(range(local.shape[1]))
        unknown = sorted(set(self.layer_ids) - set(held))
        if unknown:
            raise OptionError(f"layers {unknown} are not among those of the samples, {list(held)}")
        return local[:, [held.index(layer) for layer in self.layer_ids]]

    def _padding_rows(self, rows: int, like: torch.Tensor, num_experts: int | None) -> torch.Tensor:
        _, layers, top_k = like.shape
        options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        if isinstance(self.padding, torch.Tensor):
            return self.padding.to(**options).expand(rows, layers, top_k)
        if not isinstance(self.padding, str):
            return self.padding(rows, layers, top_k).to(**options)
        if self.padding == "spread":
            if num_experts is None:
                raise OptionError("padding='spread' needs num_experts where samples are ordinary tensors")
            return (torch.arange(rows * layers * top_k, **options) % num_experts).view(rows, layers, top_k)
        if self.padding == "arange":
            return torch.arange(top_k, **options).expand(rows, layers, top_k)
        return torch.full((rows, layers, top_k), 0 if self.padding == "zeros" else -1, **options)

    def _shard(
        self,
        samples: Sequence[torch.Tensor],
        num_tokens: Sequence[int],
        pad: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        def padded(rows: torch.Tensor, multiple: int, least: int = 0) -> torch.Tensor:
            missing = max(-(-rows.shape[0] // multiple) * multiple, least) - rows.shape[0]
            return torch.cat([rows, pad(missing, rows)]) if missing else rows

        parts = [
            torch.cat([sample, pad(1, sample)]) if self.rows == "tokens-1" and tokens else sample
            for sample, tokens in zip(samples, num_tokens, strict=True)
        ]
        least = 0
        if self.batch == "sequence_major":
            longest = max(part.shape[0] for part in parts)
            least = -(-longest // self._sample_multiple) * self._sample_multiple
        buffer_multiple = self.tp_size if self.buffer_multiple is None else self.buffer_multiple
        if self.cp_layout == "contiguous":
            if self.batch == "sequence_major":
                multiple = self.cp_size * buffer_multiple
                parts = [padded(part, multiple, -(-least // multiple) * multiple) for part in parts]
                return self._flat(_piece(part, self.cp_size, self.cp_rank) for part in parts)
            whole = padded(torch.cat(parts), self.cp_size * buffer_multiple)
            return _piece(_piece(whole, self.cp_size, self.cp_rank), self.tp_size, self.tp_rank)
        local = []
        for part in parts:
            part = padded(part, self._sample_multiple, least)
            if self.cp_size > 1:
                half = part.shape[0] // (2 * self.cp_size)
                first, last = half * self.cp_rank, part.shape[0] - half * (self.cp_rank + 1)
                part = torch.cat([part[first : first + half], part[last : last + half]])
            local.append(part)
        if self.batch == "sequence_major":
            return self._flat(padded(part, buffer_multiple) for part in local)
        return _piece(padded(torch.cat(local), buffer_multiple), self.tp_size, self.tp_rank)

    @property
    def _sample_multiple(self) -> int:
        return self.sample_multiple or (2 * self.cp_size if self.cp_size > 1 else 1)

    def _flat(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        """Rows of equally long samples, position by position, those of this tensor parallel rank."""
        pieces = [_piece(part, self.tp_size, self.tp_rank) for part in parts]
        rows, batch = pieces[0].shape[0], len(pieces)
        order = torch.arange(rows * batch).view(batch, rows).t().reshape(-1)
        return torch.cat(pieces)[order]


def _piece(rows: torch.Tensor, pieces: int, number: int) -> torch.Tensor:
    size = rows.shape[0] // pieces
    return rows[size * number : size * (number + 1)] if pieces > 1 else rows
