"""Memory of a device by component."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

Bytes = Mapping[str, float]  # component -> bytes per device
PUBLISHING = "publishing"  # the moment that takes both sides


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Memory that one side takes on each of its devices.

    Example: Footprint({"weights": 4e9}, {"loss": {"logits": 2e9}}).peak == 6e9
    """

    resident: Bytes  # held between steps too
    moments: Mapping[str, Bytes]  # beside it, at the moments of a step; they don't coincide

    @property
    def held(self) -> float:
        """Bytes between steps."""
        return sum(self.resident.values())

    @property
    def fullest(self) -> str:
        """Name of the moment with the most bytes."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def peak(self) -> float:
        """Bytes at the fullest moment: the sum of `components`."""
        return sum(self.components.values())

    @property
    def components(self) -> dict[str, float]:
        """Bytes by component at the fullest moment, the largest first."""
        return _largest_first(self.resident, self.moments[self.fullest])


def together(first: Footprint, second: Footprint) -> Footprint:
    """Returns the footprint of two sides on the same devices, whose moments may coincide.

    Weights are handed over between two steps: PUBLISHING coincides with itself alone.
    """
    pairs = [(a, b) for a in first.moments for b in second.moments if (a == PUBLISHING) == (b == PUBLISHING)]
    moments = {f"{a} and {b}" if a != b else a: _sum(first.moments[a], second.moments[b]) for a, b in pairs}
    return Footprint(_sum(first.resident, second.resident), moments)


def in_turn(lender: Footprint, other: Footprint) -> Footprint:
    """Returns the footprint of two sides on the same devices, the first of which lets go of all it
    holds while the second works.
    """
    moments = {name: _sum(lender.resident, bytes_) for name, bytes_ in lender.moments.items()}
    return Footprint(other.resident, moments | dict(other.moments))


def without_nothing(components: Bytes) -> dict[str, float]:
    """Returns the components that take memory."""
    return {name: size for name, size in components.items() if size}


def _sum(first: Bytes, second: Bytes) -> dict[str, float]:
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in (*first, *(n for n in second if n not in first))}


def _largest_first(*parts: Bytes) -> dict[str, float]:
    whole: dict[str, float] = {}
    for part in parts:
        whole = _sum(whole, part)
    return dict(sorted(whole.items(), key=lambda item: -item[1]))
