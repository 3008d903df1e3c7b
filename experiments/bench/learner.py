"""One optimizer step of a learner on full packed rows: time, model FLOP/s, memory on a GPU.

python -m experiments.bench.learner --engine=fsdp     # on a GPU: Qwen3-0.6B's shape, 16384 tokens
python -m experiments.bench.learner --engine=jax
torchrun --nproc-per-node 4 -m experiments.bench.learner --engine=fsdp --dims=f4 --rows=4
python -m experiments.bench.learner --shape=tiny --tokens=256 --segments=4 --dtype=float32

Weights are random, written once to --directory. Time is the median of --repeats steps after two
that are not timed, around finished calls, host work and metrics included. FLOPs are those of the
model: 6 per matrix parameter and token (the unembedding only for trained tokens), attention as far
as it is causal, nothing for recomputation.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from rljax.batching.batch import Batch
from rljax.config.allocation import parse
from rljax.config.io import from_dict
from rljax.config.schema import Config, ModelConfig
from rljax.configs import base
from rljax.engine import find_plugin
from rljax.experiments import main
from rljax.hf import ModelSpec, init_directory
from rljax.hf.tensors import parameter_count

ENGINE = flags.DEFINE_string("engine", "fsdp", "Engine of the learner, as in allocation_mode.")
DIMS = flags.DEFINE_string("dims", "d1", "Its dims, as in allocation_mode.")
SHAPE = flags.DEFINE_enum("shape", "qwen3-0.6b", ["qwen3-0.6b", "smollm2-135m", "tiny"], "Shape of the model.")
DIRECTORY = flags.DEFINE_string("directory", "", "Directory of the model, written if missing; empty: a temporary one.")
ROWS = flags.DEFINE_integer("rows", 1, "Packed rows per step.")
ROWS_PER_MB = flags.DEFINE_integer("rows_per_mb", 1, "actor.mb_spec.rows_per_mb")
CHUNK = flags.DEFINE_integer("logprob_chunk", 1024, "actor.logprob_chunk")
TOKENS = flags.DEFINE_integer("tokens", 16384, "Tokens per row.")
SEGMENTS = flags.DEFINE_integer("segments", 16, "Trajectories per row, of equal length; the second half of each is trained on.")
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "actor.dtype")
REMAT = flags.DEFINE_enum("gradient_checkpointing", "full", ["none", "full", "dots"], "actor.gradient_checkpointing")
COMPILE = flags.DEFINE_bool("compile", True, "fsdp.compile")
SCORE = flags.DEFINE_bool("score", False, "Time the log-probs of the rows, not a step.")
REPEATS = flags.DEFINE_integer("repeats", 10, "Timed steps.")
PROFILE = flags.DEFINE_string("profile", "", "File for torch's profile of two more steps, on GPU and host; empty: none.")

PEAK = 989e12  # bfloat16 FLOP/s of an H100 SXM as advertised; the base of MFU
SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen3-0.6b": (
        151936,
        dict(architecture="qwen3", hidden_size=1024, intermediate_size=3072, num_layers=28)
        | dict(num_heads=16, num_kv_heads=8, head_dim=128),
    ),
    "smollm2-135m": (
        49152,
        dict(architecture="llama", hidden_size=576, intermediate_size=1536, num_layers=30)
        | dict(num_heads=9, num_kv_heads=3, head_dim=64),
    ),
    "tiny": (
        512,
        dict(architecture="qwen3", hidden_size=64, intermediate_size=128, num_layers=2)
        | dict(num_heads=4, num_kv_heads=2, head_dim=16),
    ),
}


def make_model(directory: Path) -> ModelSpec:
    vocabulary, shape = SHAPES[SHAPE.value]
    if not (directory / "config.json").is_file():
        model = ModelConfig(
            **shape,
            max_position_embeddings=40960,
            tie_word_embeddings=True,
            initializer_range=0.02,
            tokenizer="char",
        )
        init_directory(model, directory, seed=0, vocab_size=vocabulary, eos_token_ids=[2], dtype="bfloat16")
    return ModelSpec.from_directory(directory)


def make_config() -> Config:
    config = base.get_config()
    config.allocation_mode = f"{ENGINE.value}:{DIMS.value}"
    config.actor.dtype = DTYPE.value
    config.actor.gradient_checkpointing = REMAT.value
    config.actor.mb_spec.max_tokens_per_row = TOKENS.value
    config.actor.mb_spec.rows_per_mb = ROWS_PER_MB.value
    config.actor.logprob_chunk = CHUNK.value
    config.fsdp.compile = COMPILE.value
    return from_dict(config)


def make_batch(vocabulary: int) -> Batch:
    random = np.random.default_rng(0)
    shape, length = (ROWS.value, TOKENS.value), TOKENS.value // SEGMENTS.value
    index = np.arange(TOKENS.value)
    positions = np.broadcast_to(index % length, shape).astype(np.int32)
    mask = positions >= length // 2
    floats = {name: np.where(mask, random.normal(size=shape), 0).astype(np.float32) for name in ("advantage", "behavior_logp")}
    return Batch(
        token_ids=random.integers(3, vocabulary, shape).astype(np.int32),
        segment_ids=np.broadcast_to(index // length + 1, shape).astype(np.int32),
        positions=positions,
        loss_mask=mask,
        loss_weight=(mask / mask.sum()).astype(np.float32),
        versions=np.zeros(shape, np.int32),
        **floats,
    )


def flops(spec: ModelSpec, batch: Batch) -> float:
    """Returns the FLOPs of forward and backward over the whole batch."""
    table = spec.vocab_size * spec.hidden_size
    inner = parameter_count(spec) - table * (1 if spec.tie_word_embeddings else 2)
    lengths = [n for ids in batch.segment_ids for n in np.bincount(ids)[1:].tolist()]
    attention = spec.num_layers * spec.num_heads * spec.head_dim * sum(n * n for n in lengths)
    return 6.0 * (inner * batch.token_ids.size + table * int(batch.loss_mask.sum()) + attention)


def bench() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        spec = make_model(Path(DIRECTORY.value or temporary))
        config = make_config()
        pool = parse(config.allocation_mode, find_plugin).learner
        assert pool is not None
        learner = find_plugin(pool.engine).make_learner(config, pool, Path(DIRECTORY.value or temporary))
        batch, seconds = make_batch(spec.vocab_size), []
        work = learner.score if SCORE.value else learner.update
        for _ in range(2 + REPEATS.value):
            start = time.perf_counter()
            work(batch)  # returns when results are on the host
            seconds.append(time.perf_counter() - start)
        if PROFILE.value:
            profile(lambda: work(batch), Path(PROFILE.value))
        learner.close()
    median = statistics.median(seconds[2:])
    rate = flops(spec, batch) / (3 if SCORE.value else 1) / median / pool.size
    found = {
        "mode": config.allocation_mode,
        "shape": SHAPE.value,
        "tokens": batch.token_ids.size,
        "what": "score" if SCORE.value else "update",
        "gradient_checkpointing": REMAT.value,
        "rows_per_mb": ROWS_PER_MB.value,
        "ms": round(median * 1e3, 1),
        "first_s": round(seconds[0], 1),
        "tokens_per_s": round(batch.token_ids.size / median),
        "model_tflops_per_device": round(rate / 1e12, 2),
        "mfu_of_h100": round(rate / PEAK, 4),
    }
    print(json.dumps(found | memory(pool.engine)))


def profile(work: Callable[[], object], target: Path) -> None:
    """Writes two tables of two calls: kernels by GPU time, operations by host time."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        work(), work()
    averages = found.key_averages()
    by = ("self_cuda_time_total", "self_cpu_time_total") if torch.cuda.is_available() else ("self_cpu_time_total",)
    tables = [averages.table(sort_by=key, row_limit=40, max_name_column_width=70) for key in by]
    target.write_text("\n".join(tables))


def memory(engine: str) -> dict[str, float]:
    """Returns the peak of this process's GPU memory in GB, if torch has a GPU."""
    if engine != "fsdp":
        return {}
    import torch

    return {"peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2)} if torch.cuda.is_available() else {}


if __name__ == "__main__":
    main.run_main(bench)
