"""Reports of the loop: samples, groups, and metrics of steps and of evaluations."""

import dataclasses

import numpy as np
import pytest

from rljax import loop
from rljax.errors import RewardTimeout
from rljax.metrics.mean import Mean
from rljax.run import reporting
from rljax.testing.harness import Repeat, make_run
from rljax.types import Finish, Group, Trajectory
from tests.unit.loop_runs import ASYNC, Sinks


def test_samples_are_of_as_many_prompts_as_there_is_room_for(tmp_path):
    for room, seen in ((3, 3), (6, 4)):  # 4 groups a step
        sinks = Sinks()
        loop.train(make_run(tmp_path / str(room), {"stats_logger.samples_per_step": room}, sink=sinks))
        for step in (1, 2, 3):
            uids = [uid for at, uid in sinks.opened[0].samples if at == step]
            assert len(uids) == room and len(set(uids)) == seen


def test_a_step_has_a_whole_group_and_an_evaluation_its_samples(tmp_path):
    sinks = Sinks()
    overrides = {"evaluator.freq_steps": 2, "stats_logger.samples_per_evaluation": 3}
    loop.train(make_run(tmp_path, overrides, sink=sinks))
    (sink,) = sinks.opened
    assert [step for step, *_ in sink.groups] == [1, 2, 3]
    for _, group, advantages in sink.groups:
        assert [len(t) for t in group.trajectories] == [len(each) for each in advantages] and len(advantages) == 4
        rewards = [t.reward for t in group.trajectories]  # advantages of a group have the order of its rewards
        signs = [np.sign(each[t.loss_mask][0]) for t, each in zip(group.trajectories, advantages, strict=True)]
        assert signs == pytest.approx(np.sign(np.array(rewards) - np.mean(rewards)).tolist())
    assert sink.evaluations == [(step, "", f"0/{index}") for step in (0, 2, 3) for index in range(3)]


def test_every_step_says_the_reward_of_its_batch_and_what_the_parts_have_measured(tmp_path):
    sinks = Sinks()
    run = make_run(tmp_path, ASYNC | {"total_train_epochs": 2}, sink=sinks)
    loop.train(dataclasses.replace(run, take_metrics=lambda: {"timeperf/reward": Mean(0.5, 1)}))
    lines = sinks.lines()
    assert len(lines) == 6
    for line in lines.values():
        assert line["rollout/reward/avg"] == line["ppo/actor/task_reward/avg"]
        assert line["timeperf/reward"] == 0.5


def test_an_evaluation_without_a_reward_says_why(tmp_path, caplog):
    run = make_run(tmp_path, {"evaluator.freq_steps": 1, "total_train_steps": 1})

    class Fails(Repeat):
        async def episode(self, sampler, prompt, params, seed):
            if prompt.uid == "0/3":
                return None
            raise RewardTimeout("too slow")

    run = dataclasses.replace(run, evaluations=[dataclasses.replace(run.evaluations[0], workflow=Fails())])
    loop.train(run)
    (line, *_) = [r.getMessage() for r in caplog.records if "evaluation" in r.getMessage()]
    assert line == (
        "no episode of the evaluation has a reward: 11 reward_timeout, 1 rejected;"
        " the first: reward_timeout: RewardTimeout: too slow"
    )


def test_evaluation_counts_failures_leaves_them_out_of_the_reward_and_says_so(tmp_path, caplog):
    sinks = Sinks()
    run = make_run(tmp_path, {"evaluator.freq_steps": 1, "total_train_steps": 1}, sink=sinks)

    class Half(Repeat):
        async def episode(self, sampler, prompt, params, seed):
            if int(prompt.uid.split("/")[1]) % 2:
                raise RewardTimeout("too slow")
            trajectory = await super().episode(sampler, prompt, params, seed)
            return dataclasses.replace(trajectory, reward=float(prompt.uid.split("/")[1]))

    object.__setattr__(run.evaluations[0], "workflow", Half())
    loop.train(run)
    for line in sinks.lines().values():
        assert line["eval-rollout/reward/avg"] == np.mean([0, 2, 4, 6, 8, 10])
        assert line["eval-rollout/failed"] == line["eval-rollout/failed/reward_timeout"] == 6
    said = (
        "the evaluation's reward leaves out 6 of 12 episodes, which failed; the first: reward_timeout: RewardTimeout: too slow"
    )
    assert [r.getMessage() for r in caplog.records if "evaluation" in r.getMessage()] == [said] * len(sinks.lines())


def test_samples_are_of_all_groups_in_turn_each_with_its_own_advantage():
    """A trajectory's only token is its advantage here, so that a mix-up shows."""
    counts = {"0/0": 3, "0/1": 1, "0/2": 2}
    numbers = iter(range(sum(counts.values())))
    ids = {uid: [next(numbers) for _ in range(count)] for uid, count in counts.items()}

    def made(token: int) -> Trajectory:
        one = np.ones(1)
        return Trajectory(np.array([token]), one < 0, one, one, reward=0.0, components={}, finish=Finish.STOP)

    groups = [Group(uid, tuple(map(made, tokens))) for uid, tokens in ids.items()]
    samples = list(reporting.interleaved(groups, [np.array([i]) for i in range(sum(counts.values()))]))
    assert [uid for uid, *_ in samples] == ["0/0", "0/1", "0/2", "0/0", "0/2", "0/0"]
    assert all(trajectory.token_ids[0] == advantage[0] for _, trajectory, advantage in samples)
    assert [int(advantage[0]) for *_, advantage in samples] == [0, 3, 4, 1, 5, 2]
