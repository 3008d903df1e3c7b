"""Rollout worker: leases prompts from a trainer, runs workflow and rewards, returns groups.

A worker samples with the trainer's sampler, over the connection, or with a sampler of its own, to
which the trainer sends weights after each publish. The other end is server.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from rljax import tracing
from rljax.config import io as config_io
from rljax.config.schema import Config
from rljax.engine import Generator, Sampler, WeightsInDirectory, memory_backed, private_directory, remove_private
from rljax.errors import UserError
from rljax.messaging.framing import UNPROVED, Message
from rljax.messaging.handshake import HandshakeError, Refused, connect_async
from rljax.metrics.mean import Mean
from rljax.process.tasks import Tasks
from rljax.rollout.buffer import Ticket, ticket_from_json
from rljax.rollout.producer import GroupRunner, retry_delay
from rljax.tracing import Outbox, Process, Tracer
from rljax.types import Completion, Request
from rljax.workers.connection import PROTOCOL, STREAM_BUFFER, Connection, PeerError, host_and_port
from rljax.workers.files import ReceivedFiles
from rljax.workers.messages import decode_completion, encode_group, encode_request, encode_trace

TRACE_INTERVAL = 0.5  # seconds between two messages with what was traced
MAX_SEARCH_DELAY = 5.0  # seconds between two attempts to find a trainer

log = logging.getLogger(__name__)


@dataclasses.dataclass
class WorkerParts:
    """Parts that a worker generates groups with."""

    runner: GroupRunner
    own_sampler: Sampler | None = None  # takes the trainer's weights; None if the trainer samples
    take_metrics: Callable[[], dict[str, Mean]] = dict  # metrics of the reward processes since the last call
    lost: Counter[str] = dataclasses.field(default_factory=Counter)  # lost requests by metric, not reported yet


Build = Callable[[Config, Path, Path | None, Generator], AbstractAsyncContextManager[WorkerParts]]
"""Makes a worker's parts.

Its arguments are the trainer's config, a directory with the run's tokenizer, a directory with its
model (None unless the worker has a sampler of its own), and the trainer's sampler as a generator.
"""


class TrainerGone(UserError):
    """No trainer answers, or the connection to it was lost, for longer than the patience."""


class NoTrainer(Exception):
    """No run to attach to yet. Its message is one line."""


async def work(
    find_trainer: Callable[[], tuple[str, str]],
    build: Build,
    *,
    own_sampler: bool = False,
    name: str = "",
    capacity: int | None = None,
    patience: float = 0.0,
) -> None:
    """Works for a trainer until its run ends.

    Args:
      find_trainer: returns (HOST:PORT, token), or raises NoTrainer. Called again when the trainer
        is gone, because it may come back at another address.
      build: makes the parts that groups are generated with.
      own_sampler: whether the worker has a sampler of its own.
      name: the worker's name in the trainer's log; "" for host and process id.
      capacity: prompts at once; None for as many as the trainer gives.
      patience: seconds to look for a trainer that is not there, or that was killed and may come
        back.

    Raises:
      TrainerGone: there is no trainer, or the connection to it was lost.
      UserError: it refuses the worker, or the worker can't build its parts.
    """
    hello = {
        "protocol": PROTOCOL,
        "own_sampler": own_sampler,
        "name": name or f"{os.uname().nodename}:{os.getpid()}",
        "capacity": capacity,
    }
    address, last_seen, attempt = "", time.monotonic(), 0
    while True:
        try:
            address, token = find_trainer()
            host, port = host_and_port(address, "--attach")
            connection = Connection(*await asyncio.open_connection(host, port, limit=STREAM_BUFFER))
            try:
                await connect_async(functools.partial(connection.receive, UNPROVED), connection.send, token, hello)
                config = config_io.from_json((await connection.receive()).fields["config"])
                attempt = 0
                await _work(connection, config, build, own_sampler=own_sampler)
                return
            finally:
                last_seen = time.monotonic() if attempt == 0 else last_seen
                connection.close()
        except Refused as refusal:
            raise UserError(f"--attach: refused: {refusal}") from None
        except (PeerError, HandshakeError, OSError, NoTrainer) as error:
            if time.monotonic() - last_seen >= patience:
                raise TrainerGone(f"--attach: {_describe(error, address)}") from None
            if attempt == 0:
                log.warning("no trainer: %s; looking for one for %g s", _describe(error, address), patience)
            attempt += 1
            await asyncio.sleep(min(MAX_SEARCH_DELAY, retry_delay(attempt)))


def _describe(error: Exception, address: str) -> str:
    """Says in one line why there is no trainer, with a remedy."""
    match error:
        case NoTrainer():
            return str(error)
        case HandshakeError():
            return f"{address}: {error} (set RLJAX_TOKEN to that of the run, and check that the run listens there)"
        case _:
            return f"{address}: {error} (check that a run listens there)"


async def _work(connection: Connection, config: Config, build: Build, *, own_sampler: bool) -> None:
    """Works until the run ends. Raises PeerError, or an error of `build`."""
    scratch = private_directory(memory_backed(), "worker")
    outbox = Outbox()
    tracer = Tracer(outbox, Process(os.getpid(), "worker")) if config.rollout.enable_rollout_tracing else None
    background = Tasks(on_error=lambda error: connection.abort())  # which ends the work: a trainer is looked for again
    background.start(connection.keep_alive(), "heartbeats")
    if tracer is not None:
        background.start(_send_traces(connection, tracer, outbox), "traces")
    try:
        files, remote = ReceivedFiles(scratch), TrainerGenerator(connection)
        await files.receive(connection)
        tokenizer_dir, model_dir = files.directory, None
        if own_sampler:
            version = await files.receive(connection)
            model_dir = files.directory
        async with build(config, tokenizer_dir, model_dir, remote) as parts:
            if own_sampler:
                assert parts.own_sampler is not None and model_dir is not None
                await _load_weights(parts.own_sampler, model_dir, version)
            with tracing.recording(tracer):
                await Session(connection, parts, remote, files).run()
    finally:
        background.cancel()
        if tracer is not None:
            connection.send(encode_trace(os.getpid(), outbox.take()))
        await asyncio.to_thread(remove_private, scratch)


async def _send_traces(connection: Connection, tracer: Tracer, outbox: Outbox) -> None:
    """Sends what was traced, and what is open, every half second until it is cancelled."""
    while True:
        await asyncio.sleep(TRACE_INTERVAL)
        tracer.tell_open()
        if events := outbox.take():
            connection.send(encode_trace(os.getpid(), events))


async def _load_weights(sampler: Sampler, directory: Path, version: int) -> None:
    await sampler.pause()
    try:
        await sampler.load_weights(WeightsInDirectory(directory), version)
    finally:
        await sampler.resume()


class TrainerGenerator(Generator):
    """Generator that forwards requests to the trainer's sampler over the connection."""

    version = 0  # unused: completions carry a version per token, and only the trainer publishes

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Completion]] = {}

    async def generate(self, request: Request) -> Completion:
        number = next(self._numbers)
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._connection.send(encode_request(number, request))
        try:
            return await answer
        except asyncio.CancelledError:
            self._connection.send(Message("cancel", {"id": number}))
            raise
        finally:
            del self._waiting[number]

    def resolve(self, message: Message) -> None:
        """Hands a `completion` message to the request that waits for it, if it still waits."""
        waiting = self._waiting.get(message.fields["id"])
        if waiting is None or waiting.done():
            return
        answer = decode_completion(message)
        if isinstance(answer, Completion):
            waiting.set_result(answer)
        else:
            waiting.set_exception(answer)


