"""The doctor's verdicts on kept runs, as the page docs/doctor_table.md.

A broken run counts as named if the first link that the doctor names is the fault's, whatever the
rule. A healthy run counts as clean if the doctor finds nothing above a note.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rljax.diagnosis import Diagnosis, History, Severity, diagnose
from rljax.errors import UserError
from rljax.experiments.bench.run_library import kept
from rljax.experiments.bench.run_library.faulty import FAULTS
from rljax.experiments.bench.run_library.healthy import HEALTHY
from rljax.experiments.bench.run_library.kept import KeptRun
from rljax.experiments.bench.run_library.pool import HALVES
from rljax.experiments.bench.run_library.recipe import Recipe
from rljax.experiments.bench.run_library.recipes import find

INTRODUCTION = """# How often the doctor is right

Runs with one fault planted in each on the task of the quickstart, and healthy ones of other algorithms, sizes, lags, workflows,
environments and kinds of training, and what the doctor says first about each. "Named" is the link, whatever the rule; a
warning is marked. Thresholds were set on the tuning half (seed 1) and not touched for the judging half (seed 2); three rules
were changed after runs of `guess_number`, `guess_number_agent` and `retry` of both halves. Faults that the checks of a config
refuse are not here: gconfig.n_samples=1 with a group's baseline, greedy sampling in training, a critic that does not learn.

```bash
python -m experiments.bench.broken_runs --run=lr_x100 --seed=1 --workdir=runs/lr_x100    # makes one again
python -m experiments.bench.broken_runs --all --jobs=32 --out=tests/data/runs            # all of them
python -m experiments.bench.broken_runs --judge=tests/data/runs --page=docs/doctor_table.md
```"""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The doctor's verdict on one run.

    Example: Verdict(find("lr_x100"), 1, diagnosis, {"packages": {"python": "3.12.3"}}).right
    """

    recipe: Recipe
    seed: int
    diagnosis: Diagnosis
    context: Mapping[str, Any] | None  # first session of the run

    @property
    def right(self) -> bool:
        """True if the fault's link is named first; of a healthy run, if nothing is found."""
        first = self.diagnosis.first
        return (str(first.link) if first else None) == self.recipe.link

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
        for number, run in enumerate(runs):
            workdir = Path(scratch) / str(number)
            run.write(workdir)
            history = History.load(workdir)
            context = history.context[0] if history.context else None
            verdicts.append(Verdict(find(run.recipe), run.seed, diagnose(history), context))
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


def page(verdicts: Mapping[str, Sequence[Verdict]]) -> str:
    """Returns the page: totals, a row per fault, a row per healthy run, a row per rule."""
    titles = [f"{half} half" for half in verdicts]
    totals = [
        ["broken runs whose link is named first", *(_share(of_half, broken=True) for of_half in verdicts.values())],
        ["healthy runs with nothing above a note", *(_share(of_half, broken=False) for of_half in verdicts.values())],
    ]
    parts = [
        INTRODUCTION,
        _made_with(itertools.chain(*verdicts.values())),
        _rows(["", *titles], totals),
        "## Broken runs",
        _rows(["fault", "link", *titles], _by_recipe(FAULTS, verdicts)),
        "## Healthy runs",
        _rows(["run", "link", *titles], _by_recipe(HEALTHY, verdicts)),
        "## Rules",
        "Runs in which a rule had the first word: those in which its link is the planted one, and others.",
        _rows(["rule", *titles], _by_rule(verdicts)),
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


def _made_with(verdicts: Iterable[Verdict]) -> str:
    """Returns a line about the machines of the runs, the most frequent first."""
    machines = Counter(_machine(verdict.context) for verdict in verdicts if verdict.context)
    return f"Cores per run, and versions: {'; '.join(f'{machine} ({count})' for machine, count in machines.most_common())}."


def _machine(context: Mapping[str, Any]) -> str:
    packages, hardware = context["packages"], context["hardware"]
    return f"{hardware['cores']} of {hardware['cpu']}, Python {packages['python']}, jax {packages['jax']}"


def _by_recipe(recipes: Sequence[Recipe], verdicts: Mapping[str, Sequence[Verdict]]) -> list[list[str]]:
    rows = []
    for recipe in recipes:
        found = [[verdict for verdict in of_half if verdict.recipe is recipe] for of_half in verdicts.values()]
        cells = [
            "; ".join(f"{'' if verdict.right else '**wrong:** '}{verdict}" for verdict in mine) or "not run" for mine in found
        ]
        rows.append([f"`{recipe.name}` {recipe.words}", recipe.link or "healthy", *cells])
    return rows


def _by_rule(verdicts: Mapping[str, Sequence[Verdict]]) -> list[list[str]]:
    right, others = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for half, of_half in verdicts.items():
        for verdict in of_half:
            if first := verdict.diagnosis.first:
                (right if verdict.right else others)[half, first.rule] += 1
    rules = sorted({rule for _, rule in (*right, *others)})
    return [[f"`{rule}`", *(f"{right[half, rule]}, others {others[half, rule]}" for half in verdicts)] for rule in rules]


def _share(verdicts: Sequence[Verdict], *, broken: bool) -> str:
    asked = [verdict for verdict in verdicts if bool(verdict.recipe.rules) is broken]
    right = sum(verdict.right for verdict in asked)
    return f"{right} of {len(asked)} ({right / len(asked):.0%})" if asked else "none"


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
