"""Traces of what a device did, and which kernels took the time."""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.profiler import ProfileData

log = logging.getLogger(__name__)

SKIPPED = 2  # steps before those that are traced
TRACED = 3


def newest_trace(directory: Path) -> Path:
    """The trace file that `jax.profiler.trace(directory)` wrote last."""
    return max(Path(directory).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)


def kernel_times(trace: Path) -> list[tuple[str, float, int]]:
    """(name, milliseconds, calls) of every kernel of the first GPU, longest first."""
    times: collections.Counter[str] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()
    for plane in ProfileData.from_file(str(trace)).planes:
        if plane.name != "/device:GPU:0":
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                times[event.name] += event.duration_ns / 1e6
                calls[event.name] += 1
    return [(name, time, calls[name]) for name, time in times.most_common()]


def table(trace: Path, rows: int = 40) -> str:
    """The kernels that took most, as text."""
    kernels = kernel_times(trace)
    total = sum(time for _, time, _ in kernels)
    lines = [f"{time:10.3f} ms {time / total:6.1%} {count:6d}  {name}" for name, time, count in kernels[:rows]]
    return "\n".join([f"{total:10.3f} ms on the GPU, all kernels", *lines])


class StepTrace:
    """Writes a trace of a few steps of a run, from the third on: the first two compile.

    Example: trace = StepTrace(directory); with trace.step(): learner.update(batch)
    """

    def __init__(self, directory: str) -> None:
        """directory: where the trace goes, for TensorBoard, XProf or Perfetto; empty: nothing is
        written.
        """
        self._directory = directory
        self._steps = 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around each step."""
        if self._directory and self._steps == SKIPPED:
            jax.profiler.start_trace(self._directory)
        yield
        self._steps += 1
        if self._directory and self._steps == SKIPPED + TRACED:
            jax.profiler.stop_trace()
            log.info("jax.profile: %d updates are in %s", TRACED, newest_trace(Path(self._directory)))
