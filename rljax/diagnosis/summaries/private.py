"""Private-set report: a run's validation reward beside that on prompts nobody chose anything by.

The private set is evaluated in a directory of its own, by a run of no steps with the final policy:

    rljax train --config=CONFIG --workdir=PRIVATE --config.total_train_steps=0
        --config.actor.path=WORKDIR/export --config.valid_dataset.split=private
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from rljax.diagnosis.history import EVALUATION_REWARD, History
from rljax.diagnosis.progress import evaluation_size
from rljax.errors import UserError

SURE = 2.0  # standard errors


@dataclasses.dataclass(frozen=True)
class Report:
    """Validation reward and private reward of one policy."""

    validation: float
    private: float
    error: float  # standard error of their difference, at most
    best: float  # best validation reward of the run
    splits: tuple[str, str]  # of the validation set, of the private set
    same_protocol: bool

    @property
    def gap(self) -> float:
        """Validation reward less private reward: how much of it came from choosing by it."""
        return self.validation - self.private

    @property
    def is_overfitted(self) -> bool:
        return self.gap > SURE * self.error

    def json(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return dataclasses.asdict(self) | {"gap": self.gap, "overfitted": self.is_overfitted}

    def __str__(self) -> str:
        verdict = "the policy, or the choice of it, fits the validation set" if self.is_overfitted else "no more than chance"
        protocol = "" if self.same_protocol else "\nTheir protocols differ (rljax doctor --diff): the gap may be that."
        return (
            f"{EVALUATION_REWARD} is {self.validation:.4g} on split {self.splits[0]} and {self.private:.4g} on split "
            f"{self.splits[1]}: a gap of {self.gap:+.4g}, standard error up to {self.error:.2g}: {verdict}{protocol}"
        )


def report(run: History, private: History) -> Report:
    """Compares the last evaluation of a run with that of the private set.

    Raises:
      UserError: one of them has no evaluation, or both used the same split of the same data.
    """
    for history in (run, private):
        if not history.evaluations:
            raise UserError(
                f"--private: {history.source} has no {EVALUATION_REWARD} (evaluator.freq_steps, and a valid_dataset)"
            )
    ours, theirs = (_split(history) for history in (run, private))
    if ours == theirs:
        raise UserError(
            f"--private: {private.source} was evaluated on the same data as {run.source} (valid_dataset.split names it)"
        )
    sizes = [evaluation_size(history) for history in (run, private)]
    width = max(_width(run), _width(private))
    error = width / 2 * math.sqrt(sum(1 / size for size in sizes))
    evaluations = run.evaluations
    return Report(
        validation=evaluations.last,
        private=private.evaluations.last,
        error=error,
        best=float(evaluations.values.max()),
        splits=(ours[1], theirs[1]),
        same_protocol=_protocol(run) == _protocol(private),
    )


def _split(history: History) -> tuple[str, str]:
    """Returns path and split of the validation set."""
    if history.config is None:
        return history.source, "unknown"
    data = history.config.valid_dataset
    return data.path, data.split


def _protocol(history: History) -> Any:
    if history.config is None:
        return None
    evaluator = history.config.evaluator
    return (
        *(evaluator.n_samples, evaluator.temperature, evaluator.top_p, evaluator.top_k, evaluator.greedy),
        *(history.config.reward.name, history.config.gconfig.max_new_tokens),
    )


def _width(history: History) -> float:
    low, high = history[f"{EVALUATION_REWARD}/min"], history[f"{EVALUATION_REWARD}/max"]
    return float(high.values.max() - low.values.min()) if low and high else 1.0
