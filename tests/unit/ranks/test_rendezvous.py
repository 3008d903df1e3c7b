"""A rank is let in once, and only then is it in: a follower whose greeting failed may come again."""

import queue
import threading

import pytest

from rljax.errors import UserError
from rljax.ranks import rendezvous, wire
from rljax.ranks.place import Place

SIZE, RANK = 2, 1


@pytest.fixture
def admitted():
    return queue.Queue()


@pytest.fixture
def door(tmp_path, admitted):
    let_in = rendezvous.Door(place(0), tmp_path, 60.0, lambda *those: admitted.put(those))
    yield let_in
    let_in.close()


def place(rank: int) -> Place:
    return Place(rank=rank, size=SIZE, local_rank=rank, local_size=SIZE, launch="first")


def test_a_rank_that_was_not_let_in_may_come_again(tmp_path, door, admitted, monkeypatch):
    accept, failed = wire.accept, threading.Event()

    def once(connection, proof):
        if failed.is_set():
            return accept(connection, proof)
        failed.set()
        raise TimeoutError("timed out")

    monkeypatch.setattr(wire, "accept", once)
    rendezvous.join(place(RANK), tmp_path, timeout=10.0).connection.close()
    assert failed.is_set()
    assert admitted.get(timeout=10)[1] == RANK and admitted.empty()


def test_a_rank_that_is_in_is_in_but_once(tmp_path, door, admitted):
    connection = rendezvous.join(place(RANK), tmp_path, timeout=10.0).connection
    with connection, pytest.raises(UserError, match="rank 1 of 2 is here already"):
        rendezvous.join(place(RANK), tmp_path, timeout=0.5)
    assert admitted.get(timeout=10)[1] == RANK and admitted.empty()
