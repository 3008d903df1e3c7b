"""Charts as Vega-Lite specifications, made and validated by Altair, apart from their data.

A chart's data are columns by table name; the page zips them to rows (report.js), which halves its
size. Colors stand here by role only: a style or a range that the page's theme fills in, light or
dark.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np

from rljax.diagnosis.report.curves import Curve, rounded

HEIGHT = 190  # pixels of a plot
LOG_SPAN = 100  # highest over lowest value from which on a logarithmic scale is used
PLAIN = ".6~g"  # d3 format of a number without an exponent
Table = Mapping[str, list[Any]]  # columns of equal length, by field


@dataclasses.dataclass(frozen=True)
class StepAxis:
    """The steps that figures of a page share, and the first break or warning on them.

    Example: StepAxis(first=901, last=1050, marked=934, state="broken")
    """

    first: int
    last: int
    marked: int | None = None  # step of the first break or warning
    state: str = "ok"  # broken or warning where a step is marked

    def encode(self) -> alt.X:
        scale = alt.Scale(domain=[self.first, max(self.last, self.first + 1)], nice=False)
        return alt.X("step:Q", title="step", scale=scale, axis=alt.Axis(tickMinStep=1, format="d"))


@dataclasses.dataclass(frozen=True)
class Chart:
    """A specification whose data are in `tables`."""

    spec: dict[str, Any]  # Vega-Lite
    tables: dict[str, Table]


@dataclasses.dataclass(frozen=True)
class Spread:
    """The mean of several runs over steps with its interval, and the runs themselves."""

    label: str
    steps: np.ndarray  # [P] int64
    mean: np.ndarray  # [P] float64
    low: np.ndarray  # [P] float64; equals the mean where there is one run
    high: np.ndarray  # [P] float64
    runs: Sequence[Curve]


def lines(curves: Mapping[str, Curve], unit: str, axis: StepAxis, *, band: bool, log: bool = False) -> Chart:
    """Draws curves by label: each point thin, the moving mean thick.

    Args:
      unit: title of the vertical axis.
      band: shade each curve's range.
      log: use a logarithmic scale where the values are positive and span enough.
    """
    points: dict[str, list[Any]] = {name: [] for name in ("step", "series", "value", "smooth", "low", "high")}
    for label, curve in curves.items():
        points["step"] += curve.steps.tolist()
        points["series"] += [label] * len(curve.steps)
        columns = {"value": curve.mean, "smooth": curve.smooth(), "low": curve.low, "high": curve.high}
        for field, values in columns.items():
            points[field] += rounded(values)
    y = _vertical(unit, points["value"] + (points["low"] + points["high"] if band else []), log=log)
    base = alt.Chart(alt.NamedData("points")).encode(x=axis.encode(), color=_color(list(curves)))
    tips = {"value": "mean", "low": "lowest", "high": "highest"} if band else {"value": "mean"}
    layers = [
        *([base.mark_area(style="band").encode(y=y("low:Q"), y2="high:Q")] if band else []),
        base.mark_line(style="raw").encode(y=y("value:Q")),
        base.mark_line(style="smooth").encode(y=y("smooth:Q")),
        _nearest_point(base.encode(y=y("value:Q"), tooltip=_tooltip("metric", tips))),
    ]
    return _on_steps(layers, {"points": points}, axis)


def areas(curves: Mapping[str, Curve], unit: str, axis: StepAxis) -> Chart:
    """Stacks curves by label, the first at the bottom; a curve is 0 where it has no value."""
    steps = np.unique(np.concatenate([curve.steps for curve in curves.values()]))
    points: dict[str, list[Any]] = {name: [] for name in ("step", "series", "order", "value")}
    for order, (label, curve) in enumerate(curves.items()):
        value = np.zeros(len(steps))
        value[np.searchsorted(steps, curve.steps)] = curve.mean
        points["step"] += steps.tolist()
        points["series"] += [label] * len(steps)
        points["order"] += [-order] * len(steps)  # Vega-Lite stacks the highest at the bottom
        points["value"] += rounded(value)
    area = alt.Chart(alt.NamedData("points")).mark_area(style="stacked", interpolate="step-before")
    encoded = area.encode(
        x=axis.encode(),
        y=alt.Y("value:Q", title=unit, stack="zero", axis=alt.Axis(format=PLAIN)),
        color=_color(list(curves)),
        order=alt.Order("order:Q"),
        tooltip=_tooltip("part", {"value": unit}),
    )
    return _on_steps([encoded], {"points": points}, axis)


def heatmap(cells: Table, unit: str, axis: StepAxis) -> Chart:
    """Draws histograms over steps: a column per histogram, its cells by share.

    Args:
      cells: columns step, step2, low, high, values, share; a cell's edges on both axes, the values
        in words, and its share of the column's count.
    """
    legend = alt.Legend(format=".0%", orient="top", direction="horizontal", gradientLength=140, gradientThickness=10)
    rectangles = alt.Chart(alt.NamedData("cells")).mark_rect(style="cell", clip=True)
    encoded = rectangles.encode(
        x=axis.encode(),
        x2="step2:Q",
        y=alt.Y("low:Q", title=unit, scale=alt.Scale(zero=False, nice=False), axis=alt.Axis(format=PLAIN)),
        y2="high:Q",
        color=alt.Color("share:Q", title="share of the step", scale=alt.Scale(domainMin=0), legend=legend),
        tooltip=[
            alt.Tooltip("step2:Q", title="step", format="d"),
            alt.Tooltip("values:N", title=unit),
            alt.Tooltip("share:Q", title="share", format=".1%"),
        ],
    )
    return _on_steps([encoded], {"cells": cells}, axis)


def intervals(groups: Sequence[Spread], unit: str, axis: StepAxis, *, log: bool = False) -> Chart:
    """Draws the mean of each group of runs with its interval shaded, and every run as a thin line."""
    means: dict[str, list[Any]] = {name: [] for name in ("step", "series", "value", "low", "high")}
    runs: dict[str, list[Any]] = {name: [] for name in ("step", "series", "run", "value")}
    for group in groups:
        means["step"] += group.steps.tolist()
        means["series"] += [group.label] * len(group.steps)
        for field, values in (("value", group.mean), ("low", group.low), ("high", group.high)):
            means[field] += rounded(values)
        for number, run in enumerate(group.runs):
            runs["step"] += run.steps.tolist()
            runs["series"] += [group.label] * len(run.steps)
            runs["run"] += [f"{group.label} {number}"] * len(run.steps)
            runs["value"] += rounded(run.mean)
    y = _vertical(unit, [*means["low"], *means["high"], *runs["value"]], log=log)
    color = _color([group.label for group in groups])
    base = alt.Chart(alt.NamedData("means")).encode(x=axis.encode(), color=color)
    each = alt.Chart(alt.NamedData("runs")).encode(x=axis.encode(), color=color, detail="run:N")
    tips = {"value": "mean", "low": "from", "high": "to"}
    layers = [
        base.mark_area(style="band").encode(y=y("low:Q"), y2="high:Q"),
        each.mark_line(style="raw").encode(y=y("value:Q")),
        base.mark_line(style="smooth").encode(y=y("value:Q")),
        _nearest_point(base.encode(y=y("value:Q"), tooltip=_tooltip("runs", tips))),
    ]
    return _on_steps(layers, {"means": means, "runs": runs}, axis)


def _nearest_point(chart: alt.Chart) -> alt.Chart:
    """Draws the point that is nearest to the pointer."""
    nearest = alt.selection_point(
        name="near", nearest=True, on="pointerover", clear="pointerout", encodings=["x", "y"], empty=False
    )
    opacity = alt.condition(nearest, alt.value(1), alt.value(0))
    return chart.mark_point(style="near", filled=True, size=50).encode(opacity=opacity).add_params(nearest)


def _tooltip(series: str, values: Mapping[str, str]) -> list[alt.Tooltip]:
    """Returns a tooltip of the series, the step, and fields by their titles."""
    numbers = (alt.Tooltip(f"{field}:Q", title=title, format=".5~g") for field, title in values.items())
    return [alt.Tooltip("series:N", title=series), alt.Tooltip("step:Q", title="step", format="d"), *numbers]


def _vertical(unit: str, values: list[float | None], *, log: bool) -> Callable[[str], alt.Y]:
    """Returns a function that makes the vertical channel of a field.

    Args:
      values: all that are drawn.
      log: use a logarithmic scale if they are positive and span enough.
    """
    finite = [value for value in values if value is not None] or [0.0]
    low, high = min(finite), max(finite)
    log = log and low > 0 and high > LOG_SPAN * low
    scale = alt.Scale(type="log", nice=False) if log else alt.Scale(zero=False)
    if low == high:  # an axis needs an extent
        scale = alt.Scale(domain=[min(0.0, 2 * low), max(0.0, 2 * high) or 1.0])
    axis = alt.Axis(format=_format(low, high, log=log))
    if log:
        axis.values = _decades(low, high)
    return lambda field: alt.Y(field, title=unit, scale=scale, axis=axis)


def _decades(low: float, high: float) -> list[float]:
    """Returns at most seven powers of ten from `low` to `high`, evenly spaced."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    return [float(f"1e{power}") for power in range(first, last + 1, 1 + (last - first) // 7)]


