"""The runs of the library by name: healthy ones, and those with one fault each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from rljax.config.registry import nearest
from rljax.errors import UserError

LIBRARY = "rljax.experiments.bench.run_library"
REWARDS = f"{LIBRARY}.rewards"
Settings = Mapping[str, object]  # dotted key of the config -> value


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings and plant of one run of the library.

    Example: Recipe("lr_zero", "The learning rate is 0.", ("policy.no_update",), {...})
    """

    name: str
    words: str  # the fault, or what differs from the other healthy runs
    rules: tuple[str, ...] = ()  # ids that name the fault, the first in its link; none: a healthy run
    settings: Settings = dataclasses.field(default_factory=dict)  # over those of the config
    plant: str | None = None  # function of plants.py that exchanges a part of the run
    then: Settings | None = None  # settings of a second session, which goes on from the first
    model: str | None = "192"  # of MODELS: the one that it starts from; None: one that it makes itself
    teacher: str | None = None  # of MODELS: the one that it is distilled from
    config: str = "bench/broken_runs"

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that have to be there before the run."""
        return tuple(name for name in (self.model, self.teacher) if name is not None)

    @property
    def link(self) -> str | None:
        """Link of the fault; None of a healthy run."""
        return self.rules[0].partition(".")[0] if self.rules else None


DR_GRPO: Settings = {
    "actor.reward_norm.std_level": "none",
    "actor.loss_aggregation": "seq-mean-token-sum",
    "actor.loss_aggregation_constant": 5,
}
PPO: Settings = {
    "actor.adv_estimator": "gae",
    "actor.gae_lambda": 0.95,
    "actor.reward_norm.mean_level": "none",
    "actor.reward_norm.std_level": "none",
    "actor.adv_norm.mean_level": "batch",
    "actor.adv_norm.std_level": "batch",
    "critic.optimizer.lr": 1e-3,
    "reward.name": f"{REWARDS}:where_possible",
    "critic.eps_clip_value": 0.2,
    "critic.ppo_n_minibatches": 2,
    "gconfig.n_samples": 1,
    "train_dataset.batch_size": 256,
}
LONG: Settings = {"gconfig.max_new_tokens": 12, "jax.context_length": 24}  # room for a completion to grow


class Model(NamedTuple):
    """Model that runs start from: the end of a config's supervised warm-up."""

    settings: Settings  # over those of the config
    config: str = "quickstart"


MODELS: Mapping[str, Model] = {
    **{str(size): Model({"actor.init.hidden_size": size}) for size in (128, 192, 256)},
    "talkative": Model({"train_dataset.type": f"{LIBRARY}.demonstrations:talkative"}),
    "teacher": Model({"train_dataset.task.misled": 0.0}),
    "guesser": Model({}, "guess_number"),
    "guessing_agent": Model({}, "guess_number_agent"),
}
SHORT: Settings = {"total_train_steps": 40}  # enough for faults that are there from the first steps on
LAG = "rollout.max_head_offpolicyness"
GAME: Settings = {  # reinforcement alone and at a lower rate, as configs/bench/broken_runs.py has it, of another config
    "actor.optimizer.lr": 2e-4,
    "actor.optimizer.lr_scheduler_type": "constant",
    "actor.optimizer.warmup_steps_proportion": 0.0,
    "actor.init_from_scratch": False,
    "warmup.steps": 0,
    "evaluator.freq_steps": 10,
    "saver.freq_steps": None,
    "saver.export_final": False,
    "stats_logger.samples_per_step": 8,
}

