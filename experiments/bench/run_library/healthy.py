"""Healthy runs of the library: algorithms, lags, models and tasks that the doctor has to pass."""

from __future__ import annotations

from rljax.experiments.bench.run_library.recipe import DR_GRPO, GAME, LAG, LIBRARY, PPO, REWARDS, SHORT, Recipe

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
