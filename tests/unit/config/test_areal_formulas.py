"""Formulas of AReaL's keys: each written down from its source (v1.0.4), against ours by
numbers, for configs that its YAML becomes.

Theirs puts token t at index t - 1, as its rolled masks do; ours at t.
"""

import numpy as np
import pytest
import yaml

from rljax.config import io as config_io
from rljax.config.schema import OptimizerConfig
from rljax.errors import UserError
from rljax.objective import losses, oracle
from rljax.objective.advantages import advantages_of
from rljax.objective.aggregation import loss_weights
from rljax.objective.spec import Objective, TokenArrays
from rljax.types import PROMPT_VERSION, Finish, Group, Trajectory

OFF = object()  # a key that the file does not have
SAMPLES, GROUPS, PROMPT, LONGEST = 4, 3, 2, 9
MOST_NEW = 8
REF = {"path": "model", "backend": "fsdp:d1"}
GROUP_NORM = {"mean_level": "group", "std_level": "group", "group_size": SAMPLES}


@pytest.fixture
def convert(tmp_path):
    """A config of ours from keys of their actor, beside what every file has."""

    def converted(actor, **sections):
        tree = {
            "gconfig": {"n_samples": SAMPLES, "max_new_tokens": MOST_NEW},
            "actor": {"path": "model", "backend": "fsdp:d1", "kl_ctl": 0.0, "max_new_tokens": MOST_NEW} | actor,
            "rollout": {"backend": "sglang:d1"},
            **sections,
        }
        tree["actor"] = {key: value for key, value in tree["actor"].items() if value is not OFF}
        path = tmp_path / "theirs.yaml"
        path.write_text(yaml.safe_dump(tree))
        return config_io.load(str(path))

    return converted


# Theirs, in float64 -------------------------------------------------------------------------------------------------------


def their_norm(x, mask, keys, sets):
    """(x - mean) / (std + eps) over the whole or over groups of rows; the sample's std by default."""
    if keys is None:
        return x
    keys = {"mean_level": "batch", "std_level": "batch", "mean_leave1out": False, "std_unbiased": True, "eps": 1e-5} | keys
    mask = np.ones(x.shape, bool) if mask is None else mask
    mean, std = np.zeros(x.shape), np.ones(x.shape)
    for level in ("mean_level", "std_level"):
        for rows in {"batch": [slice(None)], "group": sets, None: []}[keys[level]]:
            of = x[rows][mask[rows]]
            if level == "mean_level":
                loo = (of.sum() - x[rows]) / (len(of) - 1)
                mean[rows] = loo if keys["mean_leave1out"] else of.mean()
            else:
                squares = (((x - mean)[rows][mask[rows]]) ** 2).sum()
                std[rows] = np.sqrt(squares / (len(of) - keys["std_unbiased"]))
    eps = keys["eps"] if keys["std_level"] else 0.0
    return np.where(mask, (x - mean) / (std + eps), 0.0)


def their_kl(logp, ref, estimator):
    ratio = logp - ref
    return np.clip({"k1": ratio, "k2": ratio**2 / 2, "k3": np.exp(-ratio) - 1 + ratio}[estimator], -10, 10)


