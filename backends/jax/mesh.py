"""The device mesh of a pool, and how the rows of a batch lie on it."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rljax.allocation import Pool
from rljax.errors import UserError

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")  # both axes take rows of the batch; fsdp shards the parameters as well


def make_mesh(pool: Pool) -> Mesh:
    """The mesh (data, fsdp, tensor) of the pool's devices, counted from `pool.first_device`.

    Example: `jax:f2t2` after `jax:d2` is devices 2 to 5 as a mesh of shape (1, 2, 2).
    Raises UserError when the machine has too few devices.
    """
    devices = jax.devices()
    last = pool.first_device + pool.size
    if last > len(devices):
        raise UserError(
            f"allocation_mode: {pool.engine} needs devices {pool.first_device} to {last - 1}, but there are {len(devices)} "
            f"({devices[0].platform}; on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count={last} makes them)"
        )
    grid = np.array(devices[pool.first_device : last]).reshape(pool.data, pool.fsdp, pool.tensor)
    return Mesh(grid, AXES)


def row_shards(mesh: Mesh) -> int:
    """Shards that the rows of a batch are split over."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of a [R, ...] array of the batch."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
