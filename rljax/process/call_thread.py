"""Blocking calls of users' code, off the event loop, on a daemon thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
from collections.abc import Callable
from typing import Any


class CallThread:
    """Runs calls one after another on one thread, which is started by the first.

    A call that never returns keeps its thread, not the event loop, nor the other threads' calls,
    nor the end of the process (executors' threads are joined at exit, this one is not).

    Example:

        with CallThread("environment 0/17") as thread:
            observation = await thread.call(environment.reset, 17, timeout=60.0)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = False

    async def call(self, function: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Calls a function, or awaits an async one, and returns its result.

        Args:
          timeout: seconds; None for no limit.

        Raises:
          CallTimeout: it took longer. An async function is cancelled; the thread of a plain one is
            left to it, and the next call would wait for it: use the object no more.
        """
        try:
            async with asyncio.timeout(timeout) as limit:
                if inspect.iscoroutinefunction(function):
                    return await function(*args, **kwargs)
                return await self._in_thread(lambda: function(*args, **kwargs))
        except TimeoutError:
            if limit.expired():
                raise CallTimeout(f"ran longer than {timeout:g} s") from None
            raise  # the function's own

    async def _in_thread(self, job: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def run() -> None:
            result, raised = None, None
            try:
                result = job()
            except BaseException as error:  # SystemExit of users' code too
                plain = isinstance(error, Exception) and not isinstance(error, StopIteration)  # a future can hold it
                raised = error if plain else RuntimeError(f"raised {error!r}")
            with contextlib.suppress(RuntimeError):  # the loop was closed under a call that nobody waits for
                loop.call_soon_threadsafe(settle, result, raised)

        if not self._started:
            self._started = True
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        self._jobs.put(run)
        return await future

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def __enter__(self) -> CallThread:
        return self

    def __exit__(self, *_: object) -> None:
        self._jobs.put(None)  # the thread ends after the calls that it has


class CallTimeout(Exception):
    """A call that took longer than its time limit."""
