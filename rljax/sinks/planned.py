"""The sink that writes plan.json: memory and time as estimated, and as measured since."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import numpy as np

from rljax.metrics.mean import Mean, merge
from rljax.sinks import PartialSink, Status
from rljax.sinks.run_directory import RunDirectory, dump

FILE = "plan.json"
PEAKS = ("memory/learner_peak_bytes", "memory/sampler_peak_bytes")
RATES = ("timeperf/learner_tokens_per_s", "timeperf/sampler_tokens_per_s")
WALL = "timeperf/wall"
MOST_STEPS = 256  # whose seconds are kept, the newest


class PlanSink(PartialSink):
    """Writes the estimate at once, and what was measured beside it when it is closed.

    A resumed run writes the file anew.
    """

    def __init__(self, run: RunDirectory, estimate: Mapping[str, Any]) -> None:
        """Raises UserError if the disk can't be written."""
        self._run, self._estimate = run, estimate
        self._peaks: dict[str, float] = {}
        self._rates: dict[str, Mean] = {}
        self._walls = collections.deque[float](maxlen=MOST_STEPS)
        self._compiled = False  # a step with an update was written; the first one compiles
        self._save()

    def write(self, step: int, metrics: Mapping[str, Mean]) -> None:
        """Keeps the largest peaks, and times of RL steps but the first.

        Rates are of all tokens in all of the time, as a step's tokens may have been sampled before.
        """
        for name in PEAKS:
            if name in metrics:
                self._peaks[name] = max(metrics[name].value, self._peaks.get(name, 0.0))
        if RATES[0] not in metrics:
            return
        if self._compiled:
            self._rates = merge([self._rates, {name: metrics[name] for name in RATES if name in metrics}])
            self._walls.extend(metrics[name].value for name in (WALL,) if name in metrics)
        self._compiled = True

    def status(self, status: Status) -> None:
        """Status is in status.json."""

    def close(self) -> None:
        self._save()

    def _save(self) -> None:
        times = {name: rate.value for name, rate in self._rates.items() if rate.count}
        if self._walls:
            times[WALL] = float(np.median(self._walls))
        self._run.write_text(FILE, dump({"estimated": self._estimate, "measured": self._peaks | times}) + "\n")
