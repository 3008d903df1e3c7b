"""Counters, observations and timers between two steps, until the step's metrics are written."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rljax import tracing
from rljax.metrics.mean import Mean


class Accumulator:
    """Counters and values that accumulate until they are drained.

    The order in which values arrive does not change a bit of the result.

    Example:

        accumulator.count("rollout/rejected")
        accumulator.observe("rollout/reward", [1.0])
        accumulator.drain()
    """

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._values: dict[str, list[float]] = {}
        self._shares: dict[str, list[int]] = {}  # hits and tries

    def count(self, name: str, amount: float = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + amount

    def observe(self, name: str, values: Iterable[float]) -> None:
        self._values.setdefault(name, []).extend(float(value) for value in values)

    def share(self, name: str, hit: bool) -> None:
        """Counts a try, and whether it was a hit: the metric is the share of hits."""
        hits, tries = self._shares.get(name, (0, 0))
        self._shares[name] = [hits + bool(hit), tries + 1]

    def drain(self) -> dict[str, Mean]:
        """Returns all metrics since the last call, and clears them.

        Counters that were used once are reported as 0 from then on.
        """
        counts = {name: Mean(float(n), 1) for name, n in self._counts.items()}
        shares = {name: Mean(hits, tries) for name, (hits, tries) in self._shares.items()}
        drained = counts | shares | {name: Mean.of(values) for name, values in self._values.items()}
        self._values, self._shares, self._counts = {}, {}, dict.fromkeys(self._counts, 0)
        return drained

    def state(self) -> dict[str, Any]:
        """Returns the state as JSON values."""
        return {"counts": self._counts, "values": self._values, "shares": self._shares}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._counts, self._values = dict(state["counts"]), {name: list(values) for name, values in state["values"].items()}
        self._shares = dict(state.get("shares", {}))  # older checkpoints have none


class PhaseTimer:
    """Timer of the phases of a step: seconds as `timeperf/<phase>`.

    Each phase is a watchdog beat, and a span of the trace.

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
            with tracing.span(name, track="loop"):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
            self._beat(f"{name} done")

    def drain(self) -> dict[str, Mean]:
        drained = {f"timeperf/{name}": Mean(seconds, 1) for name, seconds in self._seconds.items()}
        self._seconds = {}
        return drained
