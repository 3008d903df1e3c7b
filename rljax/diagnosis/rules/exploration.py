"""Rules of the link exploration."""

from rljax.diagnosis.rule import Rule

RULES: tuple[Rule, ...] = ()
