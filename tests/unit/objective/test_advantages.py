import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.config.schema import NormConfig
from rljax.objective.advantages import advantages_of, gae, normalized
from rljax.types import PROMPT_VERSION, Finish, Group, Trajectory

GROUP = NormConfig("group", "group", False, False, eps=1e-6, std_floor=1e-3)
NONE = NormConfig("none", "none", False, False, eps=1e-6, std_floor=1e-3)
LEAVE_ONE_OUT = dataclasses.replace(GROUP, mean_leave1out=True, std_leave1out=True)
MEAN_ONLY = dataclasses.replace(GROUP, std_level="none")


def config_of(**actor):
    """The part of a Config that advantages read."""
    defaults = dict(
        adv_estimator="grpo",
        reward_norm=GROUP,
        adv_norm=NONE,
        discount=1.0,
        gae_lambda=1.0,
        kl_ctl=0.0,
        kl_placement="reward",
        kl_estimator="k1",
        reward_bias=0.0,
        reward_scaling=1.0,
        reward_clip=None,
        overlong_reward_penalty=False,
        overlong_tokens=0,
        overlong_penalty_factor=0.0,
    )
    return SimpleNamespace(actor=SimpleNamespace(**defaults | actor), gconfig=SimpleNamespace(max_new_tokens=8))


def trajectory(reward, mask=(0, 0, 1, 1, 1), finish=Finish.STOP):
    mask = np.array(mask, bool)
    length = len(mask)
    return Trajectory(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        behavior_logp=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.where(mask, 3, PROMPT_VERSION).astype(np.int32),
        reward=float(reward),
        components={},
        finish=finish,
    )


def groups_of(*rewards):
    return [Group(f"0/{i}", tuple(trajectory(r) for r in group)) for i, group in enumerate(rewards)]


def scores(result):
    """Each trajectory's advantage, the same on all its trained tokens."""
    return np.array([a[-1] for a in result.advantage])


def test_leave_one_out_std_never_explodes():
    rewards, ids = np.array([1.0, 0, 0, 0]), np.zeros(4, int)
    before_scaling = normalized(rewards, ids, dataclasses.replace(LEAVE_ONE_OUT, std_level="none"))
    np.testing.assert_allclose(before_scaling, [1, -1 / 3, -1 / 3, -1 / 3], rtol=1e-15)
    scaled = normalized(rewards, ids, LEAVE_ONE_OUT)
    others = np.std([1, 0, 0])
    # The losers' others vary; the winner's do not, and it is scaled by the whole group's std.
    np.testing.assert_allclose(scaled, [1 / np.std(rewards), *[-1 / 3 / others] * 3], rtol=1e-5)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8), st.booleans(), st.booleans())
def test_leave_one_out_std_of_equal_rewards_gives_exactly_zero(other, mean_leave1out, std_leave1out):
    norm = dataclasses.replace(GROUP, mean_leave1out=mean_leave1out, std_leave1out=std_leave1out)
    for reward in (0.1, 1 / 3, 1e8, -7.3):  # means of these are off by a rounding
        x = np.array(other + [reward] * 7)
        ids = np.array([0] * len(other) + [1] * 7)
        assert (normalized(x, ids, norm)[len(other) :] == 0).all()
        assert np.isfinite(normalized(x, ids, norm)).all()


@settings(deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([0.0, 0.0, 0.5, 1.0]), min_size=2, max_size=16))
def test_leave_one_out_is_what_its_name_says(rewards):
    x, ids = np.array(rewards), np.zeros(len(rewards), int)
    norm = dataclasses.replace(LEAVE_ONE_OUT, eps=0.0, std_floor=1e-3)
    scaled, deviations = (normalized(x, ids, each) for each in (norm, dataclasses.replace(norm, std_level="none")))
    for i, (got, centered) in enumerate(zip(scaled, deviations, strict=True)):
        others = np.delete(x, i)
        if np.ptp(x) == 0:
            assert got == centered == 0
            continue
        np.testing.assert_allclose(centered, x[i] - others.mean(), atol=1e-12)
        std = others.std() if others.std() > 1e-3 else x.std()
        np.testing.assert_allclose(got, (x[i] - others.mean()) / max(std, 1e-3), rtol=1e-9, atol=1e-9)


