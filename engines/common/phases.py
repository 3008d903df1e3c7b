"""The phases of a learner: not started, supervised, reinforcement; and what each one allocates.

    not started --update_supervised--> supervised --update, score_reference, values--> reinforcement

With `warmup.steps=0` reinforcement begins at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

Tree = Any  # nested dicts of a framework's arrays


class Trained(Protocol):
    """Anything with optimizer state: a phase's optimizer, or a critic."""

    def scale_lr(self, factor: float) -> None: ...

    def saved(self) -> Mapping[str, Tree]: ...

    def load(self, saved: Any) -> None: ...


PhaseT = TypeVar("PhaseT", bound=Trained)
CriticT = TypeVar("CriticT", bound=Trained)


@dataclasses.dataclass
class Reinforcement(Generic[PhaseT, CriticT]):
    """The optimizer, critic and reference that exist from the moment RL begins."""

    actor: PhaseT
    critic: CriticT | None
    reference: Tree | None  # weights like the policy's, in the compute dtype

    def scale_lr(self, factor: float) -> None:
        for part in (self.actor, self.critic):
            if part is not None:
                part.scale_lr(factor)

    def saved(self, *, with_reference: bool) -> dict[str, Tree]:
        tree: dict[str, Tree] = {"actor": self.actor.saved()}
        if self.critic is not None:
            tree["critic"] = self.critic.saved()
        if self.reference is not None and with_reference:
            tree["reference"] = self.reference
        return tree

    def load(self, saved: Mapping[str, Tree]) -> None:
        self.actor.load(saved["actor"])
        if self.critic is not None:
            self.critic.load(saved["critic"])
        if "reference" in saved:
            self.reference = saved["reference"]


@dataclasses.dataclass(frozen=True)
class Phases(Generic[PhaseT, CriticT]):
    """The phases that have begun and have not ended."""

    supervised: PhaseT | None = None  # optimizer of the warm-up; freed when RL begins
    rl: Reinforcement[PhaseT, CriticT] | None = None

    @property
    def names(self) -> list[str]:
        """Names of the current phases, "supervised" and "rl", for a checkpoint's meta.json."""
        return [field.name for field in dataclasses.fields(self) if getattr(self, field.name) is not None]

    def scale_lr(self, factor: float) -> None:
        """Multiplies all learning rates of later steps by `factor`, relative to their schedules."""
        for part in (self.supervised, self.rl):
            if part is not None:
                part.scale_lr(factor)

    def saved(self, policy: Tree, *, with_reference: bool) -> dict[str, Tree]:
        """Builds a checkpoint's tree from the storage itself, without a copy.

        {"policy", "supervised": phase, "rl": {"actor": phase, "critic", "reference"}}
        """
        tree: dict[str, Tree] = {"policy": policy}
        if self.supervised is not None:
            tree["supervised"] = self.supervised.saved()
        if self.rl is not None:
            tree["rl"] = self.rl.saved(with_reference=with_reference)
        return tree

    def load(self, tree: Mapping[str, Tree]) -> None:
        """Loads everything but the policy from such a tree."""
        if self.supervised is not None:
            self.supervised.load(tree["supervised"])
        if self.rl is not None:
            self.rl.load(tree["rl"])
