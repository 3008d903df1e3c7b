"""Runs a module with a clock that jumps and a disk that is slow.

    CHAOS_CLOCK=FILE CHAOS_FSYNC=0.2 python -m tests.soak.shim MODULE ARGUMENT...

FILE holds seconds that are added to the wall clock; it may change at any time. An fsync takes up to
CHAOS_FSYNC seconds longer.
"""

import contextlib
import os
import random
import runpy
import sys
import time
from pathlib import Path

real_time, real_fsync = time.time, os.fsync


class Clock:
    """The wall clock, with the offset that a file has."""

    def __init__(self, path):
        self._path, self._offset, self._read_at = path, 0.0, 0.0

    def __call__(self):
        if time.monotonic() - self._read_at > 0.1:
            self._read_at = time.monotonic()
            with contextlib.suppress(OSError, ValueError):  # it is being written
                self._offset = float(self._path.read_text())
        return real_time() + self._offset


def slow_fsync(handle):
    time.sleep(random.uniform(0, float(os.environ["CHAOS_FSYNC"])))
    real_fsync(handle)


if __name__ == "__main__":
    time.time = Clock(Path(os.environ["CHAOS_CLOCK"]))
    os.fsync = slow_fsync
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__")
