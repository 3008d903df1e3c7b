"""Actions of the guardrails: which one is taken for a breach, and what a run remembers of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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
    """What the guardrails have done to a run so far. Saved in its checkpoints.

    Example:

        actions = GuardActions(config)
        for breach, action, reason in actions.decide(guardrails.check(step, metrics)):
            ...                                      # "rollback", or "stop" after too many
    """

    config: Config
    lr_factor: float = 1.0  # of all learning rates, relative to their schedules
    rollbacks: int = 0
    target: int | None = None  # step of the checkpoint that the last rollback restored
    rolled_back_at: int = 0  # step of the last rollback

    def decide(self, breaches: Sequence[Breach], *, supervised: bool = False) -> list[Decision]:
        """Returns what to do about breaches in their order, up to the first that ends or undoes steps.

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
        if breach.action == "rollback" and self.rollbacks >= guard.max_rollbacks:
            return "stop", f"after {self.rollbacks} rollbacks (guard.max_rollbacks)"
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
        if self.target is not None and trusted <= self.rolled_back_at:
            return min(trusted, self.target - 1)
        return trusted

    def rolled_back(self, step: int, target: int) -> None:
        """Records a rollback at a step to the checkpoint of another."""
        self.rollbacks += 1
        self.lr_factor *= self.config.guard.rollback_lr_factor
        self.rolled_back_at, self.target = step, target

    def state(self) -> dict[str, Any]:
        """Returns the state as JSON values."""
        names = ("lr_factor", "rollbacks", "target", "rolled_back_at")
        return {name: getattr(self, name) for name in names}

    def restore(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
