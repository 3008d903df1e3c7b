"""Share of an update that the dtype of the published weights rounds away."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rljax.metrics.mean import Mean

SAMPLE = 1 << 20  # elements of a rank that are looked at


class Shards:
    """Elements of this rank's shards from before an update: all of them, or evenly spaced ones.

    Example:
        before = Shards(values)
        step()
        share = before.rounded_away(values, torch.bfloat16, replicas, reduce)
    """

    def __init__(self, values: Sequence[Tensor], limit: int = SAMPLE) -> None:
        self._stride = -(-sum(value.numel() for value in values) // limit) | 1  # odd: not the same columns of every row
        self._before = [self._sampled(value).clone() for value in values]

    def _sampled(self, value: Tensor) -> Tensor:
        return value.reshape(-1)[:: self._stride]

    def rounded_away(
        self, values: Sequence[Tensor], dtype: torch.dtype, replicas: Sequence[int], reduce: Callable[[Tensor], Tensor]
    ) -> Mean:
        """Share of the elements that have changed since, but are the same in `dtype`. A collective.

        Args:
          replicas: ranks that have the same shard.
          reduce: sums a tensor over all ranks, in place.
        """
        counts = torch.zeros(2, dtype=torch.float64, device=values[0].device)
        for before, value, copies in zip(self._before, values, replicas, strict=True):
            now = self._sampled(value)
            counts += changes(before, now, before.to(dtype), now.to(dtype)) / copies
        lost, moved = reduce(counts).tolist()
        return Mean(lost, moved)


def changes(before: Tensor, after: Tensor, published_before: Tensor, published_after: Tensor) -> Tensor:
    """Counts the elements that differ: [those published as the same value, all], float64."""
    moved = before != after
    return torch.stack([(moved & (published_before == published_after)).sum(), moved.sum()]).double()
