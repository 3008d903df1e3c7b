"""Tracks: spans of one track are nested, whatever order tasks end in."""

import asyncio
import json
import random
from collections import defaultdict

import pytest

from rljax import tracing
from rljax.tracing import Outbox, Process, Tracer
from rljax.tracing.tracer import SPACING


@pytest.fixture
def outbox():
    sink = Outbox()
    with tracing.recording(Tracer(sink, Process(1, "test"))):
        yield sink


def spans(events):
    """Returns (track, name, names around it) of each span, by its beginning.

    Fails if spans of a track overlap and neither lies in the other.
    """
    names = {event.track: event.name for event in events if event.phase == "M"}
    stacks, found = defaultdict(list), []
    for event in sorted((event for event in events if event.phase == "X"), key=lambda event: event.time):
        stack, end = stacks[event.track], event.time + event.duration
        while stack and stack[-1][1] <= event.time:
            stack.pop()
        assert not stack or end <= stack[-1][1], "overlaps the span before it"
        found.append((names[event.track], event.name, tuple(name for name, _ in stack)))
        stack.append((event.name, end))
    return found


def test_a_span_lies_in_the_one_around_it_and_overlapping_ones_on_lanes_of_their_own(outbox):
    async def episode(uid):
        with tracing.span("trajectory", lane="trajectory", uid=uid):
            with tracing.span("generate"):
                await asyncio.sleep(0.001)
            with tracing.span("reward"):
                await asyncio.sleep(0.001)

    async def main():
        await asyncio.gather(episode("0/0"), episode("0/1"))
        await episode("0/2")

    asyncio.run(main())
    found = spans(outbox.take())
    assert sorted({track for track, *_ in found}) == ["trajectory 0", "trajectory 1"], "a lane is used again"
    assert [name for _, name, _ in found].count("trajectory") == 3
    assert all(around == ("trajectory",) for _, name, around in found if name != "trajectory")


def test_requests_at_once_in_an_episode_take_a_lane_each(outbox):
    async def request(name):
        with tracing.span(name):
            await asyncio.sleep(0.001)

    async def main():
        with tracing.span("trajectory", lane="trajectory"):
            await asyncio.gather(*(request(f"turn {i}") for i in range(3)))

    asyncio.run(main())
    found = spans(outbox.take())
    assert len({track for track, *_ in found}) == 3


@pytest.mark.parametrize("seed", range(5))
def test_tracks_stay_nested_whatever_is_cancelled(outbox, seed):
    """A span that outlives the one around it (a task that nobody waits for) ends with it."""
    draw = random.Random(seed)

    async def work(depth):
        with tracing.span(f"depth {depth}", lane=draw.choice(["", "trajectory"]) if depth == 0 else ""):
            if depth < 3:
                children = [asyncio.create_task(work(depth + 1)) for _ in range(draw.randint(0, 3))]
                left.extend(children)
                if draw.random() < 0.5:
                    await asyncio.wait(children) if children else None
            await asyncio.sleep(draw.random() * 0.002)

    left = []

    async def main():
        running = [asyncio.create_task(work(0)) for _ in range(8)]
        await asyncio.sleep(0.002)
        for task in draw.sample(running, 4):
            task.cancel()
        await asyncio.wait(running)
        for task in left:
            task.cancel()
        await asyncio.gather(*running, *left, return_exceptions=True)

    asyncio.run(main())
    assert len(spans(outbox.take())) >= 8


def test_a_short_wait_is_left_out_and_a_long_one_is_not(outbox):
    async def main():
        with tracing.span("reward"):
            with tracing.wait("not waited for"):
                pass
            with tracing.wait("waited for"):
                await asyncio.sleep(0.002)

    asyncio.run(main())
    assert [name for _, name, _ in spans(outbox.take())] == ["reward", "waited for"]


def test_what_an_end_says_stands_with_its_span(outbox):
    with tracing.span("generate", request="a") as span:
        span.note(tokens=7)
    with pytest.raises(KeyError), tracing.span("tool"):
        raise KeyError("price")
    tracing.begin(("ready", 4), "wait in buffer", lane="buffer")
    tracing.end(("ready", 4), version=2)
    tracing.end(("ready", 5))
    tracing.count("buffer", ready=3)
    events = outbox.take()
    ends = [event.args for event in events if event.phase == "X"]
    assert ends == [{"request": "a", "tokens": 7}, {"error": "KeyError: 'price'"}, {"version": 2}]
    assert [event.args for event in events if event.phase == "C"] == [{"ready": 3}]
    assert tracing.from_text(tracing.to_text(events)) == events, "as another process gets them"


def test_of_values_that_follow_each_other_closely_a_counter_keeps_the_last(outbox, monkeypatch):
    tracer, times = Tracer(outbox, Process(1, "test")), iter(range(10**9, 10**10, SPACING // 4))
    monkeypatch.setattr("rljax.tracing.tracer.now", lambda: next(times))
    for value in range(10):
        tracer.count("buffer", {"ready": value})
        tracer.count("sampler", {"running": -value}) if value in (0, 9) else None
    tracer.tell_open()
    shown = [(event.name, *event.args.values()) for event in outbox.take()]
    assert [value for name, value in shown if name == "buffer"] == [0, 3, 7, 9]
    assert [value for name, value in shown if name == "sampler"] == [0, -9]


def test_a_span_that_lasts_is_told_when_it_is_open_and_ends_apart(outbox):
    tracer = Tracer(outbox, Process(1, "test"))
    with tracing.recording(tracer), tracing.span("trajectory", uid="0/1"):
        with tracing.span("generate"):
            pass
        with tracing.span("tool") as tool:
            tracer.tell_open()
            tracer.tell_open()
            tool.note(answer=42)
    told = [(event.phase, event.name, event.args) for event in outbox.take() if event.phase != "M"]
    assert told == [
        ("X", "generate", {}),
        ("B", "trajectory", {"uid": "0/1"}),
        ("B", "tool", {}),
        ("E", "", {"answer": 42}),
        ("E", "", {}),
    ]


def test_nothing_is_recorded_where_nothing_is_traced():
    with tracing.span("generate") as span:
        span.note(tokens=7)
    tracing.begin("key", "name", lane="buffer")
    tracing.end("key")
    tracing.count("buffer", ready=1)
    assert tracing.active_file() is None and not tracing.is_on()


@pytest.mark.parametrize(
    "raw",
    [
        *([], 5, ["Z", 1, 0, 0, "", {}], ["B", "1", 0, 0, "", {}], ["B", 1, 0.5, 0, "", {}]),
        *(["B", 1, 0, 0, 3, {}], ["B", 1, 0, 0, "", []], ["B", 1, 0, True, "", {}]),
    ],
)
def test_what_is_no_event_is_refused(raw):
    with pytest.raises((ValueError, TypeError)):
        tracing.from_text(json.dumps([raw]))


def test_an_outbox_that_nobody_empties_keeps_a_bounded_number_of_events(monkeypatch):
    monkeypatch.setattr("rljax.tracing.outbox.MAX_EVENTS", 10)
    sink = Outbox()
    with tracing.recording(Tracer(sink, Process(1, "test"))):
        for _ in range(20):
            with tracing.span("generate"):
                pass
    assert len(sink.take()) == 10 and sink.dropped == 11
