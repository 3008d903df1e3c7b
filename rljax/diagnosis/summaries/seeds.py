"""Several runs of one experiment together: their verdicts, and rewards with intervals over seeds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rljax.diagnosis.doctor import diagnose
from rljax.diagnosis.finding import Diagnosis
from rljax.diagnosis.history import EVALUATION_REWARD, REWARD, History
from rljax.diagnosis.summaries.compare import Difference, differences
from rljax.diagnosis.thresholds import BASELINE

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Interval:
    """Mean over runs with a confidence interval of Student's t.

    Example: Interval.of([0.9, 0.95, 0.97])
    """

    mean: float
    low: float  # NaN with fewer than two runs
    high: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
        """Computes the interval of the mean; values that are NaN are left out."""
        from scipy import stats

        kept = [float(value) for value in values if math.isfinite(value)]
        mean = float(np.mean(kept)) if kept else math.nan
        if len(kept) < 2:
            return cls(mean, math.nan, math.nan, tuple(kept))
        error = float(np.std(kept, ddof=1)) / math.sqrt(len(kept))
        half = float(stats.t.ppf((1 + confidence) / 2, len(kept) - 1)) * error
        return cls(mean, mean - half, mean + half, tuple(kept))

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.mean:.4g} (one run)" if self.values else "unknown"
        return f"{self.mean:.4g} (95% interval {self.low:.4g} to {self.high:.4g}, {len(self.values)} runs)"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """End of one run."""

    source: str
    seed: int | None
    reward: float  # mean of the last BASELINE steps
    held_out: float  # last evaluation; NaN without one
    diagnosis: Diagnosis


@dataclasses.dataclass(frozen=True)
class Summary:
    """Several runs together."""

    outcomes: tuple[Outcome, ...]
    reward: Interval
    held_out: Interval
    differences: tuple[Difference, ...]  # of the other runs to the first, but for the seed

    def json(self) -> dict[str, Any]:
        """Returns the summary as JSON values."""
        runs = [
            {"source": o.source, "seed": o.seed, "reward": _number(o.reward), "held_out": _number(o.held_out)}
            | {"verdict": o.diagnosis.verdict(), "first_break": o.diagnosis.json()["first_break"]}
            for o in self.outcomes
        ]
        return {
            "runs": runs,
            "reward": _json(self.reward),
            "held_out": _json(self.held_out),
            "differences": [difference.json() for difference in self.differences],
        }


def summarize(histories: Sequence[History]) -> Summary:
    """Judges several runs and puts their ends together."""
    outcomes = tuple(_outcome(history) for history in histories)
    found: dict[tuple[str, str], Difference] = {}
    for other in histories[1:]:
        for difference in differences(histories[0], other):
            if difference.about in ("config", "code", "packages", "evaluation", "data") and difference.key != "seed":
                found.setdefault((difference.about, difference.key), difference)
    return Summary(
        outcomes,
        Interval.of([o.reward for o in outcomes]),
        Interval.of([o.held_out for o in outcomes]),
        tuple(found.values()),
    )


def text(summary: Summary) -> str:
    """Returns a summary as text for a terminal."""
    broken = sum(o.diagnosis.first_break is not None for o in summary.outcomes)
    failed = sum(bool(o.diagnosis.failure) for o in summary.outcomes)
    ended = f", {failed} failed" if failed else ""
    lines = [f"{broken} of {len(summary.outcomes)} runs have a broken link{ended}", ""]
    for o in summary.outcomes:
        lines.append(f"{o.source} (seed {o.seed}): reward {o.reward:.4g}, held-out {o.held_out:.4g}; {o.diagnosis.verdict()}")
    lines += ["", f"{REWARD}: {summary.reward}", f"{EVALUATION_REWARD}: {summary.held_out}"]
    if summary.differences:
        lines += ["", "These runs differ in more than their seed:", *(f"  - {d.about}: {d}" for d in summary.differences)]
    return "\n".join(lines)


def _outcome(history: History) -> Outcome:
    seed = None if history.config is None else history.config.seed
    reward = history[REWARD].tail(BASELINE).mean
    return Outcome(history.source, seed, reward, history.evaluations.last, diagnose(history))


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _json(interval: Interval) -> dict[str, Any]:
    values = {"mean": interval.mean, "low": interval.low, "high": interval.high}
    return {name: _number(value) for name, value in values.items()} | {"values": list(interval.values)}
