"""Prompt tokens per second, and how long a long prompt keeps others waiting.

    python -m experiments.bench.prefill              # on a GPU: Qwen3-0.6B's shape
    python -m experiments.bench.prefill --shape=tiny --slots=4 --context=256 --prompt=200

Once with prompts in chunks of --prefill_chunk tokens, once with a prompt in one dispatch. For each
a line of JSON: prompt tokens per second of --prompts long prompts and nothing else; then, while all
slots but one decode and a long prompt comes in, the time between two pieces of --decode_steps
tokens of a completion: median and longest, and the same before the prompt came.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from absl import flags

from rljax.config.allocation import Pool
from rljax.experiments import main
from rljax.experiments.bench.sampler_config import CONTEXT, DIRECTORY, PREFILL, SHAPE, SLOTS, make_config
from rljax.experiments.bench.shapes import make_model
from rljax.types import Request, SamplingParams

if TYPE_CHECKING:
    from rljax.engines.jax.sampling.sampler import JaxSampler

PROMPT = flags.DEFINE_integer("prompt", 3500, "Tokens of a long prompt.", lower_bound=2)
PROMPTS = flags.DEFINE_integer("prompts", 16, "Long prompts for the rate.", lower_bound=1)
flags.FLAGS.set_default("context", 4096)
flags.FLAGS.set_default("slots", 64)
flags.FLAGS.set_default("prefill_chunk", 512)

WARM = 8  # pieces of every completion before the long prompt comes


class Prompts:
    """Requests with prompts of their own."""

    def __init__(self, vocabulary: int) -> None:
        self._random, self._vocabulary, self._made = np.random.default_rng(0), vocabulary, 0

    def request(self, prompt: int, output: int) -> Request:
        self._made += 1
        ids = self._random.integers(3, self._vocabulary, prompt, dtype=np.int32)
        return Request(str(self._made), ids, SamplingParams(output), self._made)


async def rate(sampler: JaxSampler, prompts: Prompts) -> float:
    """Prompt tokens per second of long prompts alone."""
    requests = [prompts.request(PROMPT.value, 1) for _ in range(PROMPTS.value)]
    start = time.perf_counter()
    await asyncio.gather(*map(sampler.generate, requests))
    return PROMPT.value * PROMPTS.value / (time.perf_counter() - start)


async def gaps(sampler: JaxSampler, prompts: Prompts) -> tuple[list[float], list[float]]:
    """Seconds between two pieces of a completion, before a long prompt comes and while it does."""
    warm, done, arrivals = [asyncio.Event() for _ in range(SLOTS.value - 1)], asyncio.Event(), []

    async def decode(i: int) -> None:
        times = [time.perf_counter()]
        async for _ in sampler.stream(prompts.request(16, CONTEXT.value - 16)):
            times.append(time.perf_counter())
            if len(times) > WARM:
                warm[i].set()
            if done.is_set():
                break
        arrivals.append(times)

    others = [asyncio.create_task(decode(i)) for i in range(SLOTS.value - 1)]
    await asyncio.gather(*(event.wait() for event in warm))
    first = time.perf_counter()
    await sampler.generate(prompts.request(PROMPT.value, 1))
    last = time.perf_counter()
    done.set()
    await asyncio.gather(*others)
    pairs = [(a, b) for times in arrivals for a, b in itertools.pairwise(times[2:])]
    before, during = [b - a for a, b in pairs if b < first], [b - a for a, b in pairs if b >= first and a <= last]
    return before, during


async def measure(directory: Path, vocabulary: int, chunk: int) -> None:
    from rljax.engines.jax.sampling.sampler import JaxSampler

    sampler, prompts = JaxSampler(make_config(prefill_chunk=chunk), Pool("jax"), directory), Prompts(vocabulary)
    await rate(sampler, prompts)
    tokens_per_s = await rate(sampler, prompts)
    await gaps(sampler, prompts)
    found: dict[str, object] = {"prefill_chunk": chunk, "prompt_tokens_per_s": round(tokens_per_s)}
    for name, seconds in zip(("before", "during"), await gaps(sampler, prompts), strict=True):
        ms = 1e3 * np.asarray(seconds)
        figures = {"p50": round(float(np.median(ms)), 2), "max": round(float(ms.max()), 2), "pieces": len(ms)}
        found[f"gap_ms_{name}"] = figures
    print(json.dumps(found), flush=True)
    await sampler.close()


def bench() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(DIRECTORY.value or temporary)
        spec = make_model(directory, SHAPE.value)
        for chunk in (PREFILL.value, CONTEXT.value):
            asyncio.run(measure(directory, spec.vocab_size, chunk))


if __name__ == "__main__":
    main.run_main(bench)
