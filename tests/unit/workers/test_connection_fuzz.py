"""Whatever a worker sends, the trainer goes on: it is taken, ignored, or the worker is dropped."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rljax.messaging import framing
from rljax.messaging.framing import Message
from rljax.metrics.accumulator import Accumulator
from rljax.metrics.mean import Mean, flatten
from rljax.rollout.buffer import Buffer, Limits
from rljax.rollout.journal import Journals
from rljax.rollout.result import Result
from rljax.rollout.tracker import PromptTracker
from rljax.testing.harness import Numbers, make_config
from rljax.types import Finish, Trajectory
from rljax.workers.attached import AttachedWorker
from rljax.workers.connection import PeerError
from rljax.workers.messages import encode_group
from rljax.workers.server import Job, WorkerServer

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**40) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KINDS = st.sampled_from(["group", "generate", "cancel", "heartbeat", "hello", "file", ""])
CONFIG = make_config({"rollout.max_head_offpolicyness": 2})


def _sound(ticket):
    mask = np.array([False, True, True])
    arrays = (np.arange(3, dtype=np.int32), mask, np.zeros(3, np.float32), np.where(mask, 0, -1).astype(np.int32))
    result = Result((Trajectory(*arrays, 1.0, {"right": 1.0}, Finish.STOP),), (), wanted=True)
    return encode_group(ticket, result, {"timeperf/reward": Mean(1.0, 1.0, 1.0, 1.0)}, {"rollout/lost/server_lost": 1})


def _arrived(message):
    """Sends a message over a connection and returns it as received."""
    ((got, _),) = framing.scan(b"".join(framing.encode(message)))
    return got


def _bytes_array(data):
    return np.frombuffer(data, np.uint8)


def _leaves(tree, path=()):
    """The path of every node below the root."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from _leaves(child, (*path, key))


def _replaced(tree, path, value):
    tree = json.loads(json.dumps(tree))
    node = tree
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return tree


class _Told:
    """A connection and a sampler that take anything."""

    def send(self, *_):
        pass

    async def generate(self, request):
        raise AssertionError("cancelled before it begins")


def _take(path, message_of):
    """Handles a message from a worker with one lease.

    Returns server, buffer, accumulator, and whether the worker was dropped.
    """

    async def scenario():
        buffer, accumulator = Buffer(Numbers(4), Limits(2, 2, 4, 4, None)), Accumulator()
        tracker = PromptTracker(
            CONFIG, buffer=buffer, journals=Journals(path), recovered={}, accumulator=accumulator, beat=lambda what: None
        )
        server = WorkerServer(CONFIG, path, token="t", scratch=path / "s", address_file=path / "d")
        server._job = job = Job(buffer, tracker, _Told(), accumulator, None)
        worker = AttachedWorker(_Told(), "w", False, 1, ready=True)
        server._workers.append(worker)
        server._lease(job)
        (ticket,) = worker.leases.values()
        dropped = False
        try:
            server._handle(worker, _arrived(message_of(ticket)))
        except PeerError:
            dropped = True
        for task in tuple(server._tasks):
            task.cancel()
        await asyncio.gather(*server._tasks, return_exceptions=True)
        assert server._error is None
        return server, buffer, accumulator, dropped

    return asyncio.run(scenario())


def _usable(server, buffer, accumulator):
    """Nothing that was taken breaks what comes after: metrics, batches."""
    json.dumps(flatten(server.take_metrics() | accumulator.drain()))
    for entry in buffer.entries():
        for t in entry.group.trajectories:
            assert t.loss_mask.any() and np.isfinite(t.behavior_logp[t.loss_mask]).all() and t.token_ids.min() >= 0
            assert np.isfinite(t.reward) and sum(t.components.values()) is not None
    assert buffer.running + buffer.ready + buffer.counts["rejected"] + buffer.counts["again"] >= 1


@given(
    kind=KINDS,
    fields=st.dictionaries(st.sampled_from(["id", "index", "attempt", "request", "params"]), JSON),
    arrays=st.dictionaries(st.sampled_from(["token_ids", "prompt_ids", "piece"]), st.binary().map(_bytes_array)),
)
def test_any_message(tmp_path_factory, kind, fields, arrays):
    server, buffer, accumulator, _ = _take(tmp_path_factory.getbasetemp(), lambda ticket: Message(kind, fields, arrays))
    assert buffer.running == 1 and not buffer.ready  # nobody else's lease is touched
    _usable(server, buffer, accumulator)


@given(data=st.data(), value=JSON)
def test_an_almost_sound_group_is_taken_whole_or_the_worker_is_dropped(tmp_path_factory, data, value):
    fields = _sound(SimpleNamespace(index=0, attempt=0)).fields
    fields = json.loads(json.dumps(fields))
    path = data.draw(st.sampled_from(sorted(_leaves(fields), key=repr)))

    def message_of(ticket):
        sound = _sound(ticket)
        return Message("group", _replaced(sound.fields, path, value), sound.arrays)

    server, buffer, accumulator, dropped = _take(tmp_path_factory.getbasetemp(), message_of)
    assert not (dropped and buffer.ready)
    _usable(server, buffer, accumulator)


@given(data=st.data())
def test_arrays_that_are_not_those_of_the_group(tmp_path_factory, data):
    def message_of(ticket):
        sound = _sound(ticket)
        name = data.draw(st.sampled_from(sorted(sound.arrays)))
        array = sound.arrays[name]
        at = data.draw(st.integers(0, array.nbytes - 1))
        flipped = bytearray(array.tobytes())
        flipped[at] ^= 1 << data.draw(st.integers(0, 7))
        if array.dtype == bool:
            flipped[at] &= 1
        changed = [np.frombuffer(flipped, array.dtype), array[: len(array) - 1], np.append(array, array[:1]), array[None]]
        return Message("group", sound.fields, sound.arrays | {name: data.draw(st.sampled_from(changed))})

    _usable(*_take(tmp_path_factory.getbasetemp(), message_of)[:3])


def test_a_sound_group_is_taken(tmp_path):
    server, buffer, accumulator, dropped = _take(tmp_path, lambda ticket: _sound(ticket))
    assert not dropped and buffer.ready == 1 and not buffer.running
    assert accumulator.drain()["rollout/lost/server_lost"].value == 1
    assert server.take_metrics()["timeperf/reward"].value == 1
