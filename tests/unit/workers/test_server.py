"""Workers in other processes (here: tasks with sockets between them) keep the invariants that one
process keeps.
"""

import asyncio
import contextlib
import dataclasses
import json
import random
import struct
from collections import Counter

import numpy as np
import pytest

from rljax.engines.fake.sampler import Trouble
from rljax.errors import RequestLost, RewardError, SamplerError, TooManyFailures, UserError
from rljax.loop import Loop
from rljax.messaging import framing, handshake
from rljax.messaging.framing import UNPROVED, Message
from rljax.messaging.handshake import HandshakeError, Refused, connect_async
from rljax.metrics.mean import Mean
from rljax.rollout.buffer import ticket_from_json
from rljax.rollout.producer import RetryingGenerator
from rljax.rollout.result import Result
from rljax.testing.harness import TOKEN, MemorySink, RememberingLearner, Repeat, make_run, settle, worker
from rljax.types import Finish, Trajectory
from rljax.workers import connection as connections
from rljax.workers.client import work
from rljax.workers.connection import PROTOCOL, Connection, PeerError, host_and_port
from rljax.workers.files import plain_name
from rljax.workers.messages import encode_group

ASYNC = {"rollout.max_head_offpolicyness": 2, "total_train_epochs": 2}
NOT_COMPARED = ("timeperf/", "perf/", "rollout/wait/", "rollout/workers")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("rljax.rollout.producer.FIRST_DELAY", 1e-4)


class Lines:
    """The metrics of a run."""

    def __init__(self):
        self.sink = None

    def __call__(self, first_step):
        self.sink = MemorySink(first_step)
        return self.sink

    def compared(self):
        return {
            step: {
                k: repr(v)
                for k, v in line.items()
                if not k.startswith(("timeperf/", "perf/", "rollout/wait/", "rollout/workers"))
            }
            for step, line in self.sink.steps.items()
        }


def _run(workdir, overrides, *workers, n_prompts=12, **options):
    """Trains with workers (coroutine functions of the workdir) beside it; returns the run and its
    lines.
    """
    lines = Lines()
    run = make_run(workdir, overrides, n_prompts=n_prompts, sink=lines, by_workers=bool(workers), **options)

    async def scenario():
        beside = [asyncio.create_task(attached(workdir)) for attached in workers]
        try:
            return await asyncio.wait_for(Loop(run).run(), 60)
        finally:
            for task in beside:
                if not task.done():
                    await asyncio.wait([task], timeout=5)
                task.cancel()
            for result in await asyncio.gather(*beside, return_exceptions=True):
                if isinstance(result, Exception) and not isinstance(result, PeerError | OSError):
                    raise result

    outcome = asyncio.run(scenario())
    return run, outcome, lines


def _once(run, n_prompts, epochs):
    return {uid: len(steps) for uid, steps in run.engine.learner.trained.items()} == {
        f"{epoch}/{index}": 1 for epoch in range(epochs) for index in range(n_prompts)
    }


async def _attached(workdir):
    """A bare connection, past the handshake."""
    connection, told = await _connected(workdir)
    await _greet(connection, told["token"])
    assert (await connection.receive()).kind == "config"
    return connection


async def _greet(connection, token, **changes):
    hello = {"protocol": PROTOCOL, "own_sampler": False, "name": "bare", "capacity": None} | changes
    await connect_async(lambda: connection.receive(UNPROVED), connection.send, token, hello)


def _group(ticket, version=0):
    return encode_group(ticket, _made(ticket, version), {}, {})


async def _connected(workdir):
    address_file = workdir / "workers.json"
    while not address_file.exists() or not address_file.read_text():
        await asyncio.sleep(0.01)
    told = json.loads(address_file.read_text())
    host, port = host_and_port(told["address"], "test")
    return Connection(*await asyncio.open_connection(host, port)), told


async def _leases(connection):
    while True:
        message = await connection.receive()
        if message.kind == "lease":
            yield ticket_from_json(message.fields["ticket"])
        elif message.kind == "end":
            return


