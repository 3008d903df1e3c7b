"""Traces of what a device did, and which operations took the time.

python -m rljax.backends.jax.profile DIRECTORY     # of `jax.profile`: the newest trace, as a table
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

log = logging.getLogger(__name__)

SKIPPED = 2  # steps before those that are traced
TRACED = 3
NO_WORK = ("end: ", "ThreadpoolListener", "ThunkExecutor", "SlinkyThreadPool")  # in a trace of the CPU


def newest_trace(directory: Path) -> Path:
    """The trace file that `jax.profiler.trace(directory)` wrote last."""
    return max(Path(directory).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)


class Span(NamedTuple):
    """An operation on a thread, from when to when, in nanoseconds."""

    name: str
    start: float
    end: float


def op_times(trace: Path) -> list[tuple[str, float, int]]:
    """(name, milliseconds, calls) of every kernel of the first GPU, longest first; on the CPU, of
    every operation, without the time of those inside it, summed over threads.
    """
    times: collections.defaultdict[str, float] = collections.defaultdict(float)
    calls: collections.Counter[str] = collections.Counter()
    for spans in _device_lines(trace):
        for span, alone in own_times(spans):
            times[span.name] += alone / 1e6
            calls[span.name] += 1
    return [(name, time, calls[name]) for name, time in sorted(times.items(), key=lambda item: -item[1])]


def own_times(spans: list[Span]) -> list[tuple[Span, float]]:
    """Each span of a thread with its nanoseconds less those of the spans inside it."""
    found: list[tuple[Span, float]] = []
    open_spans: list[list[Any]] = []  # outermost first: span, time of those inside
    for span in [*sorted(spans, key=lambda each: (each.start, -each.end)), Span("", math.inf, math.inf)]:
        while open_spans and open_spans[-1][0].end <= span.start:
            ended, inside = open_spans.pop()
            found.append((ended, ended.end - ended.start - inside))
            if open_spans:
                open_spans[-1][1] += ended.end - ended.start
        open_spans.append([span, 0.0])
    return found


def _device_lines(trace: Path) -> Iterator[list[Span]]:
    planes = {plane.name: plane for plane in ProfileData.from_file(str(trace)).planes}
    gpu = planes.get("/device:GPU:0")
    threads = ("Stream",) if gpu else ("tf_XLAPjRtCpuClient", "tf_XLAEigen")  # on the CPU: those that run operations
    for line in (gpu or planes["/host:CPU"]).lines:
        if line.name.startswith(threads):
            events = ((_plain(event.name), event.start_ns, event.duration_ns) for event in line.events)
            yield [Span(name, start, start + duration) for name, start, duration in events if name]


def _plain(name: str) -> str:
    """An operation without the number of its instance; nothing for a mark, or a thread that waits."""
    return "" if name.startswith(NO_WORK) else re.sub(r"[.\d]+$", "", name)


def table(trace: Path, rows: int = 40) -> str:
    """The operations that took most, as text."""
    ops = op_times(trace)
    total = sum(time for _, time, _ in ops) or 1.0
    lines = [f"{time:10.3f} ms {time / total:6.1%} {count:6d}  {name}" for name, time, count in ops[:rows]]
    return "\n".join([f"{total:10.3f} ms on the device, all operations", *lines])


class StepTrace:
    """Writes a trace of a few steps of a run, from the third on: the first two compile.

    Example: trace = StepTrace(directory); with trace.step(): learner.update(batch)
    """

    def __init__(self, directory: str) -> None:
        """
        Args:
          directory: where the trace goes, for TensorBoard, XProf or Perfetto; empty: nothing is
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


if __name__ == "__main__":
    print(table(newest_trace(Path(sys.argv[1]))))
