"""Planned and counted peaks of learners without a GPU, in a table.

    python -m experiments.bench.plan_no_gpu                  # PyTorch
    python -m experiments.bench.plan_no_gpu --dims=d1 --dims=f2 --dims=c2
    python -m experiments.bench.plan_no_gpu --engine=jax     # needs the extra [cuda]

The learners, and the very batches, that experiments.bench.plan_gpu measures; with --dims those of
experiments.bench.several_gpus, eight rows of which a micro-batch has one. PyTorch's update is run
on tensors without data, of which every allocation is counted; JAX's is compiled by XLA for a GPU
that is not there. GB of 1e9 bytes; seconds are of CPU time, the largest components those of the
count. A line per case as it ends.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

from absl import flags

from rljax.batching.batch import Batch
from rljax.config.allocation import Pool
from rljax.config.schema import Config
from rljax.experiments import main
from rljax.experiments.bench.packed_rows import PackedRows
from rljax.experiments.bench.plan_cases import Case, learner, learners
from rljax.experiments.bench.several.case import cards_of
from rljax.experiments.bench.shapes import SHAPES, write_config

ENGINES = ["fsdp", "jax"]
CHIP = flags.DEFINE_string("chip", "h200", "The GPU, as in a topology of experiments.plan.")
MODELS = flags.DEFINE_multi_enum("shape", ["smollm2-135m", "qwen3-0.6b", "qwen3-1.7b"], list(SHAPES), "Shapes of models.")
ENGINE = flags.DEFINE_multi_enum("engine", ["fsdp"], ENGINES, "Engines of the learners.")
DIMS = flags.DEFINE_multi_string("dims", [], "Dims of learners of eight rows, as in allocation_mode. None: one GPU's learners.")
REPEATED = flags.DEFINE_bool("repeat_heads", True, "Keys and values are repeated for their query heads, as torch 2.11 does it.")
ROWS = PackedRows(rows=8, tokens=16384, segments=16)
NAMED = 4  # components


def bench() -> None:
    print(f"{'GB':14s} {'':22s} {'planned':>8s} {'counted':>8s} {'':>7s} {'s':>5s}")
    with heads_repeated() if REPEATED.value and "fsdp" in ENGINE.value else contextlib.nullcontext():
        for shape in MODELS.value:
            for case in _cases(shape):
                report(case)


def _cases(shape: str) -> Iterator[Case]:
    for engine in ENGINE.value:
        yield from (case for case in learners(shape) if not DIMS.value and case.mode.startswith(engine))
        yield from (learner(shape, f"{engine}:{dims}", ROWS, rows_per_mb=1) for dims in DIMS.value)


@contextlib.contextmanager
def heads_repeated() -> Iterator[None]:
    """Has attention of PyTorch do what it does where its kernel reads as many key heads as query
    heads, whatever the installed one can.
    """
    from rljax.backends.torch import attention

    with mock.patch.object(attention, "_ABLE", attention._ABLE.keys() - {"enable_gqa"}):
        yield


def _place(case: Case) -> str:
    return f"{CHIP.value}:{cards_of(case.mode)}"


def report(case: Case) -> None:
    """Prints the line of a case."""
    planned, start = case.planned(_place(case)) / 1e9, time.process_time()
    peak, parts = counted(case)
    seconds, off = time.process_time() - start, f"{100 * (planned * 1e9 / peak - 1):+.1f}%"
    largest = sorted(parts.items(), key=lambda part: -part[1])[:NAMED]
    named = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in largest)
    print(f"{case.shape:14s} {case.what:22s} {planned:8.2f} {peak / 1e9:8.2f} {off:>7s} {seconds:5.0f} {named}", flush=True)


def counted(case: Case) -> tuple[float, Mapping[str, float]]:
    """Returns the peak of a learner's update in bytes, and its components where they are known."""
    made = case.plan(_place(case))
    config, pool = made.request.config, made.allocation.learner
    assert pool is not None and case.rows is not None
    with tempfile.TemporaryDirectory() as directory:
        batch = case.rows.batch(write_config(Path(directory), case.shape).vocab_size)
        if pool.engine == "jax":
            return _compiled(config, pool, Path(directory), batch, _place(case)), {}
        from rljax.engines.cuda.planning.without_data import components, update_memory

        memory = update_memory(config, pool, Path(directory), batch)
        return float(memory.peak), components(memory.at_peak)


def _compiled(config: Config, pool: Pool, directory: Path, batch: Batch, topology: str) -> float:
    import jax

    from rljax.engines.jax.planning.topology import QUICK, compile_target, learner_targets, topology_devices

    jax.config.update("jax_platforms", "cpu")  # the compiler alone; JAX would look for a GPU
    jax.config.update("jax_enable_compilation_cache", False)  # what is compiled for a device can't be read back without one
    targets = learner_targets(config, pool, directory, topology_devices(topology), batch)
    return float(compile_target(next(target for target in targets if target.name == "update"), QUICK).peak)


if __name__ == "__main__":
    main.run_main(bench)
