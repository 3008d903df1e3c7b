"""How followers find their leader: a file in the run directory, which every process sees, with
address and token.

WORKDIR/ranks/leader.json    host, port, token, launch, size, hang_timeout, coordinator; readable by its owner alone
WORKDIR/ranks/rank1.log      what a follower that the leader started prints
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rljax.engine.rank import LOOPBACK, ProcessRank, free_port
from rljax.errors import UserError
from rljax.messaging.framing import FramingError
from rljax.messaging.handshake import HandshakeError
from rljax.messaging.listener import Listener, connected

START_TIMEOUT = 600.0  # seconds until every process is there
FOLDER, FILE = "ranks", "leader.json"

log = logging.getLogger(__name__)


class Joined(NamedTuple):
    """A follower's connection to its leader, and what it has to know before the first call."""

    connection: socket.socket
    hang_timeout: float  # seconds
    coordinator: str


def join(process: ProcessRank, workdir: Path, timeout: float = START_TIMEOUT) -> Joined:
    """Finds the leader of this launch and connects; blocks.

    Raises UserError when there is none in time.
    """
    until, reason = time.monotonic() + timeout, "it is not there"
    path = workdir / FOLDER / FILE
    while time.monotonic() < until:
        try:
            told = json.loads(path.read_text())
            if told["launch"] != process.launch:
                reason = f"{path} is of another start"
            else:
                return _connect(process, told)
        except (OSError, ValueError, KeyError, HandshakeError, FramingError) as error:
            reason = str(error)
        time.sleep(0.2)
    raise UserError(
        f"rank {process.rank}: no leader in {timeout:.0f} s: {reason} (rank 0 runs the same command, and all share --workdir)"
    )


def _connect(process: ProcessRank, told: Mapping[str, Any]) -> Joined:
    hello = {
        "rank": process.rank,
        "size": process.size,
        "launch": process.launch,
        "name": f"{socket.gethostname()} {os.getpid()}",
    }
    connection = connected((str(told["host"]), int(told["port"])), str(told["token"]), hello)
    return Joined(connection, float(told["hang_timeout"]), str(told["coordinator"]))


class Rendezvous:
    """The leader's side: takes one follower per rank, of this launch, and tells the others why
    not.
    """

    def __init__(
        self, process: ProcessRank, workdir: Path, hang_timeout: float, admit: Callable[[socket.socket, int, str], None]
    ) -> None:
        """admit: called with connection, rank and name ("host pid"), in a thread of the listener,
        once per rank.

        Raises:
          UserError: the file for the followers can't be written.
        """
        host, token = LOOPBACK if process.one_host else process.address, secrets.token_hex(32)
        self._process, self._admit, self._ranks = process, admit, set[int]()
        self._listener = self._listen(host, token)
        self.coordinator = f"{host}:{free_port(host)}"
        self._path = workdir / FOLDER / FILE
        self._write(
            {
                "host": host,
                "port": self._listener.address[1],
                "token": token,
                "launch": process.launch,
                "size": process.size,
                "hang_timeout": hang_timeout,
                "coordinator": self.coordinator,
            }
        )

    def _listen(self, host: str, token: str) -> Listener:
        """Listens on that address, or on all of this host where it is not one of its own (a
        container's).
        """
        try:
            return Listener((host, 0), token, what="ranks", objection=self._objection, admit=self._admitted)
        except OSError:
            if host == LOOPBACK:
                raise
            return Listener(("", 0), token, what="ranks", objection=self._objection, admit=self._admitted)

    def _write(self, told: Mapping[str, Any]) -> None:
        aside = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            aside.unlink(missing_ok=True)
            with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(told, file)
            os.replace(aside, self._path)
        except OSError as error:
            self._listener.close()
            raise UserError(f"--workdir: cannot write {self._path}: {error.strerror}") from error

    def _objection(self, hello: Mapping[str, Any]) -> str | None:
        process, rank = self._process, hello.get("rank")
        if hello.get("launch") != process.launch or hello.get("size") != process.size:
            return f"this is another start, of {process.size} processes"
        if not isinstance(rank, int) or not 0 < rank < process.size or rank in self._ranks:
            return f"rank {rank} of {process.size} is here already, or none of ours"
        return None

    def _admitted(self, connection: socket.socket, hello: Mapping[str, Any]) -> None:
        self._ranks.add(hello["rank"])
        self._admit(connection, hello["rank"], str(hello.get("name")))

    def close(self) -> None:
        """Stops listening, and forgets the token. May be repeated."""
        self._listener.close()
        self._path.unlink(missing_ok=True)
