"""What is counted and timed between two steps, until the step's metrics are written."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rljax.metrics import Mean, merge


class Tally:
    """Counts and means that gather until they are drained.

    Example: tally.count("rollout/rejected"); tally.mean("rollout/reward", Mean.of([1.0])); tally.drain()
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._means: dict[str, Mean] = {}

    def count(self, name: str, amount: float = 1) -> None:
        self._counts[name] += amount  # type: ignore[assignment]

    def mean(self, name: str, value: Mean) -> None:
        self._means = merge([self._means, {name: value}])

    def drain(self) -> dict[str, Mean]:
        """All so far, counts as one number a step; what is counted once stays on record as 0."""
        drained = self._means | {name: Mean(float(n), 1) for name, n in self._counts.items()}
        self._means, self._counts = {}, Counter(dict.fromkeys(self._counts, 0))
        return drained

    def state(self) -> dict[str, Any]:
        """JSON values."""
        means = {name: (m.sum, m.count, m.min, m.max) for name, m in self._means.items()}
        return {"counts": dict(self._counts), "means": means}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._counts = Counter(state["counts"])
        self._means = {name: Mean(*values) for name, values in state["means"].items()}


class Clock:
    """Seconds spent in each phase of a step, as `timeperf/<phase>`. Every phase is a sign of life.

    Example:

        clock = Clock(watchdog.beat)
        with clock.phase("update"):
            ...
        clock.drain()
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
