"""Weights from a torch learner to SGLang servers by broadcast: NCCL between GPUs, gloo on the CPU.

    learner, rank 0 of the group                    server k, ranks from 1 + k * tensor on
    POST /update_weights_from_distributed ----->    names, dtypes, shapes of a bucket
    broadcast of each tensor             ======>    receives and loads it    (once per bucket)

Beside the model, a server needs the memory of one bucket.
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
from rljax.engines.cuda.transports.buckets import BUCKET, Bucket, Label, buckets_of, on_all, send_buckets
from rljax.engines.http.remote import ServerLost, describe
from rljax.errors import SamplerError, UserError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

END_TIMEOUT = 15.0  # seconds for a group to end, here and at the servers

log = logging.getLogger(__name__)

_names = itertools.count()

T = TypeVar("T")


@dataclasses.dataclass
class BroadcastGroup:
    """The process group of a learner and its servers.

    Made at the first publish, and again after a server was replaced.

    Example: BroadcastGroup("nccl", tensor=2)
    """

    backend: str  # "nccl", "gloo"
    tensor: int = 1  # ranks per server
    host: str = "127.0.0.1"  # address of this process, as the servers see it
    wait: float = 450.0  # seconds: Config.control_timeout, of which the two below are shares
    group: ProcessGroup | None = None
    name: str = ""
    members: Sequence[object] = ()

    @property
    def join_timeout(self) -> float:
        """Seconds for all servers to join."""
        return self.wait * 2 / 3

    @property
    def bucket_timeout(self) -> float:
        """Seconds for one bucket, in which a server may hang.

        torch's own limit, which ends the process, is twice as long.
        """
        return self.wait / 2

    async def join(self, posts: Sequence[Post]) -> ProcessGroup:
        """Returns the group with these servers, making it if needed. Raises SamplerError."""
        members = [post.member for post in posts]
        if self.group is not None and self.members == members:
            return self.group
        await self.leave(posts)
        self.name, self.members = f"rljax-{os.getpid()}-{next(_names)}", members
        world, listening = 1 + len(posts) * self.tensor, listen_at(self.host)
        port = listening.getsockname()[1]
        body = {"master_address": self.host, "master_port": port, "world_size": world, "group_name": self.name}
        body |= {"backend": self.backend}
        joining = [
            post("/init_weights_update_group", body | {"rank_offset": 1 + index * self.tensor})
            for index, post in enumerate(posts)
        ]
        ours = _in_thread(self._join, listening, world)
        try:
            async with asyncio.timeout(self.join_timeout):
                self.group, *_ = await asyncio.gather(ours, *joining)
        except TimeoutError:
            await self.leave(posts)
            raise SamplerError(f"the servers did not join a group of {world} over {self.backend} in time") from None
        except (ServerLost, UserError, RuntimeError) as error:
            await self.leave(posts)
            raise SamplerError(f"the servers did not join a group of {world} over {self.backend}: {error}") from error
        return self.group

    def _join(self, listening: socket.socket, world: int) -> ProcessGroup:
        return join(self.backend, listening, 0, world, self.name, self.join_timeout, 2 * self.bucket_timeout)

    async def leave(self, posts: Sequence[Post] = (), *, broken: bool = False) -> None:
        """Ends the group, here and at the servers. Waits for END_TIMEOUT at most.

        Runs in a thread: over NCCL, ending a group waits for its pending work.

        Args:
          broken: a transfer failed in the middle, so the group is aborted.
        """
        group, name = self.group, self.name
        self.group, self.name, self.members = None, "", ()
        if not name:
            return
        ends = [_in_thread(_end, group, self.backend, broken)] if group is not None else []
        calls = (post("/destroy_weights_update_group", {"group_name": name}) for post in posts)
        try:
            async with asyncio.timeout(END_TIMEOUT):
                await asyncio.gather(*ends, *calls, return_exceptions=True)  # a server may be gone, or not have such a group
        except TimeoutError:
            log.warning("a group over %s did not end within %g s and is abandoned", self.backend, END_TIMEOUT)

    def close(self) -> None:
        """Ends the group when the learner closes. Blocks."""
        if self.group is not None:
            _end(self.group, self.backend, broken=False)
        self.group, self.name, self.members = None, "", ()


def _end(group: ProcessGroup, backend: str, broken: bool) -> None:
    """Destroys a group, or aborts it.

    Destroying an NCCL group waits for its kernels, which never end if another rank is gone.
    """
    import torch.distributed
    from torch.distributed import distributed_c10d as c10d

    if broken and backend == "nccl":
        c10d._abort_process_group(group)
    else:
        torch.distributed.destroy_process_group(group)


@dataclasses.dataclass
class TorchBroadcast:
    """Sends named tensors to servers: `WeightsBroadcast(TorchBroadcast(tensors, group))`.

    Names and shapes are those of the HF checkpoint. Tensors are taken from the iterable as they are
    sent, so that a sharded learner gathers one at a time.
    """

    tensors: Iterable[tuple[str, torch.Tensor]]
    group: BroadcastGroup
    bucket_bytes: int = BUCKET

    async def send(self, posts: Sequence[Post], version: int, *, flush: bool) -> None:
        """Sends all tensors to all servers, which are paused.

        A server takes the version with the last bucket. Raises SamplerError if a server fails; the
        servers' weights may be mixed then, and have to be published again.
        """
        group = await self.group.join(posts)
        buckets = buckets_of(self.tensors, self.bucket_bytes)
        try:
            await send_buckets(posts, buckets, version, flush=flush, send=functools.partial(self._send_bucket, group, posts))
        except BaseException as error:  # also a cancellation: pending transfers would block the GPU
            # gloo releases the servers that wait in the group when its last reference is gone; the frames hold some.
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
            async with asyncio.timeout(self.group.bucket_timeout):
                # A server that refuses never joins the collective, which would wait for it until its own timeout.
                await asyncio.wait({receiving, sending}, return_when=asyncio.FIRST_EXCEPTION)
                if receiving.done():
                    receiving.result()
                await asyncio.gather(receiving, sending)
        finally:
            receiving.cancel()


def _in_thread(call: Callable[..., T], *args: Any) -> asyncio.Future[T]:
    """Runs a call that may never return in a daemon thread.

    The process doesn't wait for such a thread when it exits. An error that comes when nobody waits
    any more is the same failure as the one that they have seen, and isn't reported again.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        nonlocal args
        try:
            result = call(*args)
        except BaseException as error:
            args = ()  # the error's traceback refers to this frame
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=f"rljax-{call.__name__}", daemon=True).start()
    wrapped = asyncio.wrap_future(future)
    wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())  # asyncio reports what nobody has looked at
    return wrapped


