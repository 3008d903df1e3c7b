"""A script's driver on the fake sampler: batches, filters and workflows side by side, in the script's thread."""

import asyncio
import bdb
import dataclasses
import signal
import sys
import threading

import numpy as np
import pytest

from rljax.config import io as config_io
from rljax.configs import base
from rljax.driver import Driver
from rljax.engines.fake import model
from rljax.engines.fake.sampler import FakeSampler
from rljax.errors import TooManyFailures, UserError
from rljax.hf.tokenizer import build_char_tokenizer, load_tokenizer
from rljax.rollout.dump import load
from rljax.rollout.trajectories import trajectory_of
from rljax.types import Finish, Prompt, Request

RECORDS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(7)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    model.make_model(directory, build_char_tokenizer(directory))
    return directory


@pytest.fixture
def drive(model_dir):
    """Makes drivers of the fake sampler; closes them."""
    made = []

    def make(**overrides):
        tree = base.get_config()
        with tree.ignore_type(), tree.unlocked():
            tree.allocation_mode = "fake:d1"
            tree.actor.path = str(model_dir)
            tree.reward.workers = 1
            tree.gconfig.n_samples, tree.gconfig.max_new_tokens = 2, 3
            tree.rollout.consumer_batch_size = 3
            for key, value in overrides.items():
                tree.update_from_flattened_dict({key.replace("__", "."): value})
        config = config_io.resolve(config_io.from_dict(tree))
        tokenizer = load_tokenizer(model_dir)
        driver = NoRewards(config, FakeSampler(config, model_dir), tokenizer, vocab_size=tokenizer.vocab_size)
        made.append(driver)
        return driver

    yield make
    for driver in made:
        driver.close()


class NoRewards(Driver):
    """A driver whose workflows score by themselves: no process has to start."""

    def _run(self, work):
        if work.__qualname__ == "RewardPool.start":
            work.close()
            return None
        return super()._run(work)


class Says:
    """One completion per episode, under a name; it remembers what ran where."""

    def __init__(self, driver, name="", wrong=False):
        self.driver, self.name, self.wrong, self.prompts, self.threads = driver, name, wrong, [], set()

    async def episode(self, generator, prompt, params, seed):
        self.prompts.append(prompt.uid)
        self.threads.add(threading.current_thread())
        if self.wrong:
            raise LookupError(f"{self.name} of {prompt.uid}")
        prompt_ids = self.driver.tokenizer.encode_prompt(prompt)
        done = await generator.generate(
            Request(f"{self.name}/{prompt.uid}#{seed}", np.array(prompt_ids, np.int32), params, seed)
        )
        return trajectory_of(prompt_ids, done, float(seed % 2), {self.name or "said": 1.0})


def components(groups):
    return {name for group in groups for trajectory in group.trajectories for name in trajectory.components}


def uids(groups):
    return [group.uid for group in groups]


def test_every_record_comes_once_an_epoch_and_the_epochs_follow_each_other(drive):
    driver = drive()
    workflow = Says(driver)
    drawn = [uid for _ in range(7) for uid in uids(driver.prepare_batch(RECORDS, workflow))]
    assert sorted(drawn) == sorted(f"{epoch}/{i}" for epoch in range(3) for i in range(7))
    in_lists = drive().prepare_batch([RECORDS[:4], RECORDS[4:]], Says(driver))
    assert all(len(group.trajectories) == 2 for group in in_lists) and len(in_lists) == 3


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_later_batches_are_begun_within_the_lag_bound_and_no_further(drive, lag):
    driver = drive(rollout__max_head_offpolicyness=lag, rollout__max_concurrent_rollouts=100)
    workflow = Says(driver)
    for batch in range(1, 5):
        driver.prepare_batch(RECORDS, workflow)
        begun = len(set(workflow.prompts))
        assert 3 * batch <= begun <= 3 * (batch + lag)
    assert (begun > 3 * 4) == (lag > 0)


