"""One optimizer step of a learner on full packed rows: time, model FLOP/s, memory on a GPU.

python -m experiments.bench.learner --engine=fsdp     # on a GPU: Qwen3-0.6B's shape, 16384 tokens
python -m experiments.bench.learner --engine=jax
python -m experiments.bench.learner --engine=fsdp --dims=f4 --rows=4    # four GPUs
python -m experiments.bench.learner --shape=tiny --tokens=256 --segments=4 --dtype=float32

Weights are random, written once to --directory. Time is the median of --repeats steps after two
that are not timed, around finished calls, host work and metrics included. FLOPs are the model's
(rljax/hf/flops.py), MFU is relative to the device's peak in bfloat16. Loss and gradient norm are
those of the first step, whatever the dims: the weights and the rows are the same.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from absl import flags

from rljax.batching.batch import Batch
from rljax.config.io import from_dict
from rljax.config.schema import Config
from rljax.configs import base
from rljax.engine import allocate
from rljax.experiments import main
from rljax.experiments.bench.packed_rows import PackedRows
from rljax.experiments.bench.ranks import learner_of
from rljax.experiments.bench.shapes import SHAPES, make_model
from rljax.hf.flops import update_flops
from rljax.metrics.throughput import peak_flops
from rljax.objective.spec import PREFIX

ENGINE = flags.DEFINE_string("engine", "fsdp", "Engine of the learner, as in allocation_mode.")
DIMS = flags.DEFINE_string("dims", "d1", "Its dims, as in allocation_mode.")
SHAPE = flags.DEFINE_enum("shape", "qwen3-0.6b", list(SHAPES), "Shape of the model.")
DIRECTORY = flags.DEFINE_string("directory", "", "Directory of the model, written if missing; empty: a temporary one.")
ROWS = flags.DEFINE_integer("rows", 1, "Packed rows per step.")
ROWS_PER_MB = flags.DEFINE_integer("rows_per_mb", 1, "actor.mb_spec.rows_per_mb")
CHUNK = flags.DEFINE_integer("logprob_chunk", None, "actor.logprob_chunk")
TOKENS = flags.DEFINE_integer("tokens", 16384, "Tokens per row.")
SEGMENTS = flags.DEFINE_integer("segments", 16, "Trajectories per row, of equal length; the second half of each is trained on.")
WITHOUT = flags.DEFINE_float(
    "without_advantage", 0.0, "Share of the trajectories whose advantage is 0.", lower_bound=0, upper_bound=1
)
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "actor.dtype")
REMAT = flags.DEFINE_enum("gradient_checkpointing", "auto", ["auto", "none", "full", "dots"], "actor.gradient_checkpointing")
ATTENTION = flags.DEFINE_string("attention", "auto", "jax.attention")
UNROLL = flags.DEFINE_bool("unroll", None, "jax.unroll")
COMPILE = flags.DEFINE_bool("compile", True, "fsdp.compile")
SCORE = flags.DEFINE_bool("score", False, "Time the log-probs of the rows, not a step.")
REPEATS = flags.DEFINE_integer("repeats", 10, "Timed steps.")
PROFILE = flags.DEFINE_string("profile", "", "File for a table of two more steps, kernels by time; empty: none.")

PEAK = "memory/learner_peak_bytes"


def make_config() -> Config:
    config = base.get_config()
    config.allocation_mode = f"{ENGINE.value}:{DIMS.value}"
    config.actor.dtype = DTYPE.value
    config.actor.gradient_checkpointing = REMAT.value
    config.actor.mb_spec.max_tokens_per_row = TOKENS.value
    config.actor.mb_spec.rows_per_mb = ROWS_PER_MB.value
    config.actor.logprob_chunk = CHUNK.value
    config.fsdp.compile = COMPILE.value
    config.jax.attention = ATTENTION.value
    config.jax.unroll = UNROLL.value
    return from_dict(config)


def make_batch(vocabulary: int) -> Batch:
    return PackedRows(ROWS.value, TOKENS.value, SEGMENTS.value).batch(vocabulary, WITHOUT.value)


def bench() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(DIRECTORY.value or temporary)
        spec = make_model(directory, SHAPE.value)
        config = make_config()
        pool = allocate(config).learner
        assert pool is not None
        batch, seconds = make_batch(spec.vocab_size), []
        means: list[dict[str, float]] = []
        with learner_of(config, pool, directory, Path(temporary)) as learner:

            def work(batch: Batch) -> None:
                if SCORE.value:
                    learner.score(batch)
                else:
                    means.append({name: mean.value for name, mean in learner.update(batch).items()})

            for _ in range(2 + REPEATS.value):
                start = time.perf_counter()
                work(batch)  # returns when results are on the host
                seconds.append(time.perf_counter() - start)
            if PROFILE.value:
                profile(pool.engine, lambda: work(batch), Path(PROFILE.value))
            name = device_name(pool.engine)
            peak = means[-1][PEAK] / 1e9 if means and PEAK in means[-1] else memory(pool.engine)
    median = statistics.median(seconds[2:])
    work_flops = update_flops(spec, batch.segment_ids, int(batch.loss_mask.sum())) / (3 if SCORE.value else 1)
    rate, limit = work_flops / median / pool.size, peak_flops(name)
    line = {
        "mode": config.allocation_mode,
        "shape": SHAPE.value,
        "dtype": DTYPE.value,
        "tokens": batch.token_ids.size,
        "what": "score" if SCORE.value else "update",
        "gradient_checkpointing": REMAT.value,
        "rows_per_mb": ROWS_PER_MB.value,
        "without_advantage": WITHOUT.value,
        "ms": round(median * 1e3, 1),
        "first_s": round(seconds[0], 1),
        "tokens_per_s": round(batch.token_ids.size / median),
        "model_tflops_per_device": round(rate / 1e12, 2),
        "mfu": None if limit is None else round(rate / limit, 4),
        "device": name,
    }
    if means:
        line |= {"loss": means[0][f"{PREFIX}/loss"], "grad_norm": means[0][f"{PREFIX}/grad_norm"]}
        line["scale"] = float(np.abs(batch.loss_weight * batch.advantage).sum())  # of the loss, whose terms cancel
    print(json.dumps(line | ({} if peak is None else {"peak_gb": round(peak, 2)})))


def profile(engine: str, work: Callable[[], object], target: Path) -> None:
    """Writes a table of two calls: kernels by GPU time, and for torch operations by host time."""
    target.write_text(_profile_jax(work) if engine == "jax" else _profile_torch(work))


def _profile_jax(work: Callable[[], object]) -> str:
    import jax

    from rljax.backends.jax.profile import newest_trace, table

    with tempfile.TemporaryDirectory() as traces:
        with jax.profiler.trace(traces):
            work(), work()
        return table(newest_trace(Path(traces)))


def _profile_torch(work: Callable[[], object]) -> str:
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        work(), work()
    averages = found.key_averages()
    by = ("self_cuda_time_total", "self_cpu_time_total") if torch.cuda.is_available() else ("self_cpu_time_total",)
    return "\n".join(averages.table(sort_by=key, row_limit=40, max_name_column_width=70) for key in by)


def device_name(engine: str) -> str:
    """Returns the device's name in the engine's framework."""
    if engine == "jax":
        import jax

        return jax.devices()[0].device_kind
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def memory(engine: str) -> float | None:
    """Returns the peak of this process's device memory in GB; None if the framework doesn't know."""
    if engine == "jax":
        import jax

        statistics = jax.devices()[0].memory_stats() or {}
        return statistics["peak_bytes_in_use"] / 1e9 if statistics else None
    import torch

    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None


if __name__ == "__main__":
    main.run_main(bench)
