"""One episode of an environment: every call with a time limit, every return value checked.

async with Play(source, timeout=60.0) as play:
    messages = await play.reset()
    step = await play.step("8")
"""

from __future__ import annotations

import contextlib
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

from rljax import tracing
from rljax.environments.build import Source, make_environment
from rljax.environments.interface import Environment, Message, Observation, Step
from rljax.errors import EnvironmentFailed, EnvironmentTimeout
from rljax.process.call_thread import CallThread, CallTimeout
from rljax.types import reward_number


class Play:
    """An environment in use.

    All methods raise EnvironmentFailed if the environment raises or breaks its contract, and
    EnvironmentTimeout if a call takes longer than `timeout` seconds.
    """

    def __init__(self, source: Source, *, timeout: float | None) -> None:
        self._source = source
        self._timeout = timeout
        self._thread = CallThread(f"environment {source.name}")
        self.environment: Environment

    async def __aenter__(self) -> Play:
        self.environment = await self.call("__init__", lambda: make_environment(self._source))
        return self

    async def __aexit__(self, *_: object) -> None:
        with self._thread:
            close = getattr(self.environment, "close", None)
            if close is not None:
                await self.call("close", close)

    async def reset(self) -> tuple[Message, ...]:
        """Begins the source's episode and returns its first messages."""
        seed, fields = self._source.seed, self._source.fields
        return self._messages("reset", await self.call("reset", self.environment.reset, seed=seed, **fields))

    async def step(self, action: str) -> Step:
        """Takes one action; the observation of the step returned is a tuple of messages."""
        returned = await self.call("step", self.environment.step, action)
        if not isinstance(returned, tuple) or len(returned) != 5:
            raise self._breach("step", f"returned {_kind(returned)}, not (observation, reward, terminated, truncated, info)")
        observation, reward, terminated, truncated, info = returned
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not _is_bool(flag):
                raise self._breach("step", f"{name} is {_kind(flag)}, not a bool")
        if isinstance(reward, bool):
            raise self._breach("step", f"the reward is {reward}, not a number")
        try:
            reward = reward_number("the reward", reward)
        except ValueError as error:
            raise self._breach("step", str(error)) from None
        if not isinstance(info, Mapping):
            raise self._breach("step", f"info is {_kind(info)}, not a mapping")
        return Step(self._messages("step", observation), reward, bool(terminated), bool(truncated), info)

    async def call(self, name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a function of the environment on its thread; `name` is for errors."""
        try:
            with tracing.span("environment", environment=self._source.name, call=name):
                return await self._thread.call(function, *args, timeout=self._timeout, **kwargs)
        except CallTimeout as error:
            raise EnvironmentTimeout(f"{self._source.name}.{name} {error}") from None
        except Exception as error:  # users' code may raise anything
            raise EnvironmentFailed(f"{self._source.name}.{name} raised {type(error).__name__}: {error}") from error

    def _messages(self, method: str, observation: Observation) -> tuple[Message, ...]:
        if isinstance(observation, str):
            return ({"role": "user", "content": observation},)
        if not isinstance(observation, Sequence) or not all(_is_message(message) for message in observation):
            raise self._breach(method, f"the observation is {_kind(observation)}, not text or messages with role and content")
        return tuple(cast(Sequence[Message], observation))

    def _breach(self, method: str, reason: str) -> EnvironmentFailed:
        return EnvironmentFailed(f"{self._source.name}.{method}: {reason}")


def numbers_of(info: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers and bools of a step's info that a component of a reward may be, by name."""
    found = {}
    for name, value in info.items():
        if isinstance(value, numbers.Real):
            with contextlib.suppress(ValueError):
                found[str(name)] = reward_number(str(name), value)
    return found


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _is_bool(value: object) -> bool:
    try:
        return isinstance(value, bool) or (operator.index(cast(Any, value)) in (0, 1) and type(value).__name__ == "bool_")
    except TypeError:
        return type(value).__name__ in ("bool_", "bool")  # numpy's


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
