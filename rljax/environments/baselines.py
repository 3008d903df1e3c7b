"""Baselines of an environment: what a random policy and a simple expert earn, without a model."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from rljax.environments.build import Source
from rljax.environments.interface import Environment
from rljax.environments.play import Play
from rljax.errors import EnvironmentFailed, EnvironmentTimeout
from rljax.metrics.histogram import Histogram

AT_ONCE = 16  # episodes
Policy = Callable[[Environment, random.Random], str]
"""Chooses an action in the environment's current state."""


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Results of a policy.

    Episodes that failed are in `failures`, by kind, and have no return.
    """

    name: str
    returns: np.ndarray  # [episodes] float64, discounted
    turns: np.ndarray  # [episodes] int64
    unfinished: int  # episodes that the environment did not end within the most turns
    failures: Counter[str] = dataclasses.field(default_factory=Counter)
    first_failure: str = ""

    @property
    def mean(self) -> float:
        return float(self.returns.mean()) if len(self.returns) else float("nan")

    @property
    def error(self) -> float:
        """Standard error of the mean return."""
        return float(self.returns.std() / max(1, len(self.returns)) ** 0.5) if len(self.returns) else float("nan")

    def __str__(self) -> str:
        if not len(self.returns):
            return f"{self.name}: no episode ended"
        bins = Histogram.of(self.returns)
        assert bins is not None
        width = bins.edges[1] - bins.edges[0]
        kinds = [f"{edge:g}" if width == 1 else f"{edge:g} to {edge + width:g}" for edge in bins.edges[:-1]]
        counts = ", ".join(f"{kind}: {count}" for kind, count in zip(kinds, bins.counts, strict=True) if count)
        return f"{self.name} earns {self.mean:.3g} on average in {self.turns.mean():.3g} turns ({counts})"


def random_policy(environment: Environment, generator: random.Random) -> str:
    """Takes `random_action` of the environment (interface.Baselines)."""
    return environment.random_action(generator)  # type: ignore[attr-defined]


def expert_policy(environment: Environment, generator: random.Random) -> str:
    """Takes `expert_action` of the environment."""
    return environment.expert_action()  # type: ignore[attr-defined]


async def run_baseline(
    name: str, policy: Policy, sources: Sequence[Source], *, timeout: float, max_turns: int, discount: float = 1.0
) -> Baseline:
    """Plays an episode of each source, several at once.

    Args:
      name: of the policy, for messages.
      timeout: seconds for each call of the environment.
      max_turns: most steps of an episode.
      discount: factor per turn.
    """
    room, failures, reasons = asyncio.Semaphore(AT_ONCE), Counter[str](), list[str]()

    async def episode(number: int, source: Source) -> tuple[float, int, bool] | None:
        generator = random.Random(f"{name}/{number}/{source.seed}")
        try:
            async with room, Play(source, timeout=timeout) as play:
                await play.reset()
                earned, ended, turn = 0.0, False, 0
                while not ended and turn < max_turns:
                    step = await play.step(await play.call("action", policy, play.environment, generator))
                    earned += discount**turn * step.reward
                    turn, ended = turn + 1, step.terminated or step.truncated
                return earned, turn, ended
        except (EnvironmentFailed, EnvironmentTimeout) as error:
            failures[error.kind] += 1
            reasons.append(" ".join(str(error).split()))
            return None

    results = [r for r in await asyncio.gather(*(episode(i, s) for i, s in enumerate(sources))) if r is not None]
    return Baseline(
        name,
        np.array([earned for earned, _, _ in results], np.float64),
        np.array([turns for _, turns, _ in results], np.int64),
        sum(not ended for _, _, ended in results),
        failures,
        next(iter(reasons), ""),
    )
