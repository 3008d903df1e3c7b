"""Evidence that several rules share the form of: a metric beyond a bound for some steps in a row."""

from __future__ import annotations

import numpy as np

from rljax.diagnosis.finding import Severity
from rljax.diagnosis.rule import Sign
from rljax.diagnosis.series import Series, sustained
from rljax.diagnosis.thresholds import OVER, PATIENCE


def above(series: Series, bound: float, severity: Severity, *, window: int | None = None) -> Sign | None:
    """Returns a sign if the series stays above a bound; a single step above it is none.

    Args:
      window: steps of which four in five have to be above; None for PATIENCE.
    """
    return _beyond(series, series.values > bound, f"above {bound:.4g}", severity, window)


def below(series: Series, bound: float, severity: Severity, *, window: int | None = None) -> Sign | None:
    """Returns a sign if the series stays below a bound."""
    return _beyond(series, series.values < bound, f"below {bound:.4g}", severity, window)


def away_from(series: Series, center: float, distance: float, severity: Severity) -> Sign | None:
    """Returns a sign if the series stays further than `distance` from `center`."""
    far = np.abs(series.values - center) > distance
    return _beyond(series, far, f"further than {distance:.4g} from {center:g}", severity, None)


def standing(*signs: Sign | None) -> Sign | None:
    """Returns the first sign that is not over; the first of all if none stands."""
    found = [sign for sign in signs if sign is not None]
    return next((sign for sign in found if not sign.over), found[0] if found else None)


def _beyond(series: Series, beyond: np.ndarray, where: str, severity: Severity, window: int | None) -> Sign | None:
    size = PATIENCE if window is None else window
    step = sustained(series, beyond, window=size)
    if step is None:
        return None
    since = beyond[series.steps >= step]
    over = len(since) >= size + 2 * PATIENCE and bool(since[-2 * PATIENCE :].mean() <= OVER)
    return Sign(severity, step, line_of(series, step, size, where), series=(series.name,), over=over)


def line_of(series: Series, step: int, window: int, where: str) -> str:
    """Says where a series is from a step on: its median over the window, and at the end."""
    since = series.since(step)
    here = since.head(window)
    text = f"{series.name} is {here.median:.4g} (median of steps {here.steps[0]} to {here.steps[-1]}), {where}"
    return f"{text}; {since.last:.4g} at step {since.steps[-1]}" if len(since) > len(here) else text


def change_line(series: Series, window: int) -> str:
    """Says how a series changed: medians of its first and its last points."""
    first, last = series.head(window), series.tail(window)
    return (
        f"{series.name} went from {first.median:.4g} (median of steps {first.steps[0]} to {first.steps[-1]}) "
        f"to {last.median:.4g} (steps {last.steps[0]} to {last.steps[-1]})"
    )
