"""Model directories on their way to a worker: files in pieces, then a message that they are
complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from rljax.messaging.framing import Message
from rljax.workers.connection import Connection, PeerError

PIECE = 4 << 20  # bytes of a file in one message


async def send_files(connection: Connection, paths: Iterable[Path], *, version: int | None) -> None:
    """Sends files, and then that they were all.

    `version` is that of weights, None for a tokenizer. Raises PeerError.
    """
    for path in paths:
        for piece in _pieces(path):
            connection.send(Message("file", {"name": path.name}, {"piece": np.frombuffer(piece, np.uint8)}))
            await connection.drain()
    connection.send(Message("files_complete", {"version": version}))
    await connection.drain()


def _pieces(path: Path) -> Iterator[bytes]:
    """The bytes of a file, some at a time; one empty piece of an empty file."""
    with path.open("rb") as file:
        piece = file.read(PIECE)
        yield piece
        while piece := file.read(PIECE):
            yield piece


class ReceivedFiles:
    """Model directories as they arrive in a scratch directory; `directory` is the newest complete
    one.
    """

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

        Raises PeerError where its name would leave the directory.
        """
        with (self._arriving / plain_name(message.fields["name"])).open("ab") as file:
            file.write(message.arrays["piece"].data)

    def complete(self) -> Path:
        """Makes the directory that arrived the current one.

        Returns the one before, which can be deleted.
        """
        previous, self.directory = self.directory, self._arriving
        self._arriving = self._new_directory()
        return previous

    async def receive(self, connection: Connection) -> int:
        """Receives a directory, at a time when nothing else is sent.

        Returns its version, 0 for a tokenizer's.
        """
        while True:
            message = await connection.receive()
            if message.kind == "file":
                self.add(message)
            elif message.kind == "files_complete":
                self.complete()
                return int(message.fields["version"] or 0)


def plain_name(name: object) -> str:
    """Returns a file name that stays in the directory it is put in.

    Raises PeerError for any other.
    """
    if not isinstance(name, str) or not name or name.startswith(".") or Path(name).name != name:
        raise PeerError(f"{name!r} is no file name")
    return name
