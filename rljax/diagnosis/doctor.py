"""Judges a run by all rules, and says which link broke first."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from rljax.diagnosis.advice import refer
from rljax.diagnosis.finding import Diagnosis, Finding, Link, in_order, link_of
from rljax.diagnosis.history import History
from rljax.diagnosis.registry import all_rules
from rljax.diagnosis.rule import Rule
from rljax.diagnosis.thresholds import SIMULTANEOUS_SHARE, SIMULTANEOUS_STEPS

NO_RL_STEPS = "no RL steps"  # what a run lacks at first, and SFT always


def diagnose(history: History, rules: Sequence[Rule] | None = None) -> Diagnosis:
    """Applies rules to a run; steps that a rollback undid are left out.

    Args:
      rules: rules to apply; None for all, those of other packages included.

    Raises:
      UserError: a rule of another package can't be loaded.
    """
    history = history.lasting
    findings: list[Finding] = []
    unjudged: dict[str, str] = {}
    judged: set[str] = set()
    early: set[str] = set()
    short = 0
    asked = [rule for rule in (all_rules() if rules is None else rules) if rule.is_about(history)]
    for rule in asked:
        if lacking := rule.missing(history):
            unjudged[rule.id] = lacking
            short += rule.is_early(history)
            early |= {rule.id} if rule.is_early(history) and not rule.symptom else set()
        else:
            try:
                finding = rule.apply(history)
            except Exception as error:  # a rule of another package may raise anything; the others still judge
                unjudged[rule.id] = f"it raised {type(error).__name__}: {' '.join(str(error).split())}"
                continue
            findings += [finding] if finding is not None else []
            judged |= {rule.id} if rule.needs and not rule.symptom else set()
    findings = [dataclasses.replace(each, causes=tuple(refer(cause, unjudged) for cause in each.causes)) for each in findings]
    tolerance = max(SIMULTANEOUS_STEPS, int(SIMULTANEOUS_SHARE * history.rl_steps))
    return Diagnosis(
        in_order(findings, tolerance),
        unjudged,
        describe(history),
        frozenset(judged),
        frozenset(early),
        short,
        len(asked),
        _lacking(history, {link_of(id) for id in judged}),
        _failure(history),
    )


def _lacking(history: History, judged: Collection[Link]) -> str:
    """Returns why a run without findings can't be called healthy; "" if it can."""
    if not history.rl_steps:
        return NO_RL_STEPS
    missing = [str(link) for link in (Link.REWARD, Link.POLICY) if link not in judged]
    return f"too few steps, or no metrics, for the rules of {' and '.join(missing)}" if missing else ""


def _failure(history: History) -> str:
    """Returns what ended a run before its time, in one line; "" if nothing did."""
    status = history.status or {}
    if history.lost or status.get("state") != "failed":
        return history.lost
    return " ".join(str(status.get("error") or "").split()) or "status.json does not say why"


def describe(history: History) -> dict[str, Any]:
    """Returns the source, steps and state of a run as JSON values."""
    return {
        "source": history.source,
        "first_step": history.first_step,
        "last_step": history.last_step,
        "steps": len(history.steps),
        "rl_steps": history.rl_steps,
        "state": history.state,
        "damage": list(history.damage),
    }
