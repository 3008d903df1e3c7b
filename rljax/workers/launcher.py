"""Starts a run's own worker processes, restarts those that die, and ends them with the run."""

from __future__ import annotations

import asyncio
import collections
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rljax.errors import TooManyFailures, UserError, WorkerLost
from rljax.process.descendants import MARK, end_all, new_mark
from rljax.process.tasks import Tasks
from rljax.rollout.producer import retry_delay

MAX_DEATHS = 5  # deaths of one worker that end the run, if no group was finished in between
GRACE = 5.0  # seconds between the end of the run and SIGKILL
TAIL = 20  # lines of a worker's log in an error

log = logging.getLogger(__name__)


class WorkerProcesses:
    """Keeps `count` processes of one command running, with `--attach=HOST:PORT` added.

    One that ends with status 1 and a line `error: ...` has bad input, and isn't started again.

    Their output goes to files in `logs`.

    Example:

        WorkerProcesses([sys.executable, "-m", "rljax.experiments.rollout"], 4, workdir / "workers")
    """

    def __init__(self, command: Sequence[str], count: int, logs: Path) -> None:
        self._command, self._count, self._logs = list(command), count, logs
        self._keepers: list[asyncio.Task[None]] = []
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._mark = new_mark()
        self._deaths: collections.Counter[int] = collections.Counter()  # of each worker since the last finished group
        self._closing = False

    def start(self, address: str, token: str, failed: Callable[[BaseException], None]) -> None:
        """Starts the workers.

        Args:
          address, token: of the trainer.
          failed: called with UserError or TooManyFailures if workers can't be kept running.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        command = [*self._command, f"--attach={address}", f"--parent={os.getpid()}"]
        environment = os.environ | {"RLJAX_TOKEN": token}
        tasks = Tasks(failed)
        for index in range(self._count):
            self._keepers.append(tasks.start(self._keep(index, command, environment, failed), f"keeper of worker {index}"))

    def reset_deaths(self) -> None:
        """Forgets the deaths so far. Call it when a group was finished."""
        self._deaths.clear()

    async def close(self) -> None:
        """Waits GRACE seconds for the workers to end by themselves, and kills the others."""
        self._closing = True
        if not self._keepers:
            return
        await asyncio.wait(self._keepers, timeout=GRACE)
        for index, process in self._processes.items():
            end_all(process.pid, self._mark_of(index))
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(process.wait() for process in self._processes.values()))

    def _mark_of(self, index: int) -> str:
        return f"{self._mark}/{index}"

    async def _keep(
        self, index: int, command: Sequence[str], environment: dict[str, str], failed: Callable[[BaseException], None]
    ) -> None:
        path, environment = self._logs / f"{index}.log", environment | {MARK: self._mark_of(index)}
        while True:
            with path.open("ab") as out:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    f"--name={index}",
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches the trainer alone, which ends the workers
                )
            self._processes[index] = process
            status = await process.wait()
            if self._closing:
                return
            end_all(process.pid, self._mark_of(index))
            lines = _tail(path)
            last = lines[-1] if lines else ""
            if status == 1 and last.startswith("error: "):  # bad input: a restart would fail again
                failed(UserError(last.removeprefix("error: ")))
                return
            self._deaths[index] += 1  # of one alone: what freezes or kills all of them at once is one event
            log.warning("worker %d ended with status %d and is started again (%s)", index, status, path)
            if self._deaths[index] >= MAX_DEATHS:
                failed(_too_many_deaths(index, status, path, lines))
                return
            await asyncio.sleep(retry_delay(self._deaths[index]))


def _too_many_deaths(index: int, status: int, path: Path, lines: Sequence[str]) -> TooManyFailures:
    error = TooManyFailures(
        f"rollout.workers: worker {index} died {MAX_DEATHS} times, and no worker finished a group in between; the last"
        f" time with status {status} (see {path})"
    )
    error.__cause__ = WorkerLost("\n".join(["the end of its log:", *lines]))
    return error


def _tail(path: Path) -> list[str]:
    with path.open(errors="replace") as lines:
        return [line.rstrip() for line in collections.deque(lines, TAIL) if line.strip()]
