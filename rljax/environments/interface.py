"""Interface of an environment, which users implement: text in, text out, a reward per step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

Message = Mapping[str, Any]  # role and content
Observation = str | Sequence[Message]
"""Text of a user's message, or the messages themselves."""


class Step(NamedTuple):
    """Result of one action, in the order of Gymnasium; a plain tuple of five does as well."""

    observation: Observation  # not shown to the policy if the episode ends here
    reward: float  # of this action alone; finite
    terminated: bool  # the task has come to its end
    truncated: bool  # the episode ends though the task has not
    info: Mapping[str, Any]  # numbers of an episode's last step are logged as reward/<name>


class Environment(Protocol):
    """One episode's world. Each episode makes one of its own: state may live in attributes.

    Methods may be plain, which are called on a thread of their own and may block, or async, which
    run on the event loop and must not. `close()`, if there is one, is called at the end.

    Example:

        class Parity:
            '''Says whether a number is even or odd, `rounds` times.'''

            def __init__(self, rounds: int = 2) -> None:
                self.rounds = rounds

            def reset(self, seed):
                self.random = random.Random(seed)
                return self.ask()

            def step(self, action):
                right = action.strip() == ("odd" if self.number % 2 else "even")
                self.rounds -= 1
                return self.ask(), float(right), self.rounds == 0, False, {}

            def ask(self):
                self.number = self.random.randrange(100)
                return f"{self.number}: even or odd?"
    """

    def reset(self, seed: int, **fields: Any) -> Observation:
        """Begins the episode and returns its first observation.

        The same seed and fields begin the same episode, whose steps depend on the actions alone.

        Args:
          fields: `fields` of the prompt's "environment"; those that the environment asks for.
        """
        ...

    def step(self, action: str) -> Step:
        """Takes one action, the text of a completion without special tokens."""
        ...


@runtime_checkable
class Baselines(Protocol):
    """Optional methods of an environment, for its checks and baselines (checks.py)."""

    def random_action(self, generator: random.Random) -> str:
        """Draws a legal action without looking at the state."""
        ...

    def expert_action(self) -> str:
        """Returns a sensible action in the current state; it need not be the best."""
        ...
