"""Signals that ask a run to save and exit, and any other command to end.

    in a command's set-up     the first raises `Stopped` in the main thread, until it gets through
    in `raise_on_signals`     the same, in a program of somebody's own
    in `on_stop_signal`       the first calls back
    after each                the next one ends the process at once; a program gets it as usual

Python drops what is raised in a callback of the garbage collector or a finalizer ("Exception
ignored in ..."), and anybody's `except BaseException` may catch it. A thread sees that the
exception is gone without having ended the command, and signals again.
"""

from __future__ import annotations

import _thread
import asyncio
import atexit
import dataclasses
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from rljax.process.first_signals import STOP_SIGNALS

PATIENCE = 0.05  # seconds between two looks at whether a stop gets through
_SHOW_CURSOR = b"\x1b[?25h"  # the live view hides it

_last_words: list[Callable[[str], None]] = []  # what a process does before it ends at once
_waiting: list[Callable[[], None]] = []  # one per block of `on_stop_signal` in this process, whatever its thread


def request_stop() -> None:
    """Does what a first stop signal does, from any thread."""
    for stop in list(_waiting):
        stop()


class Stopped(KeyboardInterrupt):
    """The end of a command by a signal. Its message is one line."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number

    def __reduce__(self) -> tuple[type[Stopped], tuple[int]]:
        """Ranks tell each other what ended their part of a save, by pickling it."""
        return type(self), (self.number,)


class _Asked:
    """The stop that a signal has asked for in a set-up, until the command or the run ends of it.

    Args:
      ends: a second signal ends the process; else it raises again.
    """

    def __init__(self, *, ends: bool = True) -> None:
        self.ends = ends
        self.number: int | None = None  # of the first signal
        self.is_over = False  # the command ends, of whatever
        self.is_told = False  # and its line is on the screen
        self.insists = False  # the next signal is our own
        self.raised: Callable[[], Stopped | None] = lambda: None  # a weak reference: it says whether that is on its way

    def stop(self) -> Stopped:
        """Returns a new exception, to be raised at once."""
        assert self.number is not None
        stopped = Stopped(self.number)
        self.raised = weakref.ref(stopped)
        self.insists = False
        return stopped

    def is_open(self) -> bool:
        """Returns whether a stop was asked for, and the command has not ended of it."""
        return self.number is not None and not self.is_over and signal.getsignal(self.number) is _raise

    def insist(self) -> None:
        """Signals again whenever the exception has gone without an end of the command."""
        main = threading.main_thread().ident
        assert main is not None and self.number is not None
        while not self.is_over:
            time.sleep(PATIENCE)
            if self.is_open() and not self.insists and self.raised() is None:
                self.insists = True
                signal.pthread_kill(main, self.number)


_asked = _Asked()


def end_on_signals() -> None:
    """Has stop signals raise `Stopped` in the main thread, at once.

    It is raised again if it was lost; a second signal ends the process. Signals that the process
    was started to ignore (nohup) stay ignored.
    """
    global _asked
    atexit.unregister(_leave)
    atexit.register(_leave)  # what is registered later is called before it
    _asked.is_over = True
    _asked = _Asked()
    for number in _handled():
        signal.signal(number, _raise)


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Has stop signals raise `Stopped` in the main thread within the block, like `end_on_signals`.

    For a library: it takes over those signals alone that Python or the system would handle, gives
    them back, and ends no process. Without it asyncio lets the first Ctrl-C wait for the next await
    of its main task. Outside the main thread it does nothing.
    """
    global _asked
    taken = {n: h for n in _handled() if (h := signal.getsignal(n)) in (signal.SIG_DFL, signal.default_int_handler)}
    if taken:
        _asked = _Asked(ends=False)
    own = _asked
    for number in taken:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        own.is_over = own.is_over or bool(taken)
        for number, handler in taken.items():
            signal.signal(number, handler)


def command_ends(line: str = "") -> None:
    """Notes that the command ends: of a stop signal, with `line` on the screen, or by itself."""
    _asked.is_over, _asked.is_told = True, _asked.is_told or bool(line)


def _leave() -> None:
    """Ends a process that a signal has stopped, with that status and without Python's finalization.

    That would take no second signal, and be aborted by a thread that is still in a library of C++.
    """
    if _asked.is_told and _asked.number is not None:
        _flush()
        os._exit(128 + _asked.number)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the main thread may be within a write
            stream.flush()


def require_no_stop() -> None:
    """Raises `Stopped` if a signal has asked for a stop, though the exception was caught and kept."""
    if threading.current_thread() is threading.main_thread() and _asked.is_open():
        raise _asked.stop()


@contextmanager
def last_words(say: Callable[[str], None]) -> Iterator[None]:
    """Calls `say` with one line if a second signal ends the process within the block."""
    _last_words.append(say)
    try:
        yield
    finally:
        _last_words.remove(say)


def _raise(number: int, frame: FrameType | None) -> None:
    if _asked.number is None and not _asked.is_over:
        _asked.number = number
        with suppress(RuntimeError):  # no thread to be had: it is raised all the same
            _thread.start_new_thread(_asked.insist, ())  # takes no lock, which the main thread may hold just now
        raise _asked.stop()
    if (_asked.insists or not _asked.ends) and not _asked.is_over:
        raise _asked.stop()
    if _asked.ends:
        _end(number, frame)
    raise Stopped(number)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the process at once, as threads that compile or collect would not let it end soon.

    Finalizing Python while they run aborts it, too.
    """
    line = f"stopped by {signal.Signals(number).name}"
    for say in reversed(_last_words):
        with suppress(Exception):
            say(line)
    _flush()
    with suppress(OSError):
        if os.isatty(1):
            os.write(1, _SHOW_CURSOR)
        if not _asked.is_told:
            os.write(2, f"error: {line}\n".encode())
    os._exit(128 + number)


def _handled() -> list[signal.Signals]:
    """Returns the stop signals that are not ignored; none outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@dataclasses.dataclass
class Answered:
    """The stop that a block of `on_stop_signal` has answered."""

    is_asked: bool = False
    number: int | None = None  # of the signal; None without a stop, or if `request_stop` asked for it


@contextmanager
def on_stop_signal(callback: Callable[[], None]) -> Iterator[Answered]:
    """Calls `callback` on the event loop at the first stop signal within the block.

    A second signal ends the process: at once after `end_on_signals`, else as usual. Signals that
    the process was started to ignore (nohup) stay ignored. Outside the main thread no signal is
    handled: there `request_stop` asks.

    Raises `Stopped` for an earlier signal whose exception was lost.
    """
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _handled()}
    answered = Answered()

    def stop(number: int | None = None) -> None:
        if answered.is_asked:
            return
        answered.is_asked, answered.number = True, number
        callback()
        for number in before:
            loop.remove_signal_handler(number)
            if before[number] is _raise and _asked.ends:
                signal.signal(number, _end)

    def from_any_thread() -> None:
        loop.call_soon_threadsafe(stop)

    require_no_stop()
    for number in before:
        loop.add_signal_handler(number, stop, number)
    _waiting.append(from_any_thread)
    try:
        yield answered
    finally:
        _waiting.remove(from_any_thread)
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            if not answered.is_asked:
                signal.signal(number, handler)
