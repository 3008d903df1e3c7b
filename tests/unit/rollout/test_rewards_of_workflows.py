"""Rewards that a workflow makes itself: those of a number, of any kind, train; others fail their episode."""

import asyncio
import dataclasses
import fractions
import re

import numpy as np
import pytest

from rljax import loop
from rljax.errors import TooManyFailures
from rljax.rollout.producer import parts_of, run_episode
from rljax.rollout.result import Failure
from rljax.testing.harness import MemorySink, Repeat, make_run
from rljax.types import LARGEST_REWARD, PROMPT_VERSION, Finish, Prompt, Trajectory, reward_number

PROMPT = Prompt("0/0", ({"role": "user", "content": "0"},), {})
WRONG = {
    "inf": (float("inf"), "is inf, not a finite number"),
    "nan": (np.float32("nan"), "is nan, not a finite number"),
    "1e300": (-1e300, r"is -1e\+300, and training takes no more than 3\.4e\+38, as float32"),
    "digits": (10**400, "is inf, not a finite number"),
    "text": ("1.0", "is str, not a number"),
    "None": (None, "is NoneType, not a number"),
    "array": (np.ones(3), "is ndarray, not a number"),
}


class Rewarded(Repeat):
    """The workflow of the fake task, with its reward and components as `kind` makes them."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    async def episode(self, *arguments):
        done = await super().episode(*arguments)
        components = {name: self.kind(value) for name, value in done.components.items()}
        return dataclasses.replace(done, reward=self.kind(done.reward), components=components)


def metrics_of(workdir, workflow):
    sinks = []
    overrides = {"total_train_epochs": 1, "evaluator.freq_steps": 1}
    run = make_run(workdir, overrides, workflow=workflow, sink=lambda step: sinks.append(MemorySink(step)) or sinks[-1])
    assert loop.train(run).finished
    return [{k: v for k, v in step.items() if "timeperf" not in k and "/wait/" not in k} for step in sinks[0].steps.values()]


@pytest.mark.parametrize("kind", [np.float64, np.array, fractions.Fraction])
def test_a_run_is_the_same_whatever_kind_of_number_its_rewards_are(tmp_path, kind):
    plain = metrics_of(tmp_path / "plain", Repeat())
    other = metrics_of(tmp_path / "other", Rewarded(kind))
    names = [name for name in plain[-1] if "reward" in name or name.endswith(("loss", "grad_norm"))]
    assert len(names) > 10
    for before, after in zip(plain, other, strict=True):
        for name in before.keys() & set(names):
            np.testing.assert_equal(after[name], before[name], name)


@pytest.mark.parametrize("place", ["reward", "component", "a later part"])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_reward_fails_its_episode_in_a_line_that_names_the_workflow(place, wrong):
    value, says = WRONG[wrong]
    mask = np.arange(4) >= 2
    ids, versions = np.arange(4, dtype=np.int32), np.where(mask, 0, PROMPT_VERSION).astype(np.int32)
    good = Trajectory(ids, mask, np.zeros(4, np.float32), versions, 1.0, {"a": 0.5}, Finish.STOP)
    bad = (
        dataclasses.replace(good, components={"a": value}) if place == "component" else dataclasses.replace(good, reward=value)
    )

    class Mine:
        async def episode(self, generator, prompt, params, seed):
            return [good, bad] if place == "a later part" else bad

    result = asyncio.run(run_episode(Mine(), None, PROMPT, None, 0))
    assert isinstance(result, Failure) and result.kind == "workflow_error" and not parts_of(result, 0)
    what = "component 'a'" if place == "component" else "the reward"
    assert re.match(f"the workflow Mine: {what} {says}", str(result.error))


def test_a_run_whose_workflow_makes_no_reward_ends_in_one_line_that_says_so(tmp_path):
    run = make_run(tmp_path, {"recover.max_consecutive_failures": 3}, workflow=Rewarded(lambda value: np.inf))
    with pytest.raises(TooManyFailures, match="workflow_error: ValueError: the workflow Rewarded: the reward is inf") as raised:
        loop.train(run)
    assert "\n" not in str(raised.value)


def test_the_largest_reward_is_that_of_float32():
    assert reward_number("the reward", LARGEST_REWARD) == np.finfo(np.float32).max == np.float32(LARGEST_REWARD)
    with np.errstate(over="ignore"):
        assert np.isinf(np.float32(LARGEST_REWARD * (1 + 2.0**-23)))
    with pytest.raises(ValueError, match="no more than"):
        reward_number("the reward", -LARGEST_REWARD * (1 + 2.0**-23))
