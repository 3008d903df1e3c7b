"""Keys that another key switches off: set, and without any effect on the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from rljax.config.allocation import engines_of
from rljax.config.keys import walk
from rljax.config.schema import Config, OptimizerConfig

_FILES = (".jsonl", ".parquet", ".arrow")
_SUPERVISED = (  # what supervised training has no use for
    *("eps_clip", "eps_clip_higher", "c_clip", "use_decoupled_loss", "recompute_logprob", "kl_ctl", "entropy_coef"),
    *("ppo_n_minibatches", "adv_estimator", "discount", "gae_lambda", "reward_norm.", "adv_norm."),
    *("reward_bias", "reward_scaling", "reward_clip", "overlong_reward_penalty", "mask_no_eos"),
)


class Switch(NamedTuple):
    """Keys that have no effect while `is_off` holds; `because` is formatted with the config as c.

    A key that ends with a dot is a section: all keys below it.
    """

    keys: tuple[str, ...]
    is_off: Callable[[Config], bool]
    because: str

    def has(self, path: str) -> bool:
        """Returns whether a key is one of these."""
        return any(path == key or (key.endswith(".") and path.startswith(key)) for key in self.keys)


def _below(section: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names)


def _norm(section: str, moment: str, keys: tuple[str, ...], level: Callable[[Config], str]) -> Switch:
    return Switch(_below(section, *keys), lambda c: level(c) == "none", f"{section}.{moment}_level=none")


def _constant_rate(section: str, optimizer: Callable[[Config], OptimizerConfig]) -> Switch:
    is_constant = f"{section}.lr_scheduler_type=constant"
    return Switch((f"{section}.min_lr_ratio",), lambda c: optimizer(c).lr_scheduler_type == "constant", is_constant)


def _of_data(section: str, path: Callable[[Config], str]) -> tuple[Switch, Switch]:
    shown = f"{section}.path={{c.{section}.path}}"
    return (
        Switch((f"{section}.split",), lambda c: path(c).endswith(_FILES), f"{shown} is a file"),
        Switch((f"{section}.task",), lambda c: not path(c).startswith("task:"), f"{shown} is no task"),
    )


_OF_STD = ("std_leave1out", "eps", "std_floor", "std_unbiased")

SWITCHES: tuple[Switch, ...] = (
    # The policy and its objective
    Switch(("actor.init.",), lambda c: not c.actor.init_from_scratch, "actor.init_from_scratch=False: the model is actor.path"),
    Switch(_below("actor.lora", "alpha", "target_modules"), lambda c: c.actor.lora.rank == 0, "actor.lora.rank=0: no adapters"),
    Switch(_below("actor", *_SUPERVISED), lambda c: c.actor.loss == "sft", "actor.loss=sft: supervised training"),
    Switch(
        ("actor.loss_aggregation_constant",),
        # The run's config.json holds the value that None stands for
        lambda c: (
            c.actor.loss_aggregation != "seq-mean-token-sum" and c.actor.loss_aggregation_constant != c.gconfig.max_new_tokens
        ),
        "actor.loss_aggregation={c.actor.loss_aggregation}: the divisor is of seq-mean-token-sum",
    ),
    Switch(
        _below("actor", "behav_imp_weight_cap", "behav_imp_weight_mode", "behav_imp_weight_level"),
        lambda c: not c.actor.use_decoupled_loss,
        "actor.use_decoupled_loss=False: there is no such weight",
    ),
    Switch(
        ("actor.behav_imp_weight_mode",),
        lambda c: c.actor.behav_imp_weight_cap is None,
        "actor.behav_imp_weight_cap=None: no weight is above it",
    ),
    Switch(_below("actor", "kl_estimator", "kl_placement"), lambda c: c.actor.kl_ctl == 0, "actor.kl_ctl=0: no KL term"),
    Switch(("actor.distill.coef",), lambda c: not c.actor.distill.teacher, "actor.distill.teacher is empty: no distillation"),
    Switch(
        _below("actor", "overlong_tokens", "overlong_penalty_factor"),
        lambda c: not c.actor.overlong_reward_penalty,
        "actor.overlong_reward_penalty=False",
    ),
    # Advantages
    Switch(
        ("critic.", "actor.gae_lambda"),
        lambda c: c.actor.adv_estimator != "gae",
        "actor.adv_estimator={c.actor.adv_estimator}: only gae has a critic",
    ),
    Switch(
        ("actor.reward_norm.",),
        lambda c: c.actor.adv_estimator in ("rloo", "reinforce_pp"),
        "actor.adv_estimator={c.actor.adv_estimator} normalizes rewards by its own rule",
    ),
    Switch(
        _below("actor.adv_norm", "mean_leave1out", "std_leave1out"),
        lambda c: c.actor.adv_estimator == "reinforce_pp",
        "actor.adv_estimator=reinforce_pp takes mean and deviation of the batch",
    ),
    Switch(
        _below("actor.adv_norm", "mean_level", "std_level"),
        lambda c: (
            c.actor.adv_estimator == "reinforce_pp" and "group" in (c.actor.adv_norm.mean_level, c.actor.adv_norm.std_level)
        ),
        "actor.adv_estimator=reinforce_pp takes mean and deviation of the batch",
    ),
    _norm("actor.reward_norm", "mean", ("mean_leave1out",), lambda c: c.actor.reward_norm.mean_level),
    _norm("actor.reward_norm", "std", _OF_STD, lambda c: c.actor.reward_norm.std_level),
    _norm("actor.adv_norm", "mean", ("mean_leave1out",), lambda c: c.actor.adv_norm.mean_level),
    Switch(
        _below("actor.adv_norm", *_OF_STD),
        lambda c: c.actor.adv_norm.std_level == "none" and c.actor.adv_estimator != "reinforce_pp",
        "actor.adv_norm.std_level=none",
    ),
    # Optimizers
    _constant_rate("actor.optimizer", lambda c: c.actor.optimizer),
    _constant_rate("critic.optimizer", lambda c: c.critic.optimizer),
    _constant_rate("warmup.optimizer", lambda c: c.warmup.optimizer),
    Switch(
        _below("warmup", "batch_size", "field", "turns", "optimizer."),
        lambda c: c.warmup.steps == 0 and c.actor.loss != "sft",
        "warmup.steps=0: no supervised steps",
    ),
    Switch(
        _below("warmup", "steps", "batch_size", "optimizer."),
        lambda c: c.actor.loss == "sft",
        "actor.loss=sft: all steps are supervised, by train_dataset.batch_size and actor.optimizer",
    ),
    # Data and rollouts
    *_of_data("train_dataset", lambda c: c.train_dataset.path),
    *_of_data("valid_dataset", lambda c: c.valid_dataset.path),
    Switch(
        ("recover.max_consecutive_rejected",),
        lambda c: c.rollout.should_accept_fn is None,
        "rollout.should_accept_fn=None rejects nothing",
    ),
    Switch(("rollout.attach_timeout",), lambda c: not c.rollout.addr, "rollout.addr is empty: no server to wait for"),
    Switch(("rollout.max_trace_mb",), lambda c: not c.rollout.enable_rollout_tracing, "rollout.enable_rollout_tracing=False"),
    # Evaluation
    Switch(
        _below("evaluator", "temperature", "top_p", "top_k"),
        lambda c: c.evaluator.greedy,
        "evaluator.greedy=True takes the most likely token",
    ),
    Switch(
        ("evaluator.overlap",),
        lambda c: not (c.evaluator.freq_steps or c.evaluator.freq_epochs),
        "evaluator.freq_steps=None and freq_epochs=None: there are no evaluations",
    ),
    # What watches a run
    Switch(("guard.",), lambda c: not c.guard.enabled, "guard.enabled=False"),
    Switch(
        _below("guard", "max_rollbacks", "rollback_lr_factor"),
        lambda c: not c.guard.may_roll_back,
        "no bound or rule has the action rollback",
    ),
    Switch(("stats_logger.wandb_project",), lambda c: not c.stats_logger.wandb, "stats_logger.wandb=False"),
    Switch(_below("parity", "shadow_engine", "shadow_device"), lambda c: c.parity.shadow_every == 0, "parity.shadow_every=0"),
)


def without_effect(config: Config) -> Iterator[str]:
    """Yields a line for each reason that keys which are not at their defaults have no effect.

    A key that is itself off or none contradicts nothing, and is left out.

    Example: "no effect: actor.lora.alpha=32.0, because actor.lora.rank=0: no adapters"
    """
    changed = _changed(Config(), config)
    found: dict[str, list[str]] = {}  # reason -> keys with their values
    for switch in SWITCHES:
        if changed and switch.is_off(config):
            for path in [path for path in changed if switch.has(path)]:
                found.setdefault(switch.because.format(c=config), []).append(f"{path}={changed.pop(path)}")
    for name, keys in _unused_engines(config):
        found[f"allocation_mode={config.allocation_mode} has no {name}"] = keys
    for because, keys in found.items():
        yield f"no effect: {', '.join(keys)}, because {because}"


def _changed(default: object, section: object, path: str = "") -> dict[str, object]:
    """Returns the keys of a section that are not at their defaults and not off, with their values."""
    defaults = {leaf.path: leaf.value for leaf in walk(default, path)}
    leaves = (leaf for leaf in walk(section, path) if leaf.value != defaults[leaf.path])
    return {leaf.path: leaf.value for leaf in leaves if leaf.value and leaf.value != "none"}


def _unused_engines(config: Config) -> Iterator[tuple[str, list[str]]]:
    """Yields each engine that `allocation_mode` does not name and that has settings, and these.

    A shadow may be of any engine, and an attached server has the settings of SGLang.
    """
    if config.parity.shadow_every or config.rollout.addr:
        return
    for name, section in config.engines.items():
        if name not in engines_of(config.allocation_mode) and (changed := _changed(type(section)(), section, name)):
            yield name, [f"{path}={value}" for path, value in changed.items()]
