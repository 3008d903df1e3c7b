"""A small collective between processes: rank 0 receives from all and sends everything to all.

It blocks as NCCL and gloo do: for ever while a peer is silent, with an error if a peer is gone.
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

PATIENCE = 60.0  # seconds for all processes to connect


class Collective:
    """Connections between the processes of one fake learner."""

    def __init__(self, process: ProcessRank) -> None:
        """Connects to the other processes at the coordinator's address. Blocks."""
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
        """Returns the arrays of all ranks in rank order, on every rank: float64, of any shapes."""
        array = np.asarray(array, np.float64)
        if self.rank > 0:
            send(self._connections[0], Message("part", {}, {"0": array}))
            return list(receive(self._connections[0]).arrays.values())
        parts = [array, *(receive(connection).arrays["0"] for connection in self._connections)]
        for connection in self._connections:
            send(connection, Message("all", {}, {str(i): part for i, part in enumerate(parts)}))
        return parts

    def sum(self, array: np.ndarray) -> np.ndarray:
        """Sums the arrays of all ranks."""
        return _sum(self.gather(array))

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


class Alone:
    """The collective of a learner with one process."""

    rank, size = 0, 1

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        return [np.asarray(array, np.float64)]

    def sum(self, array: np.ndarray) -> np.ndarray:
        return _sum(self.gather(array))

    def close(self) -> None:
        """Does nothing, for there are no connections."""


def _sum(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.sum(np.stack(parts), axis=0)


def _connect(host: str, port: int) -> socket.socket:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((host, port))
        time.sleep(0.02)
    raise TimeoutError(f"no process listens at {host}:{port}")
