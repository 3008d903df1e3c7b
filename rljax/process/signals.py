"""Signals that ask a run to save and exit."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_waiting: list[Callable[[], None]] = []  # one per block of `on_stop_signal` in this process, whatever its thread


def request_stop() -> None:
    """Does what a first stop signal does, from any thread."""
    for stop in list(_waiting):
        stop()


@contextmanager
def on_stop_signal(callback: Callable[[], None]) -> Iterator[None]:
    """Calls `callback` on the event loop at the first stop signal within the block.

    A second signal ends the process as usual. Signals that the process was started to ignore
    (nohup) stay ignored. Outside the main thread no signal is handled: there `request_stop` asks.
    """
    loop = asyncio.get_running_loop()
    in_main_thread = threading.current_thread() is threading.main_thread()
    handled = [number for number in STOP_SIGNALS if in_main_thread and signal.getsignal(number) is not signal.SIG_IGN]

    def stop() -> None:
        callback()
        for number in handled:
            loop.remove_signal_handler(number)

    def from_any_thread() -> None:
        loop.call_soon_threadsafe(stop)

    for number in handled:
        loop.add_signal_handler(number, stop)
    _waiting.append(from_any_thread)
    try:
        yield
    finally:
        _waiting.remove(from_any_thread)
        for number in handled:
            loop.remove_signal_handler(number)
