"""Weights by handle to a process that opens them as SGLang does, from an allowed list of classes."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rljax.engines.cuda.transports import ipc  # noqa: E402
from rljax.engines.cuda.transports.ipc import Handles, TorchIpc  # noqa: E402
from rljax.engines.http.remote import ServerLost  # noqa: E402
from rljax.errors import SamplerError, UserError  # noqa: E402

# What both SGLang 0.5.17 and 0.5.23 unpickle, of what is needed here
ALLOWED = {
    ("types", "SimpleNamespace"),
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch.storage", "UntypedStorage"),
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
} | {("torch", name) for name in ("float32", "bfloat16", "uint8")}


class Careful(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise RuntimeError(f"Blocked unsafe global ({module}.{name})")
        return super().find_class(module, name)


def opened(handle: bytes) -> dict[str, Any]:
    """Takes a bucket apart as SGLang's FlattenedTensorBucket does; returns copies."""
    bucket = Careful(io.BytesIO(handle)).load()
    flat = bucket["flattened_tensor"]
    return {m.name: flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape).clone() for m in bucket["metadata"]}


def serve(pipe: Connection) -> None:
    """Runs a process unrelated to ours: spawned, and with another authentication key."""
    multiprocessing.current_process().authkey = b"other"
    while True:
        tensors = opened(pipe.recv_bytes())
        pipe.send({name: (str(t.dtype), tuple(t.shape), t.double().flatten().tolist()) for name, t in tensors.items()})


