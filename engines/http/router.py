"""Chooses the server of each request; requests wait while none is usable or sampling is paused."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Sequence

from rljax.engines.http.remote import Remote
from rljax.errors import SamplerError

SLACK = 8  # extra load a group's own server may have over the least loaded one, in requests
REMEMBERED_GROUPS = 65536


class Closed(Exception):
    """Raised to waiting requests when the sampler closes."""


class Router:
    """Picks the least loaded server, but keeps a group on one server, where its prompt is cached.

    A group is all samples of a prompt and all turns of an episode: requests whose ids agree up to
    the first `#`.
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
        """Opens or closes the router. Requests wait while it is closed, so none overtakes a pause."""
        self._open = is_open
        self.wake()

    def close(self) -> None:
        self._closed = True
        self.wake()

    def wake(self) -> None:
        """Makes waiting requests look at the servers again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def pick(self, request_id: str) -> Remote:
        """Returns a server to use, and adds one request to its load.

        Raises:
          SamplerError: no server is left, and none is expected back.
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
