"""The sink that writes plan.json: memory and time as estimated, and as measured since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rljax.metrics.guardrails import Event
from rljax.metrics.histogram import Histogram
from rljax.metrics.mean import Mean
from rljax.sinks import Status
from rljax.sinks.run_directory import RunDirectory, dump
from rljax.types import Group, Trajectory

FILE = "plan.json"
PEAK = "memory/learner_peak_bytes"
MEASURED = (PEAK, "timeperf/update_tokens_per_s", "timeperf/wall")


class PlanSink:
    """Writes the estimate at once, and what was measured beside it when it is closed.

    A resumed run writes the file anew.
    """

    def __init__(self, run: RunDirectory, estimate: Mapping[str, Any]) -> None:
        """Raises UserError if the disk can't be written."""
        self._run, self._estimate = run, estimate
        self._measured: dict[str, float] = {}
        self._save()

    def write(self, step: int, metrics: Mapping[str, Mean]) -> None:
        """Keeps the largest peak, and of times those of the last step, which compiles nothing."""
        for name in MEASURED:
            if name in metrics and metrics[name].count:
                value = metrics[name].value
                self._measured[name] = max(value, self._measured.get(name, value)) if name == PEAK else value

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Histograms are in histograms.jsonl."""

    def sample(self, step: int, uid: str, trajectory: Trajectory, advantage: np.ndarray) -> None:
        """Samples are in samples.jsonl."""

    def group(self, step: int, group: Group, advantages: Sequence[np.ndarray]) -> None:
        """Groups are in what the run directory keeps of them."""

    def evaluated(self, step: int, name: str, uid: str, trajectory: Trajectory) -> None:
        """Evaluations are in evaluations/."""

    def event(self, event: Event) -> None:
        """Events are in guard.jsonl."""

    def status(self, status: Status) -> None:
        """Status is in status.json."""

    def close(self) -> None:
        self._save()

    def _save(self) -> None:
        self._run.write_text(FILE, dump({"estimated": self._estimate, "measured": self._measured}) + "\n")
