"""Calls to servers: each ends with its answer, its time limit, or the loss of its server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp

from rljax.engines.http.remote import Remote, ServerLost
from rljax.errors import SamplerError, UserError


class Calls:
    """Calls under way to the servers of a sampler.

    Example:
        calls = Calls(remotes, timeout=450.0, suspect=lambda remote, error: ...)
        calls.session = make_session()
        resume = lambda remote: calls.post(remote, "/continue_generation", {})
        resumed = await calls.each(resume, calls.usable())
    """

    def __init__(self, remotes: Sequence[Remote], timeout: float, suspect: Callable[[Remote, ServerLost], None]) -> None:
        """
        Args:
          timeout: seconds for a pause, a load or a resume.
          suspect: called for a server that failed where others did not.
        """
        self._remotes, self._timeout, self._suspect = remotes, timeout, suspect
        self._running: dict[asyncio.Task[Any], tuple[Remote, object]] = {}  # with the server's member when they began
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None
        return self._session

    @session.setter
    def session(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    def usable(self) -> list[Remote]:
        """Returns the usable servers: none, if all are lost but one may come back.

        The watch gives a server that comes back the present weights. Raises SamplerError if all are
        dropped.
        """
        if all(remote.dropped for remote in self._remotes):
            raise SamplerError("no server is left: " + "; ".join(remote.reason for remote in self._remotes))
        return [remote for remote in self._remotes if remote.usable]

    async def get(self, remote: Remote, path: str) -> Any:
        return await remote.get(self.session, path, self._timeout)

    async def post(self, remote: Remote, path: str, body: dict[str, Any]) -> Any:
        return await remote.post(self.session, path, body, self._timeout)

    async def post_unless_lost(self, remote: Remote, path: str, body: dict[str, Any]) -> Any:
        return await self.unless_lost(remote, asyncio.ensure_future(self.post(remote, path, body)))

    async def unless_lost(self, remote: Remote, task: asyncio.Task[Any]) -> Any:
        """Waits for a call to a server. Raises ServerLost as soon as the server is lost."""
        self._running[task] = remote, remote.member
        try:
            await asyncio.wait({task})
        finally:
            del self._running[task]
            task.cancel()  # of no effect when it is done
        if task.cancelled():
            raise ServerLost(f"{remote.base}: given up: {remote.reason or 'the sampler was closed'}")
        return task.result()

    async def each(self, act: Callable[[Remote], Awaitable[Any]], remotes: Sequence[Remote]) -> list[Remote]:
        """Runs an action on all servers at once and returns those where it succeeded.

        A server that fails is left out; if all of them refuse, the request itself is wrong and the
        first refusal is raised.
        """
        calls = (self.unless_lost(remote, asyncio.ensure_future(act(remote))) for remote in remotes)
        results = await asyncio.gather(*calls, return_exceptions=True)
        failed = {r: e for r, e in zip(remotes, results, strict=True) if isinstance(e, BaseException)}
        for error in failed.values():
            if not isinstance(error, ServerLost | UserError):
                raise error
        refused = [error for error in failed.values() if isinstance(error, UserError)]
        if refused and len(failed) == len(remotes):
            raise refused[0]
        for remote, error in failed.items():
            self._suspect(remote, ServerLost(str(error)))
        return [remote for remote in remotes if remote not in failed]

    def end_lost(self) -> None:
        """Ends the calls to servers that are lost by now."""
        for task, (remote, member) in tuple(self._running.items()):
            if remote.member is not member:
                task.cancel()
