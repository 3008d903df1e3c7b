"""Ranks 1 and up: make the leader's learner, then repeat every call that it makes, in its order.

A follower never outlives its leader: when the connection breaks it ends at once, in a collective
or not.
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
from rljax.process.watchdog import Watchdog

HEARTBEAT = 2.0  # seconds between two signs of life
HANG_SHARE = 0.7  # of recover.hang_timeout: a follower's watchdog fires before its leader's, so that the rank is named
BATCHES = frozenset({"score", "score_reference", "score_teacher", "values", "update", "update_critic", "update_supervised"})
PATHS = frozenset({"save", "restore"})

Make = Callable[[Mapping[str, Any]], Learner]  # from the fields of the call "make"
OnHang = Callable[[], None]
Watch = Callable[[str, OnHang], AbstractContextManager[object]]  # around a call: its name, and what to do when it hangs


def serve(connection: socket.socket, make: Make, *, watch: Watch, lost: Callable[[str], None]) -> None:
    """Repeats the calls of the leader at the other end of the connection until it closes the
    learner.

    Args:
      lost: called in a thread of this function when the leader is gone. It should end the process.
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
        with sending, contextlib.suppress(OSError):  # the reading thread sees it too
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
            error = None
            try:
                with watch(method, functools.partial(reply, Message("hung", {"method": method}))):
                    if method == "make":
                        learner = make(message.fields)
                    elif learner is not None:
                        _call(learner, method, message)
            except UserError as user_error:
                error = {"kind": "user", "message": str(user_error)}
            except Exception as fault:
                traceback.print_exc()
                text = f"{method}: {type(fault).__name__}: {' '.join(str(fault).split())}"
                error = {"kind": "fault", "message": text, "traceback": traceback.format_exc()}
            reply(Message("reply", {"number": number, "error": error}))
            del message
            if closing:
                return
    finally:
        done.set()


def _call(learner: Learner, method: str, message: Message) -> None:
    """Makes the leader's call here. Its result is dropped: the leader has its own."""
    if method in BATCHES:
        getattr(learner, method)(Batch(**message.arrays))
    elif method in PATHS:
        getattr(learner, method)(Path(message.fields["path"]))
    elif method == "export":
        learner.export(target_from_json(message.fields["target"]))
    elif method == "close":
        learner.close()
    else:
        raise ValueError(f"no method {method!r}")


def follow(process: ProcessRank, workdir: Path) -> None:
    """Runs a process of rank 1 or up from its start to its end. Blocks; ends the process when the
    leader is lost.

    SIGTERM and SIGINT are ignored here: the leader acts on them, saves, and closes the learner.
    """
    for which in (signal.SIGTERM, signal.SIGINT):
        signal.signal(which, signal.SIG_IGN)
    name = f"rank {process.rank}"
    found = rendezvous.join(process, workdir)
    current: list[str] = []  # the call under way: one or none

    @contextlib.contextmanager
    def watched(method: str, on_hang: OnHang) -> Iterator[None]:
        current.append(method)
        try:
            with Watchdog(HANG_SHARE * found.hang_timeout, workdir / f"hang.rank{process.rank}.txt", on_hang) as watchdog:
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
