"""What is counted and timed between two steps, until the step's metrics are written."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rljax.metrics.mean import Mean


class Accumulator:
    """Counts and values that gather until they are drained. The order they come in changes no bit
    of what is drained.

    Example: accumulator.count("rollout/rejected"); accumulator.observe("rollout/reward", [1.0]);
    accumulator.drain()
    """

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._values: dict[str, list[float]] = {}

    def count(self, name: str, amount: float = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + amount

    def observe(self, name: str, values: Iterable[float]) -> None:
        self._values.setdefault(name, []).extend(values)

    def drain(self) -> dict[str, Mean]:
        """All so far, counts as one number a step; what is counted once stays on record as 0."""
        counts = {name: Mean(float(n), 1) for name, n in self._counts.items()}
        drained = counts | {name: Mean.of(values) for name, values in self._values.items()}
        self._values, self._counts = {}, dict.fromkeys(self._counts, 0)
        return drained

    def state(self) -> dict[str, Any]:
        """JSON values."""
        return {"counts": self._counts, "values": self._values}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._counts, self._values = dict(state["counts"]), {name: list(values) for name, values in state["values"].items()}


class PhaseTimer:
    """Seconds spent in each phase of a step, as `timeperf/<phase>`. Every phase is a sign of life.

    Example:

        timer = PhaseTimer(watchdog.beat)
        with timer.phase("update"):
            ...
        timer.drain()
    """

    def __init__(self, beat: Callable[[str], None]) -> None:
        self._beat = beat
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._beat(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
            self._beat(f"{name} done")

    def drain(self) -> dict[str, Mean]:
        drained = {f"timeperf/{name}": Mean(seconds, 1) for name, seconds in self._seconds.items()}
        self._seconds = {}
        return drained
