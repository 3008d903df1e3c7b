"""Comparison: groups of seeds, and intervals that are Student's t over runs."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from rljax.diagnosis import History
from rljax.diagnosis.report import compare
from rljax.diagnosis.report.curves import bins_of
from rljax.diagnosis.summaries.seeds import summarize
from rljax.testing.harness import make_config


def history(reward, *, steps=None, **overrides) -> History:
    steps = np.arange(1, len(reward) + 1) if steps is None else steps
    config = make_config({key.replace("__", "."): value for key, value in overrides.items()})
    return dataclasses.replace(History(steps, {"rollout/reward": np.array(reward, np.float64)}), config=config)


def group_of(*histories: History) -> compare.RunGroup:
    (group,) = compare.compare({str(i): h for i, h in enumerate(histories)}).groups
    return group


def test_the_interval_is_students_t_at_every_point():
    rewards = np.random.default_rng(0).normal(size=(4, 9))
    group = group_of(*(history(reward, seed=i) for i, reward in enumerate(rewards)))
    spread = compare.spread_of(group, "rollout/reward", bins_of(np.arange(1, 10)))
    low, high = stats.t.interval(0.95, df=3, loc=rewards.mean(axis=0), scale=stats.sem(rewards, axis=0))
    for drawn, expected in ((spread.mean, rewards.mean(axis=0)), (spread.low, low), (spread.high, high)):
        np.testing.assert_allclose(drawn, expected)


def test_the_order_of_runs_changes_nothing_and_equal_runs_have_no_width():
    bins = bins_of(np.arange(1, 4))
    ab, ba = ([history([0, 1, 2], seed=1), history([2, 1, 0], seed=2)][:: i or 1] for i in (1, -1))
    one, other = (compare.spread_of(group_of(*pair), "rollout/reward", bins) for pair in (ab, ba))
    np.testing.assert_array_equal(one.low, other.low)
    same = compare.spread_of(group_of(*[history([0, 1, 2])] * 3), "rollout/reward", bins)
    np.testing.assert_array_equal(same.low, same.high)


def test_a_point_has_the_runs_with_a_value_there_and_a_single_one_has_no_width():
    short, long = history([1.0, 3.0], seed=1), history([3.0, 5.0, 8.0], seed=2)
    spread = compare.spread_of(group_of(short, long), "rollout/reward", bins_of(np.arange(1, 4)))
    np.testing.assert_array_equal(spread.mean, [2, 4, 8])
    assert (spread.high > spread.low).tolist() == [True, True, False]


def test_runs_are_grouped_by_all_keys_but_the_seed():
    comparison = compare.compare(
        {
            "a": history([1.0], seed=1, actor__optimizer__lr=0.1),
            "b": history([1.0], seed=2, actor__optimizer__lr=0.1),
            "c": history([0.0], seed=1, actor__optimizer__lr=0.2),
            "d": history([0.0], seed=3, actor__optimizer__lr=0.2),
            "e": history([0.0], seed=1, actor__optimizer__lr=0.3),
        }
    )
    assert {group.label: group.names for group in comparison.groups} == {
        "actor.optimizer.lr=0.1": ("a", "b"),
        "actor.optimizer.lr=0.2": ("c", "d"),
        "e": ("e",),
    }
    assert dict(comparison.config) == {
        "seed": ("1", "2", "1", "3", "1"),
        "actor.optimizer.lr": ("0.1", "0.1", "0.2", "0.2", "0.3"),
    }


def test_final_values_are_those_that_the_doctor_sums_runs_up_by():
    histories = [history(np.arange(100), seed=1), history(np.arange(100) + 2, seed=2)]
    final = group_of(*histories).final["rollout/reward"]
    assert final == summarize(histories).reward


def test_a_single_run_has_no_interval():
    final = group_of(history([1.0])).final["rollout/reward"]
    assert len(final.values) == 1 and np.isnan(final.low) and np.isnan(final.high)


@pytest.mark.parametrize(
    ("paths", "names"),
    [(["runs/a", "runs/b"], ["a", "b"]), (["x/run", "y/run"], ["x/run", "y/run"]), (["one"], ["one"])],
)
def test_names_are_as_short_as_they_differ(tmp_path, paths, names):
    assert compare.short_names([tmp_path / path for path in paths]) == names
