"""Context parallelism: each rank of a group has an equal slice of every row, in rank order."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Context:
    """The ranks that share rows, and the index of this one.

    The default is one rank, which has whole rows.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def slice(self, length: int) -> slice:
        """Returns this rank's slice of a row of `length` tokens, a multiple of `size`."""
        share = length // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """Concatenates the parts of all ranks along `dim`.

        The gradient of a part is summed over ranks.
        """
        return part if self.size == 1 else _Gather.apply(part, dim, self)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, context: Context) -> Tensor:
        ctx.dim, ctx.context = dim, context
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(context.size)]
        dist.all_gather(parts, part.contiguous(), group=context.group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        parts = [part.contiguous() for part in grads[0].chunk(ctx.context.size, ctx.dim)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.context.group)
        return own, None, None