@pytest.mark.parametrize("own", [False, True], ids=["the trainer's sampler", "samplers of their own"])
def test_resume_equivalence_with_workers_and_without(tmp_path, own):
    """Synchronous: which process ran an episode decides nothing, to the bit; own weights are those
    of the step.
    """
    overrides = {"total_train_epochs": 2, "actor.recompute_logprob": False, "actor.use_decoupled_loss": False}
    _, alone, expected = _run(tmp_path / "alone", overrides)
    two = [lambda workdir: worker(workdir, own_sampler=own)] * 2
    _, outcome, lines = _run(tmp_path / "workers", overrides, *two)
    assert outcome == alone and outcome.step == 6
    assert lines.compared() == expected.compared()
    assert {line["rollout/workers"] for line in lines.sink.steps.values()} == {2.0}
    assert not (tmp_path / "workers" / "server").exists() and not (tmp_path / "workers" / "workers.json").exists()


def test_exactly_once_within_the_lag_bound_with_workers_of_both_kinds(tmp_path):
    workers = [lambda workdir, own=own: worker(workdir, own_sampler=own, trouble=_trouble(own)) for own in (False, True, True)]
    run, outcome, _ = _run(tmp_path, ASYNC, *workers, n_prompts=40, trouble=_trouble(9))
    assert outcome.step == 20 and _once(run, 40, 2)
    assert 0 < run.engine.learner.most_lag <= 2


def _trouble(seed):
    return Trouble(np.random.default_rng(int(seed)), delay=0.003)


def test_exactly_once_though_workers_die_with_leases(tmp_path):
    async def mortal(workdir):
        """Killed and replaced, again and again: its leases are gone with it.

        The last one lives.
        """
        dice = random.Random(3)
        for _ in range(25):
            task = asyncio.create_task(worker(workdir, own_sampler=dice.random() < 0.5, trouble=_trouble(1)))
            _, running = await asyncio.wait([task], timeout=dice.uniform(0.02, 0.15))
            if not running:
                return
            task.cancel()
            await asyncio.wait([task])
        await worker(workdir)

    overrides = ASYNC | {"recover.max_consecutive_failures": 1000}  # a slow machine finishes no group between many deaths
    run, outcome, lines = _run(tmp_path, overrides, mortal, mortal, n_prompts=60, trouble=_trouble(2))
    assert outcome.step == 30 and _once(run, 60, 2) and run.engine.learner.most_lag <= 2
    assert sum(line.get("rollout/lost/worker_lost", 0) for line in lines.sink.steps.values()) > 0


def _made(ticket, version=0):
    ids = np.array([1 + int(ticket.prompt.uid.split("/")[0]), 41, 81 + ticket.prompt.fields["index"], 0], np.int32)
    mask = np.array([False, False, False, True])
    versions = np.where(mask, version, -1).astype(np.int32)
    trajectory = Trajectory(ids, mask, np.where(mask, -4.0, 0).astype(np.float32), versions, 1.0, {}, Finish.STOP)
    return Result((trajectory,), (), wanted=True)


def test_exactly_once_for_a_group_that_is_sent_twice(tmp_path):
    async def twice(workdir):
        connection = await _attached(workdir)
        async for ticket in _leases(connection):
            for _ in range(2):
                connection.send(_group(ticket))
        connection.close()

    run, outcome, lines = _run(
        tmp_path, {"rollout.max_head_offpolicyness": 99, "train_dataset.batch_size": 2}, twice, n_prompts=8
    )
    assert outcome.step == 4 and _once(run, 8, 1)
    late = sum(line.get("rollout/late_groups", 0) for line in lines.sink.steps.values())
    assert 6 <= late <= 8  # those of the last batch may come after the end


def test_a_group_of_a_worker_that_was_given_up_comes_too_late(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "SILENCE", 0.3)
    monkeypatch.setattr(connections, "HEARTBEAT", 0.05)
    taken = []

    async def silent(workdir):
        connection = await _attached(workdir)
        async for ticket in _leases(connection):
            taken.append(ticket)
            if len(taken) == 4:
                break
        await asyncio.sleep(1.0)  # no beat
        for ticket in taken:
            connection.send(_group(ticket))
        with pytest.raises(PeerError):
            await connection.receive() and await connection.receive()

    async def later(workdir):
        while len(taken) < 4:
            await asyncio.sleep(0.01)
        await worker(workdir, patience=30.0)  # whom a busy machine may make silent too

    run, outcome, _ = _run(tmp_path, {}, silent, later)
    assert outcome.step == 3 and _once(run, 12, 1)


HARMS = ["a future version", "arrays of another group", "garbage", "a changed byte", "an unknown message", "no request"]