def their_advantages(keys, rewards, mask, lengths, logp, ref, values):
    rows, sets = np.arange(len(rewards)), [slice(i, i + SAMPLES) for i in range(0, len(rewards), SAMPLES)]
    if keys.get("overlong_reward_penalty"):
        tokens, factor = keys["overlong_tokens"], keys["overlong_penalty_factor"]
        beyond = mask.sum(1) - (MOST_NEW - tokens)
        rewards = rewards + np.minimum(-beyond / tokens * factor, 0)
    score = (rewards + keys.get("reward_bias", 0.0)) * keys.get("reward_scaling", 1.0)
    clip = keys.get("reward_clip", 20.0)
    score = their_norm(np.clip(score, -clip, clip), None, keys.get("reward_norm"), sets)
    mask, logp = (np.roll(each, -1, axis=1) for each in (mask, logp))
    ref = np.roll(ref, -1, axis=1)
    out = -keys["kl_ctl"] * their_kl(logp * mask, ref * mask, keys.get("kl_estimator", "k1"))
    out[rows, lengths - 1] = 0
    out[rows, lengths - 2] += score
    discount, lam = keys.get("discount", 1.0), keys.get("gae_lambda", 1.0)
    following, last = np.zeros(len(rewards)), np.zeros(len(rewards))  # no row reaches the padded width, so none bootstraps
    advantage = np.zeros(out.shape)
    for t in reversed(range(out.shape[1] - 1)):
        delta = out[:, t] + discount * following - values[:, t]
        last = np.where(mask[:, t], delta + discount * lam * last, last)
        following = np.where(mask[:, t], values[:, t], following)
        advantage[:, t] = last
    advantage = their_norm(advantage, mask, keys.get("adv_norm"), sets)
    return np.where(mask, advantage, 0.0)


def their_loss(keys, logp, proximal, behavior, advantage, mask):
    """Sum over tokens over their number, before any is masked; `proximal` is that of the update's start."""
    decoupled, recompute = keys.get("use_decoupled_loss", False), keys.get("recompute_logprob", False)
    if not decoupled:
        proximal = proximal if recompute else behavior
    ratio = np.exp(logp - proximal)
    higher = keys.get("eps_clip_higher")
    low = keys.get("eps_clip", 0.2)
    clipped = np.clip(ratio, 1 - low, 1 + (low if higher is None else higher))
    loss = np.maximum(-advantage * ratio, -advantage * clipped)
    if keys.get("c_clip") is not None:
        loss = np.minimum(loss, np.sign(advantage) * keys["c_clip"] * advantage)
    if decoupled and (rule := their_weight_rule(keys)) is not None:
        weight, (cap, action) = np.exp(proximal - behavior), rule
        weight = np.where(weight <= cap, weight, 0) if action == "mask" else np.minimum(weight, cap)
        loss = loss * weight
    return np.where(mask, loss, 0).sum() / mask.sum()


def their_weight_rule(keys):
    """Upper bound and action; None for no weight at all."""
    if "rejection_sampling" in keys:
        rule = keys["rejection_sampling"]
        return None if rule is None else (rule.get("upper", 5.0), rule.get("action", "mask"))
    if keys.get("behave_imp_weight_mode") == "disabled":
        return None
    cap = keys.get("behav_imp_weight_cap", keys.get("behave_imp_weight_cap"))
    return np.inf if cap is None else cap, "clamp" if keys.get("behave_imp_weight_mode") == "token_truncate" else "mask"


# The comparison -----------------------------------------------------------------------------------------------------------


def batch(seed):
    """Rows of trajectories, one of them with feedback between two turns; the padded width is never reached."""
    random = np.random.default_rng(seed)
    n = GROUPS * SAMPLES
    lengths = PROMPT + random.integers(2, MOST_NEW, n)
    mask = (np.arange(PROMPT + LONGEST) >= PROMPT) & (np.arange(PROMPT + LONGEST) < lengths[:, None])
    lengths[1] = PROMPT + MOST_NEW
    mask[1] = [0, 0, 1, 1, 0, 0, 1, 1, 1, 1, 0]
    rewards = random.choice([0.0, 1.0, 0.3], n)
    logp = -random.exponential(1.0, mask.shape)
    ref = logp + random.uniform(-2, 2, mask.shape)  # theirs bounds an estimate of 10 nats
    return rewards, mask, lengths, logp, ref, random.normal(size=mask.shape)


