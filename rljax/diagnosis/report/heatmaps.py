"""Histograms over steps as cells of a heatmap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rljax.diagnosis.report.curves import rounded
from rljax.diagnosis.run_files import Bins

COLUMNS = 60  # histograms of one figure
MOST_BINS = 64  # of a column


def cells_of(by_step: Mapping[int, Bins], *, whole: bool = False) -> dict[str, list[Any]]:
    """Returns the non-empty bins of histograms by step, as columns.

    Neighboring histograms are added up until there are at most COLUMNS.

    Args:
      whole: the values are whole numbers, around which their bins are then drawn.

    Returns:
      Columns step, step2 (the steps (step, step2] of a histogram), low, high (edges of the bin),
      values (these in words) and share (of the histogram's counts). Empty if nothing was counted.
    """
    steps = np.array(sorted(by_step), np.int64)
    cells: dict[str, list[Any]] = {name: [] for name in ("step", "step2", "low", "high", "values", "share")}
    per_column = max(1, -(-len(steps) // COLUMNS))
    before = int(steps[0]) - 1 if len(steps) else 0
    for start in range(0, len(steps), per_column):
        members = steps[start : start + per_column].tolist()
        total = merged([by_step[step] for step in members])
        start_step, before = before, members[-1]
        if not (count := total.counts.sum()):
            continue
        filled = np.flatnonzero(total.counts > 0)
        cells["step"] += [start_step] * len(filled)
        cells["step2"] += [members[-1]] * len(filled)
        low, high = total.edges[filled], total.edges[filled + 1]
        cells["low"] += rounded(low - whole / 2)
        cells["high"] += rounded(high - whole / 2)
        cells["values"] += [_words(*ends, whole) for ends in zip(low.tolist(), high.tolist(), strict=True)]
        cells["share"] += rounded(total.counts[filled] / count)
    return cells if cells["step"] else {}


def _words(low: float, high: float, whole: bool) -> str:
    if whole:
        return f"{low:g}" if high == low + 1 else f"{low:g} to {high - 1:g}"
    return f"{low:.4g} to {high:.4g}"


def merged(histograms: Sequence[Bins]) -> Bins:
    """Adds histograms up, on bins of the widest one's width that cover all of them.

    Exact where the bins of each lie within those: a run's edges are multiples of powers of two.
    Counts of a bin that two of them share are split by its overlap with either.
    """
    widths = [float(np.diff(bins.edges).min()) for bins in histograms]
    widest = histograms[int(np.argmax(widths))].edges
    low, high = min(bins.edges[0] for bins in histograms), max(bins.edges[-1] for bins in histograms)
    width = max(widths)
    while (high - low) / width > MOST_BINS:
        width *= 2
    origin = np.floor(widest[0] / width) * width  # 0 and its multiples, where the widest has them
    offset = widest[0] - origin if width == max(widths) else 0.0
    first, last = np.floor((low - offset) / width), np.ceil((high - offset) / width)
    edges = np.arange(first, last + 1) * width + offset
    counts = np.zeros(len(edges) - 1)
    for bins in histograms:
        counts += np.diff(np.interp(edges, bins.edges, np.concatenate([[0.0], np.cumsum(bins.counts)])))
    return Bins(edges, counts)
