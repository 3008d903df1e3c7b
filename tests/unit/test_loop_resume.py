"""Resuming on the fake engine: after a kill, a signal, and where checkpoints are damaged or gone."""

import dataclasses
import os
import shutil
import signal

import numpy as np
import pytest

from rljax import loop
from rljax.checkpoints.recovery import require_checkpoints
from rljax.engines.fake.sampler import Trouble
from rljax.errors import UserError
from rljax.sinks import RunState, Status
from rljax.testing.harness import IN_MEMORY, make_run
from tests.unit.loop_runs import ASYNC, Killed, Sinks, assert_once, compared, kill

FEATURES = {
    "plain": {},
    "minibatches": {"actor.ppo_n_minibatches": 2},
    "warm-up": {"warmup.steps": 3, "warmup.batch_size": 4},
    "critic": {"actor.adv_estimator": "gae", "actor.reward_norm.mean_level": "none", "actor.reward_norm.std_level": "none"},
    "kl": {"actor.kl_ctl": 0.1},
    "evaluation": {"evaluator.freq_steps": 2},
    "directory": {},
    "filter": {},
    "no journal": {},
}


def _mostly(group):
    """A filter that rejects some prompts of each epoch."""
    return int(group.uid.split("/")[1]) % 5 != 1


@pytest.mark.parametrize("feature", FEATURES)
def test_resume_equivalence_of_the_loops_metrics(tmp_path, feature):
    overrides = FEATURES[feature] | {"total_train_epochs": 2, "saver.freq_steps": 2}
    how = {"in_memory": feature != "directory"}
    if feature == "filter":
        how["accept"] = _mostly
    straight = Sinks()
    whole = make_run(tmp_path / "straight", overrides, sink=straight, **how)
    loop.train(whole)
    killed = Sinks(at=5, act=kill)
    with pytest.raises(Killed):
        loop.train(make_run(tmp_path / "killed", overrides, sink=killed, **how))
    if feature == "no journal":  # then what was finished since the checkpoint is generated again, with the weights of then
        shutil.rmtree(tmp_path / "killed" / "journal")
    resumed = make_run(tmp_path / "killed", overrides, sink=killed, **how)
    assert loop.train(resumed).finished
    assert killed.opened[1].first_step == 4
    assert compared(killed.lines()) == compared(straight.lines())
    assert resumed.engine.learner.trained == whole.engine.learner.trained
    np.testing.assert_array_equal(
        resumed.engine.learner.export(IN_MEMORY).params, whole.engine.learner.export(IN_MEMORY).params
    )


@pytest.mark.parametrize("kill_at", [1, 4, 6, 7])
def test_resume_position_of_an_asynchronous_run_loses_and_doubles_nothing(tmp_path, kill_at):
    overrides = ASYNC | {"total_train_epochs": 2, "saver.freq_steps": 3}
    sinks = Sinks(at=kill_at, act=kill)
    with pytest.raises(Killed):
        loop.train(make_run(tmp_path, overrides, n_prompts=18, trouble=Trouble(np.random.default_rng(1), 0.002), sink=sinks))
    run = make_run(tmp_path, overrides, n_prompts=18, trouble=Trouble(np.random.default_rng(2), 0.002), sink=sinks)
    assert loop.train(run).step == 9
    assert sinks.opened[1].first_step == kill_at // 3 * 3 - (3 if kill_at % 3 == 0 else 0)
    assert_once(run, 18, 2)
    assert run.engine.learner.most_lag <= 2
    assert sorted(sinks.lines()) == list(range(1, 10))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_saves_and_exits_and_the_run_goes_on_later(tmp_path, name, caplog):
    overrides = ASYNC | {"total_train_epochs": 2}
    sinks = Sinks(at=2, act=lambda: os.kill(os.getpid(), number))
    number = getattr(signal, name)
    default = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
    inherited = signal.signal(number, default)  # nohup, and a shell's "&", have them ignored
    try:
        outcome = loop.train(make_run(tmp_path, overrides, sink=sinks))
        assert signal.getsignal(number) == default
    finally:
        signal.signal(number, inherited)
    assert not outcome.finished and outcome.step < 6
    assert caplog.messages[-1] == f"stopped at step {outcome.step}; the same command goes on from step {outcome.step}"
    status = dataclasses.replace(sinks.opened[0].statuses[-1], verdict="")
    assert status == Status(RunState.STOPPED, outcome.step, outcome.version, total_steps=6)
    run = make_run(tmp_path, overrides, sink=sinks)
    assert loop.train(run).step == 6
    assert sinks.opened[1].first_step == outcome.step
    assert_once(run, 12, 2)


