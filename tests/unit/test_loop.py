"""The loop on the fake engine: the invariants that the loop keeps, those of resuming among them."""

import asyncio
import dataclasses
import os
import shutil
import signal
import threading
from collections import Counter

import numpy as np
import pytest

from rljax import loop
from rljax.checkpoints.recovery import require_checkpoints
from rljax.engines.fake import model
from rljax.engines.fake.sampler import FakeSampler, Trouble
from rljax.errors import IncompleteRun, RewardTimeout, TooManyFailures, UserError
from rljax.metrics.mean import Mean
from rljax.rollout.trajectories import trajectory_of
from rljax.run import reporting
from rljax.sinks import RunState, Status
from rljax.testing.harness import IN_MEMORY, MemorySink, Numbers, RememberingLearner, Repeat, make_run, read_back, spell
from rljax.types import Completion, Finish, Group, Request, SamplingParams, Trajectory

ASYNC = {"rollout.max_head_offpolicyness": 2}
NOT_COMPARED = ("timeperf/", "perf/", "rollout/wait/")  # of this machine, at that time


class Killed(BaseException):
    """Stands for kill -9 at a point of the run: nothing of ours catches it."""


class Sinks:
    """Makes the sinks of successive runs in the same directory."""

    def __init__(self, at=None, act=None):
        self.opened = []
        self._at, self._act = at, act

    def __call__(self, first_step):
        self.opened.append(MemorySink(first_step))
        outer = self

        class Acting(MemorySink):
            def write(self, step, metrics):
                super().write(step, metrics)
                if step == outer._at and outer._act:
                    act, outer._act = outer._act, None
                    act()

        self.opened[-1] = Acting(first_step)
        return self.opened[-1]

    def lines(self):
        """Returns the lines of metrics.jsonl: a later run cuts those after its first step."""
        lines = {}
        for sink in self.opened:
            lines = {step: line for step, line in lines.items() if step <= sink.first_step}
            for step, line in sink.steps.items():
                lines[step] = lines.get(step, {}) | line
        return lines


def _kill():
    raise Killed


def _compared(lines):
    """Compares to the bit; NaN equals NaN."""
    return {step: {k: repr(v) for k, v in line.items() if not k.startswith(NOT_COMPARED)} for step, line in lines.items()}


def _assert_once(run, n_prompts, epochs):
    """Exactly once."""
    trained = run.engine.learner.trained
    assert {uid: len(steps) for uid, steps in trained.items()} == {
        f"{epoch}/{index}": 1 for epoch in range(epochs) for index in range(n_prompts)
    }


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_exactly_once_within_the_lag_bound(tmp_path, max_lag):
    trouble = Trouble(np.random.default_rng(0), delay=0.002)
    overrides = {"rollout.max_head_offpolicyness": max_lag, "total_train_epochs": 2}
    run = make_run(tmp_path, overrides, n_prompts=18, trouble=trouble)  # 36 prompts by fours; 18 is no multiple of 4
    outcome = loop.train(run)
    assert outcome == loop.Outcome(step=9, version=9, finished=True)
    _assert_once(run, 18, 2)
    assert run.engine.learner.most_lag <= max_lag
    assert (run.engine.learner.most_lag > 0) == (max_lag > 0)


def test_a_last_batch_that_is_not_full_is_trained_on(tmp_path):
    sinks = Sinks()
    run = make_run(tmp_path, {"total_train_epochs": 1}, n_prompts=10, sink=sinks)
    assert loop.train(run).step == 3
    assert [line["rollout/groups"] for line in sinks.lines().values()] == [4, 4, 2]
    _assert_once(run, 10, 1)


def test_steps_end_a_run_before_its_epochs_do(tmp_path):
    run = make_run(tmp_path, {"total_train_epochs": 5, "total_train_steps": 2} | ASYNC)
    assert loop.train(run).step == 2
    assert sum(map(len, run.engine.learner.trained.values())) == 8


@pytest.mark.parametrize("minibatches", [1, 4])
def test_zero_learning_rate_gives_ratio_one_exactly(tmp_path, minibatches):
    sinks = Sinks()
    overrides = {"actor.optimizer.lr": 0.0, "actor.ppo_n_minibatches": minibatches, "total_train_steps": 3}
    loop.train(make_run(tmp_path, overrides, sink=sinks))
    for line in sinks.lines().values():
        for name in ("importance_weight", "behave_imp_weight"):
            assert {line[f"ppo_actor/update/{name}/{which}"] for which in ("avg", "min", "max")} == {1.0}
        assert line["ppo_actor/update/clip_ratio"] == line["ppo_actor/update/approx_kl"] == 0.0


