"""Requests of an episode of several turns: the tokens so far are the next request's prompt."""

from __future__ import annotations

from rljax.engine import Generator
from rljax.rollout.trajectories import Episode
from rljax.seeding import turn_seed
from rljax.types import Completion, Prompt, SamplingParams
from rljax.workflows.rlvr import generate


async def generate_turn(
    generator: Generator, prompt: Prompt, episode: Episode, params: SamplingParams, seed: int, turn: int
) -> Completion:
    """Generates the completion of a turn, counted from 0.

    Raises SamplerError if it was aborted.
    """
    request_id = f"{prompt.uid}#{seed}.{turn}"
    return await generate(generator, request_id, episode.token_ids, params, turn_seed(seed, turn))
