"""One training step on a batch of groups: advantages, packing, scoring, minibatches, updates.

`learn` blocks; the loop runs it in a thread.

    groups --> advantages --> minibatches --> weights --> rows --> update (one optimizer step)
                   ^        (trajectories)       |
    values, reference,                  normalized over the
    teacher, proximal                   whole minibatch

Advantages are computed over whole groups before anything is split, and weights over a whole
minibatch before it is packed, so neither packing nor the learner's micro-batches and ranks change
the gradient. Values are kept per trajectory, in the order of the groups; packed rows exist only
between `batch_of` and the learner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from rljax.batching import packing
from rljax.batching.batch import Batch
from rljax.batching.packing import Packing
from rljax.config.schema import Config
from rljax.config.schema.guard import UPDATE_ACTIONS
from rljax.engine import Learner
from rljax.metrics.accumulator import PhaseTimer
from rljax.metrics.guardrails import OUT_OF_BOUNDS, Event, UpdateBound, update_bounds
from rljax.metrics.histogram import Histogram
from rljax.metrics.mean import Mean, merge
from rljax.objective.advantages import advantages_of
from rljax.objective.aggregation import loss_weights
from rljax.objective.explained_variance import explained_variance
from rljax.objective.proximal import interpolation
from rljax.objective.reward_shaping import without_truncated
from rljax.objective.spec import PREFIX, Objective
from rljax.rollout.batch_metrics import TRAINED_TOKENS, batch_histograms, batch_metrics, log_ratio_metrics
from rljax.types import Group, Trajectory

Arrays = list[np.ndarray]  # one [T] array per trajectory


@dataclasses.dataclass(frozen=True)
class Scored:
    """A batch of trajectories with the per-token values computed before the first update.

    A field is None if the algorithm does not need it.
    """

    trajectories: Sequence[Trajectory]
    advantage: Arrays
    proximal: Arrays | None
    reference: Arrays | None
    teacher: Arrays | None
    values: Arrays | None
    returns: Arrays | None

    @property
    def log_ratio(self) -> Arrays | None:
        """Log-ratios of the proximal to the behavior policy, [T] nats each; None if not scored."""
        if self.proximal is None:
            return None
        return [p - t.behavior_logp for p, t in zip(self.proximal, self.trajectories, strict=True)]

    def trained(self, arrays: Arrays) -> np.ndarray:
        """Returns the values of all trained tokens, in the order of the trajectories."""
        masked = [array[t.loss_mask] for array, t in zip(arrays, self.trajectories, strict=True)]
        return np.concatenate([np.zeros(0), *masked])


@dataclasses.dataclass(frozen=True)
class UpdateBreach:
    """A bound that an update broke, and what was done about it then."""

    bound: UpdateBound
    value: float
    detail: str  # "minibatch 2 of 4"

    def event(self, step: int) -> Event:
        """Returns the line of guard.jsonl."""
        guard, bound = self.bound.guard, self.bound
        return Event(step, guard.key, guard.metric, self.value, bound.bound, bound.action, self.detail)


@dataclasses.dataclass(frozen=True)
class Learned:
    """Results of one training step."""

    metrics: dict[str, Mean]  # of the learner, of the batch and of the rewards
    histograms: dict[str, Histogram]  # by the names of metrics
    scored: Scored  # the batch that was trained on
    breaches: tuple[UpdateBreach, ...]  # bounds that ended or skipped an update


def learn(
    learner: Learner,
    config: Config,
    groups: Sequence[Group],
    version: int,
    timer: PhaseTimer,
    on_scored: Callable[[Scored], None] = lambda scored: None,
) -> Learned:
    """Trains on the groups: `ppo_n_minibatches` optimizer steps of the policy, and of the critic.

    Args:
      version: training steps finished before this one.
      on_scored: called with the scored batch before the first update.
    """
    with timer.phase("record"):
        metrics = batch_metrics(groups, version)
    if config.actor.mask_no_eos:
        groups = without_truncated(groups)
    objective = Objective.from_config(config)
    scored, of_advantages = score_batch(learner, config, groups, objective, timer)
    on_scored(scored)
    with timer.phase("record"):
        of_ratios, histograms = _describe(scored, version)
    parts = [metrics, of_advantages, of_ratios]
    if scored.values is not None:
        parts.append(train_critic(learner, config, scored, timer))
    of_policy, breaches = _train_policy(learner, config, scored, objective, version, timer)
    return Learned(merge([*parts, of_policy]), histograms, scored, breaches)


def _describe(scored: Scored, version: int) -> tuple[dict[str, Mean], dict[str, Histogram]]:
    """Returns metrics of the log-ratios, and the histograms of the batch."""
    log_ratio = None if scored.log_ratio is None else scored.trained(scored.log_ratio)
    histograms = batch_histograms(scored.trajectories, version, scored.trained(scored.advantage), log_ratio)
    if log_ratio is None:
        return {}, histograms
    lags = version - scored.trained([t.versions for t in scored.trajectories])
    return log_ratio_metrics(log_ratio, lags), histograms


def score_batch(
    learner: Learner, config: Config, groups: Sequence[Group], objective: Objective, timer: PhaseTimer
) -> tuple[Scored, dict[str, Mean]]:
    """Scores the batch with the weights from before the update, and computes advantages."""
    actor = config.actor
    trajectories = [t for group in groups for t in group.trajectories]
    values = reference = teacher = proximal = None
    with timer.phase("pack"):
        packed = _pack(trajectories, config)
        rows = packing.batch_of(trajectories, packed)
    if actor.adv_estimator == "gae":
        with timer.phase("values"):
            values = packed.gather(learner.values(rows))
    if actor.kl_ctl:
        with timer.phase("reference"):
            reference = packed.gather(learner.score_reference(rows))
    if objective.distill_coef:
        with timer.phase("teacher"):
            teacher = packed.gather(learner.score_teacher(rows))
    if objective.needs_score(actor.ppo_n_minibatches) or actor.prox_logp_error:
        with timer.phase("score"):
            proximal = packed.gather(learner.score(rows))
    with timer.phase("advantages"):
        advantages = advantages_of(groups, config, values=values, reference_logp=reference)
    in_loss = reference if actor.kl_placement == "loss" else None
    scored = Scored(trajectories, advantages.advantage, proximal, in_loss, teacher, values, advantages.returns)
    return scored, advantages.metrics


def _train_policy(
    learner: Learner, config: Config, scored: Scored, objective: Objective, version: int, timer: PhaseTimer
) -> tuple[dict[str, Mean], tuple[UpdateBreach, ...]]:
    """Updates on each minibatch, up to one that breaks a bound whose action is "stop_epoch"."""
    minibatches = split(scored.trajectories, config.actor.ppo_n_minibatches)
    parts: list[dict[str, Mean]] = []
    breaches: list[UpdateBreach] = []
    for k, members in enumerate(minibatches):
        with timer.phase("pack"):
            blend = None
            if objective.proximal == "interpolated":
                blend = [interpolation(scored.trajectories[i].versions, version, k, len(minibatches)) for i in members]
            batch = _rows(config, scored, members, blend=blend)
        with timer.phase("update"):
            parts.append(learner.update(batch))
        broken = _broken_bounds(config, parts[-1])
        detail = f"minibatch {k + 1} of {len(minibatches)}"
        breaches += [UpdateBreach(bound, parts[-1][bound.guard.metric].value, detail) for bound in broken]
        if any(bound.action == "stop_epoch" for bound in broken):
            break
    return merge(parts), tuple(breaches)


def _broken_bounds(config: Config, update: dict[str, Mean]) -> list[UpdateBound]:
    """Returns the bounds that an update broke: that end the epoch, or for which it was skipped."""
    skipped = update.get(OUT_OF_BOUNDS)
    actions = ("stop_epoch",) if skipped is None or not skipped.sum else UPDATE_ACTIONS
    return [bound for bound in update_bounds(config.guard, *actions) if bound.broken(update)]


def train_critic(learner: Learner, config: Config, scored: Scored, timer: PhaseTimer) -> dict[str, Mean]:
    """Trains the critic on the batch: `critic.ppo_n_minibatches` optimizer steps."""
    parts = []
    for members in split(scored.trajectories, config.critic.ppo_n_minibatches):
        with timer.phase("pack"):
            batch = _rows(config, scored, members, blend=None)
        with timer.phase("update_critic"):
            parts.append(learner.update_critic(batch))
    metrics = merge(parts)
    return metrics | {"critic/explained_variance": explained_variance(metrics)} if parts else {}


def _rows(config: Config, scored: Scored, members: Sequence[int], *, blend: Arrays | None) -> Batch:
    """Packs one minibatch into rows, with loss weights normalized over the whole minibatch."""
    trajectories = [scored.trajectories[i] for i in members]

    def pick(arrays: Arrays | None) -> Arrays | None:
        return None if arrays is None else [arrays[i] for i in members]

    masks = [t.loss_mask for t in trajectories]
    return packing.batch_of(
        trajectories,
        _pack(trajectories, config),
        loss_weight=loss_weights(masks, config.actor.loss_aggregation, config.aggregation_constant),
        advantage=pick(scored.advantage),
        proximal_logp=pick(scored.proximal),
        reference_logp=pick(scored.reference),
        teacher_logp=pick(scored.teacher),
        interpolation=blend,
        values=pick(scored.values),
        returns=pick(scored.returns),
    )


def split(trajectories: Sequence[Trajectory], n: int) -> list[list[int]]:
    """Splits a batch into at most n minibatches of about the same number of tokens each.

    Trajectories stay whole. Those without a token to train on are left out, and no minibatch is
    empty.

    Returns:
      Indices of the trajectories of each minibatch, ascending.
    """
    trained = [i for i, t in enumerate(trajectories) if t.loss_mask.any()]
    lengths = np.array([len(trajectories[i]) for i in trained], np.float64)
    parts = packing.balance(lengths, min(n, len(trained)), equal_counts=True) if trained else []
    return [[trained[i] for i in part.tolist()] for part in parts]


def supervise(learner: Learner, config: Config, examples: Sequence[Trajectory]) -> dict[str, Mean]:
    """Takes one supervised step: minimizes the mean negative log-likelihood of the trained tokens.

    Returns:
      Metrics under warmup/<name> or sft/<name>, and the number of trained tokens.
    """
    weights = loss_weights([t.loss_mask for t in examples], "token-mean")
    metrics = learner.update_supervised(packing.batch_of(examples, _pack(examples, config), loss_weight=weights))
    prefix = "sft" if config.actor.loss == "sft" else "warmup"
    return {TRAINED_TOKENS: Mean(sum(int(t.loss_mask.sum()) for t in examples), 1)} | {
        name.replace(f"{PREFIX}/", f"{prefix}/"): mean for name, mean in metrics.items()
    }


def _pack(trajectories: Sequence[Trajectory], config: Config) -> Packing:
    lengths, mb_spec = [len(t) for t in trajectories], config.actor.mb_spec
    return packing.pack(lengths, packing.row_tokens_for(lengths, mb_spec.max_tokens_per_row, mb_spec.rows_per_mb))
