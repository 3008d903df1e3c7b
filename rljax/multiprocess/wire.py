"""Frames between a leader and its followers: a JSON header and raw arrays, counted and checksummed. Nothing is unpickled.

    "RJX1" | header bytes u32 | body bytes u64 | CRC-32 of header and body u32 | header | body

The header is {"kind": ..., "arrays": [[name, dtype, shape], ...], ...}; the body holds those arrays one after the other.
A connection begins with both sides proving that they know the run's token, without sending it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import math
import secrets
import socket
import struct
import zlib
from typing import Any

import numpy as np

from rljax.batching.batch import Batch

MAGIC = b"RJX1"
_FIXED = struct.Struct("<4sIQI")
MAX_HEADER = 16 << 20  # bytes; a config is a few KB
MAX_BODY = 64 << 30  # bytes of arrays
MAX_GREETING = 4096  # bytes, before the other side has shown that it knows the token
DTYPES = {np.dtype(name).str: np.dtype(name) for name in ("bool", "int32", "int64", "float32", "float64")}


class WireError(Exception):
    """What came is not a frame of ours: torn, changed, too large, or of someone who doesn't know the token."""


class Closed(WireError):
    """The other side has hung up."""


@dataclasses.dataclass(frozen=True)
class Frame:
    """One message. `fields` are JSON values.

    Example: Frame("call", {"method": "score", "number": 3}, {"token_ids": ids})
    """

    kind: str
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


def encode(frame: Frame) -> list[memoryview]:
    """The bytes of a frame, arrays not copied, to be sent in this order."""
    arrays = {name: np.asarray(array, order="C") for name, array in frame.arrays.items()}
    for name, array in arrays.items():
        if array.dtype.str not in DTYPES:
            raise ValueError(f"{name}: no {array.dtype} in a frame")
    described = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    header = json.dumps({"kind": frame.kind, "fields": frame.fields, "arrays": described}).encode()
    body = [array.reshape(-1).view(np.uint8).data for array in arrays.values() if array.size]
    crc = zlib.crc32(header)
    for piece in body:
        crc = zlib.crc32(piece, crc)
    fixed = _FIXED.pack(MAGIC, len(header), sum(piece.nbytes for piece in body), crc)
    return [memoryview(fixed + header), *body]


def send(connection: socket.socket, frame: Frame) -> None:
    """Raises OSError when the connection is gone."""
    for piece in encode(frame):
        connection.sendall(piece)


def receive(connection: socket.socket, *, limit: int = MAX_BODY) -> Frame:
    """The next frame; blocks. limit: bytes of its body.

    Raises:
      Closed: the other side hung up, between two frames or within one.
      WireError: what came is not a whole frame, or larger than allowed.
    """
    magic, header_bytes, body_bytes, crc = _FIXED.unpack(_exactly(connection, _FIXED.size))
    if magic != MAGIC:
        raise WireError("not a frame")
    if header_bytes > min(MAX_HEADER, max(limit, MAX_GREETING)) or body_bytes > limit:
        raise WireError(f"a frame of {header_bytes} and {body_bytes} bytes is too large")
    header, body = _exactly(connection, header_bytes), _exactly(connection, body_bytes)
    if zlib.crc32(body, zlib.crc32(header)) != crc:
        raise WireError("a frame changed on its way: its checksum is wrong")
    return _decode(header, body)


def _decode(header: bytearray, body: bytearray) -> Frame:
    try:
        tree = json.loads(header)
        arrays, at = {}, 0
        for name, dtype, shape in tree["arrays"]:
            size = math.prod(shape) * DTYPES[dtype].itemsize
            arrays[name] = np.frombuffer(body, DTYPES[dtype], math.prod(shape), at).reshape(shape)
            at += size
        if at != len(body):
            raise ValueError(f"{len(body)} bytes for arrays of {at}")
        return Frame(tree["kind"], tree["fields"], arrays)
    except (ValueError, KeyError, TypeError) as error:
        raise WireError(f"a frame can't be read: {error}") from error


def _exactly(connection: socket.socket, count: int) -> bytearray:
    """So many bytes, read as they come: a length that lies takes no memory."""
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise Closed("the connection was closed")
        data += piece
    return data


# Batches ------------------------------------------------------------------------------------------------------------------


def arrays_of(batch: Batch) -> dict[str, np.ndarray]:
    """The arrays that the batch has, by field."""
    return {name: array for name, array in vars(batch).items() if array is not None}


def batch_of(arrays: dict[str, np.ndarray]) -> Batch:
    """The inverse. Raises WireError where they are no batch."""
    try:
        return Batch(**arrays)
    except TypeError as error:
        raise WireError(f"not a batch: {error}") from None


# Greeting -----------------------------------------------------------------------------------------------------------------


def greet(connection: socket.socket, token: str, hello: dict[str, Any]) -> None:
    """The follower's side: says who it is, proves that it knows the token, and has the leader prove it.

    Raises WireError when the leader doesn't know the token, or refuses this follower (with its reason).
    """
    theirs = _nonce(receive(connection, limit=0))
    ours = secrets.token_hex(16)
    proof = _proof(token, "follower", theirs, ours, hello)
    send(connection, Frame("hello", {"nonce": ours, "proof": proof, "hello": hello}))
    answer = receive(connection, limit=0)
    if answer.kind == "refused":
        raise WireError(str(answer.fields.get("reason")))
    if not hmac.compare_digest(str(answer.fields.get("proof")), _proof(token, "leader", theirs, ours, hello)):
        raise WireError("the leader does not know the token of this run")


def welcome(connection: socket.socket, token: str) -> tuple[dict[str, Any], str]:
    """The leader's side, first half: what the follower says of itself, and the proof that `accept` sends back.

    Raises WireError for anyone who does not know the token; they learn nothing but a random number.
    """
    ours = secrets.token_hex(16)
    send(connection, Frame("nonce", {"nonce": ours}))
    frame = receive(connection, limit=0)
    theirs, hello = _nonce(frame), frame.fields.get("hello")
    if frame.kind != "hello" or not isinstance(hello, dict):
        raise WireError("no greeting")
    if not hmac.compare_digest(str(frame.fields.get("proof")), _proof(token, "follower", ours, theirs, hello)):
        raise WireError("someone who does not know the token of this run")
    return hello, _proof(token, "leader", ours, theirs, hello)


def accept(connection: socket.socket, proof: str) -> None:
    send(connection, Frame("welcome", {"proof": proof}))


def refuse(connection: socket.socket, reason: str) -> None:
    send(connection, Frame("refused", {"reason": reason}))


def _nonce(frame: Frame) -> str:
    nonce = frame.fields.get("nonce")
    if not isinstance(nonce, str) or len(nonce) != 32:
        raise WireError("no greeting")
    return nonce


def _proof(token: str, side: str, leader: str, follower: str, hello: dict[str, Any]) -> str:
    text = json.dumps([side, leader, follower, hello], sort_keys=True)
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def keep_alive(connection: socket.socket) -> None:
    """A host that is gone without a word is noticed within half a minute; small frames are sent at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
