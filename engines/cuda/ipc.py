"""Weights from a torch learner to SGLang servers on the same devices: a handle of the memory
travels, the weights don't.

    learner                                            server
    tensors, as they are gathered, into a buffer
    POST /update_weights_from_tensor      ------>      opens the buffer, copies from it, lets go of it     (once a bucket)

Beside the model, the learner holds the buffer (one bucket, used again for the next) and the tensor
that goes into it.

The handles are what SGLang's MultiprocessingSerializer reads with load_format "flattened_bucket":
a pickle of the buffer as torch shares it between processes, and where in it each tensor lies.
Neither side of the wire needs the other's classes: SGLang unpickles nothing but an allowed list,
on which `types.SimpleNamespace` is and ours are not, and takes its attributes for those of a
FlattenedTensorMetadata. A CUDA device is named by its UUID, for the two processes may count
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
from rljax.engines.cuda.buckets import BUCKET, Label, send_buckets
from rljax.engines.http.remote import ServerLost
from rljax.errors import SamplerError, UserError

TAKEN = b"taken"  # what rank 0 tells the others once a bucket's handles have been opened and let go of again
SHARED_MEMORY = Path("/dev/shm")
ALIGNMENT = 16  # bytes; a tensor in the buffer is looked at as its own dtype, which has to begin at a multiple of its size
DEVICE_ARGUMENT = 6  # of torch's rebuild_cuda_tensor, the device; SGLang's version of it takes a UUID there

Gather = Callable[[bytes], Sequence[bytes]]
"""What all ranks gave, in the order of their devices. Every rank calls it at once, and waits for the others."""


def alone(payload: bytes) -> Sequence[bytes]:
    """`Gather` of a learner of one rank."""
    return [payload]


@dataclasses.dataclass
class TorchIpc:
    """Named tensors for servers on the devices of the learner:
    `WeightsBroadcast(TorchIpc(tensors))`.

    Names and layouts are those of the HF checkpoint, and all ranks have whole tensors. Server k of
    `tensor` devices is on those of the learner's ranks k * tensor and following. Rank 0 sends; the
    others `follow` at the same time, with the same tensors in the same order.
    """

    tensors: Iterable[tuple[str, torch.Tensor]]
    tensor: int = 1  # devices of a server
    gather: Gather = alone
    bucket_bytes: int = BUCKET

    async def send(self, posts: Sequence[Post], version: int, *, flush: bool) -> None:
        """All tensors to all servers, which are paused. Each server takes the version with the
        last bucket.

        Raises SamplerError when a server fails; then the servers' weights may be mixed, and have
        to be published again.
        """
        handles = Handles(self.tensors, self.bucket_bytes)
        try:
            await send_buckets(posts, handles, version, flush=flush, send=functools.partial(self._send, posts))
        except (ServerLost, UserError, RuntimeError, ValueError) as error:
            raise SamplerError(f"publishing version {version} by ipc: {error}") from error
        finally:
            await asyncio.to_thread(self._finish, handles)

    def _finish(self, handles: Handles) -> None:
        """After the last bucket there is nothing to do.

        After a failure the other ranks still gather what is left.
        """
        handles.give_up()
        if self.gather is not alone:
            for nothing, _ in handles:
                self.gather(nothing)
                self.gather(nothing)
        handles.close()

    def follow(self) -> None:
        """What ranks 1 and following do during a `send` of rank 0. Blocks."""
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
            if len(handles) != len(posts) * self.tensor:
                raise ValueError(f"{len(posts)} servers of {self.tensor} devices, and {len(handles)} ranks: all must be there")
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
    """An iterator of handles, each of a bucket of at most `limit` bytes or one tensor, and whether
    it is the last.

    The memory behind a handle is written over when the next one is asked for.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]], limit: int) -> None:
        self._buckets = _filled(tensors, limit)
        self._out: list[Callable[[], None]] = []  # to take the last handle back
        self._given_up = False

    def __iter__(self) -> Handles:
        return self

    def __next__(self) -> tuple[bytes, bool]:
        self._out = []  # whoever got it has opened it, and let go of it
        flat, parts, last = next(self._buckets)
        if self._given_up:
            return b"", last
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)  # the copies: the other process knows nothing of our streams
        pickled = io.BytesIO()
        pickler = _Pickler(pickled)
        pickler.dump({"flattened_tensor": flat, "metadata": parts})
        self._out = pickler.undo
        return pickled.getvalue(), last

    def give_up(self) -> None:
        """Nobody opens the last handle any more, nor would another one: what follows is empty.
        Memory that was handed out and not taken would never be free again.
        """
        self._given_up = True
        undo, self._out = self._out, []
        for each in undo:
            each()

    def close(self) -> None:
        self._buckets.close()


Filled = tuple[torch.Tensor, list[SimpleNamespace], bool]


def _filled(tensors: Iterable[tuple[str, torch.Tensor]], limit: int) -> Generator[Filled, None, None]:
    """Buckets, one after the other in the same memory: bytes, where in them each tensor is, and
    whether it is the last.
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
            buffer = None  # before there are two of them
            buffer = _buffer(max(limit, tensor.nbytes), tensor.device)
        parts.append(_put(tensor, name, buffer, used))
        used = -(-parts[-1].end_idx // ALIGNMENT) * ALIGNMENT
        del tensor
    if parts:
        assert buffer is not None
        yield buffer[:used], parts, True


def _buffer(size: int, device: torch.device) -> torch.Tensor:
    """Of bytes, and on the CPU in shared memory from the start: it takes up what is written to."""
    if device.type != "cpu":
        return torch.empty(size, dtype=torch.uint8, device=device)
    storage = torch.UntypedStorage._new_using_filename_cpu(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _put(tensor: torch.Tensor, name: str, buffer: torch.Tensor, start: int) -> SimpleNamespace:
    """Copies a tensor into the buffer and says where it is, in the words of a
    FlattenedTensorMetadata.
    """
    end = start + tensor.nbytes
    buffer[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    place = {"start_idx": start, "end_idx": end, "numel": end - start}
    return SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **place)


class _Pickler(ForkingPickler):
    """torch's way of sharing tensors between processes, for processes that have nothing in common."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.undo: list[Callable[[], None]] = []  # for a handle that nobody opens

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            rebuild, arguments = reductions.reduce_tensor(value)
            uuid = str(torch.cuda.get_device_properties(value.device).uuid)
            named = dict(zip(inspect.signature(rebuild).parameters, arguments, strict=True))
            counter = named["ref_counter_handle"], named["ref_counter_offset"]
            # What the receiver does when it is done; until then torch keeps the memory.
            release = functools.partial(named["storage_cls"]._release_ipc_counter, *counter, device=named["storage_device"])
            self.undo.append(release)
            return rebuild, (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])
        if isinstance(value, torch.UntypedStorage):
            # By name, whatever the process's strategy: a descriptor could be asked for by children of this process only.
            name = value._share_filename_cpu_()
            value._shared_incref()  # the receiver takes it back
            self.undo.append(functools.partial(_unlink, value, name[1].decode()))
            return reductions.rebuild_storage_filename, (type(value), *name)
        return NotImplemented


def _unlink(storage: torch.UntypedStorage, name: str) -> None:
    """Away with the name of shared memory that nobody may have opened: whoever has it still keeps
    the memory, and no more.
    """
    storage._shared_incref()  # else the last of them would unlink it too, and torch ends a process that can't
    with contextlib.suppress(FileNotFoundError):
        (SHARED_MEMORY / name.lstrip("/")).unlink()
