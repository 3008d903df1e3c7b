"""Processes of a run, and the phase that the run is in."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOADING = ("/update_weights_from_", "/init_weights_update_group")  # what a server's log has of a publish
POLL = 0.005  # seconds


def children(pid: int) -> list[int]:
    """Returns all processes below one, parents first."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *children(child)]
    return found


def command_of(pid: int) -> str:
    """Returns a process's command line; empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def servers_of(run: int) -> list[list[int]]:
    """Returns the processes of each server of SGLang that a run has started, in the servers' order."""
    heads = [pid for pid in children(run) if "sglang.launch_server" in command_of(pid) and "reaper" not in command_of(pid)]
    inner = {pid for head in heads for pid in children(head)}
    return [[head, *children(head)] for head in heads if head not in inner]


def followers_of(run: int) -> list[int]:
    """Returns the processes of a learner's ranks from 1 on, that a run has started."""
    return [pid for pid in children(run) if "rljax.multiprocess" in command_of(pid)]


def signal_all(pids: list[int], number: int) -> None:
    """Sends a signal to all processes that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def await_that(condition: Callable[[], bool], seconds: float, alive: Callable[[], bool]) -> bool:
    """Waits until a condition holds. Returns False if the process ends, or the time does."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and alive():
        if condition():
            return True
        time.sleep(POLL)
    return False


class Spans:
    """The spans of a run's trace that are open now (docs/tracing.md).

    Only those of more than a quarter of a second are seen.

    Example: "update" in Spans(workdir / "trace.json").open()
    """

    def __init__(self, trace: Path) -> None:
        self._trace, self._read, self._rest = trace, 0, ""
        self._open: dict[tuple[int, int], list[str]] = {}

    def open(self) -> set[str]:
        """Reads what is new and returns the names of the spans that have begun and not ended."""
        with contextlib.suppress(OSError), self._trace.open() as file:
            file.seek(self._read)
            text = self._rest + file.read()
            self._read = file.tell()
            *lines, self._rest = text.split("\n")
            for line in lines:
                with contextlib.suppress(ValueError):
                    self._take(json.loads(line.strip().lstrip("[").rstrip(",]")))
        return {name for names in self._open.values() for name in names}

    def _take(self, event: dict[str, Any]) -> None:
        spans = self._open.setdefault((event.get("pid", 0), event.get("tid", 0)), [])
        if event.get("ph") == "B":
            spans.append(event["name"])
        elif event.get("ph") == "E" and spans:
            spans.pop()


class Loads:
    """Requests of publishes in the logs of servers, as their access logs have them."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs

    def count(self) -> int:
        """Returns how many buckets, directories and joined groups servers have answered."""
        found = 0
        for log in self._logs.glob("*"):
            with contextlib.suppress(OSError):
                text = log.read_text(errors="replace")
                found += sum(text.count(f"POST {path}") for path in LOADING)
        return found
