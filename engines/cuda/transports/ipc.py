"""Weights from a torch learner to SGLang servers on the same devices, by handles of shared memory.

    learner                                            server
    copies gathered tensors into a buffer
    POST /update_weights_from_tensor      ------>      opens the buffer, copies from it, closes it
                                                       (once per bucket)

Beside the model, the learner needs the memory of one bucket, which is reused, and of the tensor
that is copied into it.

The handles are what SGLang's MultiprocessingSerializer reads with load_format "flattened_bucket":
a pickle of the buffer, as torch shares it between processes, and the position of each tensor in
it. Neither side needs the other's classes. SGLang unpickles only classes of an allowed list, which
has `types.SimpleNamespace` but none of ours; its attributes stand for those of a
FlattenedTensorMetadata. A CUDA device is named by its UUID, for the two processes may number
devices differently. On the CPU the buffer is a file in shared memory: the same calls, for tests
without a GPU.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import functools
import inspect
import io
from collections.abc import Callable, Generator, Iterable, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from rljax.engine import Post
from rljax.engines.cuda.transports.buckets import BUCKET, Label, send_buckets
from rljax.engines.http.remote import ServerLost
from rljax.errors import SamplerError, UserError

TAKEN = b"taken"  # rank 0's message to the others after the servers have opened and closed a bucket's handles
SHARED_MEMORY = Path("/dev/shm")
ALIGNMENT = 16  # bytes; a tensor in the buffer must begin at a multiple of its element size
DEVICE_ARGUMENT = 6  # index of the device among the arguments of torch's rebuild_cuda_tensor; SGLang's version takes a UUID

Gather = Callable[[bytes], Sequence[bytes]]
"""Returns the payloads of all ranks in the order of their devices. A collective: all ranks call it at once."""


def gather_alone(payload: bytes) -> Sequence[bytes]:
    """Gathers the payload of a single rank; the `Gather` of a learner of one rank."""
    return [payload]


@dataclasses.dataclass
class TorchIpc:
    """Sends tensors to servers on the learner's devices: `WeightsBroadcast(TorchIpc(tensors))`.

    Names and shapes are those of the HF checkpoint, and all ranks have whole tensors. Server k, of
    `tensor` devices, shares those of the learner's ranks from k * tensor on. Rank 0 calls `send`;
    the others call `follow` at the same time, with the same tensors in the same order.
    """

    tensors: Iterable[tuple[str, torch.Tensor]]
    tensor: int = 1  # devices per server
    gather: Gather = gather_alone
    bucket_bytes: int = BUCKET

    async def send(self, posts: Sequence[Post], version: int, *, flush: bool) -> None:
        """Sends all tensors to all servers, which are paused.

        A server takes the version with the last bucket. Raises SamplerError if a server fails; the
        servers' weights may be mixed then, and have to be published again.
        """
        handles = Handles(self.tensors, self.bucket_bytes)
        try:
            await send_buckets(posts, handles, version, flush=flush, send=functools.partial(self._send, posts))
        except (ServerLost, UserError, RuntimeError, ValueError) as error:
            raise SamplerError(f"publishing version {version} by ipc: {error}") from error
        finally:
            await asyncio.to_thread(self._finish, handles)

    def _finish(self, handles: Handles) -> None:
        """Lets the other ranks gather what is left after a failure; otherwise nothing is left."""
        handles.give_up()
        if self.gather is not gather_alone:
            for nothing, _ in handles:
                self.gather(nothing)
                self.gather(nothing)
        handles.close()

    def follow(self) -> None:
        """Takes part in a `send` of rank 0; called on all other ranks. Blocks."""
        handles = Handles(self.tensors, self.bucket_bytes)
        for handle, _ in handles:
            self.gather(handle)
            if self.gather(b"")[0] != TAKEN:
                handles.give_up()
        handles.close()

    async def _send(self, posts: Sequence[Post], handle: bytes, label: Label) -> None:
        handles = await asyncio.to_thread(self.gather, handle)
        outcome = b""
        try:
            needed = len(posts) * self.tensor
            if len(handles) != needed:
                servers = f"{len(posts)} servers of {self.tensor} devices each"
                raise ValueError(f"{servers} need {needed} ranks, and there are {len(handles)} (all servers must be running)")
            texts = [base64.b64encode(each).decode() for each in handles]
            bodies = [
                {"serialized_named_tensors": texts[start : start + self.tensor], "load_format": "flattened_bucket", **label}
                for start in range(0, len(texts), self.tensor)
            ]
            calls = (post("/update_weights_from_tensor", body) for post, body in zip(posts, bodies, strict=True))
            await asyncio.gather(*calls)
            outcome = TAKEN
        finally:
            await asyncio.to_thread(self.gather, outcome)


class Handles:
    """Iterates over handles of buckets, each with whether it is the last one.

    A bucket has at most `limit` bytes, or one tensor. The memory behind a handle is reused for the
    next one.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]], limit: int) -> None:
        self._buckets = _filled(tensors, limit)
        self._out: list[Callable[[], None]] = []  # take back the last handle
        self._given_up = False

    def __iter__(self) -> Handles:
        return self

    def __next__(self) -> tuple[bytes, bool]:
        self._out = []  # the receiver has opened and closed it
        flat, parts, last = next(self._buckets)
        if self._given_up:
            return b"", last
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)  # finish the copies: the other process doesn't know our streams
        pickled = io.BytesIO()
        pickler = _Pickler(pickled)
        pickler.dump({"flattened_tensor": flat, "metadata": parts})
        self._out = pickler.undo
        return pickled.getvalue(), last

    def give_up(self) -> None:
        """Takes back the last handle, which nobody will open; the handles that follow are empty.

        Shared memory that is handed out and never opened would not be freed.
        """
        self._given_up = True
        undo, self._out = self._out, []
        for each in undo:
            each()

    def close(self) -> None:
        self._buckets.close()


