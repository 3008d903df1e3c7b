"""The phases of a learner: nothing yet, supervised, reinforcement; and what each brings into
being.

    nothing yet --update_supervised--> supervised --update, score_reference, values--> reinforcement

With `warmup.steps=0` reinforcement begins at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

Tree = Any  # nested dicts of a framework's arrays


class Trained(Protocol):
    """Something with optimizer state: a phase's optimizer, or a critic."""

    def saved(self) -> Mapping[str, Tree]: ...

    def load(self, saved: Any) -> None: ...


PhaseT = TypeVar("PhaseT", bound=Trained)
CriticT = TypeVar("CriticT", bound=Trained)


@dataclasses.dataclass
class Reinforcement(Generic[PhaseT, CriticT]):
    """What exists from the moment that RL begins."""

    actor: PhaseT
    critic: CriticT | None
    reference: Tree | None  # weights like the policy's, in the compute dtype

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
    """The phases that have begun and are not over."""

    supervised: PhaseT | None = None  # optimizer of the warm-up; its moments are let go when RL begins
    rl: Reinforcement[PhaseT, CriticT] | None = None

    @property
    def names(self) -> list[str]:
        """For meta.json of a checkpoint: of "supervised" and "rl"."""
        return [field.name for field in dataclasses.fields(self) if getattr(self, field.name) is not None]

    def saved(self, policy: Tree, *, with_reference: bool) -> dict[str, Tree]:
        """The tree of a checkpoint: {"policy", "supervised": phase, "rl": {"actor": phase,
        "critic", "reference"}}.

        The storage itself, not a copy.
        """
        tree: dict[str, Tree] = {"policy": policy}
        if self.supervised is not None:
            tree["supervised"] = self.supervised.saved()
        if self.rl is not None:
            tree["rl"] = self.rl.saved(with_reference=with_reference)
        return tree

    def load(self, tree: Mapping[str, Tree]) -> None:
        """The inverse for everything but the policy."""
        if self.supervised is not None:
            self.supervised.load(tree["supervised"])
        if self.rl is not None:
            self.rl.load(tree["rl"])
