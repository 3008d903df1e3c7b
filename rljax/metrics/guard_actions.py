"""Actions of the guardrails: which one is taken for a breach, and what a run remembers of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rljax.config.schema import Config
from rljax.metrics.guardrails import Breach

LEAST_LR_FACTOR = 1 / 1024  # a rate that had to be lowered further is not what is wrong


class Decision(NamedTuple):
    """An action that is taken for a breach."""

    breach: Breach
    action: str
    reason: str  # why the action is not the breach's own; "" if it is


@dataclasses.dataclass
class GuardActions:
    """Record of what the guardrails have done to a run so far. Saved in its checkpoints.

    Example:

        actions = GuardActions(config)
        for breach, action, reason in actions.decide(guardrails.check(step, metrics)):
            ...                                      # "rollback", or "stop" after too many
    """

    config: Config
    lr_factor: float = 1.0  # of all learning rates, relative to their schedules
    undone: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (step restored, step of the rollback)

    def decide(self, breaches: Sequence[Breach], *, supervised: bool = False) -> list[Decision]:
        """Returns what to do about breaches, in order, up to the first that ends or undoes steps.

        Args:
          supervised: the last step was a supervised one, which is never rolled back.
        """
        decisions = []
        for breach in breaches:
            decisions.append(Decision(breach, *self._action_of(breach, supervised)))
            if decisions[-1].action in ("stop", "rollback"):
                break
        return decisions

    def _action_of(self, breach: Breach, supervised: bool) -> tuple[str, str]:
        guard = self.config.guard
        if breach.action == "rollback" and supervised:
            return "stop", "in the supervised steps, which are not rolled back"
        if breach.action == "rollback" and len(self.undone) >= guard.max_rollbacks:
            return "stop", f"after {len(self.undone)} rollbacks (guard.max_rollbacks)"
        if breach.action == "halve_lr" and self.lr_factor / 2 < LEAST_LR_FACTOR:
            return "stop", f"at a learning rate that was lowered to {self.lr_factor:.2g} of its schedule already"
        return breach.action, ""

    @property
    def margin(self) -> int:
        """Steps from a checkpoint to the first bad one from which on it is trusted.

        Metrics of a step are about completions of up to `max_head_offpolicyness` versions before
        it, and the update before those may be the bad one.
        """
        return self.config.rollout.max_head_offpolicyness + 2

    def newest_target(self, breach: Breach) -> int:
        """Returns the newest step whose checkpoint may be restored for a breach.

        If none was made since the last rollback that is old enough, what that one restored did not
        help, and an older one is needed.
        """
        trusted = breach.since - self.margin
        if self.undone and trusted <= self.undone[-1][1]:
            return min(trusted, self.undone[-1][0] - 1)
        return trusted

    def oldest_target(self, step: int, targets: Sequence[int]) -> int | None:
        """Returns the checkpoint to restore if the next step is bad; it and later ones are kept."""
        return max((target for target in targets if target <= step - self.margin), default=min(targets, default=None))

    def was_undone(self, step: int) -> bool:
        """Returns whether a rollback undid a step, whose checkpoint may still be there."""
        return any(target < step < at for target, at in self.undone)

    def rolled_back(self, step: int, target: int) -> None:
        """Records a rollback at a step to the checkpoint of another."""
        self.undone.append((target, step))
        self.lr_factor *= self.config.guard.rollback_lr_factor

    def state(self) -> dict[str, Any]:
        """Returns the state as JSON values."""
        return {"lr_factor": self.lr_factor, "undone": [list(pair) for pair in self.undone]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.lr_factor, self.undone = state["lr_factor"], [(target, step) for target, step in state["undone"]]
