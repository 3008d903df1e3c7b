"""Histograms over steps as cells of a heatmap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rljax.diagnosis.run_files import Bins
from rljax.diagnosis.report.curves import rounded

COLUMNS = 60  # histograms of one figure


def cells_of(by_step: Mapping[int, Bins]) -> dict[str, list[Any]]:
    """Returns the non-empty bins of histograms by step, as columns.

    Neighboring histograms with the same edges are added up until there are at most COLUMNS.

    Returns:
      Columns step, step2 (the steps (step, step2] of a histogram), low, high (edges of the bin) and
      share (of the histogram's counts). Empty if nothing was counted.
    """
    steps = np.array(sorted(by_step), np.int64)
    cells: dict[str, list[Any]] = {name: [] for name in ("step", "step2", "low", "high", "share")}
    per_column = max(1, -(-len(steps) // COLUMNS))
    before = int(steps[0]) - 1 if len(steps) else 0
    for start in range(0, len(steps), per_column):
        members = steps[start : start + per_column].tolist()
        total = merged([by_step[step] for step in members])
        start_step, before = before, members[-1]
        if not (count := total.counts.sum()):
            continue
        filled = np.flatnonzero(total.counts)
        cells["step"] += [start_step] * len(filled)
        cells["step2"] += [members[-1]] * len(filled)
        cells["low"] += rounded(total.edges[filled])
        cells["high"] += rounded(total.edges[filled + 1])
        cells["share"] += rounded(total.counts[filled] / count)
    return cells if cells["step"] else {}


def merged(histograms: list[Bins]) -> Bins:
    """Adds histograms up, those with the edges of the last; others are left out."""
    edges = histograms[-1].edges
    alike = [bins.counts for bins in histograms if np.array_equal(bins.edges, edges)]
    return Bins(edges, np.sum(alike, axis=0))
