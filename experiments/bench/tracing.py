"""Cost of rollout.enable_rollout_tracing, in CPU time of a quickstart step.

    python -m experiments.bench.tracing --pairs=5

Runs of a few steps follow each other in pairs, one traced and one not, in turns which is first.
The difference of two runs is mostly noise, where a trace costs less than one percent. So the
events of a step are counted too, and multiplied with the CPU time of one: `with span`, the queue,
and its line of JSON, which the writing thread makes.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from absl import flags

from rljax.errors import UserError
from rljax.experiments import main
from rljax.tracing.events import Event, Process, encode
from rljax.tracing.tracer import Span, Tracer

PAIRS = flags.DEFINE_integer("pairs", 3, "Pairs of runs, one of them traced.", lower_bound=1)
STEPS = flags.DEFINE_integer("steps", 10, "Steps of each run; the first compiles and is left out.", lower_bound=2)
CONFIG = flags.DEFINE_string("run", "quickstart", "Config of the runs.")
EVENTS = 20_000


class Queue:
    """Sink that keeps events, as a TraceFile does until its thread takes them."""

    def __init__(self) -> None:
        self.events: deque[tuple[Process, Event]] = deque()

    def add(self, process: Process, event: Event) -> None:
        self.events.append((process, event))


def bench() -> None:
    cost = min(_seconds_per_event() for _ in range(5))
    traced: list[float] = []
    plain: list[float] = []
    events: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        for pair in range(PAIRS.value):
            for on in (pair % 2 == 0, pair % 2 == 1):
                workdir = Path(scratch) / f"{pair}-{on}"
                seconds = _run(workdir, on)
                (traced if on else plain).append(seconds)
                if on:
                    events.append(_lines(workdir / "trace.json") / STEPS.value)
    step, count = statistics.median(plain), statistics.median(events)
    found = {
        "cpu_seconds_per_step": round(step, 4),
        "traced": round(statistics.median(traced), 4),
        "runs": {"traced": [round(s, 4) for s in traced], "not": [round(s, 4) for s in plain]},
        "events_per_step": round(count, 1),
        "microseconds_per_event": round(cost * 1e6, 2),
        "share": round(count * cost / step, 5),
    }
    print(json.dumps(found))


def _run(workdir: Path, on: bool) -> float:
    """Trains for some steps. Returns CPU seconds per step, those of child processes included.

    Start-up and the first step, a run of their own, are left out.
    """
    settings: dict[str, object] = {
        "rollout.enable_rollout_tracing": on,
        "warmup.steps": 0,
        "evaluator.freq_steps": None,
        "saver.export_final": False,
        "stats_logger.live": False,
    }
    short = _cpu(workdir / "short", settings | {"total_train_steps": 1})
    return (_cpu(workdir, settings | {"total_train_steps": STEPS.value}) - short) / (STEPS.value - 1)


def _cpu(workdir: Path, settings: Mapping[str, object]) -> float:
    """Runs experiments.train to its end. Returns its CPU seconds."""
    command = [sys.executable, "-m", "rljax.experiments.train", f"--config={CONFIG.value}", f"--workdir={workdir}"]
    command += [f"--config.{key}={value}" for key, value in settings.items()]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"the run ended with status {done.returncode}: {done.stderr.strip().splitlines()[-1]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _lines(path: Path) -> int:
    return sum(line.startswith("{") for line in path.read_text().splitlines())


def _seconds_per_event() -> float:
    """Measures the CPU time of a span, half of them nested, and of its line in the file."""
    queue = Queue()
    tracer, start = Tracer(queue, Process(1, "bench")), time.process_time()
    for index in range(EVENTS // 2):
        with Span(tracer, "trajectory", "", "trajectory", {"uid": "0/17", "seed": index}) as outer:
            with Span(tracer, "generate", "", "", {}) as inner:
                inner.note(tokens=5, finish="stop")
            outer.note(reward=1.0, tokens=9)
    while queue.events:
        _, event = queue.events.popleft()
        encode(event, 1, event.track, 0)
    return (time.process_time() - start) / EVENTS


if __name__ == "__main__":
    main.run_main(bench)