def groups_of(rewards, mask, lengths, logp):
    def trajectory(i):
        end = lengths[i]
        return Trajectory(
            token_ids=np.zeros(end, np.int32),
            loss_mask=mask[i, :end],
            behavior_logp=logp[i, :end].astype(np.float32),
            versions=np.where(mask[i, :end], 0, PROMPT_VERSION).astype(np.int32),
            reward=float(rewards[i]),
            components={},
            finish=Finish.STOP,
        )

    every = [trajectory(i) for i in range(len(rewards))]
    return [Group(f"0/{k}", tuple(every[i : i + SAMPLES])) for k, i in enumerate(range(0, len(every), SAMPLES))]


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"reward_norm": GROUP_NORM, "adv_norm": {}},  # as in their example
        {"reward_norm": GROUP_NORM | {"std_unbiased": False, "eps": 1e-2}},
        {"reward_norm": GROUP_NORM | {"std_level": None}, "adv_norm": GROUP_NORM},
        {"reward_norm": GROUP_NORM | {"std_level": None, "mean_leave1out": True}},
        {"reward_norm": {"mean_level": "batch", "std_level": None}, "adv_norm": {"mean_level": "batch"}},
        {"reward_bias": -0.5, "reward_scaling": 10.0, "reward_clip": 4.5},
        {
            "reward_bias": -0.5,
            "reward_scaling": 10.0,
            "overlong_reward_penalty": True,
            "overlong_tokens": 4,
            "overlong_penalty_factor": 0.5,
            "reward_norm": GROUP_NORM,
        },
        *({"kl_ctl": 0.1, "kl_estimator": kind, "reward_norm": GROUP_NORM} for kind in ("k1", "k2", "k3")),
        {"discount": 0.9, "gae_lambda": 0.8, "kl_ctl": 0.2},
        {"discount": 0.9, "gae_lambda": 0.8, "kl_ctl": 0.2, "adv_norm": {}, "critic": True},
    ],
)
def test_rewards_and_advantages_are_theirs(convert, keys):
    critic = keys.get("critic", False)
    keys = {"kl_ctl": 0.0} | {key: value for key, value in keys.items() if key != "critic"}
    config = convert(keys, ref=REF, **({"critic": {"path": "model"}} if critic else {}))
    rewards, mask, lengths, logp, ref, values = batch(0)
    groups = groups_of(rewards, mask, lengths, logp)
    given = [value[:end] for value, end in zip(values, lengths, strict=True)]
    references = [value[:end] for value, end in zip(ref, lengths, strict=True)]
    ours = advantages_of(groups, config, values=given if critic else None, reference_logp=references)
    at = np.roll(values, -1, axis=1) if critic else np.zeros(values.shape)
    theirs = their_advantages(keys, rewards, mask, lengths, logp, ref, at)
    for i, end in enumerate(lengths):
        np.testing.assert_allclose(ours.advantage[i][1:], theirs[i, : end - 1], rtol=1e-5, atol=1e-5)


DECOUPLED = {"use_decoupled_loss": True, "recompute_logprob": True}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"recompute_logprob": True},
        {"eps_clip": 0.1, "eps_clip_higher": 0.5, "c_clip": 1.4},
        DECOUPLED | {"rejection_sampling": {"upper": 1.6}},
        DECOUPLED | {"rejection_sampling": {"action": "clamp", "upper": 1.6, "lower": 0.0}, "c_clip": 1.4},
        DECOUPLED | {"rejection_sampling": None},
        {"use_decoupled_loss": True, "rejection_sampling": None},  # which recomputes all the same
        DECOUPLED | {"behave_imp_weight_mode": "disabled"},
        DECOUPLED | {"behave_imp_weight_cap": 1.6, "behave_imp_weight_mode": "token_truncate"},
        DECOUPLED | {"behav_imp_weight_cap": 1.6},
        DECOUPLED | {"behav_imp_weight_cap": None},  # of before v0.4
        DECOUPLED | {"prox_logp_method": "metrics", "rejection_sampling": {"upper": 1.6}},
    ],
)
def test_the_loss_and_its_gradient_are_theirs(convert, keys):
    config = convert(keys)
    random = np.random.default_rng(1)
    shape = (5, 7)
    logp, proximal, behavior = (-1 + random.normal(scale=0.4, size=shape) for _ in range(3))
    advantage, mask = random.normal(size=shape), random.random(shape) < 0.7
    weight = np.stack(loss_weights(list(mask), config.actor.loss_aggregation))
    tokens = TokenArrays(
        loss_weight=weight,
        mask=mask,
        advantage=advantage,
        behavior_logp=behavior,
        segment_ids=np.ones(shape, int),
        proximal_logp=proximal,
    )
    ours = oracle.policy_objective(logp, np.zeros(shape), tokens, Objective.from_config(config))

    def theirs(at):
        return their_loss(keys, at, proximal, behavior, advantage, mask)

    np.testing.assert_allclose(ours.loss, theirs(logp), rtol=1e-6)
    slope, step = np.zeros(shape), 1e-6
    for place in np.ndindex(shape):
        moved = np.zeros(shape)
        moved[place] = step
        slope[place] = (theirs(logp + moved) - theirs(logp - moved)) / (2 * step)
    np.testing.assert_allclose(ours.d_logp, slope, rtol=1e-5, atol=1e-8)


