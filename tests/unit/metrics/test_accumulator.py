"""Counters and values between two steps."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from rljax.metrics.accumulator import Accumulator, PhaseTimer

FLOATS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20)


@given(FLOATS, st.randoms(use_true_random=False))
def test_the_order_of_arrival_changes_no_bit(values, random):
    drained = []
    for _ in range(2):
        accumulator = Accumulator()
        for value in values:
            accumulator.observe("reward", [value])
        drained.append(accumulator.drain())
        random.shuffle(values)
    assert drained[0] == drained[1] and drained[0]["reward"].sum == math.fsum(values)


def test_a_tally_that_was_saved_goes_on_and_draining_empties_it():
    one, other = Accumulator(), Accumulator()
    one.count("failed", 2)
    one.observe("reward", [0.1, 0.2])
    other.restore(json.loads(json.dumps(one.state())))
    for accumulator in (one, other):
        accumulator.count("failed")
        accumulator.observe("reward", [0.3])
    drained = one.drain()
    assert drained == other.drain() and drained["failed"].value == 3 and drained["reward"].count == 3
    assert {name: mean.value for name, mean in one.drain().items()} == {"failed": 0}  # seen once, told of ever after


def test_a_clock_adds_up_and_beats():
    beats = []
    timer = PhaseTimer(beats.append)
    for _ in range(2):
        with timer.phase("update"):
            pass
    drained = timer.drain()
    assert list(drained) == ["timeperf/update"] and drained["timeperf/update"].value > 0
    assert beats == ["update", "update done"] * 2 and timer.drain() == {}
