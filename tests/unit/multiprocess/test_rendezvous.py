"""Followers find their leader: each once, and again if a handshake broke off."""

import threading

import pytest

from rljax.engine.rank import ProcessRank
from rljax.errors import UserError
from rljax.messaging.handshake import ListenerHandshake
from rljax.multiprocess import follower, rendezvous

LEADER, FOLLOWER = (ProcessRank(rank, 2, rank, 2, "127.0.0.1", 1, "launch") for rank in range(2))


@pytest.fixture
def leader(tmp_path):
    admitted: list[int] = []
    there = threading.Event()

    def admit(connection, rank, name):
        admitted.append(rank)
        connection.close()
        there.set()

    found = rendezvous.Rendezvous(LEADER, tmp_path, 60.0, admit)
    found.admitted, found.there = admitted, there
    yield found
    found.close()


def test_a_follower_whose_handshake_broke_off_comes_again(leader, tmp_path, monkeypatch):
    welcome, broken = ListenerHandshake.welcome, []

    def breaks_once(handshake):
        if not broken:
            broken.append(True)
            raise TimeoutError("timed out")
        return welcome(handshake)

    monkeypatch.setattr(ListenerHandshake, "welcome", breaks_once)
    joined = rendezvous.join(FOLLOWER, tmp_path, timeout=20.0)
    assert leader.there.wait(10) and broken and leader.admitted == [1]
    joined.connection.close()


def test_a_rank_that_is_there_is_not_let_in_twice(leader, tmp_path):
    joined = rendezvous.join(FOLLOWER, tmp_path, timeout=20.0)
    assert leader.there.wait(10)
    with pytest.raises(UserError, match=r"rank 1: no leader in 1 s: .*rank 1 is connected already"):
        rendezvous.join(FOLLOWER, tmp_path, timeout=1.0)
    assert leader.admitted == [1]
    joined.connection.close()


def test_a_call_that_failed_is_not_told_as_under_way_when_the_leader_goes(monkeypatch, capsys, tmp_path):
    ended = []

    def serve(connection, make, *, watch, lost):
        with pytest.raises(UserError), watch("restore", threading.Event()):
            raise UserError("no such checkpoint")
        lost("connection closed")
        with watch("update", threading.Event()):
            lost("connection closed")

    monkeypatch.setattr(follower, "serve", serve)
    monkeypatch.setattr(follower.rendezvous, "join", lambda process, workdir: rendezvous.Joined(None, 60.0, ""))
    monkeypatch.setattr(follower.signal, "signal", lambda *_: None)
    monkeypatch.setattr(follower.faulthandler, "dump_traceback", lambda *_: None)
    monkeypatch.setattr(follower.os, "_exit", ended.append)
    follower.follow(FOLLOWER, tmp_path)
    first, second = capsys.readouterr().err.splitlines()
    assert ended == [1, 1]
    assert "in the middle of" not in first and "in the middle of update" in second
