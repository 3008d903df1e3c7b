"""Nobody is greeted without the token, which never travels; and nobody is followed who doesn't
know it either.
"""

import asyncio
import dataclasses
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljax.messaging import framing
from rljax.messaging.framing import UNPROVED, Message
from rljax.messaging.handshake import (
    ConnectorHandshake,
    HandshakeError,
    ListenerHandshake,
    Refused,
    connect,
    connect_async,
)

TOKEN, HELLO = "a secret between us", {"rank": 1, "name": "host 12"}


def talk(listening: str = TOKEN, connecting: str = TOKEN, refuse: str | None = None):
    """Both sides in turn; returns what the listener learned, and every message that was sent."""
    listener, connector = ListenerHandshake(listening), ConnectorHandshake(connecting, HELLO)
    sent = [listener.challenge()]
    sent.append(connector.answer(sent[0]))
    hello = listener.verify(sent[1])
    sent.append(listener.welcome() if refuse is None else listener.refused(refuse))
    connector.verify(sent[2])
    return hello, sent


def test_those_who_know_the_token_find_each_other_and_it_does_not_travel():
    hello, sent = talk()
    assert hello == HELLO
    for message in sent:
        data = b"".join(framing.encode(message))
        assert TOKEN.encode() not in data and len(data) < UNPROVED.header


def test_who_does_not_know_it_is_denied():
    with pytest.raises(HandshakeError, match="its token is another"):
        talk(connecting="a guess")
    connector = ConnectorHandshake("a guess", HELLO)
    connector.answer(ListenerHandshake(TOKEN).challenge())
    with pytest.raises(HandshakeError, match="does not know this token") as caught:
        connector.verify(ListenerHandshake(TOKEN).denied())
    assert not isinstance(caught.value, Refused)


def test_a_refusal_is_believed_only_of_who_knows_the_token():
    with pytest.raises(Refused, match="rank 1 is here"):
        talk(refuse="rank 1 is here")
    connector = ConnectorHandshake(TOKEN, HELLO)
    connector.answer(Message("challenge", {"nonce": "0" * 32}))
    with pytest.raises(HandshakeError) as caught:
        connector.verify(Message("refused", {"reason": "go away", "proof": "0" * 64}))
    assert not isinstance(caught.value, Refused)


@pytest.mark.parametrize("nonce", ["", "0" * 31, None, [["0" * 32]]])
def test_a_proof_over_a_nonce_that_is_none_is_no_proof(nonce, monkeypatch):
    monkeypatch.setattr("rljax.messaging.handshake.secrets.token_hex", lambda count: nonce)
    connector = ConnectorHandshake(TOKEN, HELLO)
    answer = connector.answer(Message("challenge", {"nonce": "0" * 32}))
    listener = ListenerHandshake(TOKEN)
    listener._nonce = "0" * 32
    with pytest.raises(HandshakeError, match="no hello"):
        listener.verify(answer)


def test_a_false_listener_that_lets_everyone_in_is_found_out():
    connector = ConnectorHandshake(TOKEN, HELLO)
    connector.answer(Message("challenge", {"nonce": "0" * 32}))
    for proof in ("0" * 64, "", None, 3, "é", ["0" * 64]):
        with pytest.raises(HandshakeError, match="does not know this token"):
            connector.verify(Message("welcome", {"proof": proof}))


@pytest.mark.parametrize("blocking", [True, False])
def test_no_way_to_connect_follows_a_false_listener(blocking):
    """It gives back the proof that it was sent."""
    challenge = Message("challenge", {"nonce": "0" * 32})

    def talk():
        ours, theirs = socket.socketpair()

        def listen():
            framing.send(theirs, challenge)
            proof = framing.receive(theirs, UNPROVED).fields["proof"]
            framing.send(theirs, Message("welcome", {"proof": proof}))

        with ours, theirs:
            listener = threading.Thread(target=listen, daemon=True)
            listener.start()
            try:
                connect(ours, TOKEN, HELLO)
            finally:
                listener.join()

    async def talk_async():
        sent = []

        async def read():
            return Message("welcome", {"proof": sent[0].fields["proof"]}) if sent else challenge

        await connect_async(read, sent.append, TOKEN, HELLO)

    with pytest.raises(HandshakeError, match="does not know this token"):
        talk() if blocking else asyncio.run(talk_async())


def test_a_proof_is_of_its_connection_its_side_and_its_hello_alone():
    _, sent = talk()
    with pytest.raises(HandshakeError):  # replayed to another connection
        ListenerHandshake(TOKEN).verify(sent[1])
    connector = ConnectorHandshake(TOKEN, HELLO)
    own = connector.answer(sent[0])
    for reflected in (own.fields["proof"], sent[1].fields["proof"], sent[2].fields["proof"]):
        with pytest.raises(HandshakeError):
            connector.verify(Message("welcome", {"proof": reflected}))
    listener, other = ListenerHandshake(TOKEN), ConnectorHandshake(TOKEN, HELLO)
    answer = other.answer(listener.challenge())
    with pytest.raises(HandshakeError):
        listener.verify(dataclasses.replace(answer, fields=answer.fields | {"hello": HELLO | {"rank": 2}}))


@pytest.mark.parametrize("depth", [1, 500, 900, 960, 980, 990])
def test_a_hello_that_nests_is_none_however_deep(depth):
    deep = []
    for _ in range(depth):
        deep = [deep]
    for hello in ({"name": deep}, deep, "name", None):
        with pytest.raises(HandshakeError, match="no hello"):
            ListenerHandshake(TOKEN).verify(Message("hello", {"nonce": "0" * 32, "proof": "", "hello": hello}))


VALUES = (
    st.none() | st.integers() | st.text(max_size=40) | st.lists(st.integers(), max_size=2) | st.just("0" * 32) | st.just(HELLO)
)
MESSAGES = st.builds(
    Message,
    st.sampled_from(["challenge", "hello", "welcome", "refused", "denied", ""]),
    st.dictionaries(st.sampled_from(["nonce", "hello", "proof", "reason"]), VALUES),
)


@given(MESSAGES, MESSAGES)
def test_no_other_message_gets_anyone_in(first, second):
    with pytest.raises(HandshakeError):
        ListenerHandshake(TOKEN).verify(first)
    connector = ConnectorHandshake(TOKEN, HELLO)
    with pytest.raises(HandshakeError):
        connector.answer(first)
        connector.verify(second)


def test_asyncio_goes_through_the_same_states():
    async def scenario(listening):
        listener, sent = ListenerHandshake(listening), []

        async def read():
            if not sent:
                return listener.challenge()
            try:
                return [listener.verify(sent[0]), listener.welcome()][1]
            except HandshakeError:
                return listener.denied()

        await connect_async(read, sent.append, TOKEN, HELLO)
        return sent

    assert asyncio.run(scenario(TOKEN))[0].fields["hello"] == HELLO
    with pytest.raises(HandshakeError):
        asyncio.run(scenario("another"))
