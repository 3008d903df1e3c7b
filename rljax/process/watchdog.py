"""Ends a run that hangs: when nothing has moved for so long, every stack is written down and the
process exits.

Two dogs: a Python thread that writes a readable account (what was last heard of, the tasks of the
event loop, all stacks), and behind it faulthandler's, which needs no lock of the interpreter's and
bites when a C call holds that for good.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO

EXIT_HANG = 3  # status of a process that was ended for hanging
GRACE = 30.0  # seconds after the timeout until faulthandler ends a process whose threads can't run


class Watchdog:
    """Watches over a block.

    Example:

        with Watchdog(timeout=1800.0, report=workdir / "hang.txt") as watchdog:
            ...
            watchdog.beat("update")       # something moved
    """

    def __init__(self, timeout: float, report: Path, on_bite: Callable[[], None] = lambda: None) -> None:
        """
        Args:
          timeout: seconds without a beat.
          report: the file that the account goes to, beside stderr.
          on_bite: called before anything is written, in a thread of the dog's; it must not block.
        """
        self._timeout = timeout
        self._report, self._on_bite = report, on_bite
        self._last = (time.monotonic(), "start")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def beat(self, what: str) -> None:
        """Something moved. Costs nothing; callable from any thread."""
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
                    self._bite(stderr)

    def _bite(self, stderr: IO[str]) -> None:
        self._on_bite()
        line = (
            f"rljax: nothing has moved for {self._timeout:g} s (recover.hang_timeout) since {self._last[1]!r};"
            f" all stacks follow and are in {self._report}\n"
        )
        for file in (stderr, self._report.open("w")):
            file.write(line)
            file.writelines(f"task {_where(task)}\n" for task in self._tasks())
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.flush()
        os._exit(EXIT_HANG)

    def _tasks(self) -> list[asyncio.Task[object]]:
        return list(asyncio.all_tasks(self._loop)) if self._loop else []


def _where(task: asyncio.Task[object]) -> str:
    frames = task.get_stack(limit=4)
    return f"{task.get_name()}: " + " < ".join(f"{f.f_code.co_qualname} line {f.f_lineno}" for f in reversed(frames))


def _stderr_copy() -> IO[str]:
    """The process's stderr under a descriptor of our own, whatever sys.stderr has been replaced
    by.
    """
    try:
        return os.fdopen(os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2), "w")
    except (OSError, ValueError):
        return open(os.devnull, "w")
