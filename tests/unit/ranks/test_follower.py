"""What a follower says when its leader is gone: what it was in the middle of, if anything."""

import os
import signal
import socket

import pytest

from rljax.errors import UserError
from rljax.ranks import follower, rendezvous
from rljax.ranks.place import Place


@pytest.fixture
def last_words(tmp_path, monkeypatch, capfd):
    """What is said of a leader that is lost while `calls(watch)` runs, or after it."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "_exit", lambda _: None)

    def follow(calls) -> str:
        def serve(connection, make, *, watch, lost):
            calls(watch, lambda: lost("gone"))

        ours, theirs = socket.socketpair()
        with ours, theirs:
            monkeypatch.setattr(rendezvous, "join", lambda *_: rendezvous.Joined(ours, 60.0, "localhost:1"))
            monkeypatch.setattr(follower, "serve", serve)
            follower.follow(Place(rank=1, size=2, local_size=2), tmp_path)
        return capfd.readouterr().err

    return follow


def test_a_call_that_failed_is_not_under_way(last_words):
    def refused(watch, lose):
        with pytest.raises(UserError), watch("restore", lambda: None):
            raise UserError("no such checkpoint")
        lose()

    said = last_words(refused)
    assert "the leader is gone (gone); this rank ends\n" in said
    assert "restore" not in said and "stacks" not in said


def test_the_call_that_is_under_way_is_named_after_one_that_failed(last_words):
    def lost_in_update(watch, lose):
        with pytest.raises(UserError), watch("restore", lambda: None):
            raise UserError("no such checkpoint")
        with watch("update", lambda: None):
            lose()

    assert "in the middle of update, with these stacks:" in last_words(lost_in_update)
