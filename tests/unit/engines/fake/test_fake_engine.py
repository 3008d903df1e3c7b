"""The fake engine: the oracle's arithmetic, a gradient that is the slope, and samples by log-probs."""

import asyncio
import dataclasses

import numpy as np
import pytest

from rljax.batching import packing
from rljax.config.allocation import Allocation, Pool
from rljax.engine import WeightsAtLeader, WeightsInMemory
from rljax.engines.fake import model
from rljax.engines.fake.learner import FakeLearner
from rljax.engines.fake.plugin import PLUGIN
from rljax.engines.fake.sampler import FakeSampler, Trouble
from rljax.errors import SamplerError, UserError
from rljax.objective.spec import Objective
from rljax.testing.harness import make_config, settle
from rljax.types import Finish, Request, SamplingParams, Trajectory

VOCAB = 7


@pytest.fixture
def model_dir(tmp_path):
    table = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32)
    model.write(tmp_path / "model", table)
    return tmp_path / "model"


def _batch(random, n=6):
    trajectories = []
    for length in random.integers(2, 9, n):
        ids = random.integers(0, VOCAB, length).astype(np.int32)
        mask = np.arange(length) >= random.integers(1, length)
        logp = random.normal(-2, 0.3, length).astype(np.float32)
        trajectories.append(Trajectory(ids, mask, logp, np.where(mask, 0, -1).astype(np.int32), 0.0, {}, Finish.STOP))

    def per_token(scale):
        return [(scale * random.normal(size=len(t))).astype(np.float32) for t in trajectories]

    return packing.batch_of(
        trajectories,
        packing.pack([len(t) for t in trajectories], 12),
        loss_weight=[np.full(len(t), 0.1, np.float32) for t in trajectories],
        advantage=per_token(1.0),
        proximal_logp=[t.behavior_logp + d for t, d in zip(trajectories, per_token(0.1), strict=True)],
        reference_logp=[t.behavior_logp + d for t, d in zip(trajectories, per_token(0.1), strict=True)],
        returns=per_token(1.0),
    )


