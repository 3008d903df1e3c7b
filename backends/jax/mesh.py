"""The device mesh of a pool, and how the rows of a batch lie on it."""

from __future__ import annotations

import collections
import contextlib
import threading
from contextlib import AbstractContextManager

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rljax.allocation import Pool
from rljax.backends.jax.sharding import BATCH, make_mesh
from rljax.errors import UserError

# By the first device of a mesh: pools share all of their devices or none (rljax/allocation.py).
_LOCKS: collections.defaultdict[jax.Device, threading.RLock] = collections.defaultdict(threading.RLock)


def dispatching(mesh: Mesh) -> AbstractContextManager[object]:
    """Held around every dispatch of a program over several devices; not around the wait for what it computes.

    A collective waits on each device until all others have come to it. If two threads, a sampler's and a learner's, each
    dispatch a program on the same devices at once, one device may get the first program first and another the second, and both
    wait for ever. One dispatch at a time gives every device the same order.

    Example:
        with dispatching(mesh):
            out = program(params, batch)
        numpy.asarray(out)
    """
    return contextlib.nullcontext() if mesh.size == 1 else _LOCKS[mesh.devices.flat[0]]


def pool_mesh(pool: Pool) -> Mesh:
    """The mesh (data, fsdp, tensor) of the pool's devices, counted from `pool.first_device`.

    Example: `jax:f2t2` after `jax:d2` is devices 2 to 5 as a mesh of shape (1, 2, 2).
    Raises UserError when the machine has too few devices.
    """
    devices = jax.devices()
    last = pool.first_device + pool.size
    if last > len(devices):
        raise UserError(
            f"allocation_mode: {pool} needs devices {pool.first_device} to {last - 1}, but there are {len(devices)} "
            f"({devices[0].platform}; on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count={last} makes them)"
        )
    return make_mesh(devices[pool.first_device : last], data=pool.data, fsdp=pool.fsdp, tensor=pool.tensor)


def row_shards(mesh: Mesh) -> int:
    """Shards that the rows of a batch are split over: the fsdp axis takes rows as well as parameters."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of a [R, ...] array of the batch."""
    return NamedSharding(mesh, PartitionSpec(BATCH))
