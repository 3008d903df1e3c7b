"""Weights cut into buckets: contents, memory, and the fields that come with the last one."""

from __future__ import annotations

import asyncio
import weakref

import pytest

torch = pytest.importorskip("torch")

from rljax.engines.cuda.transports import buckets as buckets_module  # noqa: E402
from rljax.engines.cuda.transports.buckets import buckets_of, send_buckets  # noqa: E402
from rljax.engines.http.remote import ServerLost  # noqa: E402
from rljax.errors import UserError  # noqa: E402

SIZES = {"a": 24, "b": 8, "c": 48, "d": 4}  # bytes


def tensors():
    return ((name, torch.zeros(size, dtype=torch.uint8)) for name, size in SIZES.items())


@pytest.mark.parametrize("limit", [1, 32, 56, 1000])
def test_buckets_hold_what_fits_and_at_least_one_tensor(limit):
    buckets = [([name for name, _ in bucket], last) for bucket, last in buckets_of(tensors(), limit)]
    assert [name for names, _ in buckets for name in names] == list(SIZES)
    assert all(len(names) == 1 or sum(map(SIZES.__getitem__, names)) <= limit for names, _ in buckets)
    assert [last for _, last in buckets] == [False] * (len(buckets) - 1) + [True]


def test_no_more_than_a_bucket_and_the_tensor_behind_it_is_held():
    alive: weakref.WeakSet[object] = weakref.WeakSet()
    held = []

    def gathered():
        for _ in range(12):
            tensor = torch.zeros(10, dtype=torch.uint8)
            alive.add(tensor)
            yield "x", tensor
            del tensor

    async def send(bucket, label):
        for _ in range(500):  # the thread that gathered may let go of its last result a moment later
            if len(alive) <= len(bucket) + 1:
                break
            await asyncio.sleep(0.01)
        held.append((len(bucket), len(alive)))

    asyncio.run(send_buckets([], buckets_of(gathered(), 30), 1, flush=False, send=send))
    assert [size for size, _ in held] == [3, 3, 3, 3]
    assert all(alive_then <= size + 1 for size, alive_then in held)


@pytest.mark.parametrize("flush", [True, False])
def test_the_version_and_the_flush_come_with_the_last(flush):
    labels = []

    async def send(bucket, label):
        labels.append(label)

    asyncio.run(send_buckets([], buckets_of(tensors(), 32), 7, flush=flush, send=send))
    assert labels == [{"flush_cache": False}] * 2 + [{"weight_version": "7", "flush_cache": flush}]


def test_a_session_that_a_broken_publish_left_open_is_ended_first():
    calls = []

    async def post(path, body):
        calls.append(path)
        if calls == ["/begin_weight_update"]:
            raise UserError("a weight-update session is already open; call end_weight_update() first (status 400)")

    async def send(bucket, label):
        calls.append("bucket")

    asyncio.run(send_buckets([post], buckets_of(tensors(), 1000), 1, flush=False, send=send))
    begin, end = "/begin_weight_update", "/end_weight_update"
    assert calls == [begin, end, begin, "bucket", end]


@pytest.mark.parametrize("broken", ["the learner", "a server"])
def test_a_publish_that_fails_leaves_no_session_open_and_does_not_wait_for_servers_that_hang(broken, monkeypatch):
    monkeypatch.setattr(buckets_module, "END_TIMEOUT", 0.1)
    ended = []

    def server(index):
        async def post(path, body):
            if path == "/end_weight_update":
                if index == 1:
                    raise ServerLost("it died")
                if index == 2:
                    await asyncio.sleep(3600)  # it waits for the others in a collective
                ended.append(index)

        return post

    def gathered():
        yield from tensors()
        raise RuntimeError("no memory")

    async def send(bucket, label):
        if broken == "a server":
            raise ServerLost("it died")

    with pytest.raises(RuntimeError if broken == "the learner" else ServerLost, match=r"no memory|it died"):
        posts = [server(index) for index in range(4)]
        asyncio.run(send_buckets(posts, buckets_of(gathered(), 32), 1, flush=False, send=send))
    assert ended == [0, 3]
