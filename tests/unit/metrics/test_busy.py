"""The clock of busy time, against a clock of the test's own."""

import time

from rljax.metrics.busy import BusyClock


def test_overlapping_blocks_count_once_and_idle_time_does_not(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    busy = BusyClock()

    def after(seconds):
        now[0] += seconds

    with busy:
        after(2)
        with busy:
            after(3)
    after(10)
    assert busy.drain() == 5
    with busy:
        after(1)
        assert busy.drain() == 1  # of a block that goes on
        after(4)
    assert busy.drain() == 4 and busy.drain() == 0
