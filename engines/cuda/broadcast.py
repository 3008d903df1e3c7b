"""Weights from a torch learner to SGLang servers by a collective, in buckets: NCCL between GPUs,
gloo on the CPU.

    learner, rank 0 of the group                    server k, ranks 1 + k * tensor ... of the group
    POST /update_weights_from_distributed ----->    names, dtypes, shapes of a bucket
    broadcast of each tensor             ======>    received, loaded                           (once a bucket)

Beside the model, a server holds one bucket more.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import datetime
import functools
import inspect
import itertools
import logging
import os
import socket
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rljax.engine import Post
from rljax.engines.cuda.buckets import BUCKET, Bucket, Label, buckets_of, on_all, send_buckets
from rljax.engines.http.remote import ServerLost, describe
from rljax.errors import SamplerError, UserError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

JOIN_TIMEOUT = datetime.timedelta(seconds=300)  # until all servers have joined
BUCKET_TIMEOUT = 240.0  # seconds; a server that hangs in a bucket
TIMEOUT = datetime.timedelta(seconds=BUCKET_TIMEOUT + 120)  # of torch's own, which ends the process: we must be first
END_TIMEOUT = 15.0  # seconds for a group to end, here and at a server

log = logging.getLogger(__name__)

_names = itertools.count()

T = TypeVar("T")


@dataclasses.dataclass
class BroadcastGroup:
    """The process group of a learner and its servers. Made at the first publish, and again when a
    server has changed.

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
        await self.leave(posts)
        self.name, self.members = f"rljax-{os.getpid()}-{next(_names)}", members
        world, port = 1 + len(posts) * self.tensor, _free_port(self.host)
        body = {"master_address": self.host, "master_port": port, "world_size": world, "group_name": self.name}
        body |= {"backend": self.backend}
        joining = [
            post("/init_weights_update_group", body | {"rank_offset": 1 + index * self.tensor})
            for index, post in enumerate(posts)
        ]
        ours = _in_thread(join, self.backend, self.host, port, 0, world, self.name)
        try:
            self.group, *_ = await asyncio.gather(ours, *joining)
        except (ServerLost, UserError, RuntimeError) as error:
            await self.leave(posts)
            raise SamplerError(f"the servers did not join a group of {world} over {self.backend}: {error}") from error
        return self.group

    async def leave(self, posts: Sequence[Post] = (), *, broken: bool = False) -> None:
        """The group is of no use any more, to these servers neither. Not on this thread, and not
        for ever: over NCCL the end of a group waits for what it was asked to send.

        broken: in the middle of something, which is given up.
        """
        group, name = self.group, self.name
        self.group, self.name, self.members = None, "", ()
        if not name:
            return
        ends = [_in_thread(_end, group, self.backend, broken)] if group is not None else []
        calls = (post("/destroy_weights_update_group", {"group_name": name}) for post in posts)
        try:
            async with asyncio.timeout(END_TIMEOUT):
                await asyncio.gather(*ends, *calls, return_exceptions=True)  # a server may have gone, or know no such group
        except TimeoutError:
            log.warning("a group over %s did not end within %g s, and is left as it is", self.backend, END_TIMEOUT)

    def close(self) -> None:
        """The learner is closed. Blocks."""
        if self.group is not None:
            _end(self.group, self.backend, broken=False)
        self.group, self.name, self.members = None, "", ()


def _end(group: ProcessGroup, backend: str, broken: bool) -> None:
    """Destroying a group of NCCL waits for its kernels, which never end where another rank is
    gone: such a group is aborted.
    """
    import torch.distributed
    from torch.distributed import distributed_c10d as c10d

    if broken and backend == "nccl":
        c10d._abort_process_group(group)
    else:
        torch.distributed.destroy_process_group(group)


@dataclasses.dataclass
class TorchBroadcast:
    """Named tensors on their way to the servers: `WeightsBroadcast(TorchBroadcast(tensors,
    group))`.

    Names and layouts are those of the HF checkpoint. Tensors are taken from the iterable as they
    are sent, so that a sharded learner gathers one at a time.
    """

    tensors: Iterable[tuple[str, torch.Tensor]]
    group: BroadcastGroup
    bucket_bytes: int = BUCKET

    async def send(self, posts: Sequence[Post], version: int, *, flush: bool) -> None:
        """All tensors to all servers, which are paused. Each server takes the version with the
        last bucket.

        Raises SamplerError when a server fails; then the servers' weights may be mixed, and have
        to be published again.
        """
        group = await self.group.join(posts)
        buckets = buckets_of(self.tensors, self.bucket_bytes)
        try:
            await send_buckets(posts, buckets, version, flush=flush, send=functools.partial(self._send_bucket, group, posts))
        except BaseException as error:  # a cancellation too: what is in flight would keep the GPU from anything else
            # gloo lets go of the servers that wait in the group when nothing refers to it any more, and these do.
            traceback.clear_frames(error.__traceback__)
            del group
            await self.group.leave(posts, broken=True)
            if not isinstance(error, ServerLost | UserError | RuntimeError | TimeoutError):
                raise
            raise SamplerError(f"publishing version {version} over {self.group.backend}: {describe(error)}") from error

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
        sending = _in_thread(_broadcast, group, tensors)
        try:
            async with asyncio.timeout(BUCKET_TIMEOUT):
                # A server that refuses never takes part: the collective would wait for it until its own timeout.
                await asyncio.wait({receiving, sending}, return_when=asyncio.FIRST_EXCEPTION)
                if receiving.done():
                    receiving.result()
                await asyncio.gather(receiving, sending)
        finally:
            receiving.cancel()


def _in_thread(call: Callable[..., T], *args: Any) -> asyncio.Future[T]:
    """Calls what may never end, where a server is gone: in a thread for which the process does not
    wait at its own end.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        nonlocal args
        try:
            result = call(*args)
        except BaseException as error:
            args = ()  # the error refers to this frame
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=f"rljax-{call.__name__}", daemon=True).start()
    return asyncio.wrap_future(future)


def _broadcast(group: ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
    """Sends every tensor; over NCCL it returns when that is queued behind what the GPU has to do,
    and servers tell the rest.
    """
    import torch.distributed

    handles = [torch.distributed.broadcast(tensor.contiguous(), 0, group=group, async_op=True) for tensor in tensors]
    for handle in handles:
        handle.wait()


def join(backend: str, host: str, port: int, rank: int, world: int, name: str) -> ProcessGroup:
    """A group beside the learner's own, under the keys of the store that SGLang's side uses.
    Blocks until all are there.

    torch has no public call for a second group with processes outside the first one; SGLang uses
    the same helper. Its rendezvous by tcp:// is not for us: under torchrun rank 0 would look for a
    store there, where it has to keep one.
    """
    import torch.distributed
    from torch.distributed import distributed_c10d as c10d

    tcp_store: Any = torch.distributed.TCPStore  # type: ignore[attr-defined]  # public, but not to mypy
    store = tcp_store(host, port, world, is_master=rank == 0, timeout=JOIN_TIMEOUT, multi_tenant=True)
    helper: Any = c10d._new_process_group_helper
    options = "backend_options" if "backend_options" in inspect.signature(helper).parameters else "pg_options"
    group, _ = helper(
        world,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=name,
        timeout=TIMEOUT,
        **{options: None},
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
    return group


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
