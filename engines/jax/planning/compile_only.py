"""Programs of a plan, compiled by XLA for TPUs and GPUs that are not there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from rljax.chips import Topology
from rljax.config.allocation import Pool
from rljax.config.schema import Config
from rljax.engines.jax.planning.topology import (
    QUICK,
    OutOfMemory,
    compile_target,
    learner_targets,
    sampler_targets,
    topology_devices,
)
from rljax.planning.planner import Chosen, every
from rljax.planning.program import Program

TARGETS = {"learner": learner_targets, "sampler": sampler_targets}
MOMENTS = {  # of the estimate, by side and program
    ("learner", "update"): ("loss", "backward pass"),
    ("sampler", "decode"): ("decoding",),
}


def devices_of(topology: Topology) -> Sequence[jax.Device]:
    """Returns devices to compile for. Raises UserError without the compiler for them."""
    jax.config.update("jax_platforms", "cpu")  # compilers alone; without a TPU or GPU JAX would look for one
    jax.config.update("jax_enable_compilation_cache", False)  # what is compiled for a device can't be read back without one
    return topology_devices(topology.name)


def programs(
    side: str, config: Config, pool: Pool, topology: Topology, model_dir: Path, chosen: Chosen = every
) -> Iterator[Program]:
    """Implements `rljax.planning.planner.Planner.programs`."""
    for target in TARGETS[side](config, pool, model_dir, devices_of(topology)):
        if not chosen(target.name):
            continue
        program = Program(target.name, f"attention {target.attention}", MOMENTS.get((side, target.name), ()))
        try:
            compiled = compile_target(target, QUICK)
        except OutOfMemory as error:
            yield dataclasses.replace(program, problem=str(error))
            continue
        yield dataclasses.replace(
            program,
            peak=compiled.peak,
            seconds=compiled.seconds,
            kernels=dict(compiled.kernels),
            collectives=dict(compiled.collectives),
        )
