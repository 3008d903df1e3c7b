"""Weights by broadcast to a process that takes part as SGLang does: joins, is told, receives."""

from __future__ import annotations

import asyncio
import datetime
import gc
import itertools
import multiprocessing
import os
import threading
import time
import weakref
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest

torch = pytest.importorskip("torch")

from torch.distributed import distributed_c10d as c10d  # noqa: E402

from rljax.engine.rank import LOOPBACK, free_port  # noqa: E402
from rljax.engines.cuda.learning import distributed  # noqa: E402
from rljax.engines.cuda.transports import broadcast  # noqa: E402
from rljax.engines.cuda.transports.broadcast import BroadcastGroup, TorchBroadcast  # noqa: E402
from rljax.engines.http.remote import ServerLost  # noqa: E402
from rljax.errors import SamplerError, UserError  # noqa: E402


def receive(pipe: Connection) -> None:
    """Runs the other side, in another process, for a group's name is unique in a process."""
    groups: dict[str, Any] = {}
    while True:
        path, body = pipe.recv()
        if path == "/init_weights_update_group":
            name, place = body["group_name"], (body["master_address"], body["master_port"])
            groups[name] = broadcast.join(body["backend"], place, body["rank_offset"], body["world_size"], name)
            pipe.send(None)
        else:
            tensors = {}
            for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
                tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                torch.distributed.broadcast(tensors[name], 0, group=groups[body["group_name"]])
            pipe.send({name: tensor.double().numpy() for name, tensor in tensors.items()})


class Receiver:
    """`Post` of a server; an answer of None is a refusal."""

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
        group.close()
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


def test_a_group_forms_under_torchrun_too(monkeypatch):
    """torchrun's variables say that another process serves the store."""
    for name, value in {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    receiver, group = Receiver(), BroadcastGroup("gloo", wait=30.0)
    try:
        asyncio.run(TorchBroadcast(iter(WEIGHTS), group).send([receiver], 1, flush=False))
        assert set(receiver.tensors) == {name for name, _ in WEIGHTS}
    finally:
        group.close()
        receiver.close()


class Stuck:
    """An NCCL group in which one server takes no part: transfers never end until it is aborted."""

    def __init__(self, monkeypatch) -> None:
        self.aborted = threading.Event()
        self.ends: list[str] = []
        monkeypatch.setattr(broadcast, "join", lambda *args: self)
        monkeypatch.setattr(broadcast, "_broadcast", lambda group, tensors: self.aborted.wait(30))
        monkeypatch.setattr(c10d, "_abort_process_group", self._abort)
        monkeypatch.setattr(torch.distributed, "destroy_process_group", self._destroy)

    def _abort(self, group) -> None:
        self.ends.append("aborted")
        self.aborted.set()

    def _destroy(self, group) -> None:
        self.aborted.wait(30)  # it waits for what was sent
        self.ends.append("destroyed")


@pytest.mark.parametrize("trouble", ["refuses", "hangs", "cancelled"])
def test_over_nccl_a_broken_group_is_aborted_off_the_loop_and_the_next_publish_joins_anew(monkeypatch, trouble):
    stuck, group, calls, ticks = Stuck(monkeypatch), BroadcastGroup("nccl", wait=1.0), [], []

    class Server:
        member = "the same process"

        async def __call__(self, path, body):
            calls.append((path, body.get("group_name")))
            if path == "/update_weights_from_distributed":
                if trouble == "refuses":
                    raise UserError("no such tensor (status 400)")
                await asyncio.sleep(3600)

    async def tick():
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.01)

    async def publish():
        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0.05)
        sending = asyncio.create_task(TorchBroadcast(iter(WEIGHTS), group).send([Server()], 1, flush=False))
        if trouble == "cancelled":
            await asyncio.sleep(0.1)
            sending.cancel()
        await asyncio.wait([sending])
        ticking.cancel()
        return sending

    sending = asyncio.run(publish())
    if trouble == "cancelled":
        assert sending.cancelled()
    else:
        assert isinstance(sending.exception(), SamplerError) and "publishing version 1 over nccl" in str(sending.exception())
    assert stuck.ends == ["aborted"]
    assert max(after - before for before, after in itertools.pairwise(ticks)) < 5  # nothing stood still for it
    joined = [name for path, name in calls if path == "/init_weights_update_group"]
    assert [name for path, name in calls if path == "/destroy_weights_update_group"] == joined
    assert group.group is None

    asyncio.run(group.join([Server()]))
    assert len({name for path, name in calls if path == "/init_weights_update_group"}) == 2
    group.close()
    assert stuck.ends == ["aborted", "destroyed"]