@pytest.mark.parametrize(
    "objective",
    [Objective(), Objective(ratio_level="sequence"), Objective(loss="sft"), Objective(entropy_coef=0.3)],
    ids=["ppo", "gspo", "sft", "entropy"],
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_gradient_is_the_slope_of_the_loss(model_dir, objective, temperature):
    learner = FakeLearner(make_config({"gconfig.temperature": temperature}), model_dir)
    batch = _batch(np.random.default_rng(1))
    _, gradient, _ = learner.loss_and_gradient(batch, objective)
    table, step = learner._table.astype(np.float64), 1e-2
    for row, column in np.random.default_rng(2).integers(0, VOCAB, (8, 2)):
        slopes = []
        for h in (step, step / 2):  # Richardson: the log-probs are rounded to float32, so steps are long
            ends = []
            for sign in (1, -1):
                learner._table = table.copy()
                learner._table[row, column] += sign * h
                ends.append(learner.loss_and_gradient(batch, objective)[0])
            slopes.append((ends[0] - ends[1]) / (2 * h))
        assert (4 * slopes[1] - slopes[0]) / 3 == pytest.approx(gradient[row, column], abs=2e-5)
    assert np.abs(gradient).max() > 1e-3


def test_unit_ratio_of_the_samplers_log_probs_and_the_learners(model_dir):
    config = make_config({"gconfig.temperature": 0.7, "gconfig.max_new_tokens": 6})
    sampler, learner = FakeSampler(config, model_dir), FakeLearner(config, model_dir)
    params = SamplingParams(6, temperature=0.7, stop_token_ids=(0,))
    done = asyncio.run(sampler.generate(Request("a", np.array([3, 1], np.int32), params, 5)))
    ids = np.array([3, 1, *done.token_ids], np.int32)
    mask = np.arange(len(ids)) >= 2
    padded = np.where(mask, np.concatenate([[0, 0], done.logp]), 0).astype(np.float32)
    trajectory = Trajectory(ids, mask, padded, np.where(mask, 0, -1).astype(np.int32), 0.0, {}, done.finish)
    batch = packing.batch_of([trajectory], packing.pack([len(ids)], 8))
    np.testing.assert_array_equal(learner.score(batch), batch.behavior_logp)


def test_samples_follow_the_reported_distribution(model_dir):
    sampler = FakeSampler(make_config(), model_dir)
    params, n = SamplingParams(1, temperature=0.8), 4000

    async def draw():
        requests = (Request(str(i), np.array([2], np.int32), params, i) for i in range(n))
        return await asyncio.gather(*(sampler.generate(r) for r in requests))

    tokens = np.array([c.token_ids[0] for c in asyncio.run(draw())])
    p = np.exp(model.log_probs(model.read(model_dir), 0.8)[2])
    share = np.bincount(tokens, minlength=VOCAB) / n
    assert (np.abs(share - p) < 4.5 * np.sqrt(p * (1 - p) / n)).all()


def test_a_completion_is_a_function_of_its_request_whatever_runs_beside_it(model_dir):
    sampler, params = FakeSampler(make_config(), model_dir), SamplingParams(5)

    async def together(n):
        requests = [Request(str(i), np.array([1], np.int32), params, i) for i in range(n)]
        return (await asyncio.gather(*(sampler.generate(r) for r in requests[::-1])))[-1]

    alone, among_many = asyncio.run(together(1)), asyncio.run(together(9))
    np.testing.assert_array_equal(alone.token_ids, among_many.token_ids)


def test_weights_swapped_under_a_completion_show_in_its_versions(model_dir):
    async def scenario():
        sampler = FakeSampler(make_config(), model_dir)
        certain = np.full((VOCAB, VOCAB), -50, np.float32)
        certain[:, 4] = 50
        task = asyncio.create_task(sampler.generate(Request("a", np.array([1], np.int32), SamplingParams(200), 3)))
        await settle()
        await sampler.pause()
        await settle()
        assert not task.done()
        await sampler.load_weights(WeightsInMemory(certain), 1)
        await sampler.resume()
        return await task

    done = asyncio.run(scenario())
    swap = int(np.argmax(done.versions == 1))
    assert 0 < swap < 200 and (np.diff(done.versions) >= 0).all()
    assert (done.token_ids[swap:] == 4).all() and not (done.token_ids[:swap] == 4).all()


def test_greedy_min_new_tokens_and_stop(model_dir):
    async def run(**changes):
        sampler = FakeSampler(make_config(), model_dir)
        params = SamplingParams(**(dict(max_new_tokens=20) | changes))
        return await sampler.generate(Request("a", np.array([1], np.int32), params, 3))

    greedy = asyncio.run(run(greedy=True, max_new_tokens=1))
    row = model.log_probs(model.read(model_dir), 1.0)[1]
    assert greedy.token_ids[0] == row.argmax() and greedy.logp[0] == np.float32(row.max())
    every = tuple(range(VOCAB))[1:]
    stopped = asyncio.run(run(stop_token_ids=every, min_new_tokens=4))
    assert list(stopped.token_ids[:4]) == [0] * 4 and stopped.finish in (Finish.STOP, Finish.LENGTH)
    np.testing.assert_allclose(stopped.logp[:4], 0, atol=1e-6)  # the only token left has all the mass


def test_lost_requests_and_closing(model_dir):
    async def scenario():
        trouble = Trouble(np.random.default_rng(0), failure_rate=1.0)
        with pytest.raises(SamplerError):
            await FakeSampler(make_config(), model_dir, trouble).generate(
                Request("a", np.array([1], np.int32), SamplingParams(5), 3)
            )
        sampler = FakeSampler(make_config(), model_dir)
        task = asyncio.create_task(sampler.generate(Request("a", np.array([1], np.int32), SamplingParams(10**6), 3)))
        await settle()
        await sampler.close()
        return await task

    assert asyncio.run(scenario()).finish is Finish.ABORT


def test_a_restored_learner_goes_on_as_the_saved_one(model_dir, tmp_path):
    config, batch = make_config({"actor.adv_estimator": "gae"}), _batch(np.random.default_rng(3))
    one = FakeLearner(config, model_dir)
    one.update(batch), one.update_critic(batch), one.update_supervised(batch)
    one.save(tmp_path / "saved")
    other = FakeLearner(config, model_dir)
    other.restore(tmp_path / "saved")
    for name in ("update", "update_critic", "update_supervised"):
        assert getattr(one, name)(batch) == getattr(other, name)(batch)
    np.testing.assert_array_equal(one.score(batch), other.score(batch))
    np.testing.assert_array_equal(one.values(batch), other.values(batch))


def test_a_corrupt_checkpoint_is_refused_and_changes_nothing(model_dir, tmp_path):
    config, batch = make_config(), _batch(np.random.default_rng(3))
    learner = FakeLearner(config, model_dir)
    learner.save(tmp_path / "saved")
    learner.update(batch)
    before = learner.score(batch)
    (tmp_path / "saved" / "learner.safetensors").write_bytes(b"nonsense")
    for directory in ("saved", "nowhere"):
        with pytest.raises(UserError):
            learner.restore(tmp_path / directory)
    np.testing.assert_array_equal(learner.score(batch), before)


def test_a_learning_rate_of_zero_changes_nothing(model_dir):
    config = make_config({"actor.optimizer.lr": 0.0})
    learner, batch = FakeLearner(config, model_dir), _batch(np.random.default_rng(3))
    before = learner.score(batch)
    learner.update(dataclasses.replace(batch, proximal_logp=None))
    np.testing.assert_array_equal(learner.score(batch), before)


@pytest.mark.parametrize("changes", [{"gconfig.stop": ("x",)}, {"gconfig.top_k": 2}, {"evaluator.top_p": 0.5}])
def test_what_its_sampler_cannot_draw_is_refused_where_it_samples(changes):
    config, pool = make_config(changes), Pool("fake")
    with pytest.raises(UserError, match="the engine fake has no top_p, top_k or stop strings"):
        PLUGIN.check(config, Allocation(pool, pool))
    PLUGIN.check(config, Allocation(Pool("http"), pool))  # another's sampler may
    PLUGIN.check(config, Allocation(None, pool))


def test_weights_that_no_learner_of_its_own_gives_are_refused(model_dir):
    with pytest.raises(UserError, match="the engine fake takes weights from memory or from a directory"):
        asyncio.run(FakeSampler(make_config(), model_dir).load_weights(WeightsAtLeader(), 1))
