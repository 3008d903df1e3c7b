"""The config as frozen dataclasses: the single declaration of its keys.

`base.get_config()` of configs/base.py, the checks of single keys and docs/config.md are all made
from it. The sections of what is trained are in schema_training.py, that of evaluation in
schema_evaluation.py, that of the guardrails in schema_guard.py. An engine declares its own
(`EngineConfig`), and no engine is named here. Binaries turn the ConfigDict into a `Config` at the
edge; below that nothing reads a ConfigDict.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Self

from rljax.config.keys import HALF_OPEN_UNIT, NOT_NEGATIVE, POSITIVE, key, section
from rljax.config.schema_evaluation import EvaluatorConfig, FrequencyConfig
from rljax.config.schema_guard import GuardConfig
from rljax.config.schema_parity import ParityConfig
from rljax.config.schema_training import (
    ActorConfig,
    CriticConfig,
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


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """Sampling of completions in training."""

    n_samples: int = key(8, "Completions per prompt.", POSITIVE)
    max_new_tokens: int = key(512, "Longest completion.", POSITIVE, unit="tokens")
    min_new_tokens: int = key(0, "Shortest completion; before it no stop token is sampled.", NOT_NEGATIVE, unit="tokens")
    temperature: float = key(1.0, "Divides the logits.", POSITIVE)
    top_p: float = key(1.0, "Probability mass of the most likely tokens to sample from. 1: all tokens.", HALF_OPEN_UNIT)
    top_k: int = key(0, "Number of most likely tokens to sample from. 0: all.", NOT_NEGATIVE)
    greedy: bool = key(False, "Take the most likely token.")
    stop: tuple[str, ...] = key((), "Texts that end a completion.")
    stop_token_ids: tuple[int, ...] = key((), "Tokens that end a completion, beside the model's own EOS ids.")


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """The rewards that score an episode, and the processes they run in."""

    name: str = key(
        "exact",
        'A registered reward ("exact", "gsm8k", "math", "reasoning_gym"), or "package.module:function"; several with commas '
        "between, whose weighted sum is the reward.",
    )
    workers: int = key(2, "Processes that score.", POSITIVE)
    timeout: float = key(15.0, "Time limit of one call; after it the process is killed.", POSITIVE, unit="seconds")
    memory_mb: int = key(0, "Limit of a process's address space. 0: no limit.", NOT_NEGATIVE, unit="MiB")
    retries: int = key(1, "Times an episode is scored again after an error or a timeout, before it is dropped.", NOT_NEGATIVE)
    weights: tuple[float, ...] = key((), "Weight of each reward of reward.name. Empty: 1 each.")
    environment: tuple[str, ...] = key(
        (), "Variables that rewards get although their names say that they are secret (docs/security.md), as OPENAI_API_KEY."
    )

    @property
    def names(self) -> tuple[str, ...]:
        """The rewards of `name`, one by one."""
        return tuple(part.strip() for part in self.name.split(","))


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """Rollouts: how many, how stale, by which workflow and on which processes."""

    max_head_offpolicyness: int = key(
        2, "Largest lag of a token that is trained on. 0: synchronous RL.", NOT_NEGATIVE, unit="versions"
    )
    max_concurrent_rollouts: int | None = key(
        None, "Prompts in flight at once. None: (max_head_offpolicyness + 1) * consumer_batch_size.", POSITIVE
    )
    consumer_batch_size: int | None = key(None, "Prompts per update. None: train_dataset.batch_size.", POSITIVE)
    enable_rollout_tracing: bool = key(False, "Write WORKDIR/trace.json, a timeline for Perfetto (docs/tracing.md).")
    max_trace_mb: float = key(
        256.0, "Size of trace.json and of trace.1.json, the part before it, together.", POSITIVE, unit="MiB"
    )
    stale_policy: str = key(
        "drop", "Handling of tokens beyond the lag bound: drop generates their prompt again, mask leaves them untrained.",
        choices=("drop", "mask"),
    )  # fmt: skip
    recompute_kv_on_publish: bool = key(False, "Prefill in-flight requests again with the new weights.")
    workflow: str = key(
        "rlvr",
        'A registered workflow ("rlvr", "multi_turn", "tool_use", "environment", "agent"), or "package.module:Class".',
    )
    workflow_args: dict[str, object] = key({}, "Keyword arguments of the workflow, in addition to tokenizer and rewards.")
    should_accept_fn: str | None = key(
        None, 'A registered filter of groups ("mixed_rewards": DAPO\'s), or "package.module:function". None: all are accepted.'
    )
    chat_template_kwargs: dict[str, object] = key(
        {}, "Arguments of the model's chat template, as enable_thinking=False; a record's own go before them."
    )
    allow_control_tokens: bool = key(
        False, "Read control tokens such as <|im_end|> in the text of users, tools and environments; else they are plain text."
    )
    episode_timeout: float | None = key(
        None, "Time limit of one episode, tools and rewards included. None: two thirds of recover.hang_timeout.", POSITIVE,
        unit="seconds",
    )  # fmt: skip
    request_timeout: float | None = key(
        None, "Time limit of one request with all its attempts. None: three quarters of rollout.episode_timeout.", POSITIVE,
        unit="seconds",
    )  # fmt: skip
    request_retries: int = key(3, "Times a request is sent again after a sampler lost it.", NOT_NEGATIVE)
    workers: int = key(
        0, "Worker processes, which run workflow, tokenizer and rewards. 0: the trainer's own process does.", NOT_NEGATIVE
    )
    listen: str = key("", '"HOST:PORT" to listen on for workers from elsewhere (docs/runtime.md). Empty: none.')
    publish_dir: str = key(
        "",
        "Directory below which weights are handed to servers as files. Empty: memory (/dev/shm) if it has room, else the "
        "directory for temporary files; WORKDIR for servers on other machines.",
    )
    addr: str = key("", '"HOST:PORT" of a running server to attach to, several with commas between. Empty: start a sampler.')
    attach_timeout: float = key(
        0.0, "Time to wait at the start for the servers of rollout.addr, which may be starting too.", NOT_NEGATIVE,
        unit="seconds",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DatasetConfig:
    """A source of prompts."""

    path: str = key(
        "",
        "A directory with SPLIT.jsonl or .parquet, one such file, a directory of datasets' save_to_disk, or a task: "
        "task:addition, task:guess_number, task:reasoning_gym/DATASET, task:environment/NAME.",
    )
    type: str = key(
        "",
        'A format: "gsm8k", "prompt_answer", "trl", "verl", "task" (implied by a path of task:...), or '
        '"package.module:function". Empty: told by the columns of the first record.',
    )
    split: str = key("train", "Split of the data to read.")
    batch_size: int = key(8, "Prompts per update; for the validation set, prompts at once.", POSITIVE)
    shuffle: bool = key(True, "Draw a new order for every epoch.")
    max_length: int | None = key(
        None, "Longer prompts are skipped and counted. None: a prompt that is too long is an error.", POSITIVE, unit="tokens"
    )
    limit: int | None = key(None, "Number of examples to use, from the first. None: all.", POSITIVE)
    system_prompt: str = key("", "Text of a system message before the prompt. Empty: no such message.")
    tools: str = key("", "JSON file of tool definitions for prompts that have no tools of their own. Empty: none.")
    task: dict[str, object] = key({}, "Arguments of a task:... dataset.")


@dataclasses.dataclass(frozen=True)
class SaverConfig(FrequencyConfig):
    """Checkpoints, and the model at the end."""

    freq_steps: int | None = key(50, "Steps between checkpoints. None: not by steps.", POSITIVE)
    keep_last: int = key(2, "Number of checkpoints to keep.", POSITIVE)
    background: bool = key(
        True, "Write checkpoints beside the following steps. The host holds a copy of what the learner saves meanwhile."
    )
    export_final: bool = key(True, "Write Hugging Face safetensors and tokenizer to WORKDIR/export at the end.")
    export_freq_steps: int | None = key(
        None, "Steps between Hugging Face directories in WORKDIR/exports/STEP, which are all kept. None: none.", POSITIVE
    )


@dataclasses.dataclass(frozen=True)
class RecoverConfig:
    """Resuming, and the failures that end a run."""

    mode: str = key("auto", "auto resumes the run in WORKDIR; fresh refuses a WORKDIR with a run.", choices=("auto", "fresh"))
    max_consecutive_failures: int = key(32, "Groups that may fail in a row, each prompt's own fault once.", POSITIVE)
    max_prompt_failures: int = key(4, "Times a prompt may fail by its own fault before it is dropped and counted.", POSITIVE)
    # Dynamic sampling may reject nine groups in ten
    max_consecutive_rejected: int = key(1024, "Groups that rollout.should_accept_fn may reject in a row.", POSITIVE)
    hang_timeout: float = key(
        1800.0, "Time without progress after which all stacks are dumped and the run ends.", POSITIVE, unit="seconds"
    )


@dataclasses.dataclass(frozen=True)
class StatsLoggerConfig:
    """Sinks beside metrics.jsonl."""

    tensorboard: bool = key(False, "Write TensorBoard events.")
    wandb: bool = key(False, "Log to Weights & Biases.")
    wandb_project: str = key("rljax", "Project name in W&B.")
    live: bool = key(True, "Show progress on a terminal.")
    line_every: float = key(
        5.0, "Least time between two lines of progress in a log or a pipe; 0: a line per step.", NOT_NEGATIVE, unit="seconds"
    )
    verdict: bool = key(True, "Diagnose the run as it goes on, in at most 1% of its time, and show the verdict.")
    samples_per_step: int = key(4, "Trajectories per step in samples.jsonl.", NOT_NEGATIVE)
    groups_per_step: int = key(1, "Whole groups per step in groups.jsonl.", NOT_NEGATIVE)
    samples_per_evaluation: int = key(8, "Trajectories per evaluation and set in eval_samples.jsonl.", NOT_NEGATIVE)
    # Parts are what a run that goes on need not read, and what is deleted; those of metrics never are
    part_mb: int = key(64, "Size at which metrics.jsonl becomes metrics.STEP.jsonl; so for all .jsonl.", POSITIVE, unit="MiB")
    max_samples_mb: int = key(
        1024, "Size of samples.jsonl and its parts, of groups.jsonl, and of eval_samples.jsonl. Parts after the first go.",
        POSITIVE, unit="MiB",
    )  # fmt: skip
    max_log_mb: int = key(64, "Size of log.txt and of log.txt.1, the part before it, together.", POSITIVE, unit="MiB")


@dataclasses.dataclass(frozen=True)
class FlightConfig:
    """The flight recorder: batches of steps, to make a step again (docs/debugging.md)."""

    # A step is made again from the checkpoint before it, so they have to reach back to one
    steps: int = key(100, "Last steps whose batches are kept. 0: no step's.", NOT_NEGATIVE)
    max_mb: float = key(1024.0, "Size of all batches together.", POSITIVE, unit="MiB")
    keep_checkpoints: int = key(
        1, "Checkpoints kept, with the batches from there on, for the first steps at which a guardrail acted or a link broke.",
        NOT_NEGATIVE,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """The server of `experiments.serve`. Who may use it: docs/security.md."""

    # Unreachable from other machines; use a token with any other address
    host: str = key("127.0.0.1", "Address to listen on.")
    port: int = key(0, "Port to listen on. 0: a free one.", NOT_NEGATIVE)
    max_requests: int = key(1024, "Completions at once; more requests get status 503.", POSITIVE)
    max_body_mb: float = key(64.0, "Largest request.", POSITIVE, unit="MiB")
    weight_roots: tuple[str, ...] = key((), "Directories below which weights may be loaded. Empty: memory-backed storage.")
    model_name: str = key("", "Name of the model at /v1. Empty: that of its directory.")
    tool_parser: str = key(
        "auto", "Notation of tool calls at /v1: by the chat template, or of a family.",
        choices=("auto", "hermes", "llama3_json", "mistral", "pythonic"),
    )  # fmt: skip
    reasoning_parser: str = key(
        "auto", "Whether replies at /v1 are split into reasoning and content: by the chat template, always, or never.",
        choices=("auto", "think", "none"),
    )  # fmt: skip


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
