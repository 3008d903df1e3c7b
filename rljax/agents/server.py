"""The endpoint on a port of this machine, for as long as there are sessions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from rljax.agents.endpoint import Endpoint
from rljax.agents.session import Session
from rljax.messaging.web_server import WebServer

MAX_BODY = 64 << 20  # bytes


class SessionServer:
    """Serves the sessions of this process at 127.0.0.1. Belongs to one event loop at a time.

    It listens while a session is open, so nothing has to close it.

    Example:

        async with server.session(session) as base_url:
            ...  # whoever has base_url and session.key can sample
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._server: WebServer | None = None
        self._address = ""
        self._changing: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open = 0

    @contextlib.asynccontextmanager
    async def session(self, session: Session) -> AsyncIterator[str]:
        """Opens a session, and gives its base URL. Its requests end with it."""
        lock = self._lock()
        async with lock:
            if self._open == 0:
                await self._start()
            self._open += 1
        self._endpoint.sessions.add(session)
        try:
            yield f"http://{self._address}/v1"
        finally:
            self._endpoint.sessions.end(session)
            async with lock:
                self._open -= 1
                if self._open == 0:
                    await self._stop()

    def _lock(self) -> asyncio.Lock:
        loop = asyncio.get_running_loop()
        if self._changing is None or self._loop is not loop:
            self._changing, self._loop, self._open, self._server = asyncio.Lock(), loop, 0, None
        return self._changing

    async def _start(self) -> None:
        app = web.Application(client_max_size=MAX_BODY)
        self._endpoint.add_routes(app)
        self._server = WebServer(app, peers="agents", shutdown_timeout=1.0)
        host, port = await self._server.start("127.0.0.1", 0)
        self._address = f"{host}:{port}"

    async def _stop(self) -> None:
        if self._server is not None:
            await self._server.close()
            self._server = None
