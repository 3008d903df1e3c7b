"""Reports of a run's steps: metrics, samples and status, to the sinks and the live doctor."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rljax.checkpoints.loop_state import LoopState
from rljax.metrics.accumulator import Accumulator, PhaseTimer
from rljax.metrics.mean import Mean, merge
from rljax.process import memory
from rljax.rollout.batch_metrics import TRAINED_TOKENS
from rljax.rollout.buffer import Buffer
from rljax.rollout.evaluation import Evaluated
from rljax.rollout.limits import total_steps
from rljax.rollout.producer import SAMPLING_SECONDS
from rljax.rollout.tracker import GENERATED_TOKENS
from rljax.run.oversight import Oversight
from rljax.run.parts import Run
from rljax.sinks import RunState, Sink, Status
from rljax.types import Group, Trajectory

WALL = "timeperf/wall"
UPDATED = "timeperf/update_tokens_per_s"  # its sum: tokens of the batch
LEARNER_PHASES = tuple(f"timeperf/{name}" for name in ("score", "reference", "teacher", "values", "update", "update_critic"))
COUNTS = ("rejected", "stale", "stale_tokens", "dropped", "again")  # of the buffer, reported per step


class Reporter:
    """Writer of a run's steps to its sinks, with all that was counted and timed in between.

    Example:

        reporter.write(step, metrics)       # the metrics of a step
        reporter.add(step, evaluation)      # more of the same step
        reporter.status(step, RunState.FINISHED)
    """

    def __init__(self, run: Run, buffer: Buffer, oversight: Oversight) -> None:
        self.accumulator = Accumulator()
        self._run, self._buffer, self._oversight = run, buffer, oversight
        self._reported: Counter[str] = Counter()  # buffer.counts as of the last step's metrics
        self._last_write = time.perf_counter()  # when a step's metrics were last written

    def open(self, sinks: Sink, timer: PhaseTimer) -> None:
        self._sinks, self._timer = sinks, timer

    def write(self, step: int, metrics: Mapping[str, Mean], taken: Mapping[str, Mean]) -> None:
        """Writes a step's metrics, with what was counted and timed since the last step.

        Args:
          taken: metrics of workers and reward processes since the last step.
        """
        since = merge([metrics, taken, self.accumulator.drain(), self._timer.drain(), _host_memory()])
        wall = self._wall_time()
        rates = {WALL: Mean(wall, 1)} | _throughput(since, wall)
        for name in (GENERATED_TOKENS, SAMPLING_SECONDS):
            since.pop(name, None)
        self.add(step, since | rates | self._sampler_memory())
        self.status(step, RunState.RUNNING)

    def add(self, step: int, metrics: Mapping[str, Mean]) -> None:
        """Writes metrics of a step. They merge with those that it has."""
        self._sinks.write(step, metrics)
        self._oversight.verdicts.write(step, metrics)

    def samples(self, step: int, groups: Sequence[Group], advantages: Sequence[np.ndarray]) -> None:
        """Writes some of a step's trajectories and whole groups, as many as the config says.

        Args:
          advantages: of the groups' trajectories in order, [T] each.
        """
        samples = itertools.islice(interleaved(groups, advantages), self._run.config.stats_logger.samples_per_step)
        for uid, trajectory, advantage in samples:
            self._sinks.sample(step, uid, trajectory, advantage)
        following = iter(advantages)
        for group in groups[: self._run.config.stats_logger.groups_per_step]:
            self._sinks.group(step, group, list(itertools.islice(following, len(group.trajectories))))

    def evaluated(self, step: int, evaluated: Evaluated) -> None:
        """Writes an evaluation: some of its trajectories. Its metrics go to `add`."""
        for name, uid, trajectory in evaluated.samples:
            self._sinks.evaluated(step, name, uid, trajectory)

    def buffer_metrics(self, groups: int) -> dict[str, Mean]:
        """Returns counts of prompts by outcome since the last step, and of those in flight.

        Args:
          groups: number of groups in the step's batch.
        """
        buffer = self._buffer
        since = {f"rollout/{name}": buffer.counts[name] - self._reported[name] for name in COUNTS}
        self.forget()
        now = {"rollout/running": buffer.running, "rollout/ready": buffer.ready, "rollout/groups": groups}
        return {name: Mean(float(value), 1) for name, value in (since | now).items()}

    def forget(self) -> None:
        """Has the buffer's counts so far reported by no step."""
        self._reported = Counter(self._buffer.counts)

    def status(self, step: int, state: RunState, error: str | None = None) -> None:
        if state is not RunState.RUNNING:
            self._oversight.verdicts.conclude()
        buffer, verdict = self._buffer, self._oversight.verdicts.line
        self._sinks.status(
            Status(state, step=step, version=buffer.version, total_steps=self.total_steps, error=error, verdict=verdict)
        )

    @property
    def total_steps(self) -> int:
        """Number of steps of the run if no prompt is rejected, those that rollbacks cost included."""
        return total_steps(self._run.config, len(self._run.prompts)) + self._buffer.undone

    def reported(self) -> dict[str, int]:
        """Returns the buffer's counts that the metrics have."""
        return dict(self._reported)

    def restore(self, state: LoopState) -> None:
        self.accumulator.restore(state.accumulator)
        self._reported = Counter(state.written)

    def _sampler_memory(self) -> dict[str, Mean]:
        peak = self._run.engine.sampler.memory_peak
        return {} if peak is None else {"memory/sampler_peak_bytes": Mean(peak, 1)}

    def _wall_time(self) -> float:
        """Returns the seconds since the last step, with its waits, evaluations and saves."""
        before, self._last_write = self._last_write, time.perf_counter()
        return self._last_write - before


def _throughput(metrics: Mapping[str, Mean], seconds: float) -> dict[str, Mean]:
    """Returns tokens per second of both sides: of wall time, and of the time in which each worked."""
    rates = {"timeperf/generated_tokens_per_s": GENERATED_TOKENS, "timeperf/trained_tokens_per_s": TRAINED_TOKENS}
    found = {rate: Mean(metrics[name].sum, seconds) for rate, name in rates.items() if name in metrics}
    if GENERATED_TOKENS in metrics and (sampled := metrics.get(SAMPLING_SECONDS)) and sampled.sum:
        found["timeperf/sampler_tokens_per_s"] = Mean(metrics[GENERATED_TOKENS].sum, sampled.sum)
    if UPDATED in metrics:
        busy = sum(metrics[name].sum for name in LEARNER_PHASES if name in metrics)
        found["timeperf/learner_tokens_per_s"] = Mean(metrics[UPDATED].sum, busy)
    return found


def _host_memory() -> dict[str, Mean]:
    used = memory.resident_bytes()
    return {} if used is None else {"perf/host_memory_bytes": Mean(used, 1)}


def interleaved(groups: Sequence[Group], advantages: Sequence[np.ndarray]) -> Iterator[tuple[str, Trajectory, np.ndarray]]:
    """Yields (uid, trajectory, advantage): the first trajectory of each group, then the second, ...

    Args:
      advantages: of the groups' trajectories in order, [T] each.
    """
    following = iter(advantages)
    rounds = itertools.zip_longest(*([(group.uid, t, next(following)) for t in group.trajectories] for group in groups))
    return (sample for several in rounds for sample in several if sample is not None)
