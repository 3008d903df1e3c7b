"""Time of a step by roofline, and which side waits."""

from __future__ import annotations

import dataclasses
import math

from rljax.chips import Topology
from rljax.config.allocation import Allocation
from rljax.config.schema import Config
from rljax.hf.spec import ModelSpec
from rljax.hf.tensors import parameter_count
from rljax.objective.spec import Objective
from rljax.planning.load import Load
from rljax.planning.planner import LearnerPlan, SamplerPlan

FORWARD = 1 / 3  # of the FLOPs of an update
PREFILL = 0.4  # share of the chip's FLOP/s in prefill


@dataclasses.dataclass(frozen=True)
class Rates:
    """Seconds of a step, and what follows from them. A side that is not planned for takes none."""

    learner_seconds: float
    sampler_seconds: float
    learner_tokens: float  # per second, prompts included
    sampler_tokens: float  # per second, sampled
    decode_seconds: float  # of a step of all requests
    requests: int  # decoded at once, on all replicas
    step_seconds: float
    waits: str  # the side that is idle in part of a step; "" if they take turns, or one is not planned for
    lag: int  # max_head_offpolicyness with which a longest completion holds up nobody
    device_hours: float | None  # of the run; None if total_train_steps is not set


def rates_of(
    config: Config,
    spec: ModelSpec,
    topology: Topology,
    allocation: Allocation,
    load: Load,
    learner: LearnerPlan | None,
    sampler: SamplerPlan | None,
) -> Rates:
    """Estimates the time of a step of both sides, on a topology whose chip's speed is known."""
    learns = 0.0
    if learner is not None and allocation.learner is not None:
        work = load.update_flops(config, spec) * _passes(config, learner)
        learns = work / (allocation.learner.size * topology.chip.flops * learner.efficiency)
    samples, decode, requests = 0.0, 0.0, 0
    if sampler is not None and allocation.sampler is not None:
        requests = _requests(config, load, sampler)
        decode = _decode_seconds(spec, topology, allocation.sampler.tensor, load, sampler, requests)
        prompts = 2.0 * parameter_count(spec) * config.batch_size * load.prompt
        prefill = prompts / (allocation.sampler.size * topology.chip.flops * PREFILL)
        samples = load.episodes(config) * load.completion * decode / (requests * sampler.replicas) + prefill
    shared = _shared(allocation)
    step = learns + samples if shared or config.rollout.max_head_offpolicyness == 0 else max(learns, samples)
    both = bool(learns and samples) and not shared
    replicas = 1 if sampler is None else sampler.replicas
    return Rates(
        learner_seconds=learns,
        sampler_seconds=samples,
        learner_tokens=load.episodes(config) * load.tokens / learns if learns else 0.0,
        sampler_tokens=load.episodes(config) * load.completion / samples if samples else 0.0,
        decode_seconds=decode,
        requests=requests * replicas,
        step_seconds=step,
        waits="" if not both else "learner" if samples > learns else "sampler",
        lag=math.ceil(config.gconfig.max_new_tokens * decode / step) if step else 0,
        device_hours=None if config.total_train_steps is None else config.total_train_steps * step * allocation.devices / 3600,
    )


def _shared(allocation: Allocation) -> bool:
    sampler, learner = allocation.sampler, allocation.learner
    return sampler is not None and learner is not None and sampler.first_device == learner.first_device


def _passes(config: Config, learner: LearnerPlan) -> float:
    """Returns the FLOPs of a step's updates and scoring in units of the updates'."""
    objective, actor = Objective.from_config(config), config.actor
    scored = objective.needs_score(actor.ppo_n_minibatches) + (actor.kl_ctl > 0) + bool(actor.distill.teacher)
    critic = 1 + FORWARD if actor.adv_estimator == "gae" else 0.0
    return 1 + critic + FORWARD * (scored + (learner.remat == "full"))


def _requests(config: Config, load: Load, sampler: SamplerPlan) -> int:
    """Returns how many requests a replica decodes at once."""
    asked = math.ceil(config.max_in_flight * config.gconfig.n_samples / sampler.replicas)
    room = int(sampler.room / (load.prompt + load.completion / 2))
    return max(min(asked, sampler.requests, room), 1)


def _decode_seconds(spec: ModelSpec, topology: Topology, tensor: int, load: Load, sampler: SamplerPlan, requests: int) -> float:
    """Returns the time of a decode step: weights, keys and values once, or the FLOPs."""
    traffic = sampler.weights + requests * sampler.token * (load.prompt + load.completion / 2)
    flops = 2.0 * parameter_count(spec) * requests / tensor
    return max(traffic / topology.bandwidth, flops / topology.chip.flops) / sampler.efficiency
