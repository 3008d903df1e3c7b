"""The producer: prompts become groups, all at once, and every failure has a kind, a count and an end.

a request    ends after rollout.request_timeout; lost ones are sent again rollout.request_retries times    (PatientSampler)
an episode   gives a trajectory, or None (rejected), or fails; a failed one is left out of its group
a group      fails when every episode did: its prompt is generated again after a pause, later ones go on meanwhile
a prompt     that failed recover.max_prompt_failures times by its own fault is dropped, and counted
the run      ends when recover.max_consecutive_failures groups failed with none between them that worked
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from rljax.buffer import NEVER, Buffer, Ticket, oldest_version
from rljax.config import Config
from rljax.engine import Sampler, WeightSource
from rljax.errors import EpisodeError, SamplerError, TooManyFailures
from rljax.journal import GroupLog, Record
from rljax.seeding import seed_for
from rljax.tally import Tally
from rljax.types import Completion, Group, Prompt, Request, SamplingParams, Trajectory
from rljax.workflow import Workflow

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 30.0  # seconds before something is tried again; doubles each time

log = logging.getLogger(__name__)


def pause_before(attempt: int) -> float:
    """Seconds to wait before the attempt; none before the first."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (attempt - 1)) if attempt else 0.0


class PatientSampler:
    """A sampler whose every request ends: with a completion, or with SamplerError."""

    def __init__(self, sampler: Sampler, *, timeout: float, retries: int, lost: Callable[[SamplerError], None]) -> None:
        """
        Args:
          timeout: seconds a request may take.
          lost: told of each time a request was lost, sent again or not.
        """
        self._sampler = sampler
        self._timeout = timeout
        self._retries = retries
        self._lost = lost

    @property
    def version(self) -> int:
        return self._sampler.version

    async def generate(self, request: Request) -> Completion:
        attempt = 0
        while True:
            try:
                async with asyncio.timeout(self._timeout):
                    return await self._sampler.generate(request)
            except TimeoutError:
                error = SamplerError(f"request {request.id}: no answer in {self._timeout:g} s (rollout.request_timeout)")
            except SamplerError as lost:
                error = lost
            self._lost(error)
            attempt += 1
            if attempt > self._retries:
                raise error
            await asyncio.sleep(pause_before(attempt))

    async def pause(self) -> None:
        await self._sampler.pause()

    async def resume(self) -> None:
        await self._sampler.resume()

    async def load_weights(self, source: WeightSource, version: int) -> None:
        await self._sampler.load_weights(source, version)

    async def close(self) -> None:
        await self._sampler.close()


@dataclasses.dataclass(frozen=True)
class Failure:
    """Of one episode."""

    kind: str
    error: Exception


async def run_episode(
    workflow: Workflow, sampler: Sampler, prompt: Prompt, params: SamplingParams, seed: int
) -> Trajectory | Failure | None:
    """One episode, its failure as a value: nothing a workflow does ends the others."""
    try:
        return await workflow.episode(sampler, prompt, params, seed)
    except EpisodeError as error:
        return Failure(error.kind, error)
    except Exception as error:  # whatever users' code raises
        return Failure(EpisodeError.kind, error)


