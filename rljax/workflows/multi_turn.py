"""Several turns: a wrong answer gets feedback, and the policy tries again in the same context.

    prompt --> completion --> reward --> feedback --> completion --> ...
    given      sampled                   given        sampled

The next request's prompt contains the sampled ids themselves, not a new encoding of their text.
"""

from __future__ import annotations

from typing import Any

from rljax.config import arguments
from rljax.engine import Generator
from rljax.hf.tokenizer import Tokenizer
from rljax.rewards.score import Rewards, Score, score
from rljax.rollout.trajectories import Episode
from rljax.types import CONTEXT_FULL, Completion, Finish, Prompt, SamplingParams, Trajectory
from rljax.workflows.turns import generate_next_turn, generate_turn

FEEDBACK = "Your answer is not right. Read the question again, find the mistake, and answer once more."


class MultiTurn:
    """Repeats a question until it is answered.

    An episode ends with the first answer whose reward is `success`, after `max_turns`, when a
    completion is cut short, or where the context has no room for another. The reward is that of
    the last turn, times turn_discount for each turn before it; component "turns" counts them, and
    "context_full" the episodes that had no room.

    Args:
      feedback: text of the user's message after a wrong answer.
      max_tokens: an episode that has this many tokens gets no further turn; None for no limit.
    """

    scores_by_rewards = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        rewards: Rewards,
        *,
        max_turns: int = 2,
        feedback: str = FEEDBACK,
        success: float = 1.0,
        turn_discount: float = 1.0,
        max_tokens: int | None = None,
    ) -> None:
        arguments.check(
            "rollout.workflow_args",
            max_turns=(max_turns, arguments.COUNT),
            success=(success, arguments.FINITE),
            turn_discount=(turn_discount, arguments.UNIT),
            max_tokens=(max_tokens, arguments.COUNT),
        )
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._max_turns = max_turns
        self._feedback = feedback
        self._success = success
        self._turn_discount = turn_discount
        self._max_tokens = max_tokens

    @staticmethod
    def tokens_between(tokenizer: Tokenizer, prompt: Prompt, *, feedback: str = FEEDBACK, **_: Any) -> int:
        """Returns the tokens that stand between a prompt's first answer and the second."""
        messages = [*prompt.messages, {"role": "assistant", "content": ""}, {"role": "user", "content": feedback}]
        kwargs = prompt.chat_template_kwargs
        return len(tokenizer.next_turn(messages, tokenizer.eos_token_id, tools=prompt.tools, chat_template_kwargs=kwargs))

    async def episode(self, generator: Generator, prompt: Prompt, params: SamplingParams, seed: int) -> Trajectory | None:
        messages = list(prompt.messages)
        episode = Episode(self._tokenizer.encode_prompt(prompt))
        turn, full = 0, False
        completion = await generate_turn(generator, prompt, episode, params, seed, turn)
        while True:
            prompt_ids = episode.token_ids
            episode.sampled(completion)
            turn += 1
            text = self._tokenizer.decode(completion.token_ids)
            scored = await score(self._rewards, self._tokenizer, prompt, text, prompt_ids, completion.token_ids)
            if self._is_over(turn, completion, scored, len(episode.token_ids)):
                break
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": self._feedback}]
            following = await generate_next_turn(generator, self._tokenizer, prompt, episode, messages, params, seed, turn)
            if full := following is None:
                break
            completion = following
        discounted = scored.reward * self._turn_discount ** (turn - 1)
        return episode.trajectory(discounted, {**scored.components, "turns": float(turn), CONTEXT_FULL: float(full)})

    def _is_over(self, turn: int, completion: Completion, scored: Score, length: int) -> bool:
        return (
            turn >= self._max_turns
            or scored.reward >= self._success
            or completion.finish is not Finish.STOP
            or (self._max_tokens is not None and length >= self._max_tokens)
        )
