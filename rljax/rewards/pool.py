"""Reward processes: off the event loop, killed after a timeout, replaced if they die.

    who             waits for                  who unblocks it
    score           a free process, in order   a call that ends, fails or runs out of time
    a process       a job, on a pipe           score; the pipe's end if the pool or parent is gone

Failures are counted: a reward that fails is an error of its kind, never a zero.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rljax import tracing
from rljax.config.schema import RewardConfig
from rljax.errors import Rejected, RewardError, RewardTimeout, UserError
from rljax.metrics.mean import Mean, merge
from rljax.rewards.process import START_TIMEOUT, ProcessDied, RewardProcess
from rljax.rewards.score import Sampled, Score
from rljax.rewards.shapes import Fault
from rljax.rollout import gathering
from rljax.types import Prompt

ASYNC_CALLS = 64  # most calls of an async reward at once in a process
CHECKED_AT_ONCE = 64  # prompts per job of a check
GRACE = 1.0  # seconds for an async reward to be cancelled before its process is killed


class _Supervisor:
    """Starts a reward process, and starts it again if it has died."""

    def __init__(self, config: RewardConfig, number: int) -> None:
        self.number = number
        self._config = config
        self._start: asyncio.Task[RewardProcess] | None = None

    @property
    def process(self) -> RewardProcess | None:
        """The process, dead or alive; None before it is started."""
        started = self._start is not None and self._start.done() and not self._start.cancelled()
        return self._start.result() if self._start and started and self._start.exception() is None else None

    async def running(self) -> RewardProcess:
        """Returns the process, and starts it first if need be.

        Raises UserError if that fails; the next call tries again.
        """
        if self._start is None or (self._start.done() and (self.process is None or not self.process.alive)):
            self._start = asyncio.create_task(RewardProcess.start(self._config))
        return await asyncio.shield(self._start)  # if this caller is cancelled, the next one uses the process

    async def close(self) -> None:
        if self._start is not None and not self._start.done():
            self._start.cancel()
            await asyncio.wait([self._start])
        if self.process is not None:
            self.process.kill()
            await self.process.ended()


class RewardPool:
    """Scores completions in `reward.workers` processes.

    Example:
        async with RewardPool(config.reward) as rewards:
            score = await rewards.score(prompt, "46")
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._supervisors: list[_Supervisor] = []
        # Has a supervisor once for each call that its process can take now; None: the pool is closed
        self._free: asyncio.Queue[_Supervisor | None] = asyncio.Queue()
        self._retired: list[RewardProcess] = []  # killed, perhaps not reaped yet
        self._closed = False
        self._at_once = False  # has a reward that scores a whole group in one call
        self.reads_ids = False  # `score` is to be given token ids
        self._metrics: dict[str, Mean] = {}
        self._retried: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()  # "reward_error", "reward_timeout": attempts that failed, since the start

    async def start(self) -> None:
        """Starts all processes.

        Raises UserError with one line if the reward cannot be imported.
        """
        self._supervisors = [_Supervisor(self._config, number) for number in range(self._config.workers)]
        started = await asyncio.gather(*(supervisor.running() for supervisor in self._supervisors), return_exceptions=True)
        failures = [outcome for outcome in started if isinstance(outcome, BaseException)]
        if failures:
            await self.close()
            raise failures[0]
        for supervisor in self._supervisors:
            process = supervisor.process
            assert process is not None
            self._at_once, self.reads_ids = process.at_once, process.reads_ids
            for _ in range(ASYNC_CALLS if process.is_async else 1):
                self._free.put_nowait(supervisor)

    async def score(self, prompt: Prompt, completion: str, sampled: Sampled | None = None) -> Score:
        """Scores one completion; a failed attempt is repeated up to `reward.retries` times.

        A reward that scores lists is called once for all episodes of the group that are at this
        point, if they run as a group (rljax/rollout/gathering.py).

        Args:
          sampled: its token ids; needed if `reads_ids`.

        Raises:
          Rejected: no reward applies to it.
          RewardTimeout: it ran longer than `reward.timeout`; its process was killed.
          RewardError: it raised, returned no number, or its process died.
        """
        item = (completion, sampled and dataclasses.asdict(sampled))
        group = gathering.current() if self._at_once else None
        with tracing.span("reward", reward=self._config.name) as span:
            if group is None:
                (score,) = await self._scores(prompt, [item])
            else:
                score = await group.together(item, functools.partial(self._scores, prompt))
            if score is None:
                raise Rejected(f"prompt {prompt.uid}: {self._config.name} does not apply")
            span.note(reward=score.reward)
            return score

    async def try_once(self, prompt: Prompt, completion: str, sampled: Sampled | None = None) -> None:
        """Scores a completion without counting it, to see whether that works.

        Raises RewardError or RewardTimeout, whose `place` is that of the error in users' code.
        """
        item = (completion, sampled and dataclasses.asdict(sampled))
        await self._answer({"prompt": _encoded(prompt), "samples": [item], "trial": True}, prompt.uid)

    async def faults(self, prompts: Sequence[Prompt]) -> dict[int, Fault]:
        """Returns why prompts can't be scored, by index, as far as the rewards say what they read.

        Raises RewardError or RewardTimeout if a check fails itself.
        """
        if not any(supervisor.process is not None and supervisor.process.checks for supervisor in self._supervisors):
            return {}
        parts = [range(start, min(start + CHECKED_AT_ONCE, len(prompts))) for start in range(0, len(prompts), CHECKED_AT_ONCE)]

        async def of(part: range) -> dict[int, Fault]:
            answer = await self._answer({"check": [_encoded(prompts[i]) for i in part]}, prompts[part.start].uid)
            return {part.start + int(i): Fault(*fault) for i, fault in answer["faults"].items()}

        found: dict[int, Fault] = {}
        for faults in await asyncio.gather(*map(of, parts)):
            found |= faults
        return found

    async def _scores(self, prompt: Prompt, items: Sequence[Any]) -> list[Score | None]:
        """Scores several completions of a prompt in one job, with retries."""
        job = {"prompt": _encoded(prompt), "samples": items}
        for attempt in range(self._config.retries + 1):
            try:
                answer = await self._answer(job, prompt.uid)
                return [score and Score(score["reward"], score["components"]) for score in answer["scores"]]
            except (RewardError, RewardTimeout) as error:
                self.counts[error.kind] += 1
                if attempt == self._config.retries:
                    raise
                self._retried[error.kind] += 1
        raise AssertionError("unreachable")

    def take_metrics(self) -> dict[str, Mean]:
        """Returns the metrics since the last call, and starts new ones.

        They are seconds per scored completion, without the wait for a process, and the number of
        failed attempts that were repeated, by kind. (The others are failures of their episodes.)
        """
        taken = self._metrics | {f"rollout/retried/{kind}": Mean(count, 1) for kind, count in self._retried.items()}
        self._metrics, self._retried = {}, Counter(dict.fromkeys(self._retried, 0))
        return taken

    async def close(self) -> None:
        """Kills all processes and waits until they are gone.

        Calls of `score` that still wait raise RewardError.
        """
        self._closed = True
        self._free.put_nowait(None)
        closing = [supervisor.close() for supervisor in self._supervisors]
        await asyncio.gather(*closing, *(process.ended() for process in self._retired))
        self._supervisors, self._retired = [], []

    async def __aenter__(self) -> RewardPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _answer(self, job: dict[str, Any], uid: str) -> dict[str, Any]:
        """Has a process do a job, once. Raises RewardError or RewardTimeout."""
        limit = START_TIMEOUT if "check" in job else self._config.timeout * len(job["samples"])
        while True:
            with tracing.wait("wait for a reward process"):
                supervisor = await self._free.get()
            if supervisor is None or self._closed:
                self._free.put_nowait(None)  # wakes the next waiting call
                raise RewardError(f"prompt {uid}: the reward pool is closed")
            try:
                process = await supervisor.running()
                began = time.monotonic()
                with tracing.wait("reward call", lane=f"reward process {supervisor.number}", uid=uid):
                    answer = await self._ask(process, job, limit)
                break
            except ProcessDied as died:
                if not died.killed:
                    raise RewardError(f"prompt {uid}: {died}") from None
                # Killed because another call in the same process ran out of time: this one tries again.
            except UserError as error:  # a process could not be started again
                raise RewardError(f"prompt {uid}: {error}") from error
            except TimeoutError:
                answer = {"timeout": True}
                break
            finally:
                self._free.put_nowait(supervisor)
        if answer.get("timeout"):
            raise RewardTimeout(f"prompt {uid}: the reward {self._config.name} ran longer than {limit:g} s")
        if "error" in answer:
            failed = RewardError(f"prompt {uid}: {answer['error']}", answer["place"])
            failed.add_note(answer["traceback"])  # the other process's, as a note, so that the message stays one line
            raise failed
        if "samples" in job and "trial" not in job:
            seconds = Mean(time.monotonic() - began, len(job["samples"]))
            self._metrics = merge([self._metrics, {"timeperf/reward": seconds}])
        return answer

    async def _ask(self, process: RewardProcess, job: dict[str, Any], limit: float) -> dict[str, Any]:
        """Asks a process. Raises TimeoutError, after which the process is killed."""
        try:
            return await process.ask(job, limit + (GRACE if process.is_async else 0.0))
        except TimeoutError:
            self._retire(process)
            raise
        except asyncio.CancelledError:
            if not process.is_async:  # frees the process for the next call
                self._retire(process)
            raise

    def _retire(self, process: RewardProcess) -> None:
        process.kill()
        self._retired = [retired for retired in self._retired if not retired.gone] + [process]


def _encoded(prompt: Prompt) -> dict[str, Any]:
    """Returns a prompt as JSON values, without copying what its fields hold."""
    values = {field.name: getattr(prompt, field.name) for field in dataclasses.fields(prompt)}
    return values | {"messages": [dict(message) for message in prompt.messages], "fields": dict(prompt.fields)}
