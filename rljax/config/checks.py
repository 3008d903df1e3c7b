"""Cross-checks of a config, all made before anything starts. Each error is one line.

A key's choices and range stand in the schema; rules over several keys stand here. What depends on
an engine (`jax.*`, for one) is checked by its plugin; what depends on a registry or the file system
is checked by the part that opens it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rljax.config.keys import walk
from rljax.config.registry import nearest
from rljax.config.schema import Config
from rljax.config.schema.guard import ACTIONS, BOUNDS, OF_UPDATE, UPDATE_ACTIONS
from rljax.config.schema.training import PROJECTIONS
from rljax.config.validation import check_best, validation_sets
from rljax.errors import UserError


class Rule(NamedTuple):
    """A contradiction between keys: `broken` finds it, `message` is formatted with the config as c."""

    broken: Callable[[Config], bool]
    message: str


# Rules for every run of the config.
RULES: tuple[Rule, ...] = (
    Rule(
        lambda c: c.gconfig.min_new_tokens > c.gconfig.max_new_tokens,
        "gconfig.min_new_tokens: {c.gconfig.min_new_tokens} exceeds gconfig.max_new_tokens={c.gconfig.max_new_tokens}",
    ),
    Rule(
        lambda c: "" in c.gconfig.stop,
        "gconfig.stop: has an empty string, which would end every completion before it begins",
    ),
    Rule(
        lambda c: bool(c.reward.weights) and len(c.reward.weights) != len(c.reward.names),
        "reward.weights: {c.reward.weights} has not one weight for each reward of reward.name={c.reward.name!r}",
    ),
    Rule(
        lambda c: len(set(c.reward.names)) != len(c.reward.names) or "" in c.reward.names,
        "reward.name: {c.reward.name!r} names a reward twice, or none between two commas",
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
        lambda c: bool(c.actor.distill.teacher) and c.actor.loss == "sft",
        "actor.distill.teacher: a teacher scores what the policy samples, and actor.loss=sft samples nothing "
        "(ppo or cispo, or no teacher)",
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

# Rules for reinforcement learning.
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
        lambda c: c.actor.prox_logp_method == "loglinear" and not c.actor.use_decoupled_loss,
        "actor.prox_logp_method: loglinear is for the decoupled loss; set actor.use_decoupled_loss=True",
    ),
    Rule(
        lambda c: c.actor.prox_logp_error and (c.actor.prox_logp_method != "loglinear" or c.actor.ppo_n_minibatches == 1),
        "actor.prox_logp_error: compares actor.prox_logp_method=loglinear with a score pass, after the first of "
        "actor.ppo_n_minibatches: set both (loglinear, 2 or more), or prox_logp_error=False",
    ),
    Rule(
        lambda c: c.max_in_flight < c.batch_size and c.rollout.max_head_offpolicyness == 0,
        "rollout.max_concurrent_rollouts: {c.rollout.max_concurrent_rollouts} is less than a batch of "
        "{c.batch_size} prompts (rollout.consumer_batch_size, or train_dataset.batch_size): "
        "a synchronous step waits for that many",
    ),
    Rule(
        lambda c: c.episode_timeout >= c.recover.hang_timeout,
        "rollout.episode_timeout: {c.rollout.episode_timeout:g} s is not less than "
        "recover.hang_timeout={c.recover.hang_timeout:g}, which would end the run before the episode",
    ),
    Rule(
        lambda c: c.request_timeout >= c.episode_timeout,
        "rollout.request_timeout: {c.rollout.request_timeout:g} s is not less than "
        "rollout.episode_timeout={c.episode_timeout:g}, which would end the episode before its request",
    ),
    Rule(
        lambda c: c.actor.ppo_n_minibatches > c.batch_size,
        "actor.ppo_n_minibatches: {c.actor.ppo_n_minibatches} minibatches of a batch of {c.batch_size} prompts: "
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
    # Adapters
    Rule(
        lambda c: bool(c.actor.lora.path) and c.actor.lora.rank == 0,
        "actor.lora.rank: 0 trains all weights, and actor.lora.path={c.actor.lora.path} is an adapter (its rank and alpha)",
    ),
    Rule(
        lambda c: bool(c.actor.lora.path) and c.actor.kl_ctl != 0,
        "actor.kl_ctl: the reference of a LoRA run is its base, without the adapter of actor.lora.path that it begins with "
        "(0, or merge the adapter into actor.path)",
    ),
    # Critic
    Rule(
        lambda c: c.actor.adv_estimator == "gae" and c.critic.optimizer.lr == 0,
        "critic.optimizer.lr: adv_estimator=gae learns a critic, and 0 leaves it at zero (set it, or another adv_estimator)",
    ),
    Rule(
        lambda c: c.actor.adv_estimator == "gae" and c.critic.ppo_n_minibatches > c.batch_size,
        "critic.ppo_n_minibatches: {c.critic.ppo_n_minibatches} minibatches of a batch of {c.batch_size} prompts: "
        "some would be empty",
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
        lambda c: c.evaluator.best is not None and not (c.evaluator.freq_steps or c.evaluator.freq_epochs),
        "evaluator.best: chooses among evaluations, of which there are none (evaluator.freq_steps or freq_epochs)",
    ),
    Rule(
        lambda c: c.evaluator.best is not None and c.evaluator.overlap,
        "evaluator.best: scores one checkpoint, and with evaluator.overlap an evaluation sees several (drop one of them)",
    ),
    Rule(
        lambda c: c.evaluator.overlap and c.rollout.max_head_offpolicyness == 0,
        "evaluator.overlap: a synchronous run does one thing at a time (rollout.max_head_offpolicyness=1 or more)",
    ),
)

# Rules for every evaluation, in a run or by itself.
EVALUATION_RULES: tuple[Rule, ...] = (
    Rule(
        lambda c: bool(c.valid_datasets) and not c.valid_dataset.path,
        "valid_datasets: are beside valid_dataset, which has no path (name the main set there)",
    ),
    Rule(
        lambda c: c.evaluator.max_new_tokens is not None and c.evaluator.max_new_tokens < c.gconfig.min_new_tokens,
        "evaluator.max_new_tokens: {c.evaluator.max_new_tokens} is less than gconfig.min_new_tokens={c.gconfig.min_new_tokens}",
    ),
    Rule(
        lambda c: any(not 1 <= k <= c.evaluator.n_samples for k in c.evaluator.ks),
        "evaluator.ks: {c.evaluator.ks} needs as many samples per prompt, and evaluator.n_samples is {c.evaluator.n_samples}",
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
    check_evaluation(config)
    if config.actor.loss != "sft":
        _check_rules(RL_RULES, config)
    check_best(config)


def check_evaluation(config: Config) -> None:
    """Checks the rules of evaluations. Raises UserError."""
    _check_rules(EVALUATION_RULES, config)


def check_values(config: Config) -> None:
    """Checks choices, ranges and the rules that hold for every binary. Raises UserError."""
    for _, error in wrong_values(config):
        raise error
    _check_rules(RULES, config)
    _check_guard(config)
    if config.actor.lora.rank:
        check_targets(config.actor.lora.target_modules)
    validation_sets(config)


def wrong_values(config: Config) -> Iterator[tuple[str, UserError]]:
    """Yields each key whose value is no choice or out of range, and the error that says so."""
    for name, values in (("", config), *config.engines.items()):
        for leaf in walk(values, name):
            try:
                leaf.key.check(leaf.path, leaf.value)
            except UserError as error:
                yield leaf.path, error


def check_targets(names: Sequence[str]) -> None:
    """Checks the names of projections that get an adapter. Raises UserError."""
    unknown = [name for name in names if name not in PROJECTIONS]
    if unknown or not names:
        what = f"no projection named {unknown[0]!r}" if unknown else "empty"
        raise UserError(f"actor.lora.target_modules: {what} (one of {', '.join(PROJECTIONS)})")


def _check_guard(config: Config) -> None:
    """Checks the names and values of `guard.actions`, and the values of `guard.rules`."""
    for bound, action in config.guard.actions.items():
        if bound not in BOUNDS:
            raise UserError(f"guard.actions.{bound}: no such bound ({nearest(bound, BOUNDS)})")
        allowed = (*ACTIONS, *UPDATE_ACTIONS) if bound in OF_UPDATE else ACTIONS
        if action not in allowed:
            raise UserError(f"guard.actions.{bound}: no such action: {action!r} (one of {', '.join(allowed)})")
    for rule, action in config.guard.rule_actions().items():
        if action not in ACTIONS:
            raise UserError(f"guard.rules.{rule}: no such action: {action!r} (one of {', '.join(ACTIONS)})")


def _check_rules(rules: tuple[Rule, ...], config: Config) -> None:
    for rule in rules:
        if rule.broken(config):
            raise UserError(rule.message.format(c=config))


def _leave_one_out(config: Config) -> bool:
    norms = (config.actor.reward_norm, config.actor.adv_norm)
    return any(norm.mean_leave1out or norm.std_leave1out for norm in norms)
