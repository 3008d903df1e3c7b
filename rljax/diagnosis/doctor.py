"""Judges a run by all rules, and says which link broke first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rljax.diagnosis.finding import Diagnosis, Finding, in_order
from rljax.diagnosis.history import History
from rljax.diagnosis.registry import all_rules
from rljax.diagnosis.rule import Rule
from rljax.diagnosis.thresholds import SIMULTANEOUS_SHARE, SIMULTANEOUS_STEPS


def diagnose(history: History, rules: Sequence[Rule] | None = None) -> Diagnosis:
    """Applies rules to a run.

    Args:
      rules: rules to apply; None for all, those of other packages included.

    Raises:
      UserError: a rule of another package can't be loaded.
    """
    findings: list[Finding] = []
    unjudged: dict[str, str] = {}
    for rule in all_rules() if rules is None else rules:
        if not rule.is_about(history):
            continue
        if lacking := rule.missing(history):
            unjudged[rule.id] = lacking
        else:
            try:
                finding = rule.apply(history)
            except Exception as error:  # a rule of another package may raise anything; the others still judge
                unjudged[rule.id] = f"it raised {type(error).__name__}: {' '.join(str(error).split())}"
                continue
            findings += [finding] if finding is not None else []
    tolerance = max(SIMULTANEOUS_STEPS, int(SIMULTANEOUS_SHARE * history.rl_steps))
    return Diagnosis(in_order(findings, tolerance), unjudged, describe(history))


def describe(history: History) -> dict[str, Any]:
    """Returns the source, steps and state of a run as JSON values."""
    status = history.status or {}
    return {
        "source": history.source,
        "first_step": history.first_step,
        "last_step": history.last_step,
        "rl_steps": history.rl_steps,
        "state": status.get("state"),
        "damage": list(history.damage),
    }