def test_on_policy_weights_are_one_in_every_synchronous_step_and_not_in_asynchronous_ones(tmp_path):
    spreads = []
    some_rewards = {"warmup.steps": 10, "warmup.optimizer.lr": 0.2, "warmup.batch_size": 12, "total_train_epochs": 2}
    for name, overrides in (("sync", {}), ("async", ASYNC)):
        sinks = Sinks()
        loop.train(make_run(tmp_path / name, overrides | some_rewards, sink=sinks))
        lines = [line for step, line in sinks.lines().items() if step > 10]
        assert all(line["ppo_actor/update/importance_weight/max"] == 1.0 for line in lines)  # one minibatch
        spreads.append(max(line["ppo_actor/update/behave_imp_weight/max"] for line in lines))
        assert max(line["rollout/staleness/max"] for line in lines) == (0 if name == "sync" else 2)
    assert spreads[0] == 1.0 and spreads[1] > 1.0


FEATURES = {
    "plain": {},
    "minibatches": {"actor.ppo_n_minibatches": 2},
    "warm-up": {"warmup.steps": 3, "warmup.batch_size": 4},
    "critic": {"actor.adv_estimator": "gae", "actor.reward_norm.mean_level": "none", "actor.reward_norm.std_level": "none"},
    "kl": {"actor.kl_ctl": 0.1},
    "evaluation": {"evaluator.freq_steps": 2},
    "directory": {},
    "filter": {},
    "no journal": {},
}


def _mostly(group):
    """A filter that rejects some prompts of each epoch."""
    return int(group.uid.split("/")[1]) % 5 != 1


@pytest.mark.parametrize("feature", FEATURES)
def test_resume_equivalence_of_the_loops_metrics(tmp_path, feature):
    overrides = FEATURES[feature] | {"total_train_epochs": 2, "saver.freq_steps": 2}
    how = {"in_memory": feature != "directory"}
    if feature == "filter":
        how["accept"] = _mostly
    straight = Sinks()
    whole = make_run(tmp_path / "straight", overrides, sink=straight, **how)
    loop.train(whole)
    killed = Sinks(at=5, act=_kill)
    with pytest.raises(Killed):
        loop.train(make_run(tmp_path / "killed", overrides, sink=killed, **how))
    if feature == "no journal":  # then what was finished since the checkpoint is generated again, with the weights of then
        shutil.rmtree(tmp_path / "killed" / "journal")
    resumed = make_run(tmp_path / "killed", overrides, sink=killed, **how)
    assert loop.train(resumed).finished
    assert killed.opened[1].first_step == 4
    assert _compared(killed.lines()) == _compared(straight.lines())
    assert resumed.engine.learner.trained == whole.engine.learner.trained
    np.testing.assert_array_equal(
        resumed.engine.learner.export(IN_MEMORY).params, whole.engine.learner.export(IN_MEMORY).params
    )


def test_the_transports_publish_the_same_weights(tmp_path):
    lines = []
    for in_memory in (True, False):
        sinks = Sinks()
        loop.train(make_run(tmp_path / str(in_memory), {}, sink=sinks, in_memory=in_memory))
        lines.append(_compared(sinks.lines()))
    assert lines[0] == lines[1] and len(lines[0]) == 3


@pytest.mark.parametrize("kill_at", [1, 4, 6, 7])
def test_resume_position_of_an_asynchronous_run_loses_and_doubles_nothing(tmp_path, kill_at):
    overrides = ASYNC | {"total_train_epochs": 2, "saver.freq_steps": 3}
    sinks = Sinks(at=kill_at, act=_kill)
    with pytest.raises(Killed):
        loop.train(make_run(tmp_path, overrides, n_prompts=18, trouble=Trouble(np.random.default_rng(1), 0.002), sink=sinks))
    run = make_run(tmp_path, overrides, n_prompts=18, trouble=Trouble(np.random.default_rng(2), 0.002), sink=sinks)
    assert loop.train(run).step == 9
    assert sinks.opened[1].first_step == kill_at // 3 * 3 - (3 if kill_at % 3 == 0 else 0)
    _assert_once(run, 18, 2)
    assert run.engine.learner.most_lag <= 2
    assert sorted(sinks.lines()) == list(range(1, 10))


