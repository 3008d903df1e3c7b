"""Greedy completions from any sampler of rljax, for experiments.compare."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from rljax.engine import Generator
from rljax.experiments.comparison.case import Case, Greedy
from rljax.types import Request, SamplingParams


async def complete(generator: Generator, prompts: Sequence[np.ndarray], case: Case) -> list[Greedy]:
    """Completes all prompts at once."""
    params = SamplingParams(case.max_new_tokens, greedy=True, stop_token_ids=case.stop_token_ids)
    requests = [Request(f"compare/{i}", prompt, params, seed=i) for i, prompt in enumerate(prompts)]
    completions = await asyncio.gather(*map(generator.generate, requests))
    return [Greedy(c.token_ids, c.logp.astype(np.float64)) for c in completions]
