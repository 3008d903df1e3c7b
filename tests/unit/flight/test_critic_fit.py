"""A critic trained on one recorded batch: whether it can fit, against what is known of the batch."""

import dataclasses

import numpy as np
import pytest

from rljax.engines.fake import model
from rljax.engines.fake.learner import FakeLearner
from rljax.flight.critic_fit import Fit, explained, fit_critic, for_fitting
from rljax.testing.harness import VOCAB, make_config
from rljax.types import Finish, Group, Trajectory

GAE = {
    "actor.adv_estimator": "gae",
    "actor.gae_lambda": 1.0,
    "actor.reward_norm.mean_level": "none",
    "actor.reward_norm.std_level": "none",
    "actor.mb_spec.max_tokens_per_row": 64,
    "critic.optimizer.lr": 0.1,
    "critic.optimizer.lr_scheduler_type": "cosine",
    "critic.optimizer.weight_decay": 0.0,
    "total_train_steps": 2,
}


def batch(reward_of, n=64, seed=0):
    """Trajectories of one trained token after two given ones; the fake critic sees the second."""
    random, groups = np.random.default_rng(seed), []
    for i in range(n):
        ids = random.integers(1, 8, 3).astype(np.int32)
        mask = np.array([False, False, True])
        reward = float(reward_of(ids, random))
        logp = np.array([0, 0, -1], np.float32)
        groups.append(Group(f"0/{i}", (Trajectory(ids, mask, logp, np.where(mask, 0, -1), reward, {}, Finish.STOP),)))
    return groups


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("critic") / "model"
    model.make_model(directory, VOCAB)
    return directory


def fitted(model_dir, groups, passes=100, lr_factor=1.0, **overrides):
    config = for_fitting(make_config(GAE | overrides), lr_factor)
    return fit_critic(FakeLearner(config, model_dir), config, groups, passes)


def by_last(ids, random):
    """A reward that the context decides."""
    return ids[1] / 4


def test_a_critic_that_can_fit_does_and_its_rate_stays_constant(model_dir):
    """The run's own schedule would have been at its end after two steps."""
    found = fitted(model_dir, batch(by_last))
    assert found.fit is Fit.FITS and found.ceiling == pytest.approx(1.0)
    assert found.explained_variance[0] == pytest.approx(0.0)
    assert found.explained_variance[-1] > 0.99
    assert found.value_mean[-1] == pytest.approx(found.return_mean, abs=0.05)


def test_no_critic_explains_more_than_the_ceiling(model_dir):
    """Half of the reward is noise behind the context. The fake critic sees one token, the ceiling all before."""
    groups = batch(lambda ids, random: ids[1] / 4 + random.normal(), n=400)
    found = fitted(model_dir, groups, passes=200)
    contexts = np.array([t.token_ids[1] for group in groups for t in group.trajectories])
    returns = np.array([t.reward for group in groups for t in group.trajectories])
    best = np.array([returns[contexts == c].mean() for c in contexts])
    assert found.explained_variance.max() <= explained(best, returns) + 1e-6 <= found.ceiling + 2e-6
    assert found.explained_variance[-1] == pytest.approx(explained(best, returns), abs=0.02)


@pytest.mark.parametrize(
    ("reward", "changes", "fit"),
    [
        (lambda ids, random: 1.0, {}, Fit.NOTHING),
        (lambda ids, random: random.normal(), {}, None),  # the last token alone says little
        (by_last, {"critic.optimizer.lr": 0.0}, Fit.STANDS),
        (lambda ids, random: 1000.0 * ids[1], {}, Fit.STANDS),
        (by_last, {"critic.optimizer.lr": 100.0}, Fit.DIVERGES),
    ],
    ids=["equal returns", "noise", "no rate", "returns out of reach", "a rate too high"],
)
def test_a_critic_that_can_not_fit_is_told_apart(model_dir, reward, changes, fit):
    found = fitted(model_dir, batch(reward), passes=20, **changes)
    assert found.fit is not Fit.FITS and (fit is None or found.fit is fit)


def test_the_scale_of_returns_is_told_beside_that_of_values(model_dir):
    assert fitted(model_dir, batch(by_last)).scale == pytest.approx(1.0, abs=0.1)
    assert fitted(model_dir, batch(lambda ids, random: 1000.0 * ids[1]), passes=5).scale > 100


def test_a_higher_rate_fits_what_the_runs_own_does_not_reach(model_dir):
    groups = batch(lambda ids, random: 100.0 * ids[1])
    slow, fast = (fitted(model_dir, groups, passes=60, lr_factor=factor) for factor in (1.0, 100.0))
    assert slow.fit is not Fit.FITS and fast.fit is Fit.FITS
    assert fast.lr == pytest.approx(100 * slow.lr)


def test_the_policy_stays(model_dir):
    config = for_fitting(make_config(GAE))
    learner = FakeLearner(config, model_dir)
    before = learner._table.copy()
    fit_critic(learner, config, batch(by_last), 3)
    np.testing.assert_array_equal(learner._table, before)


def test_each_pass_clips_at_the_values_from_before_it_and_aims_at_the_first_returns(model_dir):
    config, targets = for_fitting(make_config(GAE)), []

    class Watching(FakeLearner):
        def update_critic(self, given):
            np.testing.assert_array_equal(given.values, self.values(given))
            targets.append(given.returns)
            return super().update_critic(given)

    fit_critic(Watching(config, model_dir), config, batch(by_last), 3)
    assert len(targets) == 3 and all(np.array_equal(target, targets[0]) for target in targets)


def test_for_fitting_changes_the_rate_of_the_critic_alone():
    config = make_config(GAE)
    changed = for_fitting(config, 10.0)
    assert changed.critic.optimizer.lr == 10 * config.critic.optimizer.lr
    assert (config.critic.optimizer.lr_scheduler_type, changed.critic.optimizer.lr_scheduler_type) == ("cosine", "constant")
    assert dataclasses.replace(changed, critic=config.critic) == config
