"""Guardrails of the run itself: steps that they undid, updates that they left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rljax.diagnosis.finding import Severity
from rljax.diagnosis.history import GUARD, History
from rljax.diagnosis.rule import Rule, Sign, rule
from rljax.diagnosis.run_files import number_of
from rljax.diagnosis.thresholds import HELD_UP, OFTEN

Event = Mapping[str, Any]  # a line of guard.jsonl
SHOWN = 3  # steps, and bounds, that a line names


@rule(
    "policy.guardrails",
    "Guardrails had to act again and again: the run is held up by what they catch.",
    bounds=(HELD_UP, OFTEN),
    causes=(
        "the learning rate is too high: what a bound catches is the first sign of it",
        "a bound is tighter than the noise of a batch",
        "a few batches are far beyond the others",
    ),
    next="rljax replay --workdir=WORKDIR --step=STEP; rljax train with the learning rate that the guardrails left",
    symptom=True,
)
def guardrails(history: History) -> Sign | None:
    found = []
    for action, judge in {"rollback": _rollbacks, "skip": _skips, "halve_lr": _halvings}.items():
        if events := [event for event in history.guard if event.get("action") == action]:
            found.append(judge(history, events))
    if not found:
        return None
    worst = max(found, key=lambda sign: sign.severity)
    lines = tuple(str(sign.evidence) for sign in sorted(found, key=lambda sign: sign is not worst))
    return Sign(worst.severity, min(sign.step for sign in found), lines, series=(GUARD,))


def _rollbacks(history: History, events: Sequence[Event]) -> Sign:
    undone = len(history.undone)
    taken = history.rl_steps + undone
    severity = _severity(undone > HELD_UP * taken, len(events) > 1)
    return _sign(severity, f"{_times(len(events), 'rollback')}, {undone} of {taken} steps undone", events)


def _skips(history: History, events: Sequence[Event]) -> Sign:
    steps = {event["step"] for event in events} - history.undone
    severity = _severity(len(steps) > HELD_UP * history.rl_steps, len(steps) > OFTEN * history.rl_steps)
    return _sign(severity, f"{_times(len(events), 'update')} skipped", events)


def _halvings(history: History, events: Sequence[Event]) -> Sign:
    return _sign(_severity(False, len(events) > 1), f"the learning rate halved {_times(len(events), 'time')}", events)


def _severity(most: bool, again: bool) -> Severity:
    return Severity.BROKEN if most else Severity.WARNING if again else Severity.NOTE


def _sign(severity: Severity, what: str, events: Sequence[Event]) -> Sign:
    steps = sorted({int(event["step"]) for event in events})
    shown = ", ".join(map(str, steps[:SHOWN])) + (", ..." if len(steps) > SHOWN else "")
    return Sign(severity, steps[0], f"{what}, at {'steps' if len(steps) > 1 else 'step'} {shown}: {_bounds(events)}")


def _bounds(events: Sequence[Event]) -> str:
    """Says which bounds were broken, the most frequent first, and by which value first."""
    counts = Counter(str(event.get("guard")) for event in events)
    first = {str(event.get("guard")): event for event in reversed(events)}
    lines = []
    for guard, count in counts.most_common(SHOWN):
        event = first[guard]
        figure, bound = f"{event.get('metric')}{_figure(' ', event.get('value'), '.4g')}", event.get("bound")
        lines.append(f"{guard} ({count}; {figure}{_figure(', bound ', bound, 'g')})")
    return ", ".join(lines)


def _figure(before: str, value: Any, form: str) -> str:
    """Writes a number with what stands before it; nothing for what is none."""
    return f"{before}{number_of(value):{form}}" if isinstance(value, int | float) else ""


def _times(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"


RULES: tuple[Rule, ...] = (guardrails,)
