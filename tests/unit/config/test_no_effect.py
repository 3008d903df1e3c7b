"""Keys that another key switches off are told, and really change nothing."""

import dataclasses

import numpy as np
import pytest

from rljax.config import io as config_io
from rljax.config.learning_rate import make_schedule
from rljax.config.no_effect import SWITCHES, without_effect
from rljax.config.schema import NormConfig
from rljax.objective import oracle
from rljax.objective.advantages import _scores
from rljax.objective.spec import Objective, TokenArrays
from tests.unit.config.test_checks import config_with


def told(*overrides):
    return list(without_effect(config_with(*overrides)))


def test_a_config_of_defaults_has_nothing_to_tell():
    assert told() == []


# The key, what switches it off beside the defaults, and what switches it on
PAIRS = [
    ("actor.lora.alpha=32", (), ("actor.lora.rank=8",)),
    ("actor.lora.target_modules=('q_proj',)", (), ("actor.lora.rank=8",)),
    ("actor.overlong_tokens=100", (), ("actor.overlong_reward_penalty=True", "actor.overlong_penalty_factor=1")),
    ("actor.overlong_penalty_factor=1", (), ("actor.overlong_reward_penalty=True", "actor.overlong_tokens=100")),
    ("actor.init.num_layers=2", (), ("actor.init_from_scratch=True",)),
    ("actor.eps_clip=0.1", ("actor.loss=sft",), ()),
    ("actor.reward_norm.mean_level=batch", ("actor.loss=sft",), ()),
    ("actor.loss_aggregation_constant=7", (), ("actor.loss_aggregation=seq-mean-token-sum",)),
    ("actor.behav_imp_weight_cap=2", ("actor.use_decoupled_loss=False",), ()),
    ("actor.behav_imp_weight_level=sequence", ("actor.use_decoupled_loss=False",), ()),
    ("actor.behav_imp_weight_mode=mask", ("actor.behav_imp_weight_cap=None",), ()),
    ("actor.kl_estimator=k1", (), ("actor.kl_ctl=0.1",)),
    ("actor.kl_placement=reward", (), ("actor.kl_ctl=0.1",)),
    ("actor.distill.coef=2", (), ("actor.distill.teacher=model",)),
    ("critic.ppo_n_minibatches=2", (), ("actor.adv_estimator=gae",)),
    ("critic.optimizer.lr=1", (), ("actor.adv_estimator=gae",)),
    ("actor.gae_lambda=0.9", (), ("actor.adv_estimator=gae",)),
    ("actor.reward_norm.eps=0.1", ("actor.adv_estimator=rloo",), ()),
    ("actor.reward_norm.std_level=batch", ("actor.adv_estimator=reinforce_pp",), ()),
    ("actor.reward_norm.std_unbiased=True", ("actor.reward_norm.std_level=none",), ()),
    ("actor.reward_norm.mean_leave1out=True", ("actor.reward_norm.mean_level=none",), ()),
    ("actor.adv_norm.std_floor=0.1", (), ("actor.adv_norm.std_level=batch",)),
    ("actor.adv_norm.std_floor=0.1", (), ("actor.adv_estimator=reinforce_pp",)),
    ("actor.adv_norm.mean_leave1out=True", (), ("actor.adv_norm.mean_level=batch",)),
    ("actor.adv_norm.mean_level=group", ("actor.adv_estimator=reinforce_pp",), ()),
    ("actor.optimizer.min_lr_ratio=0.1", (), ("actor.optimizer.lr_scheduler_type=cosine",)),
    ("warmup.optimizer.min_lr_ratio=0.1", ("warmup.steps=3",), ("warmup.steps=3", "warmup.optimizer.lr_scheduler_type=cosine")),
    ("warmup.batch_size=3", (), ("warmup.steps=3",)),
    ("warmup.field=solution", (), ("actor.loss=sft",)),
    ("warmup.steps=3", ("actor.loss=sft",), ()),
    ("train_dataset.split=test", ("train_dataset.path=a.jsonl",), ()),
    ("valid_dataset.split=dev", ("valid_dataset.path=a.parquet",), ()),
    ("train_dataset.task.digits=2", (), ("train_dataset.path=task:addition",)),
    ("recover.max_consecutive_rejected=3", (), ("rollout.should_accept_fn=mixed_rewards",)),
    ("rollout.attach_timeout=3", (), ("rollout.addr=host:1",)),
    ("rollout.max_trace_mb=3", (), ("rollout.enable_rollout_tracing=True",)),
    ("evaluator.temperature=0.6", (), ("evaluator.greedy=False",)),
    ("evaluator.overlap=True", ("evaluator.freq_steps=None", "evaluator.freq_epochs=None"), ("evaluator.freq_steps=1",)),
    ("guard.patience=5", ("guard.enabled=False",), ()),
    ("guard.max_rollbacks=3", (), ("guard.action=rollback",)),
    ("stats_logger.wandb_project=mine", (), ("stats_logger.wandb=True",)),
    ("parity.shadow_device=shared", (), ("parity.shadow_every=5",)),
    ("sglang.restarts=1", (), ("allocation_mode=sglang:d1+fsdp:d1",)),
    ("jax.slots=8", ("allocation_mode=sglang:d1+fsdp:d1",), ()),
]


