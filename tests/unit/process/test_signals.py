"""Signals in a command's set-up, and in a run."""

import asyncio
import json
import os
import signal

import pytest

from rljax.experiments import main
from rljax.process.signals import STOP_SIGNALS, Stopped, end_on_signals, on_stop_signal
from rljax.sinks.run_directory import RunDirectory


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # a shell's "&" has some ignored
    end_on_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_before_the_first_step_stops_the_run_in_one_line(tmp_path, number):
    run = RunDirectory(tmp_path)
    with pytest.raises(Stopped, match=f"^stopped by {number.name}$") as stopped, main.recorded(run, 1):
        os.kill(os.getpid(), number)
    assert stopped.value.number == number
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "stopped"
    assert (tmp_path / "log.txt").read_text().endswith(f" ERROR stopped by {number.name}\n")


def test_a_run_answers_the_first_signal_and_leaves_the_next_one_to_the_system():
    called = []

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


def test_signals_that_were_ignored_stay_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end_on_signals()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
