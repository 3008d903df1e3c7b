"""The mesh of a pool's ranks, and the part of each parameter that a rank has.

    rank = ((data * f + fsdp) * c + context) * t + tensor

Parameters are sharded over fsdp and context together ("shard"), and over the tensor axis if tensor
parallelism splits them; they are replicated over data.
"""

from __future__ import annotations

import dataclasses
import functools
import logging

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from rljax.backends.torch.context_parallel import Context
from rljax.config.allocation import Pool

# With both f and t it warns, once per kind of parameter, that a gather takes two collectives.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

SUM, MIN, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX


@dataclasses.dataclass(frozen=True, eq=False)
class RankMesh:
    """The mesh of a pool's ranks, seen from this rank.

    torch.distributed is initialized, and its world is the pool.
    """

    pool: Pool
    device: torch.device
    device_mesh: DeviceMesh  # axes: data, shard, tensor
    context: Context

    @classmethod
    def of(cls, pool: Pool, device: torch.device) -> RankMesh:
        device_mesh = _mesh(device.type, pool.data, pool.fsdp * pool.context, pool.tensor)
        return cls(pool, device, device_mesh, _context(pool))

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def data_shard(self) -> tuple[int, int]:
        """This rank's part of the rows, and the number of parts: (part, parts)."""
        data, shard, _ = self.device_mesh.get_coordinate() or (0, 0, 0)
        return data * self.pool.fsdp + shard // self.pool.context, self.pool.data * self.pool.fsdp

    @property
    def is_primary(self) -> bool:
        """True if this rank's results count; all ranks of a tensor-parallel group have the same."""
        return self.device_mesh.get_local_rank("tensor") == 0

    @property
    def parameter_mesh(self) -> DeviceMesh:
        """The mesh that parameters are sharded over (and, with data > 1, replicated)."""
        return self.device_mesh["data", "shard"] if self.pool.data > 1 else self.device_mesh["shard"]

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        return self.device_mesh["tensor"] if self.pool.tensor > 1 else None

    def set_device(self) -> None:
        """Makes this rank's GPU the current one of the calling thread.

        The current GPU belongs to a thread, and any thread may call the learner.
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def reduce(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType = SUM) -> torch.Tensor:
        """Reduces a tensor over all ranks, in place."""
        if self.pool.size > 1:
            dist.all_reduce(x, op)
        return x

    def replicas(self, parameter: DTensor) -> int:
        """Returns how many ranks have the same shard of a parameter."""
        apart = 1
        for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
            apart *= 1 if placement.is_replicate() else size
        return self.pool.size // apart


@functools.cache
def _mesh(device: str, data: int, shard: int, tensor: int) -> DeviceMesh:
    return init_device_mesh(device, (data, shard, tensor), mesh_dim_names=("data", "shard", "tensor"))


@functools.cache
def _context(pool: Pool) -> Context:
    if pool.context == 1:
        return Context()
    step = pool.tensor
    for first in range(0, pool.size, pool.context * step):
        for lane in range(step):
            ranks = list(range(first + lane, first + lane + pool.context * step, step))
            group = dist.new_group(ranks)  # made by all ranks, used by its members
            if dist.get_rank() in ranks:
                own = Context(ranks.index(dist.get_rank()), pool.context, group)
    return own


def forget() -> None:
    """Forgets the meshes that were made, whose process groups are destroyed."""
    _mesh.cache_clear()
    _context.cache_clear()


def local_slices(parameter: DTensor) -> tuple[slice, ...]:
    """Returns the slices of the whole parameter that this rank has.

    Parts are equal, except that the last ones may be shorter or empty. The tensor axis splits
    first; each of its parts is split over the shard axis.
    """
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    parts = [(0, length) for length in parameter.shape]
    for index, size, placement in reversed(
        list(zip(coordinate, parameter.device_mesh.shape, parameter.placements, strict=True))
    ):
        if placement.is_replicate():
            continue
        dim: int = placement.dim  # type: ignore[attr-defined]
        start, length = parts[dim]
        share = -(-length // size)
        begin = min(index * share, length)
        parts[dim] = (start + begin, min(share, length - begin))
    return tuple(slice(start, start + length) for start, length in parts)


def local(parameter: DTensor) -> torch.Tensor:
    """Returns this rank's shard, sharing storage; no gradient flows through it."""
    with torch.no_grad():  # else to_local, or a detach before it, makes objects that take a hundred times as long
        shard: torch.Tensor = parameter.to_local().detach()
    return shard


def like(parameter: DTensor, shard: torch.Tensor) -> DTensor:
    """Makes a DTensor of a shard, placed as the parameter is."""
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
