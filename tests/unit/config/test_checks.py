"""Cross-checks: every rule refuses what breaks it, in one line that names a key, and lets a sound
config through.
"""

import pytest

from rljax.config import checks as config_checks
from rljax.config import io as config_io
from rljax.config.keys import (
    ABOVE_ONE,
    BELOW_ONE,
    HALF_OPEN_UNIT,
    NOT_NEGATIVE,
    POSITIVE,
    UNIT,
    unwrap_optional,
    walk,
)
from rljax.config.schema import Config
from rljax.configs import base
from rljax.engines.cuda.config import FsdpConfig
from rljax.engines.http.config import SglangConfig
from rljax.engines.jax.config import JaxConfig
from rljax.errors import UserError

SECTIONS = [(JaxConfig, "jax"), (FsdpConfig, "fsdp"), (SglangConfig, "sglang")]


def config_with(*overrides: str) -> Config:
    """A sound training config with `key=text` overrides."""
    tree = base.get_config().to_dict()
    for override in ("actor.path=model", "train_dataset.path=data", *overrides):
        key, _, text = override.partition("=")
        config_io.apply_override(tree, key, text)
    return config_io.from_dict(tree)


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as raised:
        config_checks.check(config_with(*overrides))
    message = str(raised.value)
    assert "\n" not in message
    assert message.partition(":")[0] in config_io.leaves() + ["actor.reward_norm"]
    return message


def test_sound_config_passes():
    config_checks.check(config_with())


@pytest.mark.parametrize(
    ("targets", "what"),
    [("('q_proj','foo')", "no projection named 'foo'"), ("('q',)", "no projection named 'q'"), ("()", "empty")],
)
def test_adapters_are_of_projections_that_there_are(targets, what):
    override = f"actor.lora.target_modules={targets}"
    assert refusal(override, "actor.lora.rank=8").startswith(f"actor.lora.target_modules: {what} (one of q_proj, ")
    config_checks.check(config_with(override))  # without adapters they mean nothing
    config_checks.check(config_with("actor.lora.target_modules=('down_proj',)", "actor.lora.rank=8"))


