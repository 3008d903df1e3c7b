"""Tokens per second of a sampler on requests of mixed lengths; JAX's compared with SGLang.

    python -m experiments.bench.decode                 # on a GPU: Qwen3-0.6B's shape, 256 requests
    python -m experiments.bench.decode --peer=sglang --peer_python=PYTHON
    python -m experiments.bench.decode --requests=256 --requests=1024    # one case after the other
    python -m experiments.bench.decode --dims=d2       # on two GPUs
    python -m experiments.bench.decode --engine=sglang --dims=d2 --sglang_python=PYTHON
    python -m experiments.bench.decode --shape=tiny --requests=8 --slots=8 --longest=32 --context=64

As --peer, SGLang runs first, on the same card and requests, in the environment of PYTHON; with
--engine=sglang its servers are those of a run, and rljax's client deals the requests out. Prompts
and completions have uniformly drawn lengths from --shortest to --longest, and no completion ends
earlier. Tokens and weights are random, log-probs are returned. Every run has prompts of its own, so
that none finds another's prefix. A line of JSON per run: output tokens per second, dispatches by
kind, peak memory in GB of 1e9 bytes, warm-up in seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from rljax.config.allocation import parse
from rljax.engine import Sampler, find_plugin
from rljax.errors import UserError
from rljax.experiments import main
from rljax.experiments.bench.sampler_config import CONTEXT, DIRECTORY, DTYPE, SHAPE, SLOTS, make_config
from rljax.experiments.bench.shapes import make_model
from rljax.types import Request, SamplingParams

REQUESTS = flags.DEFINE_multi_integer("requests", [256], "Requests per run; may be repeated, for several cases.", lower_bound=1)
RUNS = flags.DEFINE_integer("runs", 3, "Runs per case; the first of all is not counted: it warms caches.", lower_bound=1)
SHORTEST = flags.DEFINE_integer("shortest", 100, "Fewest tokens of a prompt and of a completion.", lower_bound=1)
LONGEST = flags.DEFINE_integer("longest", 1024, "Most tokens of a prompt and of a completion.", lower_bound=1)
PEER = flags.DEFINE_enum("peer", "none", ["none", "sglang"], "Library to compare with.")
ENGINE = flags.DEFINE_string("engine", "jax", "Engine of the sampler, as in allocation_mode.")
DIMS = flags.DEFINE_string("dims", "d1", "Its dims, as in allocation_mode.")
SGLANG_PYTHON = flags.DEFINE_string("sglang_python", "", "sglang.python")
SGLANG_DEVICE = flags.DEFINE_enum("sglang_device", "cuda", ["cuda", "cpu"], "sglang.device")
SERVER_ARGS = flags.DEFINE_list("server_args", [], "sglang.extra_args")
PEER_PYTHON = flags.DEFINE_string("peer_python", "python3", "The interpreter that has the peer.")

Lengths = list[tuple[int, int]]  # of prompt and completion


def cases() -> list[Lengths]:
    """Returns the lengths of the requests of every case."""
    found = []
    for requests in REQUESTS.value:
        drawn = np.random.default_rng(0).integers(SHORTEST.value, LONGEST.value + 1, (requests, 2))
        found.append([(int(prompt), int(completion)) for prompt, completion in drawn])
    return found


async def ours(directory: Path, vocabulary: int) -> None:
    plugin, pool = find_plugin(ENGINE.value), parse(f"{ENGINE.value}:{DIMS.value}", find_plugin).sampler
    if pool is None:
        raise UserError(f"--engine: {ENGINE.value} can't sample")
    plugin.prepare()
    start = time.perf_counter()
    sampler = await asyncio.to_thread(plugin.make_sampler, make_config(**sglang_keys()), pool, directory)
    warm_up = time.perf_counter() - start
    try:
        for run, lengths in [(run, lengths) for lengths in cases() for run in range(RUNS.value)]:
            random, requests = np.random.default_rng((run, len(lengths))), []
            for i, (prompt, completion) in enumerate(lengths):
                ids = random.integers(3, vocabulary, prompt, dtype=np.int32)
                requests.append(Request(f"{run}.{i}", ids, SamplingParams(completion), i))
            before = programs(sampler)
            start = time.perf_counter()
            completions = await asyncio.gather(*map(sampler.generate, requests))
            seconds = time.perf_counter() - start
            tokens = sum(len(completion.token_ids) for completion in completions)
            found = {"engine": ENGINE.value, "dims": DIMS.value, "run": run, "requests": len(requests), "tokens": tokens}
            found |= {"s": round(seconds, 2), "tokens_per_s": round(tokens / seconds)} | programs(sampler, before)
            peak = sampler.memory_peak
            print(json.dumps(found | {"peak_gb": peak and round(peak / 1e9, 2), "warm_up_s": round(warm_up, 1)}), flush=True)
    finally:
        await sampler.close()


def sglang_keys() -> dict[str, Any]:
    """Returns the keys of SGLang's servers: memory, slots and context of the JAX sampler's flags."""
    on_cpu = SGLANG_DEVICE.value == "cpu"
    settings = {
        "python": SGLANG_PYTHON.value,
        "device": "cpu" if on_cpu else "",
        "dtype": DTYPE.value,
        "attention_backend": "torch_native" if on_cpu else "triton",
        "mem_fraction_static": None if on_cpu else 0.6,
        "context_length": CONTEXT.value,
        "max_running_requests": SLOTS.value,
        "extra_args": ("--skip-tokenizer-init", *SERVER_ARGS.value),
    }
    return {f"sglang.{key}": value for key, value in settings.items()}


def programs(sampler: Sampler, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns what a JAX sampler dispatched since `before`; nothing for another."""
    from rljax.engines.jax.sampling.sampler import JaxSampler

    if not isinstance(sampler, JaxSampler):
        return {}
    then, stats = before or {"dispatches": {}, "waited_s": 0.0}, sampler.stats()
    return {
        "dispatches": {kind: n - then["dispatches"].get(kind, 0) for kind, n in sampler.dispatches.items()},
        "waited_s": round(stats.waited - then["waited_s"], 2),
        "preemptions": stats.preemptions,
        "decode_attention": sampler.decode_attention,
    }


def sglang(directory: Path, vocabulary: int) -> None:
    """Prints the same lines of SGLang, run by its own interpreter."""
    task = {"model": str(directory), "vocabulary": vocabulary, "cases": cases(), "runs": RUNS.value, "slots": SLOTS.value}
    command = [PEER_PYTHON.value, str(Path(__file__).with_name("decode_sglang.py")), json.dumps(task)]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise UserError(f"--peer=sglang: exit status {done.returncode}: {last}")


def bench() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(DIRECTORY.value or temporary)
        spec = make_model(directory, SHAPE.value)
        if PEER.value == "sglang":
            sglang(directory, spec.vocab_size)
        asyncio.run(ours(directory, spec.vocab_size))


if __name__ == "__main__":
    main.run_main(bench)
