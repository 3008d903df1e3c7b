"""Stop signals while a command still imports its parts: one line and the status of the signal.

It imports next to nothing, so that it comes first. `signals.end_on_signals` takes over.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def end_at_once_on_signals() -> None:
    """Has stop signals end the process. Those that it was started to ignore (nohup) stay ignored."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    # An exception would come out of somebody's import statement, with a traceback or caught there
    os.write(2, f"error: stopped by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)
