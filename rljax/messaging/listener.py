"""Listens for connections and hands over those that passed the handshake, in threads of its own.

A connection that has not proved itself costs one open file and one thread for TIME_LIMIT at most,
and there are never more than MAX_UNPROVED of them: the next one is let in when one of them is
through, or when the oldest has had MIN_TIME, which is then closed. The rest waits in the system's
queue. Running out of files ends nothing: the oldest is closed, and listening goes on.
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

MAX_UNPROVED = 16  # connections at once that are still in their handshake
MIN_TIME = 0.5  # seconds that each of them has at least
BACKLOG = 128  # connections that wait in the system's queue
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # of accept: files or memory, for now

log = logging.getLogger(__name__)

Objection = Callable[[Mapping[str, Any]], str | None]
"""Says in a line why a connector is not wanted, from its hello; None where it is."""

Admit = Callable[[socket.socket, Mapping[str, Any]], None]
"""Takes a connection that passed the handshake, and its hello."""


class Listener:
    """A listening socket that hands over only connections whose other side knows the token.

    Example:

        listener = Listener(("127.0.0.1", 0), token, what="workers", objection=lambda hello: None, admit=connections.put)
        listener.address                                # ("127.0.0.1", 40213)
        listener.close()
    """

    def __init__(self, address: tuple[str, int], token: str, *, what: str, objection: Objection, admit: Admit) -> None:
        """
        Args:
          address: host and port; port 0 for a free one.
          what: who is expected, for the log.
          objection, admit: called in a thread of the listener, never two at once: what `admit`
            took the next `objection` sees.

        Raises:
          OSError: the address can't be listened on.
        """
        self._token, self._what, self._objection, self._admit = token, what, objection, admit
        self._lock, self._admitting = threading.Condition(), threading.Lock()
        self._unproved: dict[socket.socket, float] = {}  # since when, oldest first
        self._closed = self._warned = False
        self._socket = _listening(address)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        threading.Thread(target=self._run, daemon=True, name=f"listener of {what}").start()

    def close(self) -> None:
        """Stops listening, and closes connections that are still in the handshake.

        May be repeated.
        """
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
                connection, _ = self._socket.accept()
            except OSError as error:
                self._survive(error)
                continue
            self._make_room()
            with self._lock:
                self._unproved[connection] = time.monotonic()
            try:
                threading.Thread(target=self._greet, args=(connection,), daemon=True, name="handshake").start()
            except RuntimeError as error:  # no more threads, for now
                self._forget(connection)
                self._turn_away(connection, error)

    def _make_room(self) -> None:
        """Blocks while too many are in their handshake; closes the oldest for the one that came."""
        with self._lock:
            while len(self._unproved) >= MAX_UNPROVED and not self._closed:
                oldest = next(iter(self._unproved))
                left = self._unproved[oldest] + MIN_TIME - time.monotonic()
                if left <= 0:
                    _hang_up(oldest)  # its thread forgets it
                self._lock.wait(left if left > 0 else MIN_TIME)

    def _survive(self, error: OSError) -> None:
        """Goes on after a failed accept: the connection was gone, or this process is out of files."""
        if self._closed or error.errno == errno.ECONNABORTED:
            return
        with self._lock:
            oldest = next(iter(self._unproved), None)
            if oldest is not None and error.errno in EXHAUSTED:
                _hang_up(oldest)
        if not self._warned:
            self._warned = True
            log.warning("%s: cannot accept a connection, and goes on: %s", self._what, error.strerror or error)
        time.sleep(0.1)

    def _greet(self, connection: socket.socket) -> None:
        """The listener's side of one handshake."""
        try:
            self._handshake(connection)
        except (HandshakeError, FramingError, OSError) as error:
            self._turn_away(connection, error)
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
        self._forget(connection)  # it has proved itself, and is not closed for others
        with self._admitting:
            if (reason := self._objection(hello)) is not None:
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

    def _turn_away(self, connection: socket.socket, error: Exception) -> None:
        connection.close()
        log.info("%s: a connection was turned away: %s", self._what, error)


def connected(address: tuple[str, int], token: str, hello: Mapping[str, Any]) -> socket.socket:
    """Connects to a listener, and returns the connection after the handshake.

    Blocks. Raises as `handshake.connect`.
    """
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
    """Wakes the thread that waits in it, which closes it."""
    with contextlib.suppress(OSError):  # gone already
        connection.shutdown(socket.SHUT_RDWR)


def keep_alive(connection: socket.socket) -> None:
    """Has a vanished host noticed within half a minute, and small messages sent at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
