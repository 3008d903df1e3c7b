"""Runs a command that must not outlive the process that wanted it: `python guard.py GRACE
COMMAND...`.

The wish is the other end of stdin: when it is closed, or this process has another parent, by
whoever or whatever ended that one, the command's whole process group gets SIGTERM, and SIGKILL
after GRACE seconds. Exits with the command's status. Imports nothing of rljax: it starts fast.
"""

import contextlib
import ctypes
import functools
import os
import select
import signal
import subprocess
import sys
import threading
import time


def die_with(parent: int) -> None:
    """In the child, on Linux: a guard that is killed itself takes the command along."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # killed before we asked
            os.kill(os.getpid(), signal.SIGKILL)


def stop(process: "subprocess.Popen[bytes]", grace: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:  # the group may outlive its leader for a moment
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    grace, command = float(sys.argv[1]), sys.argv[2:]
    die = functools.partial(die_with, os.getpid())
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die)

    parent = os.getppid()

    def wait_for_the_end_of_the_wish() -> None:
        wished = True
        while wished and os.getppid() == parent:
            readable, _, _ = select.select([0], [], [], 1.0)
            wished = not readable or bool(os.read(0, 1))
        stop(process, grace)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: threading.Thread(target=stop, args=(process, grace), daemon=True).start())
    threading.Thread(target=wait_for_the_end_of_the_wish, daemon=True).start()
    status = process.wait()
    stop(process, 0.0)  # what it left behind
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