class Producer:
    """Keeps as many prompts in flight as the buffer admits."""

    def __init__(
        self,
        config: Config,
        *,
        sampler: Sampler,
        workflow: Workflow,
        params: SamplingParams,
        accept: Callable[[Group], bool],
        buffer: Buffer,
        journals: GroupLog,
        known: dict[tuple[str, int], Record],
        tally: Tally,
        beat: Callable[[str], None],
        trace: Path | None = None,
    ) -> None:
        """
        Args:
          known: groups that a killed process finished and that still count, by uid and attempt.
          trace: file for one line an event of a group; None: no tracing.
        """
        self._config = config
        self._sampler = PatientSampler(
            sampler,
            timeout=config.rollout.request_timeout,
            retries=config.rollout.request_retries,
            lost=lambda error: tally.count(f"rollout/lost/{error.kind}"),
        )
        self._workflow = workflow
        self._params = params
        self._accept = accept
        self._buffer = buffer
        self._journals = journals
        self._known = known
        self._tally = tally
        self._beat = beat
        self._trace = trace
        self._told = False  # of a first failed episode
        self._failures: list[Failure] = []  # of the groups that failed since one worked

    async def run(self) -> None:
        """Runs until it is cancelled. Raises TooManyFailures."""
        try:
            async with asyncio.TaskGroup() as groups:
                while True:
                    while (ticket := self._buffer.admit()) is not None:
                        groups.create_task(self._group(ticket), name=f"group {ticket.prompt.uid}")
                    reason, start = self._buffer.waits_for, time.perf_counter()
                    await self._buffer.change()
                    self._tally.count(f"rollout/wait/producer_for_{reason}", time.perf_counter() - start)
        except BaseExceptionGroup as several:
            first = _first(several)
            raise first from first.__cause__

    async def _group(self, ticket: Ticket) -> None:
        """From a ticket to a group in the buffer, or to whatever else becomes of its prompt."""
        known = self._known.pop((ticket.prompt.uid, ticket.attempt), None)
        if known is not None:
            await asyncio.sleep(0)
            self._end(ticket, known.group, known.rewards)
            return
        await asyncio.sleep(pause_before(ticket.failures))
        self._note("start", ticket)
        results = await asyncio.gather(*(self._episode(ticket, i) for i in range(self._config.gconfig.n_samples)))
        for result in results:
            if isinstance(result, Failure):
                self._tally.count(f"rollout/failed/{result.kind}")
        group = Group(ticket.prompt.uid, tuple(r for r in results if isinstance(r, Trajectory)))
        failures = [r for r in results if isinstance(r, Failure)]
        if not group.trajectories and failures:
            self._failed(ticket, failures)
            return
        try:
            wanted = oldest_version(group.trajectories) != NEVER and self._accept(group)
        except Exception as error:  # the filter is users' code too
            self._tally.count(f"rollout/failed/{EpisodeError.kind}")
            self._failed(ticket, [Failure(EpisodeError.kind, error)])
            return
        self._failures = []
        self._journals.finished(ticket, group, accepted=wanted)
        self._end(ticket, group if wanted else None, tuple(t.reward for t in group.trajectories))

    async def _episode(self, ticket: Ticket, sample: int) -> Trajectory | Failure | None:
        seed = seed_for(self._config.seed, ticket.prompt.uid, sample, ticket.attempt)
        result = await run_episode(self._workflow, self._sampler, ticket.prompt, self._params, seed)
        if isinstance(result, Failure) and not self._told:
            self._told = True  # at once: a group ends with its slowest episode, minutes later where rewards time out
            log.warning("an episode of prompt %s failed: %s: %s", ticket.prompt.uid, result.kind, _one_line(result.error))
        return result

    def _end(self, ticket: Ticket, group: Group | None, rewards: tuple[float, ...]) -> None:
        """A group that was generated now or by the process before: accepted, or rejected when it is None."""
        if group is not None:
            rewards = tuple(t.reward for t in group.trajectories)
        self._tally.observe("rollout/finished_reward", rewards)
        self._beat(f"group {ticket.prompt.uid}")
        self._note("rejected" if group is None else "accepted", ticket)
        if group is None:
            self._buffer.reject(ticket)
        else:
            self._buffer.finish(ticket, group)

    def _failed(self, ticket: Ticket, failures: list[Failure]) -> None:
        """Every episode of the group failed."""
        first = failures[0]
        if not self._failures:
            log.warning("prompt %s failed: %s: %s", ticket.prompt.uid, first.kind, _one_line(first.error))
        self._failures.append(first)
        limit = self._config.recover.max_consecutive_failures
        if len(self._failures) >= limit:
            oldest = self._failures[0]
            raise TooManyFailures(
                f"recover.max_consecutive_failures: {limit} groups failed in a row; the first: {oldest.kind}:"
                f" {_one_line(oldest.error)}"
            ) from oldest.error
        own_fault = not all(isinstance(failure.error, SamplerError) for failure in failures)
        self._note(first.kind, ticket)
        if own_fault and ticket.failures + 1 >= self._config.recover.max_prompt_failures:
            log.warning("prompt %s is dropped: it failed %d times", ticket.prompt.uid, ticket.failures + 1)
            self._buffer.drop(ticket)
        else:
            self._buffer.again(ticket, own_fault=own_fault)

    def _note(self, event: str, ticket: Ticket) -> None:
        if self._trace is not None:
            fields = {"time": time.time(), "event": event, "uid": ticket.prompt.uid, "attempt": ticket.attempt}
            with self._trace.open("a") as file:
                file.write(json.dumps(fields | {"version": self._sampler.version}) + "\n")


def _first(several: BaseExceptionGroup) -> BaseException:
    """The first exception in a group of them."""
    error: BaseException = several
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
