"""Watchdog: ends a process in which nothing has moved for too long, and says where it waits.

    what hangs                             who ends the process, and when
    a task, or a thread                    a thread of the watchdog, after the time limit
    a C call that holds the interpreter    a helper process (guardian.py), after the limit and GRACE
    the end of a run, or of its process    the thread, CLOSE_TIMEOUT after the run called `closing`

What is known goes to stderr first, then to status.json, then to the report: a disk may be what
hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from rljax.process import guardian

EXIT_HANG = 3  # status of a process that was ended for hanging
GRACE = 30.0  # seconds after the time limit until a process whose interpreter is held is ended
CLOSE_TIMEOUT = 120.0  # seconds for a run that has ended to close its parts
STOPPED = 5.0  # seconds by which the watchdog wakes too late, if the process was stopped (SIGSTOP) or got no time
WRITE_TIMEOUT = 10.0  # seconds for status and report to be written, to a disk that may hang
START_TIMEOUT = 1800.0  # seconds for a start to move, if the time limit is shorter: servers and compilers take long


class Watchdog:
    """Watchdog of a block.

    Example:

        with Watchdog(timeout=1800.0, report=workdir / "hang.txt", on_hang=run.fail) as watchdog:
            watchdog.watch_tasks()        # in the event loop
            ...
            watchdog.beat("update")       # something moved
            ...
            watchdog.closing(error)       # what is left takes at most CLOSE_TIMEOUT
    """

    def __init__(
        self,
        timeout: float,
        report: Path,
        on_hang: Callable[[str], None] = lambda line: None,
        *,
        status: Path | None = None,
        starting: bool = False,
    ) -> None:
        """
        Args:
          timeout: seconds without a beat until the process is ended.
          report: file for the report, which goes to stderr too.
          on_hang: called with one line that says why the process is ended, in a thread.
          status: the run's status.json, which a helper process sets to failed if this process's
            interpreter is held; None for no helper.
          starting: the limit is at least START_TIMEOUT until `started` is called.
        """
        self._timeout, self._limit = timeout, max(timeout, START_TIMEOUT) if starting else timeout
        self._report, self._on_hang, self._status = report, on_hang, status
        self._last = (time.monotonic(), "start")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._guardian: subprocess.Popen[bytes] | None = None
        self._closing: tuple[float, str, int] | None = None  # since when, an error's line, the status to exit with

    def beat(self, what: str) -> None:
        """Notes that something moved. Cheap, and callable in any thread."""
        self._last = (time.monotonic(), what)

    def started(self) -> None:
        """Notes that the start is over: from now on the time limit is that of the config."""
        self._limit = self._timeout
        self.beat("start")

    def closing(self, error: BaseException | None) -> None:
        """Notes that the run has ended, and how. What is left to close has CLOSE_TIMEOUT.

        After that the process ends, with the exit status that it would have had.
        """
        line = "" if error is None else " ".join(str(error).split())
        if error is not None and not type(error).__module__.startswith("rljax."):
            line = f"{type(error).__name__}: {line}"
        self._closing = self._closing or (time.monotonic(), line, 0 if error is None else 1)

    def watch_tasks(self) -> None:
        """Has the report name what each task of the running event loop waits for."""
        with contextlib.suppress(RuntimeError):  # none is running
            self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Watchdog:
        self.watch_tasks()
        self.beat("start")
        if self._status is not None:
            self._guardian = guardian.start(self._status, GRACE)
            if not faulthandler.is_enabled():
                faulthandler.enable(sys.__stderr__ or 2)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._guardian is not None:
            guardian.stop(self._guardian)

    def _watch(self) -> None:
        pause, woke = min(1.0, self._timeout / 10), time.monotonic()
        with _stderr_copy() as stderr:
            while not self._done.wait(pause):
                before, woke = woke, time.monotonic()
                if woke - before > pause + STOPPED:  # what could not move did not hang
                    self._last = (self._last[0] + woke - before, self._last[1])
                if self._guardian is not None:
                    guardian.beat(self._guardian, self._limit + GRACE, self._last[1])
                else:
                    faulthandler.dump_traceback_later(self._limit + GRACE, exit=True, file=stderr)
                if self._closing is not None:
                    if time.monotonic() - self._closing[0] > CLOSE_TIMEOUT:
                        self._end_closing(stderr, *self._closing[1:])
                elif time.monotonic() - self._last[0] > self._limit:
                    self._end(stderr, hang_line(self._limit, self._last[1]), EXIT_HANG)

    def _end_closing(self, stderr: IO[str], error: str, status: int) -> None:
        late = f"what was left to close did not end in {CLOSE_TIMEOUT:g} s, and is abandoned"
        self._end(stderr, f"{error}; {late}" if error else late, status, failed=bool(status))

    def _end(self, stderr: IO[str], line: str, status: int, *, failed: bool = True) -> None:
        """Says what is known, and ends the process."""
        text = f"rljax: {line}; all stacks follow and are in {self._report}\n"
        text += "".join(f"task {_location(task)}\n" for task in self._tasks())
        stderr.write(text)
        stderr.flush()
        faulthandler.dump_traceback(stderr, all_threads=True)
        if failed:
            _at_most(WRITE_TIMEOUT, lambda: self._on_hang(line))
        _at_most(WRITE_TIMEOUT, lambda: self._write_report(text))
        stderr.write(f"\n{'error' if failed else 'warning'}: {line} (the stacks above say where it waits)\n")
        stderr.flush()
        os._exit(status)

    def _write_report(self, text: str) -> None:
        with self._report.open("w") as file:
            file.write(text)
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _tasks(self) -> list[asyncio.Task[object]]:
        return list(asyncio.all_tasks(self._loop)) if self._loop else []


def hang_line(limit: float, last: str) -> str:
    return f"nothing has moved for {limit:g} s (recover.hang_timeout) since {last!r}"


def _at_most(seconds: float, action: Callable[[], None]) -> None:
    """Does something that may fail or hang, and waits for it so long."""

    def act() -> None:
        with contextlib.suppress(Exception):  # the disk is full, or away; what is known was said already
            action()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)


def _location(task: asyncio.Task[object]) -> str:
    """Returns a task's name and the functions it waits in, innermost first, with file and line."""
    frames = reversed(_frames(task))
    return f"{task.get_name()}: " + " < ".join(
        f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})" for frame in frames
    )


def _frames(task: asyncio.Task[object]) -> list[types.FrameType]:
    """Returns the frames that a task waits in, outermost first: a coroutine, what it awaits, ...

    A task's own stack has only the outermost. What is awaited through an object of C (`gather`,
    an asynchronous generator's step) ends the chain; the tasks behind a `gather` are in the list
    themselves.
    """
    found: list[types.FrameType] = []
    waiting: Any = task.get_coro()  # a coroutine, a generator, an asynchronous generator, or an object of C
    while waiting is not None:
        for kind in ("cr", "gi", "ag"):
            if (frame := getattr(waiting, f"{kind}_frame", None)) is not None:
                found.append(frame)
                waiting = getattr(waiting, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
                break
        else:
            return found
    return found


def _stderr_copy() -> IO[str]:
    """Returns the process's stderr under a new descriptor, even if sys.stderr was replaced."""
    try:
        return os.fdopen(os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2), "w")
    except (OSError, ValueError):
        return open(os.devnull, "w")
