"""Runs a command that must not outlive its parent: `python reaper.py GRACE COMMAND...`.

The parent keeps the other end of stdin open. When it closes that end or dies, the command's whole
process group gets SIGTERM, and SIGKILL after GRACE seconds; so does, on Linux, what left the group.
Exits with the command's status. Imports nothing of rljax, so that it starts fast.
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
    """Makes the child die with the reaper (Linux only), even if the reaper is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before prctl took effect
            os.kill(os.getpid(), signal.SIGKILL)


def stop(process: "subprocess.Popen[bytes]", grace: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:  # the group may outlive its first process for a moment
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)


def end_orphans() -> None:
    """Kills and reaps what the command left behind, which became this process's children."""
    with contextlib.suppress(ChildProcessError, OSError):  # no more children, or no /proc
        while True:
            with open(f"/proc/self/task/{os.getpid()}/children") as children:
                for pid in children.read().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            os.waitpid(-1, 0)


def main() -> int:
    grace, command = float(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    die = functools.partial(die_with, os.getpid())
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die)

    parent = os.getppid()

    def watch_parent() -> None:
        wanted = True
        while wanted and os.getppid() == parent:
            readable, _, _ = select.select([0], [], [], 1.0)
            wanted = not readable or bool(os.read(0, 1))
        stop(process, grace)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: threading.Thread(target=stop, args=(process, grace), daemon=True).start())
    threading.Thread(target=watch_parent, daemon=True).start()
    status = process.wait()
    stop(process, 0.0)  # children that it left behind
    end_orphans()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
