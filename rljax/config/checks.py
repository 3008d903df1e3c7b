"""Cross-checks of a config, all made before anything starts. Each is one line with the culprit and the remedy.

Three tables: the words a key may be, the range a number must lie in, and rules over several keys. What depends on an
engine (`jax.*`, say) is checked by its plugin; what depends on a registry or the file system by the part that opens it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rljax.config.allocation import Allocation
from rljax.config.registry import nearest
from rljax.config.schema import Config
from rljax.errors import UserError

WORDS: Mapping[str, tuple[str, ...]] = {
    "rollout.stale_policy": ("drop", "mask"),
    "actor.init.architecture": ("llama", "qwen2", "qwen3", "gemma3"),
    "actor.dtype": ("float32", "bfloat16"),
    "actor.gradient_checkpointing": ("auto", "none", "full", "dots"),
    "actor.optimizer.type": ("adamw",),
    "actor.optimizer.lr_scheduler_type": ("constant", "linear", "cosine"),
    "actor.loss": ("ppo", "cispo", "sft"),
    "actor.importance_sampling_level": ("token", "sequence"),
    "actor.loss_aggregation": ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"),
    "actor.prox_logp_method": ("recompute", "loglinear"),
    "actor.behav_imp_weight_mode": ("clamp", "mask"),
    "actor.behav_imp_weight_level": ("token", "sequence"),
    "actor.kl_estimator": ("k1", "k2", "k3"),
    "actor.kl_placement": ("reward", "loss"),
    "actor.adv_estimator": ("grpo", "rloo", "reinforce_pp", "gae"),
    "actor.reward_norm.mean_level": ("batch", "group", "none"),
    "actor.reward_norm.std_level": ("batch", "group", "none"),
    "actor.adv_norm.mean_level": ("batch", "group", "none"),
    "actor.adv_norm.std_level": ("batch", "group", "none"),
    "critic.optimizer.type": ("adamw",),
    "critic.optimizer.lr_scheduler_type": ("constant", "linear", "cosine"),
    "warmup.optimizer.type": ("adamw",),
    "warmup.optimizer.lr_scheduler_type": ("constant", "linear", "cosine"),
    "recover.mode": ("auto", "fresh"),
    "jax.attention": ("auto", "cudnn", "splash", "tokamax", "xla"),
    "jax.cache_dtype": ("float32", "bfloat16"),
    "jax.sampler_dtype": ("float32", "bfloat16"),
    "sglang.dtype": ("auto", "bfloat16", "float32", "float16"),
}


class Range(NamedTuple):
    """A range in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


POSITIVE = Range("positive", lambda x: x > 0)
NOT_NEGATIVE = Range("0 or more", lambda x: x >= 0)
UNIT = Range("in [0, 1]", lambda x: 0 <= x <= 1)
HALF_OPEN_UNIT = Range("in (0, 1]", lambda x: 0 < x <= 1)
BELOW_ONE = Range("in [0, 1)", lambda x: 0 <= x < 1)
ABOVE_ONE = Range("above 1", lambda x: x > 1)

