"""Histograms of a step's values, on edges that similar steps share."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

BINS = 32  # most bins of a histogram
_WHOLE = 2.0**53  # from here on all numbers are whole, and an integer has no room for most of them


@dataclasses.dataclass(frozen=True, eq=False)
class Histogram:
    """Counts of values by bin. Bin i holds edges[i] <= value < edges[i + 1].

    Edges are multiples of a power of two, so the histograms of similar steps have the same ones.

    Example: Histogram.of([0.0, 0.0, 1.0]) has the edges [0, 1, 2] and the counts [2, 1].
    """

    edges: np.ndarray  # [n + 1] float64, ascending
    counts: np.ndarray  # [n] int64

    @classmethod
    def of(cls, values: Any) -> Histogram | None:
        """Counts values into at most `BINS` bins of one width, at least 1 for whole numbers.

        Args:
          values: array of any shape. Values that are not finite are left out.

        Returns:
          None if no value is left.
        """
        found = np.asarray(values, np.float64).ravel()
        found = found[np.isfinite(found)]
        if not found.size:
            return None
        low, high = float(found.min()), float(found.max())
        whole = bool(np.all(found == np.rint(found)))
        width = _width(low, high, least=1.0 if whole else 0.0)
        first = math.floor(low / width)
        bins = np.floor(found / width).astype(np.int64) - first
        counts = np.bincount(bins)
        with np.errstate(over="ignore"):  # beside the largest number there is
            edges = np.minimum(np.arange(first, first + len(counts) + 1) * width, np.finfo(np.float64).max)
        return cls(edges, counts)

    def __add__(self, other: Histogram) -> Histogram:
        """Adds the counts. Raises ValueError if the edges differ."""
        if not np.array_equal(self.edges, other.edges):
            raise ValueError(f"histograms over {_text(self)} and {_text(other)} don't add up")
        return Histogram(self.edges, self.counts + other.counts)

    def to_json(self) -> dict[str, Any]:
        """Returns {"edges": [n + 1 floats], "counts": [n ints]}."""
        return {"edges": self.edges.tolist(), "counts": self.counts.tolist()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Histogram:
        """Makes a histogram of what `to_json` returned."""
        return cls(np.array(fields["edges"], np.float64), np.array(fields["counts"], np.int64))


def _width(low: float, high: float, least: float) -> float:
    """Returns the smallest power of two, at least `least`, of which BINS bins hold low to high."""
    magnitude = max(abs(low), abs(high))
    if low == high:
        return least if least and magnitude < _WHOLE else 2.0 ** math.floor(math.log2(magnitude))
    resolution = float(np.spacing(magnitude)) * BINS  # narrower bins would share edges
    width = 2.0 ** math.ceil(math.log2(max(high / BINS - low / BINS, resolution, least)))
    while math.floor(high / width) - math.floor(low / width) >= BINS:
        width *= 2
    return width


def _text(histogram: Histogram) -> str:
    return f"{len(histogram.counts)} bins from {histogram.edges[0]:g} to {histogram.edges[-1]:g}"
