"""Clients of scripted servers, as their tests share them."""

from __future__ import annotations

import asyncio
import functools
import inspect

import numpy as np

from rljax.types import Completion, Finish, Request, SamplingParams
from tests.unit.engines.http.scripted import ScriptedServer, continuation

PROMPT = [5, 6, 7]


def request(name: str = "0/1#0", prompt=PROMPT, **params) -> Request:
    return Request(name, np.array(prompt, np.int32), SamplingParams(**({"max_new_tokens": 12} | params)), seed=9)


def with_servers(count: int):
    """Runs a coroutine test with started servers, and stops them in any case."""

    def decorate(test):
        @functools.wraps(test)
        def run(**fixtures):
            async def body() -> None:
                servers = [ScriptedServer() for _ in range(count)]
                for server in servers:
                    await server.start()
                try:
                    async with asyncio.timeout(30):
                        await test(*servers, **fixtures)
                finally:
                    for server in servers:
                        await server.stop()

            asyncio.run(body())

        signature = inspect.signature(test)
        run.__signature__ = signature.replace(parameters=list(signature.parameters.values())[count:])
        del run.__wrapped__
        return run

    return decorate


def is_whole(completion: Completion, count: int = 12, prompt=PROMPT) -> None:
    want = continuation(prompt, count)
    assert completion.token_ids.tolist() == want
    np.testing.assert_allclose(completion.logp, -np.array(want) / 1000, rtol=1e-6)
    assert completion.finish is Finish.LENGTH
