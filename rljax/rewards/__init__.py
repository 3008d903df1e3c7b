"""Rewards: functions that score a completion, and the processes they run in.

A reward is a function of (prompt, completion text), plain or async, that returns a number, or a
mapping of named numbers among which "reward" is the total:

    def reward(prompt: Prompt, completion: str) -> float | Mapping[str, float]:
        return float(completion.strip() == prompt.fields["answer"])

`reward.name` is one of REWARDS, or "package.module:function".
"""

from rljax.rewards.pool import RewardPool
from rljax.rewards.score import REWARDS, Rewards, Score

__all__ = ["REWARDS", "RewardPool", "Rewards", "Score"]
