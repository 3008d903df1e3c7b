"""The versioned buffer: which prompts may be generated, which groups may be trained on, and when.

    source --> admit --> running --> finish --> ready --> take --> (learner)
                 ^          |                     |
                 +- requeue +---- too old --------+

The buffer is the record of a run's data: the position in the data, what is in flight, what is
ready, how much was consumed. It does no I/O and has no timer, so its state can be copied, saved and
restored as a whole. It belongs to the event loop's thread.

Two rules keep tokens fresh. The buffer admits at most

    min(max_concurrent_rollouts - running,
        (max_head_offpolicyness + version + 1) * consumer_batch_size - accepted - running)

prompts (`version` less the steps that rollbacks undid), so that a group admitted now is within the
lag bound when it is trained on, if groups finish in order. They don't, so there is also a hard
bound: a group with tokens that are too old is generated again (stale_policy `drop`), or those
tokens are masked (`mask`). All entries in `ready` are within the bound at the current version, and
so are those that `take` returns.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from rljax.errors import UserError
from rljax.types import Group, Prompt, Trajectory

NEVER = np.iinfo(np.int32).max  # oldest version of a group without a token to train on


class PromptSource(Protocol):
    """Endless iterator over prompts, epoch after epoch."""

    def __next__(self) -> Prompt: ...

    def __len__(self) -> int:
        """Number of prompts per epoch."""
        ...

    def state(self) -> dict[str, Any]:
        """Returns the position in the data, as JSON values."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the prompts and groups of a run.

    Example: Limits(max_lag=2, batch_size=8, max_concurrent=24, prompts=2 * 7473, groups=None,
    stale_policy="drop")
    """

    max_lag: int  # versions: rollout.max_head_offpolicyness
    batch_size: int  # groups per update: rollout.consumer_batch_size
    max_concurrent: int  # prompts in flight: rollout.max_concurrent_rollouts
    prompts: int | None  # in the whole run, if epochs bound it
    groups: int | None  # accepted in the whole run, if steps bound it
    stale_policy: str = "drop"  # or "mask"


@dataclasses.dataclass(frozen=True, slots=True)
class Ticket:
    """A prompt that was admitted."""

    index: int  # number of the prompt in the run; stays the same when it is requeued
    prompt: Prompt
    attempt: int = 0  # how many times it was generated before; each attempt has other seeds
    failures: int = 0  # how many of those attempts failed through the prompt's own fault


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A finished group. Entries sort by the version of their oldest token, then by admission."""

    oldest: int  # version of the oldest token trained on
    index: int
    ticket: Ticket
    group: Group

    def __lt__(self, other: Entry) -> bool:
        return self.index < other.index if self.oldest == other.oldest else self.oldest < other.oldest


