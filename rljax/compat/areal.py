"""Names that workflows of AReaL import from it, with the meaning they have there.

    from rljax.compat.areal import AsyncRewardWrapper, GenerationHyperparameters, ModelRequest
    from rljax.compat.areal import RolloutWorkflow, apply_chat_template, stats_tracker

    class MyWorkflow(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            response = await engine.agenerate(ModelRequest(input_ids=..., gconfig=self.gconfig))

`rollout.workflow="my_module:MyWorkflow"` runs it (areal_workflow.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, Self

from rljax.errors import RewardTimeout
from rljax.process.thread_pool import ThreadPool

NO_LIMIT = 10**8  # value of top_k without a limit
MAX_THREADS = 64  # that a reward function has


@dataclasses.dataclass
class GenerationHyperparameters:
    """Sampling parameters of a request."""

    n_samples: int = 1
    max_new_tokens: int = 16384
    min_new_tokens: int = 0
    max_tokens: int = 65536  # of prompt and completion together
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = NO_LIMIT
    temperature: float = 1.0
    stop_token_ids: list[int] = dataclasses.field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stop: list[str] | None = None
    frequency_penalty: float = 0.0

    def new(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> Self:
        """Returns a copy that also stops at the tokenizer's EOS and pad ids."""
        ids = [tokenizer.eos_token_id, tokenizer.pad_token_id]
        return self.new(stop_token_ids=list(dict.fromkeys([*self.stop_token_ids, *(i for i in ids if i is not None)])))


@dataclasses.dataclass
class ModelRequest:
    """Prompt tokens and sampling parameters of one completion."""

    rid: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    input_ids: list[int] = dataclasses.field(default_factory=list)
    gconfig: GenerationHyperparameters = dataclasses.field(default_factory=GenerationHyperparameters)
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    tokenizer: Any = None

    def copy(self) -> Self:
        return dataclasses.replace(
            self, input_ids=list(self.input_ids), gconfig=self.gconfig.new(), metadata=dict(self.metadata)
        )


@dataclasses.dataclass
class ModelResponse:
    """A completion, as lists."""

    input_tokens: list[int] = dataclasses.field(default_factory=list)
    output_tokens: list[int] = dataclasses.field(default_factory=list)
    output_logprobs: list[float] = dataclasses.field(default_factory=list)  # nats
    output_versions: list[int] = dataclasses.field(default_factory=list)
    stop_reason: str = "stop"  # stop, length, tool_calls or abort
    tokenizer: Any = None

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)

    @property
    def output_tokens_without_stop(self) -> list[int]:
        """The tokens without EOS and pad at their end. Raises ValueError without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError("output_tokens_without_stop needs the request's tokenizer")
        ends, tokens = {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id}, list(self.output_tokens)
        while self.stop_reason not in ("length", "abort") and tokens and tokens[-1] in ends:
            tokens.pop()
        return tokens


class InferenceEngine(Protocol):
    """Source of completions for a workflow."""

    async def agenerate(self, req: ModelRequest) -> ModelResponse: ...

    def get_version(self) -> int:
        """Returns the version of the sampler's weights."""
        ...


class RolloutWorkflow:
    """Base class of workflows."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Mapping[str, Any] | None:
        """Runs one episode.

        Args:
          data: the record: its columns, and `messages`.

        Returns:
          Arrays or tensors of shape [1, T]: input_ids, loss_mask, logprobs, versions,
          attention_mask; and rewards, [1]. None rejects the sample.
        """
        raise NotImplementedError


class AsyncRewardWrapper:
    """Calls a reward function from a coroutine.

    The rewards of the config, which a workflow is given as `reward_fn`, run in the reward
    processes. A function of the workflow's own runs in a thread, which a timeout leaves behind:
    name it in `reward.name` instead if it may hang.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any],
        timeout_seconds: float = 15.0,
        max_workers: int | None = None,
        max_retries: int = 3,
    ) -> None:
        """
        Args:
          timeout_seconds: limit of a call of a function that is not the config's.
          max_workers: threads for a function that is not the config's; None for MAX_THREADS.
          max_retries: calls after a failed one.
        """
        self._function = reward_fn
        self._timeout = timeout_seconds
        self._retries = max_retries
        self._threads = ThreadPool(max_workers or MAX_THREADS, "areal reward")
        self._is_async = inspect.iscoroutinefunction(reward_fn) or inspect.iscoroutinefunction(type(reward_fn).__call__)

    async def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Returns what the function does.

        Raises its error, or RewardTimeout: a failure never passes for a reward of 0.
        """
        if self._is_async:
            return await self._function(*args, **keywords)
        for attempt in range(self._retries + 1):
            try:
                async with asyncio.timeout(self._timeout) as limit:
                    return await self._threads.call(self._function, *args, **keywords)
            except TimeoutError:
                if limit.expired():
                    raise RewardTimeout(f"a reward ran longer than {self._timeout:g} s") from None
                raise
            except Exception:
                if attempt == self._retries:
                    raise
        raise AssertionError("unreachable")


def apply_chat_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tokenize: bool = True, **keywords: Any) -> Any:
    """Renders messages by a tokenizer of transformers, to a list of ids, or to text."""
    rendered = tokenizer.apply_chat_template(list(messages), tokenize=tokenize, **keywords)
    return list(rendered["input_ids"]) if isinstance(rendered, Mapping) else rendered


# What AReaL records of an episode ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Recorded:
    """Values recorded of a running episode."""

    uid: str  # of its prompt
    scalars: dict[str, float] = dataclasses.field(default_factory=dict)


_recorded: ContextVar[Recorded | None] = ContextVar("recorded", default=None)


@contextlib.contextmanager
def recording(uid: str) -> Iterator[Recorded]:
    """Context of an episode, which collects what it gives to `stats_tracker`."""
    found = Recorded(uid)
    token = _recorded.set(found)
    try:
        yield found
    finally:
        _recorded.reset(token)


def recorded() -> Recorded:
    """Returns what is recorded of the episode that calls this."""
    return _recorded.get() or Recorded("outside of an episode")


class _Tracker:
    def get(self, name: str = "") -> _Tracker:
        return self

    def scalar(self, **values: Any) -> None:
        """Records values of the running episode, which become components of its reward."""
        recorded().scalars.update({name: float(value) for name, value in values.items()})


class _Context:
    def stat_scope(self) -> str:
        return "rollout"


stats_tracker = _Tracker()
workflow_context = _Context()


# Marks of AReaL's tracer: the run's own trace has requests and rewards, so these leave functions as they are


def trace_session(phase: str) -> Callable[[Any], Any]:
    return lambda function: function


def session_context() -> Callable[[Any], Any]:
    return lambda function: function


@contextlib.asynccontextmanager
async def atrace_session_phase(phase: str) -> AsyncIterator[None]:
    yield
