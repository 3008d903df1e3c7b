"""Rules of the link context."""

from rljax.diagnosis.rule import Rule

RULES: tuple[Rule, ...] = ()