def _broadcast(group: ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
    """Broadcasts the tensors. Over NCCL it returns when the work is queued on the GPU."""
    import torch.distributed

    handles = [torch.distributed.broadcast(tensor.contiguous(), 0, group=group, async_op=True) for tensor in tensors]
    for handle in handles:
        handle.wait()


def join(
    backend: str,
    store: socket.socket | tuple[str, int],
    rank: int,
    world: int,
    name: str,
    join_timeout: float = 300.0,
    timeout: float = 480.0,
) -> ProcessGroup:
    """Makes a group beside the learner's own, with the store keys that SGLang uses.

    Blocks until all ranks have joined. torch has no public call for a second group with outside
    processes; SGLang uses the same helper. The tcp:// rendezvous can't be used: under torchrun rank
    0 would connect to a store there, but it has to serve one.

    Args:
      store: on rank 0 the listening socket at which it serves the store, else its host and port.
      join_timeout, timeout: seconds, to join and for a collective.
    """
    import torch.distributed
    from torch.distributed import distributed_c10d as c10d

    tcp_store: Any = torch.distributed.TCPStore  # type: ignore[attr-defined]  # public, but unknown to mypy
    patience = datetime.timedelta(seconds=join_timeout)
    if isinstance(store, socket.socket):  # torch by itself would listen on all interfaces
        host, port = store.getsockname()[:2]
        served = tcp_store(
            host, port, world, is_master=True, timeout=patience, multi_tenant=True, master_listen_fd=store.detach()
        )
    else:
        served = tcp_store(*store, world, is_master=False, timeout=patience, multi_tenant=True)
    helper: Any = c10d._new_process_group_helper
    options = "backend_options" if "backend_options" in inspect.signature(helper).parameters else "pg_options"
    group, _ = helper(
        world,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, served),
        group_name=name,
        timeout=datetime.timedelta(seconds=timeout),
        **{options: None},
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
    return group


def listen_at(host: str) -> socket.socket:
    """Returns a socket that listens at a free port of one address of this host."""
    return socket.create_server((host, 0), backlog=128)
