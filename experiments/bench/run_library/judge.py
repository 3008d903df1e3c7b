"""The doctor's verdicts on kept runs, as a table of Markdown for docs/doctor_table.md.

A broken run counts as named if the first link that the doctor names is the fault's, whatever the
rule. A healthy run counts as clean if the doctor finds nothing above a note.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rljax.diagnosis import Diagnosis, History, Severity, diagnose
from rljax.errors import UserError
from rljax.experiments.bench.run_library import kept
from rljax.experiments.bench.run_library.kept import KeptRun
from rljax.experiments.bench.run_library.pool import HALVES
from rljax.experiments.bench.run_library.recipes import FAULTS, HEALTHY, Recipe, find


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The doctor's verdict on one run.

    Example: Verdict(find("lr_x100"), 1, diagnosis).right
    """

    recipe: Recipe
    seed: int
    diagnosis: Diagnosis

    @property
    def right(self) -> bool:
        """True if the fault's link is named first; of a healthy run, if nothing is found."""
        first = self.diagnosis.first
        return (str(first.link) if first else None) == self.recipe.link

    @property
    def by_rule(self) -> bool:
        """True if the first finding is by one of the rules that are about this fault."""
        first = self.diagnosis.first
        return first is not None and first.rule in self.recipe.rules

    def __str__(self) -> str:
        first = self.diagnosis.first
        if first is None:
            return "nothing"
        severity = "" if first.severity is Severity.BROKEN else f" ({first.severity})"
        return f"{first.rule}{severity}, step {first.step}"


def judge(runs: Iterable[KeptRun]) -> list[Verdict]:
    """Asks the doctor about kept runs, each written as a run directory again."""
    verdicts = []
    with tempfile.TemporaryDirectory() as scratch:
        for run in runs:
            workdir = Path(scratch) / f"{run.recipe}-{run.seed}"
            run.write(workdir)
            verdicts.append(Verdict(find(run.recipe), run.seed, diagnose(History.load(workdir))))
    return verdicts


def judge_directory(directory: Path) -> dict[str, list[Verdict]]:
    """Judges the runs of a directory, by half.

    Raises UserError if it has none.
    """
    files = {half: directory / f"{half}{kept.SUFFIX}" for half in HALVES.values()}
    found = {half: judge(kept.read(path)) for half, path in files.items() if path.is_file()}
    if not found:
        raise UserError(f"{directory}: has no {' or '.join(path.name for path in files.values())}")
    return found


def table(verdicts: dict[str, list[Verdict]]) -> str:
    """Returns the page: totals, a row per fault, a row per healthy run, a row per rule."""
    halves = list(verdicts)
    titles = [f"{half} half" for half in halves]
    parts = [
        _rows(
            ["", *titles],
            [
                ["broken runs whose link is named first", *(_share(verdicts[half], True) for half in halves)],
                ["healthy runs with nothing above a note", *(_share(verdicts[half], False) for half in halves)],
            ],
        ),
        "## Broken runs",
        _rows(["fault", "link", *titles], _of(FAULTS, verdicts)),
        "## Healthy runs",
        _rows(["run", "", *titles], _of(HEALTHY, verdicts)),
        "## By rule",
        _rows(["rule", *(f"{half} half: named first, wrongly" for half in halves)], _by_rule(verdicts)),
    ]
    return "\n\n".join(parts) + "\n"


def wrong(verdicts: Iterable[Verdict]) -> list[str]:
    """Returns a line for each verdict that is not right, with all that was found."""
    lines = []
    for verdict in verdicts:
        if not verdict.right:
            found = [f"{f.rule} {f.severity} @{f.step}" for f in verdict.diagnosis.findings if f.severity > Severity.NOTE]
            lines.append(
                f"{verdict.recipe.name}-{verdict.seed} ({verdict.recipe.link or 'healthy'}): {'; '.join(found) or 'nothing'}"
            )
    return lines


def _of(recipes: Sequence[Recipe], verdicts: dict[str, list[Verdict]]) -> list[list[str]]:
    rows = []
    for recipe in recipes:
        cells = []
        for of_half in verdicts.values():
            mine = [verdict for verdict in of_half if verdict.recipe is recipe]
            cells.append("; ".join(f"{'' if verdict.right else '**wrong** '}{verdict}" for verdict in mine) or "not run")
        rows.append([f"`{recipe.name}`: {recipe.words}", recipe.link or "", *cells])
    return rows


def _by_rule(verdicts: dict[str, list[Verdict]]) -> list[list[str]]:
    counts: dict[str, list[tuple[int, int]]] = {}
    for index, of_half in enumerate(verdicts.values()):
        right, all_ = Counter[str](), Counter[str]()
        for verdict in of_half:
            if first := verdict.diagnosis.first:
                all_[first.rule] += 1
                right[first.rule] += verdict.right
        for rule, count in all_.items():
            counts.setdefault(rule, [(0, 0)] * len(verdicts))[index] = (right[rule], count - right[rule])
    return [[f"`{rule}`", *(f"{right}, {not_right}" for right, not_right in counts[rule])] for rule in sorted(counts)]


def _share(verdicts: Sequence[Verdict], broken: bool) -> str:
    asked = [verdict for verdict in verdicts if bool(verdict.recipe.rules) is broken]
    right = sum(verdict.right for verdict in asked)
    return f"{right} of {len(asked)} ({right / len(asked):.0%})" if asked else "none"


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
