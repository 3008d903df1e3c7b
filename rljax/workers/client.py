"""A rollout worker: leases prompts from a trainer (server.py), runs workflow and rewards here, hands back finished groups.

Its sampler is the trainer's, asked over the connection; or its own, to which the trainer sends weights after each publish.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NoReturn

from rljax.config import io as config_io
from rljax.config.schema import Config
from rljax.engine import Sampler, WeightSource, memory_backed
from rljax.errors import SamplerError, UserError
from rljax.metrics.mean import Mean
from rljax.rollout.buffer import Ticket, ticket_from_json
from rljax.rollout.producer import Rollouts, pause_before
from rljax.types import Completion, Request
from rljax.workers import connection as frames
from rljax.workers.connection import PROTOCOL, Connection, Message, PeerError
from rljax.workers.messages import asked, completion_of, done

SCRATCH = "rljax-worker-"  # then the process's id: directories for weights on their way

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Parts:
    """What a worker works with."""

    rollouts: Rollouts
    own: Sampler | None = None  # the sampler that the trainer's weights are for; None: the trainer's is asked
    measured: Callable[[], dict[str, Mean]] = dict  # since the last call: the rewards' metrics
    lost: Counter[str] = dataclasses.field(default_factory=Counter)  # requests, by metric name, since they were told


Build = Callable[[Config, Path, Path | None, Sampler], AbstractAsyncContextManager[Parts]]
"""Makes the parts from the trainer's config, a directory with its tokenizer, another with the model for a sampler of one's own
(else None), and the trainer's sampler."""


class NoTrainer(Exception):
    """No run tells where it listens, yet; says so in a line."""


async def work(
    find_trainer: Callable[[], tuple[str, str]],
    build: Build,
    *,
    own: bool = False,
    name: str = "",
    room: int | None = None,
    patience: float = 0.0,
) -> None:
    """Works for a trainer until its run ends.

    Args:
      find_trainer: returns (HOST:PORT, token); called again when the trainer is gone, for it may come back elsewhere.
        Raises NoTrainer.
      own: the worker brings a sampler.
      room: prompts at once; None: as many as the trainer gives.
      patience: seconds to look for a trainer that isn't there, or not any more: it may have been killed and come back.

    Raises:
      UserError: no trainer, or one that refuses.
    """
    hello = {"protocol": PROTOCOL, "own": own, "name": name or f"{os.uname().nodename}:{os.getpid()}", "room": room}
    last, attempt = time.monotonic(), 0
    while True:
        try:
            address, token = find_trainer()
            host, port = frames.host_and_port(address, "--attach")
            connection = Connection(*await asyncio.open_connection(host, port, limit=frames.PIECE))
            try:
                connection.send("hello", hello | {"token": token})
                config = _welcomed(await connection.receive())
                attempt = 0
                await _work(connection, config, build, own=own)
                return
            finally:
                last = time.monotonic()
                connection.close()
        except (PeerError, OSError, NoTrainer) as error:
            why = str(error) if isinstance(error, NoTrainer) else f"{address}: {error} (does a run listen there?)"
            if time.monotonic() - last >= patience:
                raise UserError(f"--attach: {why}") from None
            if attempt == 0:
                log.warning("no trainer: %s; looking for one for %g s", why, patience)
            attempt += 1
            await asyncio.sleep(min(5.0, pause_before(attempt)))


def _welcomed(message: Message) -> Config:
    if message.kind == "refused":
        raise UserError(f"--attach: refused: {message.fields['reason']}")
    if message.kind != "welcome":
        raise PeerError(f"it says {message.kind!r}")
    return config_io.from_json(message.fields["config"])


async def _work(connection: Connection, config: Config, build: Build, *, own: bool) -> None:
    """Until `bye`. Raises PeerError, and whatever the parts raise when they are made."""
    scratch = _scratch()
    alive = asyncio.create_task(connection.keep_alive())
    try:
        files, remote = Files(scratch), TrainerSampler(connection)
        await files.take(connection)
        words, model = files.directory, None
        if own:
            version = await files.take(connection)
            model = files.directory
        async with build(config, words, model, remote) as parts:
            if own:
                assert parts.own is not None and model is not None
                await _load(parts.own, model, version)
            await Session(connection, parts, remote, files).run()
    finally:
        alive.cancel()
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)


def _scratch() -> Path:
    """A directory of this process; those of workers that were killed are deleted."""
    for left in memory_backed().glob(f"{SCRATCH}*"):
        pid = left.name.removeprefix(SCRATCH).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-", dir=memory_backed()))


