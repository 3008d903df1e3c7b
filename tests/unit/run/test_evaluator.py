"""Evaluations of a run on the fake engine: several sets, beside training, and the best checkpoint."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from rljax import loop
from rljax.checkpoints.store import Checkpoints
from rljax.engines.fake import model
from rljax.errors import UserError
from rljax.evaluation import uses
from rljax.rollout.trajectories import trajectory_of
from rljax.testing.harness import MemorySink, Repeat, make_run
from rljax.types import Completion, Finish

EVERY_SECOND = {"evaluator.freq_steps": 2, "total_train_steps": 6, "total_train_epochs": 9}
BEST = EVERY_SECOND | {"evaluator.best": "eval-rollout/reward"}


class Scored(Repeat):
    """Evaluations in the order in which they come get the rewards of a script, whatever the policy does."""

    def __init__(self, script, prompts):
        super().__init__()
        self._script, self._prompts, self.asked, self.versions = script, prompts, 0, []

    async def episode(self, generator, prompt, params, seed):
        reward = self._script[min(self.asked // self._prompts, len(self._script) - 1)]
        self.asked += 1
        self.versions.append(generator.version)
        done = Completion(
            np.array([1], np.int32), np.zeros(1, np.float32), np.array([generator.version], np.int32), Finish.STOP
        )
        return trajectory_of([1], done, reward, {"scripted": reward})


def scripted(tmp_path, script, overrides, **options):
    """Makes a run whose evaluations have scripted rewards."""
    run = make_run(tmp_path, overrides, **options)
    workflow = Scored(script, len(run.evaluations[0].prompts))
    return dataclasses.replace(run, evaluations=[dataclasses.replace(run.evaluations[0], workflow=workflow)])


def test_the_best_checkpoint_is_kept_and_exported(tmp_path):
    """It is neither the last nor one that the saver would have made."""
    run = scripted(tmp_path, [0.1, 0.9, 0.2, 0.3], BEST)  # at steps 0, 2, 4, 6
    restored = []
    restore = run.engine.learner.restore
    object.__setattr__(run.engine.learner, "restore", lambda path: restored.append(path) or restore(path))
    assert loop.train(run).step == 6
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=2)
    assert {c.step: c.score for c in checkpoints.intact()} == pytest.approx({6: 0.3, 4: 0.2, 2: 0.9})
    assert restored == [tmp_path / "checkpoints" / "2" / "learner"]
    assert np.array_equal(model.read(tmp_path / "best"), run.engine.learner._table)


def test_the_last_checkpoint_may_be_the_best(tmp_path):
    run = scripted(tmp_path, [0.1, 0.2, 0.3, 0.4], BEST)
    loop.train(run)
    assert Checkpoints(tmp_path / "checkpoints", 2).best().step == 6
    assert np.array_equal(model.read(tmp_path / "best"), run.engine.learner._table)


def test_a_checkpoint_that_was_saved_before_its_evaluation_gets_its_score(tmp_path):
    """Version 0 is saved after the warm-up and then evaluated; it may be the best."""
    overrides = BEST | {"warmup.steps": 2, "warmup.batch_size": 4}
    loop.train(scripted(tmp_path, [0.9, 0.1], overrides))
    best = Checkpoints(tmp_path / "checkpoints", 2).best()
    assert (best.step, best.score) == (2, pytest.approx(0.9))


def test_the_best_checkpoint_survives_a_resume(tmp_path):
    loop.train(scripted(tmp_path, [0.1, 0.9, 0.2, 0.3], BEST))
    loop.train(scripted(tmp_path, [0.4], BEST | {"total_train_steps": 10}))
    assert Checkpoints(tmp_path / "checkpoints", 2).best().step == 2


def test_best_of_a_metric_that_is_not_there_ends_the_run_with_the_nearest(tmp_path):
    with pytest.raises(UserError, match=r"evaluator\.best: an evaluation has no metric 'eval-rollout/rewrd' \(did you mean"):
        loop.train(make_run(tmp_path, BEST | {"evaluator.best": "eval-rollout/rewrd"}))


def test_several_sets_have_metrics_of_their_own(tmp_path):
    sinks = []
    run = make_run(tmp_path, EVERY_SECOND, sink=lambda first: sinks.append(MemorySink(first)) or sinks[0])
    main = run.evaluations[0]
    other = dataclasses.replace(main, name="few", prompts=main.prompts[:3], workflow=Scored([0.25], 3))
    loop.train(dataclasses.replace(run, evaluations=[main, other]))
    line = sinks[0].steps[6]
    assert line["eval-rollout/few/reward/avg"] == line["eval-reward/few/scripted/avg"] == 0.25
    assert line["eval-rollout/few/version/min"] == line["eval-rollout/few/version/max"] == 6
    assert "eval-rollout/reward/avg" in line and "eval-reward/right/avg" in line


class Slow(Scored):
    """Its first episode ends only when the learner has taken two more steps."""

    def __init__(self, learner_steps, prompts):
        super().__init__([0.5], prompts)
        self._steps = learner_steps

    async def episode(self, generator, prompt, params, seed):
        first = self.asked == 0
        trajectory = await super().episode(generator, prompt, params, seed)
        while first and self._steps() < 2:
            await asyncio.sleep(0.001)
        return trajectory


def test_an_evaluation_that_overlaps_does_not_stop_training(tmp_path):
    """Without overlap this run would wait for ever: its first evaluation waits for two steps."""
    overrides = EVERY_SECOND | {"evaluator.overlap": True, "evaluator.freq_steps": 3, "rollout.max_head_offpolicyness": 2}
    sinks = []
    run = make_run(tmp_path, overrides, sink=lambda first: sinks.append(MemorySink(first)) or sinks[0])
    adam = run.engine.learner._adam["policy"]
    slow = Slow(lambda: adam.steps, len(run.evaluations[0].prompts))
    run = dataclasses.replace(run, evaluations=[dataclasses.replace(run.evaluations[0], workflow=slow)])
    assert loop.train(run).step == 6
    reported = [step for step, line in sinks[0].steps.items() if "eval-rollout/reward/avg" in line]
    assert len(reported) == 3 and reported[0] >= 2 and reported[-1] == 6
    assert slow.versions[0] == 0  # began with the initial weights


def test_uses_of_the_sets_are_recorded(tmp_path):
    from tests.unit.evaluation.test_results import PROTOCOL

    run = make_run(tmp_path, EVERY_SECOND)
    evaluations = [dataclasses.replace(run.evaluations[0], protocol=PROTOCOL)]
    loop.train(dataclasses.replace(run, evaluations=evaluations))
    found = uses.read(tmp_path / "evaluations")
    assert [(use.purpose, use.step, use.split) for use in found] == [("training", step, "dev") for step in (0, 2, 4, 6)]
    assert {use.protocol for use in found} == {PROTOCOL.digest}


def test_a_score_is_replaced_whole(tmp_path):
    loop.train(make_run(tmp_path, {"saver.freq_steps": 2, "total_train_steps": 2}))
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    before = json.loads((tmp_path / "checkpoints" / "2" / "manifest.json").read_text())
    checkpoints.set_score(2, 0.5)
    checkpoints.set_score(99, 0.5)  # not there: said, and nothing is made
    after = json.loads((tmp_path / "checkpoints" / "2" / "manifest.json").read_text())
    assert after == before | {"score": 0.5}
    assert checkpoints.best().score == 0.5 and checkpoints.steps() == [2]
