"""Follower, a rank from 1 up: makes the leader's learner and repeats the leader's calls in order.

A follower never outlives its leader: it ends as soon as the connection breaks, even in a
collective.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rljax.batching.batch import Batch
from rljax.config import io as config_io
from rljax.config.allocation import Pool
from rljax.engine import Learner, find_plugin, target_from_json
from rljax.engine.rank import ProcessRank
from rljax.errors import UserError
from rljax.messaging.framing import FramingError, Message, receive, send
from rljax.multiprocess import rendezvous
from rljax.multiprocess.pending import CALL_ENDED
from rljax.process.watchdog import Watchdog

HEARTBEAT = 2.0  # seconds between heartbeats
HANG_SHARE = 0.7  # of recover.hang_timeout: a follower's watchdog fires before the leader's, which can then name the rank
BATCHES = frozenset({"score", "score_reference", "score_teacher", "values", "update", "update_critic", "update_supervised"})
PATHS = frozenset({"save", "restore"})

Make = Callable[[Mapping[str, Any]], Learner]  # takes the fields of the call "make"
OnHang = Callable[[], None]
Watch = Callable[
    [str, OnHang], AbstractContextManager[object]
]  # entered around a call; takes its name and a callback for hangs


def serve(connection: socket.socket, make: Make, *, watch: Watch, lost: Callable[[str], None]) -> None:
    """Repeats the leader's calls until it closes the learner.

    Args:
      connection: to the leader.
      make: makes the learner.
      watch: context manager around each call, which detects hangs.
      lost: called in another thread when the leader is gone, with the reason. It should end the
        process.
    """
    inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    sending, done = threading.Lock(), threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                message = receive(connection)
                inbox.put(message)
                if message.kind == "close":
                    return
        except (FramingError, OSError) as error:
            inbox.put(None)
            if not done.is_set():
                lost(str(error))

    def reply(message: Message) -> None:
        with sending, contextlib.suppress(OSError):  # the reading thread handles a broken connection
            send(connection, message)

    def heartbeat() -> None:
        while not done.wait(HEARTBEAT):
            reply(Message("heartbeat"))

    for thread in (read, heartbeat):
        threading.Thread(target=thread, daemon=True, name=f"follower {thread.__name__}").start()
    learner: Learner | None = None
    try:
        while (message := inbox.get()) is not None:
            closing = message.kind == "close"
            method, number = ("close" if closing else str(message.fields["method"])), message.fields["number"]
            error, later = None, None
            try:
                with watch(method, functools.partial(reply, Message("hung", {"method": method}))):
                    if method == "make":
                        learner = make(message.fields)
                    elif learner is not None:
                        later = _call(learner, method, message)
            except Exception as raised:
                error = _described(method, raised)
            reply(Message("reply", {"number": number, "error": error}))
            if later is not None:
                later.add_done_callback(functools.partial(_report_end, reply, method, number))
            del message
            if closing:
                return
    finally:
        done.set()


def _described(method: str, error: BaseException) -> dict[str, str]:
    """Describes an error of a call for the leader."""
    if isinstance(error, UserError):
        return {"kind": "user", "message": str(error)}
    traceback.print_exception(error)
    text = f"{method}: {type(error).__name__}: {' '.join(str(error).split())}"
    return {"kind": "fault", "message": text, "traceback": "".join(traceback.format_exception(error))}


def _report_end(reply: Callable[[Message], None], method: str, number: int, future: Future[None]) -> None:
    """Tells the leader that what a call began has ended."""
    error = future.exception()
    reply(Message(CALL_ENDED, {"number": number, "error": None if error is None else _described(method, error)}))


def _call(learner: Learner, method: str, message: Message) -> Future[None] | None:
    """Repeats one call of the leader. The result is not used; the leader has its own.

    Returns the end of what goes on after the call, if the call leaves something.
    """
    if method in BATCHES:
        getattr(learner, method)(Batch(**message.arrays))
    elif method in PATHS:
        getattr(learner, method)(Path(message.fields["path"]))
    elif method == "scale_lr":
        learner.scale_lr(message.fields["factor"])
    elif method == "begin_save":
        return learner.begin_save(Path(message.fields["path"]))
    elif method == "export":
        learner.export(target_from_json(message.fields["target"]))
    elif method == "close":
        learner.close()
    else:
        raise ValueError(f"no method {method!r}")
    return None


def follow(process: ProcessRank, workdir: Path) -> None:
    """Runs a follower from its start to its end. Blocks; ends the process if the leader is lost.

    SIGTERM and SIGINT are ignored: the leader handles them, saves, and closes the learner.

    Raises:
      UserError: there is no leader in time.
    """
    for which in (signal.SIGTERM, signal.SIGINT):
        signal.signal(which, signal.SIG_IGN)
    name = f"rank {process.rank}"
    found = rendezvous.join(process, workdir)
    current: list[str] = []  # name of the call in progress, if there is one

    @contextlib.contextmanager
    def watched(method: str, on_hang: OnHang) -> Iterator[None]:
        current.append(method)
        try:
            report = workdir / f"hang.rank{process.rank}.txt"
            with Watchdog(HANG_SHARE * found.hang_timeout, report, lambda line: on_hang()) as watchdog:
                watchdog.beat(method)
                yield
        finally:
            current.pop()

    def make(fields: Mapping[str, Any]) -> Learner:
        return _make(process, found.coordinator, fields)

    def lost(reason: str) -> None:
        where = f" in the middle of {current[0]}, with these stacks:" if current else ""
        print(f"{name}: the leader is gone ({reason}); this rank ends{where}", file=sys.stderr, flush=True)
        if current:
            faulthandler.dump_traceback(sys.__stderr__ or 2)
        sys.stdout.flush()
        os._exit(1)

    serve(found.connection, make, watch=watched, lost=lost)


def _make(process: ProcessRank, coordinator: str, fields: Mapping[str, Any]) -> Learner:
    config, pool = config_io.from_json(fields["config"]), Pool(**fields["pool"])
    with dataclasses.replace(process, coordinator=coordinator).in_environment():
        return find_plugin(pool.engine).make_learner(config, pool, Path(fields["model_dir"]))
