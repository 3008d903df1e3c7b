"""Series of one metric over steps, and statistics that single noisy steps don't move."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

BLOCKS = 24  # points that a trend is computed on: means over blocks of steps


class Trend(NamedTuple):
    """Monotone trend of a series."""

    slope: float  # Theil-Sen, units per step; Sen 1968
    change: float  # slope times the number of steps
    p_value: float  # Mann-Kendall, two-sided; Mann 1945

    def rises(self, significance: float) -> bool:
        return self.slope > 0 and self.p_value < significance

    def falls(self, significance: float) -> bool:
        return self.slope < 0 and self.p_value < significance


@dataclasses.dataclass(frozen=True)
class Series:
    """Finite values of one metric and their steps.

    Example: Series("rollout/reward/avg", np.array([1, 2]), np.array([0.2, 0.3]))
    """

    name: str
    steps: np.ndarray  # [n] int64, strictly increasing
    values: np.ndarray  # [n] float64

    def __len__(self) -> int:
        return len(self.values)

    def __bool__(self) -> bool:
        return len(self.values) > 0

    def where(self, keep: np.ndarray) -> Series:
        """Returns the points at which `keep`, [n] bool, is true."""
        return Series(self.name, self.steps[keep], self.values[keep])

    def head(self, n: int) -> Series:
        """Returns the first n points."""
        return Series(self.name, self.steps[:n], self.values[:n])

    def after(self, n: int) -> Series:
        """Returns the points after the first n."""
        return Series(self.name, self.steps[n:], self.values[n:])

    def tail(self, n: int) -> Series:
        """Returns the last n points."""
        return Series(self.name, self.steps[-n:], self.values[-n:])

    def since(self, step: int) -> Series:
        """Returns the points from a step on."""
        return self.where(self.steps >= step)

    def until(self, step: int) -> Series:
        """Returns the points up to a step."""
        return self.where(self.steps <= step)

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> Series:
        """Returns the series of function(values)."""
        return Series(self.name, self.steps, function(self.values))

    @property
    def median(self) -> float:
        return float(np.median(self.values)) if self else float("nan")

    @property
    def mean(self) -> float:
        return float(self.values.mean()) if self else float("nan")

    @property
    def last(self) -> float:
        return float(self.values[-1]) if self else float("nan")

    @property
    def spread(self) -> float:
        """Standard deviation, from the median absolute deviation."""
        return 1.4826 * float(np.median(np.abs(self.values - self.median))) if self else float("nan")

    def quantile(self, q: float) -> float:
        return float(np.quantile(self.values, q)) if self else float("nan")


def sustained(series: Series, beyond: np.ndarray, *, window: int, share: float = 0.8) -> int | None:
    """Returns the step from which a condition holds for `window` points; None if it never does.

    It may fail at a share of 1 - `share` of them, but not at the first. A shorter series is one
    window.

    Args:
      beyond: the condition at each point of the series.
    """
    size = min(window, len(series))
    if not size:
        return None
    counts = sliding_window_view(beyond.astype(np.int64), size).sum(axis=1)
    found = np.flatnonzero((counts >= share * size) & beyond[: len(counts)])
    return int(series.steps[found[0]]) if found.size else None


def rolling_median(series: Series, window: int) -> Series:
    """Returns medians over the last `window` points, from the first full window on."""
    if len(series) < window:
        return series.head(0)
    medians = np.median(sliding_window_view(series.values, window), axis=1)
    return Series(series.name, series.steps[window - 1 :], medians)


def noise(series: Series, window: int) -> float:
    """Returns the standard deviation of a series about its rolling median; NaN if it is shorter."""
    middle = rolling_median(series, window)
    if not middle:
        return float("nan")
    before = (window - 1) // 2
    around = series.values[before : before + len(middle)]
    return Series(series.name, middle.steps, around - middle.values).spread


def block_means(series: Series, blocks: int = BLOCKS) -> Series:
    """Returns the series averaged over at most `blocks` blocks of equal size."""
    count = min(blocks, len(series))
    if count == len(series):
        return series
    edges = np.linspace(0, len(series), count + 1).astype(np.int64)
    sizes = np.diff(edges)
    means = np.add.reduceat(series.values, edges[:-1]) / sizes
    return Series(series.name, series.steps[edges[1:] - 1], means)


def trend(series: Series) -> Trend:
    """Returns the trend of a series: Theil-Sen slope and Mann-Kendall p-value of its block means.

    Blocks make neighboring points nearly independent, which the p-value presumes. It is that of the
    normal approximation with continuity and ties corrected. Fewer than four points have no trend.
    """
    means = block_means(series)
    n = len(means)
    if n < 4 or np.ptp(means.values) == 0:
        return Trend(0.0, 0.0, 1.0)
    earlier, later = _pairs(n)
    rise = means.values[later] - means.values[earlier]
    slope = float(np.median(rise / (means.steps[later] - means.steps[earlier])))
    score = float(np.sign(rise).sum())
    _, ties = np.unique(means.values, return_counts=True)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    distance = max(abs(score) - 1, 0) / math.sqrt(variance)
    return Trend(slope, slope * float(series.steps[-1] - series.steps[0]), math.erfc(distance / math.sqrt(2)))


@functools.cache
def _pairs(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of all pairs of n points, the earlier and the later one."""
    earlier, later = np.triu_indices(n, 1)
    return earlier, later


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Returns Pearson's correlation; NaN if either is constant or there are fewer than 3 points."""
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    x, y = (_deviations(values) for values in (x, y))
    return float(x @ y / math.sqrt((x @ x) * (y @ y)))


def _deviations(values: np.ndarray) -> np.ndarray:
    """Returns deviations from the mean, as shares of the range: their squares don't overflow."""
    shares: np.ndarray = (values - values.min()) / np.ptp(values)
    return shares - shares.mean()
