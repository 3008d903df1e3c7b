"""Producer: prompts become groups, concurrently. Failures of users' code become values with a kind.

request   ends within rollout.request_timeout, rollout.request_retries included (RetryingGenerator)
episode   gives trajectories, or None (rejected), or a failure; ends within
          rollout.episode_timeout                                                 (run_episode)
group     consists of the trajectories of its episodes                          (GroupRunner)

The tracker (tracker.py) decides what happens to the prompt afterwards. Groups are generated in this
process (Producer), or in rollout workers (rljax/workers).
"""

from __future__ import annotations

import asyncio
import bdb
import contextlib
import dataclasses
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

import numpy as np

from rljax import tracing
from rljax.engine import Generator
from rljax.errors import EpisodeError, EpisodeTimeout, Rejected, RequestLost, SamplerError
from rljax.metrics.accumulator import Accumulator
from rljax.rollout.buffer import NEVER, Buffer, Ticket, oldest_version
from rljax.rollout.gathering import Gathering
from rljax.rollout.result import Failure, Result
from rljax.rollout.tracker import PromptTracker
from rljax.rollout.trajectories import check_token_ids, with_numbers
from rljax.rollout.workflow import Workflow
from rljax.seeding import seed_for
from rljax.types import Completion, Group, Prompt, Request, SamplingParams, Trajectory

Filter = Callable[[Group], bool | Awaitable[bool]]

FIRST_DELAY, MAX_DELAY = 0.05, 30.0  # seconds before a retry; doubles with each

EpisodeResult = Trajectory | tuple[Trajectory, ...] | Failure | None  # one, parts of one, failed, rejected

log = logging.getLogger(__name__)


def retry_delay(attempt: int) -> float:
    """Returns the seconds to wait before an attempt; 0 before the first (attempt 0)."""
    return min(MAX_DELAY, FIRST_DELAY * 2.0 ** (attempt - 1)) if attempt else 0.0


SAMPLING_SECONDS = "sampling_seconds"  # in which a request was under way, for the rate; no metric of its own


class RetryingGenerator(Generator):
    """Generator with a timeout per request and retries. Ends with a completion or a SamplerError.

    It applies the timeout to any sampler. It retries unless the sampler does so itself and raises
    RequestLost: a client of several servers continues at another one after the tokens it has.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        timeout: float,
        retries: int,
        lost: Callable[[SamplerError], None],
        busy: AbstractContextManager[object] | None = None,
    ) -> None:
        """
        Args:
          timeout: seconds per request, for all its attempts and the delays between them.
          retries: attempts after the first.
          lost: called with the error each time a request was lost, whether it is sent again or not.
          busy: entered while a request is under way; it may be entered several times at once.
        """
        self._generator = generator
        self._timeout = timeout
        self._retries = retries
        self._lost = lost
        self._busy = contextlib.nullcontext() if busy is None else busy

    @property
    def version(self) -> int:
        return self._generator.version

    async def generate(self, request: Request) -> Completion:
        with tracing.span("generate", request=request.id, prompt_tokens=len(request.prompt_ids)) as span:
            with self._busy:
                completion = await self._in_time(request)
            if tracing.is_on():
                oldest, newest = int(completion.versions.min(initial=NEVER)), int(completion.versions.max(initial=0))
                span.note(tokens=len(completion.token_ids), finish=completion.finish.value, oldest=oldest, newest=newest)
            return completion

    async def _in_time(self, request: Request) -> Completion:
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
            await asyncio.sleep(retry_delay(attempt))


@dataclasses.dataclass
class GroupRunner:
    """Runs the episodes of groups, in the trainer's process or in a worker."""

    workflow: Workflow
    generator: Generator
    params: SamplingParams
    n_samples: int
    seed: int  # of the run
    accept: Filter  # rollout.should_accept_fn
    timeout: float | None = None  # seconds per episode: rollout.episode_timeout
    vocab_size: int | None = None  # token ids of trajectories are below it; None to leave that unchecked
    quit: bool = False  # somebody quit the debugger in an episode: no other one is begun
    warned: bool = False  # about the first failed episode; the others are only counted

    async def run(self, ticket: Ticket) -> Result:
        """Runs all episodes of one prompt, after a delay if the prompt failed before.

        Exceptions of users' code become failures; none is raised.
        """
        await asyncio.sleep(retry_delay(ticket.failures))
        together = Gathering(self.n_samples)
        results = await asyncio.gather(*(self._episode(ticket, sample, together) for sample in range(self.n_samples)))
        trajectories = tuple(t for sample, result in enumerate(results) for t in parts_of(result, sample))
        failures = tuple(r for r in results if isinstance(r, Failure))
        if not trajectories:
            return Result((), failures, wanted=False)
        try:
            group = Group(ticket.prompt.uid, trajectories)
            wanted = oldest_version(trajectories) != NEVER and await verdict_of(self.accept, group)
        except Exception as error:  # the filter is users' code too
            return Result((), (*failures, Failure(EpisodeError.kind, error)), wanted=False)
        return Result(trajectories, failures, wanted)

    async def _episode(self, ticket: Ticket, sample: int, together: Gathering) -> EpisodeResult:
        seed = seed_for(self.seed, ticket.prompt.uid, sample, ticket.attempt)
        with together.member():
            if self.quit:
                raise bdb.BdbQuit
            try:
                result = await run_episode(
                    self.workflow, self.generator, ticket.prompt, self.params, seed,
                    timeout=self.timeout, vocab_size=self.vocab_size,
                )  # fmt: skip
            except bdb.BdbQuit:
                self.quit = True
                raise
        if isinstance(result, Failure) and not self.warned:
            self.warned = True  # now, not at the group's end: that may be minutes later, when rewards time out
            log.warning("an episode of prompt %s failed: %s", ticket.prompt.uid, result.reason)
        return result