def _format(low: float, high: float, *, log: bool) -> str:
    """Returns the d3 format of an axis."""
    largest = max(abs(low), abs(high))
    if (log and low < 1e-3) or 0 < largest < 1e-3:
        return ".2~e"
    return ".3~s" if largest >= 1e4 else PLAIN


def _color(labels: list[str]) -> alt.Color:
    """Colors series in the order of their labels; a single one needs no legend."""
    legend = alt.Legend(title=None, orient="top", symbolOpacity=1) if len(labels) > 1 else None
    return alt.Color("series:N", scale=alt.Scale(domain=labels), legend=legend)


def _on_steps(layers: list[alt.Chart], tables: dict[str, Table], axis: StepAxis) -> Chart:
    """Layers charts, with the step that the axis marks and all that came after it."""
    if axis.marked is not None and axis.first <= axis.marked <= axis.last:
        tables = tables | {"mark": {"step": [axis.marked], "end": [axis.last]}}
        base = alt.Chart(alt.NamedData("mark")).encode(x=axis.encode())
        area, line = base.mark_rect(style=f"{axis.state}-area"), base.mark_rule(style=f"{axis.state}-line")
        layers = [area.encode(x2="end:Q"), *layers, line]
    chart = alt.layer(*layers).properties(width="container", height=HEIGHT)
    return Chart(chart.to_dict(validate=False), tables)
