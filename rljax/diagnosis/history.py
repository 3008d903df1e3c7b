"""History of a run: its metrics by step, histograms, samples, config and context, as rules read it.

history = History.load(Path("runs/quickstart"))
history["rollout/reward"]              # mean reward per step, a Series
history["rollout/reward/max"]
history.rl["ppo_actor/update/lr"]      # of RL steps only
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax import json_lines
from rljax.config.schema import Config
from rljax.diagnosis import run_files
from rljax.diagnosis.advice import OWN, rename
from rljax.diagnosis.run_files import Bins
from rljax.diagnosis.series import Series
from rljax.errors import UserError
from rljax.process import liveness

METRICS, SAMPLES, GUARD, HISTOGRAMS = LINE_FILES = ("metrics.jsonl", "samples.jsonl", "guard.jsonl", "histograms.jsonl")
CONFIG, CONTEXT, STATUS, PLAN = "config.json", "context.json", "status.json", "plan.json"
REWARD = "rollout/reward"
EVALUATION_REWARD = "eval-rollout/reward"

MOST_UNDONE = 10**6  # steps of a rollback; a line that says more is damaged


@dataclasses.dataclass(frozen=True)
class History:
    """Record of one run. Whatever a run did not record is empty, or None.

    Example: History(np.array([1, 2]), {"rollout/reward/avg": np.array([0.1, np.nan])})
    """

    steps: np.ndarray  # [N] int64, strictly increasing
    series: Mapping[str, np.ndarray]  # name in metrics.jsonl -> [N] float64, NaN where a step has no finite value
    not_finite: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # name -> steps of NaN or infinity
    histograms: Mapping[str, Mapping[int, Bins]] = dataclasses.field(default_factory=dict)  # name -> step -> histogram
    samples: Sequence[Mapping[str, Any]] = ()  # lines of samples.jsonl
    guard: Sequence[Mapping[str, Any]] = ()  # lines of guard.jsonl
    context: Sequence[Mapping[str, Any]] = ()  # `sessions` of context.json, the oldest first
    config: Config | None = None
    status: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] | None = None  # plan.json: what was estimated and measured
    source: str = ""  # path, for messages
    trainer: str = OWN  # that wrote the log
    theirs: Mapping[str, str] = dataclasses.field(default_factory=dict)  # our names of metrics -> the trainer's
    damage: Sequence[str] = ()  # lines about files that are there and can't be read
    lost: str = ""  # why a run that is said to run does not, as of when it was read; "" if it may

    @classmethod
    def load(cls, workdir: Path, *, flag: str = "--workdir", most_mb: int | None = None) -> History:
        """Reads a run directory, finished, live or torn. Raises UserError if it has no metrics.

        A run that failed, or was killed, before its first step has none, and no steps.

        Args:
          flag: what named the directory, for errors.
          most_mb: of larger files of lines the first and the last of this size are read; None: all.
        """
        if not workdir.is_dir():
            raise UserError(f"{flag}: no such directory: {workdir} (the --workdir of a run)")
        status = run_files.read_object(workdir / STATUS)
        lost = _lost(workdir, status or {})
        if not json_lines.parts(workdir / METRICS) and not lost and (status or {}).get("state") != "failed":
            raise UserError(f"{flag}: {workdir} has no {METRICS} (a run that has begun has; --log reads other logs)")
        context = run_files.read_object(workdir / CONTEXT)
        config = run_files.read_config(workdir / CONFIG)
        plan = run_files.read_object(workdir / PLAN)
        sessions = (context or {}).get("sessions")
        paths = {name: workdir / name for name in LINE_FILES}
        lines = {
            name: run_files.read_lines(path) if most_mb is None else run_files.read_ends(path, most_mb << 20)
            for name, path in paths.items()
        }
        return cls(
            *run_files.columns(lines[METRICS].rows),
            histograms=run_files.histograms(lines[HISTOGRAMS].rows),
            samples=lines[SAMPLES].rows,
            guard=lines[GUARD].rows,
            context=[each for each in sessions if isinstance(each, dict)] if isinstance(sessions, list) else (),
            config=config,
            status=status,
            plan=plan,
            source=str(workdir),
            lost=lost,
            damage=_damage(workdir, {CONFIG: config, CONTEXT: context, STATUS: status, PLAN: plan}, lines),
        )

    @classmethod
    def of_rows(cls, rows: Iterable[Mapping[str, Any]], source: str = "") -> History:
        """Makes a history of objects with a `step` and metrics by name."""
        return cls(*run_files.columns(rows), source=source)

    def __getitem__(self, name: str) -> Series:
        """Returns the finite values of a metric; of a distribution its means. Empty if unknown."""
        values = self.series.get(f"{name}/avg")
        if values is None:
            values = self.series.get(name)
        if values is None:
            return Series(name, self.steps[:0], np.zeros(0))
        found = np.isfinite(values)
        return Series(name, self.steps[found], values[found])

    def in_its_words(self, text: str) -> str:
        """Returns a text with the names of metrics that the log has, or would have, for ours."""
        return rename(text, self.theirs)

    def aligned(self, *names: str) -> tuple[Series, ...]:
        """Returns several metrics at the steps that all of them have."""
        found = [self[name] for name in names]
        steps = functools.reduce(np.intersect1d, [series.steps for series in found])
        return tuple(series.where(np.isin(series.steps, steps)) for series in found)

    def __contains__(self, name: str) -> bool:
        return bool(self[name])

    def names(self, prefix: str) -> list[str]:
        """Returns metrics that begin with a prefix, without /avg, /min and /max."""
        return sorted({_base(name) for name in self.series if name.startswith(prefix)})

    @functools.cached_property
    def rl(self) -> History:
        """The same history without supervised steps."""
        reward = self[REWARD]
        return self if not reward else self.between(int(reward.steps[0]), int(self.steps[-1]))

    def between(self, first: int, last: int) -> History:
        """Returns the history of the steps from `first` to `last`."""
        return self._of(range(first, last + 1))

    @functools.cached_property
    def undone(self) -> frozenset[int]:
        """Steps that rollbacks undid. Their lines stay in the files."""
        rolled = [(event.get("restored"), event["step"]) for event in self.guard]
        spans = [range(back + 1, at + 1) for back, at in rolled if isinstance(back, int)]
        return frozenset(step for span in spans if len(span) <= MOST_UNDONE for step in span)

    @property
    def lasting(self) -> History:
        """The same history without the steps that rollbacks undid."""
        return self._of(frozenset(self.steps.tolist()) - self.undone) if self.undone else self

    def _of(self, steps: Container[int]) -> History:
        """Returns the history of some steps."""

        def kept(at: np.ndarray) -> np.ndarray:
            return np.fromiter((step in steps for step in at.tolist()), bool, len(at))

        rows = kept(self.steps)
        return dataclasses.replace(
            self,
            steps=self.steps[rows],
            series={name: values[rows] for name, values in self.series.items()},
            not_finite={name: at[kept(at)] for name, at in self.not_finite.items()},
            histograms={
                name: {step: bins for step, bins in by_step.items() if step in steps}
                for name, by_step in self.histograms.items()
            },
            samples=[sample for sample in self.samples if sample["step"] in steps],
        )

    @property
    def state(self) -> str | None:
        """State of the run by status.json, "lost" if it was killed; None if nothing tells."""
        return "lost" if self.lost else (self.status or {}).get("state")

    @property
    def evaluations(self) -> Series:
        """Mean held-out reward, at the steps that were evaluated."""
        return self[EVALUATION_REWARD]

    @property
    def rl_steps(self) -> int:
        """Number of RL steps."""
        return len(self[REWARD])

    @property
    def first_step(self) -> int:
        """First RL step, or the first step of a run without any; 0 if the run has no steps."""
        reward = self[REWARD]
        steps = reward.steps if reward else self.steps
        return int(steps[0]) if len(steps) else 0

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]) if len(self.steps) else 0


def _lost(workdir: Path, status: Mapping[str, Any]) -> str:
    """Returns why a run that is said to run does not; "" if it may, or an older rljax wrote it."""
    process = liveness.Identity.read(status)
    if status.get("state") != "running" or process is None:
        return ""
    why = liveness.lost(process, workdir / STATUS)
    return f"{why}; hang.txt says where it hung" if why and (workdir / "hang.txt").exists() else why


def _damage(workdir: Path, objects: Mapping[str, Any], lines: Mapping[str, run_files.Lines]) -> list[str]:
    """Describes the files of a run that can't be read, each in a line.

    Args:
      objects: content of files that hold one object, by name; None for what could not be read.
      lines: content of files of lines, by name.
    """
    lost = [name for name, value in objects.items() if value is None and (workdir / name).exists()]
    return [
        *(f"{name} is damaged: it counts as missing" for name in lost),
        *(
            f"{part} is damaged: {_numbered(numbers)} left out"
            for each in lines.values()
            for part, numbers in each.damaged.items()
        ),
    ]


def _numbered(lines: Sequence[int]) -> str:
    shown = ", ".join(map(str, lines[:3])) + (", ..." if len(lines) > 3 else "")
    return f"line {shown} is" if len(lines) == 1 else f"{len(lines)} lines ({shown}) are"


def _base(name: str) -> str:
    head, _, last = name.rpartition("/")
    return head if last in ("avg", "min", "max") else name
