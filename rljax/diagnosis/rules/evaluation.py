"""Rules of the link evaluation."""

from rljax.diagnosis.rule import Rule

RULES: tuple[Rule, ...] = ()