def test_each_call_has_the_workflow_and_the_filter_that_it_is_given(drive):
    driver = drive()
    a, b = Says(driver, "a"), Says(driver, "b")
    only_even = [driver.prepare_batch(RECORDS, a, lambda g: int(g.uid.partition("/")[2]) % 2 == 0) for _ in range(3)]
    of_b = driver.prepare_batch(RECORDS, b)
    of_a = driver.prepare_batch(RECORDS, a)
    assert components(of_b) == {"b"} and components(of_a) == {"a"}
    for batch in only_even:
        assert components(batch) == {"a"} and all(int(uid.partition("/")[2]) % 2 == 0 for uid in uids(batch))
    everything = [uid for batch in (*only_even, of_b, of_a) for uid in uids(batch)]
    assert len(set(everything)) == len(everything)  # one stream of prompts, whoever draws
    assert any(int(uid.partition("/")[2]) % 2 for uid in (*uids(of_a), *uids(of_b)))


def test_a_filter_may_be_async_or_a_name_and_has_to_answer(drive):
    async def odd(group):
        await asyncio.sleep(0)
        return int(group.uid.partition("/")[2]) % 2 == 1

    driver = drive(recover__max_consecutive_failures=2)
    batch = driver.prepare_batch(RECORDS, Says(driver), odd)
    assert len(batch) == 3 and all(int(uid.partition("/")[2]) % 2 for uid in uids(batch))
    batch = driver.prepare_batch(RECORDS, Says(driver), "mixed_rewards")
    assert len(batch) == 3 and all({t.reward for t in group.trajectories} == {0.0, 1.0} for group in batch)
    with pytest.raises(TooManyFailures, match="should_accept_fn returned NoneType, not a bool"):
        driver.prepare_batch(RECORDS, Says(driver), lambda group: None if components([group]) else True)
    with pytest.raises(UserError, match="no filter named 'mixed'"):
        driver.prepare_batch(RECORDS, Says(driver), "mixed")


@pytest.mark.parametrize("call", ["prepare_batch", "rollout_batch", "submit"])
def test_a_filter_that_answers_no_made_up_group_is_refused_before_anything_is_begun(drive, call):
    driver = drive()
    workflow = Says(driver)
    with pytest.raises(UserError, match=r"^rollout.should_accept_fn: it returns NoneType for a made-up group"):
        getattr(driver, call)(RECORDS[0] if call == "submit" else RECORDS, workflow, lambda group: None)
    assert workflow.prompts == []


def test_completions_that_were_cut_decide_nothing_where_they_are_not_trained_on(drive):
    """All completions of 1 token are cut; their rewards differ."""
    settings = dict(gconfig__n_samples=4, gconfig__max_new_tokens=1)
    for masked, groups in ((False, len(RECORDS)), (True, 0)):
        driver = drive(actor__mask_no_eos=masked, **settings)
        cut = [group for group in driver.rollout_batch(RECORDS, Differs(driver), "mixed_rewards")]
        assert len(cut) == groups


class Differs(Says):
    """Gives the members of a group different rewards; every completion is one that was cut."""

    scores_by_rewards = False

    async def episode(self, generator, prompt, params, seed):
        done = await super().episode(generator, prompt, params, seed)
        return dataclasses.replace(done, reward=float(seed), finish=Finish.LENGTH)


class ByRewards(Says):
    scores_by_rewards = True


def wrong(prompt, completion):
    return float(prompt.fields["solution"] in completion)


def test_rewards_that_fail_on_the_records_are_told_before_anything_is_begun(drive, model_dir):
    config = drive(reward__name=f"{__name__}:wrong").config
    with Driver(config, FakeSampler(config, model_dir), load_tokenizer(model_dir)) as driver:
        workflow = ByRewards(driver)
        line = rf"^reward.name: {__name__}:wrong fails on 'The answer is 0.' to record 0/0: KeyError"
        with pytest.raises(UserError, match=line):
            driver.prepare_batch(iter(RECORDS), workflow)
        with pytest.raises(UserError, match=r"to record submitted/0: KeyError.*, and on 2 more records"):
            driver.rollout_batch(RECORDS, workflow)
        with pytest.raises(UserError, match="to record submitted/7: KeyError"):
            driver.submit(RECORDS[0], workflow)
        assert workflow.prompts == [] and not driver.rewards.counts


