"""Metrics of a step as recorded and as made again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

# Difference allowed per step since the two were equal, relative to max(1, |metric|): docs/moving.md. By actor.dtype.
BOUNDS = {"float32": 1e-5, "bfloat16": 5e-2}


@dataclasses.dataclass(frozen=True)
class Difference:
    """One metric of a step, recorded and made again.

    Example: Difference("ppo_actor/update/loss", -0.0132, -0.0132)
    """

    name: str
    recorded: float
    remade: float

    @property
    def equal(self) -> bool:
        """True if both are equal to the bit; two NaNs are."""
        return self.recorded == self.remade or (math.isnan(self.recorded) and math.isnan(self.remade))

    @property
    def size(self) -> float:
        """Absolute difference, relative to the recorded value where that is above 1."""
        if self.equal:
            return 0.0
        difference = abs(self.remade - self.recorded) / max(1.0, abs(self.recorded))
        return math.inf if math.isnan(difference) else difference


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A step as recorded and as made again."""

    differences: tuple[Difference, ...]
    bound: float
    unrecorded: tuple[str, ...]  # metrics of the step made again that the run did not record

    @property
    def holds(self) -> bool:
        """True if every metric is within the bound."""
        return all(difference.size <= self.bound for difference in self.differences)

    @property
    def verdict(self) -> str:
        """One line."""
        count, exact = len(self.differences), sum(difference.equal for difference in self.differences)
        if not count:
            return "nothing was recorded of this step's metrics to compare with"
        if exact == count:
            return f"equal: all {count} metrics to the bit"
        worst = max(self.differences, key=lambda difference: difference.size)
        beyond = sum(difference.size > self.bound for difference in self.differences)
        facts = f"{exact} of {count} metrics to the bit; largest difference {worst.size:.2g}, of {worst.name}"
        return (
            f"differs: {beyond} of {count} metrics beyond {self.bound:.2g}; {facts}"
            if beyond
            else f"equal within {self.bound:.2g}: {facts}"
        )

    def table(self) -> str:
        """Formats one line per metric."""
        names = [d.name for d in self.differences]
        width = max(map(len, names), default=0)
        head = f"{'metric':{width}}  {'recorded':>24}  {'made again':>24}  difference"
        return "\n".join([head, *(self._line(difference, width) for difference in self.differences)])

    def _line(self, difference: Difference, width: int) -> str:
        size = "0" if difference.equal else f"{difference.size:.2g}{' BEYOND' if difference.size > self.bound else ''}"
        return f"{difference.name:{width}}  {difference.recorded:24.17g}  {difference.remade:24.17g}  {size}"


def compare(recorded: Mapping[str, float], remade: Mapping[str, float], *, dtype: str, steps: int) -> Comparison:
    """Compares a step's metrics.

    Args:
      dtype: actor.dtype.
      steps: number of steps made again since the learner's state was the recorded one.
    """
    both = tuple(Difference(name, recorded[name], remade[name]) for name in remade if name in recorded)
    return Comparison(both, BOUNDS[dtype] * steps, tuple(name for name in remade if name not in recorded))
