from types import SimpleNamespace

import numpy as np

from rljax.objective.reward_shaping import overlong_penalty, shaped_rewards, without_truncated
from rljax.types import PROMPT_VERSION, Finish, Group, Trajectory


def actor_of(**keys):
    defaults = dict(
        reward_bias=0.0,
        reward_scaling=1.0,
        reward_clip=None,
        overlong_reward_penalty=False,
        overlong_tokens=4,
        overlong_penalty_factor=0.5,
    )
    return SimpleNamespace(**defaults | keys)


def trajectory(reward, sampled, finish=Finish.STOP):
    mask = np.arange(sampled + 2) >= 2
    versions = np.where(mask, 0, PROMPT_VERSION).astype(np.int32)
    zeros = np.zeros(len(mask), np.float32)
    return Trajectory(zeros.astype(np.int32), mask, zeros, versions, reward, {}, finish)


def test_bias_then_scale_then_clip_and_the_task_reward_is_logged_as_it_was():
    shaped, metrics = shaped_rewards(
        [trajectory(r, 3) for r in (-1.0, 0.0, 2.0)],
        actor_of(reward_bias=0.5, reward_scaling=2.0, reward_clip=3.0),
        16,
        np.ones(3),
    )
    np.testing.assert_array_equal(shaped, [-1, 1, 3])
    assert metrics["ppo/actor/task_reward"].sum == 1
    assert metrics["ppo/actor/shaped_reward"].sum == 3


def test_the_overlong_penalty_is_a_ramp_and_is_logged_apart():
    lengths = np.array([0, 12, 13, 14, 16, 40])
    np.testing.assert_allclose(overlong_penalty(lengths, 16, 4, 0.5), [0, 0, 0.125, 0.25, 0.5, 0.5])
    shaped, metrics = shaped_rewards(
        [trajectory(1.0, 14), trajectory(1.0, 3)], actor_of(overlong_reward_penalty=True), 16, np.ones(2)
    )
    np.testing.assert_allclose(shaped, [0.75, 1.0])  # by sampled tokens, not by the prompt's
    assert metrics["reward/overlong_penalty"].sum == 0.25


def test_the_penalty_is_a_part_of_the_reward_that_is_scaled_and_clipped():
    actor = actor_of(overlong_reward_penalty=True, reward_bias=-0.5, reward_scaling=10.0, reward_clip=4.0)
    shaped, _ = shaped_rewards([trajectory(r, 14) for r in (1.0, 0.5, 0.0)], actor, 16, np.ones(3))
    np.testing.assert_allclose(shaped, [2.5, -2.5, -4.0])  # a quarter off, then 10 (r - 1/2) within 4


def test_truncated_completions_keep_their_reward_and_lose_their_mask():
    """Those that were cut at a length alone, whatever ended the others."""
    group = Group("0/0", tuple(trajectory(1.0, 3, finish) for finish in Finish))
    for before, after in zip(group.trajectories, without_truncated([group])[0].trajectories, strict=True):
        if before.finish == Finish.LENGTH:
            assert not after.loss_mask.any() and after.reward == 1.0
        else:
            assert after is before
