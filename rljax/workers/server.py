"""Worker server, the trainer's side of rollout workers: leases prompts and takes finished groups.

    buffer --> admit --> lease ----------> worker (client.py): workflow, tokenizer, rewards
                           ^                  |      ^
                           |                  |      +-- the trainer's sampler, over the connection,
    tracker <-- settle <---+-- group ---------+          or the worker's own, which gets weights
                           +-- the connection broke

who            waits for                            who unblocks it
prompt         a worker with capacity               a worker that finishes a group, or attaches
lease          its group                            the worker; its death, or a minute of silence
weights        the learner to be between two steps  the loop (its lock)
worker         a lease, a completion                the trainer; its death, or a minute of silence

The death of a worker loses nothing: its prompts are generated again with other seeds. Their leases
have ended, so a group that still arrives for one of them is not taken: prompts are consumed exactly
once, and failures are counted. Each token carries the version that sampled it, so the lag bound
holds as in one process. A prompt is leased to one worker, which has at most `capacity` leases and
gets the next one only when this side has read a group from it. That is the back-pressure.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

from rljax import tracing
from rljax.config import io as config_io
from rljax.config.schema import Config
from rljax.engine import Generator, remove_private
from rljax.errors import SamplerError, UserError, WorkerLost
from rljax.messaging.framing import Message
from rljax.messaging.listener import Listener
from rljax.metrics.accumulator import Accumulator
from rljax.metrics.mean import Mean, merge
from rljax.rollout.buffer import Buffer, newest_version, ticket_to_json
from rljax.rollout.tracker import PromptTracker
from rljax.tracing import Process, TraceFile
from rljax.types import Request
from rljax.workers.attached import AttachedWorker
from rljax.workers.connection import PROTOCOL, STREAM_BUFFER, Connection, PeerError, host_and_port
from rljax.workers.files import send_files
from rljax.workers.launcher import WorkerProcesses
from rljax.workers.messages import (
    decode_group,
    decode_measurements,
    decode_request,
    decode_trace,
    encode_completion,
    encode_sampler_error,
)

CLOSE_TIMEOUT = 5.0  # seconds for workers to hang up at the end of the run
MAX_TOKENIZER_FILE = 64 << 20  # bytes; larger files are weights
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack")

log = logging.getLogger(__name__)

Export = Callable[[Path], Awaitable[int]]
"""Writes the learner's weights as a model directory, between two steps, and returns their version."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Parts of a run that the worker server uses."""

    buffer: Buffer
    tracker: PromptTracker
    generator: Generator
    accumulator: Accumulator
    export: Export


