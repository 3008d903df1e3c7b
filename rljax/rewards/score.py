"""Scores, and the rewards that a config can name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from rljax.types import Prompt, reward_number

if TYPE_CHECKING:
    import numpy as np

    from rljax.hf.tokenizer import Tokenizer

REWARDS = {
    "exact": "rljax.rewards.exact:reward",
    "gsm8k": "rljax.rewards.mathematics:gsm8k_reward",
    "math": "rljax.rewards.mathematics:reward",
    "reasoning_gym": "rljax.rewards.reasoning_gym:reward",
}
# What these import at their first call, and a reward process does before it: some seconds while the learner compiles
LIBRARIES = {"rljax.rewards.mathematics": "math_verify", "rljax.rewards.reasoning_gym": "reasoning_gym"}


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """A reward and its named parts.

    Example: Score(1.1, {"correct": 1.0, "format": 0.1})
    """

    reward: float
    components: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """Token ids of a prompt and its completion, and their text with special tokens."""

    prompt_ids: list[int]
    completion_ids: list[int]
    prompt_text: str
    completion_text: str

    @classmethod
    def of(cls, tokenizer: Tokenizer, prompt_ids: Sequence[int] | np.ndarray, completion_ids: np.ndarray) -> Sampled:
        """Decodes both."""
        texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in (prompt_ids, completion_ids)]
        return cls([int(i) for i in prompt_ids], [int(i) for i in completion_ids], *texts)


class Rewards(Protocol):
    """Source of scores for a workflow, as `RewardPool`."""

    async def score(self, prompt: Prompt, completion: str) -> Score:
        """Scores a completion. Raises Rejected, RewardError or RewardTimeout."""
        ...


class ReadsIds(Protocol):
    """Rewards that can be given token ids as well."""

    reads_ids: bool  # whether they read them

    async def score(self, prompt: Prompt, completion: str, sampled: Sampled | None = None) -> Score: ...


def reads_ids(rewards: Rewards) -> TypeGuard[ReadsIds]:
    """Returns whether rewards read token ids. It is asked once an episode."""
    return bool(getattr(rewards, "reads_ids", False))


async def score(
    rewards: Rewards,
    tokenizer: Tokenizer,
    prompt: Prompt,
    text: str,
    prompt_ids: Sequence[int] | np.ndarray,
    completion_ids: np.ndarray,
) -> Score:
    """Scores a completion by its text, and its token ids for rewards that read them.

    Raises Rejected, RewardError or RewardTimeout.
    """
    if reads_ids(rewards):
        return await rewards.score(prompt, text, Sampled.of(tokenizer, prompt_ids, completion_ids))
    return await rewards.score(prompt, text)


def score_of(returned: Any) -> Score:
    """Converts a reward function's return value to a Score.

    A mapping has the total as "reward", or as verl's "score", beside which text may stand that is
    no component.

    Raises ValueError if it is no number that a reward may be (`reward_number`) or lacks the total.
    """
    if not isinstance(returned, Mapping):
        return Score(reward_number("the reward", returned), {})
    total = next((name for name in ("reward", "score") if name in returned), None)
    if total is None:
        raise ValueError(f"a mapping of components needs 'reward', the total; it has: {', '.join(map(str, returned))}")
    items = {str(name): value for name, value in returned.items() if total == "reward" or not _is_remark(value)}
    parts = {name: reward_number(f"component {name!r}", value) for name, value in items.items()}
    return Score(parts.pop(total), parts)


def weighted(names: Sequence[str], weights: Sequence[float], scores: Sequence[Score | None]) -> Score | None:
    """Returns the weighted sum of several rewards of one completion, with each as a component.

    Args:
      scores: by reward; None from one that does not apply, which adds nothing.

    Returns:
      None if no reward applies.

    Raises ValueError if the sum is no number that a reward may be.
    """
    applying = [(name, weight, score) for name, weight, score in zip(names, weights, scores, strict=True) if score is not None]
    if not applying:
        return None
    if len(names) == 1:
        total = reward_number("the weighted reward", applying[0][2].reward * weights[0])
        return dataclasses.replace(applying[0][2], reward=total)
    components: dict[str, float] = {}
    for name, _, score in applying:
        components |= {f"{name}/{part}": value for part, value in score.components.items() if part != name}
        components[name] = score.reward
    total = sum(weight * score.reward for _, weight, score in applying)
    return Score(reward_number("the weighted sum of the rewards", total), components)


def _is_remark(value: Any) -> bool:
    return value is None or isinstance(value, str)