@pytest.mark.parametrize("where", ["a server", "the broadcast"])
def test_a_group_is_gone_while_the_error_that_ended_it_is_still_held(monkeypatch, where):
    """gloo's sockets close with the group.

    So a server that waits in the collective gets an error, and can load from a directory.
    """

    class Group:
        pass

    made = []

    def join(*args):
        group = Group()
        made.append(weakref.ref(group))
        return group

    def fails(group, tensors):
        if where == "the broadcast":
            raise RuntimeError("connection closed by peer")

    async def post(path, body):
        if path == "/update_weights_from_distributed" and where == "a server":
            raise ServerLost("it died")

    post.member = "a server"
    monkeypatch.setattr(broadcast, "join", join)
    monkeypatch.setattr(broadcast, "_broadcast", fails)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda group: None)
    with pytest.raises(SamplerError) as held:
        asyncio.run(TorchBroadcast(iter(WEIGHTS), BroadcastGroup("gloo")).send([post], 1, flush=False))
    gc.collect()
    assert held.value.__cause__ is not None and [reference() for reference in made] == [None]


@pytest.mark.timeout(60)
def test_a_process_ends_also_where_what_was_sent_never_does(monkeypatch):
    """torch may wait for a server that never joins a communicator, and ignore the abort."""
    monkeypatch.setattr(broadcast, "END_TIMEOUT", 0.2)
    monkeypatch.setattr(broadcast, "join", lambda *args: object())
    over = threading.Event()

    def waits(*args):
        over.wait()

    monkeypatch.setattr(broadcast, "_broadcast", waits)
    monkeypatch.setattr(broadcast, "_end", waits)

    async def refuses(path, body):
        if path == "/update_weights_from_distributed":
            raise UserError("no such tensor (status 400)")

    refuses.member = "a server"
    with pytest.raises(SamplerError, match="no such tensor"):
        asyncio.run(TorchBroadcast(iter(WEIGHTS), BroadcastGroup("nccl")).send([refuses], 1, flush=False))
    over.set()


def test_a_group_that_does_not_end_is_left_as_it_is(monkeypatch, caplog):
    monkeypatch.setattr(broadcast, "END_TIMEOUT", 0.2)
    over = threading.Event()
    monkeypatch.setattr(broadcast, "_end", lambda *args, **kwargs: over.wait(30))
    group = BroadcastGroup("nccl", group=object(), name="g")

    async def leave():
        await group.leave(broken=True)
        over.set()

    asyncio.run(leave())
    assert group.group is None and "did not end within 0.2 s" in caplog.text


def _listening():
    return {connection.laddr for connection in psutil.Process().net_connections() if connection.status == "LISTEN"}


@pytest.mark.parametrize("served", ["the ranks' store", "the servers' group"])
def test_stores_listen_on_loopback_alone(monkeypatch, served):
    """torch by itself listens on all interfaces, and whoever reaches a store can end or mislead the run."""
    before = _listening()
    if served == "the ranks' store":
        monkeypatch.setenv("MASTER_PORT", str(free_port(LOOPBACK)))
        held = distributed._store(0, 1, datetime.timedelta(seconds=20))
    else:
        held = broadcast.join("gloo", broadcast.listen_at(LOOPBACK), 0, 1, f"alone {os.getpid()}")
    listening = {
        connection.laddr for connection in psutil.Process().net_connections() if connection.status == "LISTEN"
    } - before
    assert listening and {address.ip for address in listening} == {LOOPBACK}
    del held


def test_an_error_of_a_transfer_is_of_those_who_wait_and_reported_to_no_others():
    """A server that dies fails the request to it first, and then the transfer that ran beside it."""
    reported = []

    def fail():
        raise RuntimeError("connection reset")

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        with pytest.raises(RuntimeError, match="connection reset"):
            await broadcast._in_thread(fail)
        await asyncio.wait({broadcast._in_thread(fail)})
        gc.collect()

    asyncio.run(main())
    assert reported == []
