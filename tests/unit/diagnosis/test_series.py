"""Statistics of series against scipy, and what must not move them."""

import numpy as np
import pytest
from scipy import stats

from rljax.diagnosis.series import BLOCKS, Series, block_means, correlation, rolling_median, sustained, trend


def series(values) -> Series:
    values = np.asarray(values, np.float64)
    return Series("x", np.arange(1, len(values) + 1), values)


@pytest.mark.parametrize("seed", range(10))
def test_a_trend_is_that_of_scipy(seed):
    random = np.random.default_rng(seed)
    values = np.round(random.standard_normal(BLOCKS).cumsum(), 1)  # rounded: some are tied
    ours, steps = trend(series(values)), np.arange(1, BLOCKS + 1)
    assert ours.slope == pytest.approx(stats.theilslopes(values, steps)[0])
    theirs = stats.kendalltau(steps, values, method="asymptotic").pvalue  # without the correction for continuity
    assert ours.p_value >= theirs and ours.p_value == pytest.approx(theirs, rel=0.25)


def test_ties_make_a_trend_less_sure_and_not_more():
    values = np.repeat([0.0, 1.0], BLOCKS // 2)
    theirs = stats.kendalltau(np.arange(BLOCKS), values, method="asymptotic").pvalue
    assert trend(series(values)).p_value == pytest.approx(theirs, rel=0.25)


def test_a_trend_turns_with_the_series():
    values = np.random.default_rng(0).standard_normal(200) + np.linspace(0, 5, 200)
    up, down = trend(series(values)), trend(series(-values))
    assert up.rises(1e-3) and down.falls(1e-3)
    assert (up.slope, up.p_value) == (-down.slope, down.p_value)


def test_noise_has_no_trend():
    found = [trend(series(np.random.default_rng(seed).standard_normal(100))).p_value for seed in range(300)]
    assert np.mean(np.array(found) < 0.05) < 0.1


def test_a_constant_or_short_series_has_no_trend():
    assert trend(series(np.ones(50))).p_value == 1 and trend(series([1, 2, 3])).p_value == 1


def test_block_means_keep_the_mean():
    values = np.random.default_rng(0).standard_normal(BLOCKS * 5)
    means = block_means(series(values))
    assert len(means) == BLOCKS and means.mean == pytest.approx(values.mean())


def test_one_step_beyond_is_not_sustained():
    beyond = np.zeros(30, bool)
    beyond[10] = True
    assert sustained(series(beyond), beyond, window=5) is None


@pytest.mark.parametrize("start", [0, 7, 25])
def test_sustained_returns_the_first_step(start):
    beyond = np.arange(30) >= start
    assert sustained(series(beyond), beyond, window=5) == start + 1


def test_sustained_allows_a_gap_but_not_at_its_beginning():
    beyond = np.array([0, 1, 1, 0, 1, 1, 1, 0, 0, 0], bool)
    assert sustained(series(beyond), beyond, window=5, share=0.8) == 2
    assert sustained(series(beyond), beyond, window=5, share=1.0) is None


def test_a_rolling_median_ignores_an_outlier():
    values = np.zeros(20)
    values[10] = 1e9
    assert (rolling_median(series(values), 5).values == 0).all()
    assert rolling_median(series(values), 5).steps[0] == 5
    assert not rolling_median(series(values[:4]), 5)


def test_correlation_is_that_of_numpy_and_undefined_for_a_constant():
    x, y = np.random.default_rng(0).standard_normal((2, 50))
    assert correlation(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert np.isnan(correlation(x, np.ones(50)))