async def _load(sampler: Sampler, directory: Path, version: int) -> None:
    await sampler.pause()
    try:
        await sampler.load_weights(WeightSource(directory=directory), version)
    finally:
        await sampler.resume()


class Files:
    """Model directories as they arrive: the newest that is whole is `directory`."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._number = 0
        self.directory = self._begin()
        self._arriving = self.directory

    def _begin(self) -> Path:
        self._number += 1
        directory = self._scratch / str(self._number)
        directory.mkdir()
        return directory

    def add(self, message: Message) -> None:
        with (self._arriving / frames.plain_name(message.fields["name"])).open("ab") as file:
            file.write(message.body)

    def whole(self) -> Path:
        """All files of a directory are there. Returns the one before, which can go."""
        before, self.directory = self.directory, self._arriving
        self._arriving = self._begin()
        return before

    async def take(self, connection: Connection) -> int:
        """The next directory, where nothing else can come. Returns the version of its weights, 0 of a tokenizer's."""
        while True:
            message = await connection.receive()
            if message.kind == "file":
                self.add(message)
            elif message.kind == "files":
                self.whole()
                return int(message.fields["version"] or 0)


class TrainerSampler:
    """The trainer's sampler, asked over the connection."""

    version = 0  # tokens bring theirs; the trainer alone publishes

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Completion]] = {}

    async def generate(self, request: Request) -> Completion:
        number = next(self._numbers)
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        fields, body = asked(request)
        self._connection.send("generate", {"id": number} | fields, body)
        try:
            return await answer
        except asyncio.CancelledError:
            self._connection.send("cancel", {"id": number})
            raise
        finally:
            del self._waiting[number]

    def answered(self, message: Message) -> None:
        answer = self._waiting.get(message.fields["id"])
        if answer is None or answer.done():
            return  # cancelled meanwhile
        if "error" in message.fields:
            kind = SamplerError if message.fields["lost"] else UserError
            answer.set_exception(kind(message.fields["error"]))
            return
        answer.set_result(completion_of(message))

    async def pause(self) -> None:
        self._not_ours()

    async def resume(self) -> None:
        self._not_ours()

    async def load_weights(self, source: WeightSource, version: int) -> None:
        self._not_ours()

    async def close(self) -> None:
        """The trainer's to close."""

    def _not_ours(self) -> NoReturn:
        raise SamplerError("the sampler is the trainer's: it alone pauses it and publishes to it")


class Session:
    """A connection at work."""

    def __init__(self, connection: Connection, parts: Parts, remote: TrainerSampler, files: Files) -> None:
        self._connection, self._parts, self._remote, self._files = connection, parts, remote, files
        self._groups: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until `bye`."""
        try:
            while True:
                message = await self._connection.receive()
                match message.kind:
                    case "lease":
                        self._start(ticket_from_json(message.fields["ticket"]))
                    case "completion":
                        self._remote.answered(message)
                    case "file":
                        self._files.add(message)
                    case "files":  # leases behind it were made for these weights: they wait
                        await self._new_weights(message.fields["version"])
                    case "bye":
                        return
        finally:
            for task in self._groups:
                task.cancel()
            await asyncio.gather(*self._groups, return_exceptions=True)

    async def _new_weights(self, version: int) -> None:
        before = self._files.whole()
        assert self._parts.own is not None
        await _load(self._parts.own, self._files.directory, version)
        await asyncio.to_thread(shutil.rmtree, before, ignore_errors=True)

    def _start(self, ticket: Ticket) -> None:
        task = asyncio.create_task(self._group(ticket), name=f"group {ticket.prompt.uid}")
        self._groups.add(task)
        task.add_done_callback(self._groups.discard)

    async def _group(self, ticket: Ticket) -> None:
        result = await self._parts.rollouts.group(ticket)
        fields, body = done(ticket, result)
        self._connection.send("done", fields | self._measured(), body)
        with contextlib.suppress(PeerError):  # `run` finds out
            await self._connection.drain()

    def _measured(self) -> dict[str, Any]:
        """Distributions merge as means, plain numbers are counts and add up."""
        means, counts = {}, Counter[str](self._parts.lost)
        for name, mean in self._parts.measured().items():
            if mean.min <= mean.max:
                means[name] = dataclasses.astuple(mean)
            elif mean.sum:
                counts[name] += int(mean.sum)
        self._parts.lost.clear()
        return {"measured": means, "counts": counts}
