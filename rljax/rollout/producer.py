"""The producer: prompts become groups, all at once, and whatever users' code does is a value with
a kind.

a request    ends within rollout.request_timeout; a lost one is sent again rollout.request_retries times   (PatientGenerator)
an episode   gives a trajectory, or None (rejected), or fails; a failed one is left out of its group       (run_episode)
a group      is made of the episodes that worked                                                           (Rollouts)

What becomes of a prompt then, tracker.py says. Groups are made in this process (Producer), or in
others (rljax/workers).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable

from rljax.engine import Generator
from rljax.errors import EpisodeError, RequestLost, SamplerError
from rljax.metrics.accumulator import Accumulator
from rljax.rollout.buffer import NEVER, Buffer, Ticket, oldest_version
from rljax.rollout.result import Failure, Result
from rljax.rollout.tracker import PromptTracker
from rljax.rollout.workflow import Workflow
from rljax.seeding import seed_for
from rljax.types import Completion, Group, Prompt, Request, SamplingParams, Trajectory

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 30.0  # seconds before something is tried again; doubles each time

log = logging.getLogger(__name__)


def pause_before(attempt: int) -> float:
    """Seconds to wait before the attempt; none before the first."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (attempt - 1)) if attempt else 0.0


class PatientGenerator(Generator):
    """A generator whose every request ends in time: with a completion, or with SamplerError.

    It owns the time limit of a request, whatever samples. It owns the retries too, but for
    samplers that retry by themselves (a client of servers sends the rest to another, behind the
    tokens that came): those raise RequestLost.
    """

    def __init__(self, generator: Generator, *, timeout: float, retries: int, lost: Callable[[SamplerError], None]) -> None:
        """
        Args:
          timeout: seconds a request may take, with all its attempts and the pauses between them.
          retries: attempts after the first.
          lost: called with the error each time a request was lost, sent again or not.
        """
        self._generator = generator
        self._timeout = timeout
        self._retries = retries
        self._lost = lost

    @property
    def version(self) -> int:
        return self._generator.version

    async def generate(self, request: Request) -> Completion:
        try:
            async with asyncio.timeout(self._timeout):
                return await self._with_retries(request)
        except TimeoutError:
            error = SamplerError(f"request {request.id}: no answer in {self._timeout:g} s (rollout.request_timeout)")
            self._lost(error)
            raise error from None

    async def _with_retries(self, request: Request) -> Completion:
        attempt = 0
        while True:
            try:
                return await self._generator.generate(request)
            except SamplerError as error:
                self._lost(error)
                attempt += 1
                if isinstance(error, RequestLost) or attempt > self._retries:
                    raise
            await asyncio.sleep(pause_before(attempt))


@dataclasses.dataclass
class Rollouts:
    """Makes groups: in the trainer's process, or in a worker's (rljax/workers/client.py)."""

    workflow: Workflow
    generator: Generator
    params: SamplingParams
    n_samples: int
    seed: int  # of the run
    accept: Callable[[Group], bool]  # rollout.should_accept_fn
    told: bool = False  # of a first failed episode; the others are counted

    async def group(self, ticket: Ticket) -> Result:
        """All samples of one prompt, after a pause where it failed before.

        Never raises what users' code raises.
        """
        await asyncio.sleep(pause_before(ticket.failures))
        results = await asyncio.gather(*(self._episode(ticket, sample) for sample in range(self.n_samples)))
        trajectories = tuple(r for r in results if isinstance(r, Trajectory))
        failures = tuple(r for r in results if isinstance(r, Failure))
        if not trajectories:
            return Result((), failures, wanted=False)
        try:
            group = Group(ticket.prompt.uid, trajectories)
            wanted = oldest_version(trajectories) != NEVER and bool(self.accept(group))
        except Exception as error:  # the filter is users' code too
            return Result((), (*failures, Failure(EpisodeError.kind, error)), wanted=False)
        return Result(trajectories, failures, wanted)

    async def _episode(self, ticket: Ticket, sample: int) -> Trajectory | Failure | None:
        seed = seed_for(self.seed, ticket.prompt.uid, sample, ticket.attempt)
        result = await run_episode(self.workflow, self.generator, ticket.prompt, self.params, seed)
        if isinstance(result, Failure) and not self.told:
            self.told = True  # at once: a group ends with its slowest episode, minutes later where rewards time out
            log.warning("an episode of prompt %s failed: %s", ticket.prompt.uid, result.reason)
        return result


async def run_episode(
    workflow: Workflow, generator: Generator, prompt: Prompt, params: SamplingParams, seed: int
) -> Trajectory | Failure | None:
    """One episode, its failure as a value: nothing a workflow does ends the others."""
    try:
        return await workflow.episode(generator, prompt, params, seed)
    except EpisodeError as error:
        return Failure(error.kind, error)
    except Exception as error:  # whatever users' code raises
        return Failure(EpisodeError.kind, error)


class Producer:
    """Keeps as many prompts in flight, in this process, as the buffer admits."""

    def __init__(self, rollouts: Rollouts, buffer: Buffer, tracker: PromptTracker, accumulator: Accumulator) -> None:
        self._rollouts = rollouts
        self._buffer = buffer
        self._tracker = tracker
        self._accumulator = accumulator

    async def run(self) -> None:
        """Runs until it is cancelled. Raises TooManyFailures."""
        try:
            async with asyncio.TaskGroup() as groups:
                while True:
                    while (ticket := self._buffer.admit()) is not None:
                        groups.create_task(self._group(ticket), name=f"group {ticket.prompt.uid}")
                    reason, start = self._buffer.waits_for, time.perf_counter()
                    await self._buffer.change()
                    self._accumulator.count(f"rollout/wait/producer_for_{reason}", time.perf_counter() - start)
        except BaseExceptionGroup as several:
            first = _first(several)
            raise first from first.__cause__

    async def _group(self, ticket: Ticket) -> None:
        """From a ticket to a group in the buffer, or to whatever else becomes of its prompt."""
        await asyncio.sleep(0)
        if not self._tracker.settle_known(ticket):
            self._tracker.started(ticket)
            self._tracker.settle(ticket, await self._rollouts.group(ticket))


def _first(several: BaseExceptionGroup) -> BaseException:
    """The first exception in a group of them."""
    error: BaseException = several
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
