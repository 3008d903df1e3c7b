"""The doctor's verdicts on the kept runs: how many it gets right, and the page that says so."""

from __future__ import annotations

import pytest

from rljax.diagnosis import RULES, Severity
from rljax.experiments.bench.run_library import judge, kept, recipes
from rljax.experiments.bench.run_library.live import judge_live
from tests.shared import REPOSITORY

RUNS = REPOSITORY / "tests" / "data" / "runs"
PAGE = REPOSITORY / "docs" / "doctor_table.md"
COMMAND = "python -m experiments.bench.broken_runs --judge=tests/data/runs --page=docs/doctor_table.md"
NAMED = 0.9  # share of the broken runs whose link has to be named first
KEPT_MB = 2


@pytest.fixture(scope="module")
def verdicts():
    return judge.judge_directory(RUNS)


@pytest.mark.parametrize("half", ["tuning", "judging"])
def test_the_doctor_names_the_planted_link_first(verdicts, half):
    broken = [verdict for verdict in verdicts[half] if verdict.recipe.rules]
    assert sum(verdict.right for verdict in broken) >= NAMED * len(broken), "\n".join(judge.wrong(broken))


@pytest.mark.parametrize("half", ["tuning", "judging"])
def test_the_doctor_finds_nothing_in_healthy_runs(verdicts, half):
    assert judge.wrong(verdict for verdict in verdicts[half] if not verdict.recipe.rules) == []


def test_a_live_verdict_is_that_of_the_steps_so_far():
    """Nothing above a note at any step of a healthy run; of a broken one the fault, once it is there."""
    healthy, broken = judge_live(kept.read(RUNS / "tuning.jsonl.xz", ["one_minibatch", "not_a_number"]))
    if healthy.name != "one_minibatch-1":
        healthy, broken = broken, healthy
    assert str(healthy) == "one_minibatch-1: 35 verdicts, none above a note"
    assert broken.rules == ("numbers.not_finite",) and broken.above[Severity.BROKEN] == broken.number - 10  # from step 21 on


def test_the_page_has_these_verdicts(verdicts):
    assert PAGE.read_text() == judge.page(verdicts), f"write it again: {COMMAND}"


def test_both_halves_have_all_runs_once():
    for half in ("tuning", "judging"):
        assert sorted(run.recipe for run in kept.read(RUNS / f"{half}.jsonl.xz")) == sorted(recipes.RECIPES)


def test_the_kept_runs_are_small():
    assert sum(file.stat().st_size for file in RUNS.iterdir()) < KEPT_MB * 2**20


def test_every_rule_that_a_fault_names_exists():
    ids = {rule.id for rule in RULES}
    assert {rule for recipe in recipes.FAULTS for rule in recipe.rules} <= ids
