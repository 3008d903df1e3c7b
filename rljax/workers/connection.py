"""Messages between the trainer and its workers: a JSON object and raw bytes, framed. Nothing is pickled.

    magic, bytes of the header, bytes of the body | JSON header with "kind" | body: little-endian arrays, or a piece of a file

Both sides say `beat` every few seconds, so that a partner who is gone without a word is noticed (`SILENCE`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rljax.errors import UserError

MAGIC = b"RLW1"
PROTOCOL = 1  # what the messages are: both sides must have the same
FRAME = struct.Struct("<4sIQ")
MAX_HEADER, MAX_BODY = 64 << 20, 4 << 30  # bytes of a message between partners who know each other
FIRST_HEADER = 4096  # bytes of the first message, before that
PIECE = 4 << 20  # bytes of a file in one message
BEAT, SILENCE = 5.0, 60.0  # seconds between signs of life; without one, until the partner counts as gone


class PeerError(Exception):
    """The partner is gone, silent, or doesn't speak as it should."""


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """Example: Message("lease", {"ticket": {...}}, b"")"""

    kind: str
    fields: dict[str, Any]
    body: bytes


class Connection:
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._out: list[bytes] = []  # sent in this turn of the event loop, by one call of the system

    def send(self, kind: str, fields: dict[str, Any] | None = None, body: bytes = b"") -> None:
        """Whole or not at all, in the order of the calls, and never waits. A partner who is gone is noticed by `receive`."""
        if self._writer.is_closing():
            return
        head = json.dumps({"kind": kind} | (fields or {})).encode()
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out += (FRAME.pack(MAGIC, len(head), len(body)), head, body)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if out and not self._writer.is_closing():
            self._writer.write(b"".join(out))

    async def drain(self) -> None:
        """Waits until the partner has taken most of what was sent. Raises PeerError."""
        self._flush()
        try:
            await self._writer.drain()
        except OSError as error:
            raise PeerError(f"the connection broke: {error}") from error

    async def receive(self, *, first: bool = False) -> Message:
        """The next message. Raises PeerError."""
        try:
            async with asyncio.timeout(SILENCE):
                magic, head_size, body_size = FRAME.unpack(await self._reader.readexactly(FRAME.size))
                largest = (FIRST_HEADER, 0) if first else (MAX_HEADER, MAX_BODY)
                if magic != MAGIC or head_size > largest[0] or body_size > largest[1]:
                    raise PeerError("it doesn't speak our protocol")
                fields = json.loads(await self._reader.readexactly(head_size))
                body = await self._reader.readexactly(body_size)
            return Message(fields.pop("kind"), fields, body)
        except TimeoutError:
            raise PeerError(f"silent for {SILENCE:g} s") from None
        except (asyncio.IncompleteReadError, OSError):
            raise PeerError("the connection ended") from None
        except (ValueError, KeyError, AttributeError, RecursionError) as error:
            raise PeerError(f"a message that can't be read: {type(error).__name__}: {error}") from None

    async def keep_alive(self) -> None:
        """Says `beat` until it is cancelled."""
        while True:
            self.send("beat")
            await asyncio.sleep(BEAT)

    def close(self) -> None:
        """What was sent goes out first."""
        self._flush()
        self._writer.close()

    def abort(self) -> None:
        """At once; what was not sent yet is lost."""
        self._writer.transport.abort()


def pieces(path: Path) -> Iterator[bytes]:
    """The bytes of a file, some at a time; one empty piece of an empty file."""
    with path.open("rb") as file:
        piece = file.read(PIECE)
        yield piece
        while piece := file.read(PIECE):
            yield piece


def plain_name(name: object) -> str:
    """A file name that stays in the directory it is put in. Raises PeerError."""
    if not isinstance(name, str) or not name or name.startswith(".") or Path(name).name != name:
        raise PeerError(f"{name!r} is no file name")
    return name


def host_and_port(address: str, key: str) -> tuple[str, int]:
    """Of "HOST:PORT". Raises UserError."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit() and int(port) < 65536):
        raise UserError(f"{key}: {address!r} is no address (HOST:PORT)")
    return host.strip("[]"), int(port)
