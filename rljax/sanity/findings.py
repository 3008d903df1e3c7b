"""Findings of checks, and the verdict over all of them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any

from rljax.errors import UserError


class Severity(enum.StrEnum):
    """Weight of a finding."""

    ERROR = "error"  # the run would fail, or learn something else than what is meant
    WARNING = "warning"  # look at it
    NOTE = "note"  # a figure to know
    GOOD = "good"  # checked, and as it has to be


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line about one part of a run.

    Example: Finding(Severity.WARNING, "train_dataset", "12 of 900 prompts occur more than once")
    """

    severity: Severity
    part: str  # what was checked, often a config section
    line: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.part}: {self.line}" + (f" ({self.remedy})" if self.remedy else "")


@dataclasses.dataclass(frozen=True)
class Report:
    """All findings, in the order of the checks. What several checks say alike counts once."""

    findings: Sequence[Finding]

    def __post_init__(self) -> None:
        object.__setattr__(self, "findings", tuple(dict.fromkeys(self.findings)))

    def of(self, severity: Severity) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity is severity]

    @property
    def verdict(self) -> str:
        """One line: whether the run may start."""
        errors, warnings = len(self.of(Severity.ERROR)), len(self.of(Severity.WARNING))
        if errors:
            return f"not ready: {_count(errors, 'error')}, {_count(warnings, 'warning')}"
        return f"ready, {_count(warnings, 'warning')}" if warnings else "ready"

    @property
    def is_ready(self) -> bool:
        return not self.of(Severity.ERROR)

    def json(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return {"verdict": self.verdict, "ready": self.is_ready, "findings": [dataclasses.asdict(f) for f in self.findings]}

    def __str__(self) -> str:
        return "\n".join([*_aligned(self.findings), f"verdict: {self.verdict}"])


def _aligned(findings: Iterable[Finding]) -> list[str]:
    width = max(map(len, Severity))
    lines = []
    for finding in findings:
        first, *more = str(finding).split("\n")
        lines.append(f"{finding.severity:{width}}  {first}")
        lines += [" " * (width + 2) + line for line in more]
    return lines


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def of_error(error: UserError, part: str) -> Finding:
    """Returns the finding of an error; a message that begins with a config key is about that key.

    Args:
      part: what was checked, for other messages.
    """
    head, colon, line = str(error).partition(": ")
    return Finding(Severity.ERROR, head, line) if colon and " " not in head else Finding(Severity.ERROR, part, str(error))