# None, where a key allows it, is in every range.
RANGES: Mapping[Range, tuple[str, ...]] = {
    POSITIVE: (
        "total_train_epochs",
        "gconfig.n_samples",
        "gconfig.max_new_tokens",
        "gconfig.temperature",
        "reward.workers",
        "reward.timeout",
        "rollout.max_concurrent_rollouts",
        "rollout.consumer_batch_size",
        "rollout.request_timeout",
        "actor.init.hidden_size",
        "actor.init.intermediate_size",
        "actor.init.num_layers",
        "actor.init.num_heads",
        "actor.init.num_kv_heads",
        "actor.init.head_dim",
        "actor.init.max_position_embeddings",
        "actor.init.initializer_range",
        "actor.mb_spec.max_tokens_per_row",
        "actor.mb_spec.rows_per_mb",
        "actor.logprob_chunk",
        "actor.loss_aggregation_constant",
        "actor.behav_imp_weight_cap",
        "actor.ppo_n_minibatches",
        "actor.reward_clip",
        "actor.lora.alpha",
        "critic.ppo_n_minibatches",
        "critic.eps_clip_value",
        "warmup.batch_size",
        "train_dataset.batch_size",
        "train_dataset.max_length",
        "train_dataset.limit",
        "valid_dataset.batch_size",
        "valid_dataset.max_length",
        "valid_dataset.limit",
        "saver.freq_steps",
        "saver.freq_epochs",
        "saver.keep_last",
        "evaluator.freq_steps",
        "evaluator.freq_epochs",
        "evaluator.n_samples",
        "evaluator.temperature",
        "evaluator.max_prompts",
        "recover.max_consecutive_failures",
        "recover.max_prompt_failures",
        "recover.max_consecutive_rejected",
        "recover.hang_timeout",
        "guard.patience",
        "guard.max_approx_kl",
        "guard.max_grad_norm",
        "guard.max_behave_imp_weight",
        "guard.min_behave_imp_weight",
        "jax.slots",
        "jax.context_length",
        "jax.prefill_chunk",
        "jax.decode_steps",
        "sglang.context_length",
        "sglang.max_running_requests",
        "sglang.stream_interval",
        "sglang.bucket_mb",
        "sglang.start_timeout",
        "serve.max_requests",
        "serve.max_body_mb",
    ),
    NOT_NEGATIVE: (
        "seed",
        "total_train_steps",
        "gconfig.min_new_tokens",
        "gconfig.top_k",
        "evaluator.top_k",
        "reward.memory_mb",
        "reward.retries",
        "rollout.max_head_offpolicyness",
        "rollout.request_retries",
        "rollout.workers",
        "actor.eps_clip_higher",
        "actor.kl_ctl",
        "actor.lora.rank",
        "actor.overlong_tokens",
        "actor.overlong_penalty_factor",
        "actor.reward_norm.eps",
        "actor.reward_norm.std_floor",
        "actor.adv_norm.eps",
        "actor.adv_norm.std_floor",
        "warmup.steps",
        "guard.min_entropy",
        "stats_logger.samples_per_step",
        "sglang.restarts",
        "jax.processes",
        "serve.port",
        *(
            f"{part}.optimizer.{key}"
            for part in ("actor", "critic", "warmup")
            for key in ("lr", "weight_decay", "gradient_clipping")
        ),
    ),
    UNIT: (
        "actor.eps_clip",
        "guard.max_no_eos_ratio",
        "actor.discount",
        "actor.gae_lambda",
        *(
            f"{part}.optimizer.{key}"
            for part in ("actor", "critic", "warmup")
            for key in ("min_lr_ratio", "warmup_steps_proportion")
        ),
    ),
    HALF_OPEN_UNIT: ("gconfig.top_p", "evaluator.top_p", "sglang.mem_fraction_static"),
    BELOW_ONE: tuple(f"{part}.optimizer.{beta}" for part in ("actor", "critic", "warmup") for beta in ("beta1", "beta2")),
    ABOVE_ONE: ("actor.c_clip",),
}


class Rule(NamedTuple):
    """Keys that contradict each other: `broken` decides, and `message` is formatted
    with c, the config, and batch, its prompts an update."""

    broken: Callable[[Config], bool]
    message: str


# They hold for any run of the config.
RULES: tuple[Rule, ...] = (
    Rule(
        lambda c: c.gconfig.min_new_tokens > c.gconfig.max_new_tokens,
        "gconfig.min_new_tokens: {c.gconfig.min_new_tokens} exceeds gconfig.max_new_tokens={c.gconfig.max_new_tokens}",
    ),
    Rule(
        lambda c: not c.actor.path and not c.actor.init_from_scratch,
        "actor.path: empty (name a Hugging Face model directory, or set actor.init_from_scratch=True)",
    ),
    Rule(
        lambda c: bool(c.actor.path) and c.actor.init_from_scratch,
        "actor.path: {c.actor.path!r} would be ignored by actor.init_from_scratch=True (drop one of them)",
    ),
    Rule(
        lambda c: c.actor.init.num_heads % c.actor.init.num_kv_heads != 0,
        "actor.init.num_kv_heads: {c.actor.init.num_kv_heads} does not divide actor.init.num_heads={c.actor.init.num_heads}",
    ),
    Rule(
        lambda c: c.actor.init.head_dim % 2 != 0,
        "actor.init.head_dim: {c.actor.init.head_dim} is odd (rotary embeddings turn pairs)",
    ),
)

