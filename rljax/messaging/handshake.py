"""Both sides of a new connection prove that they know a token, without sending it. Each proof is
of this connection alone.

    listener                                              connector
    challenge {nonce}                           ------>
                                                <------   hello {nonce, hello, proof}       hello: who it is
    welcome {proof}                             ------>                                     the connection is open
 or refused {reason, proof}                     ------>                                     a reason that can be believed
 or denied  {}                                  ------>                                     its token is another

A proof is HMAC-SHA256 under the token over who proves, both nonces and what is claimed.
`ListenerHandshake` and `ConnectorHandshake` map messages received to messages to send; `connect`
and `connect_async` do that over a connection.
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
    """The other side did not prove that it knows the token, or doesn't speak this protocol."""


class Refused(HandshakeError):
    """The other side knows the token and says why it doesn't want this connection."""


class ListenerHandshake:
    """The side that listens.

    Example:

        handshake = ListenerHandshake(token)
        send(handshake.challenge())
        hello = handshake.verify(receive())                      # HandshakeError: send(handshake.denied())
        send(handshake.welcome())                                # or handshake.refused("this rank is here already")
    """

    def __init__(self, token: str) -> None:
        self._token, self._nonce = token, secrets.token_hex(NONCE_BYTES)
        self._transcript: list[Any] = []  # nonces and hello, once they are proved

    def challenge(self) -> Message:
        return Message("challenge", {"nonce": self._nonce})

    def verify(self, message: Message) -> dict[str, Any]:
        """Returns what the connector says of itself.

        Raises HandshakeError where it doesn't know the token.
        """
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
        """Tells a connector whose token is another so.

        It proves nothing, and tells nothing that could be used.
        """
        return Message("denied")


class ConnectorHandshake:
    """The side that connects.

    Example:

        handshake = ConnectorHandshake(token, {"rank": 1})
        send(handshake.answer(receive()))
        handshake.verify(receive())
    """

    def __init__(self, token: str, hello: Mapping[str, Any]) -> None:
        """hello: says who connects, by text, numbers, booleans and None; of 3 KB at most."""
        self._token, self._hello, self._transcript = token, dict(hello), list[Any]()

    def answer(self, challenge: Message) -> Message:
        """Returns the hello, with its proof. Raises HandshakeError."""
        nonce = challenge.fields.get("nonce")
        if challenge.kind != "challenge" or not _is_nonce(nonce):
            raise HandshakeError("it is no listener of rljax")
        own = secrets.token_hex(NONCE_BYTES)
        self._transcript = [nonce, own, self._hello]
        proof = _proof(self._token, "hello", self._transcript)
        return Message("hello", {"nonce": own, "hello": self._hello, "proof": proof})

    def verify(self, answer: Message) -> None:
        """Returns when the listener has proved that it knows the token, and takes the connection.

        Raises:
          Refused: it knows the token, and gives a reason.
          HandshakeError: it does not know it.
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
    """Whether a hello nests nothing: a stranger's depth is not ours to follow."""
    return all(isinstance(value, str | int | float | None) for value in hello.values())


def _is_nonce(nonce: object) -> bool:
    return isinstance(nonce, str) and len(nonce) == 2 * NONCE_BYTES


def connect(connection: socket.socket, token: str, hello: Mapping[str, Any]) -> None:
    """The connector's handshake over a socket, which then blocks without a time limit.

    Raises:
      Refused, HandshakeError: as `ConnectorHandshake.verify`.
      FramingError, OSError: the connection broke, or the other side isn't rljax.
    """
    handshake, deadline = ConnectorHandshake(token, hello), time.monotonic() + TIME_LIMIT
    send(connection, handshake.answer(receive(connection, UNPROVED, deadline=deadline)))
    handshake.verify(receive(connection, UNPROVED, deadline=deadline))
    connection.settimeout(None)


async def connect_async(
    read: Callable[[], Awaitable[Message]], write: Callable[[Message], object], token: str, hello: Mapping[str, Any]
) -> None:
    """The connector's handshake in asyncio.

    `read` returns messages within `UNPROVED`. Raises as `connect`.
    """
    handshake = ConnectorHandshake(token, hello)
    try:
        async with asyncio.timeout(TIME_LIMIT):
            write(handshake.answer(await read()))
            handshake.verify(await read())
    except TimeoutError:
        raise TimeoutError(f"no handshake in {TIME_LIMIT:g} s") from None
