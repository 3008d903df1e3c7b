"""The config as a frozen dataclass of sections, and the base of the sections of engines."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Self

from rljax.config.keys import NOT_NEGATIVE, POSITIVE, key, section
from rljax.config.schema.evaluation import EvaluatorConfig
from rljax.config.schema.guard import GuardConfig
from rljax.config.schema.parity import ParityConfig
from rljax.config.schema.rollout import DatasetConfig, GenerationConfig, RewardConfig, RolloutConfig
from rljax.config.schema.runtime import FlightConfig, RecoverConfig, SaverConfig, ServeConfig, StatsLoggerConfig
from rljax.config.schema.training import ActorConfig, CriticConfig, WarmupConfig


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Base of an engine's section: a frozen dataclass of fields declared by `key` and `section`.

    The engine's plugin names it as `config_class`. Its keys are below the engine's name, as in
    `--config.jax.slots=8`.

        @dataclasses.dataclass(frozen=True)
        class JaxConfig(EngineConfig):
            slots: int = key(64, "Requests decoded at once.", POSITIVE)

        JaxConfig.of(config).slots
    """

    @classmethod
    def of(cls, config: Config) -> Self:
        """Returns the section of a config, or its defaults if the config does not have it."""
        for values in config.engines.values():
            if type(values) is cls:
                return values
        return cls()


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run."""

    seed: int = key(1, "Seed of everything drawn at random.", NOT_NEGATIVE)
    allocation_mode: str = key("jax:d1", "Engines and their devices, as in sglang:d4+fsdp:d4; the sampler comes first.")
    deterministic: bool = key(
        False, "Make completions depend on their seeds alone, at some cost with SGLang, which otherwise does not."
    )
    total_train_epochs: int = key(1, "Most passes over the training set.", POSITIVE)
    total_train_steps: int | None = key(None, "Most steps. None: as many as the epochs have.", NOT_NEGATIVE)
    gconfig: GenerationConfig = section(GenerationConfig)
    reward: RewardConfig = section(RewardConfig)
    rollout: RolloutConfig = section(RolloutConfig)
    actor: ActorConfig = section(ActorConfig)
    critic: CriticConfig = section(CriticConfig)
    warmup: WarmupConfig = section(WarmupConfig)
    train_dataset: DatasetConfig = section(DatasetConfig)
    valid_dataset: DatasetConfig = section(DatasetConfig, split="test", batch_size=64, shuffle=False)
    valid_datasets: dict[str, object] = key(
        {},
        "More sets to evaluate on, by name: keys that differ from valid_dataset, as in valid_datasets.math.path=data/math.",
    )
    saver: SaverConfig = section(SaverConfig)
    evaluator: EvaluatorConfig = section(EvaluatorConfig)
    recover: RecoverConfig = section(RecoverConfig)
    guard: GuardConfig = section(GuardConfig)
    stats_logger: StatsLoggerConfig = section(StatsLoggerConfig)
    flight: FlightConfig = section(FlightConfig)
    parity: ParityConfig = section(ParityConfig)
    serve: ServeConfig = section(ServeConfig)
    # By the engine's name, which is a top-level key in config files and config.json
    engines: Mapping[str, EngineConfig] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        sections = types.MappingProxyType(dict(sorted(self.engines.items())))
        object.__setattr__(self, "engines", sections)  # the dataclass is frozen, and so is its mapping

    # Values of keys that follow from others if they are None; `io.resolve` fills them in.

    @property
    def batch_size(self) -> int:
        """Prompts per update."""
        return self.rollout.consumer_batch_size or self.train_dataset.batch_size

    @property
    def max_in_flight(self) -> int:
        """Prompts that are generated at once."""
        rollout = self.rollout
        return rollout.max_concurrent_rollouts or (rollout.max_head_offpolicyness + 1) * self.batch_size

    @property
    def episode_timeout(self) -> float:
        """Seconds that an episode may take; less than what ends the run for hanging."""
        return self.rollout.episode_timeout or self.recover.hang_timeout * 2 / 3

    @property
    def request_timeout(self) -> float:
        """Seconds that a request may take; less than the episode that it belongs to."""
        return self.rollout.request_timeout or self.episode_timeout * 3 / 4

    @property
    def control_timeout(self) -> float:
        """Seconds for each of the pause, the load and the resume of a publish."""
        return self.recover.hang_timeout / 4

    @property
    def clip_high(self) -> float:
        """Upper half-width of the clip: the ratio of an update is at most 1 + clip_high."""
        return self.actor.eps_clip if self.actor.eps_clip_higher is None else self.actor.eps_clip_higher

    @property
    def aggregation_constant(self) -> int:
        """Tokens by which seq-mean-token-sum divides the sum."""
        return self.actor.loss_aggregation_constant or self.gconfig.max_new_tokens
