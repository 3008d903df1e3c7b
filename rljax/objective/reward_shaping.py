"""Reward shaping before advantages: a penalty on overlong completions, then bias, scale and clip.

The unshaped reward stays on the trajectory and is logged unchanged; each change is logged under a
name of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rljax.config.schema import ActorConfig
from rljax.metrics.mean import Mean
from rljax.types import PROMPT_VERSION, Finish, Group, Trajectory


def shaped_rewards(
    trajectories: Sequence[Trajectory], actor: ActorConfig, max_new_tokens: int, weights: np.ndarray
) -> tuple[np.ndarray, dict[str, Mean]]:
    """Returns shaped rewards, [N] float64, and their metrics.

    clip((reward - overlong penalty + bias) * scaling, +-clip)

    The penalty is a part of the reward (DAPO, arXiv:2503.14476, eq. 13), and is scaled with it.

    Args:
      weights: [N], the share of each trajectory in its episode, for the metrics.
    """
    task = np.array([t.reward for t in trajectories], dtype=np.float64)
    metrics = {"ppo/actor/task_reward": Mean.weighted(task, weights)}
    penalty = np.zeros(len(task))
    if actor.overlong_reward_penalty:
        lengths = np.array([np.count_nonzero(t.versions != PROMPT_VERSION) for t in trajectories])
        penalty = overlong_penalty(lengths, max_new_tokens, actor.overlong_tokens, actor.overlong_penalty_factor)
        metrics["reward/overlong_penalty"] = Mean.weighted(penalty, weights)
    shaped = (task - penalty + actor.reward_bias) * actor.reward_scaling
    if actor.reward_clip is not None:
        shaped = np.clip(shaped, -actor.reward_clip, actor.reward_clip)
    return shaped, metrics | {"ppo/actor/shaped_reward": Mean.weighted(shaped, weights)}


def overlong_penalty(lengths: np.ndarray, max_new_tokens: int, overlong_tokens: int, factor: float) -> np.ndarray:
    """Returns a penalty that rises linearly from 0 to `factor` at max_new_tokens, [N].

    It is 0 up to max_new_tokens - overlong_tokens. DAPO, arXiv:2503.14476, eq. 13.

    Args:
      lengths: [N], sampled tokens of each trajectory, all its turns together.
      overlong_tokens: in [1, max_new_tokens].
    """
    return np.clip((lengths - (max_new_tokens - overlong_tokens)) / overlong_tokens, 0.0, 1.0) * factor


def without_truncated(groups: Sequence[Group]) -> list[Group]:
    """Masks trajectories that were cut at a length limit, for `actor.mask_no_eos`.

    They are not trained on, and still count for their group's mean. They are found by the finish
    reason, never by a token: the padding id may be the EOS id.
    """

    def masked(trajectory: Trajectory) -> Trajectory:
        if trajectory.finish != Finish.LENGTH:
            return trajectory
        return dataclasses.replace(trajectory, loss_mask=np.zeros_like(trajectory.loss_mask))

    return [Group(group.uid, tuple(masked(t) for t in group.trajectories)) for group in groups]
