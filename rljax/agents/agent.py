"""Agents as functions and as processes: who talks to the endpoint in an episode.

    async def agent(base_url, api_key, prompt):               # a function, plain or async
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        ...
        return 1.0

    python my_agent.py                                        # a process
        gets OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, the prompt as JSON on its input,
        and prints the reward as the last line of its output

Either returns a reward, a mapping of named numbers with "reward" among them, or nothing: then the
rewards that were set by turn count, or else `reward.name` scores the last reply.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import json
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rljax.agents.session import Session
from rljax.config import registry
from rljax.errors import AgentError, UserError
from rljax.process.child import Child
from rljax.types import Prompt

KEY = "rollout.workflow_args"
MAX_THREADS = 512  # plain functions at once
MAX_OUTPUT = 1 << 20  # bytes of an agent's output, its last ones
OPTIONAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
ARGUMENTS = ("base_url", "api_key", "model", "prompt", "messages", "data", "tools", "session", "client")


class Agent(Protocol):
    """Runs one episode against the endpoint. Cancelling it ends what it started."""

    async def run(self, session: Session, base_url: str, prompt: Prompt) -> Any:
        """Returns what the agent returned. Raises AgentError if it failed."""
        ...


class FunctionAgent:
    """An agent that is a function of this process.

    It gets those of ARGUMENTS that it names: `data` is the prompt's fields, `session` sets rewards
    by turn (`session.set_reward(0.5, completion.id)`), `client` is an AsyncOpenAI. A plain function
    runs in a thread, which a timeout can't end: its next request is refused.
    """

    def __init__(self, name: str, model: str) -> None:
        """Raises UserError if the name is no function, or it takes other arguments."""
        self._name, self._model = name, model
        found: Any = registry.resolve(f"{KEY}.agent", name, {}, "function")
        found = found() if inspect.isclass(found) else found
        run = getattr(found, "run", None)
        self._function: Callable[..., Any] = run if not inspect.isroutine(found) and callable(run) else found
        self._takes = _arguments(name, self._function)
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        if "client" in self._takes:
            _openai()

    async def run(self, session: Session, base_url: str, prompt: Prompt) -> Any:
        offered = {
            "base_url": base_url,
            "api_key": session.key,
            "model": self._model,
            "prompt": prompt,
            "messages": [dict(message) for message in prompt.messages],
            "data": dict(prompt.fields),
            "tools": [dict(tool) for tool in prompt.tools],
            "session": session,
        }
        if "client" in self._takes:
            offered["client"] = self._shared_client().with_options(base_url=base_url, api_key=session.key)
        return await self._call({name: offered[name] for name in self._takes})

    def _shared_client(self) -> Any:
        """Returns the client of this event loop: making one takes tens of milliseconds."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            given = {"base_url": "http://127.0.0.1", "api_key": "none"}
            # The run's own retries and time limits are behind the endpoint
            self._client, self._loop = _openai()(**given, max_retries=0, timeout=None), loop
        return self._client

    async def _call(self, arguments: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(type(self._function).__call__):
            return await self._function(**arguments)
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(MAX_THREADS, "agent")
        returned = await asyncio.get_running_loop().run_in_executor(self._threads, lambda: self._function(**arguments))
        return await returned if inspect.isawaitable(returned) else returned


class ProcessAgent:
    """An agent that is a process, in any language."""

    def __init__(self, command: Sequence[str], model: str) -> None:
        self._command, self._model = list(command), model

    async def run(self, session: Session, base_url: str, prompt: Prompt) -> Any:
        given = {
            "uid": prompt.uid,
            "messages": [dict(message) for message in prompt.messages],
            "data": dict(prompt.fields),
            "tools": [dict(tool) for tool in prompt.tools],
        }
        environment = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": session.key, "OPENAI_MODEL": self._model}
        try:
            inherited = {name: value for name, value in os.environ.items() if name != "RLJAX_TOKEN"}  # the run's own
            child = await Child.start(self._command, inherited | environment, stderr=asyncio.subprocess.PIPE)
        except OSError as error:
            raise UserError(f"{KEY}.command: {self._command[0]}: {error.strerror}") from None
        process = child.process
        try:
            assert process.stdin and process.stdout and process.stderr
            output, errors, _ = await asyncio.gather(
                _tail(process.stdout), _tail(process.stderr), _feed(process.stdin, json.dumps(given).encode())
            )
            status = await child.ended()
        finally:
            child.kill()
            await child.ended()
        if status:
            raise AgentError(f"the agent's process ended with status {status}: {_last_line(errors) or 'no output'}")
        return _printed(output)


def make_agent(agent: str, command: Sequence[str], model: str) -> Agent:
    """Makes the agent that the config names: a function, or a command.

    Raises:
      UserError: it names none or both, or the function can't be used.
    """
    if bool(agent) == bool(command):
        raise UserError(f"{KEY}: the workflow agent takes either agent='package.module:function' or command=('program', ...)")
    if agent:
        return FunctionAgent(agent, model)
    if isinstance(command, str) or not all(isinstance(word, str) for word in command):
        raise UserError(f"{KEY}.command: {command!r} (a tuple of texts: program and arguments, as in ('node', 'agent.js'))")
    if shutil.which(command[0]) is None:
        raise UserError(f"{KEY}.command: no such program: {command[0]}")
    return ProcessAgent(command, model)


def _arguments(name: str, function: Any) -> list[str]:
    """Returns which of ARGUMENTS a function takes. Raises UserError."""
    if not callable(function):
        raise UserError(f"{KEY}.agent: {name} is {type(function).__name__}, not a function")
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for parameter in parameters:
        optional = parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if not optional and parameter.name not in ARGUMENTS:
            raise UserError(f"{KEY}.agent: {name} takes {parameter.name!r}, and an agent gets {', '.join(ARGUMENTS)}")
    return [p.name for p in named if p.name in ARGUMENTS]


def _openai() -> Any:
    try:
        from openai import AsyncOpenAI
    except ImportError as error:
        why = f"{error} (pip install 'rljax[agents]')"
        raise UserError(f"{KEY}.agent: an argument `client` needs the package openai: {why}") from None
    return AsyncOpenAI


async def _feed(pipe: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it doesn't read its input
        pipe.write(data)
        await pipe.drain()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        pipe.close()
        await pipe.wait_closed()


async def _tail(pipe: asyncio.StreamReader) -> bytes:
    """Reads to the end and returns the last MAX_OUTPUT bytes."""
    data = b""
    while chunk := await pipe.read(1 << 16):
        data = (data + chunk)[-MAX_OUTPUT:]
    return data


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _printed(output: bytes) -> Any:
    """Returns the JSON value of the last line; None if there is no output."""
    line = _last_line(output)
    if not line:
        return None
    try:
        return json.loads(line)
    except ValueError:
        raise AgentError(
            f"the last line of the agent's output is no reward, a number or a JSON object: {line[:200]!r}"
        ) from None
