"""Connections of the leader to its followers: calls, replies, and which rank failed first."""

from __future__ import annotations

import concurrent.futures
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rljax.errors import RankFailed, UserError
from rljax.messaging.framing import ConnectionClosed, FramingError, Message, receive, send
from rljax.multiprocess.pending import CALL_ENDED, PendingCalls

SETTLING_TIME = 1.0  # seconds from a rank's first error until the verdict: the death of another rank may be the cause
SAME_ERROR_TIME = 30.0  # seconds within which all ranks must raise an error for it to count as common to all

log = logging.getLogger(__name__)


class LearnerThread:
    """Thread that makes all calls of the leader's own learner.

    One thread makes them all because frameworks keep the current device per thread. It is a daemon,
    because a collective that waits for a dead rank never returns and must not keep the process
    alive.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="learner", daemon=True).start()

    def submit(self, function: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        """Queues a call, after those before it. Returns its result as a future."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._work.put((function, future))
        return future

    def stop(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            function, future = item
            try:
                future.set_result(function())
            except BaseException as error:  # raised by future.result()
                future.set_exception(error)
            del item, function, future  # frees the batch while the thread waits for the next call


class FollowerConnection:
    """Connection to one follower.

    One thread reads and another writes, so that a follower that does not read blocks nothing else.
    """

    def __init__(self, connection: socket.socket, rank: int, name: str, followers: Followers) -> None:
        self.rank, self.name = rank, name
        self.last_heard = time.monotonic()
        self.error: dict[str, Any] | None = None  # in its last reply
        self.answered = 0  # number of the last call that it replied to
        self._connection, self._followers = connection, followers
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=f, daemon=True, name=f"rank {rank}") for f in (self._read, self._write)]
        for thread in self._threads:
            thread.start()

    def post(self, message: Message | None) -> None:
        """Queues a message to be sent. None ends the sending thread."""
        self._outbox.put(message)

    def close(self) -> None:
        """Closes the connection, which ends the follower."""
        self._outbox.put(None)
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.debug("rank %d was gone already", self.rank)
        self._connection.close()

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                send(self._connection, message)
            except OSError as error:
                self._followers.lost(self, f"could not be reached: {error.strerror or error}")
                return
            del message

    def _read(self) -> None:
        try:
            while True:
                message = receive(self._connection)
                self.last_heard = time.monotonic()
                if message.kind == "reply":
                    self._followers.replied(self, message.fields)
                elif message.kind == CALL_ENDED:
                    self._followers.pending.told(self.rank, int(message.fields["number"]), message.fields.get("error"))
                elif message.kind == "hung":
                    self._followers.hung(self, str(message.fields["method"]))
        except (ConnectionClosed, ConnectionResetError):
            self._followers.lost(self, "is gone")
        except (FramingError, OSError) as error:
            self._followers.lost(self, f"can't be understood: {error}")


class Trouble(NamedTuple):
    """First sign that a rank has failed."""

    died: bool  # its connection or process is gone, without an error
    follower: FollowerConnection | None  # None for rank 0
    what: str  # one line, which begins with a verb
    detail: str  # traceback, or ""


