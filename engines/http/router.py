"""Which server a request goes to, and waiting while there is none or generation is paused."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Sequence

from rljax.engines.http.remote import Remote
from rljax.errors import SamplerError

SLACK = 8  # requests more than the least loaded server has, that a group's own server may have
REMEMBERED_GROUPS = 65536


class Closed(Exception):
    """The sampler is being closed."""


class Router:
    """Least loaded first, but samples of one prompt and turns of one episode stay together, where
    the prompt is cached.

    What comes before the first `#` of a request's id names its group.
    """

    def __init__(self, remotes: Sequence[Remote]) -> None:
        self._remotes = remotes
        self._homes: collections.OrderedDict[str, Remote] = collections.OrderedDict()
        self._changed = asyncio.Event()
        self._open, self._closed = True, False

    @property
    def is_open(self) -> bool:
        return self._open

    def set_open(self, is_open: bool) -> None:
        """While it is shut, requests wait here: a pause can't be overtaken."""
        self._open = is_open
        self.wake()

    def close(self) -> None:
        self._closed = True
        self.wake()

    def wake(self) -> None:
        """Something about a server has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def pick(self, request_id: str) -> Remote:
        """A server to use, counted as loaded by one more request.

        Raises:
          SamplerError: when no server is left, nor expected back.
          Closed: after `close`.
        """
        while True:
            changed = self._changed
            if self._closed:
                raise Closed
            usable = [remote for remote in self._remotes if remote.usable]
            if self._open and usable:
                remote = self._choose(request_id.partition("#")[0], usable)
                remote.load += 1
                return remote
            if all(remote.dropped for remote in self._remotes):
                reasons = "; ".join(remote.reason for remote in self._remotes)
                raise SamplerError(f"request {request_id}: no server is left: {reasons}")
            await changed.wait()

    def release(self, remote: Remote) -> None:
        remote.load -= 1

    def _choose(self, group: str, usable: Sequence[Remote]) -> Remote:
        least = min(usable, key=lambda remote: remote.load)
        home = self._homes.get(group)
        if home is None or home not in usable or home.load > least.load + SLACK:
            home = least
        self._homes[group] = home
        self._homes.move_to_end(group)
        if len(self._homes) > REMEMBERED_GROUPS:
            self._homes.popitem(last=False)
        return home
