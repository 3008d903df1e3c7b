"""Rules of this package, a module per link of the loop, in the order in which to suspect them.

hacking.py has those of the link reward that audit for reward hacking, guardrails.py those of the
link policy that read what guardrails did, symptoms.py those that speak last.
"""

from rljax.diagnosis.rule import Rule
from rljax.diagnosis.rules import (
    context,
    critic,
    environment,
    evaluation,
    exploration,
    freshness,
    guardrails,
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
    *guardrails.RULES,
    *critic.RULES,
    *exploration.RULES,
    *freshness.RULES,
    *numbers.RULES,
    *resources.RULES,
    *symptoms.RULES,
)
