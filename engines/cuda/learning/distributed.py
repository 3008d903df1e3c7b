"""The processes of a learner: torch.distributed as torchrun sets it up, and this rank's device."""

from __future__ import annotations

import dataclasses
import datetime
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rljax.backends.torch.mesh import RankMesh, forget
from rljax.config.allocation import Pool
from rljax.engine.rank import LAUNCH, LOOPBACK
from rljax.errors import UserError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torchrun's: its agent serves the store
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclasses.dataclass
class _Group:
    """The group that `join` made, and the learners of this process that use it."""

    of: tuple[str, int]  # what identifies the start of its processes, and their number
    learners: int = 0


_group: _Group | None = None


def join(pool: Pool, timeout: float = 1800.0) -> RankMesh:
    """Joins the processes of the pool and returns their mesh. Blocks until all of them have joined.

    A single process needs no environment. Several find each other by RANK, WORLD_SIZE, MASTER_ADDR
    and MASTER_PORT, which torchrun sets, unless torch.distributed is initialized already. On one
    host they listen on loopback alone. A group of an earlier learner of this process, whose other
    processes have ended with it, makes room for a new one.

    Args:
      timeout: seconds for a collective. A rank may wait that long for rank 0, which waits for
        servers in a publish, or for one that compiles kernels.

    Raises UserError if there are not as many processes as the pool needs, or if they share GPUs.
    """
    global _group
    device, this = device_of(pool), (os.environ.get(LAUNCH, ""), pool.size)
    if not dist.is_initialized():
        _group = None
    elif _group is not None and not _group.learners and _group.of != this:
        _end(device)
        _group = None
    if not dist.is_initialized():
        _initialize(pool, device, datetime.timedelta(seconds=timeout))
        _group = _Group(this)
    if _group is not None and _group.of != this:
        there = f"{dist.get_world_size()}, those of another learner here (close it first)"
        raise UserError(f"allocation_mode: {pool} needs {pool.size} processes, and there are {there}")
    if dist.get_world_size() != pool.size:
        raise UserError(f"allocation_mode: {pool} needs {pool.size} processes, and there are {dist.get_world_size()}")
    if _group is not None:
        _group.learners += 1
    return RankMesh.of(pool, device)


def leave() -> None:
    """Says that a learner that has joined is closed.

    The group stays, for the next one of these processes.
    """
    if _group is not None:
        _group.learners -= 1


def _end(device: torch.device) -> None:
    """Ends a group whose other processes are gone: over NCCL, to destroy it would wait for them."""
    forget()
    if device.type == "cuda":
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


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
    if os.environ["MASTER_ADDR"] != LOOPBACK or os.environ.get(AGENT_STORE) == "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    for name in INTERFACES:
        os.environ.setdefault(name, "lo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=_store(rank, world, timeout), rank=rank, world_size=world, timeout=timeout)


def _store(rank: int, world: int, timeout: datetime.timedelta) -> Any:
    """Returns the ranks' store, which rank 0 serves. torch would listen on all interfaces."""
    tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # public, but unknown to mypy
    port, served = int(os.environ["MASTER_PORT"]), {}
    if rank == 0:
        listening = socket.create_server((LOOPBACK, port), backlog=128)
        served = {"is_master": True, "master_listen_fd": listening.detach()}
    return tcp_store(LOOPBACK, port, world, timeout=timeout, multi_tenant=True, **served)


def cpu_group(timeout: float) -> dist.ProcessGroup:
    """Makes a group of all ranks over the CPU, whose calls don't mix with others. A collective.

    Args:
      timeout: seconds for one of its collectives.
    """
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))
    return group


def device_of(pool: Pool) -> torch.device:
    """Returns this rank's GPU, or the CPU if there is no GPU.

    Ranks are counted from the pool's first device, over hosts that have equally many. Raises
    UserError if they are all on this host, and it has no such device.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank, here = int(os.environ.get("RANK", "0")), torch.cuda.device_count()
    together = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if 1 < here < together:
        raise UserError(f"allocation_mode: {pool} has {together} processes on a host of {here} GPUs")
    index, alone = pool.first_device + rank, together == int(os.environ.get("WORLD_SIZE", "1"))
    if alone and index >= here and (here > 1 or together == 1):
        raise UserError(f"allocation_mode: {pool} begins at device {pool.first_device}, and this machine has {here}")
    device = torch.device("cuda", index % here)
    torch.cuda.set_device(device)
    return device


def gather(payload: bytes) -> Sequence[bytes]:
    """Returns the payloads of all ranks in rank order, on every rank. A collective, over the CPU."""
    found: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(found, payload)
    return found
