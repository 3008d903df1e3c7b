"""The share of the returns' variance that a critic explains, and where there is none to share."""

import numpy as np
import pytest

from rljax.metrics.mean import Mean, flatten, merge
from rljax.objective.explained_variance import explained_variance


def moments(values, returns, dtype=np.float64):
    """What an update reports, summed in dtype as a learner sums."""
    values, returns = np.asarray(values, dtype), np.asarray(returns, dtype)
    named = {"value": values, "return": returns, "squared_error": (values - returns) ** 2, "squared_return": returns**2}
    return {
        f"critic/{name}": Mean(float(x.sum(dtype=dtype)), len(x), float(x.min()), float(x.max())) for name, x in named.items()
    }


def test_a_perfect_critic_explains_all_and_one_that_knows_the_mean_nothing():
    returns = np.array([1.0, 2.0, 6.0])
    assert explained_variance(moments(returns, returns)) == Mean(1.0, 1)
    assert explained_variance(moments(np.full(3, returns.mean()), returns)).value == pytest.approx(0, abs=1e-15)
    assert explained_variance(moments(returns + 5, returns)).value == pytest.approx(1)  # an offset is no variance
    assert explained_variance(moments(-returns, returns)).value == pytest.approx(-3)  # Var[2 R] is 4 Var[R]


def test_cutting_a_batch_into_minibatches_changes_nothing():
    random = np.random.default_rng(0)
    values, returns = random.normal(size=(2, 40))
    parts = [moments(values[part], returns[part]) for part in (slice(0, 7), slice(7, 8), slice(8, 40))]
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert explained_variance(merge(parts)).value == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("level", [0.0, 0.1, 1.0, -3e4])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bounds", [True, False], ids=["with bounds", "without"])
def test_equal_returns_leave_nothing_to_explain_whatever_the_critic_says(level, dtype, bounds):
    """The sums of equal numbers differ from a multiple of them by rounding, which is no variance."""
    count = 1001
    for values in (np.full(count, level), np.linspace(-1, 1, count)):
        means = moments(values, np.full(count, level), dtype)
        if not bounds:
            means = {name: Mean(mean.sum, mean.count) for name, mean in means.items()}
        share = explained_variance(means)
        assert share.count == 0
        assert "critic/explained_variance" not in flatten({"critic/explained_variance": share})


def test_nothing_trained_is_nothing_explained():
    assert explained_variance(dict.fromkeys(moments([0.0], [0.0]), Mean(0.0, 0))).count == 0
