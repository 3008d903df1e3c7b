"""Outbox: the events of a worker, until they are sent to the trainer."""

from __future__ import annotations

import collections

from rljax.tracing.events import Event, Process

MAX_EVENTS = 20_000  # more are dropped, and counted: the trainer has not taken any for long


class Outbox:
    """A sink that keeps events until they are taken."""

    def __init__(self) -> None:
        self._events: collections.deque[Event] = collections.deque()
        self.dropped = 0

    def add(self, process: Process, event: Event) -> None:
        if len(self._events) < MAX_EVENTS or event.phase == "M":
            self._events.append(event)
        else:
            self.dropped += 1

    def take(self) -> list[Event]:
        """Returns the events since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]
