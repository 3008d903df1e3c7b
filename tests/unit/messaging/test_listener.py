"""Only who passed the handshake is handed over; strangers are few and short-lived, and end
nothing.
"""

import contextlib
import errno
import queue
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from rljax.messaging import framing, handshake, listener
from rljax.messaging.framing import FramingError, Message
from rljax.messaging.handshake import HandshakeError, Refused
from rljax.messaging.listener import Listener, connect_to
from tests.shared import allow_files

TOKEN = "a secret"


class Open:
    """A listener, and whom it admitted."""

    def __init__(self, refusal_reason=lambda hello: None):
        self.admitted = queue.Queue()
        admit = lambda connection, hello: self.admitted.put((connection, hello))  # noqa: E731
        self.listener = Listener(("127.0.0.1", 0), TOKEN, peers="a test's", refusal_reason=refusal_reason, admit=admit)
        self.address = self.listener.address

    def next(self):
        return self.admitted.get(timeout=10)


@pytest.fixture
def opened():
    made = Open()
    yield made
    made.listener.close()


@contextlib.contextmanager
def strangers(address, count):
    """Opens `count` connections that send nothing."""
    silent = [socket.create_connection(address) for _ in range(count)]
    try:
        yield silent
    finally:
        for connection in silent:
            connection.close()


def test_both_sides_have_a_connection_behind_the_handshake(opened):
    ours = connect_to(opened.address, TOKEN, {"rank": 1})
    theirs, hello = opened.next()
    assert hello == {"rank": 1} and ours.gettimeout() is None is theirs.gettimeout()
    for a, b in ((ours, theirs), (theirs, ours)):
        framing.send(a, Message("call", {"x": "y" * 100_000}))  # larger than strangers may send
        assert framing.receive(b).kind == "call"
    ours.close()
    theirs.close()


def test_whom_it_turns_away_fill_no_log(opened, caplog):
    caplog.set_level("INFO")
    for _ in range(20):
        with socket.create_connection(opened.address) as stranger:
            stranger.sendall(b"x" * 5000)
            with contextlib.suppress(ConnectionError):
                while stranger.recv(4096):
                    pass
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and lines[0].startswith("a test's: a connection from 127.0.0.1 was turned away: ")


def test_without_the_token_or_sense_nobody_gets_in(opened):
    with pytest.raises(HandshakeError, match="does not know this token"):
        connect_to(opened.address, "a guess", {})
    for data in (b"GET / HTTP/1.1\r\n\r\n" * 10, b"".join(framing.encode(Message("hello"))), b""):
        with strangers(opened.address, 1) as (stranger,):
            assert framing.receive(stranger).kind == "challenge"
            stranger.sendall(data)
            with contextlib.suppress(OSError):  # it may have hung up already
                stranger.shutdown(socket.SHUT_WR)
            with pytest.raises((FramingError, ConnectionError)):
                while framing.receive(stranger).kind == "denied":
                    pass
    assert opened.admitted.empty()


def test_who_is_not_wanted_is_told_why(opened):
    some = Open(lambda hello: None if hello["rank"] == 1 else "this rank is none of ours")
    with pytest.raises(Refused, match="this rank is none of ours"):
        connect_to(some.address, TOKEN, {"rank": 2})
    connect_to(some.address, TOKEN, {"rank": 1}).close()
    assert some.next()[1] == {"rank": 1} and some.admitted.empty()
    some.listener.close()


def test_the_next_refusal_sees_who_was_admitted():
    """Many connect at once with the same name: one is admitted."""
    names = set()
    lock = threading.Lock()
    some = Open(lambda hello: "here already" if hello["name"] in names else None)
    some.listener._admit = lambda connection, hello: (names.add(hello["name"]), some.admitted.put(connection))
    refused = []

    def come():
        try:
            connect_to(some.address, TOKEN, {"name": "one"}).close()
        except Refused:
            with lock:
                refused.append(1)

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert some.admitted.qsize() == 1 and len(refused) == 7
    some.listener.close()


def test_strangers_are_short_lived(opened, monkeypatch):
    monkeypatch.setattr(handshake, "TIME_LIMIT", 0.2)
    with strangers(opened.address, 1) as (stranger,):
        stranger.settimeout(10)
        assert framing.receive(stranger).kind == "challenge"
        with pytest.raises((FramingError, ConnectionError)):
            framing.receive(stranger)


def test_strangers_are_few_and_keep_nobody_out(opened):
    """They would stay for TIME_LIMIT; who comes puts out the oldest."""
    with strangers(opened.address, 3 * listener.MAX_UNPROVED):
        before = time.monotonic()
        connect_to(opened.address, TOKEN, {"rank": 1}).close()
        assert time.monotonic() - before < handshake.TIME_LIMIT
        assert opened.next()[1] == {"rank": 1}
        assert len(opened.listener._unproved) <= listener.MAX_UNPROVED