def test_the_critics_loss_is_theirs(convert):
    config = convert({}, critic={"path": "model"})
    random = np.random.default_rng(2)
    value, old, target = (random.normal(size=(3, 6)) for _ in range(3))
    bound = config.critic.eps_clip_value
    assert bound == 0.5  # their default
    theirs = np.maximum((value - target) ** 2, (old + np.clip(value - old, -bound, bound) - target) ** 2) / 2
    mask = np.ones(value.shape, bool)
    ours = losses.value_loss(value, old, target, mask, np.full(value.shape, 1 / value.size), clip=bound)
    np.testing.assert_allclose(ours.sum, theirs.mean(), rtol=1e-12)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_a_rate_is_theirs_within_one_step(convert, kind):
    """Theirs ends a step behind its last one, ours at it; constant is the same."""
    from rljax.backends.jax.optim import make_schedule

    steps, ratio = 40, 0.1
    keys = {"lr": 1.0, "lr_scheduler_type": kind, "min_lr_ratio": ratio}
    optimizer = convert({"optimizer": keys}).actor.optimizer
    schedule = make_schedule(optimizer, steps, "actor.optimizer")
    progress = np.arange(steps) / steps
    cosine = np.cos(np.pi * progress) * (1 - ratio) / 2 + (1 + ratio) / 2
    theirs = {"constant": np.ones(steps), "linear": 1 - progress, "cosine": cosine}[kind]
    ours = np.array([float(schedule(step)) for step in range(steps)])
    np.testing.assert_allclose(ours, theirs, atol=1e-6 if kind == "constant" else np.pi / 2 / (steps - 1))


def test_an_optimizers_defaults_are_theirs(convert):
    ours = convert({}).actor.optimizer
    assert ours == OptimizerConfig(
        lr=1e-3, weight_decay=0.01, beta1=0.9, beta2=0.999, eps=1e-8, warmup_steps_proportion=0.001, gradient_clipping=1.0
    )


