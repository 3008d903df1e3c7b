import numpy as np

from rljax.objective.losses import interpolated_proximal
from rljax.objective.proximal import interpolation
from rljax.types import PROMPT_VERSION


def test_a_policy_that_moves_evenly_is_interpolated_exactly():
    """log-probs linear in the number of updates: the shortcut gives those of the update's start."""
    start, slope = -1.3, 0.07
    versions = np.array([[2, 4, 5, 7, 8]])
    for minibatch in range(4):
        current = np.full((1, 5), start + slope * (8 + minibatch / 4))
        behavior = start + slope * versions
        a = interpolation(versions, version=8, minibatch=minibatch, n_minibatches=4)
        proximal = interpolated_proximal(current, behavior, a, np.ones((1, 5), bool))
        np.testing.assert_allclose(proximal, start + slope * 8, atol=1e-7)


def test_the_first_minibatch_is_exact():
    """The coefficient is 1 whatever the lag, and the log-probs are the current ones exactly."""
    versions = np.array([[PROMPT_VERSION, 0, 3, 8]])
    a = interpolation(versions, version=8, minibatch=0, n_minibatches=4)
    assert (a == 1).all() and a.dtype == np.float32
    logp = np.log(np.array([[0.1, 0.2, 0.3, 0.7]]))
    assert (interpolated_proximal(logp, logp - 3.3, a, np.ones((1, 4), bool)) == logp).all()


def test_a_token_of_no_lag_has_its_behavior_policy():
    a = interpolation(np.array([8]), version=8, minibatch=1, n_minibatches=2)
    assert a == 0


def test_coefficients_fall_along_the_update_and_rise_with_lag():
    versions = np.arange(8)
    rows = [interpolation(versions, version=8, minibatch=k, n_minibatches=4) for k in range(4)]
    assert (np.diff(rows, axis=0) < 0).all()
    assert (np.diff(rows[1]) < 0).all()  # older tokens lie further from their behavior policy
    assert all(((row >= 0) & (row <= 1)).all() for row in rows)
