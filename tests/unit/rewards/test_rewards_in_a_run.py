"""A reward that never returns, in a run: sampling and training go on beside it, and it is a
failure with a kind.
"""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from rljax.config.schema import RewardConfig
from rljax.errors import RewardTimeout
from rljax.loop import Loop
from rljax.rewards import RewardPool
from rljax.rollout.trajectories import trajectory_of
from rljax.testing.harness import MemorySink, make_run, spell
from rljax.types import Request


class Scored:
    """Rewards from a pool; the first two episodes of prompt 0/0 ask for one that never ends."""

    def __init__(self, rewards, quick, never):
        self.rewards, self.quick, self.never, self.events, self.hung = rewards, quick, never, [], 0

    async def episode(self, sampler, prompt, params, seed):
        request = Request(f"{prompt.uid}#{seed}", np.array(spell(prompt), np.int32), params, seed)
        completion = await sampler.generate(request)
        self.events.append(prompt.uid)
        word = self.quick
        if prompt.uid == "0/0" and self.hung < 2:
            self.hung += 1
            word = self.never
        try:
            score = await self.rewards.score(prompt, word)
        except RewardTimeout:
            self.events.append("timeout")
            raise
        return trajectory_of(spell(prompt), completion, score.reward + seed % 3, {})


@pytest.mark.parametrize(
    ("name", "quick", "never"),
    [("example_rewards:act", "value 1", "hang"), ("example_rewards:act_async", "sleep 0", "sleep 3600")],
    ids=["plain", "async"],
)
def test_hung_reward_stalls_neither_sampling_nor_training(tmp_path, monkeypatch, name, quick, never):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    config = RewardConfig(name=name, workers=3, timeout=3.0, memory_mb=0, retries=0)
    overrides = {"rollout.max_head_offpolicyness": 2, "gconfig.n_samples": 2, "recover.max_prompt_failures": 9}

    async def scenario():
        async with RewardPool(config) as rewards:
            workflow = Scored(rewards, quick, never)

            class Sink(MemorySink):
                def write(self, step, metrics):
                    super().write(step, metrics)
                    workflow.events.append(f"step {step}")

            sinks = []
            run = make_run(tmp_path, overrides, workflow=workflow, sink=lambda first: sinks.append(Sink(first)) or sinks[0])
            outcome = await asyncio.wait_for(Loop(run).run(), 60)
            return outcome, workflow.events, run.engine.learner.trained, sinks[0].steps

    outcome, events, trained, steps = asyncio.run(scenario())
    assert outcome.step == 3 and {uid: len(s) for uid, s in trained.items()} == {f"0/{i}": 1 for i in range(12)}
    before = events[: events.index("timeout")]
    assert {uid for uid in before if "/" in uid} == {f"0/{i}" for i in range(12)}  # every other prompt was sampled meanwhile
    assert "step 2" in before and "step 3" not in before  # and trained on; the third batch waits for prompt 0/0
    assert sum(line.get("rollout/failed/reward_timeout", 0) for line in steps.values()) == 2
