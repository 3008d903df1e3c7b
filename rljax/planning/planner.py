"""Interface of an engine that can be planned for; `Plugin.planner` returns it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from rljax.chips import Chip, Topology
from rljax.config.allocation import Pool
from rljax.config.schema import Config
from rljax.hf.spec import ModelSpec
from rljax.planning.footprint import Footprint
from rljax.planning.load import Load
from rljax.planning.program import Program

Chosen = Callable[[str], bool]


def every(name: str) -> bool:
    """Chooses every program."""
    return True


@dataclasses.dataclass(frozen=True)
class Job:
    """One side of a run, and the devices that it is planned for."""

    config: Config
    spec: ModelSpec
    pool: Pool
    chip: Chip
    load: Load
    beside: float = 0.0  # bytes that the learner holds on the devices of this sampler
    teacher: ModelSpec | None = None  # of actor.distill.teacher


@dataclasses.dataclass(frozen=True)
class LearnerPlan:
    """Memory and speed of a learner."""

    footprint: Footprint
    remat: str  # `actor.gradient_checkpointing`, with "auto" decided
    efficiency: float  # share of the chip's FLOP/s that updates of this engine were measured to reach
    note: str = ""  # what of the config the learner takes otherwise than it says


@dataclasses.dataclass(frozen=True)
class SamplerPlan:
    """Memory and speed of a sampler."""

    footprint: Footprint
    replicas: int  # groups of devices that have the weights once
    requests: int  # decoded at once by a replica
    room: float  # tokens that the cache of a replica has room for
    weights: float  # bytes per device that a decode step reads
    token: float  # bytes per device of a token's keys and values
    efficiency: float  # share of the chip's bandwidth that decoding by this engine was measured to reach
    problem: str = ""  # why it would not start, whatever memory is left; "" if it would
    needed: float = 0.0  # bytes of a device without which it does not start


class Planner(Protocol):
    """Arithmetic of an engine about itself, which makes nothing and imports no framework."""

    def usable(self, chip: Chip) -> float:
        """Returns the bytes of a device that the engine may use."""
        ...

    def learner(self, job: Job) -> LearnerPlan:
        """Estimates the learner. Raises UserError for a split that it can't do."""
        ...

    def sampler(self, job: Job) -> SamplerPlan:
        """Estimates the sampler. Raises UserError for a split that it can't do."""
        ...

    def lends(self, config: Config) -> bool:
        """Returns whether the sampler lets go of its memory while a learner on its devices works."""
        ...

    def smaller(self, config: Config) -> Mapping[str, object]:
        """Returns keys of the engine's own section and values with which it would need less.

        Those that its `check_settings` refuses are left out by the caller.
        """
        ...

    def fitting(self, config: Config, sampler: SamplerPlan, chip: Chip, spare: float) -> Mapping[str, object]:
        """Returns keys of the engine's own section, and values with which a sampler just starts if
        it would not, and else just fits. Nothing where the engine has no such key.

        Args:
          spare: bytes of a device that the sampler leaves; negative if it takes too many.
        """
        ...

    def require_compiler(self, topology: Topology) -> None:
        """Checks that `programs` has what it needs for a topology; compiles nothing.

        Raises UserError for devices that can't be compiled for, or a package that is not installed.
        """
        ...

    def programs(
        self, side: str, config: Config, pool: Pool, topology: Topology, model_dir: Path, chosen: Chosen = every
    ) -> Iterator[Program]:
        """Compiles the programs of a side for devices that are not there, one by one, or runs its
        step on tensors without data. Needs the engine's framework, but no weights.

        Args:
          side: "learner" or "sampler".
          model_dir: directory with config.json.
          chosen: asked for each program by its name; those that it declines are left out.

        Yields nothing where the engine has no way to do it. Raises UserError for devices that can't
        be compiled for, or a program that lacks the kernel of its attention.
        """
        ...
