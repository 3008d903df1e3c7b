"""Signals in a command's set-up, and in a run."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from rljax.experiments import recording
from rljax.process.signals import (
    PATIENCE,
    STOP_SIGNALS,
    Stopped,
    command_ends,
    end_on_signals,
    on_stop_signal,
    raise_on_signals,
)
from rljax.sinks.run_directory import RunDirectory


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # a shell's "&" has some ignored
    end_on_signals()
    yield
    command_ends()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_before_the_first_step_stops_the_run_in_one_line(tmp_path, number):
    run = RunDirectory(tmp_path)
    with pytest.raises(Stopped, match=f"^stopped by {number.name}$") as stopped, recording.recorded(run, 1):
        os.kill(os.getpid(), number)
    assert stopped.value.number == number
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "stopped"
    assert (tmp_path / "log.txt").read_text().endswith(f" ERROR stopped by {number.name}\n")


def test_a_run_answers_the_first_signal_and_leaves_the_next_one_to_the_system():
    """Imitates a program of somebody's own: in a command the next one ends it."""
    called = []
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    async def signaled():
        with on_stop_signal(lambda: called.append(True)):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.01)
            assert called and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    async def alone():
        before = signal.getsignal(signal.SIGTERM)
        with on_stop_signal(lambda: None):
            pass
        assert signal.getsignal(signal.SIGTERM) is before

    asyncio.run(alone())
    asyncio.run(signaled())


class Swallowing:
    """An object whose end loses the exception that a signal raises in it."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)


def test_in_somebodys_program_every_signal_raises_and_one_that_was_lost_again(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda *_: None)  # pytest's keeps the exception
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, own := lambda *_: None)
    reached = []
    with pytest.raises(Stopped, match=r"^stopped by SIGINT$"), raise_on_signals():
        Swallowing()  # its exception is lost
        reached.append("behind it")
        time.sleep(20)
    assert reached
    with raise_on_signals():
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):  # a command would be gone at the second
            with pytest.raises(Stopped):
                os.kill(os.getpid(), number)
                time.sleep(20)
        assert signal.getsignal(signal.SIGHUP) is own
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert handlers == [signal.default_int_handler, signal.SIG_DFL, own]
    time.sleep(3 * PATIENCE)  # nothing is raised behind the block


def test_signals_that_were_ignored_stay_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end_on_signals()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def run_python(program, *, cwd=None):
    """Runs a program that sends itself signals. Returns its exit status and what it said."""
    done = subprocess.run([sys.executable, "-c", PROGRAM + program], capture_output=True, text=True, timeout=120, cwd=cwd)
    return done.returncode, done.stdout + done.stderr


PROGRAM = """
import asyncio, gc, os, signal, sys, threading, time
from pathlib import Path
from rljax.experiments import main, recording
from rljax.process.signals import end_on_signals, on_stop_signal
from rljax.sinks.run_directory import RunDirectory
sys.argv[1:] = []

def send(name="SIGINT"):
    os.kill(os.getpid(), getattr(signal, name))
"""
LOST = {
    "a callback of the collector": "gc.callbacks.append(lambda phase, info: gc.callbacks.clear() or send())\n    gc.collect()",
    "a finalizer": "type('Dying', (), {'__del__': lambda self: send()})()",
    "somebody's clause": "try:\n        send()\n    except BaseException:\n        pass",
}


@pytest.mark.parametrize("where", LOST)
def test_a_stop_that_python_drops_is_raised_again(where):
    """It waits on another thread's event, so that nothing but a signal ends it."""
    program = f"def run():\n    {LOST[where]}\n    print('dropped')\n    threading.Event().wait(60)\n    print('went on')\n"
    status, said = run_python(program + "main.run_main(run)")
    assert status == 128 + signal.SIGINT and said.endswith("error: stopped by SIGINT\n")
    assert "dropped" in said and "went on" not in said


def test_a_stop_that_somebody_caught_and_kept_is_raised_where_the_loop_begins():
    program = """
def run():
    kept = []
    try:
        send("SIGTERM")
    except BaseException as error:
        kept.append(error)
    async def loop():
        with on_stop_signal(lambda: print("called")):
            print("went on")
    asyncio.run(loop())

main.run_main(run)
"""
    assert run_python(program) == (128 + signal.SIGTERM, "error: stopped by SIGTERM\n")


def test_a_second_signal_ends_a_start_at_once_in_one_line_and_records_it(tmp_path):
    """The threads that compile would be waited for, and Python is not finalized beside them."""
    program = """
def run():
    def wait():
        threading.main_thread().join()
        print("waited for")
    threading.Thread(target=wait).start()
    with recording.recorded(RunDirectory(Path("run")), 1):
        try:
            send()
        finally:
            print("unwinding")
            send("SIGTERM")
            print("went on")

main.run_main(run)
"""
    status, said = run_python(program, cwd=tmp_path)
    assert (status, said) == (128 + signal.SIGTERM, "unwinding\nerror: stopped by SIGTERM\n")
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "stopped"
    assert (tmp_path / "run/log.txt").read_text().endswith("ERROR stopped by SIGTERM\n")


def test_a_second_signal_while_a_command_waits_for_its_threads_adds_no_line():
    program = """
def run():
    main_thread = threading.main_thread()
    def second():
        main_thread.join(60)  # until the interpreter waits for this thread
        send()
        time.sleep(60)
    threading.Thread(target=second).start()
    send()

main.run_main(run)
"""
    assert run_python(program) == (128 + signal.SIGINT, "error: stopped by SIGINT\n")


def test_a_second_signal_of_a_command_ends_its_loop_at_once():
    program = """
def run():
    async def loop():
        with on_stop_signal(lambda: print("stopping")):
            send()
            await asyncio.sleep(0.01)
            send()
            print("went on")
    asyncio.run(loop())

main.run_main(run)
"""
    assert run_python(program) == (128 + signal.SIGINT, "stopping\nerror: stopped by SIGINT\n")


def test_a_command_that_a_signal_has_stopped_ends_without_pythons_finalization():
    """A second signal meanwhile would be the system's, and a thread within C++ aborts it."""
    program = """
import atexit

class Late:
    def __del__(self, write=os.write):
        write(1, b"finalized")

late = Late()

def run():
    atexit.register(print, "at exit")
    send()

main.run_main(run)
"""
    assert run_python(program) == (128 + signal.SIGINT, "at exit\nerror: stopped by SIGINT\n")
