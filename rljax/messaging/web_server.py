"""WebServer: serves an aiohttp application, and keeps strangers few.

A connection is a stranger's until one of its requests has shown the server's token or a session's
key (`proved`). There are at most MAX_STRANGERS of them. The next connection is served when one of
them has proved itself or is gone, or when the oldest has had MIN_TURNS; that one is then closed.
Further connections wait in the system's queue. If the process runs out of files, the oldest
stranger is closed and listening goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rljax.messaging.listener import BACKLOG, EXHAUSTED
from rljax.messaging.rate_limit import RateLimited
from rljax.process.tasks import Tasks

MAX_STRANGERS = 16  # connections at once that have not shown a token
TURN, MIN_TURNS = 0.05, 10  # seconds of a turn, and turns that a stranger has at least, even if others wait
IDLE_TIMEOUT = 30.0  # seconds that a connection stays open without a request; clients drop idle ones after 2.5 to 15
ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # errors of listening where the machine has no such family

log = logging.getLogger(__name__)


class WebServer:
    """Serves one application at one address. Belongs to one event loop.

    Example:

        app = web.Application()                          # its handlers call proved(request)
        server = WebServer(app, peers="a sampler's clients")
        host, port = await server.start("127.0.0.1", 0)
        await server.close()
    """

    def __init__(self, app: web.Application, *, peers: str, shutdown_timeout: float = 60.0) -> None:
        """
        Args:
          peers: plural noun for the expected clients, for the log.
          shutdown_timeout: seconds that requests under way have at `close`.
        """
        app[_SERVER] = self
        self._peers = peers
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            logger=_RequestLog(peers),
            shutdown_timeout=shutdown_timeout,
            keepalive_timeout=IDLE_TIMEOUT,
        )
        self._sockets: list[socket.socket] = []
        self._tasks = Tasks()
        self._strangers: dict[asyncio.Transport, int] = {}  # and the turn in which each came, oldest first
        self._turn = 0  # turns are counted while somebody waits
        self._door = asyncio.Lock()  # one connection passes at a time
        self._left = asyncio.Event()  # a stranger proved itself or is gone
        self._warned = False

    @property
    def strangers(self) -> int:
        """Number of connections that have not proved themselves."""
        return len(self._strangers)

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Starts listening at all addresses of a host. Raises OSError.

        Returns:
          The first address and its port, where a port of 0 was replaced.
        """
        self._sockets = _listening(host, port)
        await self._runner.setup()
        for listening in self._sockets:
            self._tasks.start(self._accept(listening), f"listener for {self._peers}")
        address = self._sockets[0].getsockname()
        return str(address[0]), int(address[1])

    async def close(self) -> None:
        """Stops listening and ends all connections. Idempotent."""
        await self._tasks.close()
        for listening in self._sockets:
            listening.close()
        await self._runner.cleanup()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:
                await self._survive(error)
                continue
            try:
                await self._serve(connection)
            except OSError:
                log.debug("%s: a connection broke as it came", self._peers, exc_info=True)

    async def _serve(self, connection: socket.socket) -> None:
        loop, serve = asyncio.get_running_loop(), self._runner.server
        assert serve is not None  # made by `setup`
        with contextlib.ExitStack() as unserved:
            unserved.callback(connection.close)
            async with self._door:
                await self._make_room()
                unserved.pop_all()  # its transport closes it from here on
                await loop.connect_accepted_socket(lambda: _Watched(serve(), self._came, self.forget), connection)

    async def _make_room(self) -> None:
        """Waits while there are too many strangers; closes the oldest after MIN_TURNS.

        It counts turns of the event loop, not time: after one that took long, the requests that
        have arrived meanwhile are still to be read.
        """
        while len(self._strangers) >= MAX_STRANGERS:
            if self._turn - next(iter(self._strangers.values())) >= MIN_TURNS:
                self._put_out_oldest()
                continue
            self._left.clear()
            try:
                async with asyncio.timeout(TURN):
                    await self._left.wait()
            except TimeoutError:
                self._turn += 1

    def _put_out_oldest(self) -> None:
        if (oldest := next(iter(self._strangers), None)) is not None:
            oldest.abort()
            self.forget(oldest)

    async def _survive(self, error: OSError) -> None:
        """Recovers from a failed accept: the connection is gone, or no file or memory is free."""
        if error.errno == errno.ECONNABORTED:
            return
        if error.errno in EXHAUSTED:
            self._put_out_oldest()
        if not self._warned:
            self._warned = True
            log.warning("%s: could not accept a connection, listening goes on: %s", self._peers, error.strerror or error)
        await asyncio.sleep(0.1)

    def _came(self, connection: asyncio.Transport) -> None:
        self._strangers[connection] = self._turn

    def forget(self, connection: asyncio.Transport) -> None:
        """Counts a connection as a stranger's no more: it has proved itself, or is gone."""
        if connection in self._strangers:
            del self._strangers[connection]
            self._left.set()


class _RequestLog(logging.LoggerAdapter[logging.Logger]):
    """Log of aiohttp's, with few lines for what is not HTTP, which needs no token to send."""

    def __init__(self, peers: str) -> None:
        super().__init__(logging.getLogger("aiohttp.server"), {})
        self._peers, self._say = peers, RateLimited(log.warning)

    def exception(self, msg: object, *args: object, **options: Any) -> None:
        error = options.get("exc_info")
        if not isinstance(error, HttpProcessingError):
            super().exception(msg, *args, **options)
            return
        first = (str(error.message).splitlines() or [""])[0]
        where = f" from {args[0]}" if args else ""
        self._say(f"{self._peers}: a request{where} is not HTTP: {first[:200]!r}")


_SERVER = web.AppKey("server", WebServer)


def proved(request: web.Request) -> None:
    """Notes that a request has shown the token or key that it needs; its connection may stay."""
    server = request.app.get(_SERVER)
    if server is not None and request.transport is not None:
        server.forget(request.transport)


class _Watched(asyncio.Protocol):
    """A connection's protocol, which tells when the connection comes and when it goes."""

    def __init__(
        self,
        inner: asyncio.Protocol,
        came: Callable[[asyncio.Transport], None],
        gone: Callable[[asyncio.Transport], None],
    ) -> None:
        self._inner, self._came, self._gone = inner, came, gone
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._came(self._transport)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._gone(self._transport)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


def _listening(host: str, port: int) -> list[socket.socket]:
    """Returns sockets that listen at all addresses of a host. Raises OSError."""
    infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    found: list[socket.socket] = []
    failed: OSError | None = None
    for family, address in dict.fromkeys((info[0], info[4]) for info in infos):
        same_port = found[0].getsockname()[1] if found else port
        try:
            found.append(socket.create_server((address[0], same_port, *address[2:]), family=family, backlog=BACKLOG))
        except OSError as error:
            failed = error
            if error.errno not in ABSENT:
                break
    if failed is not None and (not found or failed.errno not in ABSENT):
        for listening in found:
            listening.close()
        raise failed
    for listening in found:
        listening.setblocking(False)
    return found
