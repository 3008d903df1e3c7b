"""Events of a trace: plain values that one process may send to another."""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple, Protocol

_encoded = json.JSONEncoder(default=str, separators=(",", ":")).encode  # one encoder: json.dumps would make one per call
_STARTED = time.time_ns() - time.perf_counter_ns()  # nanoseconds since 1970, when the performance counter was 0


class Event(NamedTuple):
    """Something that happens on a track.

    Example: Event("B", 3, 1785000000000000, "generate", {"prompt_tokens": 41})
    """

    phase: str  # "B": a span begins; "E": the last one that began ends; "M": the track gets a name; "C": a counter's values
    track: int  # number in its process; 0 for a counter
    time: int  # microseconds since 1970
    name: str
    args: dict[str, Any]  # JSON values


class Process(NamedTuple):
    """A process that events come from."""

    pid: int
    name: str


class Sink(Protocol):
    """Takes events, from any thread."""

    def add(self, process: Process, event: Event) -> None: ...


def now() -> int:
    """Returns the time in microseconds since 1970.

    It never goes back, and agrees between the processes of a machine.
    """
    return (_STARTED + time.perf_counter_ns()) // 1000


def checked(raw: Any) -> Event:
    """Converts what another process sent for an event. Raises ValueError, TypeError."""
    phase, track, at, name, args = raw
    if phase not in ("B", "E", "M", "C") or type(track) is not int or type(at) is not int:
        raise ValueError(f"no event of a trace: {raw!r:.100}")
    if not isinstance(name, str) or not isinstance(args, dict):
        raise ValueError(f"no event of a trace: {raw!r:.100}")
    return Event(phase, track, at, name, args)


def encode(event: Event, pid: int, tid: int) -> str:
    """Encodes an event as an object of the Trace Event Format."""
    phase, _, at, name, args = event
    if phase == "M":
        return metadata("thread_name", pid, tid, name)
    shown = f',"args":{_encoded(args)}' if args else ""
    named = "" if phase == "E" else f',"name":{_encoded(name)}'
    return f'{{"ph":"{phase}","pid":{pid},"tid":{tid},"ts":{at}{named}{shown}}}'


def metadata(kind: str, pid: int, tid: int, name: str) -> str:
    """Encodes the name of a process ("process_name") or of a track ("thread_name")."""
    return f'{{"ph":"M","pid":{pid},"tid":{tid},"name":"{kind}","args":{{"name":{_encoded(name)}}}}}'
