"""Runs of the library with one fault each, by the link of the loop that it breaks."""

from __future__ import annotations

from rljax.experiments.bench.run_library.recipe import DR_GRPO, LAG, LONG, PPO, REWARDS, SHORT, Recipe

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
