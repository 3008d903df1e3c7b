"""The trainer's side of rollout workers: they lease prompts here, and hand back finished groups.

    buffer --> admit --> lease ----------> worker (client.py): workflow, tokenizer, rewards
                           ^                  |  |        ^
                           |                  |  |        +-- the trainer's sampler, asked over the same connection,
    tracker <-- settle <---+-- done ----------+  |            or a sampler of the worker's own, to which weights are sent
                           +-- the connection broke

who                 waits for                                       who unblocks it
a prompt            a worker with room                              a worker that is done with one, or attaches
a lease             its group                                       the worker; or its end, or a minute of its silence
own weights         the learner to be between two steps             the loop (its lock), and the worker that takes them
a worker            a lease, a completion                           this side; or its end, or a minute of its silence

Whoever dies loses nothing: what a worker held is generated again with other seeds, and since it is no longer leased, the same
group that arrives late is not taken: prompts are consumed exactly once, and failures are counted. Each token brings the version
that made it, so the lag bound holds as it does in one process. A prompt is leased to one worker, which holds `room` of them at
most, and waits with the next until this side has read the group: that is the back-pressure.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

from rljax.config import io as config_io
from rljax.config.schema import Config
from rljax.engine import Sampler
from rljax.errors import SamplerError, UserError, WorkerLost
from rljax.metrics.accumulator import Accumulator
from rljax.metrics.mean import Mean, merge
from rljax.rollout.buffer import Buffer, Ticket, newest_version, ticket_to_json
from rljax.rollout.limits import most_in_flight
from rljax.rollout.tracker import PromptTracker
from rljax.types import Request
from rljax.workers import connection as frames
from rljax.workers.connection import PROTOCOL, Connection, Message, PeerError
from rljax.workers.launcher import WorkerProcesses
from rljax.workers.messages import completed, measured_of, request_of, result_of

GOODBYE = 5.0  # seconds that workers get to hear that the run is over
LARGEST_WORD = 64 << 20  # bytes of a file that a tokenizer may need; weights are larger, or of these kinds
WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack")

log = logging.getLogger(__name__)

Export = Callable[[Path], Awaitable[int]]
"""Writes the learner's weights as a model directory, between two steps, and returns their version."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What is fed: a run's book and its sampler."""

    buffer: Buffer
    tracker: PromptTracker
    sampler: Sampler
    accumulator: Accumulator
    export: Export


@dataclasses.dataclass(eq=False)
class AttachedWorker:
    """One that is attached."""

    connection: Connection
    name: str
    own: bool  # it has a sampler of its own
    room: int  # prompts it takes at once
    held: dict[tuple[int, int], Ticket] = dataclasses.field(default_factory=dict)  # leased to it, by index and attempt
    requests: dict[int, asyncio.Task[None]] = dataclasses.field(default_factory=dict)  # it asked the trainer's sampler
    version: int | None = None  # of the weights that its own sampler was sent
    ready: bool = False  # it was sent what it needs to begin
    sending: asyncio.Task[None] | None = None


class WorkerServer:
    """The trainer's side.

    Example:

        server = WorkerServer(config, model_dir, token="...", scratch=workdir / "server", address_file=workdir / "workers.json")
        await server.open()
        await server.run(job)                # instead of a Producer; until it is cancelled
        await server.close()
    """

    def __init__(
        self,
        config: Config,
        model_dir: Path,
        *,
        token: str,
        scratch: Path,
        address_file: Path,
        children: WorkerProcesses | None = None,
    ) -> None:
        """
        Args:
          token: what a worker must know to attach.
          scratch: directory for weights on their way; in memory-backed storage where there is some.
          address_file: file that tells address and token, to this user alone.
          children: workers that are started here; others may attach beside them.
        """
        self._config, self._model_dir, self._token, self._scratch = config, model_dir, token, scratch
        self._address_file = address_file
        self._children = children
        self._room = -(-most_in_flight(config) // max(1, config.rollout.workers))
        self._server: asyncio.Server | None = None
        self._workers: list[AttachedWorker] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._job: Job | None = None
        self._error: BaseException | None = None
        self._stale_weights = asyncio.Event()  # a worker with a sampler of its own lacks the present ones
        self._measured: dict[str, Mean] = {}
        self._exports = 0
        self._closed = False

    # The loop's side

    async def open(self) -> str:
        """Listens at `rollout.listen`, or at a free port of this machine alone; starts the children. Returns HOST:PORT.

        Raises UserError.
        """
        host, port = frames.host_and_port(self._config.rollout.listen or "127.0.0.1:0", "rollout.listen")
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=frames.PIECE)
        except OSError as error:
            raise UserError(f"rollout.listen: cannot listen on {host}:{port}: {error.strerror}") from None
        bound = self._server.sockets[0].getsockname()
        address = f"{bound[0]}:{bound[1]}"
        self._address_file.unlink(missing_ok=True)
        with os.fdopen(os.open(self._address_file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(json.dumps({"address": address, "token": self._token}) + "\n")
        if self._children is not None:
            self._children.start(address, self._token, self._fail)
        return address

    async def run(self, job: Job) -> None:
        """Leases what the buffer admits. Runs until it is cancelled. Raises what ends the run."""
        self._job = job
        self._task(self._send_new_weights())
        told = False
        try:
            while True:
                self._lease(job)
                if self._error is not None:
                    raise self._error
                if not self._workers and not told and self._children is None:
                    told = True
                    log.warning(
                        "no worker is attached yet: python -m experiments.rollout --attach=%s", self._address_file.parent
                    )
                reason, start = job.buffer.waits_for or "workers", time.perf_counter()
                await job.buffer.change()
                job.accumulator.count(f"rollout/wait/producer_for_{reason}", time.perf_counter() - start)
        finally:
            self._job = None

    def weights_changed(self) -> None:
        """There was a publish."""
        self._stale_weights.set()
        self._wake()

    def take_metrics(self) -> dict[str, Mean]:
        """What workers have measured since the last call, and how many there are."""
        taken = self._measured | {"rollout/workers": Mean(len(self._workers), 1)}
        self._measured = {}
        return taken

    async def close(self) -> None:
        """Sends every worker home."""
        self._closed = True
        if self._server is None:
            return
        self._server.close()
        for worker in self._workers:
            worker.connection.send("bye")
        with contextlib.suppress(TimeoutError, PeerError):
            async with asyncio.timeout(GOODBYE):
                for worker in tuple(self._workers):
                    await worker.connection.drain()
                while self._workers:  # they hang up
                    await asyncio.sleep(0.02)
        for task in tuple(self._tasks):
            task.cancel()
        for worker in tuple(self._workers):
            worker.connection.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._children is not None:
            await self._children.close()
        self._address_file.unlink(missing_ok=True)
        await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)

    # Leases

    def _lease(self, job: Job) -> None:
        """Prompts to whoever has most room, as far as the buffer admits."""
        floor = job.buffer.version - max(0, job.buffer.limits.max_lag - 1)
        ready = [w for w in self._workers if w.ready and (w.version is None or w.version >= floor)]
        while ready and (worker := max(ready, key=lambda w: w.room - len(w.held))).room > len(worker.held):
            if (ticket := job.buffer.admit()) is None:
                return
            if job.tracker.settle_known(ticket):
                continue
            worker.held[ticket.index, ticket.attempt] = ticket
            job.tracker.started(ticket)
            worker.connection.send("lease", {"ticket": ticket_to_json(ticket)})

    def _wake(self) -> None:
        if self._job is not None:
            self._job.buffer.wake()

    def _fail(self, error: BaseException) -> None:
        """The run is to end by this."""
        self._error = self._error or error
        self._wake()

    # A worker

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        try:
            worker = await self._greet(connection)
        except PeerError as error:
            log.info("somebody at the workers' address_file was turned away: %s", error)
            connection.close()
            return
        self._workers.append(worker)
        alive = self._task(connection.keep_alive())
        worker.sending = self._task(self._send_words(worker))
        try:
            while True:
                self._take(worker, await connection.receive())
        except PeerError as error:
            self._gone(worker, str(error))
        except Exception as error:  # a fault of ours: the run ends by it, and doesn't wait for what this worker holds
            self._fail(error)
        finally:
            alive.cancel()
            connection.abort()

    async def _greet(self, connection: Connection) -> AttachedWorker:
        """Raises PeerError; until then the partner may be anybody."""
        hello = await connection.receive(first=True)
        token, own, name, room = (hello.fields.get(key) for key in ("token", "own", "name", "room"))
        if hello.kind != "hello" or not isinstance(token, str) or not hmac.compare_digest(token.encode(), self._token.encode()):
            connection.send("refused", {"reason": "the trainer wants another token (RLJAX_TOKEN)"})
            raise PeerError("wrong token")
        if hello.fields.get("protocol") != PROTOCOL:
            connection.send("refused", {"reason": f"the trainer speaks protocol {PROTOCOL}: install the same version of rljax"})
            raise PeerError("another protocol")
        room = min(room, self._room) if isinstance(room, int) and room > 0 else self._room
        connection.send("welcome", {"config": config_io.to_json(self._config)})
        return AttachedWorker(connection, str(name), own is True, room)

    def _gone(self, worker: AttachedWorker, reason: str) -> None:
        """What it held is generated again."""
        self._workers.remove(worker)
        for task in (*worker.requests.values(), worker.sending):
            if task is not None:
                task.cancel()
        tickets, worker.held = tuple(worker.held.values()), {}
        if self._closed:
            return
        log.warning("worker %s is gone (%s): its %d prompts are generated again", worker.name, reason, len(tickets))
        if tickets and self._job is not None:
            with self._ending_the_run():
                self._job.tracker.lost(tickets, WorkerLost(f"worker {worker.name}: {reason}"))
        self._wake()

    def _take(self, worker: AttachedWorker, message: Message) -> None:
        """Raises PeerError for what no worker of ours says."""
        job = self._job
        try:
            match message.kind:
                case "beat":
                    pass
                case "done" if job is not None:
                    self._done(job, worker, message)
                case "generate" if job is not None:
                    number, request = int(message.fields["id"]), request_of(message)
                    worker.requests[number] = self._task(self._generate(job, worker, number, request))
                case "cancel":
                    if (task := worker.requests.get(message.fields["id"])) is not None:
                        task.cancel()
                case "done" | "generate":
                    pass  # the run is ending
                case _:
                    raise PeerError(f"it says {message.kind!r}")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise PeerError(f"a message that makes no sense: {type(error).__name__}: {error}") from None

    def _done(self, job: Job, worker: AttachedWorker, message: Message) -> None:
        key = (message.fields["index"], message.fields["attempt"])
        result = result_of(message)
        if newest_version(result.trajectories) > job.buffer.version + 1:  # one more: a publish may be half done
            raise ValueError("tokens of a version that was never published")
        means, counts = measured_of(message)
        self._measured = merge([self._measured, means])
        for name, count in counts.items():
            job.accumulator.count(name, count)
        ticket = worker.held.pop(key, None)
        if ticket is None:  # sent twice
            job.accumulator.count("rollout/late_groups")
            return
        if self._children is not None:
            self._children.worked()
        with self._ending_the_run():
            job.tracker.settle(ticket, result)
        self._wake()

    # What a worker is sent

    async def _generate(self, job: Job, worker: AttachedWorker, number: int, request: Request) -> None:
        try:
            done = await job.sampler.generate(request)
        except (SamplerError, UserError) as error:
            worker.connection.send("completion", {"id": number, "error": str(error), "lost": isinstance(error, SamplerError)})
            return
        finally:
            worker.requests.pop(number, None)
        fields, body = completed(done)
        worker.connection.send("completion", {"id": number} | fields, body)

    async def _send_words(self, worker: AttachedWorker) -> None:
        """What a tokenizer needs of the model directory; then, to a worker with a sampler of its own, the weights."""
        paths = (p for p in sorted(self._model_dir.iterdir()) if p.is_file() and p.suffix not in WEIGHTS)
        await _send_files(worker.connection, [p for p in paths if p.stat().st_size <= LARGEST_WORD], version=None)
        if worker.own:
            worker.sending = None
            self._stale_weights.set()
        else:
            worker.ready = True
            self._wake()

    async def _send_new_weights(self) -> None:
        """To workers with samplers of their own, whenever theirs are old; until it is cancelled."""
        while True:
            await self._stale_weights.wait()
            self._stale_weights.clear()
            if not any(w.own and w.sending is None for w in self._workers) or self._job is None:
                continue
            self._exports += 1
            self._scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory = self._scratch / str(self._exports)
            version = await self._job.export(directory)
            takers = [w for w in self._workers if w.own and w.sending is None and w.version != version]
            for worker in takers:
                worker.sending = self._task(self._send_weights(worker, directory, version))
            self._task(_remove_after([w.sending for w in takers if w.sending], directory))

    async def _send_weights(self, worker: AttachedWorker, directory: Path, version: int) -> None:
        try:
            with contextlib.suppress(PeerError):  # whoever reads from it finds out
                await _send_files(worker.connection, sorted(p for p in directory.iterdir() if p.is_file()), version=version)
                worker.version, worker.ready = version, True
        finally:
            worker.sending = None
        if self._job is not None and version != self._job.buffer.version:
            self._stale_weights.set()
        self._wake()

    # Tasks

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A fault in it ends the run."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, PeerError):
            self._fail(error)

    @contextlib.contextmanager
    def _ending_the_run(self) -> Any:
        """The tracker's verdict is the run's and not the connection's."""
        try:
            yield
        except Exception as error:
            self._fail(error)


async def _send_files(connection: Connection, paths: Iterable[Path], *, version: int | None) -> None:
    """Files, and then word that they were all. `version`: of weights; None for a tokenizer's."""
    for path in paths:
        for piece in frames.pieces(path):
            connection.send("file", {"name": path.name}, piece)
            await connection.drain()
    connection.send("files", {"version": version})
    await connection.drain()


async def _remove_after(tasks: Iterable[asyncio.Task[None]], directory: Path) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
