"""Signals that ask a run to save and exit, and any other command to end."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from rljax.process.first_signals import STOP_SIGNALS

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


def end_on_signals() -> None:
    """Has stop signals raise `Stopped` in the main thread, at once.

    Signals that the process was started to ignore (nohup) stay ignored.
    """
    for number in _handled():
        signal.signal(number, _raise)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise Stopped(number)


def _handled() -> list[signal.Signals]:
    """Returns the stop signals that are not ignored; none outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def on_stop_signal(callback: Callable[[], None]) -> Iterator[None]:
    """Calls `callback` on the event loop at the first stop signal within the block.

    A second signal ends the process as usual. Signals that the process was started to ignore
    (nohup) stay ignored. Outside the main thread no signal is handled: there `request_stop` asks.
    """
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _handled()}
    signaled = False

    def stop() -> None:
        nonlocal signaled
        signaled = True
        callback()
        for number in before:
            loop.remove_signal_handler(number)

    def from_any_thread() -> None:
        loop.call_soon_threadsafe(stop)

    for number in before:
        loop.add_signal_handler(number, stop)
    _waiting.append(from_any_thread)
    try:
        yield
    finally:
        _waiting.remove(from_any_thread)
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            if not signaled:
                signal.signal(number, handler)
