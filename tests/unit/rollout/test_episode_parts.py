"""Episodes of several parts: they count once, and keep together wherever groups travel."""

import asyncio
import dataclasses

import numpy as np
import pytest

from rljax import loop
from rljax.config.schema import NormConfig
from rljax.messaging import framing
from rljax.objective.advantages import advantages_of, normalized
from rljax.rollout import dump, journal
from rljax.rollout.batch_metrics import batch_metrics
from rljax.rollout.buffer import Ticket
from rljax.rollout.journal import Record
from rljax.rollout.producer import parts_of, run_episode
from rljax.rollout.result import Failure, Result
from rljax.testing.harness import MemorySink, Repeat, make_config, make_run
from rljax.types import PROMPT_VERSION, Finish, Group, Prompt, Trajectory
from rljax.workers.messages import decode_group, encode_group
from rljax.workflows.filters import mixed_rewards

PROMPT = Prompt("0/0", ({"role": "user", "content": "0"},), {})


def trajectory(reward, episode=None, sampled=3):
    mask = np.arange(sampled + 2) >= 2
    versions = np.where(mask, 0, PROMPT_VERSION).astype(np.int32)
    ids = np.arange(len(mask), dtype=np.int32)
    return Trajectory(ids, mask, np.zeros(len(mask), np.float32), versions, reward, {}, Finish.STOP, episode)


def in_parts(rewards, parts):
    """A group of one episode per reward, each in as many parts as said."""
    return Group(
        "0/0",
        tuple(
            trajectory(reward, None if n == 1 else episode)
            for episode, (reward, n) in enumerate(zip(rewards, parts, strict=True))
            for _ in range(n)
        ),
    )


NORMS = [
    NormConfig(mean_level=mean, std_level=std, mean_leave1out=leave, std_leave1out=leave)
    for mean in ("group", "batch")
    for std in ("group", "batch", "none")
    for leave in (False, True)
]


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_an_episode_counts_once_however_many_parts_it_has(norm):
    rewards = [[1.0, 0.0, 0.0, 0.5], [0.25, 1.0, 0.0]]
    parts = [[1, 3, 1, 2], [5, 1, 2]]
    config = make_config()
    config = dataclasses.replace(config, actor=dataclasses.replace(config.actor, adv_estimator="grpo", reward_norm=norm))
    whole = advantages_of([in_parts(r, [1] * len(r)) for r in rewards], config)
    split = advantages_of([in_parts(r, n) for r, n in zip(rewards, parts, strict=True)], config)
    expected = np.repeat([a[-1] for a in whole.advantage], np.concatenate(parts))
    np.testing.assert_allclose([a[-1] for a in split.advantage], expected, rtol=1e-6, atol=1e-7)


def test_parts_of_unequal_reward_are_weighted_by_their_share_of_the_episode():
    x, episodes = np.array([1.0, 0.0, 0.75, 0.25, 0.5]), np.array([0, 1, 2, 2, 2])
    got = normalized(x, np.zeros(5, int), NormConfig(mean_level="group", std_level="group", eps=0.0, std_floor=0.0), episodes)
    twice = np.array([1.0] * 3 + [0.0] * 3 + [0.75, 0.25, 0.5])  # each episode three times: the same weights
    expected = (x - twice.mean()) / twice.std()
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_leave_one_out_leaves_out_the_whole_episode():
    x, episodes = np.array([1.0, 0.0, 0.75, 0.25, 0.5, -1.0]), np.array([0, 1, 2, 2, 2, 1])
    norm = NormConfig(mean_level="group", std_level="group", mean_leave1out=True, std_leave1out=True, eps=0.0, std_floor=0.0)
    weights = 1.0 / np.bincount(episodes)[episodes]
    expected = []
    for value, episode in zip(x, episodes, strict=True):
        others = np.where(episodes == episode, 0.0, weights)
        mean = np.average(x, weights=others)
        expected.append((value - mean) / np.sqrt(np.average((x - mean) ** 2, weights=others)))
    np.testing.assert_allclose(normalized(x, np.zeros(6, int), norm, episodes), expected, rtol=1e-9, atol=1e-12)


