"""Compiling a run's programs for TPUs and GPUs that are not there: XLA's compilers need none.

    topology -> devices -> mesh of each pool -> the learner's and sampler's own programs, lowered
             -> compiled: peak memory, kernels, collectives, FLOPs and bytes

The programs are those of `Functions`, `GradientStep` and `Programs`, as a run makes them, given
shapes in the place of arrays. Nothing can be run.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from rljax.backends.jax.accumulate import GradientStep
from rljax.backends.jax.attention.cudnn import lowered_for
from rljax.backends.jax.mesh import pool_mesh, row_shards
from rljax.backends.jax.multihost import describe
from rljax.backends.jax.optim import Optimizer
from rljax.backends.jax.sharding import replicated
from rljax.batching.batch import Batch
from rljax.batching.full import full_batch
from rljax.chips import GPU, Topology
from rljax.config.allocation import Pool
from rljax.config.schema import Config
from rljax.engines.jax.learning.functions import Functions
from rljax.engines.jax.learning.policy import Policy
from rljax.engines.jax.planning import hlo
from rljax.engines.jax.planning.cuda_target import cuda_devices
from rljax.engines.jax.rows import micro_batches
from rljax.engines.jax.sampling.cache_size import shard_bytes
from rljax.engines.jax.sampling.programs import Programs
from rljax.errors import UserError
from rljax.objective.spec import Objective

# Beginnings of the names of the kernels that an attention is made of.
KERNELS = {
    "splash": ("splash_mha",),
    "pallas_tpu": ("ragged_paged_attention", "write_pages"),
    "cudnn": ("cudnn_fmha",),
    "pallas_gpu": ("paged_attention",),
}
# Of the time that programs run no more is asked for: it makes next to no difference to their memory, and compiles in a tenth
# of the time.
QUICK: Mapping[str, Any] = (
    {"optimization_level": "O1"} if jax.__version_info__ >= (0, 11) else {"exec_time_optimization_effort": -1.0}
)
# Answers to what libtpu else asks Google Cloud, or warns that it does not know: the machine's kind, which a topology by name
# does not depend on.
NO_MACHINE = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-1"}
CHIP_CONFIGS = {"v4": "megacore"}  # without it libtpu takes each of a chip's two cores for a device, with half of its memory


@dataclasses.dataclass(frozen=True)
class Sampled:
    """The tokens that a sampler's program takes in at once, and what lies on every device."""

    rows: int  # of a data shard
    new: int  # tokens of a row
    cached: int  # tokens of the row before them, at most
    weights: int  # bytes
    cache: int  # bytes
    room: int  # tokens that the cache has room for


@dataclasses.dataclass(frozen=True)
class Target:
    """A program and the name it goes by, lowered and not compiled yet."""

    name: str
    attention: str  # that was chosen for it
    lowered: jax.stages.Lowered
    kernels: tuple[str, ...]  # beginnings of the names of those that must be in it
    batch: Batch | None = None  # that the learner's pass over tokens is lowered for
    sampled: Sampled | None = None  # of a sampler's program that takes tokens in
    layer: int | None = None  # of a sampler's program: elements of a layer's cache on a device


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program's figures according to the compiler, per device."""

    seconds: float  # to compile
    peak: int  # bytes: arguments, results and temporaries at the fullest moment
    arguments: int  # bytes
    results: int  # bytes, those in donated arguments included
    temporaries: int  # bytes
    flops: float  # of one turn of each loop: XLA does not multiply by turns
    traffic: float  # bytes read and written in memory, of one turn of each loop
    kernels: Mapping[str, int]  # Pallas kernels by name, times called in the program's text
    collectives: Mapping[str, int]  # by kind, times called in the program's text
    text: str = dataclasses.field(repr=False)  # of the optimized HLO module


class OutOfMemory(UserError):
    """Says that a program needs more memory than a device has."""


def topology_devices(name: str) -> Sequence[jax.Device]:
    """Devices of a topology, to compile for: "v5e:2x4", "v5p:2x2x2", "tpu7x:2x2x1", "h100:8".

    Raises UserError without libtpu, or jax's CUDA plugin, or for a topology that it doesn't know.
    """
    topology = Topology.parse(name)
    return cuda_devices(topology) if topology.chip.platform == GPU else _tpu_devices(topology)


def _tpu_devices(topology: Topology) -> Sequence[jax.Device]:
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("--topology: libtpu is not installed (pip install 'rljax[tpu]')")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no TPU is taken, so others may compile too
    for variable, value in NO_MACHINE.items():
        os.environ.setdefault(variable, value)
    from jax.experimental import topologies

    chip = topology.chip.name
    config: dict[str, Any] = {"chip_config_name": CHIP_CONFIGS[chip]} if chip in CHIP_CONFIGS else {}
    if topology.devices == topology.chip.devices:  # one chip; libtpu expects hosts of four
        config["chips_per_host_bounds"] = [1, 1, 1]
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology.name, **config).devices
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).splitlines()[0].split())
        raise UserError(f"--topology={topology.name}: {reason} (as in v5e:2x4, v5p:2x2x2, v6e:2x4, tpu7x:2x2x1)") from error


