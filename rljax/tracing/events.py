"""Events of a trace: plain values that one process may send to another."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from math import isfinite
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol

_EPOCH = time.time_ns() - time.perf_counter_ns()  # nanoseconds since 1970, when the performance counter was 0
_quoted = json.encoder.encode_basestring_ascii
_encoded = json.JSONEncoder(default=str, separators=(",", ":"), allow_nan=False).encode
PHASES = ("X", "B", "E", "M", "C")


class Event(NamedTuple):
    """Something that happens on a track.

    Example: Event("X", 3, 1785000000000000000, 250_000, "generate", {"tokens": 41})
    """

    phase: str  # "X": a whole span; "B", "E": the beginning and end of a long one; "M": a track's name; "C": a counter's values
    track: int  # number in its process; 0 for a counter
    time: int  # nanoseconds since 1970
    duration: int  # nanoseconds, of a whole span; else 0
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
    """Returns the time in nanoseconds since 1970.

    It never goes back, and agrees between the processes of a machine.
    """
    return _EPOCH + perf_counter_ns()


def to_text(events: Iterable[Event]) -> str:
    """Encodes events for another process."""
    rows = (f"[{_quoted(e[0])},{e[1]},{e[2]},{e[3]},{_quoted(e[4])},{_object(e[5])}]" for e in events)
    return f"[{','.join(rows)}]"


def from_text(text: str) -> list[Event]:
    """Decodes what `to_text` returned. Raises ValueError, TypeError."""
    return [_event(raw) for raw in json.loads(text)]


def _event(raw: Any) -> Event:
    phase, track, at, duration, name, args = raw
    numbers = all(type(number) is int for number in (track, at, duration))
    if phase not in PHASES or not numbers or not isinstance(name, str) or not isinstance(args, dict):
        raise ValueError(f"no event of a trace: {raw!r:.100}")
    return Event(phase, track, at, duration, name, args)


def encode(event: Event, pid: int, tid: int, origin: int) -> str:
    """Encodes an event as an object of the Trace Event Format, with its time since `origin`."""
    phase, _, at, duration, name, args = event
    if phase == "M":
        return metadata("thread_name", pid, tid, name)
    shown = f',"args":{_object(args)}' if args else ""
    begins = f'{{"ph":"{phase}","pid":{pid},"tid":{tid},"ts":{(at - origin) / 1000}'  # microseconds
    if phase == "X":
        return f'{begins},"dur":{duration / 1000},"name":{_quoted(name)}{shown}}}'
    if phase == "E":
        return f"{begins}{shown}}}"
    return f'{begins},"name":{_quoted(name)}{shown}}}'


def _object(args: dict[str, Any]) -> str:
    return "{" + ",".join([f"{_quoted(key)}:{_value(value)}" for key, value in args.items()]) + "}"


def _value(value: Any) -> str:
    """Encodes an argument; the common types by themselves, which is several times faster."""
    kind = type(value)
    if kind is str:
        return _quoted(value)
    if kind is int or (kind is float and isfinite(value)):
        return repr(value)
    try:
        return _encoded(value)
    except (TypeError, ValueError, RecursionError):  # users' code may give anything
        return _quoted(str(value))


def metadata(kind: str, pid: int, tid: int, text: str) -> str:
    """Encodes a text about a process ("process_name", "process_labels") or track ("thread_name")."""
    value = "labels" if kind == "process_labels" else "name"
    return f'{{"ph":"M","pid":{pid},"tid":{tid},"name":"{kind}","args":{{"{value}":{_quoted(text)}}}}}'
