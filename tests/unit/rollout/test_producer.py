"""Requests end, failures have a kind, prompts are tried again or dropped as the config says."""

import asyncio
import contextlib
import dataclasses
from collections import Counter

import numpy as np
import pytest

from rljax.errors import RequestLost, RewardError, SamplerError, TooManyFailures, UserError, WorkerLost
from rljax.metrics.accumulator import Accumulator
from rljax.rollout.buffer import Buffer, Limits
from rljax.rollout.journal import Journals
from rljax.rollout.producer import MAX_DELAY, GroupRunner, Producer, RetryingGenerator, retry_delay
from rljax.rollout.result import Result
from rljax.rollout.tracker import PromptTracker
from rljax.testing.harness import Numbers, Repeat, example, make_run
from rljax.types import Request, SamplingParams


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("rljax.rollout.producer.FIRST_DELAY", 1e-4)


def _request():
    return Request("r", np.array([1], np.int32), SamplingParams(3), 1)


class Flaky:
    """Fails so many times, then answers; or never answers."""

    version = 0

    def __init__(self, failures, hang=False):
        self.left, self.calls, self.hang = failures, 0, hang

    async def generate(self, request):
        self.calls += 1
        if self.hang:
            await asyncio.Event().wait()
        if self.left:
            self.left -= 1
            raise SamplerError("gone")
        return "done"


@pytest.mark.parametrize("failures,retries", [(0, 0), (2, 2), (2, 5)])
def test_a_lost_request_is_sent_again_as_often_as_allowed(failures, retries):
    lost = []
    sampler = Flaky(failures)
    patient = RetryingGenerator(sampler, timeout=5, retries=retries, lost=lost.append)
    assert asyncio.run(patient.generate(_request())) == "done"
    assert sampler.calls == failures + 1 and len(lost) == failures


def test_after_that_it_fails():
    sampler, lost = Flaky(9), []
    with pytest.raises(SamplerError, match="gone"):
        asyncio.run(RetryingGenerator(sampler, timeout=5, retries=2, lost=lost.append).generate(_request()))
    assert sampler.calls == 3 == len(lost)


def test_a_request_that_is_never_answered_is_lost_too():
    sampler, lost = Flaky(0, hang=True), []
    with pytest.raises(SamplerError, match=r"no answer in 0\.02 s \(rollout\.request_timeout\)"):
        asyncio.run(RetryingGenerator(sampler, timeout=0.02, retries=1, lost=lost.append).generate(_request()))
    assert sampler.calls == 1 == len(lost)  # the time is that of all attempts


def test_a_sampler_that_retried_by_itself_is_not_asked_again():
    class GivesUp(Flaky):
        async def generate(self, request):
            self.calls += 1
            raise RequestLost("lost after 4 attempts")

    sampler, lost = GivesUp(0), []
    with pytest.raises(RequestLost):
        asyncio.run(RetryingGenerator(sampler, timeout=5, retries=3, lost=lost.append).generate(_request()))
    assert sampler.calls == 1 == len(lost)


def test_pauses_double_up_to_a_limit():
    assert retry_delay(0) == 0
    assert retry_delay(3) == 2 * retry_delay(2) == 4 * retry_delay(1)
    assert retry_delay(100) == MAX_DELAY


class Scripted(Repeat):
    """Prompts that fail by a table: uid -> error, always."""

    def __init__(self, errors):
        super().__init__()
        self.errors, self.seeds = errors, Counter()

    async def episode(self, sampler, prompt, params, seed):
        self.seeds[prompt.uid, seed] += 1
        if prompt.uid in self.errors:
            raise self.errors[prompt.uid]
        return await super().episode(sampler, prompt, params, seed)


def _produce(tmp_path, workflow, overrides, *, until, accept=lambda group: True, prompts=6, max_lag=99):
    run = make_run(tmp_path, {"train_dataset.batch_size": 2, "gconfig.n_samples": 2} | overrides, workflow=workflow)
    limits = Limits(max_lag=max_lag, batch_size=2, max_concurrent=4, prompts=prompts, groups=None)
    buffer, accumulator, log = Buffer(Numbers(prompts), limits), Accumulator(), Journals(tmp_path / "journal")
    known = log.begin(0, 0)
    runner = GroupRunner(workflow, run.engine.sampler, run.params, run.config.gconfig.n_samples, run.config.seed, accept)
    tracker = PromptTracker(
        run.config, buffer=buffer, journals=log, recovered=known, accumulator=accumulator, beat=lambda what: None
    )
    producer = Producer(runner, buffer, tracker, accumulator)

    async def scenario():
        task = asyncio.create_task(producer.run())
        while not until(buffer):
            change = buffer.change()
            await asyncio.wait([task, change], return_when=asyncio.FIRST_COMPLETED, timeout=20)
            if task.done():
                return await task
        task.cancel()

    with contextlib.closing(log):
        asyncio.run(scenario())
    return buffer, {name: mean.value for name, mean in accumulator.drain().items()}


