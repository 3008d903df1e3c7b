"""Listener: accepts connections and passes on those that completed the handshake.

A connection in its handshake takes one open file and one thread, for at most TIME_LIMIT, and there
are at most MAX_UNPROVED of them. The next connection is accepted when one of them is done, or when
the oldest has had MIN_TIME; that one is then closed. Further connections wait in the system's
queue. If the process runs out of files, the oldest connection is closed and listening goes on.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rljax.messaging import handshake
from rljax.messaging.framing import UNPROVED, FramingError, receive, send
from rljax.messaging.handshake import HandshakeError, ListenerHandshake
from rljax.messaging.rate_limit import RateLimited

MAX_UNPROVED = 16  # connections at once that are still in their handshake
MIN_TIME = 0.5  # seconds that each of them has at least, even if others wait
BACKLOG = 128  # connections that wait in the system's queue
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # errors of accept without free files or memory

log = logging.getLogger(__name__)

RefusalReason = Callable[[Mapping[str, Any]], str | None]
"""Takes a connector's hello. Returns a line that says why it is refused, or None to accept it."""

Admit = Callable[[socket.socket, Mapping[str, Any]], None]
"""Takes a connection that completed the handshake, and the connector's hello."""


class Listener:
    """Listening socket that passes on connections whose other side knows the token.

    Example:

        def admit(connection, hello): ...

        def refusal_reason(hello): return None if hello["rank"] == 1 else "only rank 1 is missing"

        options = {"peers": "ranks", "refusal_reason": refusal_reason, "admit": admit}
        listener = Listener(("127.0.0.1", 0), token, **options)
        listener.address                                # ("127.0.0.1", 40213)
        listener.close()
    """

    def __init__(
        self, address: tuple[str, int], token: str, *, peers: str, refusal_reason: RefusalReason, admit: Admit
    ) -> None:
        """
        Args:
          address: host and port; port 0 for a free one.
          token: secret that both sides must know.
          peers: plural noun for the expected connectors, for the log.
          refusal_reason, admit: called in threads of the listener, one after the other for each
            connection, and never for two connections at once.

        Raises:
          OSError: the address can't be listened on.
        """
        self._token, self._peers, self._refusal_reason, self._admit = token, peers, refusal_reason, admit
        self._lock, self._admitting = threading.Condition(), threading.Lock()
        self._unproved: dict[socket.socket, float] = {}  # connections by time of arrival, oldest first
        self._closed = self._warned = False
        self._say = RateLimited(log.info)  # anyone may come, as often as they like
        self._socket = _listening(address)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        threading.Thread(target=self._run, daemon=True, name=f"listener for {peers}").start()

    def close(self) -> None:
        """Stops listening, and closes connections that are in their handshake. Idempotent."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            for connection in self._unproved:
                _hang_up(connection)
        _hang_up(self._socket)
        self._socket.close()

    def _run(self) -> None:
        while not self._closed:
            try:
                connection, peer = self._socket.accept()
            except OSError as error:
                self._survive(error)
                continue
            self._make_room()
            with self._lock:
                self._unproved[connection] = time.monotonic()
            try:
                threading.Thread(target=self._greet, args=(connection, peer[0]), daemon=True, name="handshake").start()
            except RuntimeError as error:  # no more threads, for now
                self._forget(connection)
                self._turn_away(connection, peer[0], error)

    def _make_room(self) -> None:
        """Blocks while too many handshakes are in progress; closes the oldest after MIN_TIME."""
        with self._lock:
            while len(self._unproved) >= MAX_UNPROVED and not self._closed:
                oldest = next(iter(self._unproved))
                left = self._unproved[oldest] + MIN_TIME - time.monotonic()
                if left <= 0:
                    _hang_up(oldest)  # its thread forgets it
                self._lock.wait(left if left > 0 else MIN_TIME)

    def _survive(self, error: OSError) -> None:
        """Recovers from a failed accept: the connection is gone, or no file or memory is free."""
        if self._closed or error.errno == errno.ECONNABORTED:
            return
        with self._lock:
            oldest = next(iter(self._unproved), None)
            if oldest is not None and error.errno in EXHAUSTED:
                _hang_up(oldest)
        if not self._warned:
            self._warned = True
            log.warning("%s: could not accept a connection, listening goes on: %s", self._peers, error.strerror or error)
        time.sleep(0.1)

    def _greet(self, connection: socket.socket, where: str) -> None:
        """Runs one handshake in a thread of its own. Closes the connection if it fails."""
        try:
            self._handshake(connection)
        except (HandshakeError, FramingError, OSError) as error:
            self._turn_away(connection, where, error)
        except BaseException:
            connection.close()
            raise
        finally:
            self._forget(connection)

    def _handshake(self, connection: socket.socket) -> None:
        side, deadline = ListenerHandshake(self._token), time.monotonic() + handshake.TIME_LIMIT
        connection.settimeout(handshake.TIME_LIMIT)
        send(connection, side.challenge())
        try:
            hello = side.verify(receive(connection, UNPROVED, deadline=deadline))
        except HandshakeError:
            send(connection, side.denied())
            raise
        self._forget(connection)  # it has proved that it knows the token, and is not closed to make room
        with self._admitting:
            if (reason := self._refusal_reason(hello)) is not None:
                send(connection, side.refused(reason))
                raise HandshakeError(reason)
            send(connection, side.welcome())
            connection.settimeout(None)
            keep_alive(connection)
            self._admit(connection, hello)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._unproved.pop(connection, None)
            self._lock.notify_all()

    def _turn_away(self, connection: socket.socket, where: str, error: Exception) -> None:
        connection.close()
        self._say(f"{self._peers}: a connection from {where} was turned away: {error}")


def connect_to(address: tuple[str, int], token: str, hello: Mapping[str, Any]) -> socket.socket:
    """Connects to a listener and does the handshake. Blocks. Raises as `handshake.connect`."""
    connection = socket.create_connection(address, timeout=handshake.TIME_LIMIT)
    try:
        handshake.connect(connection, token, hello)
        keep_alive(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _listening(address: tuple[str, int]) -> socket.socket:
    host, port = address
    family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return socket.create_server(address, family=family, backlog=BACKLOG)


def _hang_up(connection: socket.socket) -> None:
    """Shuts a connection down, which wakes the thread that waits in it; that thread closes it."""
    with contextlib.suppress(OSError):  # gone already
        connection.shutdown(socket.SHUT_RDWR)


def keep_alive(connection: socket.socket) -> None:
    """Sets socket options: vanished hosts are noticed in 30 s, small messages sent at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