@pytest.mark.parametrize("harm", HARMS)
def test_a_worker_that_makes_no_sense_is_dropped_and_the_run_goes_on(tmp_path, harm, caplog):
    async def harmful(workdir):
        connection = await _attached(workdir)
        async for ticket in _leases(connection):
            group = _group(ticket)
            match harm:
                case "a future version":
                    connection.send(_group(ticket, version=7))
                case "arrays of another group":
                    connection.send(dataclasses.replace(group, arrays={n: a[:-1] for n, a in group.arrays.items()}))
                case "garbage":
                    connection._writer.write(b"GET / HTTP/1.1\r\n\r\n" * 10)
                case "a changed byte":
                    data = bytearray(b"".join(framing.encode(group)))
                    data[-1] ^= 1
                    connection._writer.write(data)
                case "an unknown message":
                    connection.send(Message("exec", {"code": "1"}))
                case "no request":
                    fields = {"id": 0, "request": "r", "params": {"max_new_tokens": "many"}, "seed": 0}
                    connection.send(Message("generate", fields, {"prompt_ids": np.zeros(3, np.uint8)}))
            break
        with contextlib.suppress(PeerError):
            while True:
                await connection.receive()
        await worker(workdir)  # and a sound one takes over

    run, outcome, _ = _run(tmp_path, {}, harmful)
    assert outcome.step == 3 and _once(run, 12, 1)
    assert "worker bare is gone" in caplog.text


def test_nobody_gets_in_without_the_token_and_nothing_large_is_read_before(tmp_path):
    async def strangers(workdir):
        connection, told = await _connected(workdir)
        with pytest.raises(HandshakeError, match="does not know this token"):
            await _greet(connection, "guess")
        connection, _ = await _connected(workdir)
        with pytest.raises(Refused, match="protocol"):
            await _greet(connection, TOKEN, protocol=PROTOCOL + 1)
        for raw in (
            b"".join(framing.encode(Message("hello", {"name": "x" * UNPROVED.header}))),
            framing.PREFIX.pack(framing.MAGIC, framing.VERSION, 2, 1 << 30, 0) + b"{}",
            b"".join(framing.encode(Message("group"))),
            struct.pack("<21s", b"GET / HTTP/1.1"),
        ):
            connection, _ = await _connected(workdir)
            connection._writer.write(raw)
            assert (await connection.receive()).kind == "challenge"
            with pytest.raises(PeerError):
                while (await connection.receive()).kind == "denied":
                    pass
        with pytest.raises(UserError, match=r"--attach: .* does not know this token \(set RLJAX_TOKEN to that of the run"):
            await work(lambda: (told["address"], "guess"), None)
        await worker(workdir)

    assert _run(tmp_path, {}, strangers)[1].step == 3


class Fails(Repeat):
    async def episode(self, sampler, prompt, params, seed):
        if prompt.uid == "0/5":
            raise RewardError("no reward")
        if prompt.uid == "0/6":
            raise ZeroDivisionError("in the workflow")
        return await super().episode(sampler, prompt, params, seed)


def test_failures_are_counted_by_kind_in_workers_and_dropped_as_at_home(tmp_path):
    run, outcome, _ = _run(tmp_path, {"recover.max_prompt_failures": 2}, lambda w: worker(w, workflow=Fails()))
    assert sorted(run.engine.learner.trained) == sorted(f"0/{i}" for i in range(12) if i not in (5, 6))
    assert outcome.finished
    told = run.worker_server.take_metrics()
    assert "rollout/workers" in told


class AlwaysFails:
    async def episode(self, sampler, prompt, params, seed):
        raise ZeroDivisionError(f"in the reward of {prompt.uid}")


def test_failing_workflow_in_workers_ends_the_run_with_its_traceback(tmp_path):
    line = "5 groups failed in a row; the first: workflow_error: EpisodeError: ZeroDivisionError: in the reward of 0/"
    with pytest.raises(TooManyFailures, match=line) as info:
        _run(tmp_path, {"recover.max_consecutive_failures": 5}, lambda w: worker(w, workflow=AlwaysFails()))
    assert 'raise ZeroDivisionError(f"in the reward of {prompt.uid}")' in "".join(info.value.__cause__.__notes__)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["0-failed"]


