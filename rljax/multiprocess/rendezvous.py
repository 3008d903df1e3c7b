"""How followers find their leader: a file in the run directory, which every process sees, with address and token.

WORKDIR/ranks/leader.json    host, port, token, launch, size, hang_timeout, coordinator; readable by its owner alone
WORKDIR/ranks/rank1.log      what a follower that the leader started says
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rljax.engine.rank import LOOPBACK, ProcessRank, free_port
from rljax.errors import UserError
from rljax.multiprocess import wire
from rljax.multiprocess.wire import WireError

START_TIMEOUT = 600.0  # seconds until every process is there
GREETING_TIMEOUT = 20.0  # seconds
FOLDER, FILE = "ranks", "leader.json"

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Joined:
    """A follower's connection to its leader, and what it has to know before the first call."""

    connection: socket.socket
    hang_timeout: float  # seconds
    coordinator: str


def join(process: ProcessRank, workdir: Path, timeout: float = START_TIMEOUT) -> Joined:
    """Finds the leader of this launch and connects. Blocks. Raises UserError when there is none in time."""
    until, reason = time.monotonic() + timeout, "it is not there"
    path = workdir / FOLDER / FILE
    while time.monotonic() < until:
        try:
            told = json.loads(path.read_text())
            if told["launch"] != process.launch:
                reason = f"{path} is of another start"
            else:
                return _connect(process, told)
        except (OSError, ValueError, KeyError, WireError) as error:
            reason = str(error)
        time.sleep(0.2)
    raise UserError(
        f"rank {process.rank}: no leader in {timeout:.0f} s: {reason} (rank 0 runs the same command, and all share --workdir)"
    )


def _connect(process: ProcessRank, told: dict[str, object]) -> Joined:
    connection = socket.create_connection((str(told["host"]), int(str(told["port"]))), timeout=GREETING_TIMEOUT)
    try:
        hello = {
            "rank": process.rank,
            "size": process.size,
            "launch": process.launch,
            "name": f"{socket.gethostname()} {os.getpid()}",
        }
        wire.greet(connection, str(told["token"]), hello)
        connection.settimeout(None)
        wire.keep_alive(connection)
        return Joined(connection, float(str(told["hang_timeout"])), str(told["coordinator"]))
    except BaseException:
        connection.close()
        raise


class Listener:
    """The leader's listening socket: lets in one follower a rank, of this launch, that knows the token."""

    def __init__(
        self, process: ProcessRank, workdir: Path, hang_timeout: float, admit: Callable[[socket.socket, int, str], None]
    ) -> None:
        """admit: called with connection, rank and name ("host pid"), in a thread of ours, once a rank."""
        host = LOOPBACK if process.one_host else process.address
        self._process, self._admit, self._token = process, admit, secrets.token_hex(32)
        self._lock, self._ranks = threading.Lock(), set[int]()
        self._socket = _listen(host)
        self.coordinator = f"{host}:{free_port(host)}"
        self._path = workdir / FOLDER / FILE
        self._write(
            {
                "host": host,
                "port": self._socket.getsockname()[1],
                "token": self._token,
                "launch": process.launch,
                "size": process.size,
                "hang_timeout": hang_timeout,
                "coordinator": self.coordinator,
            }
        )
        threading.Thread(target=self._run, daemon=True, name="listener").start()

    def _write(self, told: dict[str, object]) -> None:
        aside = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            aside.unlink(missing_ok=True)
            with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(told, file)
            os.replace(aside, self._path)
        except OSError as error:
            raise UserError(f"--workdir: cannot write {self._path}: {error.strerror}") from error

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._greet, args=(connection,), daemon=True, name="greeting").start()

    def _greet(self, connection: socket.socket) -> None:
        entered: set[int] = set()
        try:
            connection.settimeout(GREETING_TIMEOUT)
            hello, proof = wire.welcome(connection, self._token)
            rank = int(hello["rank"])
            if (reason := self._objection(hello, rank)) is not None:
                wire.refuse(connection, reason)
                connection.close()
                return
            entered.add(rank)
            wire.accept(connection, proof)
            connection.settimeout(None)
            wire.keep_alive(connection)
        except (WireError, OSError, ValueError, KeyError, TypeError) as error:
            log.warning("ranks: a connection was refused: %s", error)
            connection.close()
            with self._lock:
                self._ranks -= entered  # it may come again
            return
        self._admit(connection, rank, str(hello["name"]))

    def _objection(self, hello: dict[str, object], rank: int) -> str | None:
        process = self._process
        if hello["launch"] != process.launch or hello["size"] != process.size:
            return f"this is another start, of {process.size} processes"
        with self._lock:
            if not 0 < rank < process.size or rank in self._ranks:
                return f"rank {rank} of {process.size} is here already, or none of ours"
            self._ranks.add(rank)
        return None

    def close(self) -> None:
        """Nobody is let in any more, and the token is forgotten. May be repeated."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._path.unlink(missing_ok=True)


def _listen(host: str) -> socket.socket:
    """On that address; on all of this host where it is a name or address of another kind (a container's, say)."""
    try:
        return socket.create_server((host, 0), backlog=128)
    except OSError:
        if host == LOOPBACK:
            raise
        return socket.create_server(("", 0), backlog=128)
