"""What becomes of a prompt: counted, journaled and put into the buffer; or tried again, dropped,
or the end of the run.

a failed group     every episode failed: its prompt is generated again after a pause, later ones go on meanwhile
a prompt           that failed recover.max_prompt_failures times by its own fault is dropped, and counted
a lost worker      its prompts are generated again; a failure, and no prompt's fault
the run            ends when recover.max_consecutive_failures groups failed with none between them that worked,
                   or the filter rejected recover.max_consecutive_rejected in a row
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rljax.config.schema import Config
from rljax.errors import SamplerError, StaleSampler, TooManyFailures, UserError, WorkerLost
from rljax.metrics.accumulator import Accumulator
from rljax.rollout.buffer import Buffer, Ticket, oldest_version
from rljax.rollout.journal import GroupLog, Record
from rljax.rollout.result import Failure, Result
from rljax.types import Group

WARN_REJECTED = 64  # groups rejected in a row that are worth a line on the screen

log = logging.getLogger(__name__)


class PromptTracker:
    """One book for all who generate. It belongs to the event loop's thread."""

    def __init__(
        self,
        config: Config,
        *,
        buffer: Buffer,
        journals: GroupLog,
        known: dict[tuple[str, int], Record],
        accumulator: Accumulator,
        beat: Callable[[str], None],
        trace: Path | None = None,
    ) -> None:
        """
        Args:
          known: groups that a killed process finished and that still count, by uid and attempt.
          trace: file for one line an event of a group; None: no tracing.
        """
        self._config = config
        self._buffer = buffer
        self._journals = journals
        self._known = known
        self._accumulator = accumulator
        self._beat = beat
        self._trace = trace
        self._admitted: dict[int, int] = {}  # version when its generation began, by index
        self._failures: list[Failure] = []  # of the groups that failed since one worked
        self._rejected = 0  # groups since one was accepted
        self._rejected_rewards: list[float] = []  # means of the last of them

    def settle_known(self, ticket: Ticket) -> bool:
        """Whether a killed process made this group already; then it is settled."""
        record = self._known.pop((ticket.prompt.uid, ticket.attempt), None)
        if record is not None:
            self._end(ticket, record.group, record.rewards)
        return record is not None

    def started(self, ticket: Ticket) -> None:
        self._admitted[ticket.index] = self._buffer.version
        self._note("start", ticket)

    def settle(self, ticket: Ticket, result: Result) -> None:
        """A group that was generated now.

        Raises:
          TooManyFailures: this failure was one too many.
          UserError: the filter wants nothing; the disk is full.
        """
        result = self._unless_stale(result, self._admitted.pop(ticket.index))
        for failure in result.failures:
            self._accumulator.count(f"rollout/failed/{failure.kind}")
        if result.failures and not result.trajectories:
            self._failed(ticket, result.failures)
            return
        self._failures = []
        group = Group(ticket.prompt.uid, result.trajectories)
        self._journals.finished(ticket, group, accepted=result.wanted)
        self._end(ticket, group if result.wanted else None, tuple(t.reward for t in group.trajectories))

    def _unless_stale(self, result: Result, admitted: int) -> Result:
        """A group that began after the last publish has no token too old, unless the sampler
        doesn't take what is published: then it would be generated again without end.
        """
        version, oldest = self._buffer.version, oldest_version(result.trajectories)
        if not result.wanted or admitted < version or oldest >= version - self._buffer.limits.max_lag:
            return result
        error = StaleSampler(
            f"tokens of version {oldest}, begun after version {version} was published: the sampler doesn't take the weights"
            " (is another run attached to it?)"
        )
        return Result((), (Failure(error.kind, error),), wanted=False)

    def lost(self, tickets: Iterable[Ticket], error: WorkerLost) -> None:
        """Whoever generated them is gone. Raises TooManyFailures."""
        self._accumulator.count(f"rollout/lost/{error.kind}")
        for ticket in tickets:
            del self._admitted[ticket.index]
            self._note(error.kind, ticket)
            self._buffer.again(ticket, own_fault=False)
        self._count(Failure(error.kind, error))

    def _end(self, ticket: Ticket, group: Group | None, rewards: tuple[float, ...]) -> None:
        """Accepted, or rejected when it is None."""
        if group is not None:
            rewards = tuple(t.reward for t in group.trajectories)
        self._accumulator.observe("rollout/finished_reward", rewards)
        self._beat(f"group {ticket.prompt.uid}")
        self._note("rejected" if group is None else "accepted", ticket)
        if group is None:
            self._buffer.reject(ticket)
            self._count_rejected(rewards)
        else:
            self._rejected = 0
            self._buffer.finish(ticket, group)

    def _count_rejected(self, rewards: Sequence[float]) -> None:
        self._rejected += 1
        self._rejected_rewards = [
            *self._rejected_rewards[1 - WARN_REJECTED :],
            *([sum(rewards) / len(rewards)] if rewards else []),
        ]
        limit = self._config.recover.max_consecutive_rejected
        if self._rejected in (WARN_REJECTED, limit):
            name = self._config.rollout.should_accept_fn or "the workflow"
            recent = self._rejected_rewards
            mean = f"mean reward of the last {len(recent)}: {sum(recent) / len(recent):.4g}" if recent else "none has a reward"
            line = f"{name} rejected {self._rejected} groups in a row ({mean})"
            if self._rejected == limit:
                raise UserError(
                    f"rollout.should_accept_fn: {line}: nothing is left to train on"
                    " (other prompts, another filter, or a higher recover.max_consecutive_rejected)"
                )
            log.warning("%s; the run ends at %d (recover.max_consecutive_rejected)", line, limit)

    def _failed(self, ticket: Ticket, failures: Sequence[Failure]) -> None:
        """Every episode of the group failed."""
        first = failures[0]
        if not self._failures:
            log.warning("prompt %s failed: %s", ticket.prompt.uid, first.reason)
        self._count(first)
        self._note(first.kind, ticket)
        own_fault = not all(isinstance(failure.error, SamplerError | StaleSampler) for failure in failures)
        if own_fault and ticket.failures + 1 >= self._config.recover.max_prompt_failures:
            log.warning("prompt %s is dropped: it failed %d times", ticket.prompt.uid, ticket.failures + 1)
            self._buffer.drop(ticket)
        else:
            self._buffer.again(ticket, own_fault=own_fault)

    def _count(self, failure: Failure) -> None:
        self._failures.append(failure)
        limit = self._config.recover.max_consecutive_failures
        if len(self._failures) >= limit:
            oldest = self._failures[0]
            raise TooManyFailures(
                f"recover.max_consecutive_failures: {limit} groups failed in a row; the first: {oldest.reason}"
            ) from oldest.error

    def _note(self, event: str, ticket: Ticket) -> None:
        if self._trace is not None:
            fields = {"time": time.time(), "event": event, "uid": ticket.prompt.uid, "attempt": ticket.attempt}
            with self._trace.open("a") as file:
                file.write(json.dumps(fields | {"version": self._buffer.version}) + "\n")
