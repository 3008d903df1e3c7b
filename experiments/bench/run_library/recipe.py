"""Recipe of a run of the library, and settings that several runs share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

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
