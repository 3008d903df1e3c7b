"""Ends a process when its parent ends, in whatever way."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int) -> None:
    """Has this process killed when its parent ends, even in the middle of a C call.

    Args:
      parent: id of the parent process, taken before this process could have lost it.
    """
    if sys.platform == "linux":  # the kernel does it, even while a C extension holds the interpreter
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
