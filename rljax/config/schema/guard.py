"""Keys of the guardrails: bounds on metrics, and what happens to a run that breaks one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from rljax.config.keys import HALF_OPEN_UNIT, NOT_NEGATIVE, POSITIVE, UNIT, key

ACTIONS = ("warn", "halve_lr", "rollback", "stop")  # after a step
UPDATE_ACTIONS = ("skip", "stop_epoch")  # within an update, for bounds on what is known there
OF_UPDATE = ("max_approx_kl", "min_entropy", "max_grad_norm", "max_behave_imp_weight", "min_behave_imp_weight")
BOUNDS = ("finite", "gradient", "collapse", "min_reward", "max_no_eos_ratio", "max_parity_excess", *OF_UPDATE)


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    """Guardrails: bounds on means over a batch, and actions when one is broken. None: no bound."""

    enabled: bool = key(True, "Watch the metrics of each step.")
    action: str = key("stop", "Action when a bound is broken that `guard.actions` does not name.", choices=ACTIONS)
    actions: dict[str, object] = key({}, "Actions by bound, as in guard.actions.max_approx_kl=stop_epoch.")
    rules: dict[str, object] = key({}, "Actions by rule of the doctor, as in guard.rules.policy.kl=rollback.")
    max_rollbacks: int = key(5, "Rollbacks of a run; one more ends it.", NOT_NEGATIVE)
    rollback_lr_factor: float = key(0.3, "Factor of the learning rates after each rollback.", HALF_OPEN_UNIT)
    # Bounds that no healthy run breaks are on by default; the others depend on the task.
    patience: int = key(
        3, "Steps in a row out of a bound before its action; a step far out of it is enough by itself.", POSITIVE
    )
    finite: bool = key(True, "Require a finite loss and gradient norm.")
    gradient: bool = key(True, "Require a gradient that is not exactly 0 in steps with advantages that are not.")
    collapse: bool = key(
        True, "Require half of the best mean reward so far, unless chance explains less, in steps where every advantage is 0."
    )
    max_approx_kl: float | None = key(
        10.0, "Largest KL divergence of the policy from its proximal policy.", POSITIVE, unit="nats per token"
    )
    # On a solved task it is near 0
    min_entropy: float | None = key(None, "Smallest mean entropy.", NOT_NEGATIVE, unit="nats per token")
    max_grad_norm: float | None = key(None, "Largest global norm of the gradient, before clipping.", POSITIVE)
    min_reward: float | None = key(None, "Smallest mean reward of the task.")
    max_behave_imp_weight: float | None = key(
        10.0, "Largest mean ratio of proximal to behavior policy; 1 if sampler and learner agree.", POSITIVE
    )
    min_behave_imp_weight: float | None = key(0.1, "Smallest mean ratio of proximal to behavior policy.", POSITIVE)
    # A base model may begin at 1
    max_no_eos_ratio: float | None = key(None, "Largest share of completions cut at the length limit.", UNIT)
    max_parity_excess: float | None = key(
        1.0, "Largest difference from the shadow's learner, over the bound of its kind (docs/parity.md).", POSITIVE
    )

    def action_of(self, bound: str) -> str:
        """Returns the action of a bound, one of ACTIONS or UPDATE_ACTIONS."""
        return str(self.actions[bound]) if bound in self.actions else self.action

    def rule_actions(self) -> dict[str, str]:
        """Returns the actions of the doctor's rules by their ids, as policy.kl."""
        return dict(_flat(self.rules))

    @property
    def may_roll_back(self) -> bool:
        """True if a bound or a rule has that action."""
        named = [self.action_of(bound) for bound in BOUNDS] + list(self.rule_actions().values())
        return self.enabled and "rollback" in named


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted name, text) for the leaves of nested mappings."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)