# They hold where a policy is trained by reinforcement on what it samples.
RL_RULES: tuple[Rule, ...] = (
    Rule(
        lambda c: c.gconfig.top_p < 1,
        "gconfig.top_p: training needs top_p=1, not {c.gconfig.top_p}: the learner scores the full softmax, "
        "and a truncated one would bias every importance ratio (evaluator.top_p is free)",
    ),
    Rule(
        lambda c: c.gconfig.top_k > 0,
        "gconfig.top_k: training needs top_k=0 (no limit), not {c.gconfig.top_k}: the learner scores the full softmax, "
        "and a truncated one would bias every importance ratio (evaluator.top_k is free)",
    ),
    Rule(
        lambda c: c.gconfig.min_new_tokens > 0,
        "gconfig.min_new_tokens: training needs 0, not {c.gconfig.min_new_tokens}: banning the stop ids changes the "
        "distribution that is sampled, and the learner scores the full softmax",
    ),
    Rule(
        lambda c: c.gconfig.greedy,
        "gconfig.greedy: training needs sampling (greedy=False, gconfig.temperature > 0): an argmax has no importance ratio",
    ),
    Rule(
        lambda c: not c.train_dataset.path,
        "train_dataset.path: empty (a directory with train.jsonl, a .jsonl or .parquet file, or task:NAME)",
    ),
    Rule(
        lambda c: c.actor.use_decoupled_loss and not c.actor.recompute_logprob and c.actor.prox_logp_method != "loglinear",
        "actor.use_decoupled_loss: needs the proximal policy's log-probs: set actor.recompute_logprob=True, "
        "or actor.prox_logp_method=loglinear",
    ),
    Rule(
        lambda c: c.actor.prox_logp_error and (c.actor.prox_logp_method != "loglinear" or c.actor.ppo_n_minibatches == 1),
        "actor.prox_logp_error: compares actor.prox_logp_method=loglinear with a score pass, after the first of "
        "actor.ppo_n_minibatches: set both (loglinear, 2 or more), or prox_logp_error=False",
    ),
    Rule(
        lambda c: _concurrent(c) < _batch(c) and c.rollout.max_head_offpolicyness == 0,
        "rollout.max_concurrent_rollouts: {c.rollout.max_concurrent_rollouts} is less than a batch of "
        "{batch} prompts (rollout.consumer_batch_size, or train_dataset.batch_size): "
        "a synchronous step waits for that many",
    ),
    Rule(
        lambda c: c.actor.ppo_n_minibatches > _batch(c),
        "actor.ppo_n_minibatches: {c.actor.ppo_n_minibatches} minibatches of a batch of {batch} prompts: "
        "some would be empty (fewer, or a larger rollout.consumer_batch_size)",
    ),
    Rule(
        lambda c: c.actor.mb_spec.max_tokens_per_row < c.gconfig.max_new_tokens + (c.train_dataset.max_length or 1),
        "actor.mb_spec.max_tokens_per_row: {c.actor.mb_spec.max_tokens_per_row} cannot hold a prompt "
        "(train_dataset.max_length={c.train_dataset.max_length}) and gconfig.max_new_tokens={c.gconfig.max_new_tokens} tokens",
    ),
    # Groups
    Rule(
        lambda c: c.gconfig.n_samples == 1 and c.actor.adv_estimator == "rloo",
        "gconfig.n_samples: adv_estimator=rloo compares the samples of a prompt and needs at least 2",
    ),
    Rule(
        lambda c: c.gconfig.n_samples == 1 and "group" in (c.actor.reward_norm.mean_level, c.actor.adv_norm.mean_level),
        "gconfig.n_samples: a group of 1 minus its own mean is always 0: at least 2, or mean_level=batch or none "
        "in actor.reward_norm and actor.adv_norm",
    ),
    Rule(
        lambda c: c.gconfig.n_samples == 1 and "group" in (c.actor.reward_norm.std_level, c.actor.adv_norm.std_level),
        "gconfig.n_samples: a group of 1 has no spread: at least 2, or std_level=batch or none "
        "in actor.reward_norm and actor.adv_norm",
    ),
    Rule(
        lambda c: _leave_one_out(c) and c.gconfig.n_samples == 1,
        "gconfig.n_samples: leave-one-out needs at least 2 samples a prompt (or mean_leave1out=False, std_leave1out=False)",
    ),
    Rule(
        lambda c: c.rollout.should_accept_fn == "mixed_rewards" and c.gconfig.n_samples == 1,
        "gconfig.n_samples: rollout.should_accept_fn=mixed_rewards would reject every group of 1: at least 2",
    ),
    # Objectives
    Rule(
        lambda c: c.actor.importance_sampling_level == "sequence" and c.actor.loss != "ppo",
        "actor.importance_sampling_level: sequence (GSPO) is a form of actor.loss=ppo, not of {c.actor.loss}",
    ),
    Rule(
        lambda c: c.actor.importance_sampling_level == "sequence" and c.actor.loss_aggregation != "seq-mean-token-mean",
        "actor.loss_aggregation: a sequence-level ratio (GSPO) is averaged over sequences: "
        "seq-mean-token-mean, not {c.actor.loss_aggregation}",
    ),
    Rule(
        lambda c: c.actor.loss == "cispo" and c.actor.c_clip is not None,
        "actor.c_clip: the dual clip belongs to actor.loss=ppo; None with cispo",
    ),
    # Critic
    Rule(
        lambda c: c.actor.adv_estimator == "gae" and c.critic.optimizer.lr == 0,
        "critic.optimizer.lr: adv_estimator=gae learns a critic, and 0 leaves it at zero (set it, or another adv_estimator)",
    ),
    Rule(
        lambda c: c.actor.adv_estimator == "gae" and c.critic.ppo_n_minibatches > _batch(c),
        "critic.ppo_n_minibatches: {c.critic.ppo_n_minibatches} minibatches of a batch of {batch} prompts: some would be empty",
    ),
    Rule(
        lambda c: c.actor.adv_estimator == "gae" and "group" in (c.actor.reward_norm.mean_level, c.actor.adv_norm.mean_level),
        "actor.reward_norm: adv_estimator=gae has a critic as its baseline; mean_level=group would take a second one off "
        "(batch or none, in adv_norm too)",
    ),
    # Overlong completions
    Rule(
        lambda c: c.actor.overlong_reward_penalty and not 0 < c.actor.overlong_tokens <= c.gconfig.max_new_tokens,
        "actor.overlong_tokens: overlong_reward_penalty needs a soft zone within gconfig.max_new_tokens="
        "{c.gconfig.max_new_tokens}, not {c.actor.overlong_tokens} tokens",
    ),
    Rule(
        lambda c: c.actor.overlong_reward_penalty and c.actor.overlong_penalty_factor == 0,
        "actor.overlong_penalty_factor: 0 makes overlong_reward_penalty do nothing (1.0 in DAPO)",
    ),
    # Evaluation
    Rule(
        lambda c: bool(c.evaluator.freq_steps or c.evaluator.freq_epochs) and not c.valid_dataset.path,
        "valid_dataset.path: the evaluator is on and has no data (name it, or evaluator.freq_steps=None and freq_epochs=None)",
    ),
    Rule(
        lambda c: c.evaluator.greedy and c.evaluator.n_samples > 1,
        "evaluator.n_samples: {c.evaluator.n_samples} greedy completions of a prompt are all the same: 1, "
        "or evaluator.greedy=False",
    ),
)


