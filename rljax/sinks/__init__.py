"""Where a run's metrics, samples and status go: the run directory always, TensorBoard, W&B and the
terminal beside it.

run = RunDirectory(workdir)                   # locked: two runs never share a directory
sinks = build(config, run, tokenizer, first_step=12)
sinks.write(13, metrics)                      # as often as there is something to say about step 13
sinks.sample(13, "0/17", trajectory)
sinks.status(Status(State.RUNNING, step=13, version=13, total_steps=100))
sinks.close()
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from rljax.metrics.mean import Mean
from rljax.types import Trajectory


class State(enum.StrEnum):
    """Of a run."""

    RUNNING = "running"
    STOPPED = "stopped"  # by a signal, and saved: it goes on when it is run again
    FINISHED = "finished"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Status:
    """Where a run is.

    Example: Status(State.FAILED, step=12, version=12, total_steps=100, error="full disk:
    checkpoints/13")
    """

    state: State
    step: int  # training steps finished
    version: int  # publishes the sampling weights have seen
    total_steps: int | None = None
    error: str | None = None  # one line, of a failed run


class Sink(Protocol):
    """What the loop writes to. Calls come from one thread at a time (`Sinks` sees to it)."""

    def write(self, step: int, metrics: Mapping[str, Mean]) -> None:
        """Metrics of a step. Steps never go back; several writes of one step merge."""
        ...

    def sample(self, step: int, uid: str, trajectory: Trajectory) -> None:
        """One trajectory of a batch. Sinks keep as many a step as they want."""
        ...

    def status(self, status: Status) -> None: ...

    def close(self) -> None: ...


class Sinks:
    """Several sinks as one, for callers in any thread."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._lock = threading.Lock()

    def write(self, step: int, metrics: Mapping[str, Mean]) -> None:
        with self._lock:
            for sink in self._sinks:
                sink.write(step, metrics)

    def sample(self, step: int, uid: str, trajectory: Trajectory) -> None:
        with self._lock:
            for sink in self._sinks:
                sink.sample(step, uid, trajectory)

    def status(self, status: Status) -> None:
        with self._lock:
            for sink in self._sinks:
                sink.status(status)

    def close(self) -> None:
        with self._lock:
            for sink in self._sinks:
                sink.close()
