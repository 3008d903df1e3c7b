"""Handshake in which both sides of a connection prove that they know a token, without sending it.

    listener                            connector
    challenge {nonce}            --->
                                 <---   hello {nonce, hello, proof}   says who connects
    welcome {proof}              --->                                 the connection is open
 or refused {reason, proof}      --->                                 a reason, with a proof
 or denied  {}                   --->                                 the tokens differ

A proof is HMAC-SHA256 with the token as key, over the kind of message, both nonces, the hello and
the reason. The nonces make a proof valid for one connection only. `ListenerHandshake` and
`ConnectorHandshake` map received messages to messages to send, without I/O; `connect` and
`connect_async` do the handshake over a connection.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rljax.messaging.framing import UNPROVED, Message, receive, send

TIME_LIMIT = 10.0  # seconds for a whole handshake
NONCE_BYTES = 16


class HandshakeError(Exception):
    """The other side did not prove that it knows the token, or does not speak this protocol."""


class Refused(HandshakeError):
    """The other side knows the token but refuses the connection. The message is its reason."""


class ListenerHandshake:
    """Listener's side of a handshake.

    Example:

        handshake = ListenerHandshake(token)
        send(handshake.challenge())
        hello = handshake.verify(receive())     # HandshakeError: send(handshake.denied())
        send(handshake.welcome())               # or handshake.refused("rank 1 is here already")
    """

    def __init__(self, token: str) -> None:
        self._token, self._nonce = token, secrets.token_hex(NONCE_BYTES)
        self._transcript: list[Any] = []  # nonces and hello, once they are proved

    def challenge(self) -> Message:
        return Message("challenge", {"nonce": self._nonce})

    def verify(self, message: Message) -> dict[str, Any]:
        """Returns the connector's hello. Raises HandshakeError if it does not know the token."""
        nonce, hello = message.fields.get("nonce"), message.fields.get("hello")
        if message.kind != "hello" or not _is_nonce(nonce) or not isinstance(hello, dict) or not _is_flat(hello):
            raise HandshakeError("no hello")
        transcript = [self._nonce, nonce, hello]
        if not _same(message.fields.get("proof"), _proof(self._token, "hello", transcript)):
            raise HandshakeError("its token is another")
        self._transcript = transcript
        return hello

    def welcome(self) -> Message:
        return Message("welcome", {"proof": _proof(self._token, "welcome", self._transcript)})

    def refused(self, reason: str) -> Message:
        return Message("refused", {"reason": reason, "proof": _proof(self._token, "refused", [*self._transcript, reason])})

    def denied(self) -> Message:
        """Tells the connector that its token differs. Carries no proof, and reveals nothing."""
        return Message("denied")


class ConnectorHandshake:
    """Connector's side of a handshake.

    Example:

        handshake = ConnectorHandshake(token, {"rank": 1})
        send(handshake.answer(receive()))
        handshake.verify(receive())
    """

    def __init__(self, token: str, hello: Mapping[str, Any]) -> None:
        """
        Args:
          hello: describes the connector: text, numbers, booleans and None, at most 3 KB.
        """
        self._token, self._hello, self._transcript = token, dict(hello), list[Any]()

    def answer(self, challenge: Message) -> Message:
        """Returns the hello, with a proof. Raises HandshakeError if this is not a challenge."""
        nonce = challenge.fields.get("nonce")
        if challenge.kind != "challenge" or not _is_nonce(nonce):
            raise HandshakeError("it is not a listener of rljax")
        own = secrets.token_hex(NONCE_BYTES)
        self._transcript = [nonce, own, self._hello]
        proof = _proof(self._token, "hello", self._transcript)
        return Message("hello", {"nonce": own, "hello": self._hello, "proof": proof})

    def verify(self, answer: Message) -> None:
        """Checks that the listener knows the token and accepts the connection.

        Raises:
          Refused: the listener knows the token, but refuses the connection.
          HandshakeError: the listener does not know the token.
        """
        claimed = self._transcript + ([answer.fields.get("reason")] if answer.kind == "refused" else [])
        if answer.kind not in ("welcome", "refused") or not _same(
            answer.fields.get("proof"), _proof(self._token, answer.kind, claimed)
        ):
            raise HandshakeError("it does not know this token")
        if answer.kind == "refused":
            raise Refused(str(claimed[-1]))


def _proof(token: str, kind: str, transcript: list[Any]) -> str:
    text = json.dumps([kind, *transcript], sort_keys=True)
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def _same(given: object, expected: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), expected.encode())


def _is_flat(hello: dict[str, Any]) -> bool:
    """Returns whether a hello is flat: encoding deeply nested values would exhaust the stack."""
    return all(isinstance(value, str | int | float | None) for value in hello.values())


def _is_nonce(nonce: object) -> bool:
    return isinstance(nonce, str) and len(nonce) == 2 * NONCE_BYTES


def connect(connection: socket.socket, token: str, hello: Mapping[str, Any]) -> None:
    """Does the connector's handshake over a socket, which afterwards has no timeout. Blocks.

    Raises:
      Refused, HandshakeError: as `ConnectorHandshake.verify`.
      FramingError, OSError: the connection broke, or the other side is not rljax.
    """
    handshake, deadline = ConnectorHandshake(token, hello), time.monotonic() + TIME_LIMIT
    send(connection, handshake.answer(receive(connection, UNPROVED, deadline=deadline)))
    handshake.verify(receive(connection, UNPROVED, deadline=deadline))
    connection.settimeout(None)


async def connect_async(
    read: Callable[[], Awaitable[Message]], write: Callable[[Message], object], token: str, hello: Mapping[str, Any]
) -> None:
    """Does the connector's handshake in asyncio.

    Args:
      read: returns the next message, within the limits `UNPROVED`.
      write: sends a message.

    Raises:
      Refused, HandshakeError, FramingError, OSError: as `connect`.
    """
    handshake = ConnectorHandshake(token, hello)
    try:
        async with asyncio.timeout(TIME_LIMIT):
            write(handshake.answer(await read()))
            handshake.verify(await read())
    except TimeoutError:
        raise TimeoutError(f"no handshake in {TIME_LIMIT:g} s") from None
