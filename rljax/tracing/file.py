"""A trace on disk, in the Trace Event Format (JSON), which Perfetto opens.

The file is an array with an event per line. The format allows it to end anywhere, so what a killed
process has written opens as it is; a thread writes a few times per second, so that it is nearly all
there. A trace that has grown to half of its size is renamed to NAME.1.json, and a new one begins
with all that is open then: the two hold the newest events. Times count from the start of the
process.
"""

from __future__ import annotations

import collections
import io
import logging
import os
import threading
from datetime import UTC, datetime
from pathlib import Path

from rljax.tracing.events import Event, Process, encode, metadata, now
from rljax.tracing.tracer import Tracer

INTERVAL = 0.25  # seconds between writes
MAX_WAITING = 200_000  # events in memory; more are dropped, and counted, while the disk is slow
HEARTBEAT = 1.0  # seconds without an event until one is written
LOST = "lost with its process"

log = logging.getLogger(__name__)


class TraceFile:
    """Writes the events of all processes of a run. Its methods may be called from any thread.

    A trace that can't be written any more (the disk is full) ends with a warning; the run goes on.

    Example:
        file = TraceFile(workdir / "trace.json", max_bytes=256 << 20)
        file.add(Process(4711, "trainer"), Event("B", 1, now(), "update", {}))
        file.close()
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """A file that is there becomes NAME.1.json: its process is gone, with what was open in it.

        Args:
          max_bytes: size of both files together.
        """
        self._path, self._limit = path, max_bytes // 2
        self._waiting: collections.deque[tuple[Process, Event | None]] = collections.deque()
        self._dropped = 0
        self._pids: dict[Process, int] = {}  # as the file has them: processes of other machines may have equal ids
        self._numbers: dict[tuple[int, int], int] = {}  # by process and track: the number in the file
        self._names: dict[tuple[int, int], str] = {}
        self._open: dict[tuple[int, int], list[Event]] = {}  # spans that have begun
        self._tracers: list[Tracer] = []
        self._origin = now()
        self._stop = threading.Event()
        self._file: io.FileIO | None = None
        self._size, self._empty = 0, True
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    def add(self, process: Process, event: Event) -> None:
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append((process, event))
        else:
            self._dropped += 1

    def follow(self, tracer: Tracer) -> None:
        """Shows what is open in a process, from the next write on."""
        self._tracers.append(tracer)

    @property
    def waiting(self) -> int:
        """Number of events that are not written yet."""
        return len(self._waiting)

    def gone(self, process: Process) -> None:
        """Ends all spans of a process that is no more."""
        self._waiting.append((process, None))

    def close(self) -> None:
        """Writes what is left, and the end of the array."""
        self._stop.set()
        self._thread.join()

    # The thread

    def _run(self) -> None:
        try:
            self._begin()
            silent = 0.0
            while not self._stop.wait(INTERVAL):
                lines = self._lines()
                silent = 0.0 if lines else silent + INTERVAL
                if silent >= HEARTBEAT:
                    silent, lines = 0.0, self._alive()
                self._write(lines)
            self._write(self._lines())
            self._append("\n]\n")
            if self._dropped:
                log.warning("%s: %d events are missing: they came faster than they could be written", self._path, self._dropped)
        except OSError as error:
            log.warning("%s: %s; the trace ends here", self._path, error.strerror)
            self._waiting = collections.deque(maxlen=0)
        finally:
            if self._file is not None:
                self._file.close()

    def _begin(self) -> None:
        """Begins a file with the names of all processes and tracks, and with what is open."""
        if self._file is not None:
            self._append("\n]\n")
            self._file.close()
        if self._path.exists():
            os.replace(self._path, self._path.with_suffix(".1.json"))
        self._file, self._size = self._path.open("wb", buffering=0), 0
        lines = [line for process in self._pids for line in self._about(process)]
        lines += [metadata("thread_name", key[0], self._numbers[key], name) for key, name in self._names.items()]
        lines += [
            encode(event, key[0], self._numbers[key], self._origin) for key, spans in self._open.items() for event in spans
        ]
        self._append("[\n" + ",\n".join(lines))
        self._empty = not lines

    def _write(self, lines: list[str]) -> None:
        """Writes whole lines at once, and begins another file where this one is full."""
        if lines:
            self._append(("" if self._empty else ",\n") + ",\n".join(lines))
            self._empty = False
        if self._size > self._limit and not self._stop.is_set():
            self._begin()

    def _append(self, text: str) -> None:
        assert self._file is not None
        left = text.encode()
        while left:
            written = self._file.write(left) or 0
            left, self._size = left[written:], self._size + written

    def _lines(self) -> list[str]:
        for tracer in self._tracers:
            tracer.tell_open()
        lines: list[str] = []
        for _ in range(len(self._waiting)):
            process, event = self._waiting.popleft()
            pid = self._pids.get(process)
            if pid is None:
                pid = self._pids[process] = process.pid
                while list(self._pids.values()).count(pid) > 1:
                    pid = self._pids[process] = pid + 1
                lines += self._about(process)
            if event is None:
                lines += self._closed(pid)
                continue
            if self._accept(key := (pid, event.track), event):
                lines.append(encode(event, pid, self._numbers.setdefault(key, len(self._numbers) + 1), self._origin))
        return lines

    def _alive(self) -> list[str]:
        """Returns a counter, so that the trace of a run that stands still goes on."""
        event = Event("C", 0, now(), 0, "alive", {"seconds": (now() - self._origin) // 10**9})
        pids = [self._pids[tracer.process] for tracer in self._tracers if tracer.process in self._pids]
        return [encode(event, pid, 0, self._origin) for pid in pids]

    def _about(self, process: Process) -> list[str]:
        """Returns the name of a process, and when times of the file count from."""
        pid, origin = self._pids[process], datetime.fromtimestamp(self._origin / 1e9, UTC)
        since = f"0 s is {origin:%Y-%m-%d %H:%M:%S} UTC"
        return [metadata("process_name", pid, 0, process.name), metadata("process_labels", pid, 0, since)]

    def _accept(self, key: tuple[int, int], event: Event) -> bool:
        """Keeps track of names and open spans. Returns whether the event can be written."""
        spans = self._open.setdefault(key, [])
        match event.phase:
            case "M":
                self._names[key] = event.name
            case "B":
                spans.append(event)
            case "E":
                if not spans:
                    return False  # its beginning was dropped
                spans.pop()
        return True

    def _closed(self, pid: int) -> list[str]:
        lines = []
        for key in [key for key, spans in self._open.items() if key[0] == pid]:
            for began in reversed(self._open.pop(key)):
                ended = Event("E", began.track, max(began.time, now()), 0, "", {"error": LOST})
                lines.append(encode(ended, pid, self._numbers[key], self._origin))
        return lines
