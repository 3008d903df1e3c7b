"""Calls that the episodes of a group make together: nobody is left out, nobody waits for ever."""

import asyncio

import pytest

from rljax.rollout import gathering
from rljax.rollout.gathering import Gathering


def run(*episodes):
    """Runs episodes, functions of their gathering, as one group. Returns their results or errors."""

    async def main():
        group = Gathering(len(episodes))

        async def one(episode):
            with group.member():
                return await episode(gathering.current())

        return await asyncio.wait_for(asyncio.gather(*map(one, episodes), return_exceptions=True), 10.0)

    return asyncio.run(main())


def calls(item, log, after=0):
    async def episode(group):
        for _ in range(after):
            await asyncio.sleep(0)

        async def together(items):
            log.append(list(items))
            return [(item, len(items)) for item in items]

        return await group.together(item, together)

    return episode


async def ends(group):
    await asyncio.sleep(0.01)


async def fails(group):
    raise LookupError("mine")


def test_all_that_call_are_in_one_call_and_each_gets_its_own_result():
    log = []
    assert run(calls("a", log, 3), calls("b", log), calls("c", log, 1)) == [("a", 3), ("b", 3), ("c", 3)]
    assert [sorted(items) for items in log] == [["a", "b", "c"]]


@pytest.mark.parametrize("other", [ends, fails])
def test_an_episode_that_ends_without_a_call_is_not_waited_for(other):
    log = []
    results = run(calls("a", log), other, calls("b", log))
    assert results[::2] == [("a", 2), ("b", 2)] and len(log) == 1


def test_an_error_of_the_call_is_every_callers():
    async def episode(group):
        async def broken(items):
            raise ValueError(f"of {len(items)}")

        return await group.together(1, broken)

    assert [str(error) for error in run(episode, episode)] == ["of 2", "of 2"]


def test_turns_are_calls_of_their_own_and_one_that_is_done_is_out_of_the_next():
    log = []

    def turns(name, count):
        async def episode(group):
            return [await calls(f"{name}{turn}", log)(group) for turn in range(count)]

        return episode

    run(turns("a", 1), turns("b", 3), turns("c", 2))
    assert [sorted(items) for items in log] == [["a0", "b0", "c0"], ["b1", "c1"], ["b2"]]


def test_an_episode_that_is_cancelled_while_it_waits_takes_its_item_along():
    log = []

    async def impatient(group):
        async with asyncio.timeout(0.01):
            await calls("gone", log)(group)

    async def late(group):
        await asyncio.sleep(0.05)
        return await calls("late", log)(group)

    results = run(impatient, late)
    assert isinstance(results[0], TimeoutError) and results[1] == ("late", 1) and log == [["late"]]


def test_outside_of_a_group_there_is_none():
    assert gathering.current() is None
