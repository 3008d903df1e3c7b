"""Actions of the guardrails on whole runs: a rollback keeps every invariant of the loop."""

import asyncio
import json

import numpy as np
import pytest

from rljax import loop
from rljax.errors import GuardrailError
from rljax.metrics.mean import Mean
from rljax.testing.harness import MemorySink, RememberingLearner, make_run, worker

KL = "ppo_actor/update/approx_kl"
NOT_COMPARED = ("timeperf/", "perf/", "rollout/wait/", "rollout/workers", "rollout/lost")
GUARDED = {"guard.action": "rollback", "guard.patience": 1, "guard.max_approx_kl": 1.0, "saver.freq_steps": 1}


class Diverges(RememberingLearner):
    """A learner that diverges from its n-th update on, if the learning rate is too high.

    It then ruins the policy and reports a KL out of bounds, `late` updates later.
    """

    too_high, start, late = 0.02, 5, 0

    def __init__(self, config, model_dir):
        super().__init__(config, model_dir)
        self.oldest = []  # of each update: (optimizer steps before it, oldest version trained on)
        self.restored = 0
        self._bad = 0

    def update(self, batch):
        adam = self._adam["policy"]
        self.oldest.append((adam.steps, int(batch.versions[batch.loss_mask].min())))
        metrics = super().update(batch)
        self._bad = self._bad + 1 if adam.rate > self.too_high and adam.steps >= self.start else 0
        if self._bad:
            self._table = np.zeros_like(self._table)
        return metrics | {KL: Mean(5.0 if self._bad > self.late else 0.0, 1)}

    def restore(self, directory):
        super().restore(directory)
        self.restored, self._bad = self.restored + 1, 0


def _run(workdir, overrides=None, *, learner=Diverges, sinks=None, n_prompts=40, **arguments):
    sinks = [] if sinks is None else sinks

    def open_sink(first_step):
        sinks.append(MemorySink(first_step))
        return sinks[-1]

    run = make_run(workdir, GUARDED | (overrides or {}), sink=open_sink, n_prompts=n_prompts, **arguments)
    run.engine.learner = learner(run.config, workdir / "model")
    return run


def _assert_once(run, prompts=40):
    """Exactly once: of the updates that count."""
    assert {uid: len(steps) for uid, steps in run.engine.learner.trained.items()} == {f"0/{i}": 1 for i in range(prompts)}


@pytest.mark.parametrize("max_lag", [0, 2])
@pytest.mark.parametrize("late", [0, 2])
def test_exactly_once_and_the_lag_bound_through_a_rollback(tmp_path, max_lag, late):
    class Late(Diverges):
        pass

    Late.late = late
    sinks = []
    run = _run(tmp_path, {"rollout.max_head_offpolicyness": max_lag, "saver.keep_last": 1}, learner=Late, sinks=sinks)
    outcome = loop.train(run)
    (sink,), learner = sinks, run.engine.learner
    bad = Late.start + late  # the step whose metrics are out of bounds
    target = max(bad - max_lag - 2, 0)  # the newest checkpoint that is trusted then
    assert outcome.finished and learner.restored == 1
    _assert_once(run)
    assert outcome.version == 10 + (bad - target) + 1  # ten steps count; those undone and the rollback have versions too
    assert sorted(sink.steps) == [step for step in range(1, outcome.step + 1) if step != bad + 1]
    assert all(line["rollout/staleness/max"] <= max_lag for line in sink.steps.values())
    # Nothing that was sampled before the rollback is trained on after it
    after = learner.oldest[bad:]
    assert after[0][0] == target and all(oldest >= bad + 1 for _, oldest in after)
    rates = {step: line["ppo_actor/update/lr"] for step, line in sink.steps.items()}
    assert all(rate == pytest.approx(0.05 if step <= bad else 0.015) for step, rate in rates.items())


