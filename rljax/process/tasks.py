"""Background tasks whose end is seen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


class Tasks:
    """Tasks that nobody awaits. An error in one is logged and told, instead of lost.

    Example:

        tasks = Tasks(on_error=fail)
        tasks.start(watch.run(), "watch over the servers")
        await tasks.close()
    """

    def __init__(self, on_error: Callable[[Exception], None] = lambda error: None) -> None:
        """
        Args:
          on_error: called in the event loop with the error of each task that fails. Without it the
            error is only logged.
        """
        self._on_error = on_error
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Starts a task. Its name stands in the log, and in hang.txt."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Cancels all tasks, and returns at once."""
        for task in tuple(self._tasks):
            task.cancel()

    async def end(self) -> None:
        """Cancels all tasks and waits for their end. Others may be started afterwards."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Ends all tasks. Errors from here on are only logged."""
        self._closing = True
        await self.end()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("the task %r ended: %s: %s", task.get_name(), type(error).__name__, error, exc_info=error)
        if not self._closing and isinstance(error, Exception):
            self._on_error(error)
