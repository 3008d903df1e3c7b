"""A reward process from the event loop's side: start, ask, kill."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from rljax.config import registry
from rljax.config.schema import RewardConfig
from rljax.errors import UserError
from rljax.process.child import Child
from rljax.process.environment import without_secrets
from rljax.rewards.process_main import MAX_ANSWER

START_TIMEOUT = 120.0  # seconds; imports of the user's module may take long
LAST_WORDS = 2.0  # seconds for what a process has written to arrive after its end
STOOD_STILL = 0.1  # seconds that the event loop is late: it was held up, and answers may wait in the pipe
TO_READ = 1.0  # seconds for them to be read then
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
# multiprocessing would import the parent's main module, and jax with it. The import path is the parent's.
_BOOT = """
import json, sys
path, *arguments = json.loads(sys.argv[1])
sys.path[:] = path
from rljax.rewards.process_main import main
main(*arguments)
"""


class ProcessDied(Exception):
    """A reward process ended before it answered.

    `killed` is True if the pool ended it because of another call.
    """

    def __init__(self, reason: str, killed: bool) -> None:
        super().__init__(reason)
        self.killed = killed


class RewardProcess:
    """One reward process.

    Made by `start`; `ask` may be called any number of times at once, `kill` at any time.
    """

    def __init__(self, child: Child) -> None:
        self._child, self._process = child, child.process
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._killed = False
        self.is_async = False
        self.at_once = False  # has a reward that scores a whole group in one call
        self.reads_ids = False
        self.checks = False  # knows what it reads of a record
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: RewardConfig) -> RewardProcess:
        """Starts a process and waits until it has imported the reward.

        Raises UserError if it can't import it or does not start.
        """
        package = str(Path(__file__).resolve().parents[2])
        path = [p or os.getcwd() for p in sys.path]
        arguments = json.dumps([[*path, package], config.names, config.weights, config.memory_mb, config.timeout, os.getpid()])
        environment = without_secrets(os.environ, config.environment) | _ONE_THREAD
        command = [sys.executable, "-c", _BOOT, arguments]
        started = cls(await Child.start(command, environment, line_limit=2 * MAX_ANSWER))
        try:
            await started._greet(config)
        except BaseException:
            started.kill()
            await started.ended()
            raise
        started._reader = asyncio.create_task(started._read(), name="answers of a reward process")
        return started

    @property
    def alive(self) -> bool:
        return not self._killed and not self.gone

    @property
    def gone(self) -> bool:
        """True once the process has ended and was reaped."""
        return self._process.returncode is not None

    async def ask(self, job: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Sends a job and returns the process's answer.

        Raises TimeoutError after `timeout` seconds, ProcessDied if the process ends before it
        answers. An answer that came in time counts, also if the event loop stood still meanwhile,
        as it does while engines start.
        """
        assert self._process.stdin is not None
        if self._reader is None or self._reader.done():
            raise ProcessDied(f"the reward process {self._how_it_ended()}", self._killed)
        self._number += 1
        number = self._number
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            async with asyncio.timeout_at(deadline):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died: the reader reports how
                    self._process.stdin.write(json.dumps({"id": number, **job}).encode() + b"\n")
                    await self._process.stdin.drain()
            return await _by(deadline, answer)
        finally:
            self._waiting.pop(number, None)

    def kill(self) -> None:
        """Kills the process and all processes that it has started.

        Calls of `ask` that wait raise ProcessDied.
        """
        self._killed = True
        self._child.kill()

    async def ended(self) -> None:
        """Waits until the process is gone and reaped, with all that it started."""
        await self._child.ended()
        if self._reader is not None:
            await self._reader

    async def _greet(self, config: RewardConfig) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(registry.packed("reward.name", config.names).encode() + b"\n")
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), START_TIMEOUT)
        except TimeoutError:
            raise UserError(f"reward.name: {config.name} was not imported within {START_TIMEOUT:.0f} s") from None
        if not line:
            limit = f" (reward.memory_mb is {config.memory_mb})" if config.memory_mb else ""
            await self._child.ended()
            raise UserError(f"reward.name: {config.name}: its process {self._how_it_ended()} while it started{limit}")
        greeting = json.loads(line)
        if "refused" in greeting:
            await self._child.ended()
            raise UserError(greeting["refused"])
        ready = greeting["ready"]
        self.is_async, self.at_once = ready["async"], ready["at_once"]
        self.reads_ids, self.checks = ready["reads_ids"], ready["checks"]

    async def _read(self) -> None:
        """Hands out answers until the process has ended, which fails the calls that still wait.

        The end of its pipe is not waited for: something that it started may hold the other end.
        """
        reading = asyncio.ensure_future(self._read_answers())
        exit_ = asyncio.ensure_future(self._child.ended())
        try:
            await asyncio.wait({reading, exit_}, return_when=asyncio.FIRST_COMPLETED)
            if not exit_.done():
                self.kill()  # it closed its pipe, or what it writes is no answer
                await exit_
            await asyncio.wait({reading}, timeout=LAST_WORDS)
            broken = reading.exception() if reading.done() else None
            how = f"wrote no answer: {broken}" if broken is not None else self._how_it_ended()
        finally:
            reading.cancel()
            exit_.cancel()
        for waiting in list(self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(ProcessDied(f"the reward process {how}", self._killed and broken is None))

    async def _read_answers(self) -> None:
        """Reads to the end of the pipe. Raises ValueError for a line that is no answer."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            waiting = self._waiting.get(answer["id"])  # missing if the call was given up
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)

    def _how_it_ended(self) -> str:
        code = self._process.returncode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with status {code}"


async def _by(deadline: float, answer: asyncio.Future[dict[str, Any]]) -> dict[str, Any]:
    """Waits for an answer until a time of the loop's clock; a late loop first reads what has come."""
    loop = asyncio.get_running_loop()
    await asyncio.wait([answer], timeout=deadline - loop.time())
    if not answer.done() and loop.time() > deadline + STOOD_STILL:
        await asyncio.wait([answer], timeout=TO_READ)
    if not answer.done():
        raise TimeoutError
    return answer.result()
