"""Curves of a run's metrics, thinned so that a page's size does not depend on the run's length.

    curve = curve_of(history, "rollout/reward", bins_of(history.steps))
    curve.mean[-1]   # mean over the steps of the last point

A point covers a bin of consecutive steps; the bins are the same for all curves of a page, so curves
of several runs can be averaged point by point.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rljax.diagnosis.history import History

POINTS = 300  # per curve; a figure is about 700 pixels wide
SMOOTHING = 0.04  # share of a curve's points in the window of its moving mean
FEWEST_TO_SMOOTH = 40  # points; below it every point is drawn as it is


@dataclasses.dataclass(frozen=True)
class StepBins:
    """Bins of consecutive steps: bin k has the steps in (edges[k], edges[k + 1]].

    Example: StepBins(edges=[0, 5, 10]) has the bins of steps 1 to 5 and 6 to 10
    """

    edges: np.ndarray  # [P + 1] int64, strictly increasing

    @property
    def width(self) -> int:
        """Steps per point, of the widest bin."""
        return int(np.diff(self.edges).max(initial=1))

    def index(self, steps: np.ndarray) -> np.ndarray:
        """Returns the bin of each step: [N] int64; -1 or P outside all bins."""
        return np.searchsorted(self.edges, steps, side="left") - 1


@dataclasses.dataclass(frozen=True)
class Curve:
    """Values of one metric, one entry per bin that has any.

    `low` and `high` are its distribution's range where it is one (`/min`, `/max`), else that of the
    values in the bin.
    """

    name: str  # as in metrics.jsonl, without /avg
    steps: np.ndarray  # [P] int64: the last step of each bin that has a value
    mean: np.ndarray  # [P] float64
    low: np.ndarray  # [P] float64
    high: np.ndarray  # [P] float64
    distribution: bool  # recorded with a range

    def smooth(self) -> np.ndarray:
        """Returns the centered moving mean of `mean`, [P]; `mean` itself where points are few."""
        half = round(len(self.mean) * SMOOTHING / 2) if len(self.mean) >= FEWEST_TO_SMOOTH else 0
        totals = np.concatenate([[0.0], np.cumsum(self.mean)])
        index = np.arange(len(self.mean))
        reach = np.minimum(half, np.minimum(index, index[::-1]))  # symmetric up to both ends
        return (totals[index + reach + 1] - totals[index - reach]) / (2 * reach + 1)


def bins_of(steps: np.ndarray, points: int = POINTS) -> StepBins:
    """Returns at most `points` bins of equal width that hold all steps."""
    if not len(steps):
        return StepBins(np.array([0, 1], np.int64))
    first, last = int(steps.min()) - 1, int(steps.max())
    width = -(-(last - first) // points)
    count = -(-(last - first) // width)
    return StepBins(last - width * np.arange(count, -1, -1, dtype=np.int64))


def curve_of(history: History, name: str, bins: StepBins) -> Curve | None:
    """Returns a metric's curve; None if no step in the bins has a value.

    Args:
      name: of a scalar, or of a distribution without its /avg.
    """
    distribution = f"{name}/avg" in history.series
    mean = history.series.get(f"{name}/avg" if distribution else name)
    if mean is None:
        return None
    low, high = (history.series.get(f"{name}/{end}", mean) if distribution else mean for end in ("min", "max"))
    index = bins.index(history.steps)
    inside = np.isfinite(mean) & (index >= 0) & (index < len(bins.edges) - 1)
    if not inside.any():
        return None
    starts = np.flatnonzero(np.diff(index[inside], prepend=-1))  # of each bin's run of values
    counts = np.diff(starts, append=inside.sum())
    return Curve(
        name,
        steps=bins.edges[index[inside][starts] + 1],
        mean=np.add.reduceat(mean[inside], starts) / counts,
        low=np.fmin.reduceat(low[inside], starts),
        high=np.fmax.reduceat(high[inside], starts),
        distribution=distribution,
    )


def rounded(values: Sequence[float] | np.ndarray) -> list[float | None]:
    """Rounds to the six significant digits that a page holds; None for what is not finite."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in np.asarray(values, np.float64)]
