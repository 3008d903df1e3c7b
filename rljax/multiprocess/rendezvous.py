"""Connects followers to their leader through a file in the run directory.

All processes see the run directory. The file has the leader's address and a token.

WORKDIR/ranks/leader.json    host, port, token, launch, size, hang_timeout, coordinator (mode 0600)
WORKDIR/ranks/rank1.log      output of a follower that the leader started
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
from rljax.messaging.listener import Listener, connect_to

START_TIMEOUT = 600.0  # seconds for all processes to connect
FOLDER, FILE = "ranks", "leader.json"

log = logging.getLogger(__name__)


class Joined(NamedTuple):
    """Connection of a follower to its leader, and settings that it needs before the first call."""

    connection: socket.socket
    hang_timeout: float  # seconds: recover.hang_timeout
    coordinator: str  # HOST:PORT at which the framework's processes meet


def join(process: ProcessRank, workdir: Path, timeout: float = START_TIMEOUT) -> Joined:
    """Finds the leader of this launch and connects to it. Blocks.

    Args:
      timeout: seconds.

    Raises:
      UserError: there is no leader in time.
    """
    until, reason = time.monotonic() + timeout, "it is not there"
    path = workdir / FOLDER / FILE
    while time.monotonic() < until:
        try:
            info = json.loads(path.read_text())
            if info["launch"] != process.launch:
                reason = f"{path} is of another start"
            else:
                return _connect(process, info)
        except (OSError, ValueError, KeyError, HandshakeError, FramingError) as error:
            reason = str(error)
        time.sleep(0.2)
    raise UserError(
        f"rank {process.rank}: no leader in {timeout:.0f} s: {reason}"
        " (start rank 0 with the same command, and share --workdir among all hosts)"
    )


def _connect(process: ProcessRank, info: Mapping[str, Any]) -> Joined:
    hello = {
        "rank": process.rank,
        "size": process.size,
        "launch": process.launch,
        "name": f"{socket.gethostname()} {os.getpid()}",
    }
    connection = connect_to((str(info["host"]), int(info["port"])), str(info["token"]), hello)
    return Joined(connection, float(info["hang_timeout"]), str(info["coordinator"]))


class Rendezvous:
    """Leader's side: admits one follower per rank of this launch, and refuses others."""

    def __init__(
        self, process: ProcessRank, workdir: Path, hang_timeout: float, admit: Callable[[socket.socket, int, str], None]
    ) -> None:
        """
        Args:
          process: rank 0.
          hang_timeout: seconds, for the followers' watchdogs.
          admit: called with connection, rank and name ("host pid"), in a thread of the listener,
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
        """Listens on an address, or on all if it is not one of this host (in a container)."""
        try:
            return self._listener_at(host, token)
        except OSError:
            if host == LOOPBACK:
                raise
            return self._listener_at("", token)

    def _listener_at(self, host: str, token: str) -> Listener:
        return Listener((host, 0), token, peers="ranks", refusal_reason=self._refusal_reason, admit=self._admitted)

    def _write(self, info: Mapping[str, Any]) -> None:
        temporary = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(info, file)
            os.replace(temporary, self._path)
        except OSError as error:
            self._listener.close()
            raise UserError(f"--workdir: cannot write {self._path}: {error.strerror}") from error

    def _refusal_reason(self, hello: Mapping[str, Any]) -> str | None:
        process, rank = self._process, hello.get("rank")
        if hello.get("launch") != process.launch or hello.get("size") != process.size:
            return f"this is another start, of {process.size} processes"
        if not isinstance(rank, int) or not 0 < rank < process.size or rank in self._ranks:
            return f"rank {rank} is connected already, or is not in [1, {process.size - 1}]"
        return None

    def _admitted(self, connection: socket.socket, hello: Mapping[str, Any]) -> None:
        self._ranks.add(hello["rank"])
        self._admit(connection, hello["rank"], str(hello.get("name")))

    def close(self) -> None:
        """Stops listening, and deletes the file. Idempotent."""
        self._listener.close()
        self._path.unlink(missing_ok=True)