def check(config: Config) -> None:
    """Raises UserError on the first contradiction in a training config."""
    check_values(config)
    if config.actor.loss != "sft":
        _check_rules(RL_RULES, config)


def check_values(config: Config) -> None:
    """The checks that hold for every binary: words, ranges, and rules that have nothing to do with training."""
    for key, words in WORDS.items():
        value = _get(config, key)
        if value not in words:
            raise UserError(f"{key}: no such value: {value!r} ({nearest(value, words)})")
    for within, keys in RANGES.items():
        for key in keys:
            value = _get(config, key)
            if value is not None and not within.holds(value):
                raise UserError(f"{key}: must be {within.words}, not {value}")
    _check_rules(RULES, config)


def room_for_prompt(config: Config, pools: Allocation) -> tuple[int, str]:
    """(tokens that a prompt may have, what allows no more). A sampler ends a completion where its context is full."""
    engine = pools.sampler.engine if pools.sampler else ""
    context: int | None = getattr(getattr(config, engine, None), "context_length", None)
    row, new = config.actor.mb_spec.max_tokens_per_row, config.gconfig.max_new_tokens
    if context is not None and context <= row:
        return context - 1, f"{engine}.context_length={context} holds no completion beside it"
    most = row - new
    return most, f"actor.mb_spec.max_tokens_per_row={row} cannot hold it and gconfig.max_new_tokens={new}"


def _check_rules(rules: tuple[Rule, ...], config: Config) -> None:
    for rule in rules:
        if rule.broken(config):
            raise UserError(rule.message.format(c=config, batch=_batch(config)))


def _batch(config: Config) -> int:
    """Prompts an update."""
    return config.rollout.consumer_batch_size or config.train_dataset.batch_size


def _concurrent(config: Config) -> int:
    """Prompts in flight at most."""
    return config.rollout.max_concurrent_rollouts or (config.rollout.max_head_offpolicyness + 1) * _batch(config)


def _leave_one_out(config: Config) -> bool:
    norms = (config.actor.reward_norm, config.actor.adv_norm)
    return any(norm.mean_leave1out or norm.std_leave1out for norm in norms)


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value
