"""Admission, the hard bound on lag, order, and what the buffer says of itself."""

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.errors import UserError
from rljax.rollout.buffer import NEVER, Buffer, Limits, oldest_version
from rljax.testing.harness import Numbers
from rljax.types import Finish, Group, Trajectory


def _trajectory(versions, trained=None):
    """One prompt token, then one token a version."""
    mask = np.array([False, *([True] * len(versions) if trained is None else trained)])
    ids = np.arange(len(versions) + 1, dtype=np.int32)
    return Trajectory(ids, mask, np.zeros(len(ids), np.float32), np.array([-1, *versions], np.int32), 1.0, {}, Finish.STOP)


def _group(ticket, *versions):
    return Group(ticket.prompt.uid, tuple(_trajectory(v) for v in versions))


def _limits(**changes):
    return Limits(**(dict(max_lag=2, batch_size=2, max_concurrent=6, prompts=None, groups=None) | changes))


def _admit_all(buffer):
    tickets = []
    while (ticket := buffer.admit()) is not None:
        tickets.append(ticket)
    return tickets


@settings(deadline=None)
@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 20), st.data())
def test_admission_is_the_stated_minimum(max_lag, batch_size, max_concurrent, data):
    buffer = Buffer(Numbers(1000), _limits(max_lag=max_lag, batch_size=batch_size, max_concurrent=max_concurrent))
    running, accepted, consumed, version = [], 0, 0, 0
    for _ in range(30):
        room = min(max_concurrent - len(running), (max_lag + version + 1) * batch_size - accepted - len(running))
        assert buffer.capacity == room
        ticket = buffer.admit()
        assert (ticket is not None) == (room > 0)
        running += [ticket] if ticket else []
        if running and data.draw(st.booleans()):
            done = running.pop(0)
            buffer.finish(done, _group(done, [version]))
            accepted += 1
        if accepted - consumed >= batch_size and data.draw(st.booleans()):
            consumed += len(buffer.take())
            for entry in buffer.entries():  # those that the publish makes too old are no longer accepted
                accepted -= entry.oldest < version + 1 - max_lag
            buffer.publish()
            version += 1


def test_synchronous_admits_one_batch_and_nothing_before_the_publish():
    buffer = Buffer(Numbers(100), _limits(max_lag=0, batch_size=3, max_concurrent=50))
    tickets = _admit_all(buffer)
    assert len(tickets) == 3 and buffer.waits_for == "lag"
    for ticket in tickets:
        buffer.finish(ticket, _group(ticket, [0]))
    assert len(buffer.take()) == 3
    assert buffer.admit() is None  # the update is under way
    buffer.publish()
    assert len(_admit_all(buffer)) == 3


def test_lag_bound_sends_a_straggler_back_with_other_seeds():
    buffer = Buffer(Numbers(100), _limits(max_lag=1, batch_size=1, max_concurrent=10))
    late = buffer.admit()
    for version in range(2):
        ticket = buffer.admit()
        buffer.finish(ticket, _group(ticket, [version]))
        assert buffer.take()[0].ticket.index == ticket.index
        buffer.publish()
    buffer.finish(late, _group(late, [0, 1, 2]))  # version 2 now: token 0 lags by 2
    assert buffer.take() is None and buffer.counts["stale"] == 1
    again = buffer.admit()
    assert (again.index, again.attempt, again.failures) == (late.index, 1, 0)


def test_the_bound_holds_for_groups_that_grow_old_in_the_buffer():
    buffer = Buffer(Numbers(100), _limits(max_lag=1, batch_size=2, max_concurrent=10))
    tickets = _admit_all(buffer)
    buffer.finish(tickets[0], _group(tickets[0], [0]))
    for _ in range(2):
        buffer.publish()
    assert buffer.ready == 0 and buffer.admit().index == tickets[0].index


def test_mask_policy_trains_on_what_is_fresh_enough_and_keeps_the_rest_as_context():
    buffer = Buffer(Numbers(100), _limits(max_lag=1, batch_size=1, stale_policy="mask"))
    ticket = buffer.admit()
    for _ in range(3):
        buffer.publish()
    buffer.finish(ticket, _group(ticket, [0, 1, 2, 3], [1, 1]))
    (entry,) = buffer.take()
    first, second = entry.group.trajectories
    np.testing.assert_array_equal(first.loss_mask, [False, False, False, True, True])
    np.testing.assert_array_equal(first.versions, [-1, 0, 1, 2, 3])
    assert not second.loss_mask.any()  # still counts for the group's mean
    assert buffer.counts["stale_tokens"] == 4


def test_mask_policy_generates_again_what_has_no_fresh_token():
    buffer = Buffer(Numbers(100), _limits(max_lag=0, batch_size=1, stale_policy="mask"))
    ticket = buffer.admit()
    buffer.publish()
    buffer.finish(ticket, _group(ticket, [0, 0]))
    assert buffer.take() is None and buffer.admit().index == ticket.index


def test_oldest_first_then_by_admission():
    buffer = Buffer(Numbers(100), _limits(max_lag=9, batch_size=4, max_concurrent=10))
    tickets = [buffer.admit() for _ in range(4)]
    for _ in range(3):
        buffer.publish()
    for ticket, versions in zip(tickets[::-1], ([2, 3], [1], [2, 2], [0, 3]), strict=True):
        buffer.finish(ticket, _group(ticket, versions))
    assert [e.oldest for e in buffer.take()] == [0, 1, 2, 2]
    rest = [buffer.admit() for _ in range(4)]
    for ticket in rest[::-1]:
        buffer.finish(ticket, _group(ticket, [3]))
    assert [e.index for e in buffer.take()] == [t.index for t in rest]