# What breaks each rule, and how its message begins.
RULES = config_checks.RULES + config_checks.EVALUATION_RULES + config_checks.RL_RULES  # in the order of the check
EVALUATED = ("evaluator.freq_steps=5", "valid_dataset.path=data")
BROKEN = [
    (["gconfig.min_new_tokens=9", "gconfig.max_new_tokens=8"], "gconfig.min_new_tokens: 9 exceeds gconfig.max_new_tokens=8"),
    (["gconfig.stop=('a','')"], "gconfig.stop: has an empty string"),
    (["reward.weights=(1.0,2.0)"], "reward.weights: (1.0, 2.0) has not one weight for each reward of reward.name='exact'"),
    (["reward.name=exact,exact"], "reward.name: 'exact,exact' names a reward twice"),
    (["actor.path="], "actor.path: empty"),
    (["actor.init_from_scratch=true"], "actor.path: 'model' would be ignored"),
    (["actor.lora.path=adapter"], "actor.lora.rank: 0 trains all weights"),
    (
        ["actor.lora.path=adapter", "actor.lora.rank=8", "actor.kl_ctl=0.1"],
        "actor.kl_ctl: the reference of a LoRA run is its base",
    ),
    (["actor.distill.teacher=models/teacher", "actor.loss=sft"], "actor.distill.teacher: a teacher scores what"),
    (["actor.init.num_heads=4", "actor.init.num_kv_heads=3"], "actor.init.num_kv_heads: 3 does not divide"),
    (["actor.init.head_dim=33"], "actor.init.head_dim: 33 is odd"),
    (["gconfig.top_p=0.8"], "gconfig.top_p: training needs top_p=1, not 0.8"),
    (["gconfig.top_k=50"], "gconfig.top_k: training needs top_k=0"),
    (["gconfig.min_new_tokens=1"], "gconfig.min_new_tokens: training needs 0, not 1"),
    (["gconfig.greedy=true"], "gconfig.greedy: training needs sampling"),
    (["train_dataset.path="], "train_dataset.path: empty"),
    (
        ["actor.use_decoupled_loss=false", "actor.prox_logp_method=loglinear"],
        "actor.prox_logp_method: loglinear is for the decoupled loss",
    ),
    (["actor.prox_logp_error=true", "actor.ppo_n_minibatches=2"], "actor.prox_logp_error: compares"),
    (["actor.prox_logp_error=true", "actor.prox_logp_method=loglinear"], "actor.prox_logp_error: compares"),
    (["actor.recompute_logprob=false"], "actor.use_decoupled_loss: needs the proximal policy's log-probs"),
    (
        ["rollout.max_head_offpolicyness=0", "rollout.max_concurrent_rollouts=4", "train_dataset.batch_size=8"],
        "rollout.max_concurrent_rollouts: 4 is less than a batch of 8 prompts",
    ),
    (["actor.ppo_n_minibatches=9", "train_dataset.batch_size=8"], "actor.ppo_n_minibatches: 9 minibatches of a batch of 8"),
    (
        ["actor.mb_spec.max_tokens_per_row=600", "train_dataset.max_length=89"],
        "actor.mb_spec.max_tokens_per_row: 600 cannot hold",
    ),
    (["actor.mb_spec.max_tokens_per_row=512"], "actor.mb_spec.max_tokens_per_row: 512 cannot hold"),
    (["gconfig.n_samples=1", "actor.adv_estimator=rloo"], "gconfig.n_samples: adv_estimator=rloo"),
    (["gconfig.n_samples=1"], "gconfig.n_samples: a group of 1 minus its own mean"),
    (["gconfig.n_samples=1", "actor.reward_norm.mean_level=batch"], "gconfig.n_samples: a group of 1 has no spread"),
    (
        [
            "gconfig.n_samples=1",
            "actor.reward_norm.mean_level=batch",
            "actor.reward_norm.std_level=none",
            "actor.reward_norm.mean_leave1out=true",
        ],
        "gconfig.n_samples: leave-one-out",
    ),
    (
        [
            "gconfig.n_samples=1",
            "actor.reward_norm.mean_level=batch",
            "actor.reward_norm.std_level=batch",
            "rollout.should_accept_fn=mixed_rewards",
        ],
        "gconfig.n_samples: rollout.should_accept_fn=mixed_rewards",
    ),
    (["actor.importance_sampling_level=sequence", "actor.loss=cispo"], "actor.importance_sampling_level: sequence (GSPO)"),
    (["actor.importance_sampling_level=sequence"], "actor.loss_aggregation: a sequence-level ratio"),
    (["actor.loss=cispo", "actor.c_clip=3"], "actor.c_clip: the dual clip belongs to"),
    (["actor.adv_estimator=gae", "critic.optimizer.lr=0"], "critic.optimizer.lr: adv_estimator=gae learns a critic"),
    (
        ["actor.adv_estimator=gae", "critic.ppo_n_minibatches=9", "train_dataset.batch_size=8"],
        "critic.ppo_n_minibatches: 9 minibatches",
    ),
    (["actor.adv_estimator=gae"], "actor.reward_norm: adv_estimator=gae has a critic as its baseline"),
    (
        ["actor.overlong_reward_penalty=true", "actor.overlong_penalty_factor=1"],
        "actor.overlong_tokens: overlong_reward_penalty",
    ),
    (["actor.overlong_reward_penalty=true", "actor.overlong_tokens=64"], "actor.overlong_penalty_factor: 0 makes"),
    (["evaluator.freq_steps=5"], "valid_dataset.path: the evaluator is on and has no data"),
    (["rollout.episode_timeout=1800"], "rollout.episode_timeout: 1800 s is not less than recover.hang_timeout"),
    (["rollout.request_timeout=1200"], "rollout.request_timeout: 1200 s is not less than rollout.episode_timeout=1200"),
    (["evaluator.best=eval-rollout/reward"], "evaluator.best: chooses among evaluations, of which there are none"),
    ([*EVALUATED, "evaluator.best=x", "evaluator.overlap=true"], "evaluator.best: scores one checkpoint"),
    ([*EVALUATED, "evaluator.overlap=true", "rollout.max_head_offpolicyness=0"], "evaluator.overlap: a synchronous run"),
    (["valid_datasets.math.path=data"], "valid_datasets: are beside valid_dataset, which has no path"),
    (["gconfig.min_new_tokens=1", "evaluator.max_new_tokens=1", "gconfig.min_new_tokens=2"], "evaluator.max_new_tokens: 1 is"),
    (["evaluator.n_samples=4", "evaluator.greedy=false", "evaluator.ks=2,5"], "evaluator.ks: (2, 5) needs as many samples"),
    (["evaluator.n_samples=4"], "evaluator.n_samples: 4 greedy completions"),
]