def test_a_worker_is_leased_no_more_than_its_capacity_and_gets_more_as_it_finishes(tmp_path):
    most = []

    async def slow(workdir):
        connection, told = await _connected(workdir)
        await _greet(connection, told["token"], capacity=3)
        leased = []
        while len(most) < 10:
            message = await connection.receive()
            if message.kind == "lease":
                leased.append(ticket_from_json(message.fields["ticket"]))
                most.append(len(leased))
            if len(leased) == 3:
                await asyncio.sleep(0.02)  # time for a fourth to come
                connection.send(_group(leased.pop(0)))
        connection.abort()
        await worker(workdir)

    overrides = {"rollout.max_head_offpolicyness": 50, "total_train_steps": 3, "train_dataset.batch_size": 4}
    _, outcome, _ = _run(tmp_path, overrides, slow, n_prompts=40)
    assert outcome.step == 3 and max(most) == 3 and len(most) == 10


def test_a_fault_of_ours_ends_the_run_and_hangs_nobody(tmp_path, monkeypatch):
    def settle(self, job, worker, message):
        raise RuntimeError("a fault")

    async def attached(workdir):
        with pytest.raises(UserError, match="the connection ended"):
            await worker(workdir)

    monkeypatch.setattr("rljax.workers.server.WorkerServer._settle", settle)
    with pytest.raises(RuntimeError, match="a fault"):
        _run(tmp_path, {}, attached)


class Impatient(Repeat):
    """Gives up on its first requests."""

    def __init__(self, times):
        super().__init__()
        self.left = times

    async def episode(self, sampler, prompt, params, seed):
        if self.left:
            self.left -= 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(super().episode(sampler, prompt, params, seed), 0.05)
            raise SamplerError("gave up")
        return await super().episode(sampler, prompt, params, seed)


def test_requests_that_nobody_waits_for_any_more_are_taken_back(tmp_path):
    started, cancelled = [], []
    run = make_run(tmp_path, {}, by_workers=True)
    generate = run.engine.sampler.generate

    async def never_answers(request):
        if len(started) >= 16:
            return await generate(request)
        started.append(request.id)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(request.id)
            raise

    run.engine.sampler.generate = never_answers
    taken_back = []  # how many when the first step was done: the worker is still there

    class Sink(MemorySink):
        def write(self, step, metrics):
            taken_back.append(len(cancelled))

    run = dataclasses.replace(run, open_sinks=Sink)

    async def scenario():
        beside = asyncio.create_task(worker(tmp_path, workflow=Impatient(16)))
        outcome = await asyncio.wait_for(Loop(run).run(), 30)
        await asyncio.wait_for(beside, 10)
        return outcome

    assert asyncio.run(scenario()).step == 3
    assert taken_back[0] == 16 and sorted(started) == sorted(cancelled)


def test_nested_retries_are_not_multiplied_by_a_worker(tmp_path):
    """The trainer's sampler retries by itself; the worker doesn't multiply its attempts."""
    run, asked = make_run(tmp_path, {}, by_workers=True), Counter()
    generate = run.engine.sampler.generate

    async def gives_up_once(request):
        asked[request.id] += 1
        if len(asked) == 1:
            raise RequestLost("lost after 4 attempts")
        return await generate(request)

    run.engine.sampler.generate = gives_up_once

    class Patient(Repeat):
        async def episode(self, sampler, prompt, params, seed):
            return await super().episode(
                RetryingGenerator(sampler, timeout=30, retries=3, lost=lost.append), prompt, params, seed
            )

    lost = []

    async def scenario():
        beside = asyncio.create_task(worker(tmp_path, workflow=Patient()))
        outcome = await asyncio.wait_for(Loop(run).run(), 30)
        await asyncio.wait_for(beside, 10)
        return outcome

    assert asyncio.run(scenario()).step == 3
    assert len(lost) == 1 and isinstance(lost[0], RequestLost) and set(asked.values()) == {1}


