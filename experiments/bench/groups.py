"""Gain of storing and reading the prompt of a group once.

    python -m experiments.bench.groups          # on a GPU: Qwen3-0.6B, 16 prompts of 16 samples
    python -m experiments.bench.groups --shape=tiny --slots=8 --group=4 --prompt=40 --output=20

Every round draws --slots completions of --output tokens behind prompts of --prompt tokens: once
with --group samples of each prompt, once with every sample's prompt its own, of the same length. A
line of JSON each: output tokens per second from the first request to the last, prompt tokens
prefilled, seconds that the host waited for the device, dispatches. The last line has the ratio of
the medians; the first round of each kind is not counted.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from absl import flags

from rljax.config.allocation import Pool
from rljax.experiments import main
from rljax.experiments.bench.sampler_config import DIRECTORY, SHAPE, SLOTS, make_config, peak_gb
from rljax.experiments.bench.shapes import make_model
from rljax.types import Request, SamplingParams

if TYPE_CHECKING:
    from rljax.engines.jax.sampling.sampler import JaxSampler

GROUP = flags.DEFINE_integer("group", 16, "Samples of a prompt.", lower_bound=2)
PROMPT = flags.DEFINE_integer("prompt", 1000, "Tokens of a prompt.", lower_bound=2)
OUTPUT = flags.DEFINE_integer("output", 1000, "Tokens of a completion.", lower_bound=1)
ROUNDS = flags.DEFINE_integer("rounds", 2, "Rounds of each kind; the first is not counted.", lower_bound=2)


def requests_of(round_: int, group: int, vocabulary: int) -> list[Request]:
    """Requests of one round, `group` of them with each prompt."""
    random, requests = np.random.default_rng([round_, group]), []
    for i in range(SLOTS.value):
        if i % group == 0:
            prompt = random.integers(3, vocabulary, PROMPT.value, dtype=np.int32)
        requests.append(Request(f"{round_}.{i}", prompt, SamplingParams(OUTPUT.value), i))
    return requests


async def measure(sampler: JaxSampler, requests: list[Request]) -> dict[str, object]:
    dispatches, stats = sampler.dispatches, sampler.stats()
    start = time.perf_counter()
    completions = await asyncio.gather(*map(sampler.generate, requests))
    seconds, tokens = time.perf_counter() - start, sum(len(completion.token_ids) for completion in completions)
    sent = {kind: n - dispatches.get(kind, 0) for kind, n in sampler.dispatches.items() if n > dispatches.get(kind, 0)}
    prefilled = sampler.stats().prefilled_tokens - stats.prefilled_tokens
    found = {"tokens_per_s": round(tokens / seconds), "s": round(seconds, 2), "prefilled_tokens": prefilled}
    return found | {"waited_s": round(sampler.stats().waited - stats.waited, 2), "dispatches": sent}


async def compare(directory: Path, vocabulary: int) -> None:
    from rljax.engines.jax.sampling.sampler import JaxSampler

    sampler = JaxSampler(make_config(), Pool("jax"), directory)
    rates: dict[str, list[float]] = {"shared": [], "unshared": []}
    for round_ in range(ROUNDS.value):
        for kind, group in (("shared", GROUP.value), ("unshared", 1)):
            found = await measure(sampler, requests_of(round_, group, vocabulary))
            rates[kind] += [float(str(found["tokens_per_s"]))] if round_ else []
            print(json.dumps({"round": round_, "kind": kind, "group": group} | found), flush=True)
    ratio = statistics.median(rates["shared"]) / statistics.median(rates["unshared"])
    found = {"ratio": round(ratio, 3), "peak_gb": peak_gb(), "decode_attention": sampler.decode_attention}
    print(json.dumps(found), flush=True)
    await sampler.close()


def bench() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(DIRECTORY.value or temporary)
        spec = make_model(directory, SHAPE.value)
        asyncio.run(compare(directory, spec.vocab_size))


if __name__ == "__main__":
    main.run_main(bench)
