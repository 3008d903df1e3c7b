"""Advantages of whole groups, in float64 numpy, before anything is split.

A token's advantage never depends on packing. Critic-free estimators turn each trajectory's reward
into a score relative to its group (or the batch) and give it to every trained token; GAE uses a
critic's values. Both go through one recursion over the trained tokens.

In means and stds over a group or the batch each episode counts once: where it has several parts,
each of them counts as one over their number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rljax.config.schema import Config, NormConfig
from rljax.metrics.mean import Mean
from rljax.objective.losses import kl_penalty
from rljax.objective.reward_shaping import shaped_rewards
from rljax.types import Group, Trajectory, episode_ids, episode_weights


@dataclasses.dataclass(frozen=True)
class Advantages:
    """Arrays per trajectory, in the order of groups and of the trajectories in them."""

    advantage: list[np.ndarray]  # [T] float32, 0 where not trained
    returns: list[np.ndarray] | None  # [T] float32, reward units; only with a critic
    metrics: dict[str, Mean]


def advantages_of(
    groups: Sequence[Group],
    config: Config,
    *,
    values: Sequence[np.ndarray] | None = None,
    logp: Sequence[np.ndarray] | None = None,
    reference_logp: Sequence[np.ndarray] | None = None,
) -> Advantages:
    """Computes the advantage of every trained token of a batch.

    - grpo: the reward normalized as `actor.reward_norm` says (GRPO, arXiv:2402.03300; with
      std_level "none", Dr. GRPO, arXiv:2503.20783)
    - rloo: minus the mean of the others in the group (arXiv:2402.14740)
    - reinforce_pp: minus and over the batch's mean and std, taken over tokens (REINFORCE++,
      arXiv:2501.03262)
    - gae: arXiv:1506.02438, with a critic's values

    then `actor.adv_norm` over the trained tokens. With kl_placement "reward", each trained token's
    reward is lowered by kl_ctl times the KL estimate there.

    Args:
      values: [T] each, of the context before token t, reward units; for "gae".
      logp: [T] each, nats, of the policy that the KL reward is about; None: behavior_logp.
      reference_logp: [T] each, nats; for the KL reward.
    """
    actor = config.actor
    if (values is None) == (actor.adv_estimator == "gae"):
        raise ValueError(f"adv_estimator {actor.adv_estimator!r} with{'out' if values is None else ''} values")
    trajectories = [t for group in groups for t in group.trajectories]
    group_ids = np.array([i for i, group in enumerate(groups) for _ in group.trajectories], dtype=np.int64)
    episodes = episode_ids(groups)
    shaped, metrics = shaped_rewards(trajectories, actor, config.gconfig.max_new_tokens, episode_weights(groups))
    equal = [np.ptp(shaped[group_ids == i]) == 0 for i in np.unique(group_ids)]
    metrics["rollout/equal_reward_groups"] = Mean(float(sum(equal)), len(equal))

    mask = _padded([t.loss_mask for t in trajectories])
    rewards = np.zeros(mask.shape)
    ends = np.array([len(t) - 1 for t in trajectories], dtype=np.int64)
    rewards[np.arange(len(ends)), ends] = _scores(shaped, group_ids, episodes, actor.adv_estimator, actor.reward_norm)
    if actor.kl_placement == "reward" and actor.kl_ctl:
        kl = _kl_of(trajectories, mask, logp, reference_logp, actor.kl_estimator)
        rewards -= actor.kl_ctl * kl
        metrics["ppo_actor/kl_reward"] = Mean(float(-actor.kl_ctl * kl.sum()), int(mask.sum()))
    state_values = np.zeros(mask.shape) if values is None else _padded(values)
    gae_lambda = 1.0 if values is None else actor.gae_lambda
    advantage = gae(rewards, state_values, mask, discount=actor.discount, gae_lambda=gae_lambda)
    returns = None if values is None else np.where(mask, advantage + np.where(mask, state_values, 0.0), 0.0)

    norm = actor.adv_norm
    if actor.adv_estimator == "reinforce_pp":
        norm = dataclasses.replace(norm, mean_level="batch", std_level="batch", mean_leave1out=False, std_leave1out=False)
    token_groups = np.broadcast_to(group_ids[:, None], mask.shape)[mask]
    advantage[mask] = normalized(advantage[mask], token_groups, norm)
    metrics["ppo_actor/advantage"] = Mean.of(advantage[mask])
    return Advantages(
        _unpadded(advantage, trajectories), None if returns is None else _unpadded(returns, trajectories), metrics
    )


def normalized(x: np.ndarray, group_ids: np.ndarray, norm: NormConfig, episodes: np.ndarray | None = None) -> np.ndarray:
    """Normalizes to (x - mean) / (max(std, std_floor) + eps), each over the batch or x's own group.

    Mean and std may also be left out. The std is the population's, or with `std_unbiased` the
    sample's (1 for a sample of one). Leave-one-out takes them over the other episodes.
    Where those do not vary, as for the one winner of a group, their std would blow the winner up
    without bound: there it is the whole set's, the winner included. Members of a set that are all
    equal get exactly 0 where the mean is taken over that set, whatever the std.

    Args:
      x: [N] float64.
      group_ids: [N] int, the group of each; members may stand anywhere.
      episodes: [N] int, the episode of each, whose members count as one together; None: one each.
    """
    episodes = np.arange(len(x)) if episodes is None else episodes
    mean, _, equal = _moments(x, group_ids, episodes, norm.mean_level, norm.mean_leave1out, norm)
    _, std, _ = _moments(x, group_ids, episodes, norm.std_level, norm.std_leave1out, norm)
    centered = x if norm.mean_level == "none" else np.where(equal, 0.0, x - mean)
    return centered if norm.std_level == "none" else centered / (np.maximum(std, norm.std_floor) + norm.eps)


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    *,
    discount: float,
    gae_lambda: float,
) -> np.ndarray:
    r"""Estimates advantages (GAE) over the trained tokens alone, as if the others were not there.

    .. math:: A_t = \delta_t + \gamma \lambda A_{t'},\quad \delta_t = r_t + \gamma V_{t'} - V_t

    t' is the next trained token, in a later turn if need be; V and A are 0 after the last. A reward
    on a token that is not trained belongs to the last trained one before it. arXiv:1506.02438, eq.
    16. With values 0 and lambda 1 this is the discounted sum of the rewards that follow.

    Args:
      rewards, values: [N, T]; values of untrained tokens are not read.
      mask: [N, T] bool, the trained tokens.

    Returns:
      [N, T] float64, 0 where mask is False.
    """
    out = np.zeros(rewards.shape)
    next_value, next_advantage, later = (np.zeros(len(rewards)) for _ in range(3))
    for t in reversed(range(rewards.shape[1])):
        trained, reward = mask[:, t], rewards[:, t] + later
        value = np.where(trained, values[:, t], 0.0)
        advantage = reward + discount * next_value - value + discount * gae_lambda * next_advantage
        out[:, t] = np.where(trained, advantage, 0.0)
        next_value = np.where(trained, value, next_value)
        next_advantage = np.where(trained, advantage, next_advantage)
        later = np.where(trained, 0.0, reward)
    return out


def _scores(shaped: np.ndarray, group_ids: np.ndarray, episodes: np.ndarray, estimator: str, norm: NormConfig) -> np.ndarray:
    if estimator == "grpo":
        return normalized(shaped, group_ids, norm, episodes)
    if estimator == "rloo":
        leave_one_out = dataclasses.replace(norm, mean_level="group", mean_leave1out=True, std_level="none")
        return normalized(shaped, group_ids, leave_one_out, episodes)
    return shaped


def _moments(
    x: np.ndarray, group_ids: np.ndarray, episodes: np.ndarray, level: str, leave_one_out: bool, norm: NormConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns mean and std for each member of x, and whether all members of its set are equal.

    Member i has the weight w_i of one over the number of members of its episode. With d = x - mean
    over the n episodes of its set, its own episode e left out,

        mean' = mean - D / (n - 1),  D = sum over e of w d
        (n - 1) std'^2 = sum over all of w d^2 - sum over e of w d^2 - D^2 / (n - 1)

    With `norm.std_unbiased`, squares are divided by one less than the number of episodes.
    """
    _, ids = np.unique(np.zeros_like(group_ids) if level == "batch" else group_ids, return_inverse=True)
    weight = 1.0 / np.bincount(episodes)[episodes]
    n = np.rint(np.bincount(ids, weight))
    mean = np.bincount(ids, weight * x) / n
    deviation = x - mean[ids]
    squares = np.bincount(ids, weight * deviation**2)
    low, high = np.full(len(n), np.inf), np.full(len(n), -np.inf)
    np.minimum.at(low, ids, x)
    np.maximum.at(high, ids, x)
    std = np.where(n > norm.std_unbiased, np.sqrt(squares / np.maximum(n - norm.std_unbiased, 1)), 1.0)[ids]
    equal = (low == high)[ids]
    if not leave_one_out:
        return mean[ids], std, equal
    others = np.maximum(n - 1, 1)[ids]
    own, own_squares = (np.bincount(episodes, weight * power)[episodes] for power in (deviation, deviation**2))
    mean_of_others = np.where(n[ids] > 1, mean[ids] - own / others, x)
    squares_of_others = squares[ids] - own_squares - own**2 / others
    std_of_others = np.sqrt(np.maximum(squares_of_others, 0.0) / np.maximum(others - norm.std_unbiased, 1))
    return mean_of_others, np.where(std_of_others > np.maximum(norm.std_floor, 1e-6 * std), std_of_others, std), equal


def _kl_of(
    trajectories: Sequence[Trajectory],
    mask: np.ndarray,
    logp: Sequence[np.ndarray] | None,
    reference_logp: Sequence[np.ndarray] | None,
    estimator: str,
) -> np.ndarray:
    if reference_logp is None:
        raise ValueError("a KL reward needs the reference's log-probs")
    policy_logp = [t.behavior_logp for t in trajectories] if logp is None else logp
    return kl_penalty(_padded(policy_logp), _padded(reference_logp), mask, estimator=estimator)


def _padded(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Pads to [N, max T] with zeros; bool stays bool, other dtypes become float64."""
    width = max((len(a) for a in arrays), default=0)
    dtype = bool if all(a.dtype == bool for a in arrays) else np.float64
    out = np.zeros((len(arrays), width), dtype=dtype)
    for row, array in zip(out, arrays, strict=True):
        row[: len(array)] = array
    return out


def _unpadded(padded: np.ndarray, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    return [row[: len(t)].astype(np.float32) for row, t in zip(padded, trajectories, strict=True)]
