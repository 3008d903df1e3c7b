"""Interfaces between an `HttpSampler`, the watch over its servers and the processes behind them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import aiohttp

from rljax.engines.http.remote import Remote


@dataclasses.dataclass(frozen=True)
class PostTo:
    """Posts to one server; implements `rljax.engine.Post`. Raises ServerLost if the server is lost."""

    call: Callable[[Remote, str, dict[str, Any]], Awaitable[Any]]
    remote: Remote
    member: object

    def __call__(self, path: str, body: dict[str, Any]) -> Awaitable[Any]:
        return self.call(self.remote, path, body)


class Watched(Protocol):
    """The sampler, as seen by the watch over its servers (health.py)."""

    control: asyncio.Lock  # locked while a server is brought back
    version: int  # of the weights that a server should have
    control_timeout: float  # seconds for a pause, a load or a resume

    @property
    def session(self) -> aiohttp.ClientSession: ...

    @property
    def paused(self) -> bool: ...

    async def reclaim_one(self, remote: Remote) -> None:
        """Makes a server that lent its memory allocate it again."""
        ...

    def present_weights(self) -> str | None:
        """Returns a directory with the present weights for a restarted server, or None."""
        ...

    def lack_weights(self) -> None:
        """Notes that a server needs weights that only a publish can bring."""
        ...

    def servers_changed(self) -> None:
        """Notes that a server is back, or gone."""
        ...


class Replicas(Protocol):
    """The processes behind servers that we started: rljax/engines/http/launcher.py."""

    def died(self, index: int) -> str | None:
        """Returns why a server is not running any more; None while it is."""
        ...

    def restart(self, index: int) -> Remote:
        """Starts a server again, with the weights it had at first. Blocks.

        Raises UserError if it doesn't start, or has been restarted too often.
        """
        ...

    def close(self) -> None: ...