@pytest.mark.parametrize("policy", ["mask", "drop"])
def test_a_sampler_that_does_not_take_what_is_published_ends_the_run(tmp_path, policy):
    """A sampler whose groups are always stale, so that they would be generated again for ever."""
    overrides = ASYNC | {"rollout.stale_policy": policy, "recover.max_consecutive_failures": 5}
    run = make_run(tmp_path, overrides, n_prompts=40)

    async def load_weights(source, version):
        """Ignores the weights, as a sampler that another run publishes to might."""

    run.engine.sampler.load_weights = load_weights
    with pytest.raises(TooManyFailures, match=r"5 groups failed in a row; the first: stale_sampler: .* tokens of version 0"):
        loop.train(run)


class Straggles(Repeat):
    """Prompt 0/1 takes three publishes: each of its completions has two tokens of version 0, and
    two of version 3.
    """

    def __init__(self):
        super().__init__()
        self.episodes = Counter()

    async def episode(self, sampler, prompt, params, seed):
        self.episodes[prompt.uid] += 1
        if prompt.uid != "0/1" or self.episodes["0/1"] > 4:
            return await super().episode(sampler, prompt, params, seed)
        parts, ids = [], np.array(spell(prompt), np.int32)
        for version in (0, 3):
            while sampler.version < version:
                await asyncio.sleep(0.001)
            request = Request(f"{prompt.uid}#{seed}.{version}", ids, SamplingParams(2), seed)
            parts.append(await sampler.generate(request))
            ids = np.concatenate([ids, parts[-1].token_ids])
        joined = {n: np.concatenate([getattr(p, n) for p in parts]) for n in ("token_ids", "logp", "versions")}
        assert joined["versions"].tolist() == [0, 0, 3, 3]
        return trajectory_of(spell(prompt), Completion(**joined, finish=Finish.LENGTH), float(seed % 7), {})


class Counting(RememberingLearner):
    """Counts the tokens of prompt 0/1 that it is trained on, by their lag."""

    def __init__(self, *args):
        super().__init__(*args)
        self.lags = Counter()

    def update(self, batch):
        step = self._adam["policy"].steps
        for row, start in zip(*np.nonzero((batch.segment_ids > 0) & (batch.positions == 0)), strict=True):
            if read_back(batch.token_ids[row, start:]) == "0/1":
                mine = batch.segment_ids[row] == batch.segment_ids[row, start]
                self.lags.update((step - batch.versions[row][mine & batch.loss_mask[row]]).tolist())
        return super().update(batch)


@pytest.mark.parametrize("policy", ["mask", "drop"])
def test_lag_bound_masks_or_generates_again_as_the_stale_policy_says(tmp_path, policy):
    sinks = Sinks()
    overrides = {"rollout.max_head_offpolicyness": 1, "rollout.stale_policy": policy, "train_dataset.batch_size": 2}
    run = make_run(tmp_path, overrides, n_prompts=16, workflow=(workflow := Straggles()), sink=sinks)
    run.engine.learner = learner = Counting(run.config, tmp_path / "model")
    assert loop.train(run).step == 8
    _assert_once(run, 16, 1)
    assert learner.most_lag <= 1
    lines = list(sinks.lines().values())
    total = {name: sum(line[f"rollout/{name}"] for line in lines) for name in ("stale", "stale_tokens")}
    if policy == "mask":  # the two tokens of version 0 of each of four samples are context alone
        assert total == {"stale": 0, "stale_tokens": 8} and workflow.episodes["0/1"] == 4
        assert sum(learner.lags.values()) == 8
    else:
        assert total == {"stale": 1, "stale_tokens": 0} and workflow.episodes["0/1"] == 8
    assert max(learner.lags) <= 1


class Waiting(RememberingLearner):
    """A first update that waits, for a while, until the sampler finishes another request."""

    def __init__(self, config, model_dir, patience):
        super().__init__(config, model_dir)
        self.updating, self.finished, self.overlapped = threading.Event(), threading.Event(), None
        self._patience = patience

    def update(self, batch):
        if self.overlapped is None:
            self.finished.clear()
            self.updating.set()
            self.overlapped = self.finished.wait(self._patience)
        return super().update(batch)


@pytest.mark.parametrize("max_lag", [0, 2])
def test_sampling_goes_on_during_an_update_unless_synchronous(tmp_path, max_lag):
    run = make_run(tmp_path, {"rollout.max_head_offpolicyness": max_lag, "total_train_steps": 2}, n_prompts=24)
    run.engine.learner = learner = Waiting(run.config, tmp_path / "model", 60.0 if max_lag else 0.2)
    generate = run.engine.sampler.generate

    async def held(request: Request):
        """All but the first batch's requests are answered only once an update has begun."""
        while int(request.id.split("/")[1].split("#")[0]) >= 4 and not learner.updating.is_set():
            await asyncio.sleep(0.005)
        completion = await generate(request)
        learner.finished.set()
        return completion

    run.engine.sampler.generate = held
    loop.train(run)
    assert learner.overlapped == (max_lag > 0)