class Session:
    """Work over one connection: leases become groups."""

    def __init__(self, connection: Connection, parts: WorkerParts, remote: TrainerGenerator, files: ReceivedFiles) -> None:
        self._connection, self._parts, self._remote, self._files = connection, parts, remote, files
        self._groups = Tasks(on_error=lambda error: connection.abort())  # its prompt is generated again elsewhere

    async def run(self) -> None:
        """Handles messages until the run ends. Raises PeerError."""
        try:
            while True:
                message = await self._connection.receive()
                match message.kind:
                    case "lease":
                        self._start(ticket_from_json(message.fields["ticket"]))
                    case "revoke":
                        await self._groups.end()
                        self._connection.send(Message("revoked"))
                    case "completion":
                        self._remote.resolve(message)
                    case "file":
                        self._files.add(message)
                    case "files_complete":  # later leases are for these weights, so they wait until loading is done
                        await self._load_new_weights(message.fields["version"])
                    case "end":
                        return
        finally:
            await self._groups.close()

    async def _load_new_weights(self, version: int) -> None:
        previous = self._files.complete()
        assert self._parts.own_sampler is not None
        await _load_weights(self._parts.own_sampler, self._files.directory, version)
        await asyncio.to_thread(shutil.rmtree, previous, ignore_errors=True)

    def _start(self, ticket: Ticket) -> None:
        self._groups.start(self._group(ticket), f"group {ticket.prompt.uid}")

    async def _group(self, ticket: Ticket) -> None:
        result = await self._parts.runner.run(ticket)
        self._connection.send(encode_group(ticket, result, *self._take_measurements()))
        with contextlib.suppress(PeerError):  # `run` raises it
            await self._connection.drain()

    def _take_measurements(self) -> tuple[dict[str, Mean], dict[str, int]]:
        """Returns means, which merge as distributions, and counts, since the last call."""
        means, counts = {}, Counter[str](self._parts.lost)
        for name, mean in self._parts.take_metrics().items():
            if mean.min <= mean.max:
                means[name] = mean
            elif mean.sum:
                counts[name] += int(mean.sum)
        self._parts.lost.clear()
        return means, counts
