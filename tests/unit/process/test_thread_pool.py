"""Threads for clients and users' code keep nothing else of the process waiting."""

import asyncio
import contextvars
import threading
from pathlib import Path

import pytest

from rljax.agents import exchange
from rljax.agents.exchange import LONG
from rljax.compat.areal import AsyncRewardWrapper
from rljax.errors import RewardTimeout
from rljax.process.thread_pool import ThreadPool

REPOSITORY = Path(__file__).resolve().parents[3]
SERVING = ("rljax/agents", "rljax/compat", "rljax/environments", "rljax/tools", "rljax/workflows", "engines/http")
# Calls there of asyncio.to_thread, whose threads the learner and checkpoints use
OURS = {
    "engines/http/client.py": "publishing, one at a time",
    "engines/http/health.py": "restarts of a run's own server",
    "engines/http/publishing.py": "publishing, one at a time",
    "engines/http/server.py": "requests of the server's owner",
}


@pytest.mark.parametrize("of", ["a client's long prompt", "a reward of AReaL's"])
def test_calls_that_hang_leave_the_threads_of_others_alone(of):
    free = threading.Event()
    reward = AsyncRewardWrapper(free.wait, timeout_seconds=0.1)

    async def run():
        calls = [
            asyncio.ensure_future(
                reward() if of.startswith("a reward") else exchange._off_the_loop("prompt", LONG + 1, free.wait)
            )
            for _ in range(100)
        ]
        try:
            async with asyncio.timeout(30):
                await asyncio.sleep(0.2)
                assert await asyncio.to_thread(lambda: 7) == 7
        finally:
            free.set()
        return await asyncio.gather(*calls, return_exceptions=True)

    may_end_late = of.startswith("a reward")
    assert all(each is True or (may_end_late and isinstance(each, RewardTimeout)) for each in asyncio.run(run()))


def test_a_call_has_the_context_of_its_caller_and_its_errors_come_back():
    variable, pool = contextvars.ContextVar("variable", default=0), ThreadPool(2, "test")

    async def call(value):
        variable.set(value)
        return await pool.call(lambda: (variable.get(), threading.current_thread().name.startswith("test")))

    async def run():
        with pytest.raises(ZeroDivisionError):
            await pool.call(divmod, 1, 0)
        return await asyncio.gather(*map(call, range(8)))

    assert asyncio.run(run()) == [(value, True) for value in range(8)]


def test_rooms_that_serve_others_use_threads_of_their_own():
    users = [
        str(path.relative_to(REPOSITORY))
        for room in SERVING
        for path in (REPOSITORY / room).rglob("*.py")
        if "asyncio.to_thread(" in (text := path.read_text()) or "run_in_executor(None" in text
    ]
    assert set(users) <= set(OURS), users