class AlwaysFails:
    async def episode(self, sampler, prompt, params, seed):
        raise ZeroDivisionError(f"in the reward of {prompt.uid}")


def test_failing_workflow_ends_the_run_with_the_first_error(tmp_path):
    run = make_run(tmp_path, {"recover.max_consecutive_failures": 7}, workflow=AlwaysFails())
    with pytest.raises(TooManyFailures, match="7 groups failed in a row; the first: workflow_error: ZeroDivisionError") as info:
        loop.train(run)
    assert isinstance(info.value.__cause__, ZeroDivisionError)
    assert "episode" in [frame.name for frame in _frames(info.value.__cause__)]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["0-failed"]


def _frames(error):
    import traceback

    return traceback.extract_tb(error.__traceback__)


class FailsOften(Repeat):
    """A workflow in which each third episode times out, and one prompt always fails."""

    calls = 0

    async def episode(self, sampler, prompt, params, seed):
        FailsOften.calls += 1
        if prompt.uid == "0/5":
            raise ValueError("this one never works")
        if FailsOften.calls % 3 == 0:
            raise RewardTimeout("too slow")
        return await super().episode(sampler, prompt, params, seed)


def test_failures_are_counted_by_kind_and_never_pass_for_a_reward(tmp_path):
    sinks = Sinks()
    run = make_run(tmp_path, ASYNC, workflow=FailsOften(), sink=sinks)
    assert loop.train(run).finished
    trained = run.engine.learner.trained
    assert sorted(trained) == sorted(f"0/{i}" for i in range(12) if i != 5)
    lines = list(sinks.lines().values())
    assert sum(line.get("rollout/failed/reward_timeout", 0) for line in lines) > 0
    assert sum(line["rollout/dropped"] for line in lines) + run.config.recover.max_prompt_failures > 1
    for line in lines:
        assert set(k for k in line if k.startswith("rollout/failed/")) <= {
            "rollout/failed/reward_timeout",
            "rollout/failed/workflow_error",
        }


def test_nothing_to_train_is_counted_and_the_batch_filled_from_later_prompts(tmp_path):
    sinks = Sinks()
    odd = lambda group: int(group.uid.split("/")[1]) % 2 == 1  # noqa: E731
    run = make_run(tmp_path, {"total_train_epochs": 2}, n_prompts=12, accept=odd, sink=sinks)
    assert loop.train(run).step == 3
    assert sorted(run.engine.learner.trained) == sorted(f"{e}/{i}" for e in range(2) for i in range(1, 12, 2))
    lines = list(sinks.lines().values())
    assert [line["rollout/groups"] for line in lines] == [4, 4, 4]
    assert sum(line["rollout/rejected"] for line in lines) in (11, 12)  # one may be rejected after the last step


ENDED = Status(RunState.FINISHED, step=3, version=3, total_steps=3)


class Without(Repeat):
    """Gives no trajectory: None, or an error."""

    def __init__(self, error=None):
        super().__init__()
        self._error = error

    async def episode(self, sampler, prompt, params, seed):
        if self._error:
            raise self._error
        return None


@pytest.mark.parametrize("how", ["filter", "workflow"])
def test_a_run_whose_groups_are_all_rejected_is_not_finished(tmp_path, how):
    """However many prompts recover.max_consecutive_rejected allows."""
    options = {"accept": lambda group: False} if how == "filter" else {"workflow": Without()}
    with pytest.raises(IncompleteRun, match=r"^incomplete at step 0: trained on 0 of 12 groups, as .*\(12 rejected\)"):
        loop.train(make_run(tmp_path, {}, **options))


