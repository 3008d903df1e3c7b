"""Framing of messages: a JSON header and raw arrays, with lengths and a checksum. No pickle.

    "RLJX" | version u8 | header bytes u32 | body bytes u64 | CRC-32 u32 | header | body

Numbers are little-endian. The header is

    {"kind": ..., "fields": {...}, "arrays": [[name, dtype, shape], ...]}

and the body is those arrays, concatenated. The CRC-32 covers all other bytes. The first 21 bytes
are the same in all versions of the format.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import socket
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

MAGIC = b"RLJX"
VERSION = 1
PREFIX = struct.Struct("<4sBIQI")
DTYPES = {np.dtype(name).str: np.dtype(name) for name in ("bool", "uint8", "<i4", "<i8", "<f4", "<f8")}
CHUNK = 1 << 20  # bytes per read from a socket

Buffer = bytes | bytearray | memoryview


class FramingError(Exception):
    """The bytes are not a message: incomplete, changed, too large, or of another version."""


class ConnectionClosed(FramingError):
    """The other side closed the connection, between messages or within one."""


class Limits(NamedTuple):
    """Largest message that a reader accepts, in bytes."""

    header: int
    body: int


UNPROVED = Limits(header=4096, body=0)  # until the other side has proved that it knows the token
PROVED = Limits(header=64 << 20, body=64 << 30)


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """A kind, fields and arrays.

    Example: Message("call", {"method": "score", "number": 3}, {"token_ids": ids})
    """

    kind: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # JSON values
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # of the dtypes in DTYPES


# Bytes ----------------------------------------------------------------------------------------------------------------


def encode(message: Message) -> list[Buffer]:
    """Encodes a message as pieces to be written in order. Arrays are not copied.

    Raises:
      ValueError: the dtype of an array is not in DTYPES.
    """
    arrays = {name: np.asarray(array, order="C") for name, array in message.arrays.items()}
    for name, array in arrays.items():
        if array.dtype.str not in DTYPES:
            raise ValueError(f"{name}: a message can't carry {array.dtype}")
    described = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    header = json.dumps({"kind": message.kind, "fields": message.fields, "arrays": described}).encode()
    body = [array.reshape(-1).view(np.uint8).data for array in arrays.values() if array.size]
    size = sum(piece.nbytes for piece in body)
    prefix = PREFIX.pack(MAGIC, VERSION, len(header), size, _checksum(VERSION, header, size, body))
    return [prefix + header, *body]


class _Prefix(NamedTuple):
    version: int
    header: int  # bytes
    body: int  # bytes
    checksum: int


def _prefix(data: Buffer, limits: Limits) -> _Prefix:
    magic, *numbers = PREFIX.unpack_from(data)
    prefix = _Prefix(*numbers)
    if magic != MAGIC:
        raise FramingError("not a message of rljax")
    if prefix.version != VERSION:
        raise FramingError(f"a message of version {prefix.version}, not {VERSION} (install the same rljax on both sides)")
    if prefix.header > limits.header or prefix.body > limits.body:
        raise FramingError(f"a message of {prefix.header} and {prefix.body} bytes is too large")
    return prefix


def _checksum(version: int, header: Buffer, size: int, body: list[memoryview]) -> int:
    value = zlib.crc32(header, zlib.crc32(PREFIX.pack(MAGIC, version, len(header), size, 0)))
    for piece in body:
        value = zlib.crc32(piece, value)
    return value


def _is_whole(prefix: _Prefix, header: Buffer, body: Buffer) -> bool:
    return _checksum(prefix.version, header, prefix.body, [memoryview(body)]) == prefix.checksum


def _checked(prefix: _Prefix, header: Buffer, body: Buffer) -> Message:
    if not _is_whole(prefix, header, body):
        raise FramingError("a message changed on its way: its checksum is wrong")
    return _decode(header, body)


def _decode(header: Buffer, body: Buffer) -> Message:
    """Decodes header and body. Arrays are views of the body. Raises FramingError."""
    try:
        tree = json.loads(bytes(header))
        kind, fields, described = tree["kind"], tree["fields"], tree["arrays"]
        if not isinstance(kind, str) or not isinstance(fields, dict):
            raise TypeError("no kind, or no fields")
        return Message(kind, fields, _arrays(described, body))
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise FramingError(f"a message can't be read: {type(error).__name__}: {error}") from None


def _arrays(described: list[tuple[str, str, list[int]]], body: Buffer) -> dict[str, np.ndarray]:
    """Cuts the body into arrays.

    Raises:
      ValueError, KeyError, TypeError: body and description don't match.
    """
    arrays: dict[str, np.ndarray] = {}
    start = 0
    for name, code, shape in described:
        if not isinstance(name, str) or name in arrays or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"an array {name!r} of shape {shape}")
        dtype, count = DTYPES[code], math.prod(shape)
        if count * dtype.itemsize > len(body) - start:
            raise ValueError(f"{name}: {len(body) - start} bytes for {count} of {dtype}")
        flat = np.frombuffer(body, dtype, count, start) if count else np.zeros(0, dtype)
        if dtype.kind == "b" and flat.view(np.uint8).max(initial=0) > 1:
            raise ValueError(f"{name}: neither true nor false")
        arrays[name], start = flat.reshape(shape), start + flat.nbytes
    if start != len(body):
        raise ValueError(f"{len(body)} bytes for arrays of {start}")
    return arrays


# Sockets ----------------------------------------------------------------------------------------------------------------


def send(connection: socket.socket, message: Message) -> None:
    """Sends a message; blocks. Raises OSError when the connection is gone."""
    for piece in encode(message):
        connection.sendall(piece)


def receive(connection: socket.socket, limits: Limits = PROVED, *, deadline: float | None = None) -> Message:
    """Receives the next message; blocks.

    Args:
      deadline: for the whole message, on the clock of time.monotonic().

    Raises:
      ConnectionClosed: the other side closed the connection.
      FramingError: the bytes are not a message, or it is larger than the limits.
      TimeoutError: the deadline has passed.
    """
    prefix = _prefix(_exactly(connection, PREFIX.size, deadline), limits)
    header = _exactly(connection, prefix.header, deadline)
    return _checked(prefix, header, _exactly(connection, prefix.body, deadline))


def _exactly(connection: socket.socket, count: int, deadline: float | None) -> bytearray:
    """Reads `count` bytes. The buffer grows as they arrive, so a false length takes no memory."""
    data = bytearray()
    while len(data) < count:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        piece = connection.recv(min(count - len(data), CHUNK))
        if not piece:
            raise ConnectionClosed("the connection was closed")
        data += piece
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError("timed out")
    return data


# asyncio ----------------------------------------------------------------------------------------------------------------


async def read(reader: asyncio.StreamReader, limits: Limits = PROVED) -> Message:
    """Reads the next message of a stream. Raises ConnectionClosed, FramingError."""
    try:
        prefix = _prefix(await reader.readexactly(PREFIX.size), limits)
        header = await reader.readexactly(prefix.header)
        return _checked(prefix, header, await reader.readexactly(prefix.body))
    except (asyncio.IncompleteReadError, OSError):
        raise ConnectionClosed("the connection was closed") from None


# Files ------------------------------------------------------------------------------------------------------------------


def scan(data: Buffer) -> Iterator[tuple[Message, int]]:
    """Yields the complete messages at the start of a file's bytes, each with its end position.

    Stops at the first message that is incomplete or changed.

    Raises:
      FramingError: a complete message is of another version.
    """
    view, start = memoryview(data), 0
    while len(view) - start >= PREFIX.size:
        magic, *numbers = PREFIX.unpack_from(view, start)
        prefix = _Prefix(*numbers)
        middle = start + PREFIX.size + prefix.header
        end = middle + prefix.body
        if magic != MAGIC or end > len(view):
            return
        header, body = view[start + PREFIX.size : middle], view[middle:end]
        if not _is_whole(prefix, header, body):
            return
        if prefix.version != VERSION:
            raise FramingError(f"of version {prefix.version}, not {VERSION}")
        yield _decode(header, body), end
        start = end
