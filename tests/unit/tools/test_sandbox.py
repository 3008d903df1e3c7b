"""Code that tries to get out of the sandbox, to use more than it may, or to stay."""

import asyncio
import os
import shutil
import time
from pathlib import Path

import psutil
import pytest

from rljax.errors import UserError
from rljax.tools import sandbox as sandbox_module
from rljax.tools.sandbox import Limits, Outcome, Sandbox
from tests.processes import running_children

LIMITS = Limits(seconds=20.0, memory_mb=256, files_mb=4, output_bytes=4000)


@pytest.fixture
def sandbox():
    try:
        return Sandbox(LIMITS)
    except UserError as error:
        pytest.skip(f"left out: {error}")


def run(sandbox, *codes):
    async def all_of_them():
        return await asyncio.gather(*map(sandbox.run, codes))

    return asyncio.run(all_of_them())


def test_output_and_a_value_at_the_end_come_back(sandbox):
    printed, value, raised, wrong, status, surrogate = run(
        sandbox, "print(1)\n6 * 7", "def f():\n  return 'x'\nf()", "1\n1/0", "x = ", "raise SystemExit(3)", "print('\\udcff')"
    )
    assert (printed.output, printed.outcome) == ("1\n42\n", Outcome.OK)
    assert (value.output, value.outcome) == ("'x'\n", Outcome.OK)
    assert raised.outcome is wrong.outcome is status.outcome is Outcome.ERROR
    assert raised.output.endswith("ZeroDivisionError: division by zero\n") and raised.output.count("File ") == 1
    assert wrong.output.endswith("SyntaxError: invalid syntax\n")
    assert surrogate.outcome in (Outcome.OK, Outcome.ERROR)


REFUSED = {
    "fork": "import os\nwhile True: os.fork()",
    "subprocess": "import subprocess; subprocess.run(['true'])",
    "multiprocessing": "import multiprocessing as m; p = m.Process(target=print); p.start(); p.join()",
    "clone through C": "import ctypes\nif ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0) < 0: raise OSError",
    "socket": "import socket; socket.create_connection(('127.0.0.1', 80))",
    "unix socket": "import socket; socket.socket(socket.AF_UNIX)",
    "vsock": "import socket; socket.socket(40, socket.SOCK_STREAM)",
    "passwords": "open('/etc/passwd').read()",
    "the machine's processes": "open('/proc/1/environ').read()",
    "write to Python": "import os; open(os.__file__, 'a')",
    "write to the root": "open('/x', 'w')",
    "write to shared memory": "open('/dev/shm/x', 'w')",
    "remove": "import os; os.unlink(os.__file__)",
    "a large file": "open('x', 'wb').write(bytes(8 << 20))",
    "many files": "for i in range(9): open(f'{i}', 'wb').write(bytes(1 << 20))",
    "memory": "x = bytearray(1 << 30)",
    "memory behind a file": "import os; os.memfd_create('x')",
    "raise a limit": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "namespaces": "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): raise OSError",
    "mount": "import ctypes\nif ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None): raise OSError",
    "kill all": "import os, signal; os.kill(os.getppid(), signal.SIGKILL); os.kill(-1, signal.SIGKILL); raise OSError",
}


def test_nothing_of_the_machine_is_reached_and_no_limit_is_passed(sandbox):
    for name, ran in zip(REFUSED, run(sandbox, *REFUSED.values()), strict=True):
        assert ran.outcome is Outcome.ERROR, (name, ran)
        assert "Error" in ran.output, (name, ran)  # Python's own: the process lived on


def test_the_file_system_is_pythons_and_an_empty_directory(sandbox, tmp_path):
    (tmp_path / "secret").write_text("secret")
    seen, kept, forgotten, environment = run(
        sandbox,
        f"import os; print(os.path.exists({str(tmp_path)!r}), os.listdir('.'))",
        "open('/tmp/kept', 'w').write('x'); print(open('/tmp/kept').read())",
        "import os; print(os.path.exists('/tmp/kept'))",
        "import os; print(sorted(os.environ), os.getuid())",
    )
    assert seen.output == "False []\n"
    assert kept.output == "x\n" and forgotten.output == "False\n"
    assert environment.output == "['HOME', 'LC_CTYPE', 'PWD'] 65534\n"
    assert not Path("/tmp/kept").exists()


THREADS = """
import threading, time
while True:
    try: threading.Thread(target=time.sleep, args=(9,)).start()
    except RuntimeError: pass
"""
SIGNALS = """
import signal, time
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
time.sleep(3600)
"""


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("import time; print('begun', flush=True); time.sleep(3600)", Outcome.TIMEOUT),
        (THREADS, Outcome.TIMEOUT),
        ("import os\nos.close(0); os.close(1); os.close(2)\nimport time; time.sleep(3600)", Outcome.TIMEOUT),
        (SIGNALS, Outcome.TIMEOUT),
        ("while True: print('x' * 1000)", Outcome.OUTPUT),
    ],
    ids=["sleeps", "threads", "closes its output", "ignores signals", "floods"],
)  # fmt: skip
def test_what_never_ends_is_ended_and_leaves_no_process(code, outcome):
    try:
        brief = Sandbox(Limits(seconds=1.5, output_bytes=4000))
    except UserError as error:
        pytest.skip(f"left out: {error}")
    before = children()
    (ran,) = run(brief, code)
    assert ran.outcome is outcome and len(ran.output) <= 4000
    deadline = time.monotonic() + 20
    while (left := children() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def children() -> set[psutil.Process]:
    """Returns the living processes below this one, which may have some of other tests."""
    return set(running_children())


def test_a_cancelled_run_leaves_no_process(sandbox):
    before = children()

    async def scenario():
        task = asyncio.create_task(sandbox.run("while True: pass"))
        while not children() - before:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())
    assert not children() - before


def test_without_its_means_there_is_no_sandbox(monkeypatch, tmp_path):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sandbox_module, "_seccomp_filter", lambda: b"")
    monkeypatch.setattr(sandbox_module, "_find_bubblewrap", lambda: str(broken))
    with pytest.raises(UserError, match=r"the sandbox does not work here: bwrap: No permissions .* namespaces are allowed"):
        Sandbox(LIMITS)
    with pytest.raises(UserError, match=r"python\.memory_mb: 0 \(at least 1\)"):
        Limits(memory_mb=0)


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("runuser") is None, reason="left out: another user is needed")
def test_runs_hold_without_root(sandbox):
    """Bubblewrap needs no privilege of the caller."""
    command = ["runuser", "-u", "nobody", "--", sandbox._bubblewrap, "--unshare-all", "--ro-bind", "/usr", "/usr"]
    command += ["--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "/usr/bin/true"]
    import subprocess

    if subprocess.run([*command[:4], "test", "-x", sandbox._bubblewrap]).returncode:
        pytest.skip("left out: bubblewrap is in a directory that others can't enter")
    assert subprocess.run(command).returncode == 0
