"""A collective between processes in a few lines: everything goes to rank 0 and comes back from it,
in the order of ranks.

It blocks as NCCL and gloo do: for ever while a peer is silent, with an error when a peer is gone.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence

import numpy as np

from rljax.engine.rank import ProcessRank
from rljax.messaging.framing import Message, receive, send
from rljax.messaging.listener import keep_alive

PATIENCE = 60.0  # seconds until all have come


class Collective:
    """The processes of one fake learner."""

    def __init__(self, process: ProcessRank) -> None:
        """Meets the others at the coordinator's address. Blocks."""
        self.rank, self.size = process.rank, process.size
        host, _, port = process.coordinator.rpartition(":")
        self._connections: list[socket.socket] = []
        if process.rank > 0:
            self._connections = [_connect(host, int(port))]
            keep_alive(self._connections[0])
            send(self._connections[0], Message("rank", {"rank": process.rank}))
            return
        found: dict[int, socket.socket] = {}
        with socket.create_server((host, int(port)), backlog=process.size) as listener:
            listener.settimeout(PATIENCE)
            while len(found) < process.size - 1:
                connection, _ = listener.accept()
                found[receive(connection).fields["rank"]] = connection
        self._connections = [found[rank] for rank in sorted(found)]
        for connection in self._connections:
            keep_alive(connection)

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        """The array of every rank, the same everywhere. float64, of any shapes."""
        array = np.asarray(array, np.float64)
        if self.rank > 0:
            send(self._connections[0], Message("part", {}, {"0": array}))
            return list(receive(self._connections[0]).arrays.values())
        parts = [array, *(receive(connection).arrays["0"] for connection in self._connections)]
        for connection in self._connections:
            send(connection, Message("all", {}, {str(i): part for i, part in enumerate(parts)}))
        return parts

    def sum(self, array: np.ndarray) -> np.ndarray:
        """Of every rank's array."""
        return _sum(self.gather(array))

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


class Alone:
    """A learner of one process."""

    rank, size = 0, 1

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        return [np.asarray(array, np.float64)]

    def sum(self, array: np.ndarray) -> np.ndarray:
        return _sum(self.gather(array))

    def close(self) -> None:
        """Holds nothing."""


def _sum(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.sum(np.stack(parts), axis=0)


def _connect(host: str, port: int) -> socket.socket:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((host, port))
        time.sleep(0.02)
    raise TimeoutError(f"nobody listens at {host}:{port}")
