"""Saves of a learner that go on beside its next calls, and the silence of the libraries that write."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future

WAIT_SHARE = 0.9  # of recover.hang_timeout: ranks wait for each other's writes less than the run does for the save


@dataclasses.dataclass(frozen=True)
class BackgroundWrite:
    """Two stages of a save, as futures.

    Attributes:
      copied: done when the saved arrays may change; it raises nothing.
      written: done when this process has written its part, and process 0 also what describes the
        whole. It raises UserError.
    """

    copied: Future[None]
    written: Future[None]


def in_thread(name: str, action: Callable[[], None]) -> Future[None]:
    """Runs an action in a daemon thread of its own. Returns its end as a future."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            action()
        except BaseException as error:  # raised by future.result()
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


_lock = threading.Lock()
_silenced: Counter[str] = Counter()  # contexts that are open, by name of the logger
_levels: dict[str, int] = {}  # that the loggers had before


@contextlib.contextmanager
def silenced(name: str) -> Iterator[None]:
    """Silences a logger; several threads may do so at once.

    For libraries that log the traceback of an error that they also raise.
    """
    logger = logging.getLogger(name)
    with _lock:
        if not _silenced[name]:
            _levels[name] = logger.level
            logger.setLevel(logging.CRITICAL)
        _silenced[name] += 1
    try:
        yield
    finally:
        with _lock:
            _silenced[name] -= 1
            if not _silenced[name]:
                logger.setLevel(_levels[name])
