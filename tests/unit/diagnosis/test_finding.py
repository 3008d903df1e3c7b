"""Order of findings, and the diagnosis that they add up to."""

import dataclasses
import itertools
import random

import numpy as np
import pytest

from rljax.diagnosis import Diagnosis, Finding, History, Link, Severity, Standing, diagnose
from rljax.diagnosis.doctor import describe
from rljax.diagnosis.finding import in_order
from rljax.diagnosis.summaries import render
from tests.unit.diagnosis import made

BROKEN, WARNING, NOTE = Severity.BROKEN, Severity.WARNING, Severity.NOTE


def finding(name: str, link: Link, step: int, severity: Severity = BROKEN, symptom: bool = False) -> Finding:
    return Finding(f"{link}.{name}", link, severity, step, (f"evidence of {name}",), symptom=symptom)


def names(findings) -> list[str]:
    return [each.rule.partition(".")[2] for each in findings]


def test_the_earliest_break_is_first():
    findings = [finding("late", Link.ENVIRONMENT, 50), finding("early", Link.NUMBERS, 5)]
    assert names(in_order(findings, 3)) == ["early", "late"]


def test_at_the_same_time_the_order_of_links_decides():
    findings = [finding("reward", Link.REWARD, 10), finding("data", Link.ENVIRONMENT, 12), finding("kl", Link.POLICY, 11)]
    assert names(in_order(findings, 3)) == ["data", "reward", "kl"]


def test_a_break_is_before_a_warning_whenever():
    findings = [finding("strain", Link.ENVIRONMENT, 1, WARNING), finding("broken", Link.RESOURCES, 70)]
    assert names(in_order(findings, 3)) == ["broken", "strain"]


@pytest.mark.parametrize(("lead", "first"), [(0, "cause"), (3, "cause"), (5, "cause"), (7, "fall")])
def test_a_symptom_yields_to_a_break_soon_after_it(lead, first):
    findings = [finding("fall", Link.REWARD, 10, symptom=True), finding("cause", Link.POLICY, 10 + lead)]
    assert names(in_order(findings, 3))[0] == first


def test_the_order_does_not_depend_on_that_of_the_rules():
    findings = [
        finding(f"{link}{step}{symptom}", link, step, severity, symptom)
        for link, step, severity, symptom in itertools.product(
            [Link.REWARD, Link.POLICY], [1, 3, 9], [BROKEN, NOTE], [True, False]
        )
    ]
    expected = in_order(findings, 3)
    for seed in range(10):
        shuffled = random.Random(seed).sample(findings, len(findings))
        assert in_order(shuffled, 3) == expected


def diagnosis(*findings: Finding) -> Diagnosis:
    return Diagnosis(in_order(findings, 3), {}, {"source": "run"})


def test_only_a_broken_link_is_a_first_break():
    assert diagnosis().first_break is None and diagnosis().first is None
    strained = diagnosis(finding("strain", Link.REWARD, 4, WARNING), finding("note", Link.CONTEXT, 1, NOTE))
    assert strained.first_break is None and strained.first is not None and strained.first.step == 4
    broken = diagnosis(finding("kl", Link.POLICY, 9), finding("strain", Link.REWARD, 4, WARNING))
    assert broken.first_break == broken.first and broken.first_break.rule == "policy.kl"


def test_json_has_what_a_script_needs():
    tree = diagnosis(finding("kl", Link.POLICY, 9)).json()
    assert tree["first_break"].keys() == {"rule", "link", "step", "evidence", "causes", "next"}
    assert (tree["first_break"]["link"], tree["first_break"]["step"]) == ("policy", 9)
    assert diagnosis().json()["first_break"] is None


def test_a_verdict_is_one_line_that_names_link_and_step():
    line = diagnosis(finding("kl", Link.POLICY, 9)).verdict()
    assert "\n" not in line and "policy" in line and "9" in line


@pytest.mark.parametrize("lacking", ["", "no RL steps"])
@pytest.mark.parametrize("failure", ["", "out of memory"])
@pytest.mark.parametrize(
    ("severity", "standing"), [(None, Standing.HEALTHY), (WARNING, Standing.WARNING), (BROKEN, Standing.BROKEN)]
)
def test_a_failure_leads_then_what_was_found_then_what_could_not_be_judged(lacking, failure, severity, standing):
    found = () if severity is None else (finding("kl", Link.POLICY, 9, severity),)
    judged = dataclasses.replace(diagnosis(*found), lacking=lacking, failure=failure)
    if failure:
        standing = Standing.FAILED
    elif lacking and severity is None:
        standing = Standing.NOT_JUDGED
    assert judged.standing is standing and judged.json()["standing"] == str(standing)
    assert judged.is_bad is (standing in (Standing.FAILED, Standing.BROKEN))
    judged = dataclasses.replace(judged, run=describe(History(np.zeros(0, np.int64), {})))
    text, verdict = render.text(judged), judged.verdict()
    assert text.startswith(f"{standing}: ") and failure in text.splitlines()[0]
    assert all(str(line) in text and str(line) in verdict for line in judged.headlines)  # every place says it alike


def test_a_diagnosis_says_the_same_whatever_its_figures_and_counts():
    ours = diagnosis(finding("kl", Link.POLICY, 9))
    later = dataclasses.replace(
        ours, unjudged={"a": "b"}, findings=(dataclasses.replace(ours.findings[0], evidence=("other",)),)
    )
    assert ours.says_as(later) and not ours.says_as(None)
    assert dataclasses.replace(diagnosis(), unjudged={"a": "b"}).verdict() == diagnosis().verdict()
    for other in (diagnosis(), diagnosis(finding("clip", Link.POLICY, 9)), dataclasses.replace(ours, failure="x")):
        assert not ours.says_as(other)


def test_a_healthy_run_says_how_many_rules_it_is_too_short_for():
    """Their number is that of the rules which list steps as what they lack; a longer run has none."""
    short, long = (diagnose(made.history(made.healthy(), samples=()).between(1, steps)) for steps in (7, made.STEPS))
    lacking = [why for why in short.unjudged.values() if " steps of " in why]
    assert short.standing is Standing.HEALTHY and len(lacking) > 10
    assert short.verdict() == f"HEALTHY: no link is broken; too short to judge {len(lacking)} of {short.asked} rules"
    assert long.verdict() == "HEALTHY: no link is broken" and long.asked == short.asked
    assert not short.says_as(long) and dataclasses.replace(short, short=1).says_as(short)
