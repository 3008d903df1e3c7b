"""Diagnosis of a run while it goes on: its verdict in a line, and actions for its findings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

from rljax.config.schema import Config
from rljax.diagnosis import Diagnosis, Finding, History, Severity
from rljax.diagnosis.doctor import NO_RL_STEPS
from rljax.diagnosis.history import METRICS, SAMPLES
from rljax.diagnosis.live import LiveDoctor, require_rules
from rljax.diagnosis.run_files import Tail
from rljax.metrics.guardrails import Breach, Event
from rljax.metrics.mean import Mean, flatten

MOST_MB = 32  # that are read of each file of a run that goes on: about 5,000 steps of metrics


class Verdicts:
    """Live doctor of a run, as the loop uses it.

    Example:

        verdicts.write(step, metrics)       # several times per step; they merge
        verdicts.breaches()                 # of the rules of guard.rules
        verdicts.news()                     # findings that the last judgment was the first to have
        verdicts.line                       # "HEALTHY: no link is broken"
        verdicts.event(event)               # an action of a guardrail
    """

    def __init__(self, config: Config, workdir: Path, first_step: int) -> None:
        """Reads the run's steps up to `first_step`; of a long run the first and the last of them.

        Raises UserError if `guard.rules` names a rule that does not exist.
        """
        self._config = config
        self._actions = config.guard.rule_actions() if config.guard.enabled else {}
        require_rules(self._actions, "guard.rules.")
        past = History.load(workdir, most_mb=MOST_MB) if (workdir / METRICS).exists() else None
        before = past.between(0, first_step) if past is not None else None
        self._doctor = LiveDoctor(config, before=before)
        self._samples = Tail(workdir / SAMPLES)  # the sink that writes them has the texts
        self._acted: set[str] = set()  # rules that had their action, and still have a finding
        self._known: set[str] = set()  # rules with a warning or a break in the last judgment
        self.line = ""  # the verdict; "" before the first judgment

    def write(self, step: int, metrics: Mapping[str, Mean]) -> None:
        """Takes metrics of a step, and judges if that is due: in at most 1% of the time."""
        if self._config.stats_logger.verdict or self._actions:
            for sample in self._samples.read():
                self._doctor.sample(sample)
            news = self._doctor.write(step, flatten(metrics))
            if news is not None and self._config.stats_logger.verdict and not self._is_early(news):
                self.line = news.verdict()  # stays while only its figures change, so that logs have it once

    def conclude(self) -> None:
        """Judges by all steps so far, whatever the time: the line of a run that ends."""
        if self._config.stats_logger.verdict and self._doctor.diagnosis is not None:
            self.line = self._doctor.judge().verdict()

    def event(self, event: Event) -> None:
        """Takes an action of a guardrail."""
        self._doctor.event(dataclasses.asdict(event))

    def breaches(self) -> list[Breach]:
        """Returns findings of the rules in `guard.rules` that had no action yet; notes are none.

        A finding that goes and comes back has its action again.
        """
        if not self._actions:
            return []
        findings = [f for f in self._doctor.judge_only(self._actions) if f.severity is not Severity.NOTE]
        new = [self._breach(finding) for finding in findings if finding.rule not in self._acted]
        self._acted = {finding.rule for finding in findings}
        return new

    def news(self) -> list[Finding]:
        """Returns warnings and breaks of the last judgment, by rules with none in the one before."""
        diagnosis = self._doctor.diagnosis
        findings = [f for f in diagnosis.findings if f.severity is not Severity.NOTE] if diagnosis else []
        new = [finding for finding in findings if finding.rule not in self._known]
        self._known = {finding.rule for finding in findings}
        return new

    def roll_back(self, target: int) -> None:
        """Forgets the steps after `target`, which a rollback undid."""
        self._doctor = LiveDoctor(self._config, before=self._doctor.history().between(0, target))
        self._acted, self._known = set(), set()

    def _is_early(self, diagnosis: Diagnosis) -> bool:
        """Returns whether all it says is that there are no RL steps, which there will be."""
        return diagnosis.lacking == NO_RL_STEPS and not diagnosis.findings and self._config.actor.loss != "sft"

    def _breach(self, finding: Finding) -> Breach:
        metric = finding.series[0] if finding.series else ""
        values = self._doctor.history()[metric].values
        remedy = "; ".join([*finding.causes[:1], *([f"next: {finding.next}"] if finding.next else [])])
        return Breach(
            guard=f"rules.{finding.rule}",
            metric=metric,
            value=float(values[-1]) if len(values) else math.nan,
            bound=None,
            action=self._actions[finding.rule],
            since=finding.step,
            line=finding.evidence[0],
            remedy=remedy,
        )