def test_a_run_that_did_less_than_it_was_asked_to_is_not_finished(tmp_path, caplog):
    def half(group):
        return int(group.uid.split("/")[1]) % 2 == 0

    def ended(name, overrides, accept=half, **options):
        sinks = Sinks()
        run = make_run(tmp_path / name, {"saver.export_final": True} | overrides, accept=accept, sink=sinks, **options)
        try:
            loop.train(run)
        except IncompleteRun as error:
            assert str(error) == sinks.opened[-1].statuses[-1].error
            return sinks.opened[-1].statuses[-1].state, str(error)
        return sinks.opened[-1].statuses[-1].state, caplog.messages[-1]

    state, line = ended("steps", {"total_train_steps": 2})  # of 12 prompts 6 are wanted, and 8 are asked for
    assert state == "incomplete" and line.startswith(
        "incomplete at step 2: trained on 6 of 8 groups, as the 12 prompts ran out"
    )
    with caplog.at_level("INFO"):
        state, line = ended("epoch", {})  # an epoch was asked for
    assert (
        state == "finished" and line == "finished at step 2; trained on 6 of 12 groups, as the 12 prompts ran out (6 rejected)"
    )
    state, line = ended("failing", {"recover.max_prompt_failures": 1}, n_prompts=3, workflow=Without(RewardTimeout("slow")))
    assert state == "incomplete" and "(3 dropped) (the first failure: reward_timeout: RewardTimeout: slow; " in line
    assert not (tmp_path / "failing" / "export").exists() and (tmp_path / "steps" / "export").exists()


def test_a_limit_on_steps_holds_where_a_run_goes_on_with_more_groups_ready(tmp_path):
    sinks = Sinks(at=3, act=_kill)
    with pytest.raises(Killed):
        loop.train(make_run(tmp_path, ASYNC | {"total_train_epochs": 4, "saver.freq_steps": 1}, sink=sinks))
    outcome = loop.train(make_run(tmp_path, ASYNC | {"total_train_epochs": 4, "total_train_steps": 3}, sink=sinks))
    assert outcome.step == 3 and max(sinks.lines()) == 3


def test_a_run_that_had_ended_has_nothing_to_do(tmp_path, caplog):
    overrides = {"evaluator.freq_steps": 1, "saver.export_final": True}
    loop.train(make_run(tmp_path, overrides))
    sinks = Sinks()
    with caplog.at_level("INFO"):
        again = dataclasses.replace(make_run(tmp_path, overrides, sink=sinks), before=ENDED)
        assert loop.train(again).step == 3
    assert caplog.messages[-1].startswith("nothing to do: the run ended at step 3 (")
    assert not sinks.lines() and [status.state for status in sinks.opened[0].statuses] == ["finished"]
    with caplog.at_level("INFO"):  # whether it had ended or not
        for before in (ENDED, None):
            assert (
                loop.train(dataclasses.replace(make_run(tmp_path, overrides | {"total_train_steps": 2}), before=before)).step
                == 3
            )
            assert "the run already has 3 steps, more than the 2 of total_train_steps" in caplog.messages[-1]
    more = dataclasses.replace(make_run(tmp_path, overrides | {"total_train_epochs": 2}, sink=sinks), before=ENDED)
    assert loop.train(more).step == 6


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_saves_and_exits_and_the_run_goes_on_later(tmp_path, name, caplog):
    overrides = ASYNC | {"total_train_epochs": 2}
    sinks = Sinks(at=2, act=lambda: os.kill(os.getpid(), number))
    number = getattr(signal, name)
    default = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
    inherited = signal.signal(number, default)  # nohup, and a shell's "&", have them ignored
    try:
        outcome = loop.train(make_run(tmp_path, overrides, sink=sinks))
        assert signal.getsignal(number) == default
    finally:
        signal.signal(number, inherited)
    assert not outcome.finished and outcome.step < 6
    assert caplog.messages[-1] == f"stopped at step {outcome.step}; the same command goes on from step {outcome.step}"
    status = dataclasses.replace(sinks.opened[0].statuses[-1], verdict="")
    assert status == Status(RunState.STOPPED, outcome.step, outcome.version, total_steps=6)
    run = make_run(tmp_path, overrides, sink=sinks)
    assert loop.train(run).step == 6
    assert sinks.opened[1].first_step == outcome.step
    _assert_once(run, 12, 2)


def test_a_hang_up_that_nohup_ignores_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        sinks = Sinks(at=2, act=lambda: os.kill(os.getpid(), signal.SIGHUP))
        assert loop.train(make_run(tmp_path, ASYNC, sink=sinks)).finished
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_samples_are_of_as_many_prompts_as_there_is_room_for(tmp_path):
    for room, seen in ((3, 3), (6, 4)):  # 4 groups a step
        sinks = Sinks()
        loop.train(make_run(tmp_path / str(room), {"stats_logger.samples_per_step": room}, sink=sinks))
        for step in (1, 2, 3):
            uids = [uid for at, uid in sinks.opened[0].samples if at == step]
            assert len(uids) == room and len(set(uids)) == seen