def test_false_listener_learns_no_secret_and_commands_no_worker(tmp_path):
    """Somebody listens at the trainer's address while it is away; the worker waits for the one
    that knows the token.
    """
    received = []

    async def false_trainer(reader, writer):
        connection = Connection(reader, writer)
        connection.send(Message("challenge", {"nonce": "0" * 32}))
        hello = await connection.receive()
        received.append(b"".join(framing.encode(hello)))
        connection.send(Message("welcome", {"proof": hello.fields["proof"]}))
        connection.send(Message("config", {"config": {}}))
        with contextlib.suppress(PeerError):
            received.append(await connection.receive())
        writer.close()

    async def scenario():
        server = await asyncio.start_server(false_trainer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        working = asyncio.create_task(worker(tmp_path, address=f"127.0.0.1:{port}", patience=30.0))
        while len(received) < 2:
            await asyncio.sleep(0.01)
        server.close()
        run = make_run(tmp_path, {"rollout.listen": f"127.0.0.1:{port}"}, by_workers=True)
        outcome = await asyncio.wait_for(Loop(run).run(), 60)
        await asyncio.wait_for(working, 10)
        return outcome

    assert asyncio.run(scenario()).step == 3
    assert len(received) >= 2 and all(isinstance(data, bytes) and TOKEN.encode() not in data for data in received)


def test_silent_strangers_keep_no_worker_out(tmp_path, monkeypatch):
    monkeypatch.setattr(handshake, "TIME_LIMIT", 5.0)

    async def crowd(workdir):
        silent = [await _connected(workdir) for _ in range(100)]
        await worker(workdir, patience=30.0)
        for connection, _ in silent:
            connection.abort()

    assert _run(tmp_path, {}, crowd)[1].step == 3


def test_a_worker_without_a_trainer_says_so_and_file_names_stay_in_their_directory():
    with pytest.raises(UserError, match=r"--attach: 127\.0\.0\.1:9: .*check that a run listens there"):
        asyncio.run(work(lambda: ("127.0.0.1:9", "t"), None))
    for address in ("nowhere", ":1", "host:", "host:99999"):
        with pytest.raises(UserError, match="HOST:PORT"):
            host_and_port(address, "--attach")
    for name in ("../x", "/etc/passwd", "a/b", "", ".hidden", 3, None):
        with pytest.raises(PeerError, match="not a file name"):
            plain_name(name)
    assert plain_name("model-00001-of-00002.safetensors")


class OutOfBoundsOnce(RememberingLearner):
    """A learner whose second update is out of bounds."""

    oldest: tuple[int, ...] = ()  # oldest version of each update

    def update(self, batch):
        self.oldest += (int(batch.versions[batch.loss_mask].min()),)
        return super().update(batch) | {"ppo_actor/update/approx_kl": Mean(5.0 if len(self.oldest) == 2 else 0.0, 1)}


def test_groups_of_leases_from_before_a_rollback_are_late_though_their_prompts_are_leased_again(tmp_path):
    """A worker that is at two groups when its leases are revoked, and sends them all the same."""

    async def stubborn(workdir):
        connection, held, sent = await _attached(workdir), [], 0
        while (message := await connection.receive()).kind != "end":
            if message.kind == "lease":
                held.append(ticket_from_json(message.fields["ticket"]))
                while held and (sent < 8 or len(held) > 4):  # two batches, and never with fewer than four in hand until then
                    ticket, sent = held.pop(0), sent + 1
                    connection.send(_group(ticket, version=max(0, -(-sent // 4) - 1)))
            elif message.kind == "revoke":
                await settle()  # a server that did not wait for the answer would lease the same prompts again now
                for ticket in held:
                    connection.send(_group(ticket, version=1))
                connection.send(Message("revoked"))
                break
        while (message := await connection.receive()).kind != "end":
            if message.kind == "lease":
                connection.send(_group(ticket_from_json(message.fields["ticket"]), version=3))

    lines = Lines()
    overrides = {
        "guard.action": "rollback",
        "guard.max_approx_kl": 1.0,
        "guard.patience": 1,
        "rollout.max_head_offpolicyness": 3,
    }
    run = make_run(tmp_path, overrides, n_prompts=12, sink=lines, by_workers=True)
    run.engine.learner = OutOfBoundsOnce(run.config, tmp_path / "model")

    async def scenario():
        beside = asyncio.create_task(stubborn(tmp_path))
        outcome = await asyncio.wait_for(Loop(run).run(), 60)
        await beside
        return outcome

    assert asyncio.run(scenario()).finished and _once(run, 12, 1)
    assert run.engine.learner.oldest[:2] == (0, 1) and min(run.engine.learner.oldest[2:]) == 3
    assert sum(line.get("rollout/late_groups", 0) for line in lines.sink.steps.values()) >= 1
