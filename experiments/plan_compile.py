"""Programs of a plan, compiled for a TPU topology: their peaks beside the estimate."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljax.chips import GIB, TPU
from rljax.config.allocation import Pool
from rljax.engine import find_plugin
from rljax.errors import UserError
from rljax.hf.companion_files import write_companions
from rljax.planning.estimate import Plan
from rljax.planning.footprint import Footprint

if TYPE_CHECKING:
    import jax

COMPARED = {"update": "learner", "decode": "sampler"}  # programs that an estimate is of, and their side
LARGEST = 3  # components named where a program does not fit


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program, or the reason why it does not fit."""

    side: str
    name: str
    attention: str
    usable: float  # bytes of a device
    estimate: float | None  # bytes; None for programs that the plan has no estimate of
    peak: int | None = None  # bytes according to the compiler; None if the program does not fit
    seconds: float = 0.0  # to compile
    kernels: Mapping[str, int] = dataclasses.field(default_factory=dict)  # by name, times called in its text
    collectives: Mapping[str, int] = dataclasses.field(default_factory=dict)  # likewise
    problem: str = ""  # why it does not fit, and the components to shrink

    @property
    def fits(self) -> bool:
        return self.peak is not None and self.peak <= self.usable

    def __str__(self) -> str:
        if self.peak is None:
            return f"  {self.side} {self.name}: does not fit: {self.problem}"
        beside = "" if self.estimate is None else f", estimated {self.estimate / GIB:.2f}"
        found = [f"{count} {name}" for name, count in (*self.kernels.items(), *self.collectives.items())]
        parts = ", ".join(found) or "no kernels or collectives"
        return (
            f"  {self.side} {self.name}: {self.peak / GIB:.2f} GiB of {self.usable / GIB:.2f}{beside};"
            f" attention {self.attention}: {parts}; {self.seconds:.0f} s to compile"
        )

    def json(self) -> dict[str, Any]:
        """Returns the program as plain values, and whether it fits."""
        return dataclasses.asdict(self) | {"fits": self.fits}


def compile_plan(plan: Plan) -> Iterator[Program]:
    """Compiles the programs of the JAX pools of a plan, one by one.

    Raises UserError for a topology that is none of TPUs, a plan without a JAX pool, or a program
    that lacks the kernel of its attention.
    """
    topology = plan.request.topology
    if topology.chip.platform != TPU:
        raise UserError(f"--compile: {topology.name} has no TPUs, and programs are compiled for those alone")
    pools = [(side, pool) for side, pool in _pools(plan) if pool.engine == "jax"]
    if not pools:
        raise UserError(f"--compile: {plan.allocation} has no pool of jax, whose programs are what is compiled")
    import jax

    jax.config.update("jax_platforms", "cpu")  # libtpu compiles only; without a TPU JAX would look for one
    jax.config.update("jax_enable_compilation_cache", False)  # what is compiled for a TPU can't be read back without one
    from rljax.engines.jax.topology import topology_devices

    devices = topology_devices(topology.name)
    with tempfile.TemporaryDirectory() as directory:
        write_companions(Path(directory), plan.request.spec, plan.request.config.actor.dtype, None)
        for side, pool in pools:
            yield from _compile_side(plan, side, pool, Path(directory), devices)


def _pools(plan: Plan) -> Iterator[tuple[str, Pool]]:
    for side, pool in (("learner", plan.allocation.learner), ("sampler", plan.allocation.sampler)):
        if pool is not None:
            yield side, pool


def _compile_side(plan: Plan, side: str, pool: Pool, directory: Path, devices: Sequence[jax.Device]) -> Iterator[Program]:
    from rljax.engines.jax.topology import OutOfMemory, compile_target, learner_targets, sampler_targets

    planner, made = find_plugin(pool.engine).planner(), plan.learner if side == "learner" else plan.sampler
    assert planner is not None and made is not None
    usable = planner.usable(plan.request.topology.chip)
    targets = {"learner": learner_targets, "sampler": sampler_targets}[side]
    for target in targets(plan.request.config, pool, directory, devices):
        estimate = _estimate_of(side, target.name, made.footprint)
        program = Program(side, target.name, target.attention, usable, estimate)
        try:
            compiled = compile_target(target)
        except OutOfMemory as error:
            yield dataclasses.replace(program, problem=f"{error}; {_to_shrink(made.footprint)}")
            continue
        yield dataclasses.replace(
            program,
            peak=compiled.peak,
            seconds=compiled.seconds,
            kernels=dict(compiled.kernels),
            collectives=dict(compiled.collectives),
        )


def _estimate_of(side: str, name: str, footprint: Footprint) -> float | None:
    """Returns the estimated peak of a program, or None."""
    if COMPARED.get(name) != side:
        return None
    moments = ("decoding",) if side == "sampler" else ("loss", "backward pass")
    return footprint.held + max(sum(footprint.moments[moment].values()) for moment in moments)


def _to_shrink(footprint: Footprint) -> str:
    """Names the largest components of the estimate."""
    parts = list(footprint.components.items())[:LARGEST]
    return "largest by the estimate: " + ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in parts)
