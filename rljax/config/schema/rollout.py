"""Keys of what is sampled: prompts, completions, episodes and their rewards."""

from __future__ import annotations

import dataclasses

from rljax.config.keys import HALF_OPEN_UNIT, NOT_NEGATIVE, POSITIVE, key


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
    system_prompt: str = key(
        "", "Text of a system message before each prompt that has none of its own. Empty: no such message."
    )
    tools: str = key("", "JSON file of tool definitions for prompts that have no tools of their own. Empty: none.")
    task: dict[str, object] = key({}, "Arguments of a task:... dataset.")