def test_the_last_batch_is_what_is_left_and_comes_only_when_all_is_done():
    buffer = Buffer(Numbers(3), _limits(max_lag=5, prompts=3))
    tickets = _admit_all(buffer)
    assert len(tickets) == 3
    for ticket in tickets[:2]:
        buffer.finish(ticket, _group(ticket, [0]))
    assert len(buffer.take()) == 2
    buffer.requeue(tickets[2], own_fault=True)
    assert not buffer.complete and buffer.take() is None
    last = buffer.admit()
    assert last.failures == 1
    buffer.finish(last, _group(last, [0]))
    assert buffer.complete and len(buffer.take()) == 1 and buffer.take() is None


def test_nothing_to_train_makes_room_for_later_prompts():
    buffer = Buffer(Numbers(100), _limits(max_lag=0, batch_size=2))
    first, second = _admit_all(buffer)
    buffer.reject(first)
    buffer.finish(second, _group(second, [0]))
    (third,) = _admit_all(buffer)
    buffer.finish(third, _group(third, [0]))
    assert [e.index for e in buffer.take()] == [1, 2] and buffer.counts["rejected"] == 1


def test_a_group_with_nothing_to_train_on_is_refused():
    buffer = Buffer(Numbers(100), _limits())
    ticket = buffer.admit()
    nothing = _trajectory([0, 0], trained=[False, False])
    assert oldest_version([nothing]) == NEVER
    with pytest.raises(ValueError, match="reject"):
        buffer.finish(ticket, Group(ticket.prompt.uid, (nothing,)))


def test_resume_position_keeps_the_capacity():
    """Five steps at lag 2, then a copy made from what was saved: the same room, the same prompts
    first in flight.
    """
    buffer = Buffer(Numbers(100), _limits(max_lag=2, batch_size=2, max_concurrent=20))
    flight = []
    for version in range(5):
        flight += _admit_all(buffer)
        for _ in range(2):
            ticket = flight.pop(0)
            buffer.finish(ticket, _group(ticket, [version]))
        assert len(buffer.take()) == 2
        buffer.publish()
    flight += _admit_all(buffer)
    done = flight.pop(1)
    buffer.finish(done, _group(done, [5]))
    saved = json.loads(json.dumps(buffer.state()))
    resumed = Buffer(Numbers(100), buffer.limits)
    resumed.restore(saved, buffer.entries())
    assert (resumed.version, resumed.accepted, resumed.ready) == (buffer.version, buffer.accepted, 1)
    assert resumed.capacity == buffer.capacity + buffer.running  # what was in flight is to be generated again
    again = _admit_all(resumed)
    assert again == flight
    assert resumed.capacity == buffer.capacity == 0


def test_resume_admits_what_was_in_flight_or_waited_for_another_attempt_before_anything_new():
    limits = _limits(batch_size=4)
    buffer = Buffer(Numbers(100), limits)
    running, failed, *_ = _admit_all(buffer)
    buffer.requeue(failed, own_fault=True)
    state = json.loads(json.dumps(buffer.state()))
    assert len(state["pending"]) == limits.max_concurrent  # and so the one that waits is among them
    resumed = Buffer(Numbers(100), limits)
    resumed.restore(state, [])
    found = {ticket.index: ticket for ticket in _admit_all(resumed)}
    assert list(found) == list(range(limits.max_concurrent))
    assert found[running.index] == running
    assert (found[failed.index].attempt, found[failed.index].failures) == (1, 1)


def test_a_run_resumed_with_fewer_groups_to_do_than_it_did_is_complete_whatever_was_in_flight():
    buffer = Buffer(Numbers(100), _limits(groups=20))
    flight = _admit_all(buffer)
    for ticket in flight[:4]:
        buffer.finish(ticket, _group(ticket, [0]))
    buffer.take()
    resumed = Buffer(Numbers(100), _limits(groups=2))
    resumed.restore(buffer.state(), buffer.entries())
    assert resumed.admit() is None and resumed.complete  # else learner and producer wait for each other for ever
    unbounded = Buffer(Numbers(100), _limits(groups=None, prompts=buffer.drawn))
    unbounded.restore(buffer.state(), buffer.entries())
    assert not unbounded.complete  # what was in flight is still to be done


def test_waiters_are_woken_by_what_they_wait_for():
    async def scenario():
        buffer = Buffer(Numbers(10), _limits(batch_size=1))
        ticket = buffer.admit()
        for act in (lambda: buffer.finish(ticket, _group(ticket, [0])), buffer.publish, buffer.wake):
            waiters = [buffer.change(), buffer.change()]
            assert not any(w.done() for w in waiters)
            act()
            await asyncio.wait_for(asyncio.gather(*waiters), 5)

    asyncio.run(scenario())


def test_a_token_that_was_never_published_ends_the_run():
    """Another trainer publishes to the same servers: each would train on samples of the other's weights."""
    buffer = Buffer(Numbers(1000), _limits(batch_size=1))
    tickets = _admit_all(buffer)
    buffer.finish(tickets[0], _group(tickets[0], [0, 1]))  # of a publish that is in progress
    with pytest.raises(UserError, match=r"^rollout\.addr: tokens of version 2, and this run has published 0: another one"):
        buffer.finish(tickets[1], _group(tickets[1], [0], [0, 2]))
    with pytest.raises(UserError, match="tokens of version 1, and this run has published 0"):
        buffer.take()  # the publish is over, or never was


def test_a_buffer_that_follows_a_sampler_takes_what_others_publish():
    buffer = Buffer(Numbers(1000), _limits(batch_size=1))
    buffer.follow(3)
    (ticket, *_) = _admit_all(buffer)
    buffer.finish(ticket, _group(ticket, [3, 7]))
    assert len(buffer.take()) == 1
