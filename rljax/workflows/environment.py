"""An environment's episode: observations are given, actions are sampled, steps are rewarded.

    prompt --> completion --> step --> observation --> completion --> step --> ...
    given      sampled        reward   given           sampled        reward

The prompt is the environment's first observation (`task:environment/NAME`, rljax/data/tasks.py),
and its field "environment" says how to begin the episode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rljax.config import arguments
from rljax.engine import Generator
from rljax.environments import Play, Source, Step, numbers_of
from rljax.errors import UserError
from rljax.hf.tokenizer import Tokenizer
from rljax.rewards.score import Rewards
from rljax.rollout.trajectories import Episode, trajectory_of
from rljax.types import CONTEXT_FULL, Finish, Prompt, SamplingParams, Trajectory
from rljax.workflows.turns import generate_next_turn, generate_turn

CREDITS = ("episode", "turn")


class EnvironmentWorkflow:
    """Plays one episode of the environment that the prompt names.

    It ends when the environment says so, after `max_turns` or `max_tokens`, with a completion that
    was cut short, or where the context has no room for another. Components are "turns",
    "context_full" (it had no room) and the numbers in the last step's info.

    Args:
      discount: factor per turn; the return of an episode is the sum of discount**t times the reward
        of turn t.
      credit: "episode": one trajectory, rewarded with the return of the episode. "turn": a part for
        each turn, rewarded with the return from that turn on; only its own action is trained on.
      max_turns: None for no limit but the environment's.
      max_tokens: an episode that has this many tokens gets no further turn; None for no limit.
      timeout: seconds for each call of the environment.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        rewards: Rewards,
        *,
        discount: float = 1.0,
        credit: str = "episode",
        max_turns: int | None = None,
        max_tokens: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        if credit not in CREDITS:
            raise UserError(f"rollout.workflow_args.credit: {credit!r} is neither episode nor turn")
        arguments.check(
            "rollout.workflow_args",
            discount=(discount, arguments.UNIT),
            max_turns=(max_turns, arguments.COUNT),
            max_tokens=(max_tokens, arguments.COUNT),
            timeout=(timeout, arguments.SECONDS),
        )
        self._tokenizer = tokenizer
        self._discount = discount
        self._by_turn = credit == "turn"
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._timeout = timeout

    def require(self, prompt: Prompt, where: str) -> None:
        """Raises UserError, beginning with `where`, for a prompt that names no environment."""
        Source.of(prompt.fields, where)

    async def episode(
        self, generator: Generator, prompt: Prompt, params: SamplingParams, seed: int
    ) -> Trajectory | list[Trajectory]:
        async with Play(Source.of(prompt.fields, f"prompt {prompt.uid}"), timeout=self._timeout) as play:
            await play.reset()
            return await self._play(play, generator, prompt, params, seed)

    async def _play(
        self, play: Play, generator: Generator, prompt: Prompt, params: SamplingParams, seed: int
    ) -> Trajectory | list[Trajectory]:
        messages = list(prompt.messages)
        episode = Episode(self._tokenizer.encode_prompt(prompt))
        parts: list[Trajectory] = []
        steps: list[Step] = []
        full = False
        completion = await generate_turn(generator, prompt, episode, params, seed, 0)
        while True:
            if self._by_turn:
                parts.append(trajectory_of(episode.token_ids, completion, 0.0, {}))
            episode.sampled(completion)
            text = self._tokenizer.decode(completion.token_ids)
            steps.append(await play.step(text))
            if self._is_over(steps, completion.finish, len(episode.token_ids)):
                break
            messages += [{"role": "assistant", "content": text}, *steps[-1].observation]
            following = await generate_next_turn(
                generator, self._tokenizer, prompt, episode, messages, params, seed, len(steps)
            )
            if full := following is None:
                break
            completion = following
        components = {"turns": float(len(steps)), CONTEXT_FULL: float(full), **numbers_of(steps[-1].info)}
        returns = returns_of([step.reward for step in steps], self._discount)
        if not self._by_turn:
            return episode.trajectory(returns[0], components)
        if full:
            parts[-1] = dataclasses.replace(parts[-1], finish=Finish.LENGTH)
        return [dataclasses.replace(part, reward=r, components=components) for part, r in zip(parts, returns, strict=True)]

    def _is_over(self, steps: Sequence[Step], finish: Finish, length: int) -> bool:
        return (
            steps[-1].terminated
            or steps[-1].truncated
            or finish is not Finish.STOP
            or len(steps) == self._max_turns
            or (self._max_tokens is not None and length >= self._max_tokens)
        )


def returns_of(rewards: Sequence[float], discount: float) -> list[float]:
    """Returns the discounted sum of rewards from each turn on."""
    returns = [0.0]
    for reward in reversed(rewards):
        returns.append(reward + discount * returns[-1])
    return returns[:0:-1]
