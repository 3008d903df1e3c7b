"""The tools of a workflow: found by name, called with a time limit, failures told and counted."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rljax import tracing
from rljax.config import registry
from rljax.errors import UserError
from rljax.process.call_thread import CallThread, CallTimeout
from rljax.tools.tool import Tool, ToolFailure

# Functions that make a tool from its arguments
TOOLS = {
    "calculator": "rljax.tools.calculator:make",
    "python": "rljax.tools.python:make",
}
KEY = "rollout.workflow_args.tools"


class CallOutcome(enum.StrEnum):
    """Outcome of a call; all but OK are counted as failures of their kind."""

    OK = "ok"
    ERROR = "tool_error"  # it raised
    TIMEOUT = "tool_timeout"
    UNKNOWN = "unknown_tool"
    ARGUMENTS = "bad_arguments"  # missing or unknown ones


@dataclasses.dataclass(frozen=True)
class CallResult:
    """Result of a call, as the policy reads it."""

    content: str
    outcome: CallOutcome


class Toolbox:
    """Tools by name.

    Args:
      timeout: seconds for each call.
      max_output: characters of a result; more are cut.
    """

    def __init__(self, tools: Sequence[Tool], *, timeout: float = 30.0, max_output: int = 8192) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            raise UserError(f"{KEY}: two tools of one name ({', '.join(tool.name for tool in tools)})")
        self._timeout = timeout
        self._max_output = max_output

    @property
    def definitions(self) -> tuple[dict[str, Any], ...]:
        """The tools in the form of OpenAI's API."""
        return tuple(tool.definition for tool in self._tools.values())

    async def call(self, name: str, arguments: Mapping[str, Any]) -> CallResult:
        """Calls a tool. Never raises for what the policy or the tool does wrong."""
        with tracing.span("tool", tool=name) as span:
            result = await self._call(name, arguments)
            span.note(outcome=result.outcome.value)
            return result

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> CallResult:
        tool = self._tools.get(name)
        if tool is None:
            return self._failed(CallOutcome.UNKNOWN, f"no tool named {name!r} ({registry.nearest(name, self._tools)})")
        if reason := tool.missing_or_unknown(arguments):
            return self._failed(CallOutcome.ARGUMENTS, f"{name}: {reason}")
        try:
            with CallThread(f"tool {name}") as thread:
                returned = await thread.call(tool.function, timeout=self._timeout, **arguments)
            return CallResult(self._cut(_text_of(returned)), CallOutcome.OK)
        except CallTimeout as error:
            return self._failed(CallOutcome.TIMEOUT, f"{name} {error}")
        except ToolFailure as error:
            return CallResult(self._cut(str(error)), CallOutcome.ERROR)
        except Exception as error:  # users' code may raise anything
            return self._failed(CallOutcome.ERROR, f"{type(error).__name__}: {error}")

    def _failed(self, outcome: CallOutcome, reason: str) -> CallResult:
        return CallResult(self._cut(f"Error: {reason}"), outcome)

    def _cut(self, text: str) -> str:
        left_out = len(text) - self._max_output
        return text if left_out <= 0 else f"{text[: self._max_output]}... ({left_out} more characters)"


def make_tools(names: Sequence[str], arguments: Mapping[str, Mapping[str, Any]]) -> list[Tool]:
    """Makes tools of rljax by name, or of functions of the user's by "package.module:function".

    Args:
      arguments: keyword arguments by name, of those of rljax.

    Raises:
      UserError: no such tool, or it does not take the arguments.
    """
    if isinstance(names, str) or not names:
        raise UserError(f"{KEY}: a list of names is needed, as in ('calculator',), not {names!r}")
    for name in arguments:
        if name not in names or name not in TOOLS:
            raise UserError(
                f"rollout.workflow_args.tool_args: {name!r} takes none ({', '.join(n for n in names if n in TOOLS)})"
            )
    return [_make(name, dict(arguments[name]) if name in arguments else {}) for name in names]


def _make(name: str, arguments: dict[str, Any]) -> Tool:
    found = registry.resolve(KEY, name, TOOLS, "tool")
    if name not in TOOLS:
        return found if isinstance(found, Tool) else Tool.of(found)
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        takes = ", ".join(inspect.signature(found).parameters) or "none"
        raise UserError(f"rollout.workflow_args.tool_args.{name}: {error} (it takes: {takes})") from None
    made: Tool = found(**arguments)
    return made


def _text_of(returned: Any) -> str:
    return returned if isinstance(returned, str) else json.dumps(returned, default=str, ensure_ascii=False)