@pytest.mark.parametrize(
    ("keys", "culprit"),
    [
        ({"mask_no_eos_with_zero": True}, "actor.mask_no_eos_with_zero: true gives the longest rows"),
        ({"kl_ctl": OFF}, r"actor.kl_ctl: 0.1 \(not set, their default\) without a section ref"),
        ({"importance_sampling_level": "sequence"}, "actor.importance_sampling_level: sequence is averaged over tokens"),
        (DECOUPLED, "actor.rejection_sampling: not set, with use_decoupled_loss"),
        (DECOUPLED | {"prox_logp_method": "loglinear", "rejection_sampling": None}, "actor.prox_logp_method: loglinear puts"),
        (DECOUPLED | {"behave_imp_weight_cap": None}, "actor.behave_imp_weight_cap: null"),
        ({"reward_norm": GROUP_NORM | {"mean_leave1out": True}}, "actor.reward_norm.mean_leave1out: .* plain norm back"),
        ({"adv_norm": {"mean_level": None}}, r"actor.adv_norm.std_level: batch \(not set, .* not that of .*mean_level: null"),
        ({"adv_norm": {"mean_level": 3}}, "actor.adv_norm.mean_level: expected batch or .*, got 3"),
        ({"adv_norm": {"mean_level": "grop"}}, "actor.adv_norm.mean_level: no such value: 'grop'"),
        ({"reward_norm": {"mean_level": "group", "std_level": "grp"}}, "actor.reward_norm.std_level: no such value: .grp"),
        ({"kl_ctl": "much", "recompute_logprob": True}, "actor.kl_ctl: expected a number, got 'much'"),
        ({"kl_ctl": -0.1}, "actor.kl_ctl: must be 0 or more, not -0.1"),
        ({"gae_lambda": -1.0, "discount": 0.9}, "actor.gae_lambda: must be in"),
        ({"mb_spec": {"max_tokens_per_mb": -1}}, "actor.mb_spec.max_tokens_per_mb: must be positive"),
        ({"use_lora": True, "lora_rank": -4}, "actor.lora_rank: must be"),
        ({"adv_norm": {"mean_level": "group", "std_level": None}}, "actor.adv_norm.group_size: not set, and theirs is 1"),
        ({"group_reward_norm": True}, "actor.group_reward_norm: true is of before"),
        ({"dynamic_sampling": True}, "actor.dynamic_sampling: true makes a batch smaller"),
        (
            {"overlong_reward_penalty": True, "overlong_tokens": 2, "overlong_penalty_factor": 1.0, "max_new_tokens": OFF},
            "actor.max_new_tokens: the overlong penalty counts from it",
        ),
        ({"optimizer": {"gradient_clipping": 0}}, "actor.optimizer.gradient_clipping: 0"),
    ],
)
def test_a_setting_without_a_formula_here_is_refused_by_name(convert, keys, culprit):
    with pytest.raises(UserError, match=culprit):
        convert(keys)


@pytest.mark.parametrize(
    ("sections", "culprit"),
    [
        ({"gconfig": {"n_samples": SAMPLES, "max_new_tokens": MOST_NEW, "max_tokens": MOST_NEW}}, "gconfig.max_tokens: 8"),
        ({"eval_gconfig": {"stop": ["\n"]}}, r"eval_gconfig.stop: \('\\n',\) is not gconfig.stop \(\)"),
        ({"eval_gconfig": {"frequency_penalty": 1.0}}, "eval_gconfig.frequency_penalty"),
    ],
)
def test_sampling_that_would_differ_is_refused(convert, sections, culprit):
    with pytest.raises(UserError, match=culprit):
        convert({}, **sections)


def test_a_default_of_theirs_that_refuses_a_key_is_named(convert):
    with pytest.raises(UserError, match=r"actor.recompute_logprob: true with actor.kl_ctl: 0.1 \(not set, their default\)"):
        convert({"kl_ctl": OFF, "recompute_logprob": True}, ref={"path": "model"})


def test_a_norm_of_rewards_that_a_critic_learns_is_refused(convert):
    with pytest.raises(UserError, match=r"actor.reward_norm: is not applied to rewards that a critic learns"):
        convert({"reward_norm": GROUP_NORM}, critic={"path": "model"})


def test_an_evaluation_has_its_own_length(convert):
    assert convert({}, eval_gconfig={"max_new_tokens": 4}).evaluator.max_new_tokens == 4


def test_their_gsm8k_is_asked_for_a_box(convert):
    from rljax.data.formats import find_format

    config = convert({}, train_dataset={"path": "openai/gsm8k", "type": "rl"})
    (message,), fields = find_format(config.train_dataset.type, "train_dataset")({"question": "2+3?", "answer": "#### 5"}, "a")
    assert message["content"] == "2+3?\nPlease put your final answer within \\boxed{}."
    assert (fields["final"], config.reward.name) == ("5", "gsm8k")
