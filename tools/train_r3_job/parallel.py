"""How learner ranks share a step: data parallel, context parallel and sequence parallel.

Context and sequence parallel ranks split the rows of every microbatch among themselves; :class:`tracefile.ShardSpec`
says which rows are whose. Each computes only its own. Attention needs the keys and values of the others, and gathers
them with a collective that has a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from tracefile import ShardSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tracefile.sharding import ContextLayout
    from train_r3_job.shard import Rows


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the parallel groups.

    Attributes
    ----------
    dp, cp, sp : int
        Data, context and sequence parallel; their product is the number of ranks.
    cp_layout : {"zigzag", "contiguous"}
        Which rows a context parallel rank has: two pieces of each sample, one from either end, so that all ranks
        have as much to attend to; or one piece of the whole microbatch.
    """

    dp: int = 1
    cp: int = 2
    sp: int = 2
    cp_layout: ContextLayout = "zigzag"

    @property
    def ranks(self) -> int:
        return self.dp * self.cp * self.sp


class _Gather(torch.autograd.Function):
    """All ranks' rows, one rank after the other; backward, each rank gets the sum of what all say about its rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        parts = list(gradient.contiguous().chunk(dist.get_world_size(ctx.group)))
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.group)
        return own, None


class Place:
    """This process's place in a layout, and the collectives that it takes part in.

    The default process group must have been initialized, with ``layout.ranks`` ranks.
    """

    def __init__(self, layout: Layout) -> None:
        names = ("dp", "cp", "tp")
        mesh = init_device_mesh("cpu", (layout.dp, layout.cp, layout.sp), mesh_dim_names=names)
        self.layout = layout
        self.dp_rank = mesh.get_local_rank("dp")
        self.spec = ShardSpec.from_device_mesh(mesh, cp_layout=layout.cp_layout, rows="tokens-1")
        #: Who shares this rank's microbatches.
        self.group: dist.ProcessGroup = mesh["cp", "tp"]._flatten("shard").get_group()

    def specs(self) -> list[ShardSpec]:
        """Those of the ranks of :attr:`group`, in its order."""
        return [
            replace(self.spec, cp_rank=cp, tp_rank=sp) for cp in range(self.layout.cp) for sp in range(self.layout.sp)
        ]

    def gather(self, x: Tensor) -> Tensor:
        """``[rows, ...]`` of all ranks that share a microbatch, ``[ranks * rows, ...]``; differentiable."""
        gathered: Tensor = _Gather.apply(x, self.group)  # type: ignore[no-untyped-call]
        return gathered

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        dist.all_reduce(x)
        return x

    def max(self, x: Tensor) -> Tensor:
        """The maximum over all ranks, in place."""
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return x


class ShardedAttention:
    """Causal attention within samples, of this rank's rows to those of all ranks.

    Parameters
    ----------
    place : Place
    rows : sequence of Rows
        Which rows each rank of the group has; all have as many. Padding sees padding, and nothing else does.
    """

    def __init__(self, place: Place, rows: Sequence[Rows]) -> None:
        own = rows[dist.get_rank(place.group)]
        samples, positions = torch.cat([r.samples for r in rows]), torch.cat([r.positions for r in rows])
        self._gather = place.gather
        self._visible = (own.samples[:, None] == samples) & (own.positions[:, None] >= positions)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._gather(torch.stack([key, value], 1)).unbind(1)
        query, keys, values = (x.transpose(0, 1) for x in (query, keys, values))
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=self._visible).transpose(0, 1)
