"""Split of the devices between sampler and learner, where neither waits long for the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from rljax.config.allocation import Allocation, Pool
from rljax.planning.changes import planned
from rljax.planning.estimate import Plan


def balanced(before: Plan, host: int | None = None) -> Plan | None:
    """Returns the plan whose split of all devices of the topology has the shortest step, of those
    splits that a run takes and that fit. None if there is none, or the sides share their devices.

    Each pool keeps its tensor and context parallelism; its copies, or its shards, are as many as
    the devices allow.

    Args:
      host: devices of a host; None: all are of one. Of several hosts each is one side's.
    """
    if before.rates is None or not before.rates.waits:
        return None
    splits = (
        planned(before, "allocation_mode", str(split)) for split in _splits(before, host or before.request.topology.devices)
    )
    found = [split for split in splits if split is not None and split.fits]
    return min(found, key=_seconds, default=None)


def _seconds(plan: Plan) -> float:
    assert plan.rates is not None  # of the same topology as a plan that has them
    return plan.rates.step_seconds


def _splits(before: Plan, host: int) -> Iterator[Allocation]:
    """Yields the plan's own allocation, then all with pools like its own on all devices."""
    sampler, learner, devices = before.allocation.sampler, before.allocation.learner, before.request.topology.devices
    assert sampler is not None and learner is not None  # one waits for the other
    yield before.allocation
    step = host if host < devices else 1
    for count in range(step, devices, step):
        samples = _resized(sampler, count, sharded=sampler.fsdp > 1 and sampler.data == 1)
        learns = _resized(learner, devices - count, sharded=learner.data == 1)
        if samples is not None and learns is not None:
            yield Allocation(samples, dataclasses.replace(learns, first_device=samples.size))


def _resized(pool: Pool, devices: int, *, sharded: bool) -> Pool | None:
    """Returns the pool on so many devices, with more shards or more copies; None if they are no
    whole number of these.
    """
    scaled = "fsdp" if sharded else "data"
    times, rest = divmod(devices * getattr(pool, scaled), pool.size)
    return None if rest or not times else dataclasses.replace(pool, **{scaled: times})
