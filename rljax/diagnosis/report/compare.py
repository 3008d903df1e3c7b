"""Comparison of several runs: groups of seeds, intervals over them, and what differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax.config import io as config_io
from rljax.diagnosis.history import History
from rljax.diagnosis.report import charts, figures, tables
from rljax.diagnosis.report.charts import StepAxis
from rljax.diagnosis.report.curves import StepBins, bins_of, curve_of
from rljax.diagnosis.report.figures import Figure
from rljax.diagnosis.report.plans import SECTIONS, Plan, Section
from rljax.diagnosis.summaries.seeds import CONFIDENCE, Interval
from rljax.diagnosis.thresholds import BASELINE

# Metrics whose final values are tabled, and their titles
FINAL = {
    "eval-rollout/reward": "held-out reward",
    "rollout/reward": "training reward",
    "ppo_actor/seq_len": "tokens per completion",
    "ppo_actor/update/entropy": "entropy (nats per token)",
    "timeperf/wall": "seconds per step",
}
OWN_KEYS = ("seed",)  # keys in which runs of one group may differ
LONGEST_LABEL = 40  # characters of a group's name


@dataclasses.dataclass(frozen=True)
class RunGroup:
    """Runs whose configs differ in their seeds alone."""

    label: str  # the keys that tell it from the other groups, or its number; of a single run its name
    names: tuple[str, ...]
    histories: tuple[History, ...]
    final: Mapping[str, Interval]  # metric -> of the runs' final values


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Several runs in groups, and the keys in which they differ."""

    groups: tuple[RunGroup, ...]
    config: tuple[tuple[str, tuple[str, ...]], ...]  # (key, value per run) where they differ
    context: tuple[tuple[str, tuple[str, ...]], ...]  # likewise, of the last session
    finals: Mapping[str, Mapping[str, float]]  # metric -> run -> final value
    names: tuple[str, ...]  # of the runs, in the order of `config` and `context`


def short_names(workdirs: Sequence[Path]) -> list[str]:
    """Returns names of run directories: the ends of their paths, as long as it takes to differ."""
    parts = [workdir.absolute().parts for workdir in workdirs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(workdir) for workdir in workdirs]


def compare(histories: Mapping[str, History]) -> Comparison:
    """Groups runs by config and estimates their final values."""
    configs = {name: _config(history) for name, history in histories.items()}
    contexts = {name: dict(tables.flat(history.context[-1])) if history.context else {} for name, history in histories.items()}
    differing = _differing(configs)
    apart = [key for key, _ in differing if key not in OWN_KEYS]
    members: dict[tuple[str, ...], list[str]] = {}
    for name, config in configs.items():
        members.setdefault(tuple(tables.text(config.get(key)) for key in apart), []).append(name)
    groups = []
    for number, (values, names) in enumerate(members.items(), 1):
        label = names[0] if len(names) == 1 else _label(dict(zip(apart, values, strict=True)), number)
        several = tuple(histories[name] for name in names)
        final = {metric: Interval.of([final_value(history, metric) for history in several]) for metric in FINAL}
        groups.append(
            RunGroup(label, tuple(names), several, {metric: value for metric, value in final.items() if value.values})
        )
    finals = {metric: {name: final_value(history, metric) for name, history in histories.items()} for metric in FINAL}
    recorded = {metric: values for metric, values in finals.items() if any(np.isfinite(list(values.values())))}
    return Comparison(tuple(groups), differing, _differing(contexts), recorded, tuple(histories))


def draw(comparison: Comparison) -> list[tuple[Section, list[Figure]]]:
    """Draws every plan that is lines or bands: the means of groups with their intervals.

    A plan of several metrics becomes a figure per metric.
    """
    everything = [figures.rl_of(history) for group in comparison.groups for history in group.histories]
    steps = np.unique(np.concatenate([history.steps for history in everything]))
    bins, axis = bins_of(steps), StepAxis(int(steps[0]), int(steps[-1]))
    drawn = []
    for section in SECTIONS:
        several = []
        for plan in section.plans:
            metrics = {name: label for history in everything for name, label in figures.named(history, plan)}
            for name, label in metrics.items():
                title = plan.title if len(plan.metrics) == 1 and len(metrics) == 1 else f"{plan.title}: {label}"
                figure = _figure(comparison.groups, name, title, plan, bins, axis)
                several += [figure] if figure is not None else []
        if several:
            drawn.append((section, several))
    return drawn


def _figure(groups: Sequence[RunGroup], name: str, title: str, plan: Plan, bins: StepBins, axis: StepAxis) -> Figure | None:
    found = [spread for group in groups if (spread := spread_of(group, name, bins)) is not None]
    if not found:
        return None
    caption = ""
    if any(len(spread.runs) > 1 for spread in found):
        caption = f"Thick: mean of the runs of a config; shaded: its {CONFIDENCE:.0%} interval; thin: each run."
    chart = charts.intervals(found, plan.unit, axis, log=plan.log)
    return Figure(f"{plan.id}-{name.replace('/', '-')}", title, caption, chart, (name,))


def spread_of(group: RunGroup, name: str, bins: StepBins) -> charts.Spread | None:
    """Returns the mean of a group's runs at every point, with its interval; None without values.

    A point has the runs with a value there; with fewer than two of them it has no width.
    """
    curves = [curve for history in group.histories if (curve := curve_of(figures.rl_of(history), name, bins)) is not None]
    if not curves:
        return None
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    values = np.full((len(curves), len(steps)), np.nan)
    for row, curve in zip(values, curves, strict=True):
        row[np.searchsorted(steps, curve.steps)] = curve.mean
    n = np.isfinite(values).sum(axis=0)
    mean = np.nansum(values, axis=0) / n
    half = _half_width(values, n)
    return charts.Spread(group.label, steps, mean, mean - half, mean + half, curves)


def final_value(history: History, name: str) -> float:
    """Returns the last evaluation's value, of other metrics the mean over the last steps.

    NaN if no step has the metric. The doctor sums up several runs by the same values.
    """
    series = history.rl[name]
    return series.last if name.startswith("eval-") else series.tail(int(BASELINE)).mean


def _half_width(values: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Returns half the width of the interval of the mean over rows, [P]; 0 for a single value."""
    from scipy import stats

    squares = np.nansum((values - np.nansum(values, axis=0) / n) ** 2, axis=0)
    degrees = np.maximum(n - 1, 1)
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, degrees)
    return np.where(n > 1, quantile * np.sqrt(squares / degrees / n), 0.0)


def _label(values: Mapping[str, str], number: int) -> str:
    """Returns a group's name: the keys in which it differs, or its number if these are many."""
    if not values:
        return "all runs"
    label = ", ".join(f"{key}={value}" for key, value in values.items())
    return label if len(label) <= LONGEST_LABEL else f"config {number}"


def _config(history: History) -> dict[str, Any]:
    return {} if history.config is None else dict(tables.flat(config_io.to_dict(history.config)))


def _differing(trees: Mapping[str, Mapping[str, Any]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Returns the keys whose values are not equal in all runs, with the value in each."""
    keys = dict.fromkeys(key for tree in trees.values() for key in tree)
    rows = ((key, tuple(tables.text(tree[key]) if key in tree else "–" for tree in trees.values())) for key in keys)
    return tuple((key, values) for key, values in rows if len(set(values)) > 1)
