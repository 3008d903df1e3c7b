"""Progress of a run: reward of training beside held-out reward, in the same units, with errors."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from rljax.diagnosis import names
from rljax.diagnosis.finding import Severity
from rljax.diagnosis.history import History
from rljax.diagnosis.series import Series, noise, rolling_median
from rljax.diagnosis.thresholds import BASELINE, EVALUATION_ERRORS, FALL_NOISE, FLAT_GAIN, LOST_REWARD, MIN_GAIN, PATIENCE

CHANCE = 2  # standard errors
UNKNOWN_SIZE = 100  # episodes per evaluation, where nothing says how many


class Range(NamedTuple):
    """Least and greatest reward that a run has seen."""

    low: float
    high: float

    @property
    def width(self) -> float:
        return max(self.high - self.low, 0.0)  # a log may name a least reward above the greatest


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Gains of training reward and held-out reward, as shares of their ranges."""

    train: float  # up to the last evaluation
    held_out: float  # from the first evaluation to the mean of the last two
    latest: float  # from the first evaluation to the last
    drop: float  # from the best evaluation to the mean of the last two
    error: float  # standard error of one evaluation, at most
    best_step: int  # of the best evaluation
    onset: int  # step after which training reward went up and held-out reward did not

    @property
    def rises_alone(self) -> bool:
        """True if training reward rose, and held-out reward did not rise with it or fell back."""
        gain = max(self.held_out, self.latest)  # one that rises now is not flat, though it was
        flat = gain < FLAT_GAIN * self.train and gain < self.train - EVALUATION_ERRORS * self.error
        return self.train > MIN_GAIN and (flat or self.falls_back)

    @property
    def falls_back(self) -> bool:
        """True if held-out reward fell from its best by more than chance does."""
        return self.drop > max(MIN_GAIN / 2, EVALUATION_ERRORS * math.sqrt(1.5) * self.error)


def reward_range(history: History) -> Range:
    """Returns the range of training rewards; (0, 0) if none is recorded."""
    low, high, mean = (history[name] for name in (f"{names.REWARD}/min", f"{names.REWARD}/max", names.REWARD))
    lows, highs = (low or mean).values, (high or mean).values
    return Range(float(lows.min()), float(highs.max())) if len(lows) and len(highs) else Range(0.0, 0.0)


def level(history: History) -> Series:
    """Returns where the mean reward is between the least and the greatest reward, in [0, 1]."""
    extent = reward_range(history)
    return history[names.REWARD].map(lambda values: (values - extent.low) / extent.width if extent.width else 0 * values)


def evaluation_size(history: History) -> int:
    """Returns the episodes per evaluation, as the context or the config says."""
    for session in reversed(history.context):
        protocol = session.get("evaluation")
        if isinstance(protocol, dict) and isinstance(protocol.get("prompts"), int):
            return max(protocol["prompts"] * int(protocol.get("n_samples", 1)), 1)
    if history.config is not None and history.config.evaluator.max_prompts:
        return history.config.evaluator.max_prompts * history.config.evaluator.n_samples
    return UNKNOWN_SIZE


def divergence(history: History) -> Divergence | None:
    """Compares training and held-out reward; None with fewer than three evaluations since RL began."""
    train = history[names.REWARD]
    held_out = history.evaluations.since(history.first_step - 1)
    width = reward_range(history).width
    if len(held_out) < 3 or len(train) < 2 * BASELINE or width == 0:
        return None
    low, high = history[f"{names.EVALUATION_REWARD}/min"], history[f"{names.EVALUATION_REWARD}/max"]
    extent = float(high.values.max() - low.values.min()) if low and high else width
    extent = extent or width
    smooth = rolling_median(train, PATIENCE)
    start, end = train.head(PATIENCE).mean, train.until(int(held_out.steps[-1])).tail(BASELINE).mean
    values, final = held_out.values, float(held_out.values[-2:].mean())
    best = int(np.argmax(values[:-1]))
    onset = int(held_out.steps[best]) if best else int(smooth.steps[0])
    return Divergence(
        train=(end - start) / width,
        held_out=(final - float(values[0])) / extent,
        latest=float(values[-1] - values[0]) / extent,
        drop=(float(values[best]) - final) / extent,
        error=0.5 / math.sqrt(evaluation_size(history)),
        best_step=int(held_out.steps[best]),
        onset=onset,
    )


def improves_held_out(history: History) -> bool | None:
    """Returns whether held-out reward improved by more than chance, and did not part from training
    reward; None if that is not known.
    """
    found = divergence(history)
    if found is None:
        return None
    return found.held_out > CHANCE * found.error and not found.falls_back and not found.rises_alone


def severity_by_held_out(history: History) -> Severity:
    """Returns how bad a change in completions is: held-out reward tells what it is good for.

    A note if held-out reward improves with it, broken if it does not, a warning if nobody measured.
    """
    improves = improves_held_out(history)
    return Severity.WARNING if improves is None else Severity.NOTE if improves else Severity.BROKEN


def lost_share(history: History) -> float:
    """Returns how far the mean reward is below its best, or first, level, as a share of its range.

    0 if that is within noise.
    """
    share = level(history)
    smooth = rolling_median(share, BASELINE)  # as many steps as the end is judged by
    if not smooth:
        return 0.0
    best = max(float(smooth.values.max()), share.head(PATIENCE).median)
    lost = best - share.tail(BASELINE).median
    return lost if lost >= max(LOST_REWARD, FALL_NOISE * noise(share, PATIENCE)) else 0.0


def severity_by_rewards(history: History) -> Severity:
    """Returns how bad it is that the policy has gone far: as held-out reward tells.

    Where nobody measured that, broken if training reward has fallen.
    """
    severity = severity_by_held_out(history)
    return Severity.BROKEN if severity is Severity.WARNING and lost_share(history) else severity


def is_same_source(history: History) -> bool:
    """Returns whether training and held-out prompts come from one path, and their rewards compare."""
    config = history.config
    return config is not None and config.train_dataset.path == config.valid_dataset.path