class Followers:
    """All followers of a leader. They repeat each call of the leader's learner.

    Example:

        followers = Followers(silence=1800.0, explain=..., on_trouble=..., on_failure=print)
        followers.add(connection, rank=1, name="host 7712")
        scores = followers.call_all("score", arrays=arrays, local=lambda: learner.score(batch))
    """

    def __init__(
        self,
        *,
        silence: float,
        explain: Callable[[int], tuple[str, str]],
        on_trouble: Callable[[], None],
        on_failure: Callable[[RankFailed], None],
    ) -> None:
        """
        Args:
          silence: seconds without a message after which a rank counts as lost.
          explain: takes a rank; returns how its process ended and the end of its log, each "" if
            unknown. May block for seconds.
          on_trouble: called once, in a thread of this class, at the first sign of trouble.
          on_failure: called once, in the same thread, with the error that names the rank that
            failed first.
        """
        self.failure: RankFailed | None = None
        self._silence, self._explain = silence, explain
        self._on_trouble, self._on_failure = on_trouble, on_failure
        self._followers: dict[int, FollowerConnection] = {}
        self.pending = PendingCalls()
        self._learner_thread = LearnerThread()
        self._changed = threading.Condition()
        self._calling = threading.Lock()
        self._number = 0
        self._unawaited = 0  # number of the last call that succeeded here and whose replies nobody waits for
        self._trouble: list[Trouble] = []  # in the order of arrival, one per rank
        self._hung: dict[int, str] = {}
        self._closing = False
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def add(self, connection: socket.socket, rank: int, name: str) -> None:
        """Adds a follower that passed the handshake."""
        with self._changed:
            self._followers[rank] = FollowerConnection(connection, rank, name, self)

    # Calls

    def call_all(
        self,
        method: str,
        *,
        local: Callable[[], Any],
        arrays: dict[str, Any] | None = None,
        wait: bool = True,
        later: bool = False,
        **fields: Any,
    ) -> Any:
        """Makes a call in all ranks, in the same order everywhere. Returns this rank's result.

        Args:
          method: name of the learner's method.
          local: makes the call in this rank.
          arrays, fields: arguments of the call, as a message carries them.
          wait: whether to wait for the followers. False if they may end the call only after its
            result was used here.
          later: the call leaves something that goes on in all ranks. Its result is a future here,
            and what is returned is the future of the end in all of them.

        Raises:
          UserError: all ranks raised one.
          RankFailed: a rank is lost or failed alone. All later calls raise it too.
        """
        with self._calling:
            self._number += 1
            message = Message("call", {"method": method, "number": self._number, **fields}, arrays or {})
            for follower in self._followers.values():
                follower.post(message)
            future = self._learner_thread.submit(local)
            future.add_done_callback(lambda _: self._wake())
            result = self._await_call(future, self._number, wait)
            return self.pending.of_all(self._number, frozenset(self._followers), result) if later else result

    def _await_call(self, future: concurrent.futures.Future[Any], number: int, wait: bool) -> Any:
        """Waits until all ranks have ended the call, or can't any more.

        Returns and raises as `call_all`.
        """
        deadline: float | None = None
        with self._changed:
            while True:
                if self.failure is not None:
                    raise self.failure
                pending = [follower for follower in self._followers.values() if follower.answered < number]
                own_error = future.exception() if future.done() else None
                if own_error is not None and not isinstance(own_error, UserError):
                    break
                refused = own_error is not None or any(
                    follower.error for follower in self._followers.values() if follower.answered == number
                )
                if future.done() and not refused and not wait:
                    self._unawaited = number
                    return future.result()
                if future.done() and not pending:
                    break
                if refused and deadline is None:
                    deadline = time.monotonic() + SAME_ERROR_TIME
                if deadline is not None and time.monotonic() > deadline:
                    break
                self._changed.wait(1.0)
        return self._result(future, number)

    def _result(self, future: concurrent.futures.Future[Any], number: int) -> Any:
        """Returns the result of a call that has ended, or raises its error."""
        own_error = future.exception() if future.done() else None
        if own_error is not None and not isinstance(own_error, UserError):
            self._blame_another(own_error)
            raise own_error
        refusing = [follower for follower in self._followers.values() if follower.answered == number and follower.error]
        if own_error is not None and len(refusing) == len(self._followers):
            others = [
                f"rank {follower.rank}: {_message(follower)}" for follower in refusing if _message(follower) != str(own_error)
            ]
            raise UserError(f"{own_error} ({others[0]})") if others else own_error
        if future.done() and own_error is None and not refusing:
            return future.result()
        with self._changed:  # only some ranks raised an error: the ranks' states differ, and no later call can succeed
            if own_error is not None:
                self._report(None, f"failed alone: {own_error}", "", died=False)
            else:
                self._report(refusing[0], f"failed alone: {_message(refusing[0])}", "", died=False)
        self._wait_for_failure(2 * SETTLING_TIME + 5)
        assert self.failure is not None
        raise self.failure

    def _blame_another(self, error: BaseException) -> None:
        """Raises RankFailed if the death of another rank caused this rank's error."""
        self._wait_for_failure(5.0)
        with self._changed:
            if self.failure is None:
                self.failure = RankFailed(f"rank 0: {type(error).__name__}: {' '.join(str(error).split())}")
                return
        raise self.failure from error

    def _wait_for_failure(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        with self._changed:
            while self.failure is None and time.monotonic() < until:
                self._changed.wait(0.1)

    # Reports of followers, from the threads of their connections

    def replied(self, follower: FollowerConnection, fields: Mapping[str, Any]) -> None:
        with self._changed:
            follower.answered, follower.error = int(fields["number"]), fields.get("error")
            if follower.error is not None and follower.error["kind"] != "user":
                self._report(follower, f"failed: {_message(follower)}", str(follower.error["traceback"]), died=False)
            elif follower.error is not None and follower.answered == self._unawaited:
                self._report(follower, f"failed alone: {_message(follower)}", "", died=False)
            self._changed.notify_all()

    def hung(self, follower: FollowerConnection, method: str) -> None:
        with self._changed:
            self._hung[follower.rank] = f"rank {follower.rank} ({follower.name}) in {method}"
            self._report(follower, "hung", "", died=False)
            self._changed.notify_all()

    def lost(self, follower: FollowerConnection, what: str) -> None:
        with self._changed:
            if not self._closing:
                self._report(follower, what, "", died=True)
            self._changed.notify_all()

    def _report(self, follower: FollowerConnection | None, what: str, detail: str, *, died: bool) -> None:
        """Records the first trouble of a rank, for the watching thread. The caller has the lock."""
        if not any(trouble.follower is follower for trouble in self._trouble):
            self._trouble.append(Trouble(died, follower, what, detail))

    def _watch(self) -> None:
        with self._changed:
            while not self._trouble:
                self._changed.wait(0.2)
                if self._closing:
                    return
                now = time.monotonic()
                for follower in self._followers.values():
                    if now - follower.last_heard > self._silence:
                        self._report(
                            follower, f"has been silent for {self._silence:.0f} s (recover.hang_timeout)", "", died=True
                        )
            died = self._trouble[0].died
        self._on_trouble()
        if not died:
            time.sleep(SETTLING_TIME)
        failure = self._verdict()
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify_all()
        self.pending.fail(self.failure)
        self._on_failure(self.failure)

    def _verdict(self) -> RankFailed:
        """Returns the error that names the first rank that died, else the first that failed.

        A death comes first, because it makes the collectives of other ranks fail.
        """
        with self._changed:
            if self._hung:  # ranks that wait for a hanging one in a collective hang too, so all of them are named
                hanging = ", ".join(self._hung[rank] for rank in sorted(self._hung))
                return RankFailed(
                    f"recover.hang_timeout: nothing moved: {hanging}; the stacks are in hang.rank*.txt and ranks/"
                )
            first = min(self._trouble, key=lambda trouble: not trouble.died)
        if first.follower is None:
            return RankFailed(f"rank 0 {first.what}")
        ended, tail = self._explain(first.follower.rank)
        return RankFailed(f"rank {first.follower.rank} ({first.follower.name}) {ended or first.what}", first.detail or tail)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def close(self, local: Callable[[], Any] | None, timeout: float) -> None:
        """Has all ranks close their learners, and closes the connections.

        Args:
          local: closes this rank's learner; None if there is none.
          timeout: seconds to wait for the ranks.
        """
        with self._changed:
            if self._closing:
                return
            sound = self.failure is None and not self._trouble
            self._closing = True
            self._changed.notify_all()
        if sound:
            self._number += 1
            for follower in self._followers.values():
                follower.post(Message("close", {"number": self._number}))
            future = self._learner_thread.submit(local or (lambda: None))
            future.add_done_callback(lambda _: self._wake())
            until = time.monotonic() + timeout
            with self._changed:
                while time.monotonic() < until and not (
                    future.done() and all(follower.answered >= self._number for follower in self._followers.values())
                ):
                    self._changed.wait(0.1)
        for follower in self._followers.values():
            follower.close()
        self._followers.clear()
        self._learner_thread.stop()


def _message(follower: FollowerConnection) -> str:
    return str(follower.error["message"]) if follower.error else ""
