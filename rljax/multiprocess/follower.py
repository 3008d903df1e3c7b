"""Ranks 1 and up: make the learner that the leader makes, then every call that it makes, in its order, until it closes.

A follower is its leader's shadow: when the connection closes without a word it ends at once, in a collective or not.
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

PULSE = 2.0  # seconds between two signs of life
SOONER = 0.7  # of recover.hang_timeout: a follower's watchdog bites before its leader's, so that the rank is named
BATCHES = frozenset({"score", "score_reference", "values", "update", "update_critic", "update_supervised"})
PATHS = frozenset({"save", "restore"})

Make = Callable[[Mapping[str, Any]], Learner]  # from the fields of the call "make"
Bitten = Callable[[], None]
Watch = Callable[[str, Bitten], AbstractContextManager[object]]  # around a call: its name, and what to do when it hangs


def serve(connection: socket.socket, make: Make, *, watch: Watch, lost: Callable[[str], None]) -> None:
    """Follows the leader at the other end of the connection until it closes.

    Args:
      lost: called in a thread of ours when the leader is gone; the process should end there, for nobody waits for it any more.
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

    def tell(message: Message) -> None:
        with sending, contextlib.suppress(OSError):  # the reading thread sees it too
            send(connection, message)

    def pulse() -> None:
        while not done.wait(PULSE):
            tell(Message("alive"))

    for thread in (read, pulse):
        threading.Thread(target=thread, daemon=True, name=f"follower {thread.__name__}").start()
    learner: Learner | None = None
    try:
        while (message := inbox.get()) is not None:
            closing = message.kind == "close"
            method, number = ("close" if closing else str(message.fields["method"])), message.fields["number"]
            error = None
            try:
                with watch(method, functools.partial(tell, Message("hung", {"method": method}))):
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
            tell(Message("reply", {"number": number, "error": error}))
            del message
            if closing:
                return
    finally:
        done.set()


def _call(learner: Learner, method: str, message: Message) -> None:
    """The same call as the leader's. What it returns is the leader's to use."""
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
    """What a process of rank 1 and up does, from its start to its end. Blocks; does not return when the leader is lost.

    SIGTERM and SIGINT are the leader's to act on (it saves first): this process ends with it.
    """
    for which in (signal.SIGTERM, signal.SIGINT):
        signal.signal(which, signal.SIG_IGN)
    name = f"rank {process.rank}"
    found = rendezvous.join(process, workdir)
    calls: list[str] = []  # under way: one or none

    @contextlib.contextmanager
    def watched(method: str, bitten: Bitten) -> Iterator[None]:
        calls.append(method)
        try:
            with Watchdog(SOONER * found.hang_timeout, workdir / f"hang.rank{process.rank}.txt", bitten) as watchdog:
                watchdog.beat(method)
                yield
        finally:
            calls.pop()

    def make(fields: Mapping[str, Any]) -> Learner:
        return _make(process, found.coordinator, fields)

    def lost(reason: str) -> None:
        where = f" in the middle of {calls[0]}, with these stacks:" if calls else ""
        print(f"{name}: the leader is gone ({reason}); this rank ends{where}", file=sys.stderr, flush=True)
        if calls:
            faulthandler.dump_traceback(sys.__stderr__ or 2)
        sys.stdout.flush()
        os._exit(1)

    serve(found.connection, make, watch=watched, lost=lost)


def _make(process: ProcessRank, coordinator: str, fields: Mapping[str, Any]) -> Learner:
    config, pool = config_io.from_json(fields["config"]), Pool(**fields["pool"])
    with dataclasses.replace(process, coordinator=coordinator).in_environment():
        return find_plugin(pool.engine).make_learner(config, pool, Path(fields["model_dir"]))
