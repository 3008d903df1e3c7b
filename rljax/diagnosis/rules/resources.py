"""Rules of the link resources."""

from rljax.diagnosis.rule import Rule

RULES: tuple[Rule, ...] = ()