class WorkerServer:
    """Leases prompts to workers and takes their groups.

    Example:

        paths = {"scratch": workdir / "server", "address_file": workdir / "workers.json"}
        server = WorkerServer(config, model_dir, token="...", **paths)
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
          model_dir: directory with the tokenizer, whose files are sent to workers.
          token: secret that workers must prove to know.
          scratch: directory for exported weights, in memory-backed storage if possible.
          address_file: file for address and token, which only this user can read.
          children: workers that the server starts; others may attach beside them.
        """
        self._config, self._model_dir, self._token, self._scratch = config, model_dir, token, scratch
        self._address_file = address_file
        self._children = children
        self._capacity = -(-config.max_in_flight // max(1, config.rollout.workers))  # of one worker
        self._listener: Listener | None = None
        self._workers: list[AttachedWorker] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._job: Job | None = None
        self._error: BaseException | None = None
        self._stale_weights = asyncio.Event()  # a worker's own sampler may lack the current weights
        self._metrics: dict[str, Mean] = {}
        self._exports = 0
        self._least_version = 0  # of weights that workers' own samplers may have: those of the last rollback
        self._closed = False
        self._trace_file: TraceFile | None = None

    # The loop's side

    async def open(self) -> str:
        """Listens at `rollout.listen`, by default on a free local port, and starts the children.

        Returns:
          HOST:PORT.

        Raises:
          UserError: the address is malformed or can't be listened on.
        """
        self._trace_file = tracing.active_file()
        host, port = host_and_port(self._config.rollout.listen or "127.0.0.1:0", "rollout.listen")
        loop = asyncio.get_running_loop()

        def admit(connection: socket.socket, hello: Mapping[str, Any]) -> None:
            try:
                loop.call_soon_threadsafe(lambda: self._task(self._serve(connection, hello)))
            except RuntimeError:  # the event loop has ended
                connection.close()

        try:
            self._listener = Listener((host, port), self._token, peers="workers", refusal_reason=_refusal_reason, admit=admit)
        except OSError as error:
            raise UserError(f"rollout.listen: cannot listen on {host}:{port}: {error.strerror}") from None
        address = "{}:{}".format(*self._listener.address)
        self._address_file.unlink(missing_ok=True)
        with os.fdopen(os.open(self._address_file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(json.dumps({"address": address, "token": self._token}) + "\n")
        if self._children is not None:
            self._children.start(address, self._token, self._fail)
        return address

    async def run(self, job: Job) -> None:
        """Leases the prompts that the buffer admits, until it is cancelled.

        Raises:
          TooManyFailures, UserError: as `PromptTracker.settle`, or workers can't be kept running.
        """
        self._job = job
        self._task(self._send_new_weights())
        warned = False
        try:
            while True:
                self._lease(job)
                if self._error is not None:
                    raise self._error
                if not self._workers and not warned and self._children is None:
                    warned = True
                    log.warning("no worker is attached yet: rljax rollout --attach=%s", self._address_file.parent)
                reason, start = job.buffer.waits_for or "workers", time.perf_counter()
                with tracing.wait(f"wait for {reason}", track="producer"):
                    await job.buffer.change()
                job.accumulator.count(f"rollout/wait/producer_for_{reason}", time.perf_counter() - start)
        finally:
            self._job = None

    def weights_changed(self) -> None:
        """Has new weights sent to the workers' own samplers. Call it after each publish."""
        self._stale_weights.set()
        self._wake()

    def revoke(self, version: int) -> None:
        """Voids all leases. A worker gets new ones when it has given up those that it holds.

        Args:
          version: workers with samplers of their own need these weights or newer ones for that.
        """
        self._least_version = version
        for worker in self._workers:
            worker.leases = {}
            worker.revoking += 1
            worker.connection.send(Message("revoke"))

    def take_metrics(self) -> dict[str, Mean]:
        """Returns the workers' metrics since the last call, and the number of workers."""
        taken = self._metrics | {"rollout/workers": Mean(len(self._workers), 1)}
        self._metrics = {}
        return taken

    async def close(self) -> None:
        """Tells all workers that the run is over and closes their connections."""
        self._closed = True
        if self._listener is None:
            return
        self._listener.close()
        for worker in self._workers:
            worker.connection.send(Message("end"))
        with contextlib.suppress(TimeoutError, PeerError):
            async with asyncio.timeout(CLOSE_TIMEOUT):
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
        await asyncio.to_thread(remove_private, self._scratch)

    # Leases

    def _lease(self, job: Job) -> None:
        """Leases prompts to the workers with most free capacity, while the buffer admits any."""
        floor = max(self._least_version, job.buffer.version - max(0, job.buffer.limits.max_lag - 1))
        ready = [w for w in self._workers if w.ready and not w.revoking and (w.version is None or w.version >= floor)]
        while ready and (worker := max(ready, key=lambda w: w.free)).free > 0:
            if (ticket := job.buffer.admit()) is None:
                return
            if job.tracker.settle_recovered(ticket):
                continue
            worker.leases[ticket.index, ticket.attempt] = ticket
            job.tracker.started(ticket)
            worker.connection.send(Message("lease", {"ticket": ticket_to_json(ticket)}))

    def _wake(self) -> None:
        if self._job is not None:
            self._job.buffer.wake()

    def _fail(self, error: BaseException) -> None:
        """Ends the run with this error."""
        self._error = self._error or error
        self._wake()

    # A worker

    async def _serve(self, passed: socket.socket, hello: Mapping[str, Any]) -> None:
        """Serves one worker from the end of its handshake until it is gone."""
        if self._closed:
            return passed.close()
        try:
            connection = Connection(*await asyncio.open_connection(sock=passed, limit=STREAM_BUFFER))
        except OSError:  # gone already
            return passed.close()
        own_sampler, name, capacity = hello.get("own_sampler"), hello.get("name"), hello.get("capacity")
        capacity = min(capacity, self._capacity) if isinstance(capacity, int) and capacity > 0 else self._capacity
        worker = AttachedWorker(connection, str(name), own_sampler is True, capacity)
        self._workers.append(worker)
        connection.send(Message("config", {"config": config_io.to_json(self._config)}))
        alive = self._task(connection.keep_alive())
        worker.transfer = self._task(self._send_tokenizer(worker))
        try:
            while True:
                self._handle(worker, await connection.receive())
        except PeerError as error:
            self._detach(worker, str(error))
        finally:  # an unexpected error here ends the run, as in any task
            alive.cancel()
            connection.abort()

    def _detach(self, worker: AttachedWorker, reason: str) -> None:
        """Removes a worker that is gone, and requeues its prompts."""
        self._workers.remove(worker)
        if worker.process is not None and self._trace_file is not None:
            self._trace_file.gone(worker.process)
        for task in (*worker.requests.values(), worker.transfer):
            if task is not None:
                task.cancel()
        tickets, worker.leases = tuple(worker.leases.values()), {}
        if self._closed:
            return
        log.warning("worker %s is gone (%s): its %d prompts are generated again", worker.name, reason, len(tickets))
        if tickets and self._job is not None:
            with self._ending_the_run():
                self._job.tracker.lost(tickets, WorkerLost(f"worker {worker.name}: {reason}"))
        self._wake()

    def _handle(self, worker: AttachedWorker, message: Message) -> None:
        """Handles one message. Raises PeerError if it is malformed or unknown."""
        job = self._job
        try:
            match message.kind:
                case "heartbeat":
                    pass
                case "group" if job is not None:
                    self._settle(job, worker, message)
                case "generate" if job is not None:
                    number, request = decode_request(message)
                    worker.requests[number] = self._task(self._generate(job, worker, number, request))
                case "trace":
                    self._trace(worker, message)
                case "revoked" if worker.revoking:
                    worker.revoking -= 1
                    self._wake()
                case "cancel":
                    if (task := worker.requests.get(message.fields["id"])) is not None:
                        task.cancel()
                case "group" | "generate":
                    pass  # the run is ending
                case _:
                    raise PeerError(f"unknown message {message.kind!r}")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise PeerError(f"malformed message: {type(error).__name__}: {error}") from None

    def _settle(self, job: Job, worker: AttachedWorker, message: Message) -> None:
        """Takes a finished group, if its prompt is still leased to this worker.

        Raises as `decode_group`.
        """
        key = (message.fields["index"], message.fields["attempt"])
        result = decode_group(message)
        if newest_version(result.trajectories) > job.buffer.version + 1:  # plus one: a publish may be in progress
            raise ValueError("tokens of a version that was never published")
        means, counts = decode_measurements(message)
        self._metrics = merge([self._metrics, means])
        for name, count in counts.items():
            job.accumulator.count(name, count)
        ticket = worker.leases.pop(key, None)
        if ticket is None:  # sent twice
            job.accumulator.count("rollout/late_groups")
            return
        if self._children is not None:
            self._children.reset_deaths()
        with self._ending_the_run():
            job.tracker.settle(ticket, result)
        self._wake()

    def _trace(self, worker: AttachedWorker, message: Message) -> None:
        """Adds what a worker did to the run's trace. Raises as `decode_trace`."""
        pid, events = decode_trace(message)
        worker.process = Process(pid, f"worker {worker.name}")
        if self._trace_file is not None:
            for event in events:
                self._trace_file.add(worker.process, event)

    # Sending

    async def _generate(self, job: Job, worker: AttachedWorker, number: int, request: Request) -> None:
        try:
            worker.connection.send(encode_completion(number, await job.generator.generate(request)))
        except (SamplerError, UserError) as error:
            worker.connection.send(encode_sampler_error(number, error))
        finally:
            worker.requests.pop(number, None)

    async def _send_tokenizer(self, worker: AttachedWorker) -> None:
        """Sends the tokenizer's files. A worker with a sampler of its own gets the weights next."""
        paths = (p for p in sorted(self._model_dir.iterdir()) if p.is_file() and p.suffix not in WEIGHT_SUFFIXES)
        small = [p for p in paths if p.stat().st_size <= MAX_TOKENIZER_FILE]
        await send_files(worker.connection, small, version=None)
        if worker.own_sampler:
            worker.transfer = None
            self._stale_weights.set()
        else:
            worker.ready = True
            self._wake()

    async def _send_new_weights(self) -> None:
        """Sends weights to workers whose own samplers have old ones, until it is cancelled."""
        while True:
            await self._stale_weights.wait()
            self._stale_weights.clear()
            if not any(w.own_sampler and w.transfer is None for w in self._workers) or self._job is None:
                continue
            self._exports += 1
            self._scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory = self._scratch / str(self._exports)
            version = await self._job.export(directory)
            outdated = [w for w in self._workers if w.own_sampler and w.transfer is None and w.version != version]
            for worker in outdated:
                worker.transfer = self._task(self._send_weights(worker, directory, version))
            self._task(_remove_after([w.transfer for w in outdated if w.transfer], directory))

    async def _send_weights(self, worker: AttachedWorker, directory: Path, version: int) -> None:
        try:
            with contextlib.suppress(PeerError):  # `_serve` raises it
                await send_files(worker.connection, sorted(p for p in directory.iterdir() if p.is_file()), version=version)
                worker.version, worker.ready = version, True
        finally:
            worker.transfer = None
        if self._job is not None and version != self._job.buffer.version:
            self._stale_weights.set()
        self._wake()

    # Tasks

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task. An error in it ends the run."""
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
        """Ends the run with an error of the tracker, instead of the worker's connection."""
        try:
            yield
        except Exception as error:
            self._fail(error)


def _refusal_reason(hello: Mapping[str, Any]) -> str | None:
    if hello.get("protocol") != PROTOCOL:
        return f"the trainer speaks protocol {PROTOCOL} (install the same version of rljax)"
    return None


async def _remove_after(tasks: Iterable[asyncio.Task[None]], directory: Path) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