HEALTHY = (
    Recipe("grpo", "GRPO, lag 2: the base of the others."),
    Recipe("grpo_sync", "Synchronous.", settings={LAG: 0}),
    Recipe(
        "grpo_kl",
        "Lag 4, and a KL to the initial model in the loss.",
        settings={LAG: 4, "actor.kl_ctl": 0.001, "actor.loss_aggregation": "seq-mean-token-mean"},
    ),
    Recipe("dr_grpo", "Dr. GRPO, synchronous.", settings={**DR_GRPO, LAG: 0}),
    Recipe("rloo", "RLOO, lag 1.", settings={"actor.adv_estimator": "rloo", LAG: 1}),
    Recipe("ppo", "PPO with a critic, lag 1.", settings={**PPO, LAG: 1}),
    Recipe(
        "gspo",
        "GSPO, lag 2.",
        settings={
            "actor.importance_sampling_level": "sequence",
            "actor.loss_aggregation": "seq-mean-token-mean",
            "actor.eps_clip": 0.1,
            "actor.eps_clip_higher": 0.13,
        },
    ),
    Recipe(
        "dapo",
        "Dynamic sampling and clip-higher, lag 2.",
        settings={"actor.eps_clip_higher": 0.28, "rollout.should_accept_fn": "mixed_rewards"},
    ),
    Recipe(
        "reinforce_pp",
        "REINFORCE++ with a KL in the reward, lag 2.",
        settings={
            "actor.adv_estimator": "reinforce_pp",
            "actor.reward_norm.mean_level": "none",
            "actor.reward_norm.std_level": "none",
            "actor.adv_norm.mean_level": "batch",
            "actor.adv_norm.std_level": "batch",
            "actor.kl_ctl": 0.001,
            "actor.kl_estimator": "k1",
            "actor.kl_placement": "reward",
            "gconfig.n_samples": 1,
            "train_dataset.batch_size": 256,
        },
    ),
    Recipe(
        "small_model",
        "A smaller model, 64 prompts of 4 samples.",
        model="128",
        settings={
            "train_dataset.batch_size": 64,
            "gconfig.n_samples": 4,
        },
    ),
    Recipe(
        "large_model",
        "A larger model, 16 prompts of 16 samples, lag 4.",
        model="256",
        settings={
            "train_dataset.batch_size": 16,
            "gconfig.n_samples": 16,
            LAG: 4,
        },
    ),
    Recipe(
        "one_minibatch",
        "One optimizer step per batch, and a greedy evaluation.",
        settings={
            "actor.ppo_n_minibatches": 1,
            "evaluator.greedy": True,
        },
    ),
    Recipe("long_lag", "Tokens up to 8 versions old.", settings={**SHORT, LAG: 8, "rollout.max_concurrent_rollouts": 192}),
    Recipe(
        "lora",
        "Adapters of rank 8 are trained, and nothing else.",
        settings={**SHORT, "actor.lora.rank": 8, "actor.lora.alpha": 16, "actor.optimizer.lr": 2e-3},
    ),
    Recipe(
        "components",
        "Three components with weights of their own: the answer, its digits, its length.",
        settings={**SHORT, "reward.name": f"{REWARDS}:by_digits"},
    ),
    Recipe(
        "distill",
        "On-policy distillation of a teacher, without the reward.",
        settings={
            **SHORT,
            "actor.distill.coef": 1.0,
            "actor.reward_scaling": 0.0,
            "actor.loss_aggregation": "token-mean",
        },
        teacher="teacher",
    ),
    Recipe(
        "sft",
        "Supervised training, evaluated on samples.",
        settings={
            "actor.init_from_scratch": True,
            "actor.loss": "sft",
            "warmup.field": "answer",
            "train_dataset.batch_size": 64,
            "actor.optimizer.lr": 2e-3,
            "total_train_steps": 150,
            "evaluator.freq_steps": 30,
        },
        model=None,
    ),
    Recipe(
        "retry",
        "A wrong answer is followed by one more attempt.",
        settings={
            **SHORT,
            "rollout.workflow": "multi_turn",
            "rollout.workflow_args.feedback": "?",
            "jax.context_length": 32,
        },
    ),
    Recipe(
        "guess_number",
        "An environment of several turns, and its warm-up; games are joined midway in training, and not in evaluations.",
        settings={"saver.freq_steps": None, "saver.export_final": False, "stats_logger.samples_per_step": 8},
        model=None,
        config="guess_number",
    ),
    Recipe(
        "guess_number_by_turn",
        "The same games as trajectories of one turn each, several per episode.",
        settings={**GAME, "total_train_steps": 60, "rollout.workflow_args.credit": "turn"},
        model="guesser",
        config="guess_number",
    ),
    Recipe(
        "guess_number_agent",
        "An agent plays over the OpenAI endpoint.",
        settings={**GAME, "total_train_steps": 50},
        model="guessing_agent",
        config="guess_number_agent",
    ),
    Recipe(
        "two_sums",
        "An environment that asks two sums, and pays for each.",
        settings={
            **SHORT,
            "rollout.workflow": "environment",
            "train_dataset.path": f"task:environment/{LIBRARY}.environments:Sums",
            "valid_dataset.path": f"task:environment/{LIBRARY}.environments:Sums",
            "train_dataset.task": {"n": 3000},
            "valid_dataset.task": {"n": 256},
            "jax.context_length": 48,
        },
    ),
)

