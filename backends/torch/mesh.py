"""How the ranks of a pool are arranged, and which part of a parameter each of them holds.

    rank = ((data * f + fsdp) * c + context) * t + tensor

Parameters are split over fsdp and context together ("shard"), and by the tensor axis where a plan
says so; data replicates.
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

# Under both f and t it warns, once a kind of parameter, that a gather is two collectives.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

SUM, MIN, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """A pool's ranks, seen from this one. torch.distributed is initialized, and its world is the
    pool.
    """

    pool: Pool
    device: torch.device
    mesh: DeviceMesh  # data, shard, tensor
    context: Context

    @classmethod
    def of(cls, pool: Pool, device: torch.device) -> Layout:
        mesh = _mesh(device.type, pool.data, pool.fsdp * pool.context, pool.tensor)
        return cls(pool, device, mesh, _context(pool))

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def dealt(self) -> tuple[int, int]:
        """Rows are dealt to so many parts, and this rank works on which of them: (part, parts)."""
        data, shard, _ = self.mesh.get_coordinate() or (0, 0, 0)
        return data * self.pool.fsdp + shard // self.pool.context, self.pool.data * self.pool.fsdp

    @property
    def speaks(self) -> bool:
        """Whether this rank's results count: ranks of one tensor group all have the same."""
        return self.mesh.get_local_rank("tensor") == 0

    @property
    def parameters(self) -> DeviceMesh:
        """The mesh that parameters are sharded over (and, with data > 1, replicated)."""
        return self.mesh["data", "shard"] if self.pool.data > 1 else self.mesh["shard"]

    @property
    def tensor(self) -> DeviceMesh | None:
        return self.mesh["tensor"] if self.pool.tensor > 1 else None

    def enter(self) -> None:
        """A thread has a GPU of its own that it is on, and the learner's methods are called from
        any thread.
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def reduce(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType = SUM) -> torch.Tensor:
        """Over all ranks, in place."""
        if self.pool.size > 1:
            dist.all_reduce(x, op)
        return x

    def copies(self, parameter: DTensor) -> int:
        """Ranks that hold the same shard of a parameter."""
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
            group = dist.new_group(ranks)  # made by all ranks, used by its own
            if dist.get_rank() in ranks:
                own = Context(ranks.index(dist.get_rank()), pool.context, group)
    return own


def local_slices(parameter: DTensor) -> tuple[slice, ...]:
    """Which part of the whole parameter this rank holds. Parts are equal but for the last, which
    may be less or nothing.

    The tensor axis splits first; what it leaves is split over the shard axis.
    """
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    parts = [(0, extent) for extent in parameter.shape]
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
    """This rank's shard, sharing storage; no gradient flows through it."""
    shard: torch.Tensor = parameter.detach().to_local()  # type: ignore[attr-defined]
    return shard


def like(parameter: DTensor, shard: torch.Tensor) -> DTensor:
    """A shard as a DTensor, placed as the parameter is."""
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
