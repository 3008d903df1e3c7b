"""The processes of a learner: torch.distributed as torchrun sets it up, and this rank's device."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from rljax.backends.torch.mesh import RankMesh
from rljax.config.allocation import Pool
from rljax.errors import UserError

TIMEOUT = datetime.timedelta(minutes=10)  # for a collective; the first ones wait while other ranks compile kernels
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join(pool: Pool, timeout: datetime.timedelta = TIMEOUT) -> RankMesh:
    """Joins the processes of the pool and returns their mesh. Blocks until all of them have joined.

    A single process needs no environment. Several find each other by RANK, WORLD_SIZE, MASTER_ADDR
    and MASTER_PORT, which torchrun sets, unless torch.distributed is initialized already.

    Raises UserError if there are not as many processes as the pool needs, or if they share GPUs.
    """
    device = device_of(pool)
    if not dist.is_initialized():
        _initialize(pool, device, timeout)
    if dist.get_world_size() != pool.size:
        raise UserError(f"allocation_mode: {pool} needs {pool.size} processes, and there are {dist.get_world_size()}")
    return RankMesh.of(pool, device)


def _initialize(pool: Pool, device: torch.device, timeout: datetime.timedelta) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        # The value SGLang sets: an NCCL group hangs if its processes differ in this. NCCL reads it at its first use.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    if pool.size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise UserError(
            f"allocation_mode: {pool} needs {pool.size} processes; start them with torchrun ({missing[0]} is not set)"
        )
    dist.init_process_group(backend, timeout=timeout)


def device_of(pool: Pool) -> torch.device:
    """Returns this rank's GPU, or the CPU if there is no GPU.

    Ranks are counted from the pool's first device, over hosts that have equally many.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank, here = int(os.environ.get("RANK", "0")), torch.cuda.device_count()
    together = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if 1 < here < together:
        raise UserError(f"allocation_mode: {pool} has {together} processes on a host of {here} GPUs")
    device = torch.device("cuda", (pool.first_device + rank) % here)
    torch.cuda.set_device(device)
    return device


def gather(payload: bytes) -> Sequence[bytes]:
    """Returns the payloads of all ranks in rank order, on every rank. A collective, over the CPU."""
    found: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(found, payload)
    return found