@pytest.mark.parametrize(("key", "off", "on"), PAIRS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_key_is_told_while_another_switches_it_off_and_only_then(key, off, on):
    name = key.partition("=")[0]
    below = name.rpartition(".")[0] if ".task." in name else name

    def of_it(*overrides):
        return [line for line in told(*overrides) if below in line.partition(", because")[0]]

    (line,) = of_it(*off, key)
    assert line.startswith("no effect: ") and "\n" not in line
    assert of_it(*on, key) == []


def test_every_switch_is_of_keys_that_exist_and_is_tried_here():
    leaves = config_io.leaves()
    tried = [key.partition("=")[0] for key, *_ in PAIRS] + ["train_dataset.task", "valid_dataset.task"]
    for switch in SWITCHES:
        for key in switch.keys:
            assert any(leaf == key or (key.endswith(".") and leaf.startswith(key)) for leaf in leaves), key
        names = "".join(switch.keys)
        assert any(switch.has(name) for name in tried) or "critic.optimizer" in names, switch.keys


def test_a_key_that_is_off_itself_contradicts_nothing():
    assert told("actor.behav_imp_weight_cap=None", "actor.use_decoupled_loss=False", "actor.lora.target_modules=()") == []


def test_the_config_of_a_run_tells_what_its_flags_told():
    config = config_with("actor.lora.alpha=32")
    assert list(without_effect(config_io.resolve(config))) == list(without_effect(config))


def loss(*overrides):
    random = np.random.default_rng(0)
    logp, proximal, behavior = (-1 + random.normal(scale=0.5, size=(4, 6)) for _ in range(3))
    ones = np.ones((4, 6))
    advantage = random.normal(size=(4, 6))
    tokens = TokenArrays(
        loss_weight=ones, mask=ones.astype(bool), advantage=advantage, behavior_logp=behavior,
        segment_ids=ones.astype(int), proximal_logp=proximal,
    )  # fmt: skip
    return oracle.policy_objective(logp, ones, tokens, Objective.from_config(config_with(*overrides))).loss


@pytest.mark.parametrize("key", ["cap=0.5", "mode=mask", "level=sequence"])
def test_the_objective_does_not_depend_on_a_weight_that_is_off(key):
    off = "actor.use_decoupled_loss=False"
    set_to = ("actor.behav_imp_weight_cap=0.9", f"actor.behav_imp_weight_{key}")
    assert loss(off, *set_to) == loss(off)
    assert loss(*set_to) != loss()


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_pp"])
def test_scores_do_not_depend_on_a_norm_that_the_estimator_has_not(estimator):
    rewards, groups, episodes = np.array([0.0, 1.0, 0.5, 2.0]), np.array([0, 0, 1, 1]), np.arange(4)
    norms = [NormConfig(), NormConfig("batch", "group", True, True, 0.1, 0.5, True)]
    one, other = (_scores(rewards, groups, episodes, estimator, norm) for norm in norms)
    np.testing.assert_array_equal(one, other)
    assert not np.array_equal(*(_scores(rewards, groups, episodes, "grpo", norm) for norm in norms))


def test_the_last_rate_of_a_constant_schedule_is_no_share_of_it():
    config = config_with("actor.optimizer.warmup_steps_proportion=0.5").actor.optimizer
    rates = [make_schedule(dataclasses.replace(config, min_lr_ratio=ratio), 10, "x") for ratio in (0.0, 0.5)]
    assert [rates[0](step) for step in range(10)] == [rates[1](step) for step in range(10)]
