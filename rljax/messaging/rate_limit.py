"""Rate limit of log lines that strangers cause: at most one a minute."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

INTERVAL = 60.0  # seconds between two lines


class RateLimited:
    """Says the first line at once, later ones after INTERVAL, with the number of those left out.

    Threads may share it. Example:

        say = RateLimited(log.info)
        say("a connection from 10.0.0.7 was turned away")
    """

    def __init__(self, say: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._lock = threading.Lock()
        self._next = -float("inf")  # when a line may be said again
        self._left_out = 0

    def __call__(self, line: str) -> None:
        with self._lock:
            now = self._clock()
            if now < self._next:
                self._left_out += 1
                return
            self._next = now + INTERVAL
            left_out, self._left_out = self._left_out, 0
        self._say(f"{line} ({left_out} more like it since the last such line)" if left_out else line)
