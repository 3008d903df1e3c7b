"""Ends a child process with all that it started, and with what those left behind.

A process group holds what stays in it. What leaves the group (`setsid`, a daemon's double fork) is
found otherwise: on Linux orphans become children of their nearest ancestor that asked for them
(`adopt_orphans`), and all that a child starts has the child's mark in its environment. A mark
begins with that of the process which gave it, so a worker's covers those of its reward processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "RLJAX_STARTED_AS"  # environment variable of a child, and of all that it starts
PASSES = 10
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def new_mark() -> str:
    """Returns a mark for a child of this process: the value of MARK in its environment."""
    return f"{os.environ.get(MARK, '')}/{secrets.token_hex(8)}"


def adopt_orphans() -> None:
    """Makes orphans among this process's descendants its children, so that they can be waited for.

    Does nothing on other systems than Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_all(pid: int, mark: str) -> None:
    """Kills a child and everything that it started, and reaps what became this process's child.

    The child itself is left to whoever started it, who waits for it. It may have ended already.

    Args:
      pid: of the child, which leads a process group of its own.
      mark: what `new_mark` returned for it.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty, or holds what changed its user
        os.killpg(pid, signal.SIGKILL)
    for _ in range(PASSES):  # what is killed may have started more before it was
        found = [other for other in _marked(mark) if other != pid]
        if not found:
            return
        for other in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(other, signal.SIGKILL)
        time.sleep(0.01)
        for other in found:
            with contextlib.suppress(ChildProcessError):  # it is somebody else's child
                os.waitpid(other, os.WNOHANG)


def _marked(mark: str) -> Iterator[int]:
    """Yields the processes of this user with a mark, or one that begins with it. Linux only."""
    wanted = f"{MARK}={mark}/".encode()
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # gone meanwhile, or another user's
            if any((line + b"/").startswith(wanted) for line in (directory / "environ").read_bytes().split(b"\0")):
                yield int(directory.name)