def test_a_step_has_a_whole_group_and_an_evaluation_its_samples(tmp_path):
    sinks = Sinks()
    overrides = {"evaluator.freq_steps": 2, "stats_logger.samples_per_evaluation": 3}
    loop.train(make_run(tmp_path, overrides, sink=sinks))
    (sink,) = sinks.opened
    assert [step for step, *_ in sink.groups] == [1, 2, 3]
    for _, group, advantages in sink.groups:
        assert [len(t) for t in group.trajectories] == [len(each) for each in advantages] and len(advantages) == 4
        rewards = [t.reward for t in group.trajectories]  # advantages of a group have the order of its rewards
        signs = [np.sign(each[t.loss_mask][0]) for t, each in zip(group.trajectories, advantages, strict=True)]
        assert signs == pytest.approx(np.sign(np.array(rewards) - np.mean(rewards)).tolist())
    assert sink.evaluations == [(step, "", f"0/{index}") for step in (0, 2, 3) for index in range(3)]


def test_every_step_says_the_reward_of_its_batch_and_what_the_parts_have_measured(tmp_path):
    sinks = Sinks()
    run = make_run(tmp_path, ASYNC | {"total_train_epochs": 2}, sink=sinks)
    loop.train(dataclasses.replace(run, take_metrics=lambda: {"timeperf/reward": Mean(0.5, 1)}))
    lines = sinks.lines()
    assert len(lines) == 6
    for line in lines.values():
        assert line["rollout/reward/avg"] == line["ppo/actor/task_reward/avg"]
        assert line["timeperf/reward"] == 0.5


