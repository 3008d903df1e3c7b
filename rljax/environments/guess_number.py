"""Guess-the-number: the smallest task in which a policy needs several turns."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from rljax.config import arguments
from rljax.environments.interface import Message, Step

QUESTION = (
    "I think of a whole number from 1 to {size}. You have {guesses} guesses, and I tell you if my number is higher or lower."
    " Answer with a number alone."
)


class GuessNumber:
    """A secret number from 1 to `size`, which the policy has to find in `guesses` guesses.

    Reward 1 for finding it, 0 for anything else. Who halves the interval that is left finds any
    number below 2**guesses; who guesses at random finds guesses / size of them.

    Args:
      question: first observation; may contain {size} and {guesses}.
      higher, lower: observations after a guess that is too low, or too high.
      illegal: observation after an action that is no number of the range; it counts as a guess.
    """

    def __init__(
        self,
        *,
        size: int = 15,
        guesses: int = 4,
        question: str = QUESTION,
        higher: str = "higher",
        lower: str = "lower",
        illegal: str = "a whole number from 1 to {size}, please",
    ) -> None:
        arguments.check("guess_number", size=(size, arguments.COUNT), guesses=(guesses, arguments.COUNT))
        self.size, self.guesses = size, guesses
        self._question, self._illegal = (text.format(size=size, guesses=guesses) for text in (question, illegal))
        self._higher, self._lower = higher, lower

    async def reset(self, seed: int, earlier: Sequence[str] = ()) -> list[Message]:
        """Draws the number. `earlier` are guesses already made, so that the game is joined midway."""
        self._secret = random.Random(seed).randint(1, self.size)
        self._left = self.guesses
        self._low, self._high = 1, self.size
        messages: list[Message] = [{"role": "user", "content": self._question}]
        for guess in earlier:
            answer = (await self.step(guess)).observation
            messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": answer}]
        return messages

    async def step(self, action: str) -> Step:
        self._left -= 1
        guess = self._parse(action)
        found = guess == self._secret
        return Step(self._answer(guess), float(found), found, not found and not self._left, {"found": found})

    def random_action(self, generator: random.Random) -> str:
        return str(generator.randint(1, self.size))

    def expert_action(self) -> str:
        return str((self._low + self._high) // 2)

    def _parse(self, action: str) -> int | None:
        if not re.fullmatch(r"[0-9]{1,9}", action.strip()):
            return None
        return number if 1 <= (number := int(action)) <= self.size else None

    def _answer(self, guess: int | None) -> str:
        if guess is None:
            return self._illegal
        if guess < self._secret:
            self._low = max(self._low, guess + 1)
            return self._higher
        self._high = min(self._high, guess - 1 if guess > self._secret else guess)
        return self._lower
