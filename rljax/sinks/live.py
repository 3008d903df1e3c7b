"""Progress of a run: live on a terminal, or as a plain line every few seconds."""

from __future__ import annotations

import collections
import datetime
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from rljax.metrics.mean import Mean, merge
from rljax.sinks import PartialSink, RunState, Status

# Metrics on the terminal, in this order, and their short names.
SHOWN = {
    "rollout/reward": "reward",
    "eval-rollout/reward": "eval reward",
    "warmup/loss": "warm-up loss",
    "sft/loss": "supervised loss",
    "ppo_actor/update/loss": "loss",
    "ppo_actor/update/entropy": "entropy (nats)",
    "ppo_actor/update/approx_kl": "approx kl (nats)",
    "ppo_actor/update/importance_weight": "importance weight",
    "ppo_actor/update/clip_ratio": "clip ratio",
    "ppo_actor/update/grad_norm": "grad norm",
    "ppo_actor/seq_len": "tokens per sequence",
    "ppo_actor/no_eos_ratio": "no EOS",
    "rollout/staleness": "lag (versions)",
    "critic/explained_variance": "explained variance",
}
RATES = ("timeperf/generated_tokens_per_s", "timeperf/trained_tokens_per_s")  # the first that there is
DUMB = ("dumb", "unknown")  # values of TERM: such a terminal, as of an editor, only goes on
WALL = "timeperf/wall"
WARMUP = "warmup/loss"
RECENT = 50  # steps from which the time that is left is estimated
ON_A_LINE = ("rollout/reward", "eval-rollout/reward", "warmup/loss", "sft/loss", "ppo_actor/update/loss", "rollout/staleness")


class Pace:
    """Estimates the time that is left, from recent steps of the kind that is left.

    Steps of a warm-up take less than those behind it, of which nothing is known before there are
    some: until then there is no estimate.
    """

    def __init__(self) -> None:
        self._ended: collections.deque[tuple[int, float]] = collections.deque(maxlen=RECENT + 1)  # steps, and when
        self._start: int | None = None  # finished steps when the run began
        self._version = 0  # 0 in supervised steps
        self._warms_up = False

    def see(self, metrics: Mapping[str, Mean]) -> None:
        """Learns from a step's metrics whether it is one of a warm-up."""
        self._warms_up |= WARMUP in metrics

    def status(self, status: Status) -> None:
        """Notes when a step ended. The first status is of the start, before anything is compiled."""
        if self._start is None:
            self._start = status.step
        if status.version and not self._version:
            self._ended.clear()
        self._version = status.version
        if status.step > (self._ended[-1][0] if self._ended else self._start):
            self._ended.append((status.step, time.monotonic()))

    def left(self, status: Status) -> datetime.timedelta | None:
        """Returns the time that is left after a status, whole seconds; None where it is not known."""
        if not status.total_steps or len(self._ended) < 2 or (self._warms_up and not status.version):
            return None
        (step, since), (last, then) = self._ended[0], self._ended[-1]
        return datetime.timedelta(seconds=round((status.total_steps - last) * (then - since) / (last - step)))


class LineSink(PartialSink):
    """Sink for logs and pipes: a line every few seconds, with means since the last one.

    The first step has a line, and so have a new verdict and the end.
    """

    def __init__(self, stream: TextIO | None = None, *, every: float = 0.0) -> None:
        """
        Args:
          every: least seconds between two lines; 0 for a line per step.
        """
        self._stream = stream or sys.stdout
        self._every = every
        self._latest: dict[str, Mean] = {}  # not printed yet
        self._status: Status | None = None
        self._pace = Pace()
        self._last_line = -math.inf

    def write(self, step: int, metrics: Mapping[str, Mean]) -> None:
        self._latest = merge([self._latest, metrics])
        self._pace.see(metrics)
        if self._status is not None and step == self._status.step:
            self._print(self._status)

    def status(self, status: Status) -> None:
        before, self._status = self._status, status
        self._pace.status(status)
        self._print(status)
        if status.verdict and (before is None or before.verdict != status.verdict):
            self._write(f"verdict: {status.verdict}")

    def _print(self, status: Status) -> None:
        """Prints the metrics of ON_A_LINE since the last line, if a line is due and there are any."""
        now, running = time.monotonic(), status.state is RunState.RUNNING
        shown = [f"{SHOWN[name]} {self._latest[name].value:.4g}" for name in ON_A_LINE if name in self._latest]
        if running and (not shown or now - self._last_line < self._every):
            return
        total = status.total_steps or 0
        of_total = f"/{total}" if total >= status.step else f" ({total} asked for)" if total else ""
        step = f"step {status.step}{of_total}"
        rest = self._rates(status) if running else [str(status.state)]
        self._write("  ".join([time.strftime("%H:%M:%S"), step, *shown, *rest]))
        self._latest, self._last_line = {}, now

    def _rates(self, status: Status) -> list[str]:
        """Returns tokens per second, seconds per step and the time that is left, where known."""
        rates = [self._latest[name] for name in RATES if name in self._latest and self._latest[name].sum]
        found = [f"{rates[0].value:.4g} tokens/s"] if rates else []
        if (wall := self._latest.get(WALL)) is not None:
            found.append(f"{wall.value:.3g} s/step")
        if (left := self._pace.left(status)) is not None:
            found.append(f"{left} left")
        return found

    def _write(self, line: str) -> None:
        try:
            print(line, file=self._stream, flush=True)
        except BrokenPipeError:  # the reader, such as `head`, is gone; the run goes on without
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())

    def close(self) -> None:
        """Leaves the stream open; the caller owns it."""


def can_be_live(stream: TextIO) -> bool:
    """Returns whether a stream is a terminal that can draw over what it shows."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in DUMB


class LiveSink(PartialSink):
    """Sink for a terminal: a progress bar and a table of the latest values with their history."""

    def __init__(self) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._history: dict[str, list[float]] = {}
        self._progress = Progress(
            *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
            TextColumn("{task.fields[left]}"),
        )
        self._task = self._progress.add_task("starting", total=None, left="")
        self._pace = Pace()
        self._verdict = ""
        # What is written to sys.stderr meanwhile goes above the table, unless it is redirected to a file
        self._live = Live(self._progress, refresh_per_second=4, redirect_stderr=sys.stderr.isatty())
        self._live.start()

    def write(self, step: int, metrics: Mapping[str, Mean]) -> None:
        self._pace.see(metrics)
        for name in SHOWN:
            if name in metrics and metrics[name].count:
                self._history.setdefault(name, []).append(metrics[name].value)
        self._draw()

    def status(self, status: Status) -> None:
        self._pace.status(status)
        left = self._pace.left(status)
        self._progress.update(
            self._task,
            left="" if left is None else f"{left} left",
            completed=status.step,
            total=status.total_steps,
            description=f"{status.state}, version {status.version}",
        )
        self._verdict = status.verdict
        self._draw()

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> None:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for name, short in SHOWN.items():
            if name in self._history:
                table.add_row(short, f"{self._history[name][-1]:.4g}", sparkline(self._history[name][-40:]))
        verdict = [Text(f"verdict: {self._verdict}")] if self._verdict else []  # Text: brackets in it are no markup
        self._live.update(Group(self._progress, table, *verdict))


def sparkline(values: Sequence[float]) -> str:
    """Draws one block character per value, from the least (▁) to the greatest (█).

    A value that is not finite is a space.
    """
    blocks = "▁▂▃▄▅▆▇█"
    finite = [value for value in values if abs(value) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((value - low) * scale)] if abs(value) < float("inf") else " " for value in values)
