"""Signals that ask a run to save and exit."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def stopping(act: Callable[[], None]) -> Iterator[None]:
    """Calls `act` on the event loop at the first of them. A second one ends the process as it
    always did, and one that the process was started to ignore (nohup) stays ignored. Off the main
    thread there are no signals.
    """
    loop = asyncio.get_running_loop()
    mine = threading.current_thread() is threading.main_thread()
    names = [name for name in STOPPING if mine and signal.getsignal(name) is not signal.SIG_IGN]

    def stop() -> None:
        act()
        for name in names:
            loop.remove_signal_handler(name)

    for name in names:
        loop.add_signal_handler(name, stop)
    try:
        yield
    finally:
        for name in names:
            loop.remove_signal_handler(name)