def test_a_hang_up_that_nohup_ignores_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        sinks = Sinks(at=2, act=lambda: os.kill(os.getpid(), signal.SIGHUP))
        assert loop.train(make_run(tmp_path, ASYNC, sink=sinks)).finished
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_resume_equivalence_of_sft(tmp_path):
    overrides = {"actor.loss": "sft", "total_train_epochs": 3, "saver.freq_steps": 2, "evaluator.freq_steps": 3}
    straight, killed = Sinks(), Sinks(at=5, act=kill)
    outcome = loop.train(make_run(tmp_path / "a", overrides, sink=straight))
    assert outcome == loop.Outcome(step=9, version=0, finished=True)
    losses = [line["sft/nll"] for line in straight.lines().values() if "sft/nll" in line]
    assert len(losses) == 9 and losses[-1] < losses[0]
    with pytest.raises(Killed):
        loop.train(make_run(tmp_path / "b", overrides, sink=killed))
    loop.train(make_run(tmp_path / "b", overrides, sink=killed))
    assert compared(killed.lines()) == compared(straight.lines())


def test_a_corrupt_newest_checkpoint_is_passed_over(tmp_path, caplog):
    overrides = {"total_train_epochs": 2, "saver.freq_steps": 2}
    straight, killed = Sinks(), Sinks(at=5, act=kill)
    loop.train(make_run(tmp_path / "straight", overrides, sink=straight))
    with pytest.raises(Killed):
        loop.train(make_run(tmp_path / "run", overrides, sink=killed))
    newest = tmp_path / "run" / "checkpoints" / "4" / "learner" / "learner.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    loop.train(make_run(tmp_path / "run", overrides, sink=killed))
    assert killed.opened[1].first_step == 2 and "4 is not intact" in caplog.text
    assert compared(killed.lines()) == compared(straight.lines())


def test_a_run_never_starts_over_by_itself_where_no_checkpoint_loads(tmp_path):
    loop.train(make_run(tmp_path, {"saver.freq_steps": 2}))
    for params in (tmp_path / "checkpoints").rglob("*.safetensors"):
        params.write_bytes(b"")
    with pytest.raises(UserError, match=r"none of those .* loads .*start over"):
        loop.train(make_run(tmp_path, {}))
    with pytest.raises(UserError, match=r"recover\.mode: fresh"):
        loop.train(make_run(tmp_path, {"recover.mode": "fresh"}))


def test_a_run_that_lost_its_checkpoints_is_refused_and_one_that_had_saved_none_starts_over(tmp_path, caplog):
    lost, unsaved, new = tmp_path / "lost", tmp_path / "unsaved", tmp_path / "new"
    for path, every in ((lost, 2), (unsaved, 8)):
        with pytest.raises(Killed):
            loop.train(make_run(path, {"saver.freq_steps": every, "total_train_epochs": 4}, sink=Sinks(at=5, act=kill)))
        if every == 2:
            require_checkpoints(path, 5)
    shutil.rmtree(lost / "checkpoints")
    with pytest.raises(UserError, match=r"checkpoints: none in .*saved one at step 4 .*--workdir"):
        require_checkpoints(lost, 5)
    shutil.rmtree(lost / "journal")
    with pytest.raises(UserError, match=r"checkpoints: none in .*has made 5 steps, and journal/ is gone too .*--workdir"):
        require_checkpoints(lost, 5)
    assert not (unsaved / "checkpoints" / "8").exists()
    require_checkpoints(new, 0)
    assert not caplog.messages or "done again" not in caplog.text
    require_checkpoints(unsaved, 5)
    assert caplog.messages[-1] == "no checkpoint had been saved yet: steps 1-5 are done again"
    (lost / "checkpoints").write_text("")
    with pytest.raises(UserError, match="is no directory"):
        require_checkpoints(lost, 5)
