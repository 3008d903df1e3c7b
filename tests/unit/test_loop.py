"""The loop on the fake engine: what is sampled, trained on and published, and in which order."""

import asyncio
import dataclasses
import threading
from collections import Counter

import numpy as np
import pytest

from rljax import loop
from rljax.engines.fake import model
from rljax.engines.fake.sampler import FakeSampler, Trouble
from rljax.errors import RewardTimeout, TooManyFailures
from rljax.rollout.trajectories import trajectory_of
from rljax.testing.harness import Numbers, RememberingLearner, Repeat, make_run, read_back, spell
from rljax.types import Completion, Finish, Request, SamplingParams
from tests.unit.loop_runs import ASYNC, Sinks, assert_once, compared


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_exactly_once_within_the_lag_bound(tmp_path, max_lag):
    trouble = Trouble(np.random.default_rng(0), delay=0.002)
    overrides = {"rollout.max_head_offpolicyness": max_lag, "total_train_epochs": 2}
    run = make_run(tmp_path, overrides, n_prompts=18, trouble=trouble)  # 36 prompts by fours; 18 is no multiple of 4
    outcome = loop.train(run)
    assert outcome == loop.Outcome(step=9, version=9, finished=True)
    assert_once(run, 18, 2)
    assert run.engine.learner.most_lag <= max_lag
    assert (run.engine.learner.most_lag > 0) == (max_lag > 0)


def test_a_last_batch_that_is_not_full_is_trained_on(tmp_path):
    sinks = Sinks()
    run = make_run(tmp_path, {"total_train_epochs": 1}, n_prompts=10, sink=sinks)
    assert loop.train(run).step == 3
    assert [line["rollout/groups"] for line in sinks.lines().values()] == [4, 4, 2]
    assert_once(run, 10, 1)


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


def test_the_transports_publish_the_same_weights(tmp_path):
    lines = []
    for in_memory in (True, False):
        sinks = Sinks()
        loop.train(make_run(tmp_path / str(in_memory), {}, sink=sinks, in_memory=in_memory))
        lines.append(compared(sinks.lines()))
    assert lines[0] == lines[1] and len(lines[0]) == 3


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
    assert_once(run, 16, 1)
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


def test_warm_up_then_reinforcement_learns_the_task(tmp_path):
    sinks = Sinks()
    warmup = {"warmup.steps": 10, "warmup.batch_size": 4, "warmup.optimizer.lr": 0.1}
    rest = {"actor.optimizer.lr": 0.2, "total_train_epochs": 30, "evaluator.freq_steps": 1000, "gconfig.n_samples": 8}
    loop.train(make_run(tmp_path, ASYNC | warmup | rest, n_prompts=4, sink=sinks))
    lines = sinks.lines()
    before, after = (line["eval-rollout/reward/avg"] for line in lines.values() if "eval-rollout/reward/avg" in line)
    assert lines[9]["warmup/nll"] < lines[1]["warmup/nll"]
    assert after >= before + 0.25


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