class LessDivergence(Repeat):
    """Lowers rewards of one token by the divergence from the policy that reinforcement began with."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.learner, self.before = weight, None, None

    async def episode(self, generator, prompt, params, seed):
        if self.before is None:
            self.before = model.log_probs(self.learner._table, params.temperature)
        trajectory = await super().episode(generator, prompt, params, seed)
        last, token = trajectory.token_ids[-2:]
        divergence = float(trajectory.behavior_logp[-1] - self.before[last, token])
        return dataclasses.replace(trajectory, reward=trajectory.reward - self.weight * divergence)


@pytest.mark.parametrize("warmup", [0, 3])
def test_a_divergence_in_the_reward_is_one_that_the_workflow_takes_off(tmp_path, warmup):
    """The reference is the initial policy, or the warmed-up one, while the policy leaves it; the weights are the same then."""
    one_token = {"gconfig.max_new_tokens": 1, "warmup.steps": warmup, "total_train_epochs": 3}
    plain = {f"actor.{norm}.{level}": "none" for norm in ("reward_norm", "adv_norm") for level in ("mean_level", "std_level")}
    settings, kl = one_token | plain, {"actor.kl_placement": "reward", "actor.kl_estimator": "k1"}
    workflow, tables = LessDivergence(0.3), {}
    for name, overrides, uses in (
        ("by the loop", {"actor.kl_ctl": 0.3} | kl, None),
        ("by the workflow", {}, workflow),
        ("by nobody", {}, None),
    ):
        run = make_run(tmp_path / name, settings | overrides, workflow=uses)
        workflow.learner = run.engine.learner
        assert loop.train(run).finished
        tables[name] = run.engine.learner._table
    np.testing.assert_allclose(tables["by the loop"], tables["by the workflow"], atol=1e-4)
    assert np.abs(tables["by the loop"] - tables["by nobody"]).max() > 0.05


def test_a_critic_survives_a_batch_in_which_every_completion_was_cut_and_none_counts(tmp_path):
    critic = {"actor.adv_estimator": "gae", "actor.reward_norm.mean_level": "none", "actor.reward_norm.std_level": "none"}
    run = make_run(tmp_path, critic | {"actor.mask_no_eos": True, "gconfig.max_new_tokens": 1})
    run = dataclasses.replace(run, params=dataclasses.replace(run.params, max_new_tokens=1, stop_token_ids=()))
    assert loop.train(run).finished


def test_resume_equivalence_of_sft(tmp_path):
    overrides = {"actor.loss": "sft", "total_train_epochs": 3, "saver.freq_steps": 2, "evaluator.freq_steps": 3}
    straight, killed = Sinks(), Sinks(at=5, act=_kill)
    outcome = loop.train(make_run(tmp_path / "a", overrides, sink=straight))
    assert outcome == loop.Outcome(step=9, version=0, finished=True)
    losses = [line["sft/nll"] for line in straight.lines().values() if "sft/nll" in line]
    assert len(losses) == 9 and losses[-1] < losses[0]
    with pytest.raises(Killed):
        loop.train(make_run(tmp_path / "b", overrides, sink=killed))
    loop.train(make_run(tmp_path / "b", overrides, sink=killed))
    assert _compared(killed.lines()) == _compared(straight.lines())


def test_warm_up_then_reinforcement_learns_the_task(tmp_path):
    sinks = Sinks()
    warmup = {"warmup.steps": 10, "warmup.batch_size": 4, "warmup.optimizer.lr": 0.1}
    rest = {"actor.optimizer.lr": 0.2, "total_train_epochs": 30, "evaluator.freq_steps": 1000, "gconfig.n_samples": 8}
    loop.train(make_run(tmp_path, ASYNC | warmup | rest, n_prompts=4, sink=sinks))
    lines = sinks.lines()
    before, after = (line["eval-rollout/reward/avg"] for line in lines.values() if "eval-rollout/reward/avg" in line)
    assert lines[9]["warmup/nll"] < lines[1]["warmup/nll"]
    assert after >= before + 0.25


def test_an_evaluation_without_a_reward_says_why(tmp_path, caplog):
    run = make_run(tmp_path, {"evaluator.freq_steps": 1, "total_train_steps": 1})

    class Fails(Repeat):
        async def episode(self, sampler, prompt, params, seed):
            if prompt.uid == "0/3":
                return None
            raise RewardTimeout("too slow")

    run = dataclasses.replace(run, evaluations=[dataclasses.replace(run.evaluations[0], workflow=Fails())])
    loop.train(run)
    (line, *_) = [r.getMessage() for r in caplog.records if "evaluation" in r.getMessage()]
    assert line == (
        "no episode of the evaluation has a reward: 11 reward_timeout, 1 rejected;"
        " the first: reward_timeout: RewardTimeout: too slow"
    )


def test_evaluation_counts_failures_leaves_them_out_of_the_reward_and_says_so(tmp_path, caplog):
    sinks = Sinks()
    run = make_run(tmp_path, {"evaluator.freq_steps": 1, "total_train_steps": 1}, sink=sinks)

    class Half(Repeat):
        async def episode(self, sampler, prompt, params, seed):
            if int(prompt.uid.split("/")[1]) % 2:
                raise RewardTimeout("too slow")
            trajectory = await super().episode(sampler, prompt, params, seed)
            return dataclasses.replace(trajectory, reward=float(prompt.uid.split("/")[1]))

    object.__setattr__(run.evaluations[0], "workflow", Half())
    loop.train(run)
    for line in sinks.lines().values():
        assert line["eval-rollout/reward/avg"] == np.mean([0, 2, 4, 6, 8, 10])
        assert line["eval-rollout/failed"] == line["eval-rollout/failed/reward_timeout"] == 6
    said = (
        "the evaluation's reward leaves out 6 of 12 episodes, which failed; the first: reward_timeout: RewardTimeout: too slow"
    )
    assert [r.getMessage() for r in caplog.records if "evaluation" in r.getMessage()] == [said] * len(sinks.lines())


def test_a_corrupt_newest_checkpoint_is_passed_over(tmp_path, caplog):
    overrides = {"total_train_epochs": 2, "saver.freq_steps": 2}
    straight, killed = Sinks(), Sinks(at=5, act=_kill)
    loop.train(make_run(tmp_path / "straight", overrides, sink=straight))
    with pytest.raises(Killed):
        loop.train(make_run(tmp_path / "run", overrides, sink=killed))
    newest = tmp_path / "run" / "checkpoints" / "4" / "learner" / "learner.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    loop.train(make_run(tmp_path / "run", overrides, sink=killed))
    assert killed.opened[1].first_step == 2 and "4 is not intact" in caplog.text
    assert _compared(killed.lines()) == _compared(straight.lines())


def test_a_run_never_starts_over_by_itself_where_no_checkpoint_loads(tmp_path):
    loop.train(make_run(tmp_path, {"saver.freq_steps": 2}))
    for params in (tmp_path / "checkpoints").rglob("*.safetensors"):
        params.write_bytes(b"")
    with pytest.raises(UserError, match=r"none of those .* loads .*start over"):
        loop.train(make_run(tmp_path, {}))
    with pytest.raises(UserError, match=r"recover\.mode: fresh"):
        loop.train(make_run(tmp_path, {"recover.mode": "fresh"}))


def test_a_run_that_lost_its_checkpoints_is_refused_and_one_that_had_saved_none_starts_over(tmp_path, caplog):
    lost, unsaved, new = tmp_path / "lost", tmp_path / "unsaved", tmp_path / "new"
    for path, every in ((lost, 2), (unsaved, 8)):
        with pytest.raises(Killed):
            loop.train(make_run(path, {"saver.freq_steps": every, "total_train_epochs": 4}, sink=Sinks(at=5, act=_kill)))
        if every == 2:
            require_checkpoints(path, 5)
    shutil.rmtree(lost / "checkpoints")
    with pytest.raises(UserError, match=r"checkpoints: none in .*saved one at step 4 .*--workdir"):
        require_checkpoints(lost, 5)
    shutil.rmtree(lost / "journal")
    with pytest.raises(UserError, match=r"checkpoints: none in .*has made 5 steps, and journal/ is gone too .*--workdir"):
        require_checkpoints(lost, 5)
    assert not (unsaved / "checkpoints" / "8").exists()
    require_checkpoints(new, 0)
    assert not caplog.messages or "done again" not in caplog.text
    require_checkpoints(unsaved, 5)
    assert caplog.messages[-1] == "no checkpoint had been saved yet: steps 1-5 are done again"
    (lost / "checkpoints").write_text("")
    with pytest.raises(UserError, match="is no directory"):
        require_checkpoints(lost, 5)


def test_a_finished_run_that_is_run_again_does_nothing(tmp_path):
    first = make_run(tmp_path, ASYNC)
    loop.train(first)
    again = make_run(tmp_path, ASYNC)
    assert loop.train(again) == loop.Outcome(step=3, version=3, finished=True)
    assert again.engine.learner.trained == first.engine.learner.trained


def test_export_holds_the_final_weights(tmp_path):
    from rljax.engines.fake import model

    run = make_run(tmp_path, {"saver.export_final": True})
    loop.train(run)
    np.testing.assert_array_equal(model.read(tmp_path / "export"), run.engine.learner.export(IN_MEMORY).params)


def test_prompts_spell_their_uid():
    from rljax.testing.harness import read_back

    numbers = Numbers(600)
    for _ in range(1300):
        prompt = next(numbers)
        assert read_back(np.array(spell(prompt))) == prompt.uid


class Forgetful(FakeSampler):
    """Once, when it has version 2, it comes back without weights, as a server that died and was
    started again.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.lacking, self.given = asyncio.Event(), asyncio.Event()

    async def generate(self, request):
        if self.version == 2 and not self.given.is_set():
            self.lacking.set()
            await self.given.wait()
        return await super().generate(request)

    async def load_weights(self, source, version):
        await super().load_weights(source, version)
        if self.lacking.is_set():
            self.lacking.clear()
            self.given.set()

    async def lacks_weights(self):
        await self.lacking.wait()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("freq_steps", [None, 1])
