"""Calls that the episodes of a group make together, for what compares them with each other.

    who            waits for                                 who unblocks it
    an episode     the others of its group, and the call     the last one that calls, or ends

A reward that scores lists (TRL's shape) is called once per group in this way. Nobody waits for
ever: an episode either makes the call or ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

_current: ContextVar[Gathering | None] = ContextVar("gathering", default=None)

Together = Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]


class Gathering:
    """The episodes of one group that are still running.

    Example:

        group = Gathering(n_samples)
        await asyncio.gather(*(episode(group, i) for i in range(n_samples)))

        async def episode(group, i):
            with group.member():
                ...
                score = await gathering.current().together(text, score_all)
    """

    def __init__(self, episodes: int) -> None:
        self._running = episodes
        self._waiting: dict[asyncio.Future[Any], tuple[Any, Together]] = {}
        self._calls: set[asyncio.Task[None]] = set()

    async def together(self, item: Any, call: Together) -> Any:
        """Waits until every running episode is here, then makes one call for all of them.

        Args:
          call: takes the items of those that are here and returns a result for each.

        Returns:
          The result for `item`. If the call raises, all of them raise its error.
        """
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[result] = (item, call)
        self._call_if_complete()
        try:
            return await result
        finally:
            self._waiting.pop(result, None)  # cancelled while it waited

    @contextlib.contextmanager
    def member(self) -> Iterator[None]:
        """Context of one episode; the others do not wait for it once it has ended."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            self._running -= 1
            self._call_if_complete()

    def _call_if_complete(self) -> None:
        if self._waiting and len(self._waiting) >= self._running:
            waiting, self._waiting = self._waiting, {}
            task = asyncio.create_task(self._call(waiting))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _call(self, waiting: dict[asyncio.Future[Any], tuple[Any, Together]]) -> None:
        items, calls = zip(*waiting.values(), strict=True)
        try:
            results: Sequence[Any] = await calls[0](items)
            if len(results) != len(items):
                raise ValueError(f"{len(results)} results for {len(items)} episodes")
        except Exception as error:
            for future in waiting:
                if not future.done():
                    future.set_exception(error)
            return
        for future, result in zip(waiting, results, strict=True):
            if not future.done():
                future.set_result(result)


def current() -> Gathering | None:
    """Returns the gathering of the group whose episode calls this; None outside of groups."""
    return _current.get()