def test_an_unbiased_std_is_the_samples():
    x, ids = np.array([1.0, 0, 0, 0, 2, 5, 3]), np.array([0, 0, 0, 0, 1, 2, 2])
    norm = dataclasses.replace(GROUP, std_unbiased=True, eps=0.0)
    expected = np.concatenate([(g - g.mean()) / (g.std(ddof=1) if len(g) > 1 else 1.0) for g in (x[:4], x[4:5], x[5:])])
    np.testing.assert_allclose(normalized(x, ids, norm), expected, rtol=1e-12)
    others = normalized(x[:4], ids[:4], dataclasses.replace(norm, std_leave1out=True))
    np.testing.assert_allclose(others[1], (0 - 0.25) / np.std([1, 0, 0], ddof=1), rtol=1e-12)


def test_group_membership_is_by_id_never_by_stride():
    """A group of three, one having failed, then one of four: each is normalized over its own."""
    whole = advantages_of(groups_of([1, 0, 1], [0, 0, 5, 1]), config_of())
    apart = [advantages_of(groups_of(group), config_of()) for group in ([1, 0, 1], [0, 0, 5, 1])]
    np.testing.assert_array_equal(scores(whole), np.concatenate([scores(part) for part in apart]))


@settings(deadline=None, derandomize=True)
@given(st.permutations(range(9)))
def test_order_within_the_batch_does_not_matter(order):
    random = np.random.default_rng(0)
    x, ids = random.normal(size=9), np.array([0, 0, 0, 1, 1, 1, 1, 2, 2])
    for norm in (GROUP, LEAVE_ONE_OUT, dataclasses.replace(GROUP, mean_level="batch", std_level="batch")):
        np.testing.assert_allclose(normalized(x[order], ids[order], norm), normalized(x, ids, norm)[order], atol=1e-12)


def test_whole_groups_give_advantages_before_any_split():
    """Normalizing parts of a group would change it; the batch's advantages are the groups' own."""
    whole = scores(advantages_of(groups_of([1, 0, 0, 1, 0, 0]), config_of()))
    parts = np.concatenate([scores(advantages_of(groups_of(part), config_of())) for part in ([1, 0, 0, 1], [0, 0])])
    assert np.abs(whole - parts).max() > 0.3
    np.testing.assert_allclose(whole.mean(), 0, atol=1e-7)
    np.testing.assert_allclose(whole.std(), 1, rtol=1e-4)


def test_grpo_dr_grpo_and_rloo_are_their_formulas():
    rewards = np.array([1.0, 0.2, 0.0, 0.7])
    groups = groups_of(rewards)
    centered = rewards - rewards.mean()
    np.testing.assert_allclose(scores(advantages_of(groups, config_of())), centered / (rewards.std() + 1e-6), rtol=1e-6)
    np.testing.assert_allclose(scores(advantages_of(groups, config_of(reward_norm=MEAN_ONLY))), centered, rtol=1e-6)
    rloo = [r - np.delete(rewards, i).mean() for i, r in enumerate(rewards)]
    np.testing.assert_allclose(scores(advantages_of(groups, config_of(adv_estimator="rloo"))), rloo, rtol=1e-6)


def test_reinforce_pp_normalizes_over_the_batchs_tokens():
    groups = [Group("0/0", (trajectory(1), trajectory(0, (0, 1)))), Group("0/1", (trajectory(3, (0, 1, 1)),))]
    result = advantages_of(groups, config_of(adv_estimator="reinforce_pp"))
    tokens = np.array([1.0, 1, 1, 0, 3, 3])
    got = np.concatenate([a[t.loss_mask] for g in groups for a, t in zip(_of(result, groups, g), g.trajectories, strict=True)])
    np.testing.assert_allclose(got, (tokens - tokens.mean()) / (tokens.std() + 1e-6), rtol=1e-5)


def _of(result, groups, group):
    start = sum(len(g.trajectories) for g in groups[: groups.index(group)])
    return result.advantage[start : start + len(group.trajectories)]


def test_masked_gae_skips_what_is_not_trained():
    rewards, values, mask = np.array([[0, 1, 0]]), np.array([[0, 0, 100]]), np.array([[True, True, False]])
    got = gae(rewards, values, mask, discount=1.0, gae_lambda=0.95)
    np.testing.assert_allclose(got, [[0.95, 1.0, 0.0]], rtol=1e-15)
    late = gae(np.array([[0, 0, 1]]), values, mask, discount=1.0, gae_lambda=0.95)
    np.testing.assert_array_equal(late, got)  # a terminal reward on a masked token is not lost


