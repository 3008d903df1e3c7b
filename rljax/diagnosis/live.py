"""Live verdict: a run's diagnosis while it goes on, at a bounded share of its time.

live = LiveDoctor(config)
live.write(step, flatten(metrics))     # each step; several writes of one step merge
live.verdict                           # one line, as of the last judgment
live.sample(line)                      # of samples.jsonl; live.event(line), of guard.jsonl
live.judge_only(["policy.kl"])         # findings of some rules as of now, for guardrails
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rljax.config.registry import nearest
from rljax.config.schema import Config
from rljax.diagnosis.doctor import diagnose
from rljax.diagnosis.finding import Diagnosis, Finding
from rljax.diagnosis.history import History
from rljax.diagnosis.registry import all_rules
from rljax.diagnosis.rule import Rule
from rljax.diagnosis.thresholds import AUDITED
from rljax.errors import UserError

SHARE = 0.01  # of the run's time that judging may take
SAMPLES = 1024  # that are kept at most; rules compare the first and the last AUDITED ones
CAPACITY = 256  # steps that arrays have room for at first


class LiveDoctor:
    """Doctor of the run that feeds it.

    All rules are judged again when the last judgment's cost has become less than `share` of the
    time since, so a run of short steps is judged every few steps and one of long steps at each.

    Args:
      config: config of the run; None leaves rules that need it unjudged.
      before: history of the steps before this process, for a run that goes on.
      share: share of the time that judging may take.
      clock: seconds; replaced in tests.
    """

    def __init__(
        self,
        config: Config | None,
        *,
        before: History | None = None,
        share: float = SHARE,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config, self._share, self._clock = config, share, clock
        self._rules = all_rules()
        self._before = before
        self._steps = np.zeros(CAPACITY, np.int64)
        self._columns: dict[str, np.ndarray] = {}
        self._not_finite: dict[str, list[int]] = {}
        self._samples: dict[int, Mapping[str, Any]] = {}  # by their number in the run
        self._taken, self._stride = 0, 1  # samples so far; distance of those kept between the first and the last
        self._guard = list(before.guard) if before else []
        self._count = 0
        self._due = -math.inf  # time of the next judgment
        self.diagnosis: Diagnosis | None = None  # as of the last judgment
        if before is not None:
            self._resume(before)

    @property
    def verdict(self) -> str:
        """The verdict in one line; "" before the first judgment."""
        return "" if self.diagnosis is None else self.diagnosis.verdict()

    def write(self, step: int, scalars: Mapping[str, float]) -> Diagnosis | None:
        """Takes a step's metrics, as metrics.jsonl names them, and judges if that is due.

        Args:
          step: never less than before.

        Returns:
          The new diagnosis if it says something else than the one before, else None.
        """
        at = self._place(step)
        for name, value in scalars.items():
            if name not in self._columns:
                self._columns[name] = np.full(len(self._steps), np.nan)
            if math.isfinite(value):
                self._columns[name][at] = value
            else:
                self._not_finite.setdefault(name, []).append(step)
        began = self._clock()
        if began < self._due:
            return None
        before = self.diagnosis
        diagnosis = self.judge()
        ended = self._clock()
        self._due = ended + (ended - began) / self._share
        return None if diagnosis.says_as(before) else diagnosis

    def sample(self, sample: Mapping[str, Any]) -> None:
        """Takes a line of samples.jsonl. Of many, those between the first and the last are thinned."""
        self._samples[self._taken] = sample
        self._taken += 1
        if len(self._samples) > SAMPLES:
            self._thin()
            if len(self._samples) > 3 * SAMPLES // 4:
                self._stride *= 2
                self._thin()

    def _thin(self) -> None:
        last = self._taken - AUDITED
        self._samples = {n: s for n, s in self._samples.items() if n < AUDITED or n >= last or n % self._stride == 0}

    def event(self, event: Mapping[str, Any]) -> None:
        """Takes a line of guard.jsonl."""
        self._guard.append(event)

    def judge(self) -> Diagnosis:
        """Judges by all rules, whatever the time."""
        self.diagnosis = diagnose(self.history(), self._rules)
        return self.diagnosis

    def judge_only(self, ids: Iterable[str]) -> Sequence[Finding]:
        """Returns the findings of some rules as of the last step written.

        Raises:
          UserError: a rule is not known.
        """
        return diagnose(self.history(), [find(self._rules, each) for each in ids]).findings

    def history(self) -> History:
        """Returns the history so far. Its arrays are views: they change with later writes."""
        n = self._count
        return History(
            self._steps[:n],
            {name: values[:n] for name, values in self._columns.items()},
            {name: np.array(steps, np.int64) for name, steps in self._not_finite.items()},
            samples=tuple(self._samples.values()),
            guard=tuple(self._guard),
            context=self._before.context if self._before else (),
            config=self._config,
            source=self._before.source if self._before else "",
        )

    def _place(self, step: int) -> int:
        """Returns the row of a step, a new one if it is later than the last."""
        if self._count and self._steps[self._count - 1] == step:
            return self._count - 1
        if self._count and self._steps[self._count - 1] > step:
            raise ValueError(f"metrics of step {step} after those of step {self._steps[self._count - 1]}")
        if self._count == len(self._steps):
            self._grow()
        self._steps[self._count] = step
        self._count += 1
        return self._count - 1

    def _grow(self) -> None:
        size = len(self._steps)
        self._steps = np.concatenate([self._steps, np.zeros(size, np.int64)])
        self._columns = {name: np.concatenate([values, np.full(size, np.nan)]) for name, values in self._columns.items()}

    def _resume(self, before: History) -> None:
        while len(self._steps) < len(before.steps):
            self._grow()
        self._count = len(before.steps)
        self._steps[: self._count] = before.steps
        for name, values in before.series.items():
            self._columns[name] = np.full(len(self._steps), np.nan)
            self._columns[name][: self._count] = values
        self._not_finite = {name: steps.tolist() for name, steps in before.not_finite.items()}
        for sample in before.samples:
            self.sample(sample)


def require_rules(ids: Iterable[str], prefix: str = "") -> None:
    """Raises UserError, which begins with the prefix, for an id that no rule has."""
    rules = all_rules()
    for id in ids:
        try:
            find(rules, id)
        except UserError as error:
            raise UserError(f"{prefix}{error}") from None


def find(rules: Sequence[Rule], id: str) -> Rule:
    """Returns the rule of an id. Raises UserError if there is none."""
    for rule in rules:
        if rule.id == id:
            return rule
    raise UserError(f"{id}: no such rule ({nearest(id, [rule.id for rule in rules])})")
