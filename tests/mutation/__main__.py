"""Plants faults in the core, one at a time, and runs the tests that should see each.

    python -m tests.mutation                    all of them; prints what came of each
    python -m tests.mutation buffer losses      those with one of these words in kind, file or line
    python -m tests.mutation "in: " "out: "     those of what goes into a run and what comes out of it
    python -m tests.mutation --list             says which, and plants none

A fault is a line of `tests/mutation/faults.py` or `edges.py`. It is planted in a copy of the
checkout, so that the checkout stays as it is. Each set of tests first passes without a fault.

killed      a test failed
timed out   a test ran past its limit of TEST_TIMEOUT, or its run past the watchdog's, which ended
            it: the suite sees the fault
HANGS       the tests went on past TIMEOUT: no limit of theirs ended them, and whoever runs them waits
SURVIVED    all tests passed
BROKEN      no test ran, or something that they need is not installed

Exit status 1 if one is BROKEN, HANGS, or SURVIVED without a reason in docs/testing.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import absl.flags  # noqa: F401  (imported before the forks, to be shared by them, as are those below)
import hypothesis  # noqa: F401
import ml_collections  # noqa: F401
import numpy  # noqa: F401  # noqa: ICN001
import pytest
import safetensors.numpy  # noqa: F401
import yaml  # noqa: F401

from tests.mutation.edges import EDGES
from tests.mutation.fault import Fault
from tests.mutation.faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]
TEST_TIMEOUT = 90  # seconds per test, which take up to 10 without a fault
TIMEOUT = 600.0  # seconds per fault
KILLED, TIMED_OUT, SURVIVED, HANGS, BROKEN = "killed", "timed out", "SURVIVED", "HANGS", "BROKEN"
BAD = (SURVIVED, HANGS, BROKEN)
PYTEST = 100  # exit status of a child: this and pytest's own, which is below 10
TEST_TIMED_OUT = 124  # as of coreutils' timeout
RUN_HUNG = 3  # rljax.process.watchdog.EXIT_HANG: the child is a run's process too, and is ended as one


class Reports:
    """Plugin of pytest that notes whether a test ran, and whether one was ended by pytest-timeout."""

    def __init__(self) -> None:
        self.timed_out = self.ran = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran |= report.when == "call" and not report.skipped
        self.timed_out |= report.failed and "from pytest-timeout" in report.longreprtext


def copy_checkout(target: Path) -> None:
    """Copies the files that tests need; links inside the checkout stay links."""
    ignored = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "runs")
    shutil.copytree(ROOT, target, symlinks=True, ignore=ignored)


def try_fault(fault: Fault, checkout: Path) -> str:
    """Plants a fault, runs its tests in a child and takes it out again."""
    path = checkout / fault.file
    text = path.read_text()
    path.write_text(fault.planted(text))
    try:
        status = _in_child(checkout, fault.tests)
    finally:
        path.write_text(text)
    seen = {TEST_TIMED_OUT: TIMED_OUT, RUN_HUNG: TIMED_OUT, PYTEST + pytest.ExitCode.TESTS_FAILED: KILLED}
    return {None: HANGS, PYTEST: SURVIVED, **seen}.get(status, BROKEN)


def first_failing(faults: Sequence[Fault], checkout: Path) -> Sequence[str]:
    """Returns the first tests that do not pass without a fault; they would kill any. Else ()."""
    return next((tests for tests in dict.fromkeys(fault.tests for fault in faults) if _in_child(checkout, tests) != PYTEST), ())


def _output_of(checkout: Path) -> Path:
    """Returns the file that has what the last tests said."""
    return checkout.with_name("output")


def _in_child(checkout: Path, tests: Sequence[str]) -> int | None:
    """Runs pytest in a fork, which has the libraries and nothing of the project in memory.

    Returns its exit status, None if it didn't end in time.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests send it, and what runs in the background ignores it
        with _output_of(checkout).open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "rljax")]:
            del sys.modules[name]
        os.chdir(checkout)
        sys.path[:] = [str(checkout), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
        reports = Reports()
        status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT}", *tests], [reports])
        skipped = status == 0 and not reports.ran  # for something that is not installed
        own = PYTEST + int(pytest.ExitCode.NO_TESTS_COLLECTED if skipped else status)
        os._exit(TEST_TIMED_OUT if reports.timed_out else own)
    until = time.monotonic() + TIMEOUT
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def chosen(arguments: Sequence[str] | None = None) -> tuple[list[Fault], bool]:
    """Returns the faults that a command line asks for, and whether it asks for their list alone."""
    parser = argparse.ArgumentParser(
        "python -m tests.mutation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="text of the faults that are planted; none: all are")
    parser.add_argument("--list", action="store_true", help="print the faults, and plant none")
    given = parser.parse_args(arguments)
    found = [fault for fault in (*FAULTS, *EDGES) if not given.words or any(word in str(fault) for word in given.words)]
    if not found:
        parser.error(f"no fault has {' or '.join(map(repr, given.words))} in kind, file or line (--list says what they have)")
    return found, given.list


def exit_status(counts: Counter[str]) -> int:
    """Returns 1 if there is a fault that no test sees or that makes tests hang or unable to run."""
    return 1 if any(counts[outcome] for outcome in BAD) else 0


def main() -> int:
    faults, listed = chosen()
    if listed:
        print(*faults, sep="\n")
        return 0
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        checkout = Path(scratch) / "checkout"
        copy_checkout(checkout)
        if failing := first_failing(faults, checkout):
            print(_output_of(checkout).read_text(errors="replace"))
            print(f"{' '.join(failing)}: not passed without a fault", flush=True)
            return 1
        for fault in faults:
            began = time.monotonic()
            outcome = try_fault(fault, checkout)
            known = outcome == SURVIVED and bool(fault.equivalent)
            counts["survived, with a reason" if known else outcome] += 1
            print(f"{outcome:<9} {time.monotonic() - began:5.1f} s  {fault}", flush=True)
            if known:
                print(f"          {fault.equivalent}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    return exit_status(counts)


if __name__ == "__main__":
    sys.exit(main())
