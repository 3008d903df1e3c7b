"""Watchdog: ends a process in which nothing has moved for too long, and writes all stacks.

There are two watchdogs. A Python thread writes a readable report: the last beat, the tasks of the
event loop, all stacks. If a C call never releases the interpreter lock, that thread can't run;
faulthandler's timer, which needs no lock, then ends the process.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

EXIT_HANG = 3  # status of a process that was ended for hanging
GRACE = 30.0  # seconds after the timeout until faulthandler ends the process


class Watchdog:
    """Watchdog of a block.

    Example:

        with Watchdog(timeout=1800.0, report=workdir / "hang.txt") as watchdog:
            ...
            watchdog.beat("update")       # something moved
    """

    def __init__(self, timeout: float, report: Path, on_timeout: Callable[[], None] = lambda: None) -> None:
        """
        Args:
          timeout: seconds without a beat until the process is ended.
          report: file for the report, which goes to stderr too.
          on_timeout: called before the report is written, in the watchdog's thread; it must not
            block.
        """
        self._timeout = timeout
        self._report, self._on_timeout = report, on_timeout
        self._last = (time.monotonic(), "start")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def beat(self, what: str) -> None:
        """Notes that something moved. Cheap, and callable in any thread."""
        self._last = (time.monotonic(), what)

    def __enter__(self) -> Watchdog:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        self.beat("start")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        pause = min(1.0, self._timeout / 10)
        with _stderr_copy() as stderr:
            while not self._done.wait(pause):
                faulthandler.dump_traceback_later(self._timeout + GRACE, exit=True, file=stderr)
                if time.monotonic() - self._last[0] > self._timeout:
                    self._end_process(stderr)

    def _end_process(self, stderr: IO[str]) -> None:
        self._on_timeout()
        line = (
            f"rljax: nothing has moved for {self._timeout:g} s (recover.hang_timeout) since {self._last[1]!r};"
            f" all stacks follow and are in {self._report}\n"
        )
        for file in (stderr, self._report.open("w")):
            file.write(line)
            file.writelines(f"task {_location(task)}\n" for task in self._tasks())
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.flush()
        os._exit(EXIT_HANG)

    def _tasks(self) -> list[asyncio.Task[object]]:
        return list(asyncio.all_tasks(self._loop)) if self._loop else []


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