def learner_targets(
    config: Config, pool: Pool, model_dir: Path, devices: Sequence[jax.Device], batch: Batch | None = None
) -> Iterator[Target]:
    """Lowers the learner's programs for a micro-batch: score, update, and accumulate and apply in
    its place where a minibatch is several micro-batches.

    Args:
      batch: None for a full one, every token of which is trained on.

    Raises UserError for a model or a setting that these devices can't do.
    """
    mesh = pool_mesh(pool, devices=devices)
    policy = Policy(config, mesh, model_dir, described=True)
    functions, optimizer = (
        Functions(config, policy),
        Optimizer(config.actor.optimizer, config.total_train_steps or 1, "actor", rounding=policy.rounding),
    )
    rows, length = config.actor.mb_spec.rows_per_mb, config.actor.mb_spec.max_tokens_per_row
    interpolated = Objective.from_config(config).proximal == "interpolated"
    batch = batch or full_batch(rows * row_shards(mesh), length, interpolated=interpolated)
    part = micro_batches(batch, batch.loss_mask, mesh, rows, policy.attention, place=describe).parts[0]
    state = optimizer.describe(policy.trained, replicated(mesh))
    kernels = KERNELS.get(policy.attention.name, ())
    abstract = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)  # splash works out its mask on a device at hand
    with abstract, lowered_for(mesh.devices.flat[0]):
        score = policy.program(functions.logp).lower(policy.trained, policy.frozen, part)
        yield Target("score", policy.attention.name, score, kernels, batch)
        step = GradientStep(functions.policy_loss, optimizer, policy.trained, state, mesh)
        for name, lowered in step.lower(policy.trained, state, policy.frozen, part).items():
            attends = name != "apply"
            yield Target(name, policy.attention.name, lowered, kernels if attends else (), batch if attends else None)


def sampler_targets(config: Config, pool: Pool, model_dir: Path, devices: Sequence[jax.Device]) -> Iterator[Target]:
    """Lowers the sampler's programs: decode, copy, a prefill per shape.

    Raises UserError for a model or a setting that these devices can't do.
    """
    programs = Programs(config, model_dir, pool_mesh(pool, sampling=True, devices=devices), described=True)
    attention = programs.attention.name
    layer = max(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(programs.held[1]))
    for name, lowered in programs.lower().items():
        sampled = _sampled(programs, name)
        kernels = () if sampled is None else KERNELS.get(attention, ())
        yield Target(name, attention, lowered, kernels, sampled=sampled, layer=layer)


def _sampled(programs: Programs, name: str) -> Sampled | None:
    """Tokens that the program of that name takes in; None if it takes none."""
    match name.split():
        case ["decode", *_]:
            rows, new, cached = programs.slots // programs.shards, 1, programs.context - 1
        case ["prefill", shape]:
            rows, new, cached = *map(int, shape.split("x")), 0
        case _:
            return None
    weights, cache = (sum(map(shard_bytes, jax.tree.leaves(tree))) for tree in programs.held)
    return Sampled(rows, new, cached, weights, cache, programs.pages * programs.page_size)


def compile_target(target: Target, options: Mapping[str, Any] | None = None) -> Compiled:
    """Compiles a program, perhaps with options such as QUICK.

    Raises:
      OutOfMemory: the program needs more memory than a device has.
      UserError: it lacks a kernel.
    """
    start = time.perf_counter()
    try:
        compiled = target.lowered.compile(compiler_options=None if options is None else dict(options))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = " ".join(str(error).split())[:400]
        raise OutOfMemory(f"{target.name}: does not fit a device (fewer rows or slots, or more shards): {reason}") from error
    seconds = time.perf_counter() - start
    text, memory, cost = compiled.as_text() or "", compiled.memory_analysis(), compiled.cost_analysis() or {}
    assert memory is not None  # libtpu has it
    kernels = hlo.kernels(text)
    if missing := [kernel for kernel in target.kernels if not any(name.startswith(kernel) for name in kernels)]:
        raise UserError(f"{target.name}: compiled without {', '.join(missing)}, the kernel of attention {target.attention}")
    return Compiled(
        seconds=seconds,
        peak=memory.peak_memory_in_bytes,
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        flops=cost.get("flops", 0.0),
        traffic=cost.get("bytes accessed", 0.0),
        kernels=kernels,
        collectives=hlo.collectives(text),
        text=text,
    )
