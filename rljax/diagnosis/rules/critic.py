"""Rules of the link critic."""

from rljax.diagnosis.rule import Rule

RULES: tuple[Rule, ...] = ()
