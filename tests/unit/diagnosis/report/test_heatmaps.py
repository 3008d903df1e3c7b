"""Histograms over steps: adding them up loses nothing."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rljax.diagnosis.report.heatmaps import COLUMNS, MOST_BINS, cells_of, merged
from rljax.diagnosis.run_files import Bins
from rljax.metrics.histogram import Histogram

BATCHES = st.lists(st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=1, max_size=30), min_size=1, max_size=6)


def bins_of(values) -> Bins:
    histogram = Histogram.of(values)
    return Bins(histogram.edges, histogram.counts.astype(np.float64))


@given(BATCHES)
def test_histograms_of_a_run_add_up_to_the_histogram_of_all_values(batches):
    total = merged([bins_of(batch) for batch in batches])
    assert len(total.counts) <= MOST_BINS + 1
    everything = np.concatenate(batches)
    expected = [((everything >= low) & (everything < high)).sum() for low, high in itertools.pairwise(total.edges)]
    np.testing.assert_allclose(total.counts, expected, atol=1e-9)


def test_a_bin_that_two_others_share_is_split_by_its_overlap():
    total = merged([Bins(np.array([0.0, 2.0, 4.0]), np.array([1.0, 0.0])), Bins(np.array([1.0, 3.0]), np.array([4.0]))])
    np.testing.assert_array_equal(total.edges, [0, 2, 4])
    np.testing.assert_array_equal(total.counts, [3, 2])


@given(st.integers(1, 3 * COLUMNS))
def test_every_column_has_the_whole_of_its_steps(n):
    cells = cells_of({step: bins_of([0.0, 1.0, 1.0]) for step in range(5, 5 + n)})
    columns = sorted(set(zip(cells["step"], cells["step2"], strict=True)))
    assert len(columns) <= COLUMNS and columns[0][0] == 4 and columns[-1][1] == 4 + n
    assert all(before == after for (_, before), (after, _) in itertools.pairwise(columns))
    for column in columns:
        shares = [cells["share"][i] for i in range(len(cells["share"])) if (cells["step"][i], cells["step2"][i]) == column]
        np.testing.assert_allclose(sorted(shares), [1 / 3, 2 / 3], atol=1e-5)


def test_whole_numbers_are_drawn_around_themselves_and_others_within_their_bins():
    bins = {1: Bins(np.array([0.0, 1.0, 2.0]), np.array([1.0, 3.0]))}
    whole, real = cells_of(bins, whole=True), cells_of(bins)
    assert (whole["low"], whole["high"], whole["values"]) == ([-0.5, 0.5], [0.5, 1.5], ["0", "1"])
    assert (real["low"], real["high"], real["values"]) == ([0, 1], [1, 2], ["0 to 1", "1 to 2"])


def test_nothing_counted_is_nothing_drawn():
    assert cells_of({}) == {}
    assert cells_of({1: Bins(np.array([0.0, 1.0]), np.array([0.0]))}) == {}
