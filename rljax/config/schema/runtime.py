"""Keys of what a run writes and resumes from, and of the server."""

from __future__ import annotations

import dataclasses

from rljax.config.keys import NOT_NEGATIVE, POSITIVE, key
from rljax.config.schema.evaluation import FrequencyConfig


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
