"""Whoever causes a line, however often: the log grows by one a minute."""

from rljax.messaging.rate_limit import INTERVAL, RateLimited


def test_each_line_is_said_or_counted_and_no_two_are_closer_than_the_interval():
    said, now = [], 0.0
    say = RateLimited(lambda line: said.append((now, line)), clock=lambda: now)
    for number in range(1000):
        now = number * 0.25
        say(f"line {number}")
    apart = int(INTERVAL / 0.25)
    assert [time for time, _ in said] == [k * INTERVAL for k in range(5)]
    more = f" ({apart - 1} more like it since the last such line)"
    assert [line for _, line in said] == [f"line {k * apart}" + (more if k else "") for k in range(5)]
