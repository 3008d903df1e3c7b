"""Rank 0: starts or awaits the followers, makes one learner of all processes, and ends with them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

import numpy as np

from rljax.batching.batch import Batch
from rljax.config import io as config_io
from rljax.config.allocation import Pool
from rljax.config.schema import Config
from rljax.engine import ExportTarget, ExportToSampler, Learner, WeightSource, make_learner
from rljax.engine.rank import LOOPBACK, ProcessRank, free_port
from rljax.errors import RankFailed, UserError
from rljax.metrics.mean import Mean
from rljax.multiprocess.follower import HANG_SHARE, HEARTBEAT
from rljax.multiprocess.followers import Followers
from rljax.multiprocess.rendezvous import FOLDER, START_TIMEOUT, Rendezvous

GRACE = 30.0  # seconds that a run has to end in order after a rank is lost; then the process is ended
LEAVE = 20.0  # seconds for ranks to close their learners
TAIL = 30  # lines of a log
SMALL_HOST = 8  # processes that any host may be asked for

T = TypeVar("T")


class DistributedLearner:
    """A learner whose every call is made by every rank. Implements `rljax.engine.Learner`."""

    def __init__(self, followers: Followers, learner: Learner) -> None:
        self._followers, self._learner = followers, learner

    def score(self, batch: Batch) -> Any:
        return self._on_batch("score", batch)

    def score_reference(self, batch: Batch) -> Any:
        return self._on_batch("score_reference", batch)

    def score_teacher(self, batch: Batch) -> Any:
        return self._on_batch("score_teacher", batch)

    def values(self, batch: Batch) -> Any:
        return self._on_batch("values", batch)

    def update(self, batch: Batch) -> dict[str, Mean]:
        return self._on_batch("update", batch)

    def update_critic(self, batch: Batch) -> dict[str, Mean]:
        return self._on_batch("update_critic", batch)

    def update_supervised(self, batch: Batch) -> dict[str, Mean]:
        return self._on_batch("update_supervised", batch)

    def export(self, target: ExportTarget) -> WeightSource:
        """In memory, what comes may be gathered while it is read: then the followers are done when
        the reader is.
        """
        own, later = self._learner.export, isinstance(target, ExportToSampler)
        return self._followers.together("export", own=lambda: own(target), later=later, target=target.to_json())

    def save(self, directory: Path) -> None:
        self._on_path("save", directory)

    def restore(self, directory: Path) -> None:
        self._on_path("restore", directory)

    def close(self) -> None:
        """Has every rank close its learner and end."""
        self._followers.close(self._learner.close, LEAVE)

    def _on_batch(self, method: str, batch: Batch) -> Any:
        call = getattr(self._learner, method)
        return self._followers.together(method, own=lambda: call(batch), arrays=_arrays(batch))

    def _on_path(self, method: str, path: Path) -> None:
        call = getattr(self._learner, method)
        self._followers.together(method, own=lambda: call(path), path=str(path.absolute()))


class Leader:
    """The processes of one learner, as their leader sees them. With one process it does nothing,
    at no cost.

    Example:

        with Leader(process, count, config, workdir, fail=run.fail) as leader:
            learner = leader.make_learner(config, pool, model_dir)
            outcome = await leader.watched(loop.run())
    """

    def __init__(self, process: ProcessRank, count: int, config: Config, workdir: Path, fail: Callable[[str], None]) -> None:
        """
        Args:
          process: rank 0's; of size 1 beside a larger count: this process starts the others as its
            children.
          count: processes of the learner, this one included.
          workdir: a directory that every process sees.
          fail: records why the run failed, in one line, where this process has no time left to end
            in order.
        """
        self._workdir, self._config, self._fail = workdir, config, fail
        self._own = count > process.size
        self.process = self._leads(count) if self._own else process
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._logs: dict[int, tuple[Path, int]] = {}  # where this start's lines begin
        self._here = threading.Condition()
        self._connected = 0
        self._lost, self._ended = threading.Event(), threading.Event()
        self._on_lost: list[Callable[[], None]] = []
        self._followers: Followers | None = None
        self._rendezvous: Rendezvous | None = None

    @staticmethod
    def _leads(count: int) -> ProcessRank:
        port = free_port(LOOPBACK)
        return ProcessRank(0, count, local_size=count, address=LOOPBACK, port=port, launch=secrets.token_hex(8))

    @property
    def size(self) -> int:
        return self.process.size

    def __enter__(self) -> Leader:
        if self.size == 1:
            return self
        if self._own and self.size > max(SMALL_HOST, os.cpu_count() or 1):
            raise UserError(
                f"allocation_mode: a learner of {self.size} processes on this host of {os.cpu_count()} cores"
                f" (start them with torchrun, over more hosts, or take fewer)"
            )
        timeout = self._config.recover.hang_timeout
        self._followers = Followers(
            silence=max(HANG_SHARE * timeout, 3 * HEARTBEAT),
            explain=self._explain,
            on_trouble=self._write_stacks,
            on_failure=self._failed,
        )
        self._rendezvous = Rendezvous(self.process, self._workdir, timeout, self._admit)
        self.process = dataclasses.replace(self.process, coordinator=self._rendezvous.coordinator)
        if self._own:
            try:
                for rank in range(1, self.size):
                    self._start(rank)
            except BaseException:
                self._end()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.size == 1:
            return
        self._ended.set()
        self._end()
        if error is not None:  # frameworks wait for the others at exit, some for minutes
            guard = threading.Timer(GRACE, os._exit, [1])
            guard.daemon = True
            guard.start()

    # Starting

    def _start(self, rank: int) -> None:
        path = self._workdir / FOLDER / f"rank{rank}.log"
        process = dataclasses.replace(self.process, rank=rank, local_rank=rank)
        with path.open("ab") as log:
            self._logs[rank] = path, log.tell()
            self._children[rank] = subprocess.Popen(
                [sys.executable, "-m", "rljax.multiprocess", str(self._workdir.absolute())],
                env=_shared_cores(self.size) | os.environ | process.variables() | _this_interpreter(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is the leader's to act on
            )

    def _admit(self, connection: Any, rank: int, name: str) -> None:
        assert self._followers is not None
        self._followers.add(connection, rank, name)
        with self._here:
            self._connected += 1
            self._here.notify_all()

    def _await_all(self) -> None:
        """Blocks until every rank is connected.

        Raises UserError when one isn't in time, RankFailed when one ends before.
        """
        until = time.monotonic() + START_TIMEOUT
        with self._here:
            while self._connected < self.size - 1:
                for rank, child in self._children.items():
                    if child.poll() is not None:
                        raise RankFailed(f"rank {rank} did not start: {_ending(child.returncode)}", self._tail(rank))
                if time.monotonic() > until:
                    raise UserError(
                        f"ranks: {self._connected + 1} of {self.size} processes are there after {START_TIMEOUT:.0f} s"
                        f" (all run the same command and share --workdir={self._workdir})"
                    )
                self._here.wait(0.2)
        assert self._rendezvous is not None
        self._rendezvous.close()

    def make_learner(self, config: Config, pool: Pool, model_dir: Path) -> Learner:
        """Makes one learner of all processes.

        Raises UserError as each would alone, RankFailed when one of them is lost.
        """
        if self._followers is None:
            return make_learner(config, pool, model_dir)
        self._await_all()

        def own() -> Learner:
            with self.process.in_environment():
                return make_learner(config, pool, model_dir)

        learner = self._followers.together(
            "make",
            own=own,
            config=config_io.to_json(config),
            pool=dataclasses.asdict(pool),
            model_dir=str(Path(model_dir).absolute()),
        )
        return DistributedLearner(self._followers, learner)

    # Losing a rank

    async def watched(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the coroutine, and cancels it when a rank is lost, whatever it waits for.

        Raises RankFailed then.
        """
        task = asyncio.ensure_future(work)
        if self._followers is None:
            return await task
        loop = asyncio.get_running_loop()

        def cancel() -> None:
            loop.call_soon_threadsafe(task.cancel)

        self._on_lost.append(cancel)
        try:
            if self._lost.is_set():
                task.cancel()
            return await task
        except RankFailed:
            raise
        except (asyncio.CancelledError, Exception) as error:
            if not isinstance(error, asyncio.CancelledError | UserError):  # it may be what a lost rank does to the others
                await asyncio.to_thread(self._lost.wait, 2.0)
            if self._followers.failure is None:
                raise
            raise self._followers.failure from error
        finally:
            self._on_lost.clear()

    def _write_stacks(self) -> None:
        """Writes where this process is when a rank gets into trouble."""
        with contextlib.suppress(OSError), (self._workdir / FOLDER / "leader.stacks.txt").open("w") as report:
            faulthandler.dump_traceback(report)

    def _failed(self, failure: RankFailed) -> None:
        """Ends the run, from a thread of `Followers`.

        What waits in a collective can't be woken: the run gets GRACE to end.
        """
        if self._ended.is_set():
            return
        self._lost.set()
        for wake in list(self._on_lost):
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                wake()
        if self._ended.wait(GRACE):
            return
        with contextlib.suppress(Exception):  # the disk may be what failed; the line below is the one to see
            self._fail(str(failure))
        print(f"{failure.detail}\nerror: {failure}".lstrip(), file=sys.stderr, flush=True)
        self._kill()
        os._exit(1)

    def _explain(self, rank: int) -> tuple[str, str]:
        if rank not in self._children:
            return "", ""
        try:
            status = self._children[rank].wait(2.0)
        except subprocess.TimeoutExpired:
            return "", self._tail(rank)
        return _ending(status), self._tail(rank)

    def _tail(self, rank: int) -> str:
        path, start = self._logs[rank]
        with path.open("rb") as log:
            lines = _last(log, start)
        return "\n".join([f"the end of {path}:", *lines]) if lines else ""

    # Ending

    def _end(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
        if self._followers is not None:
            self._followers.close(None, LEAVE)
        until = time.monotonic() + 5.0
        for child in self._children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(until - time.monotonic(), 0.0))
        self._kill()

    def _kill(self) -> None:
        for child in self._children.values():
            if child.poll() is None:
                child.kill()
                child.wait()


def _arrays(batch: Batch) -> dict[str, np.ndarray]:
    """The arrays that a batch has, by field: what a follower makes the same batch of."""
    return {name: array for name, array in vars(batch).items() if array is not None}


def _shared_cores(processes: int) -> dict[str, str]:
    """Environment in which each process uses its share of the cores, unless the user has set it."""
    return {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // processes, 1))}


def _this_interpreter() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}


def _ending(status: int) -> str:
    """Says how a process ended."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _last(log: IO[bytes], start: int) -> list[str]:
    """Reads the last lines of a log, of those behind a position."""
    end = log.seek(0, os.SEEK_END)
    log.seek(max(start, end - (64 << 10)))
    return log.read().decode(errors="replace").splitlines()[-TAIL:]
