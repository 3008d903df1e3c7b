"""A workflow that never returns for one prompt: the run goes on, and the failure has a kind."""

import asyncio

import pytest

from rljax.config import checks
from rljax.errors import UserError
from rljax.loop import train
from rljax.rollout.producer import run_episode
from rljax.rollout.result import Failure
from rljax.testing.harness import MemorySink, Repeat, make_config, make_run
from rljax.types import Prompt


class Hangs(Repeat):
    """Waits for a tool that never returns, in every episode of prompt 0/1."""

    asked = 0

    async def episode(self, generator, prompt, params, seed):
        if prompt.uid == "0/1":
            await self.tool()
        return await super().episode(generator, prompt, params, seed)

    async def tool(self):
        self.asked += 1
        await asyncio.Event().wait()


def test_a_tool_that_never_returns_costs_its_prompt_alone(tmp_path):
    sinks = []
    overrides = {
        "rollout.episode_timeout": 0.3,
        "recover.hang_timeout": 20.0,
        "recover.max_prompt_failures": 2,
        "train_dataset.batch_size": 2,
        "gconfig.n_samples": 2,
    }
    workflow = Hangs()
    run = make_run(
        tmp_path, overrides, n_prompts=5, workflow=workflow, sink=lambda first: sinks.append(MemorySink(first)) or sinks[0]
    )
    outcome = train(run)
    assert outcome.step == 2
    assert set(run.engine.learner.trained) == {"0/0", "0/2", "0/3", "0/4"}
    lines = sinks[0].steps.values()
    assert workflow.asked == 2 * 2  # two samples, and two attempts until the prompt is dropped
    failed = sum(line.get("rollout/failed/episode_timeout", 0) for line in lines)
    assert failed >= workflow.asked  # on a machine that is busy another episode may be late once


def test_a_workflows_own_timeout_is_its_own():
    class Own:
        async def episode(self, generator, prompt, params, seed):
            raise TimeoutError("mine")

    class Late:
        async def episode(self, generator, prompt, params, seed):
            await asyncio.Event().wait()

    def kind_of(workflow, timeout):
        failure = asyncio.run(run_episode(workflow, None, Prompt("0/0", (), {}), None, 0, timeout=timeout))
        assert isinstance(failure, Failure)
        return failure.kind

    assert kind_of(Own(), 60.0) == kind_of(Own(), None) == "workflow_error"
    assert kind_of(Late(), 0.01) == "episode_timeout"


def test_time_limit_of_an_episode_is_below_that_of_the_run():
    assert make_config({"recover.hang_timeout": 90.0}).rollout.episode_timeout == 60.0
    with pytest.raises(UserError, match=r"rollout\.episode_timeout: 90 s is not less than recover\.hang_timeout=90"):
        checks.check(make_config({"actor.path": "m", "recover.hang_timeout": 90.0, "rollout.episode_timeout": 90.0}))
