"""Rules: judgments of one link each, declared by the decorator `rule`.

    @rule(
        "policy.clip_ratio",
        "A large share of tokens is clipped: the update leaves the trust region.",
        needs=("ppo_actor/update/clip_ratio",),
        least=5,
        causes=("the learning rate is too high", "too many minibatches per batch"),
        next="train again with half of actor.optimizer.lr",
    )
    def clip_ratio(history: History) -> Sign | None:
        ...

A rule of your own is such an object, or a list of them, named by an entry point of the group
`rljax.rules` (docs/doctor.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from rljax.config.schema import Config
from rljax.diagnosis.advice import reword
from rljax.diagnosis.finding import Finding, Link, Severity, link_of
from rljax.diagnosis.history import History
from rljax.diagnosis.progress import lost_share
from rljax.diagnosis.thresholds import Count, Threshold


@dataclasses.dataclass(frozen=True)
class Sign:
    """Evidence that a rule found, and how bad it is.

    Example: Sign(Severity.WARNING, 12, "clip_ratio is 0.61 (median of steps 12 to 16), above 0.4")
    """

    severity: Severity
    step: int  # of the first evidence
    evidence: str | tuple[str, ...]  # lines with figures and steps; the first says it all
    causes: tuple[str, ...] = ()  # if they differ from the rule's own
    next: str = ""  # likewise
    series: tuple[str, ...] = ()  # metrics of the evidence, if they differ from the rule's needs
    over: bool = False  # the last steps are without it: where no reward was lost, it is a note


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule: what it reads, what it means, and the function that judges."""

    id: str  # LINK.NAME
    meaning: str  # one sentence: what is wrong when it speaks
    judge: Callable[[History], Sign | None]
    needs: tuple[str, ...] = ()  # metrics that it reads; without one of them it does not judge
    least: int = 1  # points that each of these must have
    needs_config: bool = False  # it reads config.json
    applies: Callable[[Config], bool] | None = None  # configs that it is about; None for all
    bounds: tuple[Threshold | Count, ...] = ()  # thresholds that it compares with, for its documentation
    causes: tuple[str, ...] = ()  # likely causes, the likeliest first
    next: str = ""  # next experiment; WORKDIR stands for the run's directory
    symptom: bool = False  # a late symptom: a break of another link at about the same time explains it

    @property
    def link(self) -> Link:
        return link_of(self.id)

    def is_about(self, history: History) -> bool:
        """Returns whether the rule concerns a run with this config; True if there is no config."""
        return self.applies is None or history.config is None or self.applies(history.config)

    def missing(self, history: History) -> str:
        """Returns what the rule needs and the run lacks, in one line; "" if nothing."""
        lacking = ["config.json"] if self.needs_config and history.config is None else []
        lacking += [name for name in self.needs if not history[name]]
        if lacking:
            return history.in_its_words(f"needs {', '.join(lacking)}")
        short = [name for name in self.needs if len(history[name]) < self.least]
        if not short:
            return ""
        return history.in_its_words(f"needs {self.least} steps of {short[0]}, has {len(history[short[0]])}")

    def is_early(self, history: History) -> bool:
        """Returns whether all that the rule lacks is steps: the run has not come far enough for it."""
        return all(history[name] for name in self.needs) and any(len(history[name]) < self.least for name in self.needs)

    def apply(self, history: History) -> Finding | None:
        """Returns the rule's finding on a run that lacks nothing it needs."""
        sign = self.judge(history)
        if sign is None:
            return None
        evidence = (sign.evidence,) if isinstance(sign.evidence, str) else sign.evidence
        passed = sign.over and not lost_share(history)
        causes = (reword(cause, history.trainer) for cause in sign.causes or self.causes)
        advice = reword(sign.next or self.next, history.trainer)
        return Finding(
            self.id,
            self.link,
            Severity.NOTE if passed else sign.severity,
            sign.step,
            tuple(history.in_its_words(line) for line in evidence),
            tuple(history.in_its_words(name) for name in sign.series or self.needs),
            tuple(filter(None, causes)),
            advice.replace("WORKDIR", history.source or "WORKDIR").replace("=STEP", f"={sign.step}"),
            self.symptom,
        )


def rule(
    id: str,
    meaning: str,
    *,
    needs: tuple[str, ...] = (),
    least: int = 1,
    needs_config: bool = False,
    applies: Callable[[Config], bool] | None = None,
    bounds: tuple[Threshold | Count, ...] = (),
    causes: tuple[str, ...] = (),
    next: str = "",
    symptom: bool = False,
) -> Callable[[Callable[[History], Sign | None]], Rule]:
    """Makes a rule of a function that judges; the arguments are the fields of `Rule`."""

    def declare(judge: Callable[[History], Sign | None]) -> Rule:
        return Rule(id, meaning, judge, needs, least, needs_config, applies, bounds, causes, next, symptom)

    return declare
