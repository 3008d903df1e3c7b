"""Sinks of a run's metrics, samples and status: the run directory, terminal, TensorBoard, W&B.

run = RunDirectory(workdir)                   # locked: two runs never share a directory
sinks = build(config, run, tokenizer, first_step=12)
sinks.write(13, metrics)                      # may be called several times for step 13
sinks.histograms(13, histograms)
sinks.sample(13, "0/17", trajectory, advantage)
sinks.group(13, group, advantages)
sinks.evaluated(13, "math", "17", trajectory)
sinks.event(Event(13, "max_approx_kl", ...))  # an action of a guardrail
sinks.status(Status(RunState.RUNNING, step=13, version=13, total_steps=100))
sinks.close()

build.py          the sinks that a config asks for
run_directory.py  the run directory, and the sink that writes its files
config_record.py  configs of a run; context.py, what else may explain a difference
planned.py        plan.json
live.py           progress on a terminal or as lines
tensorboard.py    TensorBoard; wandb.py, Weights & Biases
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from rljax.metrics.guardrails import Event
from rljax.metrics.histogram import Histogram
from rljax.metrics.mean import Mean
from rljax.types import Group, Trajectory


class RunState(enum.StrEnum):
    """State of a run, as status.json gives it."""

    RUNNING = "running"
    STOPPED = "stopped"  # saved after a signal; the same command resumes it
    FINISHED = "finished"
    INCOMPLETE = "incomplete"  # the prompts ran out long before the steps that were asked for
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Status:
    """Status of a run.

    Example: Status(RunState.FAILED, step=12, version=12, total_steps=100, error="disk full")
    """

    state: RunState
    step: int  # training steps finished
    version: int  # of the sampling weights
    total_steps: int | None = None
    error: str | None = None  # one line, if the run failed or is incomplete
    verdict: str = ""  # one line of the doctor's; empty if it has not judged

    @property
    def has_ended(self) -> bool:
        """True if the run came to its end by itself."""
        return self.state in (RunState.FINISHED, RunState.INCOMPLETE)


class Sink(Protocol):
    """Receiver of a run's metrics, samples and status. `Sinks` calls it in one thread at a time."""

    def write(self, step: int, metrics: Mapping[str, Mean]) -> None:
        """Writes metrics of a step. Steps never decrease; several writes of one step merge."""
        ...

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Writes the histograms of a step, by the names of metrics. A sink may drop them."""
        ...

    def sample(self, step: int, uid: str, trajectory: Trajectory, advantage: np.ndarray) -> None:
        """Writes one trajectory of a batch. A sink may drop samples.

        Args:
          advantage: of each token, [T]; only that of trained tokens means anything.
        """
        ...

    def group(self, step: int, group: Group, advantages: Sequence[np.ndarray]) -> None:
        """Writes a whole group of a batch. A sink may drop it.

        Args:
          advantages: of its trajectories, [T] each; only those of trained tokens mean anything.
        """
        ...

    def evaluated(self, step: int, name: str, uid: str, trajectory: Trajectory) -> None:
        """Writes a trajectory of an evaluation. A sink may drop it.

        Args:
          name: of the set; empty for valid_dataset.
        """
        ...

    def event(self, event: Event) -> None:
        """Writes an action of a guardrail. A sink may drop it."""
        ...

    def status(self, status: Status) -> None:
        """Writes the run's status."""
        ...

    def close(self) -> None:
        """Flushes and closes the sink."""
        ...


class PartialSink:
    """Base of sinks that drop what a sink may drop: the run directory has all of it.

    A subclass has `write`, `status` and `close`, and what it does not drop.
    """

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Histograms are in histograms.jsonl."""

    def sample(self, step: int, uid: str, trajectory: Trajectory, advantage: np.ndarray) -> None:
        """Samples are in samples.jsonl."""

    def group(self, step: int, group: Group, advantages: Sequence[np.ndarray]) -> None:
        """Groups are in groups.jsonl."""

    def evaluated(self, step: int, name: str, uid: str, trajectory: Trajectory) -> None:
        """Samples of evaluations are in eval_samples.jsonl."""

    def event(self, event: Event) -> None:
        """Events are in guard.jsonl, and in the log; their counts are metrics."""


class Sinks:
    """Several sinks as one. Callable in any thread."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._lock = threading.Lock()

    def write(self, step: int, metrics: Mapping[str, Mean]) -> None:
        with self._lock:
            for sink in self._sinks:
                sink.write(step, metrics)

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        with self._lock:
            for sink in self._sinks:
                sink.histograms(step, histograms)

    def sample(self, step: int, uid: str, trajectory: Trajectory, advantage: np.ndarray) -> None:
        with self._lock:
            for sink in self._sinks:
                sink.sample(step, uid, trajectory, advantage)

    def group(self, step: int, group: Group, advantages: Sequence[np.ndarray]) -> None:
        with self._lock:
            for sink in self._sinks:
                sink.group(step, group, advantages)

    def evaluated(self, step: int, name: str, uid: str, trajectory: Trajectory) -> None:
        with self._lock:
            for sink in self._sinks:
                sink.evaluated(step, name, uid, trajectory)

    def event(self, event: Event) -> None:
        with self._lock:
            for sink in self._sinks:
                sink.event(event)

    def status(self, status: Status) -> None:
        with self._lock:
            for sink in self._sinks:
                sink.status(status)

    def close(self) -> None:
        with self._lock:
            for sink in self._sinks:
                sink.close()