class Buffer:
    """Versioned buffer of prompts and groups.

    Example:

        ticket = buffer.admit()                 # None: the producer waits for `change`
        buffer.finish(ticket, group)            # or reject, requeue, drop
        entries = buffer.take()                 # None: the learner waits for `change`
        buffer.publish()                        # the version goes up by one
        buffer.roll_back(state, entries)        # instead: back to the data of a checkpoint
    """

    def __init__(self, source: PromptSource, limits: Limits) -> None:
        self.limits = limits
        self.version = 0  # training steps finished, those that a rollback undid included
        self.undone = 0  # versions that are no step: those that rollbacks undid, the rollbacks, and those of `follow`
        self.drawn = 0  # prompts taken from the source
        self.consumed = 0  # groups handed to the learner
        self.counts: Counter[str] = Counter()  # finished, rejected, dropped, again, stale, stale_tokens; over the whole run
        self._source = source
        self._requeued: deque[Ticket] = deque()  # admitted before new prompts
        self._running: dict[int, Ticket] = {}  # by index
        self._dropped: dict[int, Ticket] = {}  # by index: those behind the last prompt that did not fail
        self._ready: list[Entry] = []  # a heap
        self._waiters: list[asyncio.Future[None]] = []
        self._follows = False  # others publish: `follow`

    # Counts

    @property
    def running(self) -> int:
        """Number of prompts in flight."""
        return len(self._running)

    @property
    def ready(self) -> int:
        """Number of groups that wait for the learner."""
        return len(self._ready)

    @property
    def accepted(self) -> int:
        """Number of groups accepted since the run began: consumed or ready."""
        return self.consumed + len(self._ready)

    @property
    def done(self) -> int:
        """Number of prompts that are done: consumed, rejected or dropped."""
        return self.consumed + self.counts["rejected"] + self.counts["dropped"]

    @property
    def dropped_last(self) -> list[Ticket]:
        """Prompts that were dropped one after the other, up to the newest that was drawn."""
        first = self.drawn
        while first - 1 in self._dropped:
            first -= 1
        return [self._dropped[index] for index in range(first, self.drawn)]

    @property
    def capacity(self) -> int:
        """Number of prompts that may be admitted now."""
        limits, running = self.limits, len(self._running)
        fresh = (limits.max_lag + self.version - self.undone + 1) * limits.batch_size
        if limits.groups is not None:
            fresh = min(fresh, limits.groups)
        return min(limits.max_concurrent - running, fresh - self.accepted - running)

    @property
    def waits_for(self) -> str:
        """Reason why no prompt is admitted now: "lag", "concurrency", "data"; "" if one may be."""
        if self.capacity <= 0:
            return "concurrency" if self.running >= self.limits.max_concurrent else "lag"
        return "data" if self._drained and not self._requeued else ""

    @property
    def _drained(self) -> bool:
        return self.limits.prompts is not None and self.drawn >= self.limits.prompts

    @property
    def complete(self) -> bool:
        """True if nothing is left to generate: no more groups become ready."""
        if self._trained_enough:
            return True  # a run that goes on with fewer steps may have more groups ready than it takes
        if self._running:
            return False
        if self.limits.groups is not None and self.accepted >= self.limits.groups:
            return True  # even with requeued prompts: a run resumed with fewer steps never admits them
        return self._drained and not self._requeued

    @property
    def over(self) -> bool:
        """True if nothing is left to train on."""
        return self._trained_enough or (self.complete and not self._ready)

    @property
    def _trained_enough(self) -> bool:
        return self.limits.groups is not None and self.consumed >= self.limits.groups

    # The producer's side

    def admit(self) -> Ticket | None:
        """Admits the next prompt. Returns None if there is no room, or no prompt."""
        if self.capacity <= 0:
            return None
        if self._requeued:
            ticket = self._requeued.popleft()
        elif not self._drained:
            ticket = Ticket(self.drawn, next(self._source))
            self.drawn += 1
        else:
            return None
        self._running[ticket.index] = ticket
        return ticket

    def finish(self, ticket: Ticket, group: Group) -> None:
        """Accepts a group. If it is too old by now, the stale policy applies at once.

        Raises UserError if it has tokens of a version that was not published.
        """
        oldest = oldest_version(group.trajectories)
        self._check_published(group, self.version + 1)  # plus one: a publish may be in progress
        if oldest == NEVER:
            raise ValueError(f"group {group.uid} has no token to train on: reject it")
        del self._running[ticket.index]
        self.counts["finished"] += 1
        self._did_not_fail(ticket)
        self._push(Entry(oldest, ticket.index, ticket, group))
        self.wake()

    def reject(self, ticket: Ticket) -> None:
        """Rejects the group of a prompt, which is then done. A later prompt fills the batch."""
        self._did_not_fail(ticket)
        self._end(ticket, "rejected")

    def drop(self, ticket: Ticket) -> None:
        """Gives up a prompt that failed too often."""
        self._dropped[ticket.index] = ticket
        self._end(ticket, "dropped")

    def requeue(self, ticket: Ticket, *, own_fault: bool) -> None:
        """Has a prompt generated again, before new ones.

        Args:
          own_fault: whether the failure counts against the prompt (recover.max_prompt_failures).
        """
        self._end(ticket, "again")
        self._requeued.append(dataclasses.replace(ticket, attempt=ticket.attempt + 1, failures=ticket.failures + own_fault))

    def try_again(self) -> int:
        """Has the prompts of `dropped_last` generated again, as if they had not failed.

        Returns their number.
        """
        tickets, self._dropped = self.dropped_last, {}
        self.counts["dropped"] -= len(tickets)
        self._requeued.extend(dataclasses.replace(ticket, attempt=ticket.attempt + 1, failures=0) for ticket in tickets)
        return len(tickets)

    def _did_not_fail(self, ticket: Ticket) -> None:
        self._dropped = {index: dropped for index, dropped in self._dropped.items() if index > ticket.index}

    def _end(self, ticket: Ticket, outcome: str) -> None:
        del self._running[ticket.index]
        self.counts[outcome] += 1
        self.wake()

    # The learner's side

    def take(self) -> list[Entry] | None:
        """Takes the oldest `batch_size` groups, or what is left at the end of the data.

        Returns None if there are not enough yet, or the run has had all its groups. Each token to
        train on is at most `max_lag` versions old, from now until the next `publish`, and none is
        newer than this version.
        """
        size = self.limits.batch_size
        if self._trained_enough:
            return None
        if self.limits.groups is not None:
            size = min(size, self.limits.groups - self.consumed)
        if len(self._ready) < size:
            if not (self._ready and self.complete):
                return None
            size = len(self._ready)
        taken = [heapq.heappop(self._ready) for _ in range(size)]
        for entry in taken:
            self._check_published(entry.group, self.version)
        self.consumed += size
        return taken

    def publish(self) -> None:
        """Raises the version by one. The stale policy applies to entries that are now too old."""
        self.version += 1
        while self._ready and self._ready[0].oldest < self._floor:
            self._push(heapq.heappop(self._ready))
        self.wake()

    def follow(self, version: int) -> None:
        """Goes up to the version of a sampler that others publish to.

        It makes no room for prompts; `make_room` does, after each `take`.
        """
        self._follows = True
        while self.version < version:
            self.publish()
            self.undone += 1

    def make_room(self) -> None:
        """Makes room for one more batch without new weights."""
        self.undone -= 1
        self.wake()

    def _check_published(self, group: Group, newest: int) -> None:
        if not self._follows and (found := newest_version(group.trajectories)) > newest:
            raise UserError(
                f"rollout.addr: tokens of version {found}, and this run has published {self.version}:"
                " another one publishes to the same servers (a server belongs to one run at a time)"
            )

    @property
    def _floor(self) -> int:
        """Oldest version that may be trained on now."""
        return self.version - self.limits.max_lag

    def _push(self, entry: Entry) -> None:
        if entry.oldest < self._floor:
            masked = self._without_stale_tokens(entry) if self.limits.stale_policy == "mask" else None
            if masked is None:
                self.counts["stale"] += 1
                self._requeued.append(dataclasses.replace(entry.ticket, attempt=entry.ticket.attempt + 1))
                return
            entry = masked
        heapq.heappush(self._ready, entry)

    def _without_stale_tokens(self, entry: Entry) -> Entry | None:
        """Masks the tokens of an entry that are too old. Returns None if no token is left."""
        kept = [dataclasses.replace(t, loss_mask=t.loss_mask & (t.versions >= self._floor)) for t in entry.group.trajectories]
        oldest = oldest_version(kept)
        if oldest == NEVER:
            return None
        before = sum(int(t.loss_mask.sum()) for t in entry.group.trajectories)
        self.counts["stale_tokens"] += before - sum(int(t.loss_mask.sum()) for t in kept)
        return Entry(oldest, entry.index, entry.ticket, dataclasses.replace(entry.group, trajectories=tuple(kept)))

    # Waiting

    def change(self) -> asyncio.Future[None]:
        """Returns a future that is done at the next change after this call.

        A change may let the producer or the learner go on.
        """
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def wake(self) -> None:
        """Wakes all that wait for a change."""
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    # Saving

    def state(self) -> dict[str, Any]:
        """Returns the state as JSON values, without the finished groups (`entries`).

        Prompts in flight are generated again after `restore`.
        """
        pending = sorted([*self._running.values(), *self._requeued], key=lambda ticket: ticket.index)
        return {
            "version": self.version,
            "undone": self.undone,
            "drawn": self.drawn,
            "consumed": self.consumed,
            "counts": dict(self.counts),
            "source": self._source.state(),
            "pending": [ticket_to_json(t) for t in pending],
            "dropped": [ticket_to_json(t) for t in self.dropped_last],
        }

    def entries(self) -> list[Entry]:
        """Returns the finished groups that wait for the learner, in the order of `take`."""
        return sorted(self._ready)

    def restore(self, state: Mapping[str, Any], entries: Iterable[Entry]) -> None:
        """Restores what `state` and `entries` returned. Prompts that were in flight come first."""
        self.version = state["version"]
        self.undone = state.get("undone", 0)  # checkpoints from before there were rollbacks lack it
        self._restore_position(state)
        self._requeued = deque(ticket_from_json(t) for t in state["pending"])
        self._dropped = {t.index: t for t in map(ticket_from_json, state.get("dropped", ()))}  # older checkpoints lack it
        for entry in entries:
            self._push(entry)
        self.wake()

    def roll_back(self, state: Mapping[str, Any], entries: Iterable[Entry]) -> None:
        """Goes back to the position in the data of `state` and `entries`, as a new version.

        The version rises by one and never comes twice, for tokens of later versions than the
        state's may still arrive. Prompts consumed since then are drawn again, and all that were
        pending or ready then are generated again. Tickets from before this call are void: whoever
        holds one must not hand it in.
        """
        self.version += 1
        self.undone = self.version - (state["version"] - state.get("undone", 0))
        self._restore_position(state)
        tickets = [ticket_from_json(t) for t in state["pending"]] + [entry.ticket for entry in entries]
        again = (dataclasses.replace(ticket, attempt=ticket.attempt + 1) for ticket in tickets)
        self._requeued = deque(sorted(again, key=lambda ticket: ticket.index))
        self.wake()

    def _restore_position(self, state: Mapping[str, Any]) -> None:
        self.drawn, self.consumed = state["drawn"], state["consumed"]
        self.counts = Counter(state["counts"])
        self._source.restore(state["source"])
        self._running = {}
        self._dropped = {}
        self._ready = []


