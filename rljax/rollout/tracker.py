"""Tracker: decides what happens to a prompt after its group was generated, failed or was lost.

finished group   is journaled, and accepted into the buffer or rejected
failed group     (all its episodes failed) is generated again after a delay; later prompts go on
failed prompt    is dropped after recover.max_prompt_failures failures by its own fault
lost worker      counts as one failure; its prompts are generated again and are not at fault
run              ends after recover.max_consecutive_failures failed groups in a row (of a prompt
                 that is at fault itself, only the first one counts), or
                 recover.max_consecutive_rejected rejected groups in a row
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from rljax import tracing
from rljax.config.schema import Config
from rljax.errors import SamplerError, StaleSampler, TooManyFailures, UserError, WorkerLost
from rljax.metrics.accumulator import Accumulator
from rljax.rollout.buffer import Buffer, Ticket, oldest_version
from rljax.rollout.journal import Journals, Record
from rljax.rollout.result import Failure, Result
from rljax.types import PROMPT_VERSION, Group, Trajectory, episode_rewards

GENERATED_TOKENS = "generated_tokens"  # counted in this process, for the rate; no metric of its own, as a kill loses some
SAID_DROPPED = (1, 10, 100, 1000, 10_000, 100_000)  # dropped prompts, counted over the run, with a line
WARN_REJECTED = 64  # groups rejected in a row before a warning

log = logging.getLogger(__name__)


class PromptTracker:
    """Records the outcome of each prompt. Belongs to the event loop's thread."""

    def __init__(
        self,
        config: Config,
        *,
        buffer: Buffer,
        journals: Journals,
        recovered: dict[tuple[str, int], Record],
        accumulator: Accumulator,
        beat: Callable[[str], None],
    ) -> None:
        """
        Args:
          recovered: groups that a killed process finished and that can be used, by uid and attempt.
          beat: tells the watchdog that something moved.
        """
        self._config = config
        self._buffer = buffer
        self._journals = journals
        self._recovered = recovered
        self._accumulator = accumulator
        self._beat = beat
        self._start_version: dict[int, int] = {}  # version when generation began, by index
        self._failures: list[Failure] = []  # since the last group that did not fail
        self._first_failure: Failure | None = None  # of a whole group
        self._rejected = 0  # groups since the last accepted one
        self._rejected_rewards: list[float] = []  # mean rewards of the last rejected groups

    @property
    def first_failure(self) -> Failure | None:
        """First failure of a whole group: of those in a row up to now, else of the run. None: none."""
        return self._failures[0] if self._failures else self._first_failure

    def settle_recovered(self, ticket: Ticket) -> bool:
        """Settles a prompt whose group a killed process finished. Returns whether there is one."""
        record = self._recovered.pop((ticket.prompt.uid, ticket.attempt), None)
        if record is not None:
            self._end(ticket, record.group, record.rewards)
        return record is not None

    def started(self, ticket: Ticket) -> None:
        """Records that generation of a group begins now."""
        self._start_version[ticket.index] = self._buffer.version
        self._count()

    def settle(self, ticket: Ticket, result: Result) -> None:
        """Records the result of a group that was generated.

        Raises:
          TooManyFailures: too many groups failed in a row.
          UserError: the filter rejected too many groups in a row, or the disk is full.
        """
        result = self._check_staleness(result, self._start_version.pop(ticket.index))
        for failure in result.failures:
            self._accumulator.count(f"rollout/failed/{failure.kind}")
        if result.failures and not result.trajectories:
            self._failed(ticket, result.failures)
            return
        self._failures = []
        group = Group(ticket.prompt.uid, result.trajectories)
        self._journals.append(ticket, group, accepted=result.wanted)
        self._accumulator.count(GENERATED_TOKENS, sampled_tokens(group.trajectories))
        self._end(ticket, group if result.wanted else None, episode_rewards(group.trajectories))

    def _check_staleness(self, result: Result, start_version: int) -> Result:
        """Turns a group into a failure if the sampler does not take the published weights.

        A group that began after the last publish can't have tokens that are too old otherwise, and
        it would be generated again without end.
        """
        version, oldest = self._buffer.version, oldest_version(result.trajectories)
        if not result.wanted or start_version < version or oldest >= version - self._buffer.limits.max_lag:
            return result
        error = StaleSampler(
            f"tokens of version {oldest}, begun after version {version} was published: the sampler doesn't take the weights"
            " (is another run attached to it?)"
        )
        return Result((), (Failure(error.kind, error),), wanted=False)

    def lost(self, tickets: Iterable[Ticket], error: WorkerLost) -> None:
        """Requeues the prompts of a worker that is gone. Raises TooManyFailures."""
        self._accumulator.count(f"rollout/lost/{error.kind}")
        for ticket in tickets:
            del self._start_version[ticket.index]
            self._buffer.requeue(ticket, own_fault=False)
        self._count_failure(Failure(error.kind, error))

    def _end(self, ticket: Ticket, group: Group | None, rewards: tuple[float, ...]) -> None:
        """Accepts the group, or rejects the prompt if there is none."""
        if group is not None:
            rewards = episode_rewards(group.trajectories)
        self._observe(rewards)
        self._beat(f"group {ticket.prompt.uid}")
        if group is None:
            self._buffer.reject(ticket)
            self._count_rejected(rewards)
        else:
            self._rejected = 0
            tracing.begin(waiting_in_buffer(ticket.index), "wait in buffer", lane="buffer", uid=ticket.prompt.uid)
            self._buffer.finish(ticket, group)
        self._count()

    def _observe(self, rewards: Sequence[float]) -> None:
        """Observes the rewards of a finished group, wanted or not."""
        self._accumulator.observe("rollout/finished_reward", rewards)
        if rewards:
            success = self._config.evaluator.success
            self._accumulator.share("rollout/all_right_groups", min(rewards) >= success)
            self._accumulator.share("rollout/all_wrong_groups", max(rewards) < success)

    def _count_rejected(self, rewards: Sequence[float]) -> None:
        self._rejected += 1
        self._rejected_rewards = [
            *self._rejected_rewards[1 - WARN_REJECTED :],
            *([sum(rewards) / len(rewards)] if rewards else []),
        ]
        limit = self._config.recover.max_consecutive_rejected
        if self._rejected in (WARN_REJECTED, limit):
            recent = self._rejected_rewards
            accept = self._config.rollout.should_accept_fn
            if accept or recent:  # a script's filter has no name
                name, key, others = accept or "the filter", "rollout.should_accept_fn", "another filter"
            else:
                name, key, others = "the workflow", "rollout.workflow", "a reward that is no None for them"
            mean = f"mean reward of the last {len(recent)}: {sum(recent) / len(recent):.4g}" if recent else "none has a reward"
            line = f"{name} rejected {self._rejected} groups in a row ({mean})"
            if self._rejected == limit:
                raise UserError(
                    f"{key}: {line}: nothing is left to train on"
                    f" (other prompts, {others}, or a higher recover.max_consecutive_rejected)"
                )
            log.warning("%s; the run ends at %d (recover.max_consecutive_rejected)", line, limit)

    def _failed(self, ticket: Ticket, failures: Sequence[Failure]) -> None:
        """Requeues or drops a prompt all of whose episodes failed."""
        first = failures[0]
        self._first_failure = self._first_failure or first
        self._beat(f"failed group {ticket.prompt.uid}")
        if not self._failures:
            log.warning("prompt %s failed: %s", ticket.prompt.uid, first.reason)
        own_fault = not all(isinstance(failure.error, SamplerError | StaleSampler) for failure in failures)
        if not (own_fault and ticket.failures):  # while the learner is busy, prompts that failed are all that is generated
            self._count_failure(first)
        if own_fault and ticket.failures + 1 >= self._config.recover.max_prompt_failures:
            self._buffer.drop(ticket)
            count = self._buffer.counts["dropped"]
            if count in SAID_DROPPED:
                so_far = f" ({count} are by now)" if count > 1 else ""
                log.warning("prompt %s is dropped: it failed %d times%s", ticket.prompt.uid, ticket.failures + 1, so_far)
        else:
            self._buffer.requeue(ticket, own_fault=own_fault)

    def _count_failure(self, failure: Failure) -> None:
        self._failures.append(failure)
        limit = self._config.recover.max_consecutive_failures
        if len(self._failures) >= limit:
            oldest = self._failures[0]
            raise TooManyFailures(
                f"recover.max_consecutive_failures: {limit} groups failed in a row; the first: {oldest.reason}"
            ) from oldest.error

    def _count(self) -> None:
        tracing.count("buffer", running=self._buffer.running, ready=self._buffer.ready)


def waiting_in_buffer(index: int) -> tuple[str, int]:
    """Returns the key in the trace of the time that a group, by its ticket's index, is ready."""
    return "wait in buffer", index


def sampled_tokens(trajectories: Iterable[Trajectory]) -> int:
    """Counts the tokens that a sampler drew."""
    return sum(int((t.versions != PROMPT_VERSION).sum()) for t in trajectories)
