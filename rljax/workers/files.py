"""Sends model directories to workers: files in pieces, then a message that they are complete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from rljax.messaging.framing import Message
from rljax.workers.connection import Connection, PeerError

PIECE = 4 << 20  # bytes of a file in one message


async def send_files(connection: Connection, paths: Iterable[Path], *, version: int | None) -> None:
    """Sends files, and then a message that they are complete.

    Args:
      version: of the weights; None for a tokenizer.

    Raises:
      PeerError: the other side is gone.
    """
    for path in paths:
        for piece in _pieces(path):
            connection.send(Message("file", {"name": path.name}, {"piece": np.frombuffer(piece, np.uint8)}))
            await connection.drain()
    connection.send(Message("files_complete", {"version": version}))
    await connection.drain()


def _pieces(path: Path) -> Iterator[bytes]:
    """Yields the bytes of a file in pieces; one empty piece for an empty file."""
    with path.open("rb") as file:
        piece = file.read(PIECE)
        yield piece
        while piece := file.read(PIECE):
            yield piece


class ReceivedFiles:
    """Receives model directories into a scratch directory. `directory` is the last complete one."""

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._count = scratch, 0
        self.directory = self._arriving = self._new_directory()

    def _new_directory(self) -> Path:
        self._count += 1
        directory = self._scratch / str(self._count)
        directory.mkdir()
        return directory

    def add(self, message: Message) -> None:
        """Appends the piece in a `file` message.

        Raises PeerError if the file's name would leave the directory.
        """
        with (self._arriving / plain_name(message.fields["name"])).open("ab") as file:
            file.write(message.arrays["piece"].data)

    def complete(self) -> Path:
        """Makes the received directory the current one. Returns the previous one, to be deleted."""
        previous, self.directory = self.directory, self._arriving
        self._arriving = self._new_directory()
        return previous

    async def receive(self, connection: Connection) -> int:
        """Receives a directory, while nothing else is sent.

        Returns the version of its weights; 0 for a tokenizer.
        """
        while True:
            message = await connection.receive()
            if message.kind == "file":
                self.add(message)
            elif message.kind == "files_complete":
                self.complete()
                return int(message.fields["version"] or 0)


def plain_name(name: object) -> str:
    """Returns the name if it is a plain file name, without a directory. Raises PeerError if not."""
    if not isinstance(name, str) or not name or name.startswith(".") or Path(name).name != name:
        raise PeerError(f"{name!r} is not a file name")
    return name
