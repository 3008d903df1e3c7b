"""Tracing: what a run does when, as spans on tracks, for Perfetto (docs/tracing.md).

    with tracing.to_file(workdir / "trace.json", max_bytes=256 << 20):
        ...
        with tracing.span("tool", tool="python") as span:      # in a workflow, for instance
            answer = await run(code)
            span.note(characters=len(answer))

A span lies inside the one that encloses it in the code, across tasks and threads that inherit the
context. Where nothing is traced, all of these do nothing, and cost below a microsecond.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

from rljax.tracing.events import Event, Process, Sink, from_text, to_text
from rljax.tracing.file import TraceFile
from rljax.tracing.outbox import Outbox
from rljax.tracing.tracer import OFF, Span, Tracer

__all__ = [
    "Event",
    "Outbox",
    "Process",
    "Sink",
    "Span",
    "TraceFile",
    "Tracer",
    "active_file",
    "begin",
    "count",
    "end",
    "from_text",
    "is_on",
    "recording",
    "span",
    "to_file",
    "to_text",
    "wait",
]

_active: contextvars.ContextVar[Tracer | None] = contextvars.ContextVar("rljax_tracer", default=None)


def span(name: str, /, *, track: str = "", lane: str = "", **args: Any) -> Span:
    """Returns a context manager that records a span.

    Args:
      track: name of the track to lie on. Spans of one track are nested.
      lane: kind of the track, for spans that overlap: each lies on a lane that is free, "KIND 0",
        "KIND 1", ... Without either, the span lies inside the one around it.
      args: shown with the span; JSON values.
    """
    tracer = _active.get()
    return OFF if tracer is None else Span(tracer, name, track, lane, args)


def wait(name: str, /, *, track: str = "", lane: str = "", **args: Any) -> Span:
    """Returns a span like that of `span`, which is left out if it is shorter than a millisecond."""
    tracer = _active.get()
    return OFF if tracer is None else Span(tracer, name, track, lane, args, shortest=1_000_000)


def begin(key: Hashable, name: str, /, *, lane: str, **args: Any) -> None:
    """Begins a span that has no place in the code, until `end` is called with the same key."""
    if (tracer := _active.get()) is not None:
        tracer.begin(key, name, lane, args)


def end(key: Hashable, /, **args: Any) -> None:
    """Ends the span of `begin`, if it has begun; the arguments are shown with it."""
    if (tracer := _active.get()) is not None:
        tracer.end(key, args)


def count(name: str, /, **values: float) -> None:
    """Records the values of a counter, one curve each, from now on."""
    if (tracer := _active.get()) is not None:
        tracer.count(name, values)


def is_on() -> bool:
    """Returns whether this context is traced."""
    return _active.get() is not None


def active_file() -> TraceFile | None:
    """Returns the file that this context is traced to; None where it is traced to none."""
    tracer = _active.get()
    return tracer.sink if tracer is not None and isinstance(tracer.sink, TraceFile) else None


@contextlib.contextmanager
def recording(tracer: Tracer | None) -> Iterator[None]:
    """Context in which `span`, `count` and the others record with a tracer; None: with none."""
    token = _active.set(tracer)
    try:
        yield
    finally:
        _active.reset(token)


@contextlib.contextmanager
def to_file(path: Path, max_bytes: int) -> Iterator[None]:
    """Context that is traced to a file, which may take up to max_bytes with the part before it."""
    file = TraceFile(path, max_bytes)
    tracer = Tracer(file, Process(os.getpid(), "trainer"))
    file.follow(tracer)
    try:
        with recording(tracer):
            yield
    finally:
        file.close()
