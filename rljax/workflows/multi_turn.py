"""Several turns: a wrong answer gets feedback, and the policy tries again in the same context.

    prompt --> completion --> reward --> feedback --> completion --> ...
    given      sampled                   given        sampled

The next request's prompt contains the sampled ids themselves, not a new encoding of their text.
"""

from __future__ import annotations

from rljax.config import arguments
from rljax.engine import Generator
from rljax.hf.tokenizer import Tokenizer
from rljax.rewards.score import Rewards, Score, score
from rljax.rollout.trajectories import Episode
from rljax.types import Completion, Finish, Prompt, SamplingParams, Trajectory
from rljax.workflows.turns import generate_turn

FEEDBACK = "Your answer is not right. Read the question again, find the mistake, and answer once more."


class MultiTurn:
    """Repeats a question until it is answered.

    An episode ends with the first answer whose reward is `success`, after `max_turns`, or when a
    completion is cut short. The reward is that of the last turn, times turn_discount for each turn
    before it; component "turns" counts them.

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

    async def episode(self, generator: Generator, prompt: Prompt, params: SamplingParams, seed: int) -> Trajectory | None:
        messages = list(prompt.messages)
        episode = Episode(self._tokenizer.encode_prompt(prompt))
        turn = 0
        while True:
            prompt_ids = episode.token_ids
            completion = await generate_turn(generator, prompt, episode, params, seed, turn)
            episode.sampled(completion)
            turn += 1
            text = self._tokenizer.decode(completion.token_ids)
            scored = await score(self._rewards, self._tokenizer, prompt, text, prompt_ids, completion.token_ids)
            if self._is_over(turn, completion, scored, len(episode.token_ids)):
                discounted = scored.reward * self._turn_discount ** (turn - 1)
                return episode.trajectory(discounted, {**scored.components, "turns": float(turn)})
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": self._feedback}]
            last = int(completion.token_ids[-1]) if len(completion.token_ids) else -1
            given = self._tokenizer.next_turn(
                messages, last, tools=prompt.tools, chat_template_kwargs=prompt.chat_template_kwargs
            )
            episode.given(given)

    def _is_over(self, turn: int, completion: Completion, scored: Score, length: int) -> bool:
        return (
            turn >= self._max_turns
            or scored.reward >= self._success
            or completion.finish is not Finish.STOP
            or (self._max_tokens is not None and length >= self._max_tokens)
        )