def test_a_rollback_is_recorded_keeps_the_failed_state_and_leaves_no_suspect_checkpoint(tmp_path, caplog):
    sinks = []
    loop.train(_run(tmp_path, {"total_train_steps": 6, "saver.keep_last": 9}, sinks=sinks))
    (event,) = sinks[0].events
    assert (event.step, event.guard, event.metric, event.action) == (5, "max_approx_kl", KL, "rollback")
    assert (event.value, event.bound, event.restored) == (5.0, 1.0, 3)
    assert "back to step 3" in event.detail and f"{tmp_path}/checkpoints/5-failed" in event.detail
    assert sinks[0].steps[5]["guard/rollback"] == 1 and not any("guard/rollback" in sinks[0].steps[s] for s in (1, 4, 7))
    steps = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert steps - {"4"} == {
        "0",
        "1",
        "2",
        "3",
        "5-failed",
        "6",
        "7",
        "8",
        "9",
    }  # the flight recorder holds 4, before the bad step
    failed = json.loads((tmp_path / "checkpoints" / "5-failed" / "loop.json").read_text())
    assert failed["book"]["version"] == 5 and failed["guard"]["undone"] == []
    saved = json.loads((tmp_path / "checkpoints" / "6" / "loop.json").read_text())
    assert saved["guard"] == {"lr_factor": 0.3, "undone": [[3, 6]]}
    assert saved["book"]["version"] == 6 and saved["book"]["undone"] == 3 and saved["book"]["consumed"] == 3 * 4
    assert any(record.getMessage().startswith("guard.max_approx_kl: ") for record in caplog.records)


class Killed(BaseException):
    """Stands for kill -9: nothing of ours catches it."""


@pytest.mark.parametrize("kill_at", [6, 8])
def test_resume_equivalence_after_a_rollback(tmp_path, kill_at):
    """Kills in the rollback, before it is saved, and after it."""

    class Dies(Diverges):
        def save(self, directory):
            super().save(directory)
            if directory.parent.name == f".{kill_at}.tmp":
                raise Killed

    whole, parts = [], []
    loop.train(_run(tmp_path / "whole", sinks=whole))
    with pytest.raises(Killed):
        loop.train(_run(tmp_path / "parts", learner=Dies, sinks=parts))
    run = _run(tmp_path / "parts", sinks=parts)
    assert loop.train(run).finished
    _assert_once(run)
    lines = {step: line for step, line in parts[0].steps.items() if step <= parts[1].first_step} | parts[1].steps

    def compared(steps):
        return {s: {k: repr(v) for k, v in line.items() if not k.startswith(NOT_COMPARED)} for s, line in steps.items()}

    if kill_at == 8:
        assert parts[1].first_step == 7 and compared(lines) == compared(whole[0].steps)
    else:  # its guardrails spoke again, of the learning rate that the checkpoint has
        assert parts[1].first_step == 4 and [e.action for e in parts[1].events] == ["rollback"]
        assert lines.keys() == whole[0].steps.keys()


def test_groups_in_the_journal_of_a_killed_process_are_not_used_after_a_rollback(tmp_path):
    """They were finished by the weights of the checkpoint, and are within the lag bound."""

    class Dies(RememberingLearner):
        def update(self, batch):
            if self._adam["policy"].steps == 3:
                raise Killed
            return super().update(batch)

    class Early(Diverges):
        start = 1

    far = {"rollout.max_head_offpolicyness": 8, "rollout.max_concurrent_rollouts": 40, "saver.freq_steps": None}
    with pytest.raises(Killed):
        loop.train(_run(tmp_path, far, learner=Dies))
    run = _run(tmp_path, far | {"rollout.max_head_offpolicyness": 5}, learner=Early)  # it has no room for all of them at once
    assert loop.train(run).finished and run.engine.learner.restored >= 1
    _assert_once(run)
    assert all(oldest >= 2 for _, oldest in run.engine.learner.oldest[1:])


def test_exactly_once_through_a_rollback_with_workers(tmp_path):
    run = _run(tmp_path, {"rollout.max_head_offpolicyness": 2}, by_workers=True)

    async def together():
        workers = [asyncio.create_task(worker(tmp_path, own_sampler=own)) for own in (False, True)]
        outcome = await loop.Loop(run).run()
        await asyncio.gather(*workers)
        return outcome

    outcome = asyncio.run(together())
    assert outcome.finished and run.engine.learner.restored == 1
    _assert_once(run)
    assert all(oldest >= Diverges.start + 1 for _, oldest in run.engine.learner.oldest[Diverges.start :])


