"""Metrics as sums and counts that merge over micro-batches, ranks and steps: no means of means."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean that merges exactly, with min and max if the metric is a distribution.

    Example: Mean(6.0, 3) + Mean(4.0, 1) == Mean(10.0, 4), whose value is 2.5
    """

    sum: float
    count: float
    min: float = math.inf
    max: float = -math.inf

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        """Returns the mean of plain values, each with weight one."""
        values = [float(v) for v in values]
        return cls(math.fsum(values), len(values), min(values, default=math.inf), max(values, default=-math.inf))

    @classmethod
    def weighted(cls, values: Iterable[float], weights: Iterable[float]) -> Mean:
        """Returns the weighted mean of plain values, which are as many as the weights."""
        values, weights = [float(v) for v in values], [float(w) for w in weights]
        total = math.fsum(v * w for v, w in zip(values, weights, strict=True))
        return cls(total, math.fsum(weights), min(values, default=math.inf), max(values, default=-math.inf))

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.sum + other.sum, self.count + other.count, min(self.min, other.min), max(self.max, other.max))

    @property
    def value(self) -> float:
        """The mean; NaN if nothing was counted."""
        return self.sum / self.count if self.count else math.nan


def merge(parts: Iterable[Mapping[str, Mean]]) -> dict[str, Mean]:
    """Adds metrics by name."""
    merged: dict[str, Mean] = {}
    for part in parts:
        for name, mean in part.items():
            merged[name] = merged[name] + mean if name in merged else mean
    return merged


def flatten(metrics: Mapping[str, Mean]) -> dict[str, float]:
    """Returns the scalars of metrics.jsonl: `name`, or `name/{avg,min,max}` of a distribution.

    Empty means are left out.
    """
    scalars: dict[str, float] = {}
    for name, mean in metrics.items():
        if not mean.count:
            continue
        if mean.min <= mean.max:
            scalars |= {f"{name}/avg": mean.value, f"{name}/min": mean.min, f"{name}/max": mean.max}
        else:
            scalars[name] = mean.value
    return scalars
