"""Rules of this package, a module per link of the loop, in the order in which to suspect them."""

from rljax.diagnosis.rule import Rule
from rljax.diagnosis.rules import (
    context,
    critic,
    environment,
    evaluation,
    exploration,
    freshness,
    numbers,
    policy,
    resources,
    reward,
)

OWN: tuple[Rule, ...] = (
    *context.RULES,
    *environment.RULES,
    *evaluation.RULES,
    *reward.RULES,
    *policy.RULES,
    *critic.RULES,
    *exploration.RULES,
    *freshness.RULES,
    *numbers.RULES,
    *resources.RULES,
)
