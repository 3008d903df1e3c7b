"""Traces of what a device did, and which kernels took the time."""

from __future__ import annotations

import collections
from pathlib import Path

from jax.profiler import ProfileData


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
