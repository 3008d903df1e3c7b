"""Peers that are no workers of this run, or say what no worker says: none of it reaches the run."""

import asyncio
import contextlib
import dataclasses
import struct

import numpy as np
import pytest

from rljax.errors import UserError
from rljax.loop import Loop
from rljax.messaging import framing, handshake
from rljax.messaging.framing import UNPROVED, Message
from rljax.messaging.handshake import HandshakeError, Refused
from rljax.testing.harness import TOKEN, make_run, worker
from rljax.workers import connection as connections
from rljax.workers.client import work
from rljax.workers.connection import PROTOCOL, Connection, PeerError, host_and_port
from rljax.workers.files import plain_name
from tests.unit.workers.runs import bare_connection, connect, greet, group_message, is_once, leases_of, train_beside

pytestmark = pytest.mark.usefixtures("short_pauses")


def test_a_group_of_a_worker_that_was_given_up_comes_too_late(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "SILENCE", 0.3)
    monkeypatch.setattr(connections, "HEARTBEAT", 0.05)
    taken = []

    async def silent(workdir):
        connection = await bare_connection(workdir)
        async for ticket in leases_of(connection):
            taken.append(ticket)
            if len(taken) == 4:
                break
        await asyncio.sleep(1.0)  # no beat
        for ticket in taken:
            connection.send(group_message(ticket))
        with pytest.raises(PeerError):
            await connection.receive() and await connection.receive()

    async def later(workdir):
        while len(taken) < 4:
            await asyncio.sleep(0.01)
        await worker(workdir, patience=30.0)  # whom a busy machine may make silent too

    run, outcome, _ = train_beside(tmp_path, {}, silent, later)
    assert outcome.step == 3 and is_once(run, 12, 1)


HARMS = ["a future version", "arrays of another group", "garbage", "a changed byte", "an unknown message", "no request"]


@pytest.mark.parametrize("harm", HARMS)
def test_a_worker_that_makes_no_sense_is_dropped_and_the_run_goes_on(tmp_path, harm, caplog):
    async def harmful(workdir):
        connection = await bare_connection(workdir)
        async for ticket in leases_of(connection):
            group = group_message(ticket)
            match harm:
                case "a future version":
                    connection.send(group_message(ticket, version=7))
                case "arrays of another group":
                    connection.send(dataclasses.replace(group, arrays={n: a[:-1] for n, a in group.arrays.items()}))
                case "garbage":
                    connection._writer.write(b"GET / HTTP/1.1\r\n\r\n" * 10)
                case "a changed byte":
                    data = bytearray(b"".join(framing.encode(group)))
                    data[-1] ^= 1
                    connection._writer.write(data)
                case "an unknown message":
                    connection.send(Message("exec", {"code": "1"}))
                case "no request":
                    fields = {"id": 0, "request": "r", "params": {"max_new_tokens": "many"}, "seed": 0}
                    connection.send(Message("generate", fields, {"prompt_ids": np.zeros(3, np.uint8)}))
            break
        with contextlib.suppress(PeerError):
            while True:
                await connection.receive()
        await worker(workdir)  # and a sound one takes over

    run, outcome, _ = train_beside(tmp_path, {}, harmful)
    assert outcome.step == 3 and is_once(run, 12, 1)
    assert "worker bare is gone" in caplog.text


def test_nobody_gets_in_without_the_token_and_nothing_large_is_read_before(tmp_path):
    async def strangers(workdir):
        connection, told = await connect(workdir)
        with pytest.raises(HandshakeError, match="does not know this token"):
            await greet(connection, "guess")
        connection, _ = await connect(workdir)
        with pytest.raises(Refused, match="protocol"):
            await greet(connection, TOKEN, protocol=PROTOCOL + 1)
        for raw in (
            b"".join(framing.encode(Message("hello", {"name": "x" * UNPROVED.header}))),
            framing.PREFIX.pack(framing.MAGIC, framing.VERSION, 2, 1 << 30, 0) + b"{}",
            b"".join(framing.encode(Message("group"))),
            struct.pack("<21s", b"GET / HTTP/1.1"),
        ):
            connection, _ = await connect(workdir)
            connection._writer.write(raw)
            assert (await connection.receive()).kind == "challenge"
            with pytest.raises(PeerError):
                while (await connection.receive()).kind == "denied":
                    pass
        with pytest.raises(UserError, match=r"--attach: .* does not know this token \(set RLJAX_TOKEN to that of the run"):
            await work(lambda: (told["address"], "guess"), None)
        await worker(workdir)

    assert train_beside(tmp_path, {}, strangers)[1].step == 3


def test_false_listener_learns_no_secret_and_commands_no_worker(tmp_path):
    """Somebody listens at the trainer's address while it is away; the worker waits for the one
    that knows the token.
    """
    received = []

    async def false_trainer(reader, writer):
        connection = Connection(reader, writer)
        connection.send(Message("challenge", {"nonce": "0" * 32}))
        hello = await connection.receive()
        received.append(b"".join(framing.encode(hello)))
        connection.send(Message("welcome", {"proof": hello.fields["proof"]}))
        connection.send(Message("config", {"config": {}}))
        with contextlib.suppress(PeerError):
            received.append(await connection.receive())
        writer.close()

    async def scenario():
        server = await asyncio.start_server(false_trainer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        working = asyncio.create_task(worker(tmp_path, address=f"127.0.0.1:{port}", patience=30.0))
        while len(received) < 2:
            await asyncio.sleep(0.01)
        server.close()
        run = make_run(tmp_path, {"rollout.listen": f"127.0.0.1:{port}"}, by_workers=True)
        outcome = await asyncio.wait_for(Loop(run).run(), 60)
        await asyncio.wait_for(working, 10)
        return outcome

    assert asyncio.run(scenario()).step == 3
    assert len(received) >= 2 and all(isinstance(data, bytes) and TOKEN.encode() not in data for data in received)


def test_silent_strangers_keep_no_worker_out(tmp_path, monkeypatch):
    monkeypatch.setattr(handshake, "TIME_LIMIT", 5.0)

    async def crowd(workdir):
        silent = [await connect(workdir) for _ in range(100)]
        await worker(workdir, patience=30.0)
        for connection, _ in silent:
            connection.abort()

    assert train_beside(tmp_path, {}, crowd)[1].step == 3


def test_a_worker_without_a_trainer_says_so_and_file_names_stay_in_their_directory():
    with pytest.raises(UserError, match=r"--attach: 127\.0\.0\.1:9: .*check that a run listens there"):
        asyncio.run(work(lambda: ("127.0.0.1:9", "t"), None))
    for address in ("nowhere", ":1", "host:", "host:99999"):
        with pytest.raises(UserError, match="HOST:PORT"):
            host_and_port(address, "--attach")
    for name in ("../x", "/etc/passwd", "a/b", "", ".hidden", 3, None):
        with pytest.raises(PeerError, match="not a file name"):
            plain_name(name)
    assert plain_name("model-00001-of-00002.safetensors")
