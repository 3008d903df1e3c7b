"""Paired comparison of two results: the same prompts, the same protocol, two policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from rljax.config.registry import nearest
from rljax.errors import UserError
from rljax.evaluation import estimates
from rljax.evaluation.estimates import Estimate
from rljax.evaluation.protocol import Protocol, differences
from rljax.evaluation.results import Result

SETTINGS = tuple(field.name for field in dataclasses.fields(Protocol))
RECORDS = "data"  # in the identity of a set's prompts: the digest of its records


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Differences of a second policy from a first, prompt by prompt."""

    first: str
    second: str
    pass_at_1: Estimate  # second less first
    reward: Estimate
    better: int  # prompts on which the second has the higher mean reward
    worse: int
    equal: int

    @property
    def verdict(self) -> str:
        """Says which policy is better, or that the prompts don't tell."""
        low, high = self.reward.low, self.reward.high
        if low > 0 or high < 0:
            return f"{self.second if low > 0 else self.first} is better"
        return f"no difference that {self.reward.prompts} prompts can tell from chance"

    def json(self) -> dict[str, Any]:
        """Returns the comparison as JSON values."""
        return dataclasses.asdict(self) | {"verdict": self.verdict}

    def __str__(self) -> str:
        lines = [
            f"{self.second} less {self.first}, over {self.reward.prompts} prompts:",
            f"  pass@1  {_signed(self.pass_at_1)}",
            f"  reward  {_signed(self.reward)}",
            f"  {self.better} prompts better, {self.worse} worse, {self.equal} equal; {estimates.LEVEL:.0%} intervals of the",
            "  paired differences of prompts (Student's t)",
            f"verdict: {self.verdict}",
        ]
        return "\n".join(lines)


def compare(first: Result, second: Result, *, despite: Collection[str] = ()) -> Comparison:
    """Compares two results.

    Args:
      despite: settings of the protocol that may differ, as "template" for models with different
        chat templates. With "data" the choice from the records may differ (max_length, order); the
        records may not, for prompts are paired by their place among them.

    Raises:
      UserError: the protocols differ, or fewer than two prompts have samples in both.
    """
    for name in despite:
        if name not in SETTINGS:
            raise UserError(f"--despite: no such setting of a protocol: {name} ({nearest(name, SETTINGS)})")
    if "data" in despite and first.protocol.data.get(RECORDS) != second.protocol.data.get(RECORDS):
        raise UserError("--despite: data: the records differ, and prompts are paired by their place in them (evaluate again)")
    all_apart = differences(first.protocol.json(), second.protocol.json())
    apart = [line for line in all_apart if line.partition(":")[0] not in despite]
    if apart:
        raise UserError(f"--compare: results of different protocols do not compare: {'; '.join(apart)}")
    ours, theirs = first.means(), second.means()
    shared = [uid for uid in ours if uid in theirs]
    if len(shared) < 2:
        raise UserError(f"--compare: {len(shared)} prompts have samples in both results (at least 2)")
    gains = [theirs[uid] - ours[uid] for uid in shared]
    before, after = first.passes(), second.passes()
    return Comparison(
        first=str(first.policy),
        second=str(second.policy),
        pass_at_1=estimates.mean([after[uid] - before[uid] for uid in shared]),
        reward=estimates.mean(gains),
        better=sum(gain > 0 for gain in gains),
        worse=sum(gain < 0 for gain in gains),
        equal=sum(gain == 0 for gain in gains),
    )


def _signed(estimate: Estimate) -> str:
    return f"{estimate.value:+.4f} [{estimate.low:+.4f}, {estimate.high:+.4f}]"
