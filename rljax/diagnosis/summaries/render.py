"""Text of a diagnosis: verdict, evidence, what followed, notes, and what was not judged."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from rljax.diagnosis.finding import Diagnosis, Finding, Severity

WIDTH = 110


def text(diagnosis: Diagnosis) -> str:
    """Returns a diagnosis as text for a terminal, without a line break at the end."""
    return "\n".join(_lines(diagnosis))


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    verdict, *more = map(str, diagnosis.headlines)
    yield verdict
    yield run_line(diagnosis)
    yield from diagnosis.run["damage"]
    yield from more
    first = diagnosis.first
    if first is not None:
        yield ""
        yield from _full(first)
    rest = [finding for finding in diagnosis.findings if finding is not first]
    for severity, title in (
        (Severity.BROKEN, "Broken later, or as a consequence"),
        (Severity.WARNING, "Warnings"),
        (Severity.NOTE, "Notes"),
    ):
        found = sorted((f for f in rest if f.severity is severity), key=lambda finding: finding.step)
        if found:
            yield ""
            yield title
            yield from (line for finding in found for line in _short(finding))
    if diagnosis.unjudged:
        yield ""
        count = len(diagnosis.unjudged)
        yield f"Not judged ({count} rule{'' if count == 1 else 's'})"
        yield from _unjudged(diagnosis)


def run_line(diagnosis: Diagnosis) -> str:
    """Describes the run in one line: source, steps, state."""
    run = diagnosis.run
    state = f", {run['state']}" if run["state"] else ""
    others = f"{run['steps']} steps, none of RL" if run["steps"] else "no steps"
    steps = f"{run['rl_steps']} RL steps" if run["rl_steps"] else others
    span = f" ({run['first_step']} to {run['last_step']})" if run["steps"] else ""
    return f"{run['source'] or 'run'}: {steps}{span}{state}"


def _full(finding: Finding) -> Iterator[str]:
    yield "Evidence"
    for line in finding.evidence:
        yield from _item(line)
    if finding.causes:
        yield "Likely causes"
        for number, cause in enumerate(finding.causes, 1):
            yield from _item(cause, f"  {number}. ")
    if finding.next:
        yield "Next"
        yield from _item(finding.next)


def _short(finding: Finding) -> Iterator[str]:
    yield from _item(f"{finding.rule} (step {finding.step}): {finding.evidence[0]}")


def _unjudged(diagnosis: Diagnosis) -> Iterator[str]:
    """Groups rules by what they lack."""
    by_reason: dict[str, list[str]] = {}
    for rule, reason in diagnosis.unjudged.items():
        by_reason.setdefault(reason, []).append(rule)
    for reason, rules in by_reason.items():
        yield from _item(f"{', '.join(rules)}: {reason}")


def _item(line: str, bullet: str = "  - ") -> Iterable[str]:
    return textwrap.wrap(
        line, WIDTH, initial_indent=bullet, subsequent_indent=" " * len(bullet), break_long_words=False, break_on_hyphens=False
    )
