"""Critic: whether its values predict the returns."""

from __future__ import annotations

import numpy as np

from rljax.config.schema import Config
from rljax.diagnosis import names
from rljax.diagnosis.evidence import change_line
from rljax.diagnosis.finding import Severity
from rljax.diagnosis.history import History
from rljax.diagnosis.progress import reward_range
from rljax.diagnosis.rule import Rule, Sign, rule
from rljax.diagnosis.series import Series, rolling_median, sustained
from rljax.diagnosis.thresholds import (
    BASELINE,
    MIN_EXPLAINED,
    PATIENCE,
    RETURN_SCALE,
    USELESS_CRITIC,
    VALUE_OFFSET,
)

FIT = "rljax doctor --workdir=WORKDIR --critic: can the critic fit one batch?"


def _learns_values(config: Config) -> bool:
    return config.actor.adv_estimator == "gae"


@rule(
    "critic.explained_variance",
    "The critic predicts returns worse than their mean does, so that its values add noise to advantages.",
    needs=(names.EXPLAINED_VARIANCE,),
    least=3 * BASELINE,
    applies=_learns_values,
    bounds=(MIN_EXPLAINED, USELESS_CRITIC),
    causes=(
        "returns belong to other tokens than values: a mask, or an offset of one",
        "the critic's learning rate is too high, or too low",
        "returns have another scale than the value head can follow",
    ),
    next=FIT,
)
def explained(history: History) -> Sign | None:
    """Leaves out the first steps, in which the value head starts from zero."""
    series = history[names.EXPLAINED_VARIANCE]
    later = series.after(BASELINE)
    smooth = rolling_median(later, 2 * PATIENCE)
    step = sustained(smooth, smooth.values < MIN_EXPLAINED, window=2 * PATIENCE)
    if step is not None:
        onset = _first_below(series, step)
        line = f"{series.name} is {smooth.since(step).median:.3g} (median from step {onset} on), below {MIN_EXPLAINED!r}"
        return Sign(Severity.BROKEN, onset, line)
    if smooth and smooth.values.max() < USELESS_CRITIC:
        line = f"{series.name} is at most {smooth.values.max():.3g} (rolling median) in {len(series)} steps"
        return Sign(Severity.WARNING, int(series.steps[BASELINE]), line)
    return None


def _first_below(series: Series, step: int) -> int:
    """Returns the first step from which the series was mostly below the bound up to `step`."""
    until = series.until(step)
    found = sustained(until, until.values < MIN_EXPLAINED, window=PATIENCE)
    return step if found is None else found


@rule(
    "critic.loss_flat",
    "The critic does not learn: its values stay where they were while returns are elsewhere.",
    needs=(names.VALUE, names.RETURN),
    least=2 * BASELINE,
    applies=_learns_values,
    bounds=(VALUE_OFFSET,),
    causes=(
        "critic.optimizer.lr is too low",
        "the value head gets no gradient, or is not in the optimizer",
        "the critic's optimizer state is lost between steps",
    ),
    next=FIT,
)
def loss_flat(history: History) -> Sign | None:
    """Compares mean value and mean return, which a critic that learns brings together first."""
    value, target = history.aligned(names.VALUE, names.RETURN)
    width = reward_range(history).width
    apart = Series("distance of mean value and mean return", value.steps, np.abs(value.values - target.values))
    later = apart.after(BASELINE)
    step = sustained(later, later.values > VALUE_OFFSET * width, window=2 * PATIENCE)
    if step is None or not width:
        return None
    lines = tuple(change_line(series, PATIENCE) for series in (value, target))
    return Sign(Severity.BROKEN, int(value.steps[0]), (f"{lines[0]}, while {lines[1]}",))


@rule(
    "critic.scale",
    "Returns, or values, are of another scale than the rewards.",
    needs=(f"{names.RETURN}/min", f"{names.RETURN}/max"),
    least=PATIENCE,
    applies=_learns_values,
    bounds=(RETURN_SCALE,),
    causes=(
        "returns are computed from rewards of another scale than those that are logged",
        "a KL reward or a length penalty sums up over long completions",
        "values of padding enter the returns",
    ),
    next=FIT,
)
def scale(history: History) -> Sign | None:
    shaped = [history[f"{names.SHAPED_REWARD}/{edge}"] for edge in ("min", "max")]
    if history.config is not None and history.config.actor.kl_placement == "reward" and history.config.actor.kl_ctl:
        return None  # the KL reward of every token adds to the returns
    low, high = history.aligned(f"{names.RETURN}/min", f"{names.RETURN}/max")
    magnitude = Series("largest return by magnitude", high.steps, np.maximum(np.abs(low.values), np.abs(high.values)))
    extent = reward_range(history)
    edges = [float(abs(edge.values).max()) for edge in shaped if edge] or [abs(extent.low), abs(extent.high)]
    bound = RETURN_SCALE * max(*edges, 1e-9)
    step = sustained(magnitude, magnitude.values > bound, window=PATIENCE)
    if step is None:
        return None
    line = f"returns reach {magnitude.since(step).median:.3g} (median from step {step} on), rewards {max(edges):.3g} at most"
    return Sign(Severity.BROKEN, step, line)


RULES: tuple[Rule, ...] = (explained, loss_flat, scale)
