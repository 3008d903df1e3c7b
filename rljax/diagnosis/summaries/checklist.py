"""Checklists before, during and after training, filled in from the record of a run.

An item is done, not done, or open: open ones need a person, or something the run did not record.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from rljax.diagnosis import names
from rljax.diagnosis.finding import Diagnosis, Link, Severity, link_of
from rljax.diagnosis.history import History
from rljax.diagnosis.progress import divergence, evaluation_size
from rljax.diagnosis.rules import OWN


class Phase(enum.StrEnum):
    """Part of a run's life."""

    BEFORE = "before"
    DURING = "during"
    AFTER = "after"


@dataclasses.dataclass(frozen=True)
class Answer:
    """Answer to an item: done (True), not done (False), or open (None), and why."""

    done: bool | None
    why: str


@dataclasses.dataclass(frozen=True)
class Item:
    """Item of a checklist."""

    phase: Phase
    text: str
    answer: Callable[[History, Diagnosis], Answer]


@dataclasses.dataclass(frozen=True)
class Filled:
    """Item with its answer for one run."""

    phase: Phase
    text: str
    done: bool | None
    why: str

    def json(self) -> dict[str, Any]:
        return {"phase": str(self.phase), "item": self.text, "done": self.done, "why": self.why}


def _quiet(*rules: str, context: bool = False) -> Callable[[History, Diagnosis], Answer]:
    """Answers with the findings of some rules: done if all could judge, and none is above a note.

    Args:
      context: they read context.json too.
    """

    def answer(history: History, diagnosis: Diagnosis) -> Answer:
        if (spoke := _spoke(diagnosis, rules)) is not None:
            return spoke
        unjudged = [diagnosis.unjudged[rule] for rule in rules if rule in diagnosis.unjudged]
        if unjudged or not history.rl_steps:
            return Answer(None, unjudged[0] if unjudged else diagnosis.lacking)
        if context and not history.context:
            return Answer(None, "needs context.json")
        if not any(rule.is_about(history) for rule in OWN if rule.id in rules):
            return Answer(None, "no rule is about a run with this config")
        return Answer(True, "")

    return answer


def _link(link: Link) -> Callable[[History, Diagnosis], Answer]:
    """Answers with the findings of a whole link.

    Open where a rule needs more steps than there are, or none had what it needs.
    """

    def answer(history: History, diagnosis: Diagnosis) -> Answer:
        known = {*diagnosis.judged, *diagnosis.unjudged, *(finding.rule for finding in diagnosis.findings)}
        ids = {id for id in known if link_of(id) is link}
        if (spoke := _spoke(diagnosis, ids)) is not None:
            return spoke
        if not history.rl_steps:
            return Answer(None, diagnosis.lacking)
        if early := sorted(diagnosis.early.intersection(ids)):
            return Answer(None, f"{early[0]} {diagnosis.unjudged[early[0]]}")
        if diagnosis.judged.intersection(ids):
            return Answer(True, "")
        unjudged = [diagnosis.unjudged[id] for id in sorted(ids.intersection(diagnosis.unjudged))]
        return Answer(None, unjudged[0]) if unjudged else Answer(True, "the run has none")

    return answer


def _spoke(diagnosis: Diagnosis, rules: Collection[str]) -> Answer | None:
    """Returns the first finding of some rules above a note, as the answer; None without one."""
    spoke = [f for f in diagnosis.findings if f.rule in rules and f.severity > Severity.NOTE]
    return Answer(False, f"{spoke[0].rule}: {spoke[0].evidence[0]}") if spoke else None


def _person(why: str) -> Callable[[History, Diagnosis], Answer]:
    return lambda history, diagnosis: Answer(None, why)


def _recorded(history: History, diagnosis: Diagnosis) -> Answer:
    lacking = [name for name, there in (("config.json", history.config), ("context.json", history.context)) if not there]
    return Answer(not lacking, f"there is no {' and no '.join(lacking)}" if lacking else "")


def _committed(history: History, diagnosis: Diagnosis) -> Answer:
    states = [session.get("dirty") for session in history.context]
    if not states or None in states:
        return Answer(None, "no commit is recorded: rljax is installed, or the run is older")
    return Answer(not any(states), "changes were not committed" if any(states) else "")


def _evaluated(history: History, diagnosis: Diagnosis) -> Answer:
    count = len(history.evaluations)
    times = "one evaluation" if count == 1 else f"{count} evaluations"
    return Answer(count > 0, f"{times} of {evaluation_size(history)} episodes" if count else "no evaluation")