def test_a_prompt_that_always_fails_is_dropped_and_counted_and_the_others_go_on(tmp_path):
    workflow = Scripted({"0/1": RewardError("broken")})
    buffer, accumulator = _produce(tmp_path, workflow, {"recover.max_prompt_failures": 3}, until=lambda b: b.complete)
    assert (buffer.ready, buffer.counts["dropped"], buffer.counts["again"]) == (5, 1, 2)
    assert accumulator["rollout/failed/reward_error"] == 3 * 2
    seeds = [seed for uid, seed in workflow.seeds if uid == "0/1"]
    assert len(seeds) == len(set(seeds)) == 6  # every attempt draws other samples


def _tracker(tmp_path, overrides, prompts):
    """Returns a tracker by itself, with its buffer and accumulator."""
    config, accumulator = make_run(tmp_path, overrides).config, Accumulator()
    buffer = Buffer(Numbers(prompts), Limits(max_lag=1, batch_size=1, max_concurrent=4, prompts=prompts, groups=None))
    journals = Journals(tmp_path / "journal")
    tracker = PromptTracker(
        config, buffer=buffer, journals=journals, recovered={}, accumulator=accumulator, beat=lambda what: None
    )
    return tracker, buffer, accumulator


def test_a_lost_worker_is_never_held_against_its_prompts(tmp_path):
    limits = {"recover.max_prompt_failures": 2, "recover.max_consecutive_failures": 10}
    tracker, buffer, accumulator = _tracker(tmp_path, limits, 1)
    for attempt in range(9):
        ticket = buffer.admit()
        assert (ticket.attempt, ticket.failures) == (attempt, 0)
        tracker.started(ticket)
        tracker.lost([ticket], WorkerLost("worker w: gone"))
    assert accumulator.drain()["rollout/lost/worker_lost"].sum == 9 and buffer.counts["dropped"] == 0
    ticket = buffer.admit()
    tracker.started(ticket)
    with pytest.raises(TooManyFailures, match="10 groups failed in a row"):
        tracker.lost([ticket], WorkerLost("worker w: gone"))


@pytest.mark.parametrize("version, failures", [(3, 0), (2, 0), (1, 1)])
def test_a_group_begun_after_a_publish_with_tokens_beyond_the_bound_is_a_failure_of_the_sampler(tmp_path, version, failures):
    tracker, buffer, accumulator = _tracker(tmp_path, {}, 9)
    for _ in range(3):
        buffer.publish()
    ticket = buffer.admit()
    tracker.started(ticket)
    whole = example(ticket.prompt)
    group = dataclasses.replace(whole, versions=np.where(whole.loss_mask, version, -1).astype(np.int32))
    tracker.settle(ticket, Result((group,), (), wanted=True))
    failed = accumulator.drain().get("rollout/failed/stale_sampler")
    assert (failed.sum if failed else 0) == failures and buffer.ready == 1 - failures


def test_a_lost_server_is_never_held_against_a_prompt(tmp_path):
    workflow = Scripted({"0/1": SamplerError("gone")})
    overrides = {"recover.max_prompt_failures": 1, "recover.max_consecutive_failures": 10}
    with pytest.raises(TooManyFailures, match="10 groups failed in a row; the first: server_lost"):
        _produce(tmp_path, workflow, overrides, until=lambda b: False)


def test_success_between_failures_keeps_a_run_alive(tmp_path):
    workflow = Scripted({f"0/{i}": RewardError("broken") for i in range(0, 40, 2)})
    overrides = {"recover.max_prompt_failures": 2, "recover.max_consecutive_failures": 9}
    buffer, _ = _produce(tmp_path, workflow, overrides, until=lambda b: b.complete, prompts=40)
    assert buffer.counts["dropped"] == 20 == buffer.ready