Filled = tuple[torch.Tensor, list[SimpleNamespace], bool]


def _filled(tensors: Iterable[tuple[str, torch.Tensor]], limit: int) -> Generator[Filled, None, None]:
    """Yields buckets, one after the other in the same memory.

    Each is its bytes, the positions of its tensors, and whether it is the last one.
    """
    buffer: torch.Tensor | None = None
    parts: list[SimpleNamespace] = []
    used = 0
    for name, tensor in tensors:
        if parts and used + tensor.nbytes > limit:
            assert buffer is not None
            yield buffer[:used], parts, False
            parts, used = [], 0
        if buffer is None or buffer.numel() < used + tensor.nbytes:
            buffer = None  # free the old one before the new one is allocated
            buffer = _buffer(max(limit, tensor.nbytes), tensor.device)
        parts.append(_put(tensor, name, buffer, used))
        used = -(-parts[-1].end_idx // ALIGNMENT) * ALIGNMENT
        del tensor
    if parts:
        assert buffer is not None
        yield buffer[:used], parts, True


def _buffer(size: int, device: torch.device) -> torch.Tensor:
    """Allocates a buffer of `size` bytes.

    On the CPU it is in shared memory from the start, where only written pages take memory.
    """
    if device.type != "cpu":
        return torch.empty(size, dtype=torch.uint8, device=device)
    storage = torch.UntypedStorage._new_using_filename_cpu(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _put(tensor: torch.Tensor, name: str, buffer: torch.Tensor, start: int) -> SimpleNamespace:
    """Copies a tensor into the buffer.

    Returns its position there, with the attributes of a FlattenedTensorMetadata.
    """
    end = start + tensor.nbytes
    buffer[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    span = {"start_idx": start, "end_idx": end, "numel": end - start}
    return SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **span)


class _Pickler(ForkingPickler):
    """Shares tensors between unrelated processes, as torch does between related ones."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.undo: list[Callable[[], None]] = []  # actions that take back a handle nobody opens

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            rebuild, arguments = reductions.reduce_tensor(value)
            uuid = str(torch.cuda.get_device_properties(value.device).uuid)
            named = dict(zip(inspect.signature(rebuild).parameters, arguments, strict=True))
            counter = named["ref_counter_handle"], named["ref_counter_offset"]
            # The receiver does this when it is done; until then torch keeps the memory.
            release = functools.partial(named["storage_cls"]._release_ipc_counter, *counter, device=named["storage_device"])
            self.undo.append(release)
            return rebuild, (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])
        if isinstance(value, torch.UntypedStorage):
            # By name, whatever torch's sharing strategy: only child processes could ask for a descriptor.
            name = value._share_filename_cpu_()
            value._shared_incref()  # the receiver decrements it
            self.undo.append(functools.partial(_unlink, value, name[1].decode()))
            return reductions.rebuild_storage_filename, (type(value), *name)
        return NotImplemented


def _unlink(storage: torch.UntypedStorage, name: str) -> None:
    """Removes the name of shared memory that may never have been opened.

    A process that did open it keeps the memory, until it ends.
    """
    storage._shared_incref()  # or torch would unlink it again at the end, and abort the process if it can't
    with contextlib.suppress(FileNotFoundError):
        (SHARED_MEMORY / name.lstrip("/")).unlink()
