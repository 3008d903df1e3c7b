"""Frames arrive as they were sent or not at all, whatever is on the line; nobody is greeted without the token."""

import socket
import struct
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljax.multiprocess import wire
from rljax.multiprocess.wire import Closed, Frame, WireError


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    theirs.settimeout(10)
    yield ours, theirs
    ours.close()
    theirs.close()


def raw(frame: Frame) -> bytearray:
    return bytearray(b"".join(wire.encode(frame)))


FRAME = Frame(
    "call",
    {"method": "score", "number": 7, "path": None},
    {
        "token_ids": np.arange(12, dtype=np.int32).reshape(3, 4),
        "loss_mask": np.array([[True, False]]),
        "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "empty": np.zeros((0, 5), np.float32),
        "scalar": np.array(2.5),
    },
)


def test_a_frame_comes_out_as_it_went_in(pair):
    ours, theirs = pair
    wire.send(ours, FRAME)
    got = wire.receive(theirs)
    assert (got.kind, got.fields) == (FRAME.kind, FRAME.fields)
    assert got.arrays.keys() == FRAME.arrays.keys()
    for name, array in FRAME.arrays.items():
        np.testing.assert_array_equal(got.arrays[name], array)
        assert got.arrays[name].dtype == array.dtype


@given(st.data())
def test_a_changed_byte_is_never_taken_for_a_frame(data):
    whole = raw(FRAME)
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(whole)
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(WireError):
            wire.receive(theirs, limit=1 << 20)


@given(st.integers(0, len(raw(FRAME)) - 1))
def test_a_torn_frame_is_a_closed_connection(length):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(raw(FRAME)[:length])
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(Closed):
            wire.receive(theirs)


def test_a_length_that_lies_takes_no_memory(pair):
    ours, theirs = pair
    ours.sendall(struct.pack("<4sIQI", b"RJX1", 10, 1 << 62, 0))
    with pytest.raises(WireError, match="too large"):
        wire.receive(theirs)


def test_objects_do_not_travel(pair):
    with pytest.raises(ValueError, match="no object"):
        wire.send(pair[0], Frame("call", {}, {"x": np.array([object()])}))


def greeting(ours: socket.socket, theirs: socket.socket, *, token: str, known: str) -> list[Exception | dict]:
    """What both sides get out of it: the leader's, then the follower's."""
    results: list[Exception | dict] = [{}, {}]

    def leader() -> None:
        try:
            results[0], proof = wire.welcome(ours, token)
            wire.accept(ours, proof)
        except Exception as error:
            results[0] = error
            ours.close()

    thread = threading.Thread(target=leader)
    thread.start()
    try:
        wire.greet(theirs, known, {"rank": 1})
    except Exception as error:
        results[1] = error
    thread.join()
    return results


def test_those_who_know_the_token_find_each_other(pair):
    assert greeting(*pair, token="secret", known="secret") == [{"rank": 1}, {}]


def test_those_who_do_not_are_sent_away(pair):
    leader, follower = greeting(*pair, token="secret", known="guess")
    assert isinstance(leader, WireError) and "token" in str(leader)
    assert isinstance(follower, WireError)


def test_a_follower_tells_nothing_to_a_leader_that_does_not_know_the_token(pair):
    """A false leader that lets everyone in is found out."""
    ours, theirs = pair

    def impostor() -> None:
        wire.send(ours, Frame("nonce", {"nonce": "0" * 32}))
        wire.receive(ours)
        wire.accept(ours, "0" * 64)

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(WireError, match="does not know the token"):
        wire.greet(theirs, "secret", {"rank": 1})
    thread.join()
