"""Packing loses nothing, mixes nothing, and is as tight and as even as stated."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.batching import packing
from rljax.errors import UserError
from rljax.types import Finish, Trajectory

QUICK = settings(max_examples=60, deadline=None)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def _plain_first_fit_decreasing(lengths, capacity):
    """Rows of the textbook algorithm: every item, longest first, into the first row with room."""
    room = []
    for length in sorted(lengths, reverse=True):
        for row, left in enumerate(room):
            if length <= left:
                room[row] -= length
                break
        else:
            room.append(capacity - length)
    return len(room)


def _check_rows(packed, lengths):
    """Rows are dense from their start, no two trajectories overlap, none is cut, none is lost."""
    np.testing.assert_array_equal(packed.length, lengths)
    for row in range(packed.shape[0]):
        inside = np.flatnonzero(packed.row == row)
        inside = inside[np.argsort(packed.offset[inside])]
        ends = np.cumsum(packed.length[inside])
        np.testing.assert_array_equal(packed.offset[inside], ends - packed.length[inside])
        assert 0 < ends[-1] <= packed.shape[1]


@QUICK
@given(LENGTHS, st.integers(40, 100))
def test_rows_are_those_of_first_fit_decreasing(lengths, capacity):
    packed = packing.pack(lengths, capacity)
    _check_rows(packed, lengths)
    assert packed.shape == (_plain_first_fit_decreasing(lengths, capacity), capacity)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(4096, 40000))
def test_many_lengths_are_rounded_without_a_gap_or_a_cut(seed, capacity):
    lengths = np.random.default_rng(seed).integers(1, capacity + 1, packing.EXACT_BELOW + 1)
    packed = packing.pack(lengths, capacity)
    order = np.lexsort((packed.offset, packed.row))
    end = (packed.offset + packed.length)[order]
    same_row = np.diff(packed.row[order]) == 0
    np.testing.assert_array_equal(packed.offset[order][1:], np.where(same_row, end[:-1], 0))
    assert end.max() <= capacity
    np.testing.assert_array_equal(np.unique(packed.row), np.arange(packed.shape[0]))


@pytest.mark.parametrize("low,high,capacity", [(100, 1024, 4096), (1, 4096, 4096), (1, 16384, 32768)])
def test_100k_lengths_are_within_half_a_percent_of_the_sum(low, high, capacity):
    lengths = np.random.default_rng(low + high).integers(low, high + 1, 100_000)
    assert packing.pack(lengths, capacity).shape[0] <= 1.005 * lengths.sum() / capacity


@QUICK
@given(LENGTHS, st.randoms(use_true_random=False))
def test_scatter_then_gather_gives_each_trajectory_its_own_tokens(lengths, random):
    packed = packing.pack(lengths, 40)
    arrays = [np.array([random.random() for _ in range(n)], np.float32) for n in lengths]
    rows = packed.scatter(arrays, np.float32)
    for got, want in zip(packed.gather(rows), arrays, strict=True):
        np.testing.assert_array_equal(got, want)
    assert np.count_nonzero(rows) == sum(np.count_nonzero(a) for a in arrays)  # padding is zero


@QUICK
@given(LENGTHS)
def test_segments_and_positions_say_where_each_trajectory_lies(lengths):
    packed = packing.pack(lengths, 40)
    segments, positions = packed.segment_ids(), packed.positions()
    for row, offset, length in zip(packed.row, packed.offset, packed.length, strict=True):
        np.testing.assert_array_equal(positions[row, offset : offset + length], np.arange(length))
        assert len(set(segments[row, offset : offset + length].tolist())) == 1
    for row in range(packed.shape[0]):
        used = segments[row][segments[row] > 0]
        assert (np.diff(used) >= 0).all() and set(used.tolist()) == set(range(1, used.max() + 1))
        assert np.count_nonzero(packed.row == row) == used.max()


def test_a_length_outside_the_row_is_refused():
    for lengths in ([0, 3], [9]):
        with pytest.raises(ValueError, match="do not fit"):
            packing.pack(lengths, 8)
    with pytest.raises(UserError, match="max_tokens_per_row"):
        packing.row_tokens_for([3, 9], 8)


@QUICK
@given(LENGTHS, st.sampled_from([1, 2, 8]))
def test_the_row_length_is_the_smallest_bucket_that_takes_one_micro_batch(lengths, rows_per_mb):
    capacity = 64
    chosen = packing.row_tokens_for(lengths, capacity, rows_per_mb)
    buckets = [capacity >> i for i in range(packing.ROW_BUCKETS)]
    enough = [b for b in buckets if max(lengths) <= b and _plain_first_fit_decreasing(lengths, b) <= rows_per_mb]
    assert chosen == min(enough, default=capacity)


@pytest.mark.parametrize("equal_counts", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_cost_the_same_within_one_percent(ranks, equal_counts):
    lengths = np.random.default_rng(ranks).integers(100, 4097, 256 * ranks + 1)
    costs = packing.cost(lengths, 1.0, 1e-3)
    parts = packing.balance(costs, ranks, equal_counts=equal_counts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(lengths)))
    totals = np.array([costs[p].sum() for p in parts])
    assert totals.max() <= 1.01 * totals.min()
    if equal_counts:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@QUICK
@given(st.lists(st.floats(0.1, 100.0), max_size=30), st.integers(1, 5))
def test_trading_never_makes_the_dearest_part_dearer_than_the_greedy_bound(costs, parts):
    split = packing.balance(np.array(costs), parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(split)), np.arange(len(costs)))
    dearest = max(sum(costs[i] for i in p) for p in split)
    assert dearest <= sum(costs) / parts + 2 * max(costs, default=0.0) + 1e-9


def _trajectory(prompt, completion, version):
    ids = np.array([*prompt, *completion], np.int32)
    sampled = np.arange(len(ids)) >= len(prompt)
    return Trajectory(
        token_ids=ids,
        loss_mask=sampled,
        behavior_logp=np.where(sampled, -1.5 - ids, 0).astype(np.float32),
        versions=np.where(sampled, version, -1).astype(np.int32),
        reward=0.0,
        components={},
        finish=Finish.STOP,
    )


def test_a_batch_holds_what_its_trajectories_hold_and_no_weight_off_the_mask():
    trajectories = [_trajectory([5, 6], [7], 3), _trajectory([1], [2, 3, 4, 5], 4), _trajectory([9], [8], 0)]
    packed = packing.pack([len(t) for t in trajectories], 6)
    ones = [np.ones(len(t), np.float32) for t in trajectories]
    batch = packing.batch_of(trajectories, packed, loss_weight=ones, advantage=[2 * o for o in ones])
    for name in ("token_ids", "loss_mask", "behavior_logp", "versions"):
        for got, trajectory in zip(packed.gather(getattr(batch, name)), trajectories, strict=True):
            np.testing.assert_array_equal(got, getattr(trajectory, name))
    np.testing.assert_array_equal(batch.loss_weight != 0, batch.loss_mask)
    np.testing.assert_array_equal(batch.advantage != 0, batch.segment_ids > 0)
    assert batch.proximal_logp is None and batch.values is None
