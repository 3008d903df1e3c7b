"""All rules: those of this package, and those that other packages bring by entry point.

A third party declares an entry point of the group `rljax.rules`, which names a Rule or a sequence
of rules.
"""

from __future__ import annotations

from collections.abc import Iterable

from rljax import entry_points
from rljax.diagnosis.rule import Rule
from rljax.diagnosis.rules import OWN
from rljax.errors import UserError

GROUP = "rljax.rules"


def all_rules() -> tuple[Rule, ...]:
    """Returns the rules of this package and of all installed ones, by link.

    Raises:
      UserError: an entry point can't be loaded or names no rules, or two rules have one id.
    """
    rules = list(OWN)
    for point in entry_points.installed(GROUP):
        try:
            found = point.load()
        except Exception as error:  # a third party's module may raise anything
            reason = " ".join(str(error).split())
            raise UserError(
                f"{GROUP}: {point.name} can't be loaded from {point.value}: {type(error).__name__}: {reason}"
            ) from error
        theirs = [found] if isinstance(found, Rule) else list(found) if isinstance(found, Iterable) else []
        if not theirs or not all(isinstance(each, Rule) for each in theirs):
            raise UserError(f"{GROUP}: {point.value} is no Rule and no list of them (see rljax/diagnosis/rule.py)")
        rules += theirs
    check(rules)
    return tuple(sorted(rules, key=lambda each: each.link))


def check(rules: Iterable[Rule]) -> None:
    """Raises UserError for an id that two rules have, or that names no link."""
    seen: set[str] = set()
    for each in rules:
        try:
            _ = each.link
        except KeyError:
            raise UserError(f"{GROUP}: {each.id}: an id begins with a link, as in reward.mine") from None
        if each.id in seen:
            raise UserError(f"{GROUP}: {each.id}: two rules have this id")
        seen.add(each.id)
