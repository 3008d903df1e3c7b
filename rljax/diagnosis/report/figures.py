"""Figures of a run: its plans drawn, and its histograms."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import numpy as np

from rljax.diagnosis.history import History
from rljax.diagnosis.report import charts
from rljax.diagnosis.report.charts import Chart, StepAxis
from rljax.diagnosis.report.curves import Curve, StepBins, bins_of, curve_of
from rljax.diagnosis.report.heatmaps import cells_of
from rljax.diagnosis.report.plans import HISTOGRAMS, Plan

MOST_CURVES = 8  # in one figure; the theme has as many colors


@dataclasses.dataclass(frozen=True)
class Figure:
    """One chart of the page, with its words."""

    id: str  # unique on the page
    title: str
    caption: str
    chart: Chart
    metrics: tuple[str, ...]  # that are drawn


def rl_of(history: History) -> History:
    """Returns the RL steps, and of the step before them the evaluation of the initial policy."""
    if not history.rl_steps:
        return history
    kept = history.between(history.first_step - 1, history.last_step)
    initial = kept.steps < history.first_step
    series = {
        name: values if name.startswith("eval-") else np.where(initial, np.nan, values) for name, values in kept.series.items()
    }
    return dataclasses.replace(kept, series=series)


def curves_of(history: History, plan: Plan, bins: StepBins) -> dict[str, Curve]:
    """Returns a plan's curves by label, in its order: what the run recorded of them."""
    curves: dict[str, Curve] = {}
    for name, label in named(history, plan):
        curve = curve_of(history, name, bins)
        if curve is not None:
            curves[label] = curve
    return dict(list(curves.items())[:MOST_CURVES])


def draw(history: History, plan: Plan, axis: StepAxis, *, prefix: str = "") -> Figure | None:
    """Draws a plan; None if the run recorded nothing of it.

    Args:
      prefix: begins the figure's id, where a page draws a plan twice.
    """
    bins = bins_of(history.steps)
    curves = curves_of(history, plan, bins)
    if not curves:
        return None
    if plan.kind == "areas":
        chart = charts.areas(curves, plan.unit, axis)
    else:
        chart = charts.lines(curves, plan.unit, axis, band=plan.kind == "bands", log=plan.log)
    caption = [plan.caption] if plan.caption else []
    if bins.width > 1:
        caption.append(f"A point is the mean of {bins.width} steps.")
    if plan.kind == "bands":
        caption.append("Shaded: lowest to highest value.")
    return Figure(f"{prefix}{plan.id}", plan.title, " ".join(caption), chart, tuple(curve.name for curve in curves.values()))


def histograms_of(history: History, axis: StepAxis) -> list[Figure]:
    """Draws the histograms that the run recorded."""
    figures = []
    for name, by_step in sorted(history.histograms.items()):
        title, unit = HISTOGRAMS.get(name, (name, "value"))
        ends = [history.series.get(f"{name}/{end}", np.array([0.5])) for end in ("min", "max")]
        whole = all(bool(np.all(values[np.isfinite(values)] % 1 == 0)) for values in ends)
        if cells := cells_of(by_step, whole=whole):
            figure_id = "histogram-" + name.replace("/", "-")
            figures.append(Figure(figure_id, title, "", charts.heatmap(cells, unit, axis), (name,)))
    return figures


def named(history: History, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields the metrics of a plan with their labels; patterns become what the run recorded."""
    for pattern, label in plan.metrics.items():
        if not pattern.endswith("*"):
            yield pattern, label
            continue
        prefix = pattern[:-1]
        for name in sorted(history.names(prefix), key=_natural):
            rest = name.removeprefix(prefix)
            yield name, label.replace("*", rest.replace("_", " "))


def _natural(name: str) -> list[str | int]:
    """Sorts lag_10 after lag_2."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
