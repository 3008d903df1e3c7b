"""Runs with workers beside them, and bare connections to their server."""

import asyncio
import json

import numpy as np

from rljax.loop import Loop
from rljax.messaging.framing import UNPROVED
from rljax.messaging.handshake import connect_async
from rljax.rollout.buffer import ticket_from_json
from rljax.rollout.result import Result
from rljax.testing.harness import MemorySink, make_run
from rljax.types import Finish, Trajectory
from rljax.workers.connection import PROTOCOL, Connection, PeerError, host_and_port
from rljax.workers.messages import encode_group

NOT_COMPARED = ("timeperf/", "perf/", "rollout/wait/", "rollout/workers")


class Lines:
    """The metrics of a run."""

    def __init__(self):
        self.sink = None

    def __call__(self, first_step):
        self.sink = MemorySink(first_step)
        return self.sink

    def compared(self):
        return {
            step: {k: repr(v) for k, v in line.items() if not k.startswith(NOT_COMPARED)}
            for step, line in self.sink.steps.items()
        }


def train_beside(workdir, overrides, *workers, n_prompts=12, **options):
    """Trains with workers (coroutine functions of the workdir) beside it; returns the run and its
    lines.
    """
    lines = Lines()
    run = make_run(workdir, overrides, n_prompts=n_prompts, sink=lines, by_workers=bool(workers), **options)

    async def scenario():
        beside = [asyncio.create_task(attached(workdir)) for attached in workers]
        try:
            return await asyncio.wait_for(Loop(run).run(), 60)
        finally:
            for task in beside:
                if not task.done():
                    await asyncio.wait([task], timeout=5)
                task.cancel()
            for result in await asyncio.gather(*beside, return_exceptions=True):
                if isinstance(result, Exception) and not isinstance(result, PeerError | OSError):
                    raise result

    outcome = asyncio.run(scenario())
    return run, outcome, lines


def is_once(run, n_prompts, epochs):
    return {uid: len(steps) for uid, steps in run.engine.learner.trained.items()} == {
        f"{epoch}/{index}": 1 for epoch in range(epochs) for index in range(n_prompts)
    }


async def bare_connection(workdir):
    """A bare connection, past the handshake."""
    connection, told = await connect(workdir)
    await greet(connection, told["token"])
    assert (await connection.receive()).kind == "config"
    return connection


async def greet(connection, token, **changes):
    hello = {"protocol": PROTOCOL, "own_sampler": False, "name": "bare", "capacity": None} | changes
    await connect_async(lambda: connection.receive(UNPROVED), connection.send, token, hello)


def group_message(ticket, version=0):
    return encode_group(ticket, result_of(ticket, version), {}, {})


async def connect(workdir):
    address_file = workdir / "workers.json"
    while not address_file.exists() or not address_file.read_text():
        await asyncio.sleep(0.01)
    told = json.loads(address_file.read_text())
    host, port = host_and_port(told["address"], "test")
    return Connection(*await asyncio.open_connection(host, port)), told


async def leases_of(connection):
    while True:
        message = await connection.receive()
        if message.kind == "lease":
            yield ticket_from_json(message.fields["ticket"])
        elif message.kind == "end":
            return


def result_of(ticket, version=0):
    ids = np.array([1 + int(ticket.prompt.uid.split("/")[0]), 41, 81 + ticket.prompt.fields["index"], 0], np.int32)
    mask = np.array([False, False, False, True])
    versions = np.where(mask, version, -1).astype(np.int32)
    trajectory = Trajectory(ids, mask, np.where(mask, -4.0, 0).astype(np.float32), versions, 1.0, {}, Finish.STOP)
    return Result((trajectory,), (), wanted=True)
