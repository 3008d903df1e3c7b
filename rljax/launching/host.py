"""Runs what one host of a job has to run: its processes, with their ranks, until they end.

Signals that ask to stop are passed on to the processes, which save and end in their own time.
SIGUSR1 asks too, and may be sent to the processes as well, as Slurm does: they ignore it, whereas a
second SIGTERM would end them at once. A
process that fails ends the others of its host, and the run's own watch ends the other hosts'.
A server that ends is started again.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rljax.engine.rank import ProcessRank
from rljax.errors import UserError
from rljax.launching.job import MASTER_PORT, SERVER_PORT, Job, Side
from rljax.messaging.token import VARIABLE, UnsafeToken, kept_token
from rljax.process.parent import die_with

KILL_AFTER = 30.0  # seconds between a failed process and the end of the others of its host
POLL = 0.2  # seconds
TOKEN = Path("servers", "token")  # below the run directory


@dataclasses.dataclass(frozen=True)
class Place:
    """Number of a host and addresses of others, which it is told when it is started."""

    host: int  # of its side, from 0
    head: str  # address of the training side's first host
    launch: str  # the same on all hosts of one start, and another at the next
    servers: tuple[str, ...] = ()  # HOST or HOST:PORT of those that serve
    port: int = MASTER_PORT  # free on the head
    server_port: int = SERVER_PORT  # that this host serves at; of others too where no port is named

    def at_port(self, server: str) -> str:
        return server if ":" in server else f"{server}:{self.server_port}"


@dataclasses.dataclass(frozen=True)
class Process:
    """Command and environment variables of a process, beside those that it inherits."""

    command: tuple[str, ...]
    variables: Mapping[str, str]


def processes_of(job: Job, name: str, place: Place) -> list[Process]:
    """Returns the processes of a host. Raises UserError for a host that the job doesn't have.

    Args:
      name: "train" or "serve".
    """
    side = job.side(name)
    if not 0 <= place.host < side.hosts:
        raise UserError(f"--host: {place.host} is none of the {side.hosts} hosts of side {name}")
    if name == "serve":
        own = (f"--workdir={job.workdir}/servers/{place.host}", f"--config.serve.port={place.server_port}")
        return [Process((job.python, "-m", "rljax", "serve", *side.command, *own), job.environment)]
    command = [job.python, "-m", "rljax", "train", *side.command, f"--workdir={job.workdir}"]
    if job.serve is not None:
        if len(place.servers) != job.serve.hosts:
            raise UserError(f"--servers: {len(place.servers)} addresses, and the job has {job.serve.hosts} hosts to serve")
        command.append("--config.rollout.addr=" + ",".join(map(place.at_port, place.servers)))
    return [Process(tuple(command), {**job.environment, **_rank(side, place, local)}) for local in range(side.processes)]


def _rank(side: Side, place: Place, local: int) -> dict[str, str]:
    """Returns the variables that torchrun would set."""
    if not side.ranked:
        return {}
    process = ProcessRank(
        rank=place.host * side.processes + local,
        size=side.hosts * side.processes,
        local_rank=local,
        local_size=side.processes,
        address=place.head,
        port=place.port,
        launch=place.launch,
    )
    return {name: value for name, value in process.variables().items() if value}


def run(job: Job, name: str, place: Place) -> int:
    """Runs a host's processes to their end. Blocks.

    Returns:
      0, or the exit status of the process that failed first; 128 and the number of a signal that
      asked it to stop, as whatever starts hosts must not take that for the end of the run.
    """
    processes = processes_of(job, name, place)
    shared = {VARIABLE: server_token(Path(job.workdir))} if job.serve is not None else {}
    stopping: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: object) -> None:
        number = signal.SIGTERM if number == signal.SIGUSR1 else number
        stopping.append(number)
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        for attempt in range(1 + (job.restarts if name == "serve" else 0)):
            children[:] = [_start(job, process, shared) for process in processes]
            status = _wait(children)
            if stopping or name != "serve":
                break
            print(f"server {place.host} ended with status {status} (start {attempt + 1})", file=sys.stderr, flush=True)
        return 128 + stopping[0] if stopping and status == 0 else status
    finally:
        _end(children)
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(job: Job, process: Process, shared: Mapping[str, str]) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def prepare() -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        die_with(parent)

    environment = {**os.environ, **shared, **process.variables}
    try:
        return subprocess.Popen(
            process.command,
            cwd=job.directory or None,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C reaches this process, which passes it on once
            preexec_fn=prepare,
        )
    except OSError as error:
        raise UserError(f"{process.command[0]}: cannot be started in {job.directory or '.'}: {error.strerror}") from None


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits until all have ended, or KILL_AFTER seconds after the first that failed."""
    until, status = float("inf"), 0
    while True:
        found = [child.poll() for child in children]
        if not status and any(found):
            status, until = next(filter(None, found)), time.monotonic() + KILL_AFTER
        if None not in found or time.monotonic() > until:
            break
        time.sleep(POLL)
    return 128 - status if status < 0 else status


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.poll() is None:
            child.kill()
            child.wait()


def server_token(workdir: Path) -> str:
    """Returns the token of the job's servers: RLJAX_TOKEN, or that in the run directory.

    Whichever host comes first makes the file, which its user alone can read. Raises UserError.
    """
    try:
        return os.environ.get(VARIABLE) or kept_token(workdir / TOKEN)
    except UnsafeToken as error:
        raise UserError(str(error)) from None
