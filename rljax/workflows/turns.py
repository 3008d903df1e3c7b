"""Requests of an episode of several turns: the tokens so far are the next request's prompt."""

from __future__ import annotations

from rljax.engine import Generator
from rljax.rollout.trajectories import Episode
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


def turn_seed(seed: int, turn: int) -> int:
    """Returns the seed of a turn: the episode's own for turn 0, then a multiplicative hash of it.

    Hashed seeds are spread over [0, 2**31).
    """
    return (seed + turn * 0x9E3779B1) % 2**31
