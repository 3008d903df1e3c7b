"""Scores, and the rewards that a config can name."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any, Protocol

from rljax.types import Prompt

REWARDS = {
    "exact": "rljax.rewards.exact:reward",
    "gsm8k": "rljax.rewards.mathematics:gsm8k_reward",
    "math": "rljax.rewards.mathematics:reward",
    "reasoning_gym": "rljax.rewards.reasoning_gym:reward",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """A reward and its named parts.

    Example: Score(1.1, {"correct": 1.0, "format": 0.1})
    """

    reward: float
    components: Mapping[str, float]


class Rewards(Protocol):
    """Source of scores for a workflow, as `RewardPool`."""

    async def score(self, prompt: Prompt, completion: str) -> Score:
        """Scores a completion. Raises RewardError or RewardTimeout."""
        ...


def score_of(returned: Any) -> Score:
    """Converts a reward function's return value to a Score.

    Raises ValueError if it is no finite number or lacks "reward".
    """
    if not isinstance(returned, Mapping):
        return Score(_number("the reward", returned), {})
    if "reward" not in returned:
        raise ValueError(f"a mapping of components needs 'reward', the total; it has: {', '.join(map(str, returned))}")
    parts = {str(name): _number(f"component {name!r}", value) for name, value in returned.items()}
    return Score(parts.pop("reward"), parts)


def _number(what: str, value: Any) -> float:
    if not (isinstance(value, numbers.Real) or hasattr(value, "__float__")):
        raise ValueError(f"{what} is {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}")
    return number
