"""Pending calls: what goes on in all ranks after they have replied, as saves beside other calls."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from rljax.errors import RankFailed, UserError

CALL_ENDED = "ended"  # kind of the message by which a follower tells the end of such a call


class PendingCalls:
    """Waits for the ends of calls in all ranks.

    Example:

        end = pending.of_all(number, ranks=[1, 2], local=future)    # of call `number`
        pending.told(1, number, None)                               # by rank 1, perhaps before
        end.result()
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._told: dict[int, dict[int, Mapping[str, Any] | None]] = {}  # errors or None, by call and rank
        self._open: dict[int, tuple[frozenset[int], Future[None], Future[None]]] = {}  # ranks, local and joint end, by call

    def of_all(self, number: int, ranks: frozenset[int], local: Future[None]) -> Future[None]:
        """Returns the end in all ranks of what call `number` began.

        It raises the first error of any rank, at once: others may wait for that rank for long.

        Args:
          ranks: the followers.
          local: its end in this rank.
        """
        joint: Future[None] = Future()
        with self._lock:
            self._open[number] = ranks, local, joint
        local.add_done_callback(lambda _: self._look(number))
        self._look(number)
        return joint

    def told(self, rank: int, number: int, error: Mapping[str, Any] | None) -> None:
        """Notes the end of a call in a follower, with the error if it failed."""
        with self._lock:
            self._told.setdefault(number, {})[rank] = error
        self._look(number)

    def fail(self, failure: RankFailed) -> None:
        """Ends all calls with this error: a rank is lost."""
        with self._lock:
            numbers = list(self._open)
        for number in numbers:
            self._end(number, failure)

    def _look(self, number: int) -> None:
        with self._lock:
            if number not in self._open:
                return
            (ranks, local, _), told = self._open[number], self._told.get(number, {})
            failed = {rank: error for rank, error in told.items() if error is not None}
            own = local.exception() if local.done() else None
            if own is None and not failed and not (local.done() and ranks <= told.keys()):
                return
        rank, error = next(iter(failed.items()), (0, None))
        self._end(number, own if error is None else UserError(f"rank {rank}: {error['message']}"))

    def _end(self, number: int, error: BaseException | None) -> None:
        with self._lock:
            _, _, joint = self._open.pop(number, (None, None, None))
            self._told.pop(number, None)
        if joint is None:
            return
        if error is None:
            joint.set_result(None)
        else:
            joint.set_exception(error)