def test_prompts_that_fail_again_and_again_while_the_buffer_is_full_do_not_end_the_run(tmp_path):
    """Four prompts have room, one is good: the others' 12 failures follow each other."""
    workflow = Scripted({f"0/{i}": RewardError("broken") for i in (1, 2, 3)})
    overrides = {"recover.max_prompt_failures": 4, "recover.max_consecutive_failures": 9}
    buffer, _ = _produce(tmp_path, workflow, overrides, until=lambda b: b.ready == 4, prompts=40, max_lag=1)
    assert buffer.counts["dropped"] == 3


def test_a_filter_that_raises_is_a_failure_of_the_workflow(tmp_path):
    def accept(group):
        raise KeyError("no such field")

    with pytest.raises(TooManyFailures, match="workflow_error: KeyError"):
        _produce(tmp_path, Scripted({}), {"recover.max_consecutive_failures": 3}, until=lambda b: False, accept=accept)


class OneOfTwoFails(Repeat):
    """The second sample of every prompt fails."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    async def episode(self, sampler, prompt, params, seed):
        self.seen[prompt.uid] += 1
        if self.seen[prompt.uid] == 2:
            raise RewardError("broken")
        return await super().episode(sampler, prompt, params, seed)


def test_a_group_goes_on_with_the_episodes_that_worked(tmp_path):
    buffer, accumulator = _produce(tmp_path, OneOfTwoFails(), {}, until=lambda b: b.complete)
    assert [len(entry.group.trajectories) for entry in buffer.entries()] == [1] * 6
    assert accumulator["rollout/failed/reward_error"] == 6 and buffer.counts["again"] == 0


class Rejects(Repeat):
    async def episode(self, sampler, prompt, params, seed):
        return None


def test_nothing_to_train_in_a_group_is_a_rejection_not_a_failure(tmp_path):
    buffer, accumulator = _produce(tmp_path, Rejects(), {}, until=lambda b: b.complete)
    assert buffer.counts["rejected"] == 6 and not any(name.startswith("rollout/failed") for name in accumulator)


def test_groups_of_a_killed_process_are_not_generated_again(tmp_path):
    first = Scripted({})
    _produce(tmp_path, first, {}, until=lambda b: b.complete)
    second = Scripted({})
    buffer, accumulator = _produce(tmp_path, second, {}, until=lambda b: b.complete)
    assert buffer.ready == 6 and not second.seeds and first.seeds
    assert accumulator["rollout/finished_reward"] >= 0


def test_a_filter_that_rejects_everything_is_told_and_ends_the_run(tmp_path, caplog):
    workflow = Scripted({})
    overrides = {"recover.max_consecutive_rejected": 100, "rollout.should_accept_fn": "mixed_rewards"}
    with pytest.raises(UserError, match=r"should_accept_fn: mixed_rewards rejected 100 groups in a row \(mean reward") as info:
        _produce(tmp_path, workflow, overrides, until=lambda b: b.complete, accept=lambda group: False, prompts=300)
    assert "recover.max_consecutive_rejected" in str(info.value) and "\n" not in str(info.value)
    told = [record.getMessage() for record in caplog.records if "in a row" in record.getMessage()]
    assert len(told) == 1 and told[0].startswith("mixed_rewards rejected 64 groups in a row")


def test_a_reward_that_is_none_for_every_sample_is_no_fault_of_a_filter(tmp_path):
    class Rejects(Repeat):
        async def episode(self, *arguments):
            return None

    overrides = {"recover.max_consecutive_rejected": 5}
    with pytest.raises(UserError, match=r"^rollout.workflow: the workflow rejected 5 groups in a row \(none has a reward"):
        _produce(tmp_path, Rejects(), overrides, until=lambda b: b.complete, prompts=300)


def test_an_accepted_group_between_rejected_ones_keeps_a_run_alive(tmp_path):
    one_in_nine = lambda group: int(group.uid.split("/")[1]) % 9 == 0  # noqa: E731
    overrides = {"recover.max_consecutive_rejected": 13}  # 8 between two; groups in flight may end out of order
    buffer, _ = _produce(tmp_path, Scripted({}), overrides, until=lambda b: b.complete, accept=one_in_nine, prompts=90)
    assert buffer.ready == 10 and buffer.counts["rejected"] == 80
