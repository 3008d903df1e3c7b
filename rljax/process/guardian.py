"""Helper process of a run, for a call that holds its interpreter: `guardian.py STATUS PID GRACE`.

A C call that never gives back the interpreter's lock stops all Python threads of its process, the
watchdog's included. So the watchdog tells this process every second that it is well; when that
ends, this process sets status.json to failed and sends SIGABRT, at which faulthandler shows the
stacks, and SIGKILL if the other process is still there after GRACE seconds. It ends with the other
process. As a program it imports nothing of rljax, so that it starts fast.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time


def start(status: "os.PathLike[str]", grace: float) -> "subprocess.Popen[bytes]":
    """Starts the helper of this process.

    Args:
      status: the run's status.json.
      grace: seconds from SIGABRT to SIGKILL.
    """
    command = [sys.executable, "-I", "-S", __file__, os.fspath(status), str(os.getpid()), str(grace)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def beat(helper: "subprocess.Popen[bytes]", limit: float, last: str) -> None:
    """Tells the helper that all is well.

    Args:
      limit: seconds until the next beat, at most.
      last: what moved last, for the error.
    """
    assert helper.stdin is not None
    with contextlib.suppress(OSError, ValueError):  # the helper was killed: there is faulthandler's timer
        helper.stdin.write(json.dumps([limit, last]).encode() + b"\n")
        helper.stdin.flush()


def stop(helper: "subprocess.Popen[bytes]") -> None:
    """Ends the helper: all ended well."""
    assert helper.stdin is not None
    with contextlib.suppress(OSError):
        helper.stdin.close()
    helper.wait()


def main(status: str, pid: int, grace: float) -> None:
    received, limit, last, heard = b"", 0.0, "start", time.monotonic()
    while not limit or time.monotonic() - heard < limit:
        if _is_stopped(pid):
            heard = time.monotonic()
        readable, _, _ = select.select([0], [], [], 0.2)
        if not readable:
            continue
        piece = os.read(0, 65536)
        if not piece:
            return  # all is well, or the other process has ended
        *lines, received = (received + piece).split(b"\n")
        if lines:
            (limit, last), heard = json.loads(lines[-1]), time.monotonic()
    line = f"nothing has moved for {limit:g} s since {last!r}: a call holds the interpreter, and never gives it back"
    print(f"error: {line}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError, ValueError):
        _set_failed(status, line)
    os.kill(pid, signal.SIGABRT)
    end = time.monotonic() + grace
    while time.monotonic() < end and os.getppid() == pid:
        time.sleep(0.05)
    if os.getppid() == pid:
        os.kill(pid, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    """Returns whether the process was stopped by a signal, as a shell's job is: it is not at fault."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _set_failed(path: str, line: str) -> None:
    fields = {"step": 0, "version": 0}
    if os.path.exists(path):
        with open(path) as file:
            fields = json.load(file)
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w") as file:
        json.dump(fields | {"state": "failed", "error": line}, file)
    os.replace(temporary, path)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