async def verdict_of(accept: Filter, group: Group) -> bool:
    """Returns whether a filter, plain or async, wants a group.

    Raises TypeError if it does not return a bool: a forgotten `return` would reject every group.
    """
    verdict = accept(group)
    if inspect.isawaitable(verdict):
        verdict = await verdict
    if not isinstance(verdict, bool | np.bool_):
        raise TypeError(f"rollout.should_accept_fn returned {type(verdict).__name__}, not a bool")
    return bool(verdict)


async def run_episode(
    workflow: Workflow,
    generator: Generator,
    prompt: Prompt,
    params: SamplingParams,
    seed: int,
    *,
    timeout: float | None = None,
    vocab_size: int | None = None,
    kind: str = "trajectory",
) -> EpisodeResult:
    """Runs one episode. Returns a Failure if the workflow raises; other episodes go on.

    Args:
      timeout: seconds after which the episode is cancelled, and fails as `episode_timeout`.
      vocab_size: number of token ids of the model; None to leave them unchecked.
      kind: name of its span in the trace, and of the lanes of such spans.
    """
    limit = asyncio.timeout(timeout)
    with tracing.span(kind, lane=kind, uid=prompt.uid, seed=seed) as span:
        result: EpisodeResult
        try:
            async with limit:
                done = await workflow.episode(generator, prompt, params, seed)
            result = _checked(done, workflow)
            check_token_ids(parts_of(result, 0), vocab_size)
        except Rejected:
            result = None
        except EpisodeError as error:
            result = Failure(error.kind, error)
        except bdb.BdbQuit:  # "quit" at a breakpoint ends the program, not the episode
            raise
        except Exception as error:  # users' code may raise anything
            late = isinstance(error, TimeoutError) and limit.expired()  # else it is the workflow's own
            result = _too_late(prompt, timeout, error) if late else Failure(EpisodeError.kind, error)
        span.note(**_told(result))
        return result


def _too_late(prompt: Prompt, timeout: float | None, error: Exception) -> Failure:
    late = EpisodeTimeout(f"an episode of prompt {prompt.uid} ran longer than {timeout or 0:g} s (rollout.episode_timeout)")
    late.__cause__ = error.__cause__  # the cancellation, whose traceback ends where the episode waited
    return Failure(late.kind, late)


def _checked(done: object, workflow: Workflow) -> EpisodeResult:
    """Returns what a workflow returned, with rewards as floats.

    Raises TypeError for anything but trajectories, and ValueError for a reward that none may be.
    """
    if done is None:
        return None
    parts = (done,) if isinstance(done, Trajectory) else done
    if not isinstance(parts, list | tuple) or not parts or not all(isinstance(part, Trajectory) for part in parts):
        raise TypeError(f"the workflow returned {type(done).__name__}: a Trajectory, a list of at least one, or None")
    try:
        checked = tuple(map(with_numbers, parts))
    except ValueError as error:
        raise ValueError(f"the workflow {type(workflow).__name__}: {error}") from None
    return checked[0] if isinstance(done, Trajectory) else checked


def _told(result: EpisodeResult) -> dict[str, object]:
    """Returns what the trace says of an episode's end."""
    match result:
        case Failure():
            return {"failure": result.reason[:200]}
        case None:
            return {"rejected": True}
        case _:
            parts = parts_of(result, 0)
            reward, tokens = sum(part.reward for part in parts) / len(parts), sum(map(len, parts))
            return {"reward": reward, "tokens": tokens, "finish": parts[-1].finish.value}


def parts_of(result: EpisodeResult, sample: int) -> tuple[Trajectory, ...]:
    """Returns the trajectories of an episode, those of several parts marked as such.

    Args:
      sample: index of the episode in its group.
    """
    if isinstance(result, Trajectory):
        return (result,)
    if isinstance(result, tuple):
        return tuple(dataclasses.replace(part, episode=sample) for part in result)
    return ()


class Producer:
    """Keeps as many prompts in flight in this process as the buffer admits."""

    def __init__(self, runner: GroupRunner, buffer: Buffer, tracker: PromptTracker, accumulator: Accumulator) -> None:
        self._runner = runner
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
                    with tracing.wait(f"wait for {reason}", track="producer"):
                        await self._buffer.change()
                    self._accumulator.count(f"rollout/wait/producer_for_{reason}", time.perf_counter() - start)
        except BaseExceptionGroup as several:
            first = _first_exception(several)
            raise first from first.__cause__

    async def _group(self, ticket: Ticket) -> None:
        """Generates the group of one prompt, or finds it in the journal, and settles the prompt."""
        await asyncio.sleep(0)
        if not self._tracker.settle_recovered(ticket):
            self._tracker.started(ticket)
            self._tracker.settle(ticket, await self._runner.run(ticket))


def _first_exception(several: BaseExceptionGroup) -> BaseException:
    """Returns the first leaf of an exception group."""
    error: BaseException = several
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
