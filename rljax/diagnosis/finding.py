"""Findings of rules, and the diagnosis that they add up to."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Link(enum.IntEnum):
    """Links of the loop, in the order in which to suspect them."""

    CONTEXT = 0
    ENVIRONMENT = 1
    EVALUATION = 2
    REWARD = 3
    POLICY = 4
    CRITIC = 5
    EXPLORATION = 6
    FRESHNESS = 7
    NUMBERS = 8
    RESOURCES = 9

    def __str__(self) -> str:
        return self.name.lower()


def link_of(rule: str) -> Link:
    """Returns the link that a rule's id begins with."""
    return Link[rule.partition(".")[0].upper()]


class Severity(enum.IntEnum):
    """Severity of a finding."""

    NOTE = 0  # worth knowing; healthy runs have some
    WARNING = 1  # a link is under strain: look at it before trusting the run
    BROKEN = 2  # a link does not do its job: what the run learns is not what was meant

    def __str__(self) -> str:
        return self.name.lower()


class Standing(enum.StrEnum):
    """Answer to how a run does, in one word."""

    FAILED = "FAILED"  # it ended with an error, a guardrail ended it, or it was killed
    BROKEN = "BROKEN"
    WARNING = "WARNING"
    NOT_JUDGED = "NOT JUDGED"  # nothing was found, and reward or policy could not be looked at
    HEALTHY = "HEALTHY"


@dataclasses.dataclass(frozen=True)
class Finding:
    """Verdict of one rule on one run.

    Example: Finding("policy.kl", Link.POLICY, Severity.BROKEN, 12, ("approx_kl is 0.9 nats ...",))
    """

    rule: str  # id, as "policy.kl"
    link: Link
    severity: Severity
    step: int  # step of the first evidence
    evidence: tuple[str, ...]  # lines with figures and steps
    series: tuple[str, ...] = ()  # metrics that the evidence is about
    causes: tuple[str, ...] = ()  # likely causes, the likeliest first
    next: str = ""  # next experiment to run
    symptom: bool = False  # true of late symptoms, which another link's break explains

    def json(self) -> dict[str, Any]:
        """Returns the finding as JSON values."""
        return {
            "rule": self.rule,
            "link": str(self.link),
            "severity": str(self.severity),
            "step": self.step,
            "evidence": list(self.evidence),
            "series": list(self.series),
            "causes": list(self.causes),
            "next": self.next,
        }


class Headline(NamedTuple):
    """Line of a verdict.

    Example: str(Headline(Standing.BROKEN, "the link policy, at step 31 (policy.clip_ratio)"))
    """

    standing: Standing | None
    words: str

    def __str__(self) -> str:
        return f"{self.standing}: {self.words}" if self.standing else self.words


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """All findings on a run, in the order in which things went wrong."""

    findings: tuple[Finding, ...]  # broken first, then warnings, then notes
    unjudged: Mapping[str, str]  # rule id -> what it needed and the run did not record
    run: Mapping[str, Any]  # source, steps and state of the run
    judged: frozenset[str] = frozenset()  # ids of the rules that judged a metric, those of symptoms left out
    early: frozenset[str] = frozenset()  # ids of those in `unjudged` for which the run has too few steps
    short: int = 0  # rules in `unjudged` for which the run has too few steps, those of symptoms too
    asked: int = 0  # rules that are about the run
    lacking: str = ""  # why the run can't be called healthy, as "no RL steps"; "" if it can
    failure: str = ""  # what ended the run before its time; "" if nothing did

    @property
    def standing(self) -> Standing:
        """Verdict in one word. Only a run whose reward and policy were judged is healthy."""
        if self.failure:
            return Standing.FAILED
        if self.first is not None:
            return Standing.WARNING if self.first_break is None else Standing.BROKEN
        return Standing.NOT_JUDGED if self.lacking else Standing.HEALTHY

    @property
    def is_bad(self) -> bool:
        """True if the run failed or a link is broken: exit status 2."""
        return bool(self.failure) or self.first_break is not None

    def says_as(self, other: Diagnosis | None) -> bool:
        """Returns whether another diagnosis says the same, whatever its figures."""
        if other is None:
            return False
        ours, theirs = ((d.standing, d.first.rule if d.first else d.lacking or d.short > 0, d.failure) for d in (self, other))
        return ours == theirs

    @property
    def first_break(self) -> Finding | None:
        """The broken link that came first; None if no link is broken."""
        return self._first(Severity.BROKEN)

    @property
    def first(self) -> Finding | None:
        """The first break or, if no link is broken, the first warning."""
        return self.first_break or self._first(Severity.WARNING)

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        """Returns the findings of one severity."""
        return tuple(finding for finding in self.findings if finding.severity is severity)

    def json(self) -> dict[str, Any]:
        """Returns the diagnosis as JSON values."""
        broken = self.first_break
        keys = ("rule", "link", "step", "evidence", "causes", "next")
        return {
            "standing": str(self.standing),
            "verdict": self.verdict(),
            "first_break": None if broken is None else {key: broken.json()[key] for key in keys},
            "findings": [finding.json() for finding in self.findings],
            "unjudged": dict(self.unjudged),
            "run": dict(self.run),
        }

    @property
    def headlines(self) -> tuple[Headline, ...]:
        """The verdict without its evidence: of a failed run its error, then what the rules found."""
        failed = (Headline(Standing.FAILED, self.failure),) if self.failure else ()
        return (*failed, self._of_links())

    def verdict(self) -> str:
        """Returns the verdict in one line, with the first evidence."""
        first = self.first
        return "; ".join(map(str, self.headlines)) + (f": {first.evidence[0]}" if first is not None else "")

    def _of_links(self) -> Headline:
        broken, first = self.first_break, self.first
        if broken is not None:
            return Headline(Standing.BROKEN, f"the link {broken.link}, at step {broken.step} ({broken.rule})")
        if first is not None:
            return Headline(Standing.WARNING, f"the link {first.link}, at step {first.step} ({first.rule}); no link is broken")
        if self.lacking:
            return Headline(Standing.NOT_JUDGED, self.lacking)
        if self.failure:
            return Headline(None, "no link was found broken before that")
        return Headline(Standing.HEALTHY, "no link is broken" + self._too_short)

    @property
    def _too_short(self) -> str:
        return f"; too short to judge {self.short} of {self.asked} rules" if self.short else ""

    def _first(self, severity: Severity) -> Finding | None:
        return next(iter(self.of(severity)), None)


def in_order(findings: Sequence[Finding], tolerance: int) -> tuple[Finding, ...]:
    """Orders findings: by severity, then by time, and by link among those of about the same time.

    A symptom comes after each break that is not one and that came up to `tolerance` steps later:
    the reward is the last to know.

    Args:
      tolerance: steps within which two onsets count as the same time.
    """
    left, ordered = list(findings), []
    while left:
        worst = max(finding.severity for finding in left)
        peers = [finding for finding in left if finding.severity is worst]
        began = min(finding.step + tolerance * finding.symptom for finding in peers)
        first = min(
            (finding for finding in peers if finding.step <= began + tolerance),
            key=lambda finding: (finding.symptom, finding.link, finding.step),
        )
        ordered.append(first)
        left.remove(first)
    return tuple(ordered)
