"""Weights from a torch learner to SGLang servers by a collective, in buckets: NCCL between GPUs, gloo on the CPU.

    learner, rank 0 of the group                    server k, ranks 1 + k * tensor ... of the group
    POST /update_weights_from_distributed ----->    names, dtypes, shapes of a bucket
    broadcast of each tensor             ======>    received, loaded                           (once a bucket)

Beside the model, a server holds one bucket more.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import functools
import inspect
import itertools
import os
import socket
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rljax.engines.cuda.buckets import BUCKET, Bucket, Label, buckets_of, on_all, send_buckets
from rljax.engines.http.collaborators import Post
from rljax.engines.http.remote import ServerLost
from rljax.errors import SamplerError, UserError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

TIMEOUT = datetime.timedelta(seconds=300)  # for a collective whose other side has died

_names = itertools.count()


@dataclasses.dataclass
class BroadcastGroup:
    """The process group of a learner and its servers. Made at the first publish, and again when a server has changed.

    Example: BroadcastGroup("nccl", tensor=2)
    """

    backend: str  # "nccl", "gloo"
    tensor: int = 1  # ranks of a server
    host: str = "127.0.0.1"  # address of this process, as the servers see it
    group: ProcessGroup | None = None
    name: str = ""
    members: Sequence[object] = ()

    async def join(self, posts: Sequence[Post]) -> ProcessGroup:
        """The group with these servers. Raises SamplerError."""
        members = [post.member for post in posts]
        if self.group is not None and self.members == members:
            return self.group
        self.forget()
        self.name, self.members = f"rljax-{os.getpid()}-{next(_names)}", members
        world, port = 1 + len(posts) * self.tensor, _free_port(self.host)
        body = {"master_address": self.host, "master_port": port, "world_size": world, "group_name": self.name}
        body |= {"backend": self.backend}
        joining = [
            post("/init_weights_update_group", body | {"rank_offset": 1 + index * self.tensor})
            for index, post in enumerate(posts)
        ]
        ours = asyncio.to_thread(join, self.backend, f"tcp://{self.host}:{port}", 0, world, self.name)
        try:
            self.group, *_ = await asyncio.gather(ours, *joining)
        except (ServerLost, UserError, RuntimeError) as error:
            self.forget()
            raise SamplerError(f"the servers did not join a group of {world} over {self.backend}: {error}") from error
        return self.group

    def forget(self) -> None:
        """The group is of no use any more."""
        if self.group is not None:
            import torch.distributed

            torch.distributed.destroy_process_group(self.group)
        self.group, self.members = None, ()


@dataclasses.dataclass
class TorchBroadcast:
    """Named tensors on their way to the servers: `WeightSource(params=TorchBroadcast(tensors, group))`.

    Names and layouts are those of the HF checkpoint. Tensors are taken from the iterable as they are sent, so that a sharded
    learner gathers one at a time.
    """

    tensors: Iterable[tuple[str, torch.Tensor]]
    group: BroadcastGroup
    bucket_bytes: int = BUCKET

    async def send(self, posts: Sequence[Post], version: int, *, flush: bool) -> None:
        """All tensors to all servers, which are paused. Each server takes the version with the last bucket.

        Raises SamplerError when a server fails; then the servers' weights may be mixed, and have to be published again.
        """
        group = await self.group.join(posts)
        buckets = buckets_of(self.tensors, self.bucket_bytes)
        try:
            await send_buckets(posts, buckets, version, flush=flush, send=functools.partial(self._send_bucket, group, posts))
        except (ServerLost, UserError, RuntimeError) as error:
            self.group.forget()
            raise SamplerError(f"publishing version {version} over {self.group.backend}: {error}") from error

    async def _send_bucket(self, group: ProcessGroup, posts: Sequence[Post], bucket: Bucket, label: Label) -> None:
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self.group.name,
            **label,
        }
        receiving = asyncio.ensure_future(on_all(posts, "/update_weights_from_distributed", body))
        tensors = [tensor for _, tensor in bucket]
        sending = asyncio.ensure_future(asyncio.to_thread(_broadcast, group, tensors))
        # A server that refuses never takes part: the collective would wait for it until its own timeout.
        await asyncio.wait({receiving, sending}, return_when=asyncio.FIRST_EXCEPTION)
        if receiving.done():
            receiving.result()
        await asyncio.gather(receiving, sending)


def _broadcast(group: ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
    """Blocks until every tensor is sent."""
    import torch.distributed

    handles = [torch.distributed.broadcast(tensor.contiguous(), 0, group=group, async_op=True) for tensor in tensors]
    for handle in handles:
        handle.wait()


def join(backend: str, url: str, rank: int, world: int, name: str) -> ProcessGroup:
    """A group beside the learner's own, under the keys of the store that SGLang's side uses. Blocks until all are there.

    torch has no public call for a second group with processes outside the first one; SGLang uses the same two helpers.
    """
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous(url, rank, world, timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    helper: Any = c10d._new_process_group_helper
    options = "backend_options" if "backend_options" in inspect.signature(helper).parameters else "pg_options"
    group, _ = helper(
        size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=name,
        timeout=TIMEOUT,
        **{options: None},
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
