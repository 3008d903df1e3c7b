"""Tracer: gives the spans of a process their tracks.

A track is a row of Perfetto's, and its spans are nested: none may overlap another that doesn't lie
inside it. Episodes, requests and groups overlap, so each kind has as many tracks as there are at
once, called lanes; a span takes the first that is free. A span inside another lies on its track,
unless one that lies there has not ended (two requests at once in an episode): then it takes a lane.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import threading
from collections.abc import Hashable, Mapping
from types import TracebackType
from typing import Any, Self

from rljax.tracing.events import Event, Process, Sink, now

MAX_TEXT = 200  # characters of an error that are kept
OTHER = "other"  # kind of the lanes of spans that lie in none


class Track:
    """A row of spans."""

    __slots__ = ("kind", "lane", "number", "open")

    def __init__(self, number: int, kind: str, lane: int) -> None:
        self.number = number
        self.kind = kind
        self.lane = lane  # -1: no lane, it always exists
        self.open: list[Span] = []  # from the outermost to the innermost


class Span:
    """A span, and the context manager that it is recorded with."""

    __slots__ = ("_args", "_kind", "_name", "_outer", "_token", "_tracer", "_track_name", "notes", "track")

    def __init__(
        self,
        tracer: Tracer | None = None,
        name: str = "",
        track: str = "",
        lane: str = "",
        args: dict[str, Any] | None = None,
        outer: Span | None = None,
    ) -> None:
        self._tracer = tracer
        self._name, self._track_name, self._kind = name, track, lane
        self._args = args or {}
        self._outer = outer
        self._token: contextvars.Token[Span | None] | None = None
        self.track: Track | None = None
        self.notes: dict[str, Any] = {}

    def note(self, **args: Any) -> None:
        """Adds arguments that are known only at the end."""
        if self._tracer is not None:
            self.notes.update(args)

    def __enter__(self) -> Self:
        if self._tracer is not None:
            self._tracer.enter(self, self._name, self._track_name, self._kind, self._outer, self._args)
            self._token = _innermost.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._tracer is None:
            return
        if error is not None:
            self.notes["error"] = _described(error)
        if self._token is not None:
            _innermost.reset(self._token)
        self._tracer.exit(self)


OFF = Span()  # where nothing is traced
_innermost: contextvars.ContextVar[Span | None] = contextvars.ContextVar("rljax_span", default=None)


class Tracer:
    """Records the spans and counters of one process. Its methods may be called from any thread."""

    def __init__(self, sink: Sink, process: Process) -> None:
        self.sink, self.process = sink, process
        self._lock = threading.Lock()
        self._named: dict[str, Track] = {}
        self._free: dict[str, list[tuple[int, Track]]] = {}  # lanes by kind, heaps by number
        self._lanes: dict[str, int] = {}  # by kind, how many there are
        self._tracks = 0
        self._keyed: dict[Hashable, Span] = {}

    def span(self, name: str, track: str, lane: str, args: dict[str, Any]) -> Span:
        return Span(self, name, track, lane, args, _innermost.get())

    def begin(self, key: Hashable, name: str, lane: str, args: dict[str, Any]) -> None:
        self.end(key, {})
        self._keyed[key] = begun = Span(self, name, "", lane, args)
        self.enter(begun, name, "", lane, None, args)

    def end(self, key: Hashable, args: Mapping[str, Any]) -> None:
        if (begun := self._keyed.pop(key, None)) is not None:
            begun.notes.update(args)
            self.exit(begun)

    def count(self, name: str, values: dict[str, float]) -> None:
        self.sink.add(self.process, Event("C", 0, now(), name, values))

    def enter(self, span: Span, name: str, track: str, lane: str, outer: Span | None, args: dict[str, Any]) -> None:
        """Puts a span on its track and records that it begins."""
        with self._lock:
            span.track = found = self._track_of(track, lane, outer)
            found.open.append(span)
            self.sink.add(self.process, Event("B", found.number, now(), name, args))

    def exit(self, span: Span) -> None:
        """Records that a span ends, and those inside it that have not: their tasks outlive it."""
        with self._lock:
            track = span.track
            if track is None:
                return  # ended with the one around it
            at = now()
            while track.open:
                last = track.open.pop()
                last.track = None
                self.sink.add(self.process, Event("E", track.number, at, "", last.notes))
                if last is span:
                    break
            if not track.open and track.lane >= 0:
                heapq.heappush(self._free[track.kind], (track.lane, track))

    def _track_of(self, name: str, kind: str, outer: Span | None) -> Track:
        if name:
            if name not in self._named:
                self._named[name] = self._new_track(name, name, -1)
            return self._named[name]
        around = None if outer is None else outer.track
        if not kind and around is not None:
            if around.open[-1] is outer:
                return around
            kind = around.kind
        kind = kind or OTHER
        free = self._free.setdefault(kind, [])
        if free:
            return heapq.heappop(free)[1]
        lane = self._lanes.get(kind, 0)
        self._lanes[kind] = lane + 1
        return self._new_track(f"{kind} {lane}", kind, lane)

    def _new_track(self, name: str, kind: str, lane: int) -> Track:
        self._tracks += 1
        self.sink.add(self.process, Event("M", self._tracks, now(), name, {}))
        return Track(self._tracks, kind, lane)


def _described(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return f"{type(error).__name__}: {error}"[:MAX_TEXT]