def _learnable(history: History, diagnosis: Diagnosis) -> Answer:
    equal = history[names.EQUAL_REWARD_GROUPS]
    if not equal:
        return Answer(None, f"needs {names.EQUAL_REWARD_GROUPS}")
    first = float(equal.values[0])
    return Answer(first < 0.9, f"{1 - first:.0%} of the first batch's groups have different rewards")


def _saved(history: History, diagnosis: Diagnosis) -> Answer:
    if history.config is None:
        return Answer(None, "needs config.json")
    saver = history.config.saver
    return Answer(bool(saver.freq_steps or saver.freq_epochs), f"saver.freq_steps is {saver.freq_steps}")


def _finished(history: History, diagnosis: Diagnosis) -> Answer:
    state = history.state
    if diagnosis.failure:
        return Answer(False, f"it failed: {diagnosis.failure}")
    return Answer(None if state is None else state == "finished", f"the run is {state}" if state else "needs status.json")


def _better(history: History, diagnosis: Diagnosis) -> Answer:
    found = divergence(history)
    if found is None:
        return Answer(None, "fewer than three evaluations")
    return Answer(found.held_out > 2 * found.error, f"held-out reward gained {found.held_out:+.0%} of its range")


ITEMS: Sequence[Item] = (
    Item(Phase.BEFORE, "Config, seed, code, packages, hardware, model and data are recorded", _recorded),
    Item(Phase.BEFORE, "The code is committed", _committed),
    Item(Phase.BEFORE, "Evaluations use other prompts than training", _quiet("evaluation.same_data", context=True)),
    Item(Phase.BEFORE, "Evaluations sample as training does, or differ on purpose", _quiet("evaluation.protocol")),
    Item(Phase.BEFORE, "The first batch has something to learn from", _learnable),
    Item(
        Phase.BEFORE,
        "The reward has the right sign and scale",
        _quiet("reward.sign", "reward.negative_scaling", "reward.scale"),
    ),
    Item(Phase.BEFORE, "Sampler and learner give the same log-probs", _quiet("policy.sampler_disagrees")),
    Item(Phase.BEFORE, "Checkpoints are saved", _saved),
    Item(Phase.BEFORE, "Ten completions were read beside their rewards", _person("only a person can")),
    Item(Phase.DURING, "Held-out reward is measured", _evaluated),
    Item(Phase.DURING, "Environment and data are sound", _link(Link.ENVIRONMENT)),
    Item(Phase.DURING, "The reward signal is sound", _link(Link.REWARD)),
    Item(Phase.DURING, "Updates stay in their trust region", _link(Link.POLICY)),
    Item(Phase.DURING, "The critic predicts, where there is one", _link(Link.CRITIC)),
    Item(Phase.DURING, "The policy still explores", _link(Link.EXPLORATION)),
    Item(Phase.DURING, "Tokens are fresh", _link(Link.FRESHNESS)),
    Item(Phase.DURING, "Numbers are finite and of one size", _link(Link.NUMBERS)),
    Item(Phase.DURING, "Time and memory stay level", _link(Link.RESOURCES)),
    Item(Phase.AFTER, "The run came to its end", _finished),
    Item(Phase.AFTER, "Held-out reward improved by more than chance", _better),
    Item(Phase.AFTER, "The protocol stayed the same throughout", _quiet("evaluation.protocol_changed", context=True)),
    Item(Phase.AFTER, "The samples with the highest reward were read", _person("rljax doctor --workdir=DIR --audit=OUT")),
    Item(Phase.AFTER, "Other seeds agree", _person("rljax doctor --workdir=A,B,C")),
    Item(
        Phase.AFTER,
        "A private set agrees",
        _person("rljax evaluate --split=private_test, then rljax doctor --workdir=DIR --private=RESULT"),
    ),
)


def fill(history: History, diagnosis: Diagnosis, items: Iterable[Item] = ITEMS) -> list[Filled]:
    """Answers the items for a run and its diagnosis."""
    filled = []
    for item in items:
        answer = item.answer(history, diagnosis)
        filled.append(Filled(item.phase, item.text, answer.done, answer.why))
    return filled


MARKS = {True: "[x]", False: "[!]", None: "[ ]"}


def text(filled: Iterable[Filled]) -> str:
    """Returns filled checklists as text: [x] done, [!] not done, [ ] open."""
    filled = list(filled)
    lines: list[str] = []
    for phase in Phase:
        lines += ["", f"{str(phase).capitalize()} training"] if lines else [f"{str(phase).capitalize()} training"]
        lines += [f"  {MARKS[f.done]} {f.text}{f' ({f.why})' if f.why else ''}" for f in filled if f.phase is phase]
    return "\n".join(lines)
