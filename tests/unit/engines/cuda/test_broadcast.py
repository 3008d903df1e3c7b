"""Weights by broadcast to a process that takes them as SGLang does: it joins, is told of a bucket, receives it."""

from __future__ import annotations

import asyncio
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rljax.engines.cuda import broadcast  # noqa: E402
from rljax.engines.cuda.broadcast import BroadcastGroup, TorchBroadcast  # noqa: E402
from rljax.errors import SamplerError, UserError  # noqa: E402


def receive(pipe: Connection) -> None:
    """The other side: a process of its own, for a group's name is unique in one."""
    groups: dict[str, Any] = {}
    while True:
        path, body = pipe.recv()
        if path == "/init_weights_update_group":
            url = f"tcp://{body['master_address']}:{body['master_port']}"
            name = body["group_name"]
            groups[name] = broadcast.join(body["backend"], url, body["rank_offset"], body["world_size"], name)
            pipe.send(None)
        else:
            tensors = {}
            for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
                tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                torch.distributed.broadcast(tensors[name], 0, group=groups[body["group_name"]])
            pipe.send({name: tensor.double().numpy() for name, tensor in tensors.items()})


class Receiver:
    """`Post` of a server; None as an answer is a refusal."""

    def __init__(self, *, sessions: bool = True, refuses: str = "") -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=receive, args=(theirs,), daemon=True)
        self._process.start()
        self.sessions, self.refuses = sessions, refuses
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.tensors: dict[str, Any] = {}

    @property
    def member(self) -> object:
        return self._process

    async def __call__(self, path: str, body: dict[str, Any]) -> Any:
        self.calls.append((path, body))
        if path == self.refuses:
            raise UserError(f"{path}: no (status 400)")
        if path in ("/begin_weight_update", "/end_weight_update"):
            if not self.sessions:
                raise UserError(f"{path}: Not Found (status 404)")
            return None
        self._pipe.send((path, body))
        received = await asyncio.to_thread(self._pipe.recv)
        self.tensors |= received or {}
        return received

    def close(self) -> None:
        self._process.kill()
        self._process.join()


WEIGHTS = [
    ("a", torch.arange(6, dtype=torch.float32).reshape(2, 3)),
    ("b", torch.arange(4, dtype=torch.bfloat16)),
    ("c", torch.arange(12, dtype=torch.float32).reshape(3, 4).T),  # not contiguous
    ("d", torch.tensor(3.0)),
]


@pytest.mark.parametrize("sessions", [True, False])
def test_every_server_gets_every_tensor_in_buckets_and_the_version_with_the_last(sessions):
    receivers = [Receiver(sessions=sessions) for _ in range(2 if sessions else 1)]
    group = BroadcastGroup("gloo")

    async def publish() -> None:
        for version in (4, 5):
            weights = TorchBroadcast(iter(WEIGHTS), group, bucket_bytes=32)
            await weights.send([receiver for receiver in receivers], version, flush=True)

    try:
        asyncio.run(publish())
        for receiver in receivers:
            for name, tensor in WEIGHTS:
                assert receiver.tensors[name].tolist() == tensor.tolist()
            paths = [path for path, _ in receiver.calls]
            assert paths.count("/init_weights_update_group") == 1  # for both publishes
            assert paths.count("/end_weight_update") == (2 if sessions else 0)
            sent = [body for path, body in receiver.calls if path == "/update_weights_from_distributed"]
            assert [body["names"] for body in sent] == [["a", "b"], ["c"], ["d"]] * 2
            assert [body.get("weight_version") for body in sent] == [None, None, "4", None, None, "5"]
            assert [body["flush_cache"] for body in sent] == [False, False, True] * 2
        offsets = {body["rank_offset"] for r in receivers for path, body in r.calls if path == "/init_weights_update_group"}
        assert offsets == set(range(1, 1 + len(receivers)))
    finally:
        group.forget()
        for receiver in receivers:
            receiver.close()


@pytest.mark.parametrize("path", ["/begin_weight_update", "/end_weight_update"])
def test_a_server_that_refuses_fails_the_publish(path):
    receiver = Receiver(refuses=path)
    try:
        with pytest.raises(SamplerError, match=f"version 1.*{path}"):
            asyncio.run(TorchBroadcast(WEIGHTS, BroadcastGroup("gloo")).send([receiver], 1, flush=False))
    finally:
        receiver.close()
