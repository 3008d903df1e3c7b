"""Leader, rank 0: starts the followers or waits for them, and makes the learner with them."""

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
from concurrent.futures import Future
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

GRACE = 30.0  # seconds for a run to end in order after a rank is lost; then the process is ended
CLOSE_TIMEOUT = 20.0  # seconds for ranks to close their learners
TAIL = 30  # lines of a follower's log in an error
SMALL_HOST = 8  # processes that are allowed on any host, even with fewer cores

T = TypeVar("T")


class DistributedLearner:
    """Learner whose calls all ranks make. Implements `rljax.engine.Learner`."""

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

    def scale_lr(self, factor: float) -> None:
        self._followers.call_all("scale_lr", local=lambda: self._learner.scale_lr(factor), factor=factor)

    def export(self, target: ExportTarget) -> WeightSource:
        """Exports the weights in all ranks.

        Weights for a sampler may be gathered while it reads them, so this does not wait for the
        followers then: they end the call when the sampler has read everything.
        """
        export, wait = self._learner.export, not isinstance(target, ExportToSampler)
        return self._followers.call_all("export", local=lambda: export(target), wait=wait, target=target.to_json())

    def save(self, directory: Path) -> None:
        self._on_path("save", directory)

    def begin_save(self, directory: Path) -> Future[None]:
        """Begins a save in all ranks. Returns the end of all their writes."""
        begin = self._learner.begin_save
        path = str(directory.absolute())
        ended: Future[None] = self._followers.call_all("begin_save", local=lambda: begin(directory), later=True, path=path)
        return ended

    def restore(self, directory: Path) -> None:
        self._on_path("restore", directory)

    def close(self) -> None:
        """Has all ranks close their learners, and the followers end."""
        self._followers.close(self._learner.close, CLOSE_TIMEOUT)

    def _on_batch(self, method: str, batch: Batch) -> Any:
        call = getattr(self._learner, method)
        return self._followers.call_all(method, local=lambda: call(batch), arrays=_arrays(batch))

    def _on_path(self, method: str, path: Path) -> None:
        call = getattr(self._learner, method)
        self._followers.call_all(method, local=lambda: call(path), path=str(path.absolute()))


