"""Trains the critic alone on a recorded batch, to see whether it can fit the returns."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import numpy as np

from rljax.config.schema import Config
from rljax.engine import Learner
from rljax.metrics.accumulator import PhaseTimer
from rljax.objective.spec import Objective
from rljax.train_step import score_batch, train_critic
from rljax.types import Group, Trajectory

FITTED = 0.8  # share of the explainable variance


class Fit(enum.StrEnum):
    """Verdict on a critic that was trained on one batch."""

    FITS = "fits"
    LEARNS = "learns, but is slow"
    STANDS = "does not move"
    DIVERGES = "diverges"
    NOTHING = "has nothing to fit"


@dataclasses.dataclass(frozen=True)
class CriticFit:
    """Course of a critic that was trained on one batch, whose returns stay as they were.

    Values and returns are in reward units, over the trained tokens.
    """

    lr: float
    explained_variance: np.ndarray  # [P + 1] float64: before each pass over the batch, and after the last
    value_mean: np.ndarray  # [P + 1] float64
    value_std: np.ndarray  # [P + 1] float64
    return_mean: float
    return_std: float
    ceiling: float  # explained variance of the best critic: equal contexts have one value

    @property
    def fit(self) -> Fit:
        first, last = self.explained_variance[0], self.explained_variance[-1]
        if not self.return_std or self.ceiling <= 0:
            return Fit.NOTHING
        if not np.isfinite(last) or last < min(first, 0.0) - 0.1:
            return Fit.DIVERGES
        if last >= FITTED * self.ceiling:
            return Fit.FITS
        return Fit.LEARNS if last - first > 0.1 * (self.ceiling - first) else Fit.STANDS

    @property
    def scale(self) -> float:
        """Root mean square of the returns over that of the values after the last pass."""
        values = np.hypot(self.value_mean[-1], self.value_std[-1])
        return float(np.hypot(self.return_mean, self.return_std) / values) if values else float("inf")

    def json(self) -> dict[str, Any]:
        """Returns the course as JSON values."""
        return {
            "lr": self.lr,
            "fit": str(self.fit),
            "explained_variance": self.explained_variance.tolist(),
            "ceiling": self.ceiling,
            "value_mean": self.value_mean.tolist(),
            "value_std": self.value_std.tolist(),
            "return_mean": self.return_mean,
            "return_std": self.return_std,
        }

    def lines(self) -> list[str]:
        """Describes the course for a person."""
        passes = len(self.explained_variance) - 1
        shown = sorted({round(i) for i in np.linspace(0, passes, 9)})
        curve = ", ".join(f"{self.explained_variance[i]:.3g} ({i})" for i in shown)
        return [
            f"returns   {self.return_mean:.4g} +- {self.return_std:.3g}; {self.ceiling:.3g} of their variance can be explained",
            f"values    {self.value_mean[0]:.4g} +- {self.value_std[0]:.3g} before, "
            f"{self.value_mean[-1]:.4g} +- {self.value_std[-1]:.3g} after {passes} passes at lr {self.lr:g}",
            f"explained variance (after passes): {curve}",
        ]


def fit_critic(learner: Learner, config: Config, groups: Sequence[Group], passes: int) -> CriticFit:
    """Trains the critic on one batch, `critic.ppo_n_minibatches` optimizer steps per pass.

    The returns are those of the critic's first values. Values are computed anew for each pass, so
    that `critic.eps_clip_value` bounds the change of a pass, as it bounds that of a training step.
    """
    timer = PhaseTimer(lambda what: None)
    scored, _ = score_batch(learner, config, groups, Objective.from_config(config), timer)
    assert scored.values is not None and scored.returns is not None, "adv_estimator is gae"
    returns = scored.trained(scored.returns).astype(np.float64)
    course = [scored.trained(scored.values)]
    for _ in range(passes):
        train_critic(learner, config, scored, timer)
        values = score_batch(learner, config, groups, Objective.from_config(config), timer)[0].values
        scored = dataclasses.replace(scored, values=values)
        course.append(scored.trained(values or []))
    return CriticFit(
        lr=config.critic.optimizer.lr,
        explained_variance=np.array([explained(values, returns) for values in course]),
        value_mean=np.array([values.mean() for values in course]),
        value_std=np.array([values.std() for values in course]),
        return_mean=float(returns.mean()),
        return_std=float(returns.std()),
        ceiling=explained(_best_values(scored.trajectories, returns), returns),
    )


def for_fitting(config: Config, lr_factor: float = 1.0) -> Config:
    """Returns the config with a constant learning rate of the critic, times a factor."""
    optimizer = dataclasses.replace(
        config.critic.optimizer,
        lr=config.critic.optimizer.lr * lr_factor,
        lr_scheduler_type="constant",
        warmup_steps_proportion=0.0,
    )
    return dataclasses.replace(config, critic=dataclasses.replace(config.critic, optimizer=optimizer))


def explained(values: np.ndarray, returns: np.ndarray) -> float:
    """Returns 1 - Var[returns - values] / Var[returns]; NaN if the returns are all the same."""
    variance = returns.var()
    return float(1 - (returns - values).var() / variance) if variance else float("nan")


def _best_values(trajectories: Sequence[Trajectory], returns: np.ndarray) -> np.ndarray:
    """Returns the mean return of each trained token's context, [N]: no critic explains more."""
    contexts = [context for t in trajectories for context in _contexts(t)]
    _, ids = np.unique(np.array(contexts, np.int64), return_inverse=True)
    return (np.bincount(ids, returns) / np.bincount(ids))[ids]


def _contexts(trajectory: Trajectory) -> list[int]:
    """Returns a hash of the tokens before each trained token."""
    hashes, before = [], 0
    for token, trained in zip(trajectory.token_ids.tolist(), trajectory.loss_mask.tolist(), strict=True):
        if trained:
            hashes.append(before)
        before = hash((before, token))
    return hashes