def test_submitted_groups_are_waited_for_in_any_number_and_rejected_ones_are_none(drive):
    driver = drive()
    a, b = Says(driver, "a"), Says(driver, "b")
    numbers = [driver.submit(RECORDS[0], a), driver.submit(RECORDS[1], b), driver.submit(RECORDS[2], a, lambda group: False)]
    assert numbers == [0, 1, 2]
    with pytest.raises(UserError, match="4 groups, and 3 are submitted"):
        driver.wait(4)
    first, *rest = driver.wait(1) + driver.wait()
    assert components([first]) == {"a"} and components(rest[:1]) == {"b"} and rest[1] is None
    assert driver.wait() == []


def test_a_batch_of_records_is_in_their_order_and_has_their_prompts(drive):
    driver = drive()
    prompt = Prompt("mine", ({"role": "user", "content": "9+9="},), {})
    groups = driver.rollout_batch([*RECORDS, prompt], Says(driver))
    ids = [group.trajectories[0].token_ids[: -int(group.trajectories[0].loss_mask.sum())] for group in groups]
    assert [driver.tokenizer.decode(i) for i in ids] == [*(record["prompt"] for record in RECORDS), "9+9="]
    assert groups[-1].uid == "mine"


def test_an_error_of_a_workflow_is_the_scripts(drive):
    driver = drive(recover__max_consecutive_failures=2)
    with pytest.raises(LookupError, match="of submitted/0") as caught:
        driver.rollout_batch(RECORDS[:1], Says(driver, wrong=True))
    assert caught.traceback[-1].name == "episode"  # where a post-mortem debugger looks
    with pytest.raises(TooManyFailures) as many:
        driver.prepare_batch(RECORDS, Says(driver, wrong=True))
    assert isinstance(many.value.__cause__, LookupError)
    assert len(driver.prepare_batch(RECORDS, Says(driver))) == 3  # the driver goes on


def test_a_timeout_loses_nothing(drive):
    class Slow(Says):
        async def episode(self, *arguments):
            await release.wait()
            return await super().episode(*arguments)

    driver, release = drive(), asyncio.Event()
    driver.submit(RECORDS[0], Slow(driver))
    with pytest.raises(TimeoutError):
        driver.wait(timeout=0.05)
    release.set()
    assert len(driver.wait()[0].trajectories) == 2


def test_a_breakpoint_stops_in_the_thread_of_the_script(drive, monkeypatch):
    class Stops(Says):
        async def episode(self, generator, prompt, params, seed):
            breakpoint()
            return await super().episode(generator, prompt, params, seed)

    def hook():
        frame = sys._getframe(1)
        seen.append((threading.current_thread(), frame.f_code.co_name, frame.f_locals["prompt"].messages[0]["content"]))

    seen = []
    monkeypatch.setattr(sys, "breakpointhook", hook)
    driver = drive(gconfig__n_samples=1)
    driver.rollout_batch(RECORDS[:2], Stops(driver))
    assert seen == [(threading.main_thread(), "episode", record["prompt"]) for record in RECORDS[:2]]


def test_quitting_the_debugger_ends_the_script_at_once_and_not_an_episode(drive):
    class Quits(Says):
        async def episode(self, generator, prompt, params, seed):
            self.prompts.append(prompt.uid)
            raise bdb.BdbQuit

    driver = drive(gconfig__n_samples=8)
    for call in (driver.prepare_batch, driver.rollout_batch):
        workflow = Quits(driver)
        with pytest.raises(bdb.BdbQuit):
            call(RECORDS[:1], workflow)
        assert len(workflow.prompts) == 1  # the episodes beside it do not stop at their breakpoints
    assert len(driver.rollout_batch(RECORDS, Says(driver))) == len(RECORDS)  # and the driver goes on


