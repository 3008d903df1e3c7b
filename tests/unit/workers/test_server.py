"""Workers in other processes (here: tasks with sockets between them) keep the invariants that one
process keeps.
"""

import asyncio
import contextlib
import dataclasses
import random
from collections import Counter

import numpy as np
import pytest

from rljax.engines.fake.sampler import Trouble
from rljax.errors import RequestLost, RewardError, SamplerError, TooManyFailures, UserError
from rljax.loop import Loop
from rljax.messaging.framing import Message
from rljax.metrics.mean import Mean
from rljax.rollout.buffer import ticket_from_json
from rljax.rollout.producer import RetryingGenerator
from rljax.testing.harness import MemorySink, RememberingLearner, Repeat, make_run, settle, worker
from tests.unit.workers.runs import Lines, bare_connection, connect, greet, group_message, is_once, leases_of, train_beside

pytestmark = pytest.mark.usefixtures("short_pauses")

ASYNC = {"rollout.max_head_offpolicyness": 2, "total_train_epochs": 2}


@pytest.mark.parametrize("own", [False, True], ids=["the trainer's sampler", "samplers of their own"])
def test_resume_equivalence_with_workers_and_without(tmp_path, own):
    """Synchronous: which process ran an episode decides nothing, to the bit; own weights are those
    of the step.
    """
    overrides = {"total_train_epochs": 2, "actor.recompute_logprob": False, "actor.use_decoupled_loss": False}
    _, alone, expected = train_beside(tmp_path / "alone", overrides)
    two = [lambda workdir: worker(workdir, own_sampler=own)] * 2
    _, outcome, lines = train_beside(tmp_path / "workers", overrides, *two)
    assert outcome == alone and outcome.step == 6
    assert lines.compared() == expected.compared()
    assert {line["rollout/workers"] for line in lines.sink.steps.values()} == {2.0}
    assert not (tmp_path / "workers" / "server").exists() and not (tmp_path / "workers" / "workers.json").exists()


def test_exactly_once_within_the_lag_bound_with_workers_of_both_kinds(tmp_path):
    workers = [lambda workdir, own=own: worker(workdir, own_sampler=own, trouble=_trouble(own)) for own in (False, True, True)]
    run, outcome, _ = train_beside(tmp_path, ASYNC, *workers, n_prompts=40, trouble=_trouble(9))
    assert outcome.step == 20 and is_once(run, 40, 2)
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
    run, outcome, lines = train_beside(tmp_path, overrides, mortal, mortal, n_prompts=60, trouble=_trouble(2))
    assert outcome.step == 30 and is_once(run, 60, 2) and run.engine.learner.most_lag <= 2
    assert sum(line.get("rollout/lost/worker_lost", 0) for line in lines.sink.steps.values()) > 0


def test_exactly_once_for_a_group_that_is_sent_twice(tmp_path):
    async def twice(workdir):
        connection = await bare_connection(workdir)
        async for ticket in leases_of(connection):
            for _ in range(2):
                connection.send(group_message(ticket))
        connection.close()

    run, outcome, lines = train_beside(
        tmp_path, {"rollout.max_head_offpolicyness": 99, "train_dataset.batch_size": 2}, twice, n_prompts=8
    )
    assert outcome.step == 4 and is_once(run, 8, 1)
    late = sum(line.get("rollout/late_groups", 0) for line in lines.sink.steps.values())
    assert 6 <= late <= 8  # those of the last batch may come after the end


class Fails(Repeat):
    async def episode(self, sampler, prompt, params, seed):
        if prompt.uid == "0/5":
            raise RewardError("no reward")
        if prompt.uid == "0/6":
            raise ZeroDivisionError("in the workflow")
        return await super().episode(sampler, prompt, params, seed)


def test_failures_are_counted_by_kind_in_workers_and_dropped_as_at_home(tmp_path):
    run, outcome, _ = train_beside(tmp_path, {"recover.max_prompt_failures": 2}, lambda w: worker(w, workflow=Fails()))
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
        train_beside(tmp_path, {"recover.max_consecutive_failures": 5}, lambda w: worker(w, workflow=AlwaysFails()))
    assert 'raise ZeroDivisionError(f"in the reward of {prompt.uid}")' in "".join(info.value.__cause__.__notes__)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["0-failed"]


def test_a_worker_is_leased_no_more_than_its_capacity_and_gets_more_as_it_finishes(tmp_path):
    most = []

    async def slow(workdir):
        connection, told = await connect(workdir)
        await greet(connection, told["token"], capacity=3)
        leased = []
        while len(most) < 10:
            message = await connection.receive()
            if message.kind == "lease":
                leased.append(ticket_from_json(message.fields["ticket"]))
                most.append(len(leased))
            if len(leased) == 3:
                await asyncio.sleep(0.02)  # time for a fourth to come
                connection.send(group_message(leased.pop(0)))
        connection.abort()
        await worker(workdir)

    overrides = {"rollout.max_head_offpolicyness": 50, "total_train_steps": 3, "train_dataset.batch_size": 4}
    _, outcome, _ = train_beside(tmp_path, overrides, slow, n_prompts=40)
    assert outcome.step == 3 and max(most) == 3 and len(most) == 10


def test_a_fault_of_ours_ends_the_run_and_hangs_nobody(tmp_path, monkeypatch):
    def settle(self, job, worker, message):
        raise RuntimeError("a fault")

    async def attached(workdir):
        with pytest.raises(UserError, match="the connection ended"):
            await worker(workdir)

    monkeypatch.setattr("rljax.workers.server.WorkerServer._settle", settle)
    with pytest.raises(RuntimeError, match="a fault"):
        train_beside(tmp_path, {}, attached)


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


class OutOfBoundsOnce(RememberingLearner):
    """A learner whose second update is out of bounds."""

    oldest: tuple[int, ...] = ()  # oldest version of each update

    def update(self, batch):
        self.oldest += (int(batch.versions[batch.loss_mask].min()),)
        return super().update(batch) | {"ppo_actor/update/approx_kl": Mean(5.0 if len(self.oldest) == 2 else 0.0, 1)}


def test_groups_of_leases_from_before_a_rollback_are_late_though_their_prompts_are_leased_again(tmp_path):
    """A worker that is at two groups when its leases are revoked, and sends them all the same."""

    async def stubborn(workdir):
        connection, held, sent = await bare_connection(workdir), [], 0
        while (message := await connection.receive()).kind != "end":
            if message.kind == "lease":
                held.append(ticket_from_json(message.fields["ticket"]))
                while held and (sent < 8 or len(held) > 4):  # two batches, and never with fewer than four in hand until then
                    ticket, sent = held.pop(0), sent + 1
                    connection.send(group_message(ticket, version=max(0, -(-sent // 4) - 1)))
            elif message.kind == "revoke":
                await settle()  # a server that did not wait for the answer would lease the same prompts again now
                for ticket in held:
                    connection.send(group_message(ticket, version=1))
                connection.send(Message("revoked"))
                break
        while (message := await connection.receive()).kind != "end":
            if message.kind == "lease":
                connection.send(group_message(ticket_from_json(message.fields["ticket"]), version=3))

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

    assert asyncio.run(scenario()).finished and is_once(run, 12, 1)
    assert run.engine.learner.oldest[:2] == (0, 1) and min(run.engine.learner.oldest[2:]) == 3
    assert sum(line.get("rollout/late_groups", 0) for line in lines.sink.steps.values()) >= 1
