"""Private-set report: a run's validation reward beside that on prompts nobody chose anything by.

The private set is evaluated by `experiments.evaluate --split=private_test`, whose result is read
here; or in a directory of its own, by a run of no steps with the final policy.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rljax.diagnosis.history import EVALUATION_REWARD, History
from rljax.diagnosis.progress import evaluation_size
from rljax.errors import UserError
from rljax.evaluation import results

SURE = 2.0  # standard errors
OF_THE_SET = ("split", "data", "prompts", "success")  # of a protocol: what the reward is on, not how it is measured


@dataclasses.dataclass(frozen=True)
class Score:
    """Mean reward of one policy on one set of prompts."""

    reward: float
    error: float  # standard error; of a run, at most
    data: tuple[str, str]  # what tells the set from another: path or digest, and split
    protocol: Mapping[str, Any]  # how it is measured; empty if that is not recorded
    source: str  # for messages
    step: int | None = None  # finished steps of the policy, if known

    @property
    def split(self) -> str:
        return self.data[1]


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


def report(run: History, private: Score) -> Report:
    """Compares a run's evaluation of a policy with that on the private set.

    The policy is the run's last one, or the one that the private score names by its step.

    Raises:
      UserError: the run has no evaluation, or both used the same prompts.
    """
    ours = score_of_run(run, private.step)
    if ours.data == private.data:
        raise UserError(
            f"--private: {private.source} was evaluated on the same data as {run.source} (valid_dataset.split names it)"
        )
    common = (ours.protocol.keys() & private.protocol.keys()) - set(OF_THE_SET)
    return Report(
        validation=ours.reward,
        private=private.reward,
        error=math.hypot(ours.error, private.error),
        best=float(run.evaluations.values.max()),
        splits=(ours.split, private.split),
        same_protocol=all(ours.protocol[key] == private.protocol[key] for key in common),
    )


def read(path: Path) -> Score:
    """Reads a private score: a result of experiments.evaluate, or the directory of a run.

    Raises UserError if it is neither.
    """
    return score_of_run(History.load(path)) if path.is_dir() else score_of_result(path)


def score_of_run(history: History, step: int | None = None) -> Score:
    """Returns a run's last evaluation, up to a step if one is given. Raises UserError without any."""
    evaluations = history.evaluations if step is None else history.evaluations.until(step)
    if not evaluations:
        until = "" if step is None else f" up to step {step}"
        raise UserError(
            f"--private: {history.source} has no {EVALUATION_REWARD}{until} (evaluator.freq_steps, and a valid_dataset)"
        )
    error = _width(history) / 2 / math.sqrt(evaluation_size(history))
    return Score(evaluations.last, error, _data(history), _protocol(history), history.source, int(evaluations.steps[-1]))


def score_of_result(path: Path) -> Score:
    """Reads the result of experiments.evaluate. Raises UserError if the file is none."""
    try:
        result = results.load(path)
    except UserError as error:
        raise UserError(f"--private: {error}") from None
    means = list(result.means().values())
    if len(means) < 2:
        raise UserError(f"--private: {path} has fewer than two prompts with a reward")
    protocol = result.protocol.json()
    spread = statistics.stdev(means) / math.sqrt(len(means))
    return Score(statistics.fmean(means), spread, _identity(protocol), protocol, str(path), result.policy.step)


def _data(history: History) -> tuple[str, str]:
    """Returns digest and split of the validation set; without a context its path and split."""
    if recorded := _session(history):
        return _identity(recorded)
    data = None if history.config is None else history.config.valid_dataset
    return (history.source, "unknown") if data is None else (data.path, data.split)


def _identity(protocol: Mapping[str, Any]) -> tuple[str, str]:
    data = protocol.get("data")
    return str(data.get("data") if isinstance(data, Mapping) else data), str(protocol.get("split"))


def _protocol(history: History) -> Mapping[str, Any]:
    """Returns the protocol of the last session; of a run without a context, as its config has it."""
    if recorded := _session(history):
        return recorded
    if history.config is None:
        return {}
    evaluator, config = history.config.evaluator, history.config
    names = ("n_samples", "temperature", "top_p", "top_k", "greedy")
    sampling = {name: getattr(evaluator, name) for name in names}
    return sampling | {"reward": config.reward.name, "max_new_tokens": config.gconfig.max_new_tokens}


def _session(history: History) -> Mapping[str, Any]:
    protocols = [session.get("evaluation") for session in history.context]
    return next((each for each in reversed(protocols) if isinstance(each, Mapping)), {})


def _width(history: History) -> float:
    low, high = history[f"{EVALUATION_REWARD}/min"], history[f"{EVALUATION_REWARD}/max"]
    return float(high.values.max() - low.values.min()) if low and high else 1.0
