"""Curves: thinning keeps means and extremes, and smoothing keeps lines straight."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st

from rljax.diagnosis import History
from rljax.diagnosis.report.curves import FEWEST_TO_SMOOTH, Curve, bins_of, curve_of, rounded

STEPS = numpy_st.arrays(np.int64, st.integers(1, 60), elements=st.integers(1, 500), unique=True).map(np.sort)
VALUES = st.floats(-1e6, 1e6)


@given(STEPS, st.integers(1, 20))
def test_bins_hold_every_step_once_and_are_of_one_width(steps, points):
    bins = bins_of(steps, points)
    widths = np.diff(bins.edges)
    assert 1 <= len(widths) <= points and len(set(widths.tolist())) == 1
    index = bins.index(steps)
    assert ((index >= 0) & (index < len(widths))).all()
    assert ((bins.edges[index] < steps) & (steps <= bins.edges[index + 1])).all()


@given(st.data())
def test_thinning_keeps_the_mean_and_the_extremes(data):
    steps = data.draw(STEPS)
    values = data.draw(numpy_st.arrays(np.float64, len(steps), elements=VALUES | st.just(np.nan)))
    bins = bins_of(steps, data.draw(st.integers(1, 20)))
    curve = curve_of(History(steps, {"x": values}), "x", bins)
    found = np.isfinite(values)
    if not found.any():
        assert curve is None
        return
    assert curve is not None and not curve.distribution
    counts = np.bincount(bins.index(steps[found]))
    np.testing.assert_allclose((curve.mean * counts[counts > 0]).sum(), values[found].sum(), atol=1e-6)
    assert curve.low.min() == values[found].min() and curve.high.max() == values[found].max()
    assert set(curve.steps) <= set(bins.edges[1:])


@given(STEPS, st.data())
def test_with_a_bin_per_step_a_curve_is_its_series(steps, data):
    values = data.draw(numpy_st.arrays(np.float64, len(steps), elements=VALUES))
    history = History(steps, {"x/avg": values, "x/min": values - 1, "x/max": values + 2})
    curve = curve_of(history, "x", bins_of(steps, points=500))
    assert curve is not None and curve.distribution
    np.testing.assert_array_equal(curve.steps, steps)
    for drawn, recorded in ((curve.mean, values), (curve.low, values - 1), (curve.high, values + 2)):
        np.testing.assert_array_equal(drawn, recorded)


@pytest.mark.parametrize("n", [1, FEWEST_TO_SMOOTH - 1, FEWEST_TO_SMOOTH, 300])
def test_a_straight_line_is_its_own_moving_mean(n):
    line = 3 - 0.5 * np.arange(n)
    curve = Curve("x", np.arange(n), line, line, line, False)
    np.testing.assert_allclose(curve.smooth(), line, atol=1e-9)


def test_noise_is_smoothed_and_its_mean_is_kept():
    noise = np.tile([1.0, -1.0], 150)
    smooth = Curve("x", np.arange(300), noise, noise, noise, False).smooth()
    assert np.abs(smooth[20:-20]).max() < 0.2


def test_what_is_not_finite_has_no_number():
    assert rounded([1 / 3, np.nan, np.inf, 123456789.0]) == [0.333333, None, None, 123457000.0]
