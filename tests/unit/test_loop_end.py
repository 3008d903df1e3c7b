"""Ends of runs on the fake engine: finished, incomplete, failed, and nothing left to do."""

import dataclasses

import numpy as np
import pytest

from rljax import loop
from rljax.errors import IncompleteRun, RewardTimeout, TooManyFailures
from rljax.sinks import RunState, Status
from rljax.testing.harness import IN_MEMORY, Repeat, make_run
from tests.unit.loop_runs import ASYNC, Killed, Sinks, kill


def test_steps_end_a_run_before_its_epochs_do(tmp_path):
    run = make_run(tmp_path, {"total_train_epochs": 5, "total_train_steps": 2} | ASYNC)
    assert loop.train(run).step == 2
    assert sum(map(len, run.engine.learner.trained.values())) == 8


class AlwaysFails:
    async def episode(self, sampler, prompt, params, seed):
        raise ZeroDivisionError(f"in the reward of {prompt.uid}")


def test_failing_workflow_ends_the_run_with_the_first_error(tmp_path):
    run = make_run(tmp_path, {"recover.max_consecutive_failures": 7}, workflow=AlwaysFails())
    with pytest.raises(TooManyFailures, match="7 groups failed in a row; the first: workflow_error: ZeroDivisionError") as info:
        loop.train(run)
    assert isinstance(info.value.__cause__, ZeroDivisionError)
    assert "episode" in [frame.name for frame in _frames(info.value.__cause__)]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["0-failed"]


def _frames(error):
    import traceback

    return traceback.extract_tb(error.__traceback__)


ENDED = Status(RunState.FINISHED, step=3, version=3, total_steps=3)


class Without(Repeat):
    """Gives no trajectory: None, or an error."""

    def __init__(self, error=None):
        super().__init__()
        self._error = error

    async def episode(self, sampler, prompt, params, seed):
        if self._error:
            raise self._error
        return None


@pytest.mark.parametrize("how", ["filter", "workflow"])
def test_a_run_whose_groups_are_all_rejected_is_not_finished(tmp_path, how):
    """However many prompts recover.max_consecutive_rejected allows."""
    options = {"accept": lambda group: False} if how == "filter" else {"workflow": Without()}
    with pytest.raises(IncompleteRun, match=r"^incomplete at step 0: trained on 0 of 12 groups, as .*\(12 rejected\)"):
        loop.train(make_run(tmp_path, {}, **options))


def test_a_run_that_did_less_than_it_was_asked_to_is_not_finished(tmp_path, caplog):
    def half(group):
        return int(group.uid.split("/")[1]) % 2 == 0

    def ended(name, overrides, accept=half, **options):
        sinks = Sinks()
        run = make_run(tmp_path / name, {"saver.export_final": True} | overrides, accept=accept, sink=sinks, **options)
        try:
            loop.train(run)
        except IncompleteRun as error:
            assert str(error) == sinks.opened[-1].statuses[-1].error
            return sinks.opened[-1].statuses[-1].state, str(error)
        return sinks.opened[-1].statuses[-1].state, caplog.messages[-1]

    state, line = ended("steps", {"total_train_steps": 2})  # of 12 prompts 6 are wanted, and 8 are asked for
    assert state == "incomplete" and line.startswith(
        "incomplete at step 2: trained on 6 of 8 groups, as the 12 prompts ran out"
    )
    with caplog.at_level("INFO"):
        state, line = ended("epoch", {})  # an epoch was asked for
    assert (
        state == "finished" and line == "finished at step 2; trained on 6 of 12 groups, as the 12 prompts ran out (6 rejected)"
    )
    state, line = ended("failing", {"recover.max_prompt_failures": 1}, n_prompts=3, workflow=Without(RewardTimeout("slow")))
    assert state == "incomplete" and "(3 dropped), the last 3 one after the other (the first failure: reward" in line
    assert not (tmp_path / "failing" / "export").exists() and (tmp_path / "steps" / "export").exists()


class BreaksLate(Repeat):
    """Raises for prompts from one index on, as long as there is `bug`."""

    def __init__(self, bug, first, also=()):
        super().__init__()
        self.bug, self.first, self.also = bug, first, also

    async def episode(self, sampler, prompt, params, seed):
        index = int(prompt.uid.split("/")[1])
        if self.bug.exists() and (index >= self.first or index in self.also):
            raise RuntimeError(f"a bug at {index}")
        return await super().episode(sampler, prompt, params, seed)


