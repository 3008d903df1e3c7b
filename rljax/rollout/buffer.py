"""The versioned buffer: which prompts may be generated, which groups may be trained on, and when.

    source --> admit --> running --> finish --> ready --> take --> (learner)
                 ^          |                     |
                 +-- again -+---- too old --------+

The buffer is the one book of a run: where the data stands, what is in flight, what is finished,
how much was consumed. It does no I/O and knows no timer, so its state is copied, saved and
restored whole. It belongs to the event loop's thread.

Two rules keep tokens fresh. Admission lets in

    min(max_concurrent_rollouts - running, (max_head_offpolicyness + version + 1) * consumer_batch_size - accepted - running)

prompts, so that a group admitted now is used within the bound if groups finish in order. They
don't, so on top of it stands a hard bound: what would exceed the lag at its update is generated
again (`drop`), or its stale tokens are no longer trained on (`mask`). Every entry in `ready` is
within the bound at the present version, so whatever `take` gives is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from rljax.types import Group, Prompt, Trajectory

NEVER = np.iinfo(np.int32).max  # version of a token that is not trained on, when the oldest is sought


class PromptSource(Protocol):
    """Prompts of epoch after epoch, without end."""

    def __next__(self) -> Prompt: ...

    def __len__(self) -> int:
        """Prompts an epoch."""
        ...

    def state(self) -> dict[str, Any]:
        """Where it stands: JSON values."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """How much may be under way.

    Example: Limits(max_lag=2, batch_size=8, max_concurrent=24, prompts=2 * 7473, groups=None,
    stale_policy="drop")
    """

    max_lag: int  # versions: rollout.max_head_offpolicyness
    batch_size: int  # groups an update: rollout.consumer_batch_size
    max_concurrent: int  # prompts in flight: rollout.max_concurrent_rollouts
    prompts: int | None  # of the whole run, where epochs bound it
    groups: int | None  # accepted in the whole run, where steps bound it
    stale_policy: str = "drop"  # or "mask"


@dataclasses.dataclass(frozen=True, slots=True)
class Ticket:
    """A prompt that was admitted.

    `index` orders prompts over the whole run, whatever is generated again.
    """

    index: int
    prompt: Prompt
    attempt: int = 0  # times it was generated before: its requests get other seeds
    failures: int = 0  # of those, the failures that were the prompt's own


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A finished group. Entries are ordered oldest token first, then by admission."""

    oldest: int  # version of the oldest token trained on
    index: int
    ticket: Ticket
    group: Group

    def __lt__(self, other: Entry) -> bool:
        return self.index < other.index if self.oldest == other.oldest else self.oldest < other.oldest