def test_rollbacks_that_do_not_help_go_further_back_and_then_end_the_run(tmp_path):
    class Always(Diverges):
        too_high = 0.0

    sinks = []
    with pytest.raises(GuardrailError, match=r"after 2 rollbacks \(guard.max_rollbacks\); the state is kept in "):
        loop.train(_run(tmp_path, {"guard.max_rollbacks": 2, "saver.keep_last": 99}, learner=Always, sinks=sinks))
    details = [event.detail.partition(",")[0] for event in sinks[0].events]
    assert details == ["back to step 3", "back to step 2", "after 2 rollbacks (guard.max_rollbacks)"]
    assert sinks[0].events[-1].action == "stop"


def test_a_rollback_stays_within_reinforcement(tmp_path):
    class Early(Diverges):
        start = 1

    sinks = []
    run = _run(tmp_path, {"warmup.steps": 3, "warmup.batch_size": 4, "saver.keep_last": 99}, learner=Early, sinks=sinks)
    assert loop.train(run).finished
    assert [event.detail.partition(",")[0] for event in sinks[0].events] == ["back to step 3"]
    _assert_once(run)


def test_a_halved_learning_rate_stays_halved_and_ends_the_run_when_nothing_is_left_of_it(tmp_path):
    halving = {"guard.action": "halve_lr", "saver.freq_steps": None}
    sinks = []
    run = _run(tmp_path / "one", halving, sinks=sinks)
    assert loop.train(run).finished
    rates = [line["ppo_actor/update/lr"] for _, line in sorted(sinks[0].steps.items())]
    assert rates == pytest.approx([0.05] * 5 + [0.025] + [0.0125] * 4)
    assert json.loads((tmp_path / "one" / "checkpoints" / "10" / "loop.json").read_text())["guard"]["lr_factor"] == 0.25

    class Always(Diverges):
        too_high, start = 0.0, 1

    with pytest.raises(GuardrailError, match=r"lowered to 0\.00098 of its schedule already"):
        loop.train(_run(tmp_path / "other", halving | {"total_train_epochs": 2}, learner=Always))


def test_a_warning_changes_nothing_of_the_run(tmp_path):
    sinks = []
    run = _run(tmp_path, {"guard.actions": {"max_approx_kl": "warn"}}, sinks=sinks)
    assert loop.train(run).version == 10 and not run.engine.learner.restored
    assert [(event.step, event.action) for event in sinks[0].events] == [(step, "warn") for step in range(5, 11)]


@pytest.mark.parametrize("action", ["skip", "stop_epoch"])
def test_actions_within_an_update_are_recorded_by_step_and_minibatch(tmp_path, action, caplog):
    overrides = {
        "guard.action": "stop",
        "guard.actions": {"max_grad_norm": action},
        "guard.max_grad_norm": 1e-9,
        "actor.ppo_n_minibatches": 2,
        "total_train_steps": 3,
    }
    sinks = []
    run = _run(tmp_path, overrides, learner=RememberingLearner, sinks=sinks)
    before = run.engine.learner._table.copy()
    loop.train(run)
    minibatches = 2 if action == "skip" else 1  # of each step
    expected = [(step, action, f"minibatch {k + 1} of 2") for step in (1, 2, 3) for k in range(minibatches)]
    assert [(event.step, event.action, event.detail) for event in sinks[0].events] == expected
    assert all(event.guard == "max_grad_norm" and event.value > event.bound == 1e-9 for event in sinks[0].events)
    assert all(sinks[0].steps[step][f"guard/{action}"] == minibatches for step in (1, 2, 3))
    (told,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("guard.")]
    assert f" in minibatch 1 of 2 of step 1: {action} (" in told
    assert np.array_equal(run.engine.learner._table, before) == (action == "skip")
    assert run.engine.learner._adam["policy"].steps == (0 if action == "skip" else 3)


def test_a_policy_that_collapsed_does_not_end_well(tmp_path):
    class Collapses(RememberingLearner):
        def update(self, batch):
            metrics = super().update(batch)
            if self._adam["policy"].steps >= 4:  # to a policy that says one token for ever
                self._table[:] = -1e4
                self._table[:, 2] = 1e4
            return metrics

    overrides = {"guard.action": "stop", "guard.patience": 3, "guard.max_approx_kl": None, "gconfig.max_new_tokens": 1}
    overrides |= {"train_dataset.batch_size": 80, "total_train_epochs": 15}  # as many prompts as tell a collapse from chance
    with pytest.raises(GuardrailError, match=r"guard.collapse: rollout/reward is 0 after 0\.\d+, and every advantage is 0"):
        loop.train(_run(tmp_path, overrides, learner=Collapses, n_prompts=80))