def test_metrics_count_an_episode_once():
    of_group = in_parts([1.0, 0.0], [3, 1])
    parts = [dataclasses.replace(t, components={"right": t.reward}) for t in of_group.trajectories]
    assert batch_metrics([Group("0/0", tuple(parts))], 1)["reward/right"].value == 0.5
    whole, split = (batch_metrics([in_parts([1.0, 0.0, 0.5], parts)], 1) for parts in ([1, 1, 1], [4, 2, 1]))
    for name in ("rollout/reward", "rollout/group_reward_std"):
        assert split[name].value == pytest.approx(whole[name].value)
    assert split["rollout/reward"].count == 3


def test_a_filter_compares_episodes():
    assert not mixed_rewards(in_parts([0.5, 0.5], [2, 1]))
    discounted = Group("0/0", tuple(trajectory(r, e) for e in (0, 1) for r in (0.9, 1.0)))
    assert not mixed_rewards(discounted)
    assert mixed_rewards(Group("0/0", (*discounted.trajectories[:2], trajectory(0.0, 1), trajectory(0.0, 1))))


def test_parts_keep_together_in_journal_wire_and_dump(tmp_path):
    group = Group("0/0", (trajectory(1.0, 0), trajectory(0.0, 0), trajectory(0.5), trajectory(0.5, 3)))
    ticket = Ticket(0, PROMPT)
    (message,) = (m for m, _ in framing.scan(journal.encode(Record(ticket, group))))
    wire = encode_group(ticket, Result(group.trajectories, (), True), {}, {})
    dump.save(tmp_path, [group])
    for found in (
        journal.decode(message).group.trajectories,
        decode_group(wire).trajectories,
        dump.load(tmp_path)[0].trajectories,
    ):
        assert [t.episode for t in found] == [0, 0, None, 3]


class InParts:
    """The harness's task, each episode as two trajectories of the same completion's halves."""

    async def episode(self, generator, prompt, params, seed):
        whole = await Repeat().episode(generator, prompt, params, seed)
        first = np.cumsum(whole.loss_mask) <= 1
        return [
            dataclasses.replace(whole, loss_mask=whole.loss_mask & first),
            dataclasses.replace(whole, loss_mask=whole.loss_mask & ~first),
        ]


def test_a_run_trains_on_every_part_and_reports_episodes(tmp_path):
    sinks = []
    run = make_run(
        tmp_path,
        {"total_train_epochs": 1, "evaluator.freq_steps": 1},
        workflow=InParts(),
        sink=lambda step: sinks.append(MemorySink(step)) or sinks[-1],
    )
    evaluations = [dataclasses.replace(evaluation, workflow=InParts()) for evaluation in run.evaluations]
    outcome = loop.train(dataclasses.replace(run, evaluations=evaluations))
    assert outcome.finished and outcome.step == 3
    plain = make_run(tmp_path / "plain", {"total_train_epochs": 1, "evaluator.freq_steps": 1})
    one = []
    loop.train(dataclasses.replace(plain, open_sinks=lambda step: one.append(MemorySink(step)) or one[-1]))
    for name in ("rollout/reward/avg", "eval-rollout/reward/avg", "reward/right/avg"):
        first = min(step for step in one[0].steps if name in one[0].steps[step])
        assert sinks[0].steps[first][name] == pytest.approx(one[0].steps[first][name]), name


@pytest.mark.parametrize("returned", [[], "text", [None], {"reward": 1.0}])
def test_what_is_no_trajectory_is_a_failure(returned):
    class Wrong:
        async def episode(self, generator, prompt, params, seed):
            return returned

    result = asyncio.run(run_episode(Wrong(), None, PROMPT, None, 0))
    assert isinstance(result, Failure) and "the workflow returned" in result.reason and not parts_of(result, 0)
