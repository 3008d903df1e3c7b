"""Pools of threads for what others can ask for without end.

`asyncio.to_thread` uses one pool for the whole process: what clients, agents or rewards flood or
hang there keeps the learner, checkpoints and publishes waiting.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ThreadPool:
    """Threads of one purpose; calls beyond their number wait for each other.

    Example:

        prompts = ThreadPool(2, "prompt")
        ids = await prompts.call(tokenizer.encode, text)
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(threads, name)  # each begins when it is needed

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function in a thread, in the context of the caller, as `asyncio.to_thread`."""
        bound = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, bound)
