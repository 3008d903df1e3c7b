"""An environment of two turns that pays in each."""

from __future__ import annotations

import random


class Sums:
    """Asks sums of two numbers of two digits, one after another, and pays 1 for each that is right.

    Args:
      rounds: sums of an episode.
    """

    def __init__(self, *, rounds: int = 2) -> None:
        self._rounds = rounds

    def reset(self, seed: int) -> str:
        self._random, self._left = random.Random(seed), self._rounds
        return self._ask()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, float]]:
        right = float(action.strip() == self._answer)
        self._left -= 1
        return self._ask(), right, self._left == 0, False, {"last_right": right}

    def _ask(self) -> str:
        one, other = self._random.randint(10, 99), self._random.randint(10, 99)
        self._answer = str(one + other)
        return f"{one}+{other}="
