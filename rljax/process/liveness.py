"""Life signs of a process, for whoever finds its name in a file: is it still there?

On the same machine the kernel knows; elsewhere a file that the process touches tells.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

BEAT = 30.0  # seconds between two touches of the file
SILENCE = 600.0  # seconds without one after which a process that can't be seen counts as gone
ENDED = "ZX"  # states of a process that has ended and was not waited for
_STATE, _STARTED = 0, 19  # fields of /proc/PID/stat behind the command's name


@dataclasses.dataclass(frozen=True)
class Identity:
    """Identity of a process that no later one shares.

    Example: Identity(pid=4711, host="box", system="5c2e.../pid:[4026531836]", started=123456)
    """

    pid: int
    host: str
    system: str  # boot and process namespace of the machine; "" where the system doesn't tell
    started: int  # clock ticks after boot; 0 where the system doesn't tell

    @classmethod
    def of_this_process(cls) -> Identity:
        pid = os.getpid()
        return cls(pid, socket.gethostname(), _system(), _started(pid) or 0)

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Identity | None:
        """Reads the fields of an identity; None if one is missing or of another type."""
        fields = {field.name: record.get(field.name) for field in dataclasses.fields(cls)}
        pid, host, system, started = fields.values()
        if isinstance(pid, int) and isinstance(host, str) and isinstance(system, str) and isinstance(started, int):
            return cls(pid, host, system, started)
        return None

    def is_running(self) -> bool | None:
        """Returns whether the process still runs; None if that can't be seen from here."""
        if not self.system or self.system != _system():
            return None
        return _started(self.pid) == self.started


def lost(identity: Identity, sign: Path) -> str:
    """Returns why a process that should run does not, in a line; "" if it may.

    Args:
      sign: the file that it touches.
    """
    running = identity.is_running()
    if running is False:
        return f"its process ({identity.pid} on {identity.host}) is gone: it was killed"
    try:
        silent = time.time() - sign.stat().st_mtime
    except OSError:
        return ""
    if running or silent < SILENCE:
        return ""
    return f"its process ({identity.pid} on {identity.host}) has given no sign of life for {silent / 60:.0f} minutes"


@contextlib.contextmanager
def beating(sign: Path) -> Iterator[None]:
    """Context in which a file, once it is there, is touched again and again."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT):
            with contextlib.suppress(OSError):  # not there yet, or the disk is away
                os.utime(sign)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _system() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """Returns when a process started, in clock ticks after boot; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[_STATE] in ENDED else int(fields[_STARTED])
    except (OSError, ValueError, IndexError):
        return None