def oldest_version(trajectories: Iterable[Trajectory]) -> int:
    """Returns the version of the oldest token that is trained on; NEVER if there is none."""
    return min((int(np.minimum.reduce(t.versions, where=t.loss_mask, initial=NEVER)) for t in trajectories), default=NEVER)


def newest_version(trajectories: Iterable[Trajectory]) -> int:
    """Returns the version of the newest token that the policy sampled; -1 if there is none."""
    return max((int(t.versions.max(initial=-1)) for t in trajectories), default=-1)


def ticket_to_json(ticket: Ticket) -> dict[str, Any]:
    prompt = {
        "uid": ticket.prompt.uid,
        "messages": [dict(m) for m in ticket.prompt.messages],
        "fields": dict(ticket.prompt.fields),
        "tools": [dict(tool) for tool in ticket.prompt.tools],
        "chat_template_kwargs": dict(ticket.prompt.chat_template_kwargs),
        "reply": [dict(m) for m in ticket.prompt.reply],
    }
    return {"index": ticket.index, "prompt": prompt, "attempt": ticket.attempt, "failures": ticket.failures}


def prompt_from_json(state: Mapping[str, Any]) -> Prompt:
    """Returns a prompt that was written as JSON, also before prompts had tools."""
    several = {name: tuple(state.get(name, ())) for name in ("messages", "tools", "reply")}
    return Prompt(state["uid"], fields=state["fields"], chat_template_kwargs=state.get("chat_template_kwargs", {}), **several)


def ticket_from_json(state: Mapping[str, Any]) -> Ticket:
    return Ticket(
        index=state["index"],
        prompt=prompt_from_json(state["prompt"]),
        attempt=state["attempt"],
        failures=state["failures"],
    )
