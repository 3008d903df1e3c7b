"""Devices of several processes: joining them, and arrays that no process holds the whole of.

Every process runs the same programs on the same global arrays, in the same order; `put` and
`fetch` go between numpy, which is the same in every process, and those arrays. In one process both
are what JAX does anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from rljax.errors import UserError

Result = TypeVar("Result")
Tree = Any  # a pytree of arrays
Place = Callable[[Tree, Sharding], Tree]  # `put` or `describe`

ONCE = "jax.processes: JAX joins a process to others once"
NEW = "start this run in a new process"

_coordinator: str | None = None  # of the processes that `join` joined


def join(coordinator: str, size: int, rank: int, local_device: int | None = None) -> None:
    """Makes the devices of all processes known to each. Before anything else of JAX, and blocks
    until all are there.

    Args:
      coordinator: HOST:PORT that process 0 can listen at.
      local_device: the one GPU that this process takes, where a host has several processes; None:
        all.

    Raises:
      UserError: this process has used JAX before, or joined others, who would wait for it in vain.
    """
    global _coordinator
    if jax.distributed.is_initialized():
        if _coordinator not in (None, coordinator):
            raise UserError(f"{ONCE}, and this one is among others already ({NEW})")
        return
    local = coordinator.startswith("127.")  # all are on this host; JAX by itself would listen on all interfaces
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes=size,
            process_id=rank,
            local_device_ids=None if local_device is None else [local_device],
            coordinator_bind_address=coordinator if local else None,
            cluster_detection_method="deactivate",  # all is known; under Slurm JAX would take one device of this host alone
        )
    except RuntimeError as error:
        if "must be called before" not in str(error):
            raise
        raise UserError(f"{ONCE}, before it uses JAX ({NEW})") from error
    _coordinator = coordinator


def join_found() -> None:
    """Joins processes that JAX finds by itself: on a TPU pod, Slurm, Open MPI, Kubernetes.

    Raises UserError elsewhere.
    """
    if jax.distributed.is_initialized():
        return
    try:
        jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"jax.processes: 0 is for a TPU pod, Slurm, Open MPI or Kubernetes, and none is found here: "
            f"{' '.join(str(error).split())} (start the processes with torchrun, or say how many are wanted on this host)"
        ) from error


def leave() -> None:
    """Blocks until all processes leave. Nothing where there is one."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def shared_number(number: int) -> int:
    """Process 0's, in every process. A collective; number below 2**31."""
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def put(tree: Tree, sharding: Sharding) -> Tree:
    """Arrays that every process has alike, numpy or of one device -> arrays of that sharding.

    Nothing is sent between hosts.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def place(array: Any) -> jax.Array:
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(place, tree)


def describe(tree: Tree, sharding: Sharding) -> Tree:
    """Shapes and dtypes of what `put` would give, for devices that programs are only compiled for."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding), tree)


def fetch(array: jax.Array) -> np.ndarray:
    """The whole array on the host, in every process.

    A collective where processes have parts of it.
    """
    if not (array.is_fully_addressable or array.is_fully_replicated):
        assert isinstance(array.sharding, NamedSharding)
        array = _replicate(array.sharding.mesh)(array)
    return np.asarray(jax.device_get(array))


@functools.cache
def _replicate(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda array: array, out_shardings=NamedSharding(mesh, PartitionSpec()))


def together(action: Callable[[], Result], *, first: bool = False) -> Result | None:
    """Runs an action in every process, or in the first alone (None in the others); if it fails in
    one, raises in all.

    So that no process goes on to a collective that another never comes to.
    """
    if jax.process_count() == 1:
        return action()
    from jax.experimental import multihost_utils

    error: Exception | None = None
    result: Result | None = None
    if not first or jax.process_index() == 0:
        try:
            result = action()
        except (UserError, OSError, ValueError) as caught:
            error = caught
    failed = np.flatnonzero(multihost_utils.process_allgather(np.array(error is not None)))
    if error is not None:
        raise error
    if failed.size:
        raise UserError(f"process {failed[0]} failed, and says why")
    return result
