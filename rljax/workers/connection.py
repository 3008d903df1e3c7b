"""One end of a connection between the trainer and a worker, in asyncio.

Messages arrive in order. Both sides send a heartbeat every few seconds, so that a side that
vanished without closing the connection is noticed after `SILENCE` seconds.
"""

from __future__ import annotations

import asyncio

from rljax.errors import UserError
from rljax.messaging import framing
from rljax.messaging.framing import ConnectionClosed, FramingError, Limits, Message

PROTOCOL = 4  # version of the messages; both sides must have the same
LIMITS = Limits(header=64 << 20, body=4 << 30)
HEARTBEAT = 5.0  # seconds between heartbeats
SILENCE = 60.0  # seconds without a message until the other side counts as gone
STREAM_BUFFER = 4 << 20  # bytes that asyncio reads ahead


class PeerError(Exception):
    """The other side is gone or silent, or sent a malformed message."""


class Connection:
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._unsent: list[framing.Buffer] = []  # of this iteration of the event loop: written by one system call

    def send(self, message: Message) -> None:
        """Queues a message. Never waits.

        Messages are sent whole or not at all, in the order of these calls. If the other side is
        gone, this does nothing, and `receive` raises.
        """
        if self._writer.is_closing():
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent += framing.encode(message)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and not self._writer.is_closing():
            self._writer.write(b"".join(unsent))

    async def drain(self) -> None:
        """Waits until the other side has taken most of what was sent. Raises PeerError."""
        self._flush()
        try:
            await self._writer.drain()
        except OSError as error:
            raise PeerError(f"the connection broke: {error}") from error

    async def receive(self, limits: Limits = LIMITS) -> Message:
        """Receives the next message. Raises PeerError."""
        try:
            async with asyncio.timeout(SILENCE):
                return await framing.read(self._reader, limits)
        except TimeoutError:
            raise PeerError(f"silent for {SILENCE:g} s") from None
        except ConnectionClosed:
            raise PeerError("the connection ended") from None
        except FramingError as error:
            raise PeerError(str(error)) from None

    async def keep_alive(self) -> None:
        """Sends heartbeats until it is cancelled."""
        while True:
            self.send(Message("heartbeat"))
            await asyncio.sleep(HEARTBEAT)

    def close(self) -> None:
        """Closes the connection once everything is sent."""
        self._flush()
        self._writer.close()

    def abort(self) -> None:
        """Closes the connection at once. Messages that were not sent yet are lost."""
        self._writer.transport.abort()


def host_and_port(address: str, key: str) -> tuple[str, int]:
    """Splits "HOST:PORT". Raises UserError that names the key that the address came from."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit() and int(port) < 65536):
        raise UserError(f"{key}: {address!r} is not an address (use HOST:PORT)")
    return host.strip("[]"), int(port)