@pytest.mark.parametrize(("first", "freq_steps", "failed_since"), [(8, None, True), (8, 1, False), (10, 1, False)])
def test_last_groups_that_failed_one_after_the_other_are_incomplete_and_tried_again(tmp_path, first, freq_steps, failed_since):
    """All of the 16 prompts are trained on once, when the bug is gone."""
    bug, sinks = tmp_path / "bug", Sinks()
    bug.touch()

    def run(before):
        made = make_run(
            tmp_path,
            ASYNC | {"recover.max_prompt_failures": 2, "saver.freq_steps": freq_steps},
            n_prompts=16,
            workflow=BreaksLate(bug, first, also=(3,)),
            sink=sinks,
        )
        return dataclasses.replace(made, before=before)

    line = rf"trained on {first - 1} of 16 .*\({17 - first} dropped\), the last {16 - first} one after the other"
    before, made = None, None
    for _ in range(2):  # and while the bug is there it is no other
        with pytest.raises(IncompleteRun, match=line) as info:
            loop.train(made := run(before))
        assert "the first failure: workflow_error: RuntimeError: a bug at " in str(info.value)
        assert "a bug at 3;" not in str(info.value) and str(info.value).endswith("the same command tries these again)")
        before = sinks.opened[-1].statuses[-1]
        assert before.state == "incomplete"
    if failed_since:
        before = dataclasses.replace(before, state=RunState.FAILED)  # by a command that failed at its start
    bug.unlink()
    loop.train(made := run(before))
    assert sinks.opened[-1].statuses[-1].state == "finished"
    trained = made.engine.learner.trained
    assert {uid: len(steps) for uid, steps in trained.items()} == {f"0/{i}": 1 for i in range(16) if i != 3}


@pytest.mark.parametrize(("n_prompts", "first"), [(12, 11), (13, 12), (12, 9)])  # the second: a step of its own
def test_last_prompts_that_may_fail_by_themselves_leave_a_run_finished(tmp_path, n_prompts, first):
    bug, sinks = tmp_path / "bug", Sinks()
    bug.touch()
    overrides = {"recover.max_prompt_failures": 2}
    loop.train(make_run(tmp_path, overrides, n_prompts=n_prompts, workflow=BreaksLate(bug, first), sink=sinks))
    assert sinks.opened[-1].statuses[-1].state == "finished"


def test_a_limit_on_steps_holds_where_a_run_goes_on_with_more_groups_ready(tmp_path):
    sinks = Sinks(at=3, act=kill)
    with pytest.raises(Killed):
        loop.train(make_run(tmp_path, ASYNC | {"total_train_epochs": 4, "saver.freq_steps": 1}, sink=sinks))
    outcome = loop.train(make_run(tmp_path, ASYNC | {"total_train_epochs": 4, "total_train_steps": 3}, sink=sinks))
    assert outcome.step == 3 and max(sinks.lines()) == 3


def test_a_run_that_had_ended_has_nothing_to_do(tmp_path, caplog):
    overrides = {"evaluator.freq_steps": 1, "saver.export_final": True}
    loop.train(make_run(tmp_path, overrides))
    sinks = Sinks()
    with caplog.at_level("INFO"):
        again = dataclasses.replace(make_run(tmp_path, overrides, sink=sinks), before=ENDED)
        assert loop.train(again).step == 3
    assert caplog.messages[-1].startswith("nothing to do: the run ended at step 3 (")
    assert not sinks.lines() and [status.state for status in sinks.opened[0].statuses] == ["finished"]
    with caplog.at_level("INFO"):  # whether it had ended or not
        for before in (ENDED, None):
            assert (
                loop.train(dataclasses.replace(make_run(tmp_path, overrides | {"total_train_steps": 2}), before=before)).step
                == 3
            )
            assert "the run already has 3 steps, more than the 2 of total_train_steps" in caplog.messages[-1]
    more = dataclasses.replace(make_run(tmp_path, overrides | {"total_train_epochs": 2}, sink=sinks), before=ENDED)
    assert loop.train(more).step == 6


def test_a_finished_run_that_is_run_again_does_nothing(tmp_path):
    first = make_run(tmp_path, ASYNC)
    loop.train(first)
    again = make_run(tmp_path, ASYNC)
    assert loop.train(again) == loop.Outcome(step=3, version=3, finished=True)
    assert again.engine.learner.trained == first.engine.learner.trained


def test_export_holds_the_final_weights(tmp_path):
    from rljax.engines.fake import model

    run = make_run(tmp_path, {"saver.export_final": True})
    loop.train(run)
    np.testing.assert_array_equal(model.read(tmp_path / "export"), run.engine.learner.export(IN_MEMORY).params)
