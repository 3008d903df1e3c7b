"""Tracer: gives the spans of a process their tracks.

A track is a row of Perfetto's, and its spans are nested: none may overlap another that doesn't lie
inside it. Episodes, requests and groups overlap, so each kind has as many tracks as there are at
once, called lanes; a span takes the first that is free. A span inside another lies on its track,
unless one that lies there has not ended (two requests at once in an episode): then it takes a lane.

A span is one event, recorded when it ends. One that lasts is two: `tell_open`, called from time to
time, records the beginnings of all that have not ended, so that a killed process shows what it was
doing.
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
SPACING = 5_000_000  # nanoseconds between the values of a counter: 256 requests that start at once are one step of its curve
OTHER = "other"  # kind of the lanes of spans that lie in none


class Track:
    """A row of spans."""

    __slots__ = ("kind", "lane", "number", "open")

    def __init__(self, number: int, kind: str, lane: int) -> None:
        self.number = number
        self.kind = kind
        self.lane = lane  # -1: no lane, it always exists
        self.open: list[Span] = []  # from the outermost to the innermost


_NONE: dict[str, Any] = {}  # the notes of a span without any; never written to


class Span:
    """A span, and the context manager that it is recorded with."""

    __slots__ = ("_token", "args", "kind", "name", "notes", "row", "shortest", "started", "told", "tracer", "track")

    def __init__(self, tracer: Tracer | None, name: str, row: str, kind: str, args: dict[str, Any], shortest: int = 0) -> None:
        self.tracer = tracer  # None: nothing is traced
        self.name = name
        self.row = row  # name of the track to lie on, if it has to be one
        self.kind = kind  # of lanes, if it has to be one
        self.args = args
        self.shortest = shortest  # nanoseconds; a shorter one is left out
        self.notes: dict[str, Any] = _NONE
        self.track: Track | None = None  # while it is open
        self.started = 0  # nanoseconds since 1970
        self.told = False  # its beginning is recorded
        self._token: contextvars.Token[Span | None] | None = None

    def note(self, /, **args: Any) -> None:
        """Adds arguments that are known only at the end."""
        self.notes = self.notes | args if self.notes else args

    def __enter__(self) -> Self:
        if self.tracer is not None:
            self.tracer.enter(self, _innermost.get())
            self._token = _innermost.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.tracer is None:
            return
        if error is not None:
            self.note(error=_described(error))
        if self._token is not None:
            _innermost.reset(self._token)
        self.tracer.exit(self)


class NoSpan(Span):
    """The span where nothing is traced."""

    def __init__(self) -> None:
        super().__init__(None, "", "", "", {})

    def note(self, **args: Any) -> None:
        """Does nothing."""


OFF = NoSpan()
_innermost: contextvars.ContextVar[Span | None] = contextvars.ContextVar("rljax_span", default=None)


class Tracer:
    """Records the spans and counters of one process. Its methods may be called from any thread."""

    def __init__(self, sink: Sink, process: Process) -> None:
        self.sink, self.process = sink, process
        self._lock = threading.Lock()
        self._tracks: list[Track] = []
        self._named: dict[str, Track] = {}
        self._free: dict[str, list[tuple[int, Track]]] = {}  # lanes by kind, heaps by number
        self._lanes: dict[str, int] = {}  # by kind, how many there are
        self._keyed: dict[Hashable, Span] = {}
        self._counted: dict[str, int] = {}  # by counter: the time of its last event
        self._late: dict[str, Event] = {}  # by counter: values that came too soon after that

    def begin(self, key: Hashable, name: str, lane: str, args: dict[str, Any]) -> None:
        self.end(key, {})
        self._keyed[key] = begun = Span(self, name, "", lane, args)
        self.enter(begun, None)

    def end(self, key: Hashable, args: Mapping[str, Any]) -> None:
        if (begun := self._keyed.pop(key, None)) is not None:
            begun.note(**args)
            self.exit(begun)

    def count(self, name: str, values: dict[str, float]) -> None:
        """Records a counter; of values closer than SPACING the last ones, at the next `tell_open`."""
        event = Event("C", 0, now(), 0, name, values)
        with self._lock:
            if event.time - self._counted.get(name, 0) < SPACING:
                self._late[name] = event
            else:
                self._late.pop(name, None)
                self._record(event)

    def enter(self, span: Span, outer: Span | None) -> None:
        """Puts a span on its track."""
        with self._lock:
            span.track = track = self._track_of(span, outer)
            track.open.append(span)
            span.started = now()

    def exit(self, span: Span) -> None:
        """Records a span, and those inside it that have not ended: their tasks outlive it."""
        with self._lock:
            track = span.track
            if track is None:
                return  # ended with the one around it
            at, last = now(), None
            while last is not span:  # once, unless spans inside it outlive it
                last = track.open.pop()
                last.track = None
                if last.told:
                    event = Event("E", track.number, at, 0, "", last.notes)
                elif at - last.started < last.shortest:
                    continue
                else:
                    args = last.args | last.notes if last.notes else last.args
                    event = Event("X", track.number, last.started, at - last.started, last.name, args)
                self.sink.add(self.process, event)
            if not track.open and track.lane >= 0:
                heapq.heappush(self._free[track.kind], (track.lane, track))

    def tell_open(self) -> None:
        """Records the beginnings of all open spans, and the newest values of counters."""
        with self._lock:
            for event in self._late.values():
                self._record(event)
            self._late.clear()
            for track in self._tracks:
                for span in track.open:
                    if not span.told:
                        span.told = True
                        self.sink.add(self.process, Event("B", track.number, span.started, 0, span.name, span.args))

    def _record(self, counter: Event) -> None:
        self._counted[counter.name] = counter.time
        self.sink.add(self.process, counter)

    def _track_of(self, span: Span, outer: Span | None) -> Track:
        kind = span.kind
        if span.row:
            if span.row not in self._named:
                self._named[span.row] = self._new_track(span.row, span.row, -1)
            return self._named[span.row]
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
        self._tracks.append(Track(len(self._tracks) + 1, kind, lane))
        self.sink.add(self.process, Event("M", len(self._tracks), now(), 0, name, {}))
        return self._tracks[-1]


def _described(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return f"{type(error).__name__}: {error}"[:MAX_TEXT]
