"""Metrics of a batch equal those counted trajectory by trajectory."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljax.metrics.mean import flatten
from rljax.rollout.batch_metrics import (
    LOG_RATIO,
    Tokens,
    batch_histograms,
    batch_metrics,
    correlation,
    log_ratio_metrics,
    repetition,
)
from rljax.types import Finish, Group, Trajectory


def trajectory(prompt, completion, *, versions=None, reward=1.0, logp=-0.5, finish=Finish.STOP):
    """Trajectory of a prompt and one completion."""
    ids = np.array([*prompt, *completion], np.int32)
    trained = np.arange(len(ids)) >= len(prompt)
    given = np.full(len(completion), 3) if versions is None else versions
    stamped = np.concatenate([np.full(len(prompt), -1), given]).astype(np.int32)
    return Trajectory(ids, trained, np.where(trained, logp, 0.0).astype(np.float32), stamped, reward, {"a": 0.5}, finish)


def metrics_of(*groups, version=3):
    made = [Group(f"0/{index}", tuple(trajectories)) for index, trajectories in enumerate(groups)]
    return flatten(batch_metrics(made, version))


def test_lags_lengths_and_finish_reasons_are_counted_by_hand():
    one = trajectory([9], [1, 2], versions=[3, 4], finish=Finish.LENGTH)
    found = metrics_of([one, trajectory([9], [1, 2], versions=[5, 5])], version=5)
    assert (found["rollout/staleness/avg"], found["rollout/staleness/max"]) == (0.75, 2)
    assert [found[f"rollout/lag_{lag}"] for lag in (0, 1, 2)] == [0.5, 0.25, 0.25]
    assert found["ppo_actor/no_eos_ratio"] == 0.5 and found["ppo_actor/seq_len/avg"] == 2
    assert found["reward/a/avg"] == 0.5 and found["rollout/behavior_logp/avg"] == -0.5


completions = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=8)


@given(completions)
def test_repetition_is_that_of_a_set_of_4_grams(texts):
    tokens = Tokens.of([trajectory([7], text) for text in texts]).sampled()
    expected = []
    for text in texts:
        grams = [tuple(text[k : k + 4]) for k in range(len(text) - 3)]
        if grams:
            expected.append(1 - len(set(grams)) / len(grams))
    assert repetition(tokens).tolist() == pytest.approx(expected)


def test_repetition_of_no_tokens_is_empty():
    assert repetition(Tokens.of([])).size == 0


@given(completions, st.lists(st.floats(-5, 5), min_size=8, max_size=8))
def test_groups_are_described_one_by_one(texts, rewards):
    made = [trajectory([7], text, reward=reward) for text, reward in zip(texts, rewards, strict=False)]
    groups = [made[: len(made) // 2 + 1], made[len(made) // 2 :]]
    found = metrics_of(*groups)
    stds = [np.std([t.reward for t in group]) for group in groups]
    assert found["rollout/group_reward_std/avg"] == pytest.approx(np.mean(stds), abs=1e-12)
    assert found["rollout/group_reward_std/max"] == pytest.approx(max(stds), abs=1e-12)
    distinct = [len({t.token_ids.tobytes() for t in group}) / len(group) for group in groups]
    assert found["rollout/distinct_completions/min"] == min(distinct)


def test_a_prompt_that_another_group_has_too_is_a_duplicate():
    groups = [[trajectory(prompt, [1, 2])] for prompt in ([5, 6], [5], [5, 6], [6, 5])]
    assert metrics_of(*groups)["rollout/duplicate_prompts"] == 2 / 4


def test_trained_tokens_that_no_sampler_drew_are_counted():
    foreign = trajectory([7], [1, 2, 3], versions=[3, -1, 3])
    unknown = trajectory([7], [1, 2], logp=math.nan)
    found = metrics_of([foreign, unknown, trajectory([7], [1])])
    assert found["rollout/foreign_tokens_in_loss"] == 1 + 2
    assert found["rollout/behavior_logp/avg"] == -0.5
    assert metrics_of([trajectory([7], [1, 2])])["rollout/foreign_tokens_in_loss"] == 0


def test_correlation_is_numpys_and_none_of_a_constant():
    random = np.random.default_rng(0)
    a, b = random.normal(size=50), random.normal(size=50)
    assert correlation(a, b).value == pytest.approx(np.corrcoef(a, b)[0, 1])
    assert correlation(a, np.full(50, 0.1)).count == 0
    longer = [trajectory([7], [1] * n, reward=float(n)) for n in range(1, 5)]
    assert metrics_of(longer)["rollout/reward_length_corr"] == pytest.approx(1)
    assert "rollout/reward_length_corr" not in metrics_of([trajectory([7], [1])] * 2)


def test_log_ratios_are_described_and_those_of_lag_0_apart():
    log_ratio, lags = np.linspace(-1, 1, 101), np.arange(101) % 2
    log_ratio[50] = math.nan  # of lag 0
    found = flatten(log_ratio_metrics(log_ratio, lags))
    rest = np.delete(log_ratio, 50)
    assert found[f"{LOG_RATIO}/avg"] == pytest.approx(rest.mean())
    assert (found[f"{LOG_RATIO}/min"], found[f"{LOG_RATIO}/max"]) == (-1, 1)
    assert [found[f"{LOG_RATIO}_{name}"] for name in ("p01", "p50", "p99")] == np.quantile(rest, (0.01, 0.5, 0.99)).tolist()
    assert found[f"{LOG_RATIO}_lag0"] == pytest.approx(np.delete(log_ratio[lags == 0], 25).mean())
    stale = flatten(log_ratio_metrics(log_ratio, np.ones(101, int)))
    assert f"{LOG_RATIO}_lag0" not in stale and log_ratio_metrics(np.array([math.inf]), np.zeros(1)) == {}


def test_histograms_count_trajectories_and_trained_tokens():
    made = [trajectory([7], [1] * n, reward=n / 2, versions=[2] * n) for n in (1, 2, 2)]
    advantage = np.concatenate([np.full(n, float(n)) for n in (1, 2, 2)])
    found = batch_histograms(made, 3, advantage, None)
    assert set(found) == {"rollout/reward", "rollout/staleness", "ppo_actor/seq_len", "ppo_actor/advantage"}
    totals = {name: int(histogram.counts.sum()) for name, histogram in found.items()}
    assert totals == {"rollout/reward": 3, "rollout/staleness": 5, "ppo_actor/seq_len": 3, "ppo_actor/advantage": 5}
    pairs = itertools.zip_longest(found["ppo_actor/seq_len"].edges.tolist(), found["ppo_actor/seq_len"].counts.tolist())
    assert dict(pairs) == {1.0: 1, 2.0: 2, 3.0: None}
    assert LOG_RATIO in batch_histograms(made, 3, advantage, advantage)