def test_who_has_proved_itself_is_not_put_out_for_strangers(monkeypatch):
    """Though it still waits for its turn to be admitted."""
    monkeypatch.setattr(listener, "MAX_UNPROVED", 1)
    monkeypatch.setattr(listener, "MIN_TIME", 0.0)
    asked, strangers_came = threading.Event(), threading.Event()
    some = Open(lambda hello: asked.set() or (None if strangers_came.wait(60) else "no stranger came"))
    waiting = threading.Thread(target=lambda: connect_to(some.address, TOKEN, {"rank": 1}).close())
    waiting.start()
    assert asked.wait(60)
    with contextlib.ExitStack() as stack:
        for _ in range(2):  # each puts out the one before
            (stranger,) = stack.enter_context(strangers(some.address, 1))
            assert framing.receive(stranger).kind == "challenge"
        strangers_came.set()
        assert some.next()[1] == {"rank": 1}
    waiting.join()
    some.listener.close()


@pytest.mark.parametrize(("code", "is_put_out"), [(errno.EMFILE, True), (errno.ENOBUFS, True), (errno.EPERM, False)])
def test_the_oldest_stranger_makes_room_where_files_run_out_alone(opened, monkeypatch, code, is_put_out):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with strangers(opened.address, 1) as (stranger,):
        assert framing.receive(stranger).kind == "challenge"
        opened.listener._survive(OSError(code, "no"))
        stranger.settimeout(5 if is_put_out else 0.2)  # before the handshake is over
        with pytest.raises((FramingError, ConnectionError) if is_put_out else TimeoutError):
            framing.receive(stranger)


def test_many_who_know_the_token_all_get_in_at_once(opened):
    count, hellos = 4 * listener.MAX_UNPROVED, []
    threads = [
        threading.Thread(target=lambda n=n: hellos.append(connect_to(opened.address, TOKEN, {"n": n}))) for n in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(opened.next()[1]["n"] for _ in range(count)) == list(range(count))
    for connection in hellos:
        connection.close()


def test_silent_strangers_end_nothing_where_files_run_out(tmp_path):
    """300 strangers connect to a process that may open 120 files, then someone who knows the token."""
    code = textwrap.dedent("""
        import resource, sys, threading, time
        resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))
        from rljax.messaging.listener import Listener
        there = threading.Event()
        files = []
        listener = Listener(
            ("127.0.0.1", 0), "a secret", peers="a test's", refusal_reason=lambda hello: None, admit=lambda c, h: there.set()
        )
        print(listener.address[1], flush=True)
        if sys.argv[1] == "full":                       # the process itself uses them up, and later gives some back
            while True:
                try:
                    files.append(open("/dev/null"))
                except OSError:
                    break
            sys.stdin.readline()
            del files[:20]
        while not there.wait(0.05):
            open("/dev/null").close()                   # what a run does all the time
        print("admitted", flush=True)
    """)
    allow_files(1000)
    for how in ("open", "full"):
        process = subprocess.Popen(
            [sys.executable, "-c", code, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            address = "127.0.0.1", int(process.stdout.readline())
            with contextlib.ExitStack() as stack:
                crowd = [socket.socket() for _ in range(300)]
                for connection in crowd:
                    stack.enter_context(connection)
                    connection.setblocking(False)
                    connection.connect_ex(address)
                time.sleep(0.5)
                assert process.poll() is None
                process.stdin.write("\n")
                process.stdin.flush()
                until = time.monotonic() + 40
                while time.monotonic() < until:
                    with contextlib.suppress(OSError, FramingError, HandshakeError):
                        connect_to(address, TOKEN, {}).close()
                        break
            out, errors = process.communicate(timeout=30)
            assert process.returncode == 0 and out == "admitted\n", errors
        finally:
            process.kill()
            process.wait()


def test_a_closed_listener_lets_nobody_in_and_hangs_up_on_strangers():
    some = Open()
    with strangers(some.address, 1) as (stranger,):
        stranger.settimeout(10)
        assert framing.receive(stranger).kind == "challenge"
        some.listener.close()
        some.listener.close()
        with pytest.raises((FramingError, ConnectionError)):
            framing.receive(stranger)
        with pytest.raises(OSError):
            connect_to(some.address, TOKEN, {})


def test_an_address_that_cannot_be_listened_on_is_the_systems_error(opened):
    with pytest.raises(OSError, match="in use"):
        Listener(opened.address, TOKEN, peers="", refusal_reason=lambda hello: None, admit=lambda connection, hello: None)
