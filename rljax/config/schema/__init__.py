"""The config as frozen dataclasses: the single declaration of its keys.

config.py      all of it
rollout.py     keys of what is sampled
training.py    keys of what is trained
evaluation.py  keys of evaluations
guard.py       keys of the guardrails; parity.py, of the shadow learner
runtime.py     keys of what a run writes and resumes from, and of the server

`base.get_config()` of configs/base.py, the checks of single keys and docs/config.md are all made
from it. An engine declares its own section (`EngineConfig`), and no engine is named here. Binaries
turn the ConfigDict into a `Config` at the edge; below that nothing reads a ConfigDict.
"""

from rljax.config.schema.config import Config, EngineConfig
from rljax.config.schema.evaluation import EvaluatorConfig, FrequencyConfig
from rljax.config.schema.guard import GuardConfig
from rljax.config.schema.parity import ParityConfig
from rljax.config.schema.rollout import DatasetConfig, GenerationConfig, RewardConfig, RolloutConfig
from rljax.config.schema.runtime import FlightConfig, RecoverConfig, SaverConfig, ServeConfig, StatsLoggerConfig
from rljax.config.schema.training import (
    ActorConfig,
    CriticConfig,
    DistillConfig,
    LoraConfig,
    MicroBatchConfig,
    ModelConfig,
    NormConfig,
    OptimizerConfig,
    WarmupConfig,
)

__all__ = [
    "ActorConfig",
    "Config",
    "CriticConfig",
    "DatasetConfig",
    "DistillConfig",
    "EngineConfig",
    "EvaluatorConfig",
    "FlightConfig",
    "FrequencyConfig",
    "GenerationConfig",
    "GuardConfig",
    "LoraConfig",
    "MicroBatchConfig",
    "ModelConfig",
    "NormConfig",
    "OptimizerConfig",
    "ParityConfig",
    "RecoverConfig",
    "RewardConfig",
    "RolloutConfig",
    "SaverConfig",
    "ServeConfig",
    "StatsLoggerConfig",
    "WarmupConfig",
]