class Server:
    """`Post` of a server on the devices of one rank, or of several."""

    def __init__(self, *, sessions: bool = True, refuses: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        self.sessions, self.refuses = sessions, refuses
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.got: list[dict[str, Any]] = []

    @property
    def member(self) -> object:
        return self._process

    async def __call__(self, path: str, body: dict[str, Any]) -> None:
        self.calls.append((path, body))
        if path != "/update_weights_from_tensor":
            if not self.sessions:
                raise UserError(f"{path}: Not Found (status 404)")
            return
        if self.refuses:
            raise UserError(f"{path}: no (status 400)")
        assert body["load_format"] == "flattened_bucket"
        for text in body["serialized_named_tensors"]:
            await asyncio.to_thread(self._pipe.send_bytes, base64.b64decode(text, validate=True))
            self.got.append(await asyncio.to_thread(self._pipe.recv))

    def close(self) -> None:
        self._process.kill()
        self._process.join()


WEIGHTS = [
    ("a", torch.arange(6, dtype=torch.float32).reshape(2, 3)),
    ("b", torch.arange(5, dtype=torch.bfloat16)),  # what follows begins at no multiple of its own size
    ("c", torch.arange(12, dtype=torch.float32).reshape(3, 4).T),  # not contiguous
    ("d", torch.tensor(3.0)),
    ("e", torch.nn.Parameter(torch.ones(2, 2))),
]


def described(tensors: list[tuple[str, Any]]) -> dict[str, Any]:
    return {n: (str(t.dtype), tuple(t.shape), t.detach().double().flatten().tolist()) for n, t in tensors}


@pytest.fixture
def server():
    servers: list[Server] = []

    def make(**options: bool) -> Server:
        servers.append(Server(**options))
        return servers[-1]

    yield make
    for each in servers:
        each.close()


@pytest.mark.parametrize("sessions", [True, False])
def test_another_process_opens_every_tensor_and_the_version_comes_with_the_last(server, sessions):
    there = server(sessions=sessions)
    for version in (4, 5):
        asyncio.run(TorchIpc(iter(WEIGHTS), bucket_bytes=64).send([there], version, flush=True))
    got = {name: value for bucket in there.got for name, value in bucket.items()}
    assert got == described(WEIGHTS)
    sent = [body for path, body in there.calls if path == "/update_weights_from_tensor"]
    assert [body.get("weight_version") for body in sent] == [None, None, "4", None, None, "5"]
    assert [body["flush_cache"] for body in sent] == [False, False, True] * 2
    paths = [path for path, _ in there.calls]
    assert paths.count("/end_weight_update") == (2 if sessions else 0)


def test_one_buffer_serves_all_buckets(monkeypatch):
    made = []
    buffer = ipc._buffer
    monkeypatch.setattr(ipc, "_buffer", lambda size, device: made.append(size) or buffer(size, device))
    tensors = [(str(i), torch.full((10,), float(i))) for i in range(12)]
    handles = [handle for handle, _ in Handles(iter(tensors), 128)]
    assert len(handles) == 6 and made == [128]
    made.clear()
    list(Handles(iter([*tensors, ("big", torch.zeros(64)), *tensors]), 128))
    assert made == [128, 256]  # one tensor more than a bucket: room for it, and no more


def gathers() -> Callable[[int], ipc.Gather]:
    """Makes the `Gather` of two ranks, which are threads."""
    barrier, given = threading.Barrier(2, timeout=60), [b"", b""]

    def gather_of(rank: int) -> ipc.Gather:
        def gather(payload: bytes) -> list[bytes]:
            given[rank] = payload
            barrier.wait()
            all_of_them = list(given)
            barrier.wait()
            return all_of_them

        return gather

    return gather_of


def test_ranks_give_their_handles_and_wait_until_the_servers_are_done(server):
    """Two ranks share a device with a server each.

    The second follows, and doesn't overwrite what its server still reads.
    """
    servers = [server(), server()]
    here, there = iter(WEIGHTS), iter([(name, tensor + 1) for name, tensor in WEIGHTS])
    gather_of = gathers()
    follower = threading.Thread(target=TorchIpc(there, gather=gather_of(1), bucket_bytes=64).follow)
    follower.start()
    leader = TorchIpc(here, gather=gather_of(0), bucket_bytes=64)
    asyncio.run(leader.send(servers, 1, flush=False))
    follower.join()
    for each, expected in zip(servers, (WEIGHTS, [(name, tensor + 1) for name, tensor in WEIGHTS]), strict=True):
        assert {name: value for bucket in each.got for name, value in bucket.items()} == described(expected)


def test_a_server_that_refuses_or_is_not_there_fails_the_publish(server):
    there = server(refuses=True)
    with pytest.raises(SamplerError, match=r"version 1 by ipc.*status 400"):
        asyncio.run(TorchIpc(WEIGHTS).send([there], 1, flush=False))
    with pytest.raises(SamplerError, match="0 servers of 1 devices each need 0 ranks, and there are 1"):
        asyncio.run(TorchIpc(WEIGHTS).send([], 1, flush=False))


def shared_memory() -> set[str]:
    """Lists the shared memory that this process has made and nobody has removed."""
    gc.collect()
    return {file.name for file in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")}


class Gone(Server):
    """A server that dies at the n-th bucket: before it opens the handle, or after."""

    def __init__(self, at: int, opens: bool) -> None:
        super().__init__()
        self.at, self.opens = at, opens

    async def __call__(self, path: str, body: dict[str, Any]) -> None:
        if path == "/update_weights_from_tensor" and len(self.got) == self.at:
            if self.opens:
                await super().__call__(path, body)
            raise ServerLost("it died")
        await super().__call__(path, body)


@pytest.mark.parametrize(("ranks", "at", "opens"), [(1, 0, False), (1, 1, True), (2, 0, False), (2, 2, False)])
def test_a_publish_that_fails_leaves_no_memory_behind(ranks, at, opens):
    before = shared_memory()
    for _ in range(2):
        servers = [Gone(at, opens), *(Server() for _ in range(ranks - 1))]
        gather_of = gathers() if ranks > 1 else lambda rank: ipc.gather_alone
        follower = threading.Thread(target=TorchIpc(iter(WEIGHTS), gather=gather_of(1), bucket_bytes=64).follow)
        if ranks > 1:
            follower.start()
        with pytest.raises(SamplerError, match="it died"):
            asyncio.run(TorchIpc(iter(WEIGHTS), gather=gather_of(0), bucket_bytes=64).send(servers, 1, flush=False))
        if ranks > 1:
            follower.join()
        for each in servers:
            each.close()
        assert shared_memory() == before


def test_neither_do_servers_that_refuse_or_are_too_few(server):
    before = shared_memory()
    for servers in ([server(refuses=True)], [], [server(), server()]):
        with pytest.raises(SamplerError):
            asyncio.run(TorchIpc(iter(WEIGHTS), bucket_bytes=64).send(servers, 1, flush=False))
        assert shared_memory() == before


def test_a_publish_that_succeeds_leaves_none_either(server):
    there = server()
    before = shared_memory()
    asyncio.run(TorchIpc(iter(WEIGHTS), bucket_bytes=64).send([there], 1, flush=False))
    there.close()
    assert shared_memory() == before
