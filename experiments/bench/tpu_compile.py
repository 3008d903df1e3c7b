"""Compiles the programs of a config for TPUs that are not there: memory, kernels.

    python -m experiments.bench.tpu_compile --config=configs/quickstart.py --topology=v5e:2x2
    python -m experiments.bench.tpu_compile --shape=qwen3-0.6b --topology=v5e:2x4 --programs=update

Needs the extra [tpu], and neither a TPU nor weights: of the model, config.json is read. A line of
JSON per program, figures per device: compile time, peak memory and what of it are arguments and
temporaries, kernels and collectives by times they stand in the program, and of a sampler's program
what makes an array as large as a layer's cache other than in its place. least_ms is a roofline, no
measurement: the larger of FLOPs and bytes over the chip's published peaks. Exit status 1 if a
program does not compile or fit, or lacks the kernel of its attention.

What is counted, of a learner's program: the model's FLOPs, and every argument and result once. Of a
sampler's (decode: of one step over rows of the whole context, as many as the cache has room for;
prefill: at the beginning of its rows; a copy: nothing): the FLOPs of the matrix products that the
compiler counts and those of attention, the weights, and the keys and values read and written.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from rljax.config import io as config_io
from rljax.config.allocation import Pool, parse
from rljax.config.schema import Config
from rljax.engine import find_plugin
from rljax.errors import UserError
from rljax.experiments import main
from rljax.experiments.bench.shapes import SHAPES, write_config

if TYPE_CHECKING:
    import jax

    from rljax.engines.jax.planning.topology import Sampled, Target

main.define_config_flags(workdir=False)
TOPOLOGY = flags.DEFINE_multi_string("topology", [], "TPUs to compile for, such as v5e:2x4; may be given several times.")
SHAPE = flags.DEFINE_enum("shape", None, list(SHAPES), "Shape of the model; none: the config's model.")
SIDES = flags.DEFINE_multi_enum("side", ["learner", "sampler"], ["learner", "sampler"], "Sides whose programs are compiled.")
PROGRAMS = flags.DEFINE_string("programs", "", "Regular expression; programs whose names don't match all of it are left out.")


def bench() -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")  # libtpu compiles only; without a TPU JAX would look for one
    jax.config.update("jax_enable_compilation_cache", False)  # what is compiled for a TPU can't be read back without one
    from rljax.engines.jax.planning.topology import topology_devices

    if not TOPOLOGY.value:
        raise UserError("--topology: missing (TPUs to compile for, such as v5e:2x4)")
    with tempfile.TemporaryDirectory() as temporary:
        config, directory = _config_and_model(Path(temporary))
        for topology in TOPOLOGY.value:
            devices = topology_devices(topology)
            for side, pool in _pools(config, len(devices)):
                for found in compiled(config, side, pool, directory, devices):
                    print(json.dumps({"topology": topology, "side": side, "pool": str(pool)} | found), flush=True)


def _config_and_model(scratch: Path) -> tuple[Config, Path]:
    from rljax.hf.model_directory import prepare_model_directory

    overrides = main.overrides_from_flags()
    if SHAPE.value:
        write_config(scratch, SHAPE.value)
        return config_io.load(flags.FLAGS.config or "base", [("actor.path", str(scratch)), *overrides]), scratch
    config = main.config_from_flags()
    return config, prepare_model_directory(config.actor, scratch / "init", seed=config.seed)


def _pools(config: Config, devices: int) -> Iterator[tuple[str, Pool]]:
    """The pools to compile for, each with its side; those of other engines are left out."""
    allocation = parse(config.allocation_mode, find_plugin)
    for side, pool in (("learner", allocation.learner), ("sampler", allocation.sampler)):
        if pool is not None and pool.engine == "jax" and side in SIDES.value:
            if pool.first_device + pool.size > devices:
                raise UserError(f"allocation_mode: {pool} needs devices to {pool.first_device + pool.size - 1} of {devices}")
            yield side, pool


def compiled(config: Config, side: str, pool: Pool, directory: Path, devices: Sequence[jax.Device]) -> Iterator[dict[str, Any]]:
    """Compiles the programs of one side and describes each."""
    from rljax.chips import chip_of
    from rljax.engines.jax.planning.hlo import large_operations
    from rljax.engines.jax.planning.topology import compile_target, learner_targets, sampler_targets

    chip = chip_of(devices[0].device_kind)
    for target in {"learner": learner_targets, "sampler": sampler_targets}[side](config, pool, directory, devices):
        if PROGRAMS.value and not re.fullmatch(PROGRAMS.value, target.name):
            continue
        program = compile_target(target)
        if side == "learner":
            flops, traffic = _model_flops(config, directory, target) / pool.size, float(program.arguments + program.results)
        elif target.sampled is not None:
            flops = program.flops + _attention_flops(directory, target.sampled) / pool.tensor
            traffic = _bytes_needed(target.sampled)
        else:
            flops = traffic = 0.0
        fastest = None if chip is None or chip.bandwidth is None else max(flops / chip.flops, traffic / chip.bandwidth)
        yield {
            "program": target.name,
            "attention": target.attention,
            "compile_s": round(program.seconds, 1),
            "peak_gb": round(program.peak / 1e9, 3),
            "arguments_gb": round(program.arguments / 1e9, 3),
            "temporaries_gb": round(program.temporaries / 1e9, 3),
            "memory_gb": None if chip is None or chip.memory is None else round(chip.memory / 1e9, 1),
            "gflops": round(flops / 1e9, 1),
            "traffic_gb": round(traffic / 1e9, 3),
            "least_ms": None if fastest is None else round(1e3 * fastest, 2),
            "kernels": dict(program.kernels),
            "collectives": dict(program.collectives),
            "as_large_as_a_layers_cache": None if target.layer is None else large_operations(program.text, target.layer),
        }


def _attention_flops(directory: Path, sampled: Sampled) -> float:
    """FLOPs of attention in all layers over the rows of a data shard."""
    from rljax.hf.flops import attention_flops
    from rljax.hf.spec import ModelSpec

    rows = min(sampled.rows, sampled.room // (sampled.cached + sampled.new))
    return rows * attention_flops(ModelSpec.from_directory(directory), sampled.cached, sampled.new)


def _bytes_needed(sampled: Sampled) -> float:
    """Weights once, keys and values of rows once, and those that are new once more."""
    rows, tokens = sampled.rows, sampled.rows * (sampled.cached + sampled.new)
    return sampled.weights + (min(tokens, sampled.room) + rows * sampled.new) * sampled.cache / sampled.room


def _model_flops(config: Config, directory: Path, target: Target) -> float:
    """FLOPs of a learner's program on all devices, recomputation not counted."""
    from rljax.hf.flops import update_flops
    from rljax.hf.spec import ModelSpec

    if target.batch is None:
        return 0.0
    whole = update_flops(ModelSpec.from_directory(directory), target.batch.segment_ids, int(target.batch.loss_mask.sum()))
    return whole / 3 if target.name == "score" else whole


if __name__ == "__main__":
    main.run_main(bench)
