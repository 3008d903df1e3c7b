"""The device mesh of a pool, and how the rows of a batch lie on it."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rljax.backends.jax.sharding import BATCH, make_mesh
from rljax.config.allocation import Pool
from rljax.errors import UserError

# By the first device of a mesh: pools share all of their devices or none (rljax/config/allocation.py).
_LOCKS: collections.defaultdict[jax.Device, threading.RLock] = collections.defaultdict(threading.RLock)


def dispatching(mesh: Mesh) -> AbstractContextManager[object]:
    """Held around every dispatch of a program over several devices; not around the wait for what
    it computes.

    A collective waits on each device until all others have come to it. If two threads, a sampler's
    and a learner's, each dispatch a program on the same devices at once, one device may get the
    first program first and another the second, and both wait for ever. One dispatch at a time
    gives every device the same order.

    Example:
        with dispatching(mesh):
            out = program(params, batch)
        numpy.asarray(out)
    """
    return contextlib.nullcontext() if mesh.size == 1 else _LOCKS[mesh.devices.flat[0]]


def pool_mesh(pool: Pool, *, sampling: bool = False, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh (data, fsdp, tensor) of the pool's devices, counted from `pool.first_device`,
    process 0's first.

    Example: `jax:f2t2` after `jax:d2` is devices 2 to 5 as a mesh of shape (1, 2, 2).

    Args:
      sampling: by the controller alone; else by every process, each with a device at least.
      devices: None for those of this run; else of a topology, which belong to no process here.

    Raises:
      UserError: too few devices, or devices of processes that can't be used so.
    """
    attached = devices is None
    devices = sorted(jax.devices() if devices is None else devices, key=lambda device: (device.process_index, device.id))
    last = pool.first_device + pool.size
    if last > len(devices):
        raise UserError(
            f"allocation_mode: {pool} needs devices {pool.first_device} to {last - 1}, but there are {len(devices)} "
            f"({devices[0].platform}; on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count={last} makes them)"
        )
    chosen = devices[pool.first_device : last]
    if attached:
        _check_processes(pool, {device.process_index for device in chosen}, sampling)
    return make_mesh(chosen, data=pool.data, fsdp=pool.fsdp, tensor=pool.tensor)


def _check_processes(pool: Pool, used: set[int], sampling: bool) -> None:
    here, count = jax.process_index(), jax.process_count()
    if sampling and used != {here}:
        raise UserError(
            f"allocation_mode: {pool} samples on devices of processes {sorted(used)}, and a sampler is of one: give it devices"
            f" of process {here} alone ({len(jax.local_devices())} here), as in jax:d1+jax:f3, or servers (rollout.addr)"
        )
    if not sampling and len(used) < count:
        idle = next(process for process in range(count) if process not in used)
        raise UserError(f"allocation_mode: {pool} leaves process {idle} of {count} without a device to learn on")


def first_device(mesh: Mesh) -> jax.Device:
    """The first device of the mesh in this process; the first of all where none is, as in a
    topology.
    """
    here = jax.process_index()
    return next((d for d in mesh.devices.flat if d.process_index == here), mesh.devices.flat[0])


def row_shards(mesh: Mesh) -> int:
    """Shards that the rows of a batch are split over: the fsdp axis takes rows as well as
    parameters.
    """
    return mesh.shape["data"] * mesh.shape["fsdp"]


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of a [R, ...] array of the batch."""
    return NamedSharding(mesh, PartitionSpec(BATCH))
