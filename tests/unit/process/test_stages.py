"""Long stages of a start, in a line each."""

import threading

import pytest

from rljax import loop
from rljax.process import stages
from rljax.testing.harness import make_run


class Timer:
    """A timer that has rung by the time that it is started, or that never rings."""

    rings, made = True, ()

    def __init__(self, seconds, function, arguments):
        self._ring, self.is_cancelled = lambda: function(*arguments), False
        Timer.made = (*Timer.made, self)

    def start(self):
        if self.rings:
            self._ring()

    def cancel(self):
        self.is_cancelled = True


@pytest.fixture
def timers(monkeypatch, caplog):
    monkeypatch.setattr(stages.threading, "Timer", Timer)
    monkeypatch.setattr(Timer, "made", ())
    caplog.set_level("INFO", "rljax")
    return Timer


@pytest.mark.parametrize("rings", [True, False])
def test_a_stage_is_said_if_it_takes_long_and_its_timer_ends_with_it(timers, caplog, monkeypatch, rings):
    monkeypatch.setattr(timers, "rings", rings)
    with pytest.raises(KeyError), stages.stage("loading the model"):
        assert caplog.messages == ["loading the model ..."] * rings
        raise KeyError
    assert [timer.is_cancelled for timer in timers.made] == [True]


def test_the_line_comes_from_a_thread_of_its_own(caplog, monkeypatch):
    said = threading.Event()
    monkeypatch.setattr(stages.log, "info", lambda *line: said.set())
    monkeypatch.setattr(stages, "SECONDS", 0.0)
    with stages.stage("loading the model"):
        assert said.wait(60)


def test_a_run_says_each_of_its_stages_once_and_before_its_first_step(timers, caplog, tmp_path):
    overrides = {"total_train_epochs": 2, "warmup.steps": 2, "evaluator.freq_steps": 1}
    loop.train(make_run(tmp_path, overrides))
    said = [line for line in caplog.messages if line.endswith(" ...")]
    assert len(said) == len(set(said)) and all(timer.is_cancelled for timer in timers.made)
    assert {"compiling the update ...", "sampling the first batch ..."} <= set(said)
