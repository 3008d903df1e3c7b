"""The plan of a run beside what it measured: which figures are compared, and which are out."""

import pytest

from rljax.diagnosis.planned import compare
from tests.unit.diagnosis import made


def rows(**changes):
    return {(row.what, row.unit): row for row in compare(made.plan(**changes))}


def test_a_plan_that_held_is_not_out():
    found = rows()
    assert list(found) == [
        ("sampler", "GiB per device"),
        ("learner", "GiB per device"),
        ("learner", "tokens/s"),
        ("sampler", "tokens/s"),
        ("step", "s"),
    ]
    assert not any(row.is_out for row in found.values())
    assert all(row.ratio == pytest.approx(1) for row in found.values())


@pytest.mark.parametrize(("peak", "out"), [(0.89, True), (0.91, False), (1.09, False), (1.11, True)])
def test_memory_is_held_to_a_tenth_on_either_side(peak, out):
    found = rows(learner_peak=peak)
    assert found["learner", "GiB per device"].is_out == out and not found["sampler", "GiB per device"].is_out


@pytest.mark.parametrize(("rate", "out"), [(0.49, True), (0.51, False), (1.9, False), (2.1, True)])
def test_time_is_held_to_a_factor_of_two(rate, out):
    found = rows(rate=rate)
    assert [row.is_out for (_, unit), row in found.items() if unit != "GiB per device"] == [out] * 3


@pytest.mark.parametrize(
    ("allocation", "in_turn", "ratio"),
    [
        ("sglang:d1|fsdp:d1", False, 1.0),  # 20 and 20 of 40 GB
        ("sglang:d1|fsdp:d1", True, 0.5),
        ("jax:d1", False, 0.5),  # of one process, whose counter is the device's
        ("jax:d2|jax:f2", False, 0.5),
    ],
)
def test_two_frameworks_on_a_device_add_up_and_one_counts_all_of_it(allocation, in_turn, ratio):
    assert rows(allocation=allocation, in_turn=in_turn)["sampler and learner", "GiB per device"].ratio == pytest.approx(ratio)


def test_what_is_missing_unknown_or_damaged_is_left_out():
    assert not any("GiB" in unit for _, unit in rows(usable=None))
    plan = made.plan()
    del plan["measured"]["memory/sampler_peak_bytes"]
    assert ("sampler", "GiB per device") not in {(row.what, row.unit) for row in compare(plan)}
    plan["estimated"]["rates"] = None
    assert [row.what for row in compare(plan)] == ["learner"]
    for damaged in (None, {}, {"estimated": 1}, {"estimated": {}, "measured": {}}, {**plan, "measured": None}):
        assert compare(damaged) == []
    plan["measured"]["memory/learner_peak_bytes"] = "a lot"
    assert compare(plan) == []
