"""Requests of an episode of several turns: the tokens so far are the next request's prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rljax.chat.messages import Message
from rljax.engine import Generator
from rljax.errors import PromptTooLong
from rljax.hf.tokenizer import Tokenizer
from rljax.rollout.trajectories import Episode
from rljax.seeding import turn_seed
from rljax.types import Completion, Prompt, SamplingParams
from rljax.workflows.rlvr import generate


async def generate_turn(
    generator: Generator, prompt: Prompt, episode: Episode, params: SamplingParams, seed: int, turn: int
) -> Completion:
    """Generates the completion of a turn, counted from 0.

    Raises SamplerError if it was aborted, and PromptTooLong if the context has no room for it.
    """
    return await _generate(generator, prompt, episode.token_ids, params, seed, turn)


async def generate_next_turn(
    generator: Generator,
    tokenizer: Tokenizer,
    prompt: Prompt,
    episode: Episode,
    messages: Sequence[Message],
    params: SamplingParams,
    seed: int,
    turn: int,
) -> Completion | None:
    """Generates the completion of a turn behind what messages add to the episode.

    Args:
      messages: the conversation so far, with the last reply and what answers it.
      turn: counted from 0.

    Returns:
      The completion, and the episode has the new tokens of its prompt. None if the context has no
      room for it: the episode ends behind the last reply, cut.

    Raises:
      SamplerError: it was aborted.
    """
    so_far = episode.token_ids
    given = tokenizer.next_turn(
        messages, episode.last_sampled, tools=prompt.tools, chat_template_kwargs=prompt.chat_template_kwargs
    )
    try:
        completion = await _generate(generator, prompt, np.concatenate([so_far, given]), params, seed, turn)
    except PromptTooLong:  # what the policy did so far counts: to leave it out would favor short episodes
        episode.cut()
        return None
    episode.given(given)
    return completion


async def _generate(
    generator: Generator, prompt: Prompt, prompt_ids: np.ndarray, params: SamplingParams, seed: int, turn: int
) -> Completion:
    return await generate(generator, f"{prompt.uid}#{seed}.{turn}", prompt_ids, params, turn_seed(seed, turn))
