"""Verdicts that a live doctor would have given of kept runs, step by step."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from rljax.diagnosis import History, Severity, diagnose
from rljax.experiments.bench.run_library.kept import KeptRun

EVERY = 2  # steps from one verdict to the next


class LiveVerdicts(NamedTuple):
    """Verdicts on one run as it went on.

    Example: str(LiveVerdicts("retry-1", 20, Counter(), ())) is
        "retry-1: 20 verdicts, none above a note"
    """

    name: str
    number: int  # of verdicts
    above: Counter[Severity]  # verdicts with a warning, or a break, first
    rules: tuple[str, ...]  # that were first in one

    def __str__(self) -> str:
        said = ", ".join(f"{severity} in {self.above[severity]}" for severity in sorted(self.above))
        return f"{self.name}: {self.number} verdicts, " + (f"{said} ({', '.join(self.rules)})" if said else "none above a note")


def judge_live(runs: Iterable[KeptRun]) -> Iterator[LiveVerdicts]:
    """Judges each run by its steps up to one in EVERY, from the first step of reinforcement on."""
    with tempfile.TemporaryDirectory() as scratch:
        for number, run in enumerate(runs):
            workdir = Path(scratch) / str(number)
            run.write(workdir)
            yield _judge(f"{run.recipe}-{run.seed}", History.load(workdir))


def _judge(name: str, history: History) -> LiveVerdicts:
    steps = [step for step in history.steps.tolist() if step >= history.first_step][::EVERY]
    firsts = [diagnose(history.between(int(history.steps[0]), step)).first for step in steps]
    found = [first for first in firsts if first is not None]
    return LiveVerdicts(
        name, len(steps), Counter(first.severity for first in found), tuple(sorted({first.rule for first in found}))
    )
