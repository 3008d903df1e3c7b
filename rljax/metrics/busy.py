"""Clock of the time in which something is under way, whatever else is at the same time."""

from __future__ import annotations

import time
from types import TracebackType


class BusyClock:
    """Counts seconds in which at least one block is entered. For one thread.

    Example:

        busy = BusyClock()
        with busy:
            await request
        seconds = busy.drain()
    """

    def __init__(self) -> None:
        self._entered, self._since, self._seconds = 0, 0.0, 0.0

    def __enter__(self) -> BusyClock:
        if not self._entered:
            self._since = time.perf_counter()
        self._entered += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._entered -= 1
        if not self._entered:
            self._seconds += time.perf_counter() - self._since

    def drain(self) -> float:
        """Returns the seconds since the last call."""
        if self._entered:
            now = time.perf_counter()
            self._seconds, self._since = self._seconds + now - self._since, now
        seconds, self._seconds = self._seconds, 0.0
        return seconds