@settings(deadline=None, derandomize=True)
@given(st.lists(st.booleans(), min_size=1, max_size=20), st.floats(0.5, 1), st.floats(0, 1))
def test_gae_of_several_turns_is_that_of_the_trained_tokens_alone(bits, discount, gae_lambda):
    mask = np.array(bits)
    random = np.random.default_rng(len(bits))
    rewards, values = random.normal(size=(2, len(bits)))
    got = gae(rewards[None], np.where(mask, values, np.nan)[None], mask[None], discount=discount, gae_lambda=gae_lambda)[0]
    trained = np.flatnonzero(mask)
    own = [rewards[t:end].sum() for t, end in zip(trained, [*trained[1:], len(bits)], strict=True)] if len(trained) else []
    next_values = [*values[trained][1:], 0.0]
    delta = [r + discount * after - v for r, v, after in zip(own, values[trained], next_values, strict=False)]
    # Equation 16 as it stands: a sum over the rest, not the recursion
    expected = [sum((discount * gae_lambda) ** (k - t) * delta[k] for k in range(t, len(delta))) for t in range(len(delta))]
    np.testing.assert_allclose(got[trained], expected, atol=1e-10)
    assert not got[~mask].any()


def test_gae_returns_are_advantages_plus_values_and_trained_tokens_only():
    groups = groups_of([1.0, 0.0])
    values = [np.full(5, 0.25, np.float32), np.full(5, np.nan, np.float32)]
    values[1][2:] = 0.5
    result = advantages_of(groups, config_of(adv_estimator="gae", gae_lambda=1.0), values=values)
    np.testing.assert_allclose(result.returns[0], [0, 0, 1, 1, 1], atol=1e-7)  # lambda 1: the reward itself
    np.testing.assert_allclose(result.advantage[1], [0, 0, -0.5, -0.5, -0.5], atol=1e-7)
    with pytest.raises(ValueError, match="without values"):
        advantages_of(groups, config_of(adv_estimator="gae"))


def test_the_kl_reward_is_summed_over_what_follows():
    groups = groups_of([1.0, 0.0])
    reference = [np.full(5, -0.7, np.float32)] * 2
    plain = advantages_of(groups, config_of())
    result = advantages_of(groups, config_of(kl_ctl=0.1), reference_logp=reference)
    drop = -0.1 * 0.2 * np.array([3, 2, 1])  # k1 is -0.5 + 0.7 at each of three trained tokens
    for ours, theirs in zip(result.advantage, plain.advantage, strict=True):
        np.testing.assert_allclose(ours[2:] - theirs[2:], drop, atol=1e-6)
    assert abs(result.metrics["ppo_actor/kl_reward"].value + 0.02) < 1e-7


def test_adv_norm_is_over_trained_tokens():
    norm = dataclasses.replace(GROUP, mean_level="batch", std_level="batch")
    result = advantages_of(groups_of([1, 0, 4], [0, 2]), config_of(reward_norm=NONE, adv_norm=norm))
    tokens = np.concatenate([a[2:] for a in result.advantage])
    np.testing.assert_allclose((tokens.mean(), tokens.std()), (0, 1), atol=1e-5)
    assert all(not a[:2].any() for a in result.advantage)


def test_equal_reward_groups_are_counted():
    result = advantages_of(groups_of([1, 1, 1], [0, 1], [0.1, 0.1, 0.1]), config_of())
    assert result.metrics["rollout/equal_reward_groups"].sum == 2
    assert result.metrics["rollout/equal_reward_groups"].count == 3
    assert not scores(result)[[0, 1, 2, 5, 6, 7]].any()


def test_nothing_to_train_is_no_division_by_zero():
    nothing = advantages_of([Group("0/0", ())], config_of())
    assert nothing.advantage == [] and nothing.metrics["rollout/equal_reward_groups"].count == 0
    some = advantages_of([Group("0/0", ()), *groups_of([1, 0])], config_of())
    np.testing.assert_array_equal(scores(some), scores(advantages_of(groups_of([1, 0]), config_of())))
