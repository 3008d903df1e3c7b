"""Rules of this package, a module per link of the loop, in the order in which to suspect them.

hacking.py has those of the link reward that audit for reward hacking, symptoms.py those that speak
last.
"""

from rljax.diagnosis.rule import Rule
from rljax.diagnosis.rules import (
    context,
    critic,
    environment,
    evaluation,
    exploration,
    freshness,
    hacking,
    numbers,
    policy,
    resources,
    reward,
    symptoms,
)

OWN: tuple[Rule, ...] = (
    *context.RULES,
    *environment.RULES,
    *evaluation.RULES,
    *reward.RULES,
    *hacking.RULES,
    *policy.RULES,
    *critic.RULES,
    *exploration.RULES,
    *freshness.RULES,
    *numbers.RULES,
    *resources.RULES,
    *symptoms.RULES,
)