class Leader:
    """Processes of one learner, as rank 0 sees them. With one process it does nothing.

    Example:

        with Leader(process, count, config, workdir, fail=run.fail) as leader:
            learner = leader.make_learner(config, pool, model_dir)
            outcome = await leader.watched(loop.run())
    """

    def __init__(self, process: ProcessRank, count: int, config: Config, workdir: Path, fail: Callable[[str], None]) -> None:
        """
        Args:
          process: rank 0. If its size is 1 and `count` is larger, the leader starts the followers
            as child processes.
          count: number of processes of the learner, this one included.
          workdir: run directory, which all processes must see.
          fail: records in one line why the run failed, if this process can't end in order.
        """
        self._workdir, self._config, self._fail = workdir, config, fail
        self._starts_followers = count > process.size
        self.process = self._leading(count) if self._starts_followers else process
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # by rank
        self._logs: dict[int, tuple[Path, int]] = {}  # by rank: log file, and the position at which this start's lines begin
        self._arrival = threading.Condition()
        self._connected = 0  # followers
        self._lost, self._ended = threading.Event(), threading.Event()
        self._on_lost: list[Callable[[], None]] = []
        self._followers: Followers | None = None
        self._rendezvous: Rendezvous | None = None

    @staticmethod
    def _leading(count: int) -> ProcessRank:
        """Returns rank 0 of `count` processes on this host."""
        port = free_port(LOOPBACK)
        return ProcessRank(0, count, local_size=count, address=LOOPBACK, port=port, launch=secrets.token_hex(8))

    @property
    def size(self) -> int:
        return self.process.size

    def __enter__(self) -> Leader:
        if self.size == 1:
            return self
        if self._starts_followers and self.size > max(SMALL_HOST, os.cpu_count() or 1):
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
        if self._starts_followers:
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
        if error is not None:  # frameworks wait for the other ranks at exit, some for minutes
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
                start_new_session=True,  # Ctrl-C reaches the leader alone
            )

    def _admit(self, connection: Any, rank: int, name: str) -> None:
        assert self._followers is not None
        self._followers.add(connection, rank, name)
        with self._arrival:
            self._connected += 1
            self._arrival.notify_all()

    def _await_all(self) -> None:
        """Blocks until all ranks are connected.

        Raises:
          UserError: a rank is not connected in time.
          RankFailed: a rank ended before it was connected.
        """
        until = time.monotonic() + START_TIMEOUT
        with self._arrival:
            while self._connected < self.size - 1:
                for rank, child in self._children.items():
                    if child.poll() is not None:
                        raise RankFailed(f"rank {rank} did not start: {_exit_reason(child.returncode)}", self._tail(rank))
                if time.monotonic() > until:
                    raise UserError(
                        f"ranks: {self._connected + 1} of {self.size} processes are there after {START_TIMEOUT:.0f} s"
                        f" (start all with the same command, on hosts that share --workdir={self._workdir})"
                    )
                self._arrival.wait(0.2)
        assert self._rendezvous is not None
        self._rendezvous.close()

    def make_learner(self, config: Config, pool: Pool, model_dir: Path) -> Learner:
        """Makes one learner of all processes.

        Raises:
          UserError: as `rljax.engine.make_learner`, in all ranks.
          RankFailed: a rank is lost or failed alone.
        """
        if self._followers is None:
            return make_learner(config, pool, model_dir)
        self._await_all()

        def local() -> Learner:
            with self.process.in_environment():
                return make_learner(config, pool, model_dir)

        learner = self._followers.call_all(
            "make",
            local=local,
            config=config_io.to_json(config),
            pool=dataclasses.asdict(pool),
            model_dir=str(Path(model_dir).absolute()),
        )
        return DistributedLearner(self._followers, learner)

    # Losing a rank

    async def watched(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the coroutine, and cancels it when a rank is lost.

        Raises:
          RankFailed: a rank was lost.
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
            if not isinstance(error, asyncio.CancelledError | UserError):  # a lost rank may have caused it
                await asyncio.to_thread(self._lost.wait, 2.0)
            if self._followers.failure is None:
                raise
            raise self._followers.failure from error
        finally:
            self._on_lost.clear()

    def _write_stacks(self) -> None:
        """Writes the stacks of this process, when a rank gets into trouble."""
        with contextlib.suppress(OSError), (self._workdir / FOLDER / "leader.stacks.txt").open("w") as report:
            faulthandler.dump_traceback(report)

    def _failed(self, failure: RankFailed) -> None:
        """Ends the run. Called in a thread of `Followers`.

        A thread that waits in a collective can't be woken. The run has GRACE seconds to end in
        order; then the process exits.
        """
        if self._ended.is_set():
            return
        self._lost.set()
        for wake in list(self._on_lost):
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                wake()
        if self._ended.wait(GRACE):
            return
        with contextlib.suppress(Exception):  # the disk may be full; the line below must be printed all the same
            self._fail(str(failure))
        print(f"{failure.detail}\nerror: {failure}".lstrip(), file=sys.stderr, flush=True)
        self._kill()
        os._exit(1)

    def _explain(self, rank: int) -> tuple[str, str]:
        """Returns how the process of a rank ended and the end of its log, each "" if unknown."""
        if rank not in self._children:
            return "", ""
        try:
            status = self._children[rank].wait(2.0)
        except subprocess.TimeoutExpired:
            return "", self._tail(rank)
        return _exit_reason(status), self._tail(rank)

    def _tail(self, rank: int) -> str:
        path, start = self._logs[rank]
        with path.open("rb") as log:
            lines = _last_lines(log, start)
        return "\n".join([f"the end of {path}:", *lines]) if lines else ""

    # Ending

    def _end(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
        if self._followers is not None:
            self._followers.close(None, CLOSE_TIMEOUT)
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
    """Returns the arrays of a batch by field, from which a follower makes the same batch."""
    return {name: array for name, array in vars(batch).items() if array is not None}


def _shared_cores(processes: int) -> dict[str, str]:
    """Returns variables by which each process uses its share of the cores."""
    return {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // processes, 1))}


def _this_interpreter() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}


def _exit_reason(status: int) -> str:
    """Describes how a process ended, given its exit status."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _last_lines(log: IO[bytes], start: int) -> list[str]:
    """Reads the last TAIL lines of a log after a position in bytes."""
    end = log.seek(0, os.SEEK_END)
    log.seek(max(start, end - (64 << 10)))
    return log.read().decode(errors="replace").splitlines()[-TAIL:]
