"""A single turn with a verifiable reward: chat template, completion, score."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rljax.chat.pictures import has_pictures
from rljax.engine import Generator
from rljax.errors import SamplerError
from rljax.hf.tokenizer import Tokenizer
from rljax.rewards.score import Rewards, score
from rljax.rollout.trajectories import trajectory_of
from rljax.types import Completion, Finish, Prompt, Request, SamplingParams, Trajectory


class RLVR:
    """Reinforcement learning from a verifiable reward.

    The reward sees the completion's text without special tokens. The prompt may have pictures, for
    a model that takes them.
    """

    scores_by_rewards = True

    def __init__(self, tokenizer: Tokenizer, rewards: Rewards) -> None:
        self._tokenizer = tokenizer
        self._rewards = rewards

    async def episode(self, generator: Generator, prompt: Prompt, params: SamplingParams, seed: int) -> Trajectory | None:
        request = request_of(self._tokenizer, prompt, params, seed)
        completion = await complete(generator, request)
        reply = self._tokenizer.decode(completion.token_ids)
        scored = await score(self._rewards, self._tokenizer, prompt, reply, request.prompt_ids, completion.token_ids)
        return trajectory_of(request.prompt_ids, completion, scored.reward, scored.components, request.pictures)


def request_of(tokenizer: Tokenizer, prompt: Prompt, params: SamplingParams, seed: int) -> Request:
    """Returns the request for a completion of a prompt, with its pictures where it has some."""
    uid = f"{prompt.uid}#{seed}"
    if not has_pictures(prompt.messages):
        return Request(uid, tokenizer.encode_prompt(prompt), params, seed)
    encoded = tokenizer.encode_pictures(prompt)
    return Request(uid, encoded.token_ids, params, seed, encoded.urls, encoded.text)


async def generate(
    generator: Generator, request_id: str, prompt_ids: Sequence[int] | np.ndarray, params: SamplingParams, seed: int
) -> Completion:
    """Generates a completion that may be scored.

    Raises SamplerError if it was aborted: an unfinished completion has no meaningful reward.
    """
    return await complete(generator, Request(request_id, np.asarray(prompt_ids, np.int32), params, seed))


async def complete(generator: Generator, request: Request) -> Completion:
    """Generates the completion of a request, as `generate` does."""
    completion = await generator.generate(request)
    if completion.finish is Finish.ABORT:
        raise SamplerError(f"request {request.id} was aborted after {len(completion.token_ids)} tokens")
    return completion
