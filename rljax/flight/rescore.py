"""Scores a recorded batch again, each token by the weights that drew it.

The log-ratio of proximal to behavior policy has two parts, and only this tells them apart:

    proximal_logp - behavior_logp  =  drift  -  disagreement

    disagreement    behavior_logp less the learner's score under the weights of the token's version:
                    0 if sampler and learner compute the same policy
    drift           the score under the weights at the step, less that under those of the version:
                    0 for tokens of lag 0; what staleness is
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rljax.batching import packing
from rljax.batching.batch import Batch
from rljax.config.schema import Config
from rljax.diagnosis.thresholds import MAX_DISAGREEMENT, NOTED_DISAGREEMENT, STALE_KL
from rljax.errors import UserError
from rljax.flight.recording import Recording, StepRecord
from rljax.flight.replayer import Replayer
from rljax.types import PROMPT_VERSION, Trajectory

HEAVY = 0.01  # share of the tokens, the heaviest
HEAVY_SHARE = 0.2  # of the weight: above it, few tokens decide the gradient


class Cause(enum.StrEnum):
    """Why behavior and proximal policy differ."""

    DISAGREEMENT = "sampler and learner disagree"
    OTHER_WEIGHTS = "the sampler drew from other weights than it says"
    STALENESS = "the tokens are stale"
    NO_CAP = "actor.behav_imp_weight_cap is unset"
    NONE = "they hardly differ"


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures of some tokens: nats per token, and ratios."""

    lag: int | None  # None: several
    tokens: int
    disagreement_kl: float
    disagreement_max: float
    drift_kl: float
    weight_avg: float
    weight_max: float


@dataclasses.dataclass(frozen=True)
class Rescored:
    """The N trained tokens of a step whose version's weights could be restored."""

    step: int
    cap: float | None  # actor.behav_imp_weight_cap
    lag: np.ndarray  # [N] int32, versions
    disagreement: np.ndarray  # [N] float64, nats
    drift: np.ndarray  # [N] float64, nats
    one_version: np.ndarray  # [N] bool: no publish during their completion, so no key or value of older weights
    unreached: int  # other trained tokens: no checkpoint leads to the weights of their version
    drawn_by: int | None = None  # step of a checkpoint whose weights drew the tokens, where those of their versions did not

    @property
    def weights(self) -> np.ndarray:
        """Decoupled weights before the cap, [N] float64."""
        return np.exp(self.drift - self.disagreement)

    @property
    def cause(self) -> Cause:
        """The likeliest reason for weights that are away from 1."""
        apart, drifted = divergence(-self.disagreement), divergence(self.drift)
        if self.drawn_by is not None:
            return Cause.OTHER_WEIGHTS
        if apart > MAX_DISAGREEMENT or (apart > NOTED_DISAGREEMENT and apart > drifted):
            return Cause.DISAGREEMENT
        if self.cap is None and self._heaviest() > HEAVY_SHARE:
            return Cause.NO_CAP
        return Cause.STALENESS if drifted > STALE_KL else Cause.NONE

    def json(self) -> dict[str, Any]:
        """Returns the figures by lag, and the cause, as JSON values."""
        figures = [dataclasses.asdict(self.figures(lag, self.lag == lag)) for lag in np.unique(self.lag).tolist()]
        facts = {"step": self.step, "verdict": str(self.cause), "drawn_by": self.drawn_by}
        return facts | {"by_lag": figures, "unreached_tokens": self.unreached}

    def lines(self) -> list[str]:
        """Describes the tokens by lag, and the cause, for a person."""
        if not self.lag.size:
            return [f"step {self.step}: no checkpoint leads to the weights that drew its {self.unreached} tokens"]
        lines = [f"step {self.step}: {self.lag.size} tokens scored again by the weights that drew them, in nats"]
        columns = ("tokens", "disagreement: KL", "largest", "drift: KL", "weight", "largest")
        lines.append(f"{'':16}  {columns[0]:>8}  {columns[1]:>16}  " + "  ".join(f"{name:>9}" for name in columns[2:]))
        lines += [_line(f"lag {lag}", self.figures(lag, self.lag == lag)) for lag in np.unique(self.lag).tolist()]
        if not self.one_version.all():
            lines.append(_line("over a publish", self.figures(None, ~self.one_version)))
        if self.unreached:
            lines.append(f"{self.unreached} other tokens have weights that no checkpoint leads to")
        return [*lines, f"verdict: {self.cause}: {self._reason()}"]

    def figures(self, lag: int | None, chosen: np.ndarray) -> Figures:
        """Returns figures of the tokens in `chosen`, [N] bool."""
        apart, drift, weights = self.disagreement[chosen], self.drift[chosen], self.weights[chosen]
        return Figures(
            lag=lag,
            tokens=int(chosen.sum()),
            disagreement_kl=divergence(-apart),
            disagreement_max=float(np.abs(apart).max()),
            drift_kl=divergence(drift),
            weight_avg=float(weights.mean()),
            weight_max=float(weights.max()),
        )

    def _heaviest(self) -> float:
        """Returns the share of all weight that the heaviest tokens have."""
        weights = np.sort(self.weights)
        return float(weights[-max(1, round(HEAVY * weights.size)) :].sum() / weights.sum())

    def _reason(self) -> str:
        apart, drifted = divergence(-self.disagreement), divergence(self.drift)
        return {
            Cause.DISAGREEMENT: f"a KL divergence of {apart:.3g} nats per token under the same weights, "
            f"{drifted:.3g} by their age: compare temperature, model and dtypes of the two (rljax parity)",
            Cause.OTHER_WEIGHTS: f"those after step {self.drawn_by}: a publish does not arrive, or its version is wrong",
            Cause.STALENESS: f"a KL divergence of {drifted:.3g} nats per token by the age of the weights, "
            f"{apart:.3g} under the same: lower rollout.max_head_offpolicyness or actor.optimizer.lr",
            Cause.NO_CAP: f"{HEAVY:.0%} of the tokens have {self._heaviest():.0%} of the weight: set it to 5",
            Cause.NONE: f"a KL divergence of {apart:.3g} nats per token under the same weights, {drifted:.3g} by their age",
        }[self.cause]


