"""What an `HttpSampler` works with: processes behind the servers, and calls to one of them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable
from typing import Any, Protocol

import aiohttp

from rljax.engines.http.remote import Remote

CONTROL_TIMEOUT = 600.0  # seconds for a pause, a load of weights, a resume


@dataclasses.dataclass(frozen=True)
class PostTo:
    """`rljax.engine.Post` of one server. Raises ServerLost when it is lost."""

    session: aiohttp.ClientSession
    remote: Remote
    member: object

    def __call__(self, path: str, body: dict[str, Any]) -> Awaitable[Any]:
        return self.remote.post(self.session, path, body, CONTROL_TIMEOUT)


class Watched(Protocol):
    """What the watch (health.py) sees and does of the sampler whose servers it looks after."""

    control: asyncio.Lock  # held while a server is brought back
    version: int  # of the weights that a server should have

    @property
    def session(self) -> aiohttp.ClientSession: ...

    @property
    def paused(self) -> bool: ...

    async def reclaim_one(self, remote: Remote) -> None:
        """Gives a server its memory again, which it had lent."""
        ...

    def present_weights(self) -> str | None:
        """A directory with the present weights, for a server that was started again; None when
        there is none.
        """
        ...

    def lack_weights(self) -> None:
        """Says that a server is there to which only a publish can give weights."""
        ...

    def servers_changed(self) -> None:
        """Says that a server is back, or gone."""
        ...


class Replicas(Protocol):
    """The processes behind the servers, where they are ours: rljax/engines/http/launcher.py."""

    def died(self, index: int) -> str | None:
        """Why a server is not running any more; None while it is."""
        ...

    def restart(self, index: int) -> Remote:
        """Starts it again, with the weights it had at first.

        Blocks. Raises UserError when it can't, or may not.
        """
        ...

    def close(self) -> None: ...
