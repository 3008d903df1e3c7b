"""Questions of reasoning-gym as an environment: several attempts, scored by the dataset itself."""

from __future__ import annotations

import random
from typing import Any

from rljax.config import arguments as limits
from rljax.config.registry import nearest
from rljax.environments.interface import Step
from rljax.errors import UserError

AGAIN = "That is not right. Try again."


class ReasoningGym:
    """One question of a dataset, which the policy may answer `attempts` times.

    The reward of a step is the dataset's score of the answer, in [0, 1]; the episode ends with the
    first answer of score 1. The answer is the content of the last <answer>...</answer>, or the
    whole action if it has none. (`task:reasoning_gym/DATASET` is for a single attempt.)

    Args:
      dataset: its name in the package.
      again: observation after an answer that is not right.
      arguments: settings of the dataset, e.g. min_digits.
    """

    def __init__(
        self, dataset: str, *, attempts: int = 1, again: str = "That is not right. Try again.", **arguments: Any
    ) -> None:
        from reasoning_gym.factory import DATASETS

        if dataset not in DATASETS:
            raise UserError(f"reasoning_gym has no dataset {dataset!r} ({nearest(dataset, DATASETS)})")
        limits.check("reasoning_gym", attempts=(attempts, limits.COUNT))
        self._dataset, self._arguments = dataset, arguments
        self._left, self._again = attempts, again

    def reset(self, seed: int) -> str:
        import reasoning_gym

        self._made = reasoning_gym.create_dataset(self._dataset, size=1, seed=seed, **self._arguments)
        self._entry = self._made[0]
        return str(self._entry["question"])

    def step(self, action: str) -> Step:
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(action)
        score = float(self._made.score_answer(action.strip() if answer is None else answer, self._entry))
        self._left -= 1
        right = score >= 1.0
        return Step(self._again, score, right, not right and not self._left, {"score": score})

    def random_action(self, generator: random.Random) -> str:
        return str(generator.randrange(100))

    def expert_action(self) -> str:
        return str(self._entry["answer"])
