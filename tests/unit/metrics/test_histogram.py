"""Histograms: every value is counted in the bin that holds it, and similar steps share edges."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rljax.metrics.histogram import BINS, Histogram

FLOATS = st.floats(-1e12, 1e12, allow_nan=False, allow_subnormal=False)  # half of a subnormal may be 0
LARGE = st.floats(1e9, 1.7e308) | st.floats(-1.7e308, -1e9) | st.sampled_from([0.0, 2.0**53, 2.0**63])


@given(st.lists(FLOATS, min_size=1, max_size=200) | st.lists(LARGE, min_size=1, max_size=200))
@example([1e300])
@example([-1.7e308, 1.7e308])
def test_every_value_is_in_its_bin(values):
    histogram = Histogram.of(values)
    edges, counts = histogram.edges, histogram.counts
    assert len(edges) == len(counts) + 1 <= BINS + 1
    assert np.all(np.diff(edges) > 0)
    inside = [(np.array(values) >= low) & (np.array(values) < high) for low, high in itertools.pairwise(edges)]
    assert [int(one.sum()) for one in inside] == counts.tolist() and counts.sum() == len(values)


@given(st.lists(FLOATS, min_size=2, max_size=50), st.integers(0, 50))
def test_parts_over_the_same_edges_add_up_to_the_whole(values, cut):
    low, high = min(values), max(values)
    one, other = [low, high, *values[:cut]], [low, high, *values[cut:]]
    try:
        merged = Histogram.of(one) + Histogram.of(other)
    except ValueError:  # one part has whole numbers alone, and wider bins
        return
    whole = Histogram.of([*one, *other])
    assert np.array_equal(merged.edges, whole.edges) and np.array_equal(merged.counts, whole.counts)


def test_whole_numbers_have_bins_of_their_own():
    histogram = Histogram.of(np.array([[0.0, 1.0], [0.0, 3.0]]))
    assert histogram.edges.tolist() == [0, 1, 2, 3, 4] and histogram.counts.tolist() == [2, 1, 0, 1]
    assert Histogram.of([9.0, 9.0]).edges.tolist() == [9, 10]


def test_other_edges_do_not_add_up():
    with pytest.raises(ValueError, match=r"2 bins from 0 to 2 and 1 bins from 0.25 to 0.5 don't add up"):
        Histogram.of([0.0, 1.0]) + Histogram.of([0.25])


def test_values_that_are_not_finite_are_left_out():
    assert Histogram.of([1.0, math.nan, math.inf]).counts.tolist() == [1]
    assert Histogram.of([math.nan]) is None and Histogram.of([]) is None


def test_json_gives_the_same_histogram():
    histogram = Histogram.of(np.random.default_rng(0).normal(size=100))
    again = Histogram.from_json(json.loads(json.dumps(histogram.to_json())))
    assert np.array_equal(again.edges, histogram.edges) and np.array_equal(again.counts, histogram.counts)
