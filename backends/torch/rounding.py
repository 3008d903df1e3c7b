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
        self._before = self._sampled(values)

    def _sampled(self, values: Sequence[Tensor]) -> Tensor:
        """A copy, in one tensor: a model has hundreds of parameters, and each kernel is a launch."""
        return torch.cat([value.reshape(-1)[:: self._stride] for value in values])

    def rounded_away(
        self, values: Sequence[Tensor], dtype: torch.dtype, replicas: Sequence[int], reduce: Callable[[Tensor], Tensor]
    ) -> Mean:
        """Share of the elements that have changed since, but are the same in `dtype`. A collective.

        Args:
          replicas: ranks that have the same shard.
          reduce: sums a tensor over all ranks, in place.
        """
        before, now = self._before, self._sampled(values)
        moved = before != now
        lost = moved & (before.to(dtype) == now.to(dtype))
        lengths = [-(-value.numel() // self._stride) for value in values]
        copies = before.new_tensor(replicas).repeat_interleave(
            torch.tensor(lengths, device=before.device), output_size=len(before)
        )
        found = reduce(torch.stack([(which / copies).sum(dtype=torch.float64) for which in (lost, moved)]))
        lost_count, moved_count = found.tolist()
        return Mean(lost_count, moved_count)


def changes(before: Tensor, after: Tensor, published_before: Tensor, published_after: Tensor) -> Tensor:
    """Counts the elements that differ: [those published as the same value, all], float64."""
    moved = before != after
    return torch.stack([(moved & (published_before == published_after)).sum(), moved.sum()]).double()