FAULTS = (
    Recipe(
        "reward_changed_midway",
        "The run goes on with another reward after 35 steps.",
        ("context.changed",),
        {"total_train_steps": 35},
        then={"total_train_steps": 70, "reward.name": f"{REWARDS}:template"},
    ),
    # Environment and data
    Recipe(
        "trained_prompts",
        "The workflow marks prompts as trained on.",
        ("environment.foreign_tokens",),
        plant="trained_prompts",
    ),
    Recipe(
        "truncated",
        "max_new_tokens is too small for an answer and its end.",
        ("environment.truncation",),
        {"gconfig.max_new_tokens": 2},
    ),
    Recipe(
        "duplicate_prompts",
        "The training set is the same eight prompts again and again.",
        ("environment.duplicate_prompts",),
        {"train_dataset.limit": 8, "total_train_epochs": 1000},
    ),
    Recipe(
        "one_of_group",
        "The workflow gives up all episodes of a prompt but one: groups of one.",
        ("environment.small_groups",),
        SHORT,
        plant="one_of_group",
    ),
    Recipe("reversed_reward", "The reward counts errors.", ("reward.sign",), {"reward.name": f"{REWARDS}:errors"}),
    Recipe(
        "reward_x1000",
        "The reward is a thousand times too large, and nothing normalizes it.",
        ("reward.scale",),
        {**DR_GRPO, "reward.name": f"{REWARDS}:thousandfold"},
    ),
    # Evaluation
    Recipe(
        "evaluated_hotter",
        "Evaluations sample at temperature 2.5, training at 1.",
        ("evaluation.protocol",),
        {"evaluator.temperature": 2.5},
    ),
    Recipe(
        "evaluated_on_training_set",
        "Evaluations use the prompts that are trained on.",
        ("evaluation.same_data",),
        {"valid_dataset.split": "train"},
    ),
    Recipe(
        "failing_evaluations",
        "Evaluations fail on the hard half of their prompts, and leave it out.",
        ("evaluation.failed",),
        plant="failing_evaluations",
    ),
    Recipe(
        "evaluation_changed_midway",
        "The run goes on with greedy evaluations after 20 steps.",
        (
            "evaluation.protocol_changed",
            "context.changed",
        ),
        {"total_train_steps": 20},
        then={"total_train_steps": 40, "evaluator.greedy": True},
    ),
    # Reward
    Recipe(
        "all_zero", "The reward looks for another format.", ("reward.all_zero",), {**SHORT, "reward.name": f"{REWARDS}:never"}
    ),
    Recipe("all_one", "The reward accepts any text.", ("reward.all_one",), {**SHORT, "reward.name": f"{REWARDS}:always"}),
    Recipe(
        "reads_the_prompt",
        "The reward depends on the prompt alone.",
        ("reward.constant_by_prompt",),
        {**SHORT, "reward.name": f"{REWARDS}:of_the_prompt"},
    ),
    Recipe(
        "timeouts_as_zeros",
        "A reward that ran out of time counts as a wrong answer.",
        ("environment.timeouts_as_zeros",),
        {
            **SHORT,
            "reward.name": f"{REWARDS}:hanging",
            "reward.timeout": 0.3,
            "rollout.workflow": f"{REWARDS}:ZeroOnTimeout",
        },
    ),
    Recipe(
        "length_hack",
        "The reward pays for length.",
        (
            "reward.length",
            "reward.components_apart",
            "reward.hacking",
        ),
        {**SHORT, **LONG, "reward.name": f"{REWARDS}:longer"},
        "evaluated_by_answer",
        model="talkative",
    ),
    Recipe(
        "repetition_hack",
        "The reward pays for repetition.",
        (
            "reward.repetition",
            "reward.components_apart",
            "reward.hacking",
            "reward.length",
        ),
        {**SHORT, **LONG, "reward.name": f"{REWARDS}:repetitive"},
        "evaluated_by_answer",
        model="talkative",
    ),
    Recipe(
        "template_hack",
        "The reward pays for an opening.",
        (
            "reward.template",
            "reward.components_apart",
            "reward.hacking",
        ),
        {**SHORT, **LONG, "reward.name": f"{REWARDS}:template"},
        "evaluated_by_answer",
        model="talkative",
    ),
    # Policy update
    Recipe(
        "lr_x100",
        "The learning rate is a hundred times too high.",
        (
            "policy.kl",
            "policy.clip_ratio",
            "policy.importance_weight",
        ),
        {**SHORT, "actor.optimizer.lr": 1e-2},
    ),
    Recipe("lr_zero", "The learning rate is 0.", ("policy.no_update",), {**SHORT, "actor.optimizer.lr": 0.0}),
    Recipe(
        "clipped_to_nothing",
        "Gradients are clipped to a norm of 1e-9.",
        ("policy.no_update",),
        {**SHORT, "actor.optimizer.gradient_clipping": 1e-9},
    ),
    Recipe(
        "many_minibatches",
        "32 optimizer steps per batch.",
        (
            "policy.kl",
            "policy.clip_ratio",
            "policy.importance_weight",
        ),
        {**SHORT, "actor.ppo_n_minibatches": 32},
    ),
    Recipe(
        "repeated_updates",
        "Every minibatch is trained on eight times.",
        (
            "policy.kl",
            "policy.clip_ratio",
            "policy.importance_weight",
        ),
        SHORT,
        plant="repeated_updates",
    ),
    Recipe(
        "forgetful_optimizer",
        "The optimizer's moments are reset before every update.",
        (
            "policy.optimizer_reset",
            "policy.kl",
        ),
        SHORT,
        plant="forgetful_optimizer",
    ),
    Recipe(
        "drift",
        "The reward is a coin, actor.kl_ctl 0: nothing holds the policy.",
        (
            "policy.drift",
            "policy.no_progress",
        ),
        {"actor.kl_ctl": 0.0, "actor.optimizer.lr": 5e-4, "reward.name": f"{REWARDS}:coin"},
        plant="evaluated_by_answer",
    ),
    Recipe(
        "kl_too_strong",
        "The KL to the initial model outweighs the reward.",
        (
            "policy.no_update",
            "policy.reference_kl",
        ),
        {**SHORT, "actor.kl_ctl": 20.0},
    ),
    Recipe(
        "reversed_loss",
        "The loss has the wrong sign.",
        ("policy.reversed",),
        SHORT,
        plant="reversed_loss",
    ),
    Recipe(
        "advantages_of_others",
        "Advantages are one trajectory off.",
        ("policy.no_progress",),
        SHORT,
        plant="advantages_of_others",
    ),
    Recipe(
        "other_temperature",
        "The sampler's temperature is 1.5, the learner's 1.",
        (
            "policy.sampler_disagrees",
            "policy.behave_imp_weight",
        ),
        SHORT,
        plant="other_temperature",
    ),
    Recipe(
        "other_rope_base",
        "The sampler's rotary embeddings have another base.",
        (
            "policy.sampler_disagrees",
            "policy.behave_imp_weight",
        ),
        SHORT,
        plant="other_rope_base",
    ),
    Recipe(
        "quantized_sampler",
        "The sampler's weights have 3 bits.",
        (
            "policy.sampler_disagrees",
            "policy.behave_imp_weight",
        ),
        settings={**SHORT, LAG: 0},
        plant="quantized_sampler",
    ),
    # Critic
    Recipe(
        "returns_of_others",
        "The critic's targets are one trajectory off.",
        ("critic.explained_variance",),
        {**SHORT, **PPO},
        "returns_of_others",
    ),
    Recipe(
        "returns_x100",
        "The critic's targets are a hundred times too large.",
        (
            "critic.scale",
            "critic.explained_variance",
        ),
        {**SHORT, **PPO},
        "returns_x100",
    ),
    Recipe(
        "frozen_critic",
        "The critic's learning rate is 1e-9.",
        (
            "critic.loss_flat",
            "critic.explained_variance",
        ),
        {**SHORT, **PPO, "critic.optimizer.lr": 1e-9},
    ),
    # Exploration
    Recipe(
        "entropy_penalty",
        "The entropy bonus has the wrong sign.",
        (
            "exploration.entropy_collapse",
            "exploration.entropy_floor",
        ),
        {**SHORT, "actor.entropy_coef": -5.0},
    ),
    Recipe(
        "entropy_bonus",
        "The entropy bonus outweighs the reward.",
        (
            "exploration.entropy_rises",
            "exploration.entropy_never_falls",
        ),
        {**SHORT, "actor.entropy_coef": 5.0},
    ),
    Recipe(
        "one_seed",
        "The samples of a prompt all have the same seed.",
        ("exploration.identical_completions",),
        SHORT,
        plant="one_seed",
    ),
    # Freshness
    Recipe(
        "never_published", "The sampler keeps its first weights.", ("freshness.stale_weights",), SHORT, plant="never_published"
    ),
    Recipe(
        "rarely_published", "The sampler gets one version in 15.", ("freshness.stale_weights",), SHORT, plant="rarely_published"
    ),
    Recipe(
        "large_lag",
        "Tokens may be 48 versions old.",
        (
            "freshness.lag_bound",
            "freshness.stale_weights",
        ),
        {**SHORT, LAG: 48, "rollout.max_concurrent_rollouts": 512},
    ),
    # Numbers
    Recipe(
        "not_a_number",
        "One advantage of each batch is NaN from step 20 on.",
        ("numbers.not_finite",),
        SHORT,
        plant="not_a_number",
    ),
    Recipe(
        "gradient_spikes",
        "One gradient in 15 is ten thousand times too large.",
        ("numbers.grad_norm",),
        SHORT,
        plant="gradient_spikes",
    ),
    Recipe(
        "reward_outliers",
        "One prompt in 200 pays a million.",
        (
            "numbers.outlier_rewards",
            "reward.long_tail",
        ),
        {**SHORT, **DR_GRPO, "reward.name": f"{REWARDS}:with_outliers"},
    ),
    # Resources
    Recipe(
        "slow_reward",
        "The learner waits for rewards, of which each takes 0.4 seconds.",
        ("resources.slow_reward",),
        {
            **SHORT,
            LAG: 0,
            "reward.name": f"{REWARDS}:slow",
            "reward.workers": 1,
        },
    ),
    Recipe("leaking_learner", "Every update keeps 24 MB.", ("resources.memory_growth",), SHORT, plant="leaking_learner"),
    Recipe(
        "slowing_sampler",
        "Synchronous; requests take five seconds from version 25 on.",
        ("resources.throughput_drop",),
        {**SHORT, LAG: 0},
        plant="slowing_sampler",
    ),
)
RECIPES: Mapping[str, Recipe] = {recipe.name: recipe for recipe in (*HEALTHY, *FAULTS)}


def find(name: str) -> Recipe:
    """Returns the recipe of a name. Raises UserError for an unknown one."""
    if name not in RECIPES:
        raise UserError(f"{name}: no such run ({nearest(name, RECIPES)}; --list has them all)")
    return RECIPES[name]