def test_new_weights_are_a_version_of_their_own_and_old_groups_too_old(drive, model_dir):
    driver = drive(rollout__max_head_offpolicyness=1)
    workflow = Says(driver)
    driver.prepare_batch(RECORDS, workflow)
    for version in (2, 4, 6):  # two at a time: the groups begun before are then beyond the bound
        driver.publish(model_dir)
        assert driver.publish(model_dir) == driver.version == version
        batch = driver.prepare_batch(RECORDS, workflow)
        oldest = min(int(t.versions[t.loss_mask].min()) for group in batch for t in group.trajectories)
        assert version - 1 <= oldest <= version


def test_a_dump_is_what_replay_reads(drive, tmp_path):
    driver = drive()
    groups = driver.rollout_batch(RECORDS[:2], Says(driver))
    driver.dump(tmp_path / "batch", groups)
    for read, group in zip(load(tmp_path / "batch"), groups, strict=True):
        for mine, theirs in zip(group.trajectories, read.trajectories, strict=True):
            np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
            np.testing.assert_array_equal(mine.behavior_logp, theirs.behavior_logp)


def test_what_is_no_workflow_or_no_records_is_refused_before_anything_is_begun(drive):
    driver = drive()
    with pytest.raises(UserError, match=r"Says is a class \(give an object: Says\(driver.tokenizer, driver.rewards"):
        driver.rollout_batch(RECORDS[:1], Says)
    with pytest.raises(UserError, match="object has no 'async def episode'"):
        driver.prepare_batch(RECORDS, object())
    with pytest.raises(UserError, match="a list of records is needed, not one record"):
        driver.rollout_batch(RECORDS[0], Says(driver))
    with pytest.raises(UserError, match="a mapping of columns, or a Prompt, is needed, not int"):
        driver.rollout_batch([*RECORDS[:2], 1], Says(driver))
    with pytest.raises(UserError, match="wait: -1 groups, and 0 are submitted"):
        driver.wait(-1)


class Hangs(Says):
    async def episode(self, *arguments):
        await asyncio.Event().wait()


def test_groups_of_an_interrupted_batch_are_given_to_no_later_call(drive):
    driver = drive()
    driver._loop.call_later(0.05, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        driver.rollout_batch(RECORDS[:2], Hangs(driver))
    driver.submit({"prompt": "9+9=", "answer": "18"}, Says(driver))
    (group,) = driver.wait()
    assert group is not None and driver.tokenizer.decode(group.trajectories[0].token_ids).startswith("9+9=")


def test_a_closed_driver_says_so(drive):
    driver = drive()
    driver.close()
    for call in (lambda: driver.submit(RECORDS[0], Says(driver)), lambda: driver.prepare_batch(RECORDS, Says(driver))):
        with pytest.raises(UserError, match="Driver: it is closed"):
            call()


def test_a_dataloader_that_is_used_up_says_so(drive):
    driver = drive(recover__max_consecutive_failures=2)
    with pytest.raises(UserError, match="the dataloader has no records"):
        driver.prepare_batch([], Says(driver))
    with pytest.raises(UserError, match=r"the dataloader has no more records \(it must begin again\)"):
        driver.prepare_batch(iter(RECORDS[:2]), Says(driver))
    with pytest.raises(UserError, match="record 0/0: a mapping of columns, or a Prompt, is needed, not int"):
        driver.prepare_batch([1], Says(driver))


def test_a_running_event_loop_is_refused(drive):
    driver = drive()

    async def notebook():
        driver.wait()

    with pytest.raises(UserError, match="inside a running event loop, as a notebook has it"):
        asyncio.run(notebook())


def test_ids_that_the_model_does_not_have_fail_their_episode(drive):
    class Beyond(Says):
        async def episode(self, *arguments):
            trajectory = await super().episode(*arguments)
            return dataclasses.replace(trajectory, token_ids=trajectory.token_ids + self.driver.tokenizer.vocab_size)

    class Text(Says):
        async def episode(self, *arguments):
            return "7"

    driver = drive()
    with pytest.raises(ValueError, match="is outside the model's vocabulary of 100"):
        driver.rollout_batch(RECORDS[:1], Beyond(driver))
    with pytest.raises(TypeError, match="the workflow returned str: a Trajectory, a list of at least one, or None"):
        driver.rollout_batch(RECORDS[:1], Text(driver))