def test_a_sampler_that_comes_back_without_weights_is_given_them_also_while_the_run_evaluates(tmp_path, freq_steps):
    """Everything waits for it then: the evaluation, and the run for the evaluation."""
    sinks = Sinks()
    run = make_run(tmp_path, {"evaluator.freq_steps": freq_steps, "total_train_steps": 4}, n_prompts=40, sink=sinks)
    run.engine.sampler = Forgetful(run.config, tmp_path / "model")
    assert loop.train(run).step == 4
    assert run.engine.sampler.given.is_set()
    evaluated = [step for step, line in sinks.lines().items() if "eval-rollout/reward/avg" in line]
    assert evaluated == ([] if freq_steps is None else [0, 1, 2, 3, 4])


def test_samples_are_of_all_groups_in_turn_each_with_its_own_advantage():
    """A trajectory's only token is its advantage here, so that a mix-up shows."""
    counts = {"0/0": 3, "0/1": 1, "0/2": 2}
    numbers = iter(range(sum(counts.values())))
    ids = {uid: [next(numbers) for _ in range(count)] for uid, count in counts.items()}

    def made(token: int) -> Trajectory:
        one = np.ones(1)
        return Trajectory(np.array([token]), one < 0, one, one, reward=0.0, components={}, finish=Finish.STOP)

    groups = [Group(uid, tuple(map(made, tokens))) for uid, tokens in ids.items()]
    samples = list(reporting.interleaved(groups, [np.array([i]) for i in range(sum(counts.values()))]))
    assert [uid for uid, *_ in samples] == ["0/0", "0/1", "0/2", "0/0", "0/2", "0/0"]
    assert all(trajectory.token_ids[0] == advantage[0] for _, trajectory, advantage in samples)
    assert [int(advantage[0]) for *_, advantage in samples] == [0, 3, 4, 1, 5, 2]
