"""Scoring again tells disagreement of sampler and learner from the age of the weights."""

import shutil

import numpy as np
import pytest

from rljax.engines.fake.sampler import FakeSampler
from rljax.flight.recording import Recording
from rljax.flight.rescore import Cause, Rescored, divergence, rescore
from tests.unit.flight.recorded import ASYNC, replayer_of, train

# Weights move so far in a step that tokens of older versions are improbable, and no cap hides it
FAST = ASYNC | {"rollout.max_head_offpolicyness": 2, "actor.optimizer.lr": 0.6, "total_train_epochs": 8, "saver.freq_steps": 3}

WARMED = {"warmup.steps": 20, "warmup.batch_size": 12, "warmup.optimizer.lr": 0.3}


def rescored(workdir, step) -> Rescored:
    recording = Recording(workdir)
    return rescore(recording, replayer_of(workdir), recording.read(step))


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("agreeing")
    train(workdir, FAST | {"saver.keep_last": 9}, n_prompts=16)
    return workdir


def test_the_log_ratio_is_drift_less_disagreement(agreeing):
    """Each part is computed by itself; together they are what the run recorded."""
    record, found = Recording(agreeing).read(20), rescored(agreeing, 20)
    masks = [t.loss_mask for group in record.groups for t in group.trajectories]
    behavior = np.concatenate([t.behavior_logp[t.loss_mask] for group in record.groups for t in group.trajectories])
    proximal = np.concatenate([p[mask] for p, mask in zip(record.scores["proximal_logp"], masks, strict=True)])
    assert found.unreached == 0 and found.lag.max() > 0
    np.testing.assert_allclose(found.drift - found.disagreement, (proximal - behavior).astype(np.float64), atol=2e-6)


def test_a_sampler_that_agrees_has_no_disagreement_and_fresh_tokens_no_drift(agreeing):
    for step in (9, 20):
        found = rescored(agreeing, step)
        assert np.abs(found.disagreement).max() < 1e-6
        assert np.abs(found.drift[found.lag == 0]).max(initial=0) == 0
        assert np.abs(found.drift[found.lag > 0]).max() > 0


def test_stale_tokens_are_told_by_their_drift(agreeing):
    found = max((rescored(agreeing, step) for step in range(4, 20)), key=lambda r: divergence(r.drift))
    assert found.cause is Cause.STALENESS
    assert found.lines()[-1].startswith("verdict: the tokens are stale: a KL divergence of ")


def test_a_sampler_at_another_temperature_disagrees(tmp_path, monkeypatch):
    """Also where the tokens are stale as well."""
    row = FakeSampler._row

    def hotter(self, last, request, position):
        logp = row(self, last, request, position) / 1.5
        return logp - np.logaddexp.reduce(logp)

    monkeypatch.setattr(FakeSampler, "_row", hotter)
    train(tmp_path, ASYNC | {"actor.optimizer.lr": 0.2, "saver.freq_steps": 3, "saver.keep_last": 9} | WARMED)
    found = rescored(tmp_path, Recording(tmp_path).steps()[-1])
    assert found.cause is Cause.DISAGREEMENT and np.abs(found.disagreement).mean() > 0.1


def test_a_sampler_that_takes_no_weights_is_told_by_those_that_it_has(tmp_path, monkeypatch):
    load = FakeSampler.load_weights

    async def load_the_first(self, source, version):
        if version == 0:
            await load(self, source, version)
        self.version = version

    monkeypatch.setattr(FakeSampler, "load_weights", load_the_first)
    train(tmp_path, FAST | {"total_train_epochs": 4, "saver.keep_last": 9} | WARMED)
    recording = Recording(tmp_path)
    found = rescored(tmp_path, recording.steps()[-1])
    assert found.cause is Cause.OTHER_WEIGHTS and found.drawn_by == 20


def test_without_a_cap_few_heavy_tokens_are_named():
    n = 1000
    drift = np.zeros(n)
    drift[:3] = np.log(300.0)

    def made(cap):
        return Rescored(7, cap, np.ones(n, np.int32), np.zeros(n), drift, np.ones(n, bool), 0)

    assert made(None).cause is Cause.NO_CAP and "set it to 5" in made(None).lines()[-1]
    assert made(5.0).cause is Cause.STALENESS


def test_tokens_whose_weights_are_gone_are_counted_and_left_out(agreeing, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(agreeing, copy)
    found = rescored(copy, 20)
    (copy / "checkpoints" / "19").mkdir()  # the step still begins with its weights, and nothing leads to older ones
    replayer = replayer_of(copy)
    replayer.go_to(19, Recording(copy).read(20).config)
    replayer.learner.save(copy / "checkpoints" / "19" / "learner")
    for step in range(1, 20):
        shutil.rmtree(copy / "flight" / str(step))
    less = rescored(copy, 20)
    assert less.unreached == (found.lag > 0).sum() > 0
    np.testing.assert_array_equal(less.drift, found.drift[found.lag == 0])


def test_the_divergence_estimate_is_that_of_two_distributions():
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.3, 0.4])
    log_ratio = np.repeat(np.log(q / p), (p * 1000).astype(int))  # tokens as often as p draws them
    assert divergence(log_ratio) == pytest.approx(float(p @ np.log(p / q)))
    assert divergence(np.zeros(5)) == divergence(np.zeros(0)) == 0