class Buffer:
    """The book of prompts and groups.

    Example:

        ticket = buffer.admit()                 # None: the producer waits for `change`
        buffer.finish(ticket, group)            # or reject, again, drop
        entries = buffer.take()                 # None: the learner waits for `change`
        buffer.publish()                        # the version goes up by one
    """

    def __init__(self, source: PromptSource, limits: Limits) -> None:
        self.limits = limits
        self.version = 0  # training steps finished
        self.drawn = 0  # prompts taken from the source
        self.consumed = 0  # groups handed to the learner
        self.counts: Counter[str] = Counter()  # finished, rejected, dropped, stale, stale_tokens: over the whole run
        self._source = source
        self._again: deque[Ticket] = deque()  # to be generated before anything new
        self._running: dict[int, Ticket] = {}  # by index
        self._ready: list[Entry] = []  # a heap
        self._waiters: list[asyncio.Future[None]] = []

    # What stands where

    @property
    def running(self) -> int:
        """Prompts in flight."""
        return len(self._running)

    @property
    def ready(self) -> int:
        """Groups that wait for the learner."""
        return len(self._ready)

    @property
    def accepted(self) -> int:
        """Groups accepted since the run began: consumed or ready."""
        return self.consumed + len(self._ready)

    @property
    def done(self) -> int:
        """Prompts that are through: consumed, rejected or dropped."""
        return self.consumed + self.counts["rejected"] + self.counts["dropped"]

    @property
    def capacity(self) -> int:
        """Prompts that may be admitted now."""
        limits, running = self.limits, len(self._running)
        fresh = (limits.max_lag + self.version + 1) * limits.batch_size
        if limits.groups is not None:
            fresh = min(fresh, limits.groups)
        return min(limits.max_concurrent - running, fresh - self.accepted - running)

    @property
    def waits_for(self) -> str:
        """What keeps the producer from admitting: "lag", "concurrency", "data", or "" when nothing
        does.
        """
        if self.capacity <= 0:
            return "concurrency" if self.running >= self.limits.max_concurrent else "lag"
        return "data" if self._drained and not self._again else ""

    @property
    def _drained(self) -> bool:
        return self.limits.prompts is not None and self.drawn >= self.limits.prompts

    @property
    def complete(self) -> bool:
        """Nothing is left to generate: what is ready is all there will be."""
        if self._running:
            return False
        if self.limits.groups is not None and self.accepted >= self.limits.groups:
            return True  # whatever is to be generated again: a run resumed with fewer steps to do never admits it
        return self._drained and not self._again

    # The producer's side

    def admit(self) -> Ticket | None:
        """The next prompt to generate, or None when there is no room or no prompt."""
        if self.capacity <= 0:
            return None
        if self._again:
            ticket = self._again.popleft()
        elif not self._drained:
            ticket = Ticket(self.drawn, next(self._source))
            self.drawn += 1
        else:
            return None
        self._running[ticket.index] = ticket
        return ticket

    def finish(self, ticket: Ticket, group: Group) -> None:
        """A group is accepted.

        One that is too old by now is treated by the stale policy at once.
        """
        oldest = oldest_version(group.trajectories)
        if oldest == NEVER:
            raise ValueError(f"group {group.uid} has no token to train on: reject it")
        del self._running[ticket.index]
        self.counts["finished"] += 1
        self._push(Entry(oldest, ticket.index, ticket, group))
        self.wake()

    def reject(self, ticket: Ticket) -> None:
        """The filter did not want the group: the prompt is done, a later one fills its place."""
        self._end(ticket, "rejected")

    def drop(self, ticket: Ticket) -> None:
        """The prompt is given up: it failed too often."""
        self._end(ticket, "dropped")

    def again(self, ticket: Ticket, *, own_fault: bool) -> None:
        """The group failed: the prompt is generated again, before new ones."""
        self._end(ticket, "again")
        self._again.append(dataclasses.replace(ticket, attempt=ticket.attempt + 1, failures=ticket.failures + own_fault))

    def _end(self, ticket: Ticket, how: str) -> None:
        del self._running[ticket.index]
        self.counts[how] += 1
        self.wake()

    # The learner's side

    def take(self) -> list[Entry] | None:
        """The oldest `batch_size` groups, or None when there are not so many yet. At the end of
        the data, what is left.

        Every token to be trained on is at most `max_lag` versions old, now and until the next
        `publish`.
        """
        size = self.limits.batch_size
        if len(self._ready) < size:
            if not (self._ready and self.complete):
                return None
            size = len(self._ready)
        taken = [heapq.heappop(self._ready) for _ in range(size)]
        self.consumed += size
        return taken

    def publish(self) -> None:
        """The version goes up; entries that are too old now go the way of the stale policy."""
        self.version += 1
        while self._ready and self._ready[0].oldest < self._floor:
            self._push(heapq.heappop(self._ready))
        self.wake()

    @property
    def _floor(self) -> int:
        """The oldest version that may be trained on now."""
        return self.version - self.limits.max_lag

    def _push(self, entry: Entry) -> None:
        if entry.oldest < self._floor:
            masked = self._without_stale_tokens(entry) if self.limits.stale_policy == "mask" else None
            if masked is None:
                self.counts["stale"] += 1
                self._again.append(dataclasses.replace(entry.ticket, attempt=entry.ticket.attempt + 1))
                return
            entry = masked
        heapq.heappush(self._ready, entry)

    def _without_stale_tokens(self, entry: Entry) -> Entry | None:
        """The entry with tokens older than the bound masked; None if none is left."""
        kept = [dataclasses.replace(t, loss_mask=t.loss_mask & (t.versions >= self._floor)) for t in entry.group.trajectories]
        oldest = oldest_version(kept)
        if oldest == NEVER:
            return None
        before = sum(int(t.loss_mask.sum()) for t in entry.group.trajectories)
        self.counts["stale_tokens"] += before - sum(int(t.loss_mask.sum()) for t in kept)
        return Entry(oldest, entry.index, entry.ticket, dataclasses.replace(entry.group, trajectories=tuple(kept)))

    # Waiting

    def change(self) -> asyncio.Future[None]:
        """Awaitable: something has happened, from this call on, that may let the producer or the
        learner go on.
        """
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def wake(self) -> None:
        """Lets those who wait for a change look again."""
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    # Saving

    def state(self) -> dict[str, Any]:
        """Everything but the finished groups, as JSON values.

        Prompts in flight are to be generated again.
        """
        pending = sorted([*self._running.values(), *self._again], key=lambda ticket: ticket.index)
        return {
            "version": self.version,
            "drawn": self.drawn,
            "consumed": self.consumed,
            "counts": dict(self.counts),
            "source": self._source.state(),
            "pending": [ticket_to_json(t) for t in pending],
        }

    def entries(self) -> list[Entry]:
        """The finished groups that wait, in the order they will be taken."""
        return sorted(self._ready)

    def restore(self, state: Mapping[str, Any], entries: Iterable[Entry]) -> None:
        """Takes up where `state()` and `entries()` were taken; what was in flight is admitted
        first.
        """
        self.version, self.drawn, self.consumed = state["version"], state["drawn"], state["consumed"]
        self.counts = Counter(state["counts"])
        self._source.restore(state["source"])
        self._again = deque(ticket_from_json(t) for t in state["pending"])
        self._running = {}
        self._ready = []
        for entry in entries:
            self._push(entry)
        self.wake()


def oldest_version(trajectories: Iterable[Trajectory]) -> int:
    """Version of the oldest token that is trained on; NEVER if there is none."""
    return min((int(np.minimum.reduce(t.versions, where=t.loss_mask, initial=NEVER)) for t in trajectories), default=NEVER)


def newest_version(trajectories: Iterable[Trajectory]) -> int:
    """Version of the newest token that any policy sampled; -1 if there is none."""
    return max((int(t.versions.max(initial=-1)) for t in trajectories), default=-1)


def ticket_to_json(ticket: Ticket) -> dict[str, Any]:
    prompt = {
        "uid": ticket.prompt.uid,
        "messages": [dict(m) for m in ticket.prompt.messages],
        "fields": dict(ticket.prompt.fields),
    }
    return {"index": ticket.index, "prompt": prompt, "attempt": ticket.attempt, "failures": ticket.failures}


def ticket_from_json(state: Mapping[str, Any]) -> Ticket:
    prompt = state["prompt"]
    return Ticket(
        index=state["index"],
        prompt=Prompt(prompt["uid"], tuple(prompt["messages"]), prompt["fields"]),
        attempt=state["attempt"],
        failures=state["failures"],
    )