@pytest.mark.parametrize(("overrides", "expected"), BROKEN, ids=[expected for _, expected in BROKEN])
def test_every_rule_refuses_what_breaks_it(overrides, expected):
    assert refusal(*overrides).startswith(expected)


def test_no_rule_is_untested():
    """Each rule is the first that some case of the table breaks."""
    fired = set()
    for overrides, _ in BROKEN:
        config = config_with(*overrides)
        rules = RULES
        fired.add(next(i for i, rule in enumerate(rules) if rule.broken(config)))
    assert fired == set(range(len(RULES)))


@pytest.mark.parametrize("name", ["reward", "pass_rate", "a-b", "valid_dataset"])
def test_a_set_has_a_name_of_its_own(name):
    with pytest.raises(UserError, match=rf"^valid_datasets\.{name}: no name for a set"):
        config_checks.check(config_with(f"valid_datasets.{name}.split=dev"))


@pytest.mark.parametrize(
    ("best", "is_known"),
    [
        ("eval-rollout/reward", True),
        ("eval-rollout/reward/avg", True),
        ("eval-rollout/math/pass@4", True),
        ("eval-reward/math/brief", True),
        ("eval-rollout/failed/reward_error", True),
        ("eval-rollout/rewrd", False),
        ("eval-rollout/maths/reward", False),
        ("eval-rollout/pass@2", False),
        ("rollout/reward", False),
    ],
)
def test_the_metric_that_chooses_is_known_before_the_run_but_for_components(best, is_known):
    changes = "valid_datasets.math.split=dev", "evaluator.ks=4", "evaluator.n_samples=4", "evaluator.greedy=false"
    overrides = [*EVALUATED, *changes, f"evaluator.best={best}"]
    if is_known:
        config_checks.check(config_with(*overrides))
    else:
        assert refusal(*overrides).startswith(f"evaluator.best: an evaluation has no metric {best!r} (did you mean ")


@pytest.mark.parametrize(
    "overrides", [["actor.mb_spec.max_tokens_per_row=601", "train_dataset.max_length=89"], ["actor.c_clip=3"]]
)
def test_what_only_just_fits_passes(overrides):
    config_checks.check(config_with(*overrides))


def test_loglinear_supplies_the_proximal_policy():
    config_checks.check(config_with("actor.recompute_logprob=false", "actor.prox_logp_method=loglinear"))


def test_supervised_training_has_no_sampling_rules():
    config_checks.check(config_with("actor.loss=sft", "gconfig.n_samples=1", "gconfig.top_p=0.9"))


LEAVES = [*walk(Config()), *(leaf for cls, name in SECTIONS for leaf in walk(cls(), name))]


@pytest.mark.parametrize("leaf", [leaf for leaf in LEAVES if leaf.key.choices], ids=lambda leaf: leaf.path)
def test_choices_are_checked_and_the_nearest_is_named(leaf):
    choice = leaf.key.choices[-1]
    message = refusal(f"{leaf.path}={choice}x")
    assert message.startswith(f"{leaf.path}: no such value: '{choice}x'") and choice in message
    assert all(choice in refusal(f"{leaf.path}=12345") for choice in leaf.key.choices)


def test_every_number_has_a_range():
    """A number that no range speaks of is one that nobody thought about."""
    free = {"actor.entropy_coef", "actor.reward_bias", "actor.reward_scaling", "guard.min_reward", "evaluator.success"}
    numbers = {leaf.path for leaf in LEAVES if unwrap_optional(leaf.type)[1] in (int, float)}
    assert {leaf.path for leaf in LEAVES if leaf.key.within} == numbers - free


def test_out_of_range_numbers_are_refused():
    outside = {POSITIVE: "0", NOT_NEGATIVE: "-1", UNIT: "2", HALF_OPEN_UNIT: "0", BELOW_ONE: "1", ABOVE_ONE: "1"}
    for leaf in LEAVES:
        if within := leaf.key.within:
            message = refusal(f"{leaf.path}={outside[within]}")
            assert message.startswith(f"{leaf.path}: must be {within.text}, not ")


def test_every_default_is_allowed():
    for leaf in LEAVES:
        leaf.key.check(leaf.path, leaf.value)
