"""Rewards: functions that score a completion, and the processes they run in.

A reward is a function of (prompt, completion text), plain or async, that returns a number, or a
mapping of named numbers among which "reward" is the total:

    def reward(prompt: Prompt, completion: str) -> float | Mapping[str, float]:
        return float(completion.strip() == prompt.fields["answer"])

`reward.name` is one of REWARDS, or "package.module:function".

score.py          scores, and the rewards that a config can name
shapes.py         functions of other systems' shapes, told apart by their parameters
exact.py          equal text
mathematics.py    equal as mathematics
final_answer.py   the answer that a completion commits to; answers.py, to vote over
amounts.py        numbers with the words around them; units.py, their units
intervals.py      inequalities as intervals
reasoning_gym.py  scorers of reasoning-gym
pool.py           processes in which rewards run; process.py, one of them
process_main.py   its main program
check.py          whether rewards can score the records of a data set
"""

from typing import TYPE_CHECKING, Any

from rljax.rewards.score import REWARDS, Rewards, Score

if TYPE_CHECKING:
    from rljax.rewards.pool import RewardPool

__all__ = ["REWARDS", "RewardPool", "Rewards", "Score"]


def __getattr__(name: str) -> Any:
    """Imports the pool when it is asked for: a reward process runs without it."""
    if name == "RewardPool":
        from rljax.rewards.pool import RewardPool

        return RewardPool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
