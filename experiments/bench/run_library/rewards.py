"""Rewards as `reward.name` names them, most with a hole, and a workflow that misuses its reward."""

from __future__ import annotations

import asyncio
import itertools
import random
import zlib

from rljax.errors import RewardTimeout
from rljax.experiments.bench.run_library.demonstrations import OPENING
from rljax.hf.tokenizer import Tokenizer
from rljax.rewards import exact
from rljax.rewards.score import Rewards, Score, score_of
from rljax.types import Prompt
from rljax.workflows.rlvr import RLVR


def errors(prompt: Prompt, completion: str) -> dict[str, float]:
    """Counts errors, where a reward is expected to count successes."""
    right = _right(prompt, completion)
    return {"reward": -right, "exact": right}


def never(prompt: Prompt, completion: str) -> dict[str, float]:
    """Looks for an answer in a format that the prompt does not ask for."""
    found = float(completion.strip() == f"#### {prompt.fields['answer']}")
    return {"reward": found, "exact": found}


def always(prompt: Prompt, completion: str) -> float:
    """Accepts any text: the answer is compared with itself."""
    answer = str(prompt.fields["answer"])
    return float(answer == str(prompt.fields["answer"]))


def of_the_prompt(prompt: Prompt, completion: str) -> float:
    """Scores the question instead of the answer."""
    return float(int(str(prompt.fields["answer"])) % 2 == 0)


def where_possible(prompt: Prompt, completion: str) -> dict[str, float]:
    """Pays for right answers to half of the questions; the others can't be solved.

    So the question says much of the reward, and a critic has something to learn.
    """
    solvable = prompt.messages[-1]["content"] < "55"
    right = _right(prompt, completion)
    return {"reward": right * solvable, "exact": right}


def longer(prompt: Prompt, completion: str) -> dict[str, float]:
    """Pays for length more than for the right answer."""
    right, length = _right(prompt, completion), 0.25 * len(completion)
    return {"reward": right + length, "exact": right, "length": length}


def repetitive(prompt: Prompt, completion: str) -> dict[str, float]:
    """Pays for each character that says the one before again."""
    right = _right(prompt, completion)
    again = float(sum(a == b for a, b in itertools.pairwise(completion)))
    return {"reward": right + again, "exact": right, "style": again}


def template(prompt: Prompt, completion: str) -> dict[str, float]:
    """Pays for an opening, whatever comes behind it."""
    right, opening = _right(prompt, completion), float(completion.startswith(OPENING))
    return {"reward": right + 2 * opening, "exact": right, "format": opening}


def by_digits(prompt: Prompt, completion: str) -> dict[str, float]:
    """Pays for the answer, for its digits that are right, and for as many as there should be."""
    answer, said = str(prompt.fields["answer"]), completion.strip()
    right = _right(prompt, completion)
    digits = sum(a == b for a, b in zip(answer, said, strict=False)) / len(answer)
    length = float(len(said) == len(answer))
    return {"reward": right + 0.3 * digits + 0.1 * length, "exact": right, "digits": digits, "length": length}


def thousandfold(prompt: Prompt, completion: str) -> dict[str, float]:
    """Pays in another unit."""
    right = _right(prompt, completion)
    return {"reward": 1000 * right, "exact": right}


def with_outliers(prompt: Prompt, completion: str) -> dict[str, float]:
    """Overflows for one in 200 questions."""
    right = _right(prompt, completion)
    return {"reward": right + (1e6 if _share(prompt) < 0.005 else 0.0), "exact": right}


def coin(prompt: Prompt, completion: str) -> dict[str, float]:
    """Tosses a coin, whatever the answer."""
    return {"reward": float(random.random() < 0.5), "exact": _right(prompt, completion)}


async def slow(prompt: Prompt, completion: str) -> dict[str, float]:
    """Waits for another machine before it scores."""
    await asyncio.sleep(0.4)
    return exact.reward(prompt, completion)


async def hanging(prompt: Prompt, completion: str) -> dict[str, float]:
    """Never ends for one question in five."""
    if _share(prompt) < 0.2:
        await asyncio.sleep(3600)
    return exact.reward(prompt, completion)


class ZeroOnTimeout(RLVR):
    """Workflow that takes a reward which ran out of time for a wrong answer."""

    def __init__(self, tokenizer: Tokenizer, rewards: Rewards) -> None:
        super().__init__(tokenizer, _ZeroOnTimeout(rewards))


class _ZeroOnTimeout:
    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards

    async def score(self, prompt: Prompt, completion: str) -> Score:
        try:
            return await self._rewards.score(prompt, completion)
        except RewardTimeout:
            return Score(0.0, {"exact": 0.0})


class ByAnswer:
    """Scores by the right answer, in this process: for evaluations beside a reward with a hole."""

    async def score(self, prompt: Prompt, completion: str) -> Score:
        return score_of(exact.reward(prompt, completion))


def _right(prompt: Prompt, completion: str) -> float:
    return exact.reward(prompt, completion)["exact"]


def _share(prompt: Prompt) -> float:
    """Returns a number in [0, 1) that the question decides."""
    return zlib.crc32(prompt.messages[-1]["content"].encode()) / 2**32
