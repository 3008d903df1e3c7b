"""Planned and counted peaks of learners without a GPU, in a table.

    python -m experiments.bench.plan_no_gpu                  # PyTorch
    python -m experiments.bench.plan_no_gpu --engine=jax     # needs the extra [cuda]

The learners, and the very batches, that experiments.bench.plan_gpu measures. PyTorch's update is
run on tensors without data, of which every allocation is counted; JAX's is compiled by XLA for a
GPU that is not there. GB of 1e9 bytes; seconds are of CPU time, the largest components those of
the count. A line per case as it ends.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from absl import flags

from rljax.batching.batch import Batch
from rljax.config.allocation import Pool
from rljax.config.schema import Config
from rljax.experiments import main
from rljax.experiments.bench.plan_cases import Case, learners
from rljax.experiments.bench.shapes import SHAPES, write_config

ENGINES = ["fsdp", "jax"]
TOPOLOGY = flags.DEFINE_string("topology", "h200:1", "The GPU, as in experiments.plan.")
MODELS = flags.DEFINE_multi_enum("shape", ["smollm2-135m", "qwen3-0.6b", "qwen3-1.7b"], list(SHAPES), "Shapes of models.")
ENGINE = flags.DEFINE_multi_enum("engine", ["fsdp"], ENGINES, "Engines of the learners.")
NAMED = 4  # components


def bench() -> None:
    print(f"{'GB':14s} {'':22s} {'planned':>8s} {'counted':>8s} {'':>7s} {'s':>5s}")
    for shape in MODELS.value:
        for case in learners(shape):
            if case.mode.partition(":")[0] in ENGINE.value:
                report(case)


def report(case: Case) -> None:
    """Prints the line of a case."""
    planned, start = case.planned(TOPOLOGY.value) / 1e9, time.process_time()
    peak, parts = counted(case)
    seconds, off = time.process_time() - start, f"{100 * (planned * 1e9 / peak - 1):+.1f}%"
    largest = sorted(parts.items(), key=lambda part: -part[1])[:NAMED]
    named = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in largest)
    print(f"{case.shape:14s} {case.what:22s} {planned:8.2f} {peak / 1e9:8.2f} {off:>7s} {seconds:5.0f} {named}", flush=True)


def counted(case: Case) -> tuple[float, Mapping[str, float]]:
    """Returns the peak of a learner's update in bytes, and its components where they are known."""
    made = case.plan(TOPOLOGY.value)
    config, pool = made.request.config, made.allocation.learner
    assert pool is not None and case.rows is not None
    with tempfile.TemporaryDirectory() as directory:
        batch = case.rows.batch(write_config(Path(directory), case.shape).vocab_size)
        if pool.engine == "jax":
            return _compiled(config, pool, Path(directory), batch), {}
        from rljax.engines.cuda.without_data import components, update_memory

        memory = update_memory(config, pool, Path(directory), batch)
        return float(memory.peak), components(memory.at_peak)


def _compiled(config: Config, pool: Pool, directory: Path, batch: Batch) -> float:
    import jax

    from rljax.engines.jax.topology import QUICK, compile_target, learner_targets, topology_devices

    jax.config.update("jax_platforms", "cpu")  # the compiler alone; JAX would look for a GPU
    jax.config.update("jax_enable_compilation_cache", False)  # what is compiled for a device can't be read back without one
    targets = learner_targets(config, pool, directory, topology_devices(TOPOLOGY.value), batch)
    return float(compile_target(next(target for target in targets if target.name == "update"), QUICK).peak)


if __name__ == "__main__":
    main.run_main(bench)
