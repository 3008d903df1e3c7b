"""Prompts that begin episodes, as records of a dataset.

"task:environment/NAME" is any environment, "task:guess_number" has demonstrations too.

A record has the messages of the environment's reset, which the policy sees as its prompt, and the
field "environment", from which the workflow begins the same episode.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from rljax.environments.build import FIELD, Source, make_environment
from rljax.environments.guess_number import GuessNumber
from rljax.environments.play import Play
from rljax.errors import EnvironmentFailed, EnvironmentTimeout, UserError

TEST_SHARE = 0.1
RESET_TIMEOUT = 60.0  # seconds


def environment(name: str, split: str, *, n: int = 1000, seed: int = 0, **arguments: Any) -> list[dict[str, Any]]:
    """Makes the prompts of an environment by name.

    Args:
      n: number of episodes.
      seed: decides their seeds; those of train and test are disjoint.
      arguments: of the environment's constructor.

    Raises:
      UserError: no such environment or argument, or its reset fails.
    """
    _at_least_one(n)
    make_environment(Source(name, 0, arguments), "environment")
    seeds = _seeds(split, seed)

    async def records() -> list[dict[str, Any]]:
        return [await _record(Source(name, next(seeds), arguments)) for _ in range(n)]

    return _complete(records())


def guess_number(
    split: str,
    *,
    n: int = 1000,
    seed: int = 0,
    earlier: bool = False,
    sensible: float = 0.0,
    ending: str = "",
    **arguments: Any,
) -> list[dict[str, Any]]:
    """Makes games of guess_number, with a demonstration of the next guess.

    Args:
      earlier: join games midway too, after a random number of random guesses.
      sensible: share of the demonstrations that halve the interval that is left; the others are
        random numbers. Field "demonstration".
      ending: text at the end of each guess that is already made or demonstrated.
      n, seed, arguments: as for any environment.
    """
    _at_least_one(n)
    if not 0 <= sensible <= 1:
        raise UserError(f"sensible: a share in [0, 1], not {sensible}")
    make_environment(Source("guess_number", 0, arguments), "environment")
    seeds = _seeds(split, seed)

    async def records() -> list[dict[str, Any]]:
        return [await _position(next(seeds), arguments, earlier, sensible, ending) for _ in range(n)]

    return _complete(records())


async def _position(seed: int, arguments: dict[str, Any], earlier: bool, sensible: float, ending: str) -> dict[str, Any]:
    """Returns a game, joined after guesses that did not find the number."""
    generator, game = random.Random(f"guess_number/{seed}"), GuessNumber(**arguments)
    made: list[str] = []
    for _ in range(generator.randrange(game.guesses) if earlier else 0):
        guess = game.random_action(generator) + ending
        await game.reset(seed, made)
        if not (await game.step(guess)).terminated:
            made.append(guess)
    await game.reset(seed, made)
    action = game.expert_action() if generator.random() < sensible else game.random_action(generator)
    record = await _record(Source("guess_number", seed, arguments, {"earlier": made} if made else {}))
    return {**record, "demonstration": action + ending}


async def _record(source: Source) -> dict[str, Any]:
    try:
        async with Play(source, timeout=RESET_TIMEOUT) as play:
            messages = [dict(message) for message in await play.reset()]
    except (EnvironmentFailed, EnvironmentTimeout) as error:
        raise UserError(f"seed {source.seed}: {' '.join(str(error).split())}") from error
    return {"messages": messages, "answer": "", FIELD: source.to_json()}


def _complete(coroutine: Coroutine[Any, Any, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Runs a coroutine to its end; the caller's thread may have an event loop already."""
    outcome: list[list[dict[str, Any]] | Exception] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(coroutine))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _seeds(split: str, seed: int) -> Iterator[int]:
    """Yields different seeds of one split, which a seed's own hash decides."""
    generator, seen = random.Random(seed), set()
    while True:
        drawn = generator.randrange(2**31)
        fraction = int.from_bytes(hashlib.blake2b(str(drawn).encode(), digest_size=8).digest(), "big") / 2**64
        if drawn not in seen and (fraction < TEST_SHARE) == (split == "test"):
            seen.add(drawn)
            yield drawn


def _at_least_one(n: int) -> None:
    if n < 1:
        raise UserError(f"n: {n} examples asked for (at least 1)")


TASKS: dict[str, Callable[..., list[dict[str, Any]]]] = {"guess_number": guess_number}