def rescore(recording: Recording, replayer: Replayer, record: StepRecord) -> Rescored:
    """Scores the trained tokens of a step by the weights that drew them, and by those of the step.

    Versions are visited in ascending order, each from the nearest checkpoint. If the weights of the
    tokens' versions did not draw them, those of the other checkpoints are tried.

    Raises:
      UserError: no checkpoint leads to the weights that the step began with.
    """
    trajectories = [t for group in record.groups for t in group.trajectories]
    config = record.config
    versions = np.concatenate([t.versions[t.loss_mask] for t in trajectories])
    drawn = np.full(versions.shape, np.nan)  # log-probs under the weights of each token's version
    for version in np.unique(versions[versions != PROMPT_VERSION]).tolist():
        step = recording.step_of_version(version)
        if step is None:
            continue
        try:
            replayer.go_to(step, config)
        except UserError:
            continue
        drawn[versions == version] = _scores(replayer.learner.score, trajectories, config)[versions == version]
    replayer.go_to(record.header.parent, config)
    now = _scores(replayer.learner.score, trajectories, config)
    behavior = np.concatenate([t.behavior_logp[t.loss_mask] for t in trajectories])
    reached = np.isfinite(drawn)
    found = Rescored(
        step=record.header.step,
        cap=config.actor.behav_imp_weight_cap,
        lag=((record.header.version or 0) - versions)[reached],
        disagreement=(behavior - drawn)[reached],
        drift=(now - drawn)[reached],
        one_version=np.concatenate([np.full(t.loss_mask.sum(), _has_one_version(t)) for t in trajectories])[reached],
        unreached=int((~reached).sum()),
    )
    if found.cause is not Cause.DISAGREEMENT:
        return found
    return dataclasses.replace(found, drawn_by=_who_drew(recording, replayer, record, behavior))


def _who_drew(recording: Recording, replayer: Replayer, record: StepRecord, behavior: np.ndarray) -> int | None:
    """Returns the step of the checkpoint whose weights give the tokens the log-probs `behavior`.

    None if there is none.
    """
    apart: dict[int, float] = {}
    trajectories = [t for group in record.groups for t in group.trajectories]
    for step in recording.checkpoints():
        try:
            replayer.go_to(step, record.config)
        except UserError:
            continue
        apart[step] = divergence(_scores(replayer.learner.score, trajectories, record.config) - behavior)
    nearest = min(apart, key=apart.__getitem__, default=None)
    return nearest if nearest is not None and apart[nearest] < NOTED_DISAGREEMENT else None


def newest_step(recording: Recording) -> int:
    """Returns the newest recorded step whose tokens' weights can all be restored.

    Raises:
      UserError: there is none.
    """
    for step in reversed(recording.remakeable()):
        trajectories = [t for group in recording.read(step).groups for t in group.trajectories]
        versions = np.unique(np.concatenate([t.versions[t.loss_mask] for t in trajectories]))
        began_with = [recording.step_of_version(version) for version in versions.tolist()]
        if all(at is not None and next(recording.chains(at), None) is not None for at in began_with):
            return step
    raise UserError(f"--rescore: no checkpoint in {recording.workdir} leads to the weights that drew a recorded batch")


def divergence(log_ratio: np.ndarray) -> float:
    """Estimates KL(p || q) in nats per token from log q - log p at tokens that p drew.

    The estimator is k3, which is never negative.
    """
    return float(np.mean(np.expm1(log_ratio) - log_ratio)) if log_ratio.size else 0.0


def _line(name: str, f: Figures) -> str:
    numbers = f"{f.tokens:8}  {f.disagreement_kl:16.3g}  {f.disagreement_max:9.3g}  {f.drift_kl:9.3g}"
    return f"{name:16}  {numbers}  {f.weight_avg:9.4f}  {f.weight_max:9.4g}"


def _has_one_version(trajectory: Trajectory) -> bool:
    sampled = trajectory.versions[trajectory.versions != PROMPT_VERSION]
    return bool(sampled.size) and int(sampled.min()) == int(sampled.max())


def _scores(score: Callable[[Batch], np.ndarray], trajectories: Sequence[Trajectory], config: Config) -> np.ndarray:
    """Returns the learner's log-probs of all trained tokens, in the order of the trajectories."""
    lengths, spec = [len(t) for t in trajectories], config.actor.mb_spec
    packed = packing.pack(lengths, packing.row_tokens_for(lengths, spec.max_tokens_per_row, spec.rows_per_mb))
    scored = packed.gather(score(packing.batch_of(trajectories, packed)))
    return np.concatenate([logp[t.loss_mask] for logp, t in zip(scored, trajectories, strict=True)])
