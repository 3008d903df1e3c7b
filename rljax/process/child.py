"""Child processes of the event loop: their end is seen at once, and what they started goes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rljax.process.descendants import MARK, end_all, new_mark


class Child:
    """A process with pipes.

    asyncio's own `wait` may wait for the end of the pipes, which something that the process started
    can hold open for ever.
    """

    def __init__(self, process: asyncio.subprocess.Process, mark: str, exited: asyncio.Event) -> None:
        self.process, self._mark, self._exited = process, mark, exited

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], *, line_limit: int = 1 << 16, stderr: int | None = None
    ) -> Child:
        """Starts a process with pipes for stdin and stdout, in a session of its own.

        Ctrl-C of a terminal does not reach it.

        Args:
          line_limit: longest line of its output that is read, in bytes.
          stderr: as of `asyncio.create_subprocess_exec`.

        Raises OSError if it can't be started.
        """
        loop, exited, mark = asyncio.get_running_loop(), asyncio.Event(), new_mark()
        transport, protocol = await loop.subprocess_exec(
            lambda: _Pipes(line_limit, loop, exited, mark),
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env={**environment, MARK: mark},
            start_new_session=True,
        )
        return cls(asyncio.subprocess.Process(transport, protocol, loop), mark, exited)

    @property
    def status(self) -> int | None:
        """Exit status; minus a signal's number if that ended it, None while it runs."""
        return self.process.returncode

    async def ended(self) -> int:
        """Waits until the process is gone and reaped, with all that it started. Returns its status."""
        await self._exited.wait()
        assert self.status is not None
        return self.status

    def kill(self) -> None:
        """Kills the process and all that it started. May be called at any time."""
        if self.status is None:
            end_all(self.process.pid, self._mark)


class _Pipes(asyncio.subprocess.SubprocessStreamProtocol):
    """Pipes of a process whose end is noted when it ends, not when the last holder of a pipe does."""

    def __init__(self, limit: int, loop: asyncio.AbstractEventLoop, exited: asyncio.Event, mark: str) -> None:
        super().__init__(limit=limit, loop=loop)
        self._exited, self._mark, self._pid = exited, mark, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._pid = transport.get_pid()

    def process_exited(self) -> None:
        end_all(self._pid, self._mark)
        self._exited.set()
        super().process_exited()
