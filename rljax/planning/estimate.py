"""Plan of a config on a topology: memory of each group of devices, and time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol

from rljax.chips import Topology
from rljax.config.allocation import Abilities, Allocation, Pool, parse
from rljax.config.schema import Config, EngineConfig
from rljax.errors import UserError
from rljax.hf.spec import ModelSpec
from rljax.planning.counted import counted
from rljax.planning.footprint import Footprint, in_turn, together
from rljax.planning.load import Load
from rljax.planning.planner import Job, LearnerPlan, Planner, SamplerPlan
from rljax.planning.rates import Rates, rates_of


class Plannable(Abilities, Protocol):
    """The attributes of `rljax.engine.Plugin` that planning asks for."""

    config_class: type[EngineConfig] | None

    def check_settings(self, config: Config, allocation: Allocation) -> None: ...

    def context_length(self, config: Config) -> int | None: ...

    def on_host(self, config: Config) -> bool: ...

    def planner(self) -> Planner | None: ...


SAMPLER, LEARNER = "sampler", "learner"  # names of groups
Find = Callable[[str], Plannable]  # rljax.engine.find_plugin


@dataclasses.dataclass(frozen=True)
class Group:
    """Devices that hold the same things, and the memory of one of them."""

    name: str  # "sampler", "learner", "sampler and learner"
    devices: int
    footprint: Footprint
    usable: float  # bytes of a device
    in_turn: bool = False  # sampler and learner, of which the sampler lends its memory
    problem: str = ""  # why the sampler would not start, whatever memory is left; "" if it would

    @property
    def margin(self) -> float:
        """Bytes left at the fullest moment; negative if it does not fit."""
        return self.usable - self.footprint.peak

    @property
    def fits(self) -> bool:
        return self.margin >= 0 and not self.problem


@dataclasses.dataclass(frozen=True)
class Request:
    """Everything that a plan is made of.

    Example: plan(Request(config, shape_of("qwen3-8b"), Topology.parse("h100:8"), find_plugin)).fits
    """

    config: Config
    spec: ModelSpec
    topology: Topology
    find: Find
    prompt: int | None = None  # tokens of an average prompt; None: assumed
    completion: int | None = None  # tokens of an average completion; None: assumed
    teacher: ModelSpec | None = None  # of actor.distill.teacher

    @functools.cached_property
    def allocation(self) -> Allocation:
        """Pools on the topology's devices: without a sampler that takes none of them."""
        found = parse(self.config.allocation_mode, self.find)
        if not self.elsewhere:
            return found
        return Allocation(None, found.learner and dataclasses.replace(found.learner, first_device=0))

    @property
    def elsewhere(self) -> str:
        """Place of a sampler that takes none of the devices, with its key; "" if it takes some."""
        sampler = parse(self.config.allocation_mode, self.find).sampler
        if self.config.rollout.addr:
            return "at rollout.addr"
        if sampler is not None and self.find(sampler.engine).on_host(self.config):
            return f"on the host's CPU ({sampler.engine}.device)"
        return ""

    @functools.cached_property
    def load(self) -> Load:
        sampler = self.allocation.sampler
        context = None if sampler is None else self.find(sampler.engine).context_length(self.config)
        return Load.of(self.config, self.prompt, self.completion, context)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory and time of a config on a topology."""

    request: Request
    allocation: Allocation
    learner: LearnerPlan | None
    sampler: SamplerPlan | None
    groups: tuple[Group, ...]
    rates: Rates | None  # None on devices whose speed is not known

    @property
    def fits(self) -> bool:
        return all(group.fits for group in self.groups)


def plan(request: Request) -> Plan:
    """Estimates memory and time.

    Raises UserError for an allocation that can't be read, that needs more devices than there are,
    or whose engines can't be planned for, can't split the model so, or refuse the config.
    """
    config, topology, allocation = request.config, request.topology, request.allocation
    if allocation.devices > topology.devices:
        raise UserError(
            f"allocation_mode: {allocation} needs {counted(allocation.devices, 'device')}, and {topology.name} has"
            f" {topology.devices}"
        )
    for engine in allocation.engines:
        request.find(engine).check_settings(config, allocation)
    sampler_pool, learner_pool = allocation.sampler, allocation.learner
    learner = None if learner_pool is None else _planner(request, learner_pool).learner(_job(request, learner_pool))
    shared = sampler_pool is not None and learner_pool is not None and sampler_pool.first_device == learner_pool.first_device
    beside = learner.footprint.held if learner is not None and shared else 0.0
    sampler = None if sampler_pool is None else _planner(request, sampler_pool).sampler(_job(request, sampler_pool, beside))
    groups = _groups(request, allocation, learner, sampler, shared)
    timed = topology.chip.bandwidth is not None
    rates = rates_of(config, request.spec, topology, allocation, request.load, learner, sampler) if timed else None
    return Plan(request, allocation, learner, sampler, groups, rates)


def _planner(request: Request, pool: Pool) -> Planner:
    planner = request.find(pool.engine).planner()
    if planner is None:
        raise UserError(f"allocation_mode: the engine {pool.engine} can't be planned for (its plugin has no planner)")
    return planner


def _job(request: Request, pool: Pool, beside: float = 0.0) -> Job:
    chip = request.topology.chip
    return Job(request.config, request.spec, pool, chip, request.load, beside, request.teacher)


def _groups(
    request: Request, allocation: Allocation, learner: LearnerPlan | None, sampler: SamplerPlan | None, shared: bool
) -> tuple[Group, ...]:
    sides, problem = [], "" if sampler is None else sampler.problem
    for name, pool, made in ((SAMPLER, allocation.sampler, sampler), (LEARNER, allocation.learner, learner)):
        if pool is not None and made is not None:
            usable = _planner(request, pool).usable(request.topology.chip)
            sides.append(Group(name, pool.size, made.footprint, usable, problem=problem if made is sampler else ""))
    if not shared:
        return tuple(sides)
    one, other = sides
    assert allocation.sampler is not None
    lends = _planner(request, allocation.sampler).lends(request.config)
    combine = in_turn if lends else together
    footprint = combine(one.footprint, other.footprint)
    return (Group(f"{SAMPLER} and {LEARNER}", one.devices, footprint, min(one.usable, other.usable), lends, problem),)
