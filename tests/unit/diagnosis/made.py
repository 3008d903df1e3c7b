"""Histories made up for tests: a healthy run's metrics with noise, and what to change in them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rljax.config.schema import Config
from rljax.diagnosis import History
from rljax.testing.harness import make_config

STEPS = 80
GROUPS, SAMPLES, EVALUATED = 32, 8, 256
Columns = dict[str, np.ndarray]  # name -> [STEPS] float64


def healthy(seed: int = 0, steps: int = STEPS) -> Columns:
    """Metrics of a run that learns: reward from 0.25 to 0.95, with the noise of a batch."""
    return dict(_healthy(seed, steps))


@functools.cache
def _healthy(seed: int, steps: int) -> Columns:
    random = np.random.default_rng(seed)
    time = np.linspace(0, 1, steps)
    reward = 0.25 + 0.7 * (1 - np.exp(-4 * time))

    def noisy(values: Any, noise: float) -> np.ndarray:
        return np.asarray(values + noise * random.standard_normal(steps), np.float64)

    mean = np.clip(noisy(reward, 0.03), 0, 1)
    entropy = noisy(0.3 - 0.15 * time, 0.01)
    columns = spread("rollout/reward", mean, 0.0, 1.0)
    columns |= spread("reward/exact", mean, 0.0, 1.0)
    columns |= spread("ppo/actor/task_reward", mean, 0.0, 1.0) | spread("ppo/actor/shaped_reward", mean, 0.0, 1.0)
    columns |= spread("rollout/staleness", np.full(steps, 2.0), 2.0, 2.0)
    columns |= spread("rollout/group_size", np.full(steps, float(SAMPLES)), SAMPLES, SAMPLES)
    columns |= spread("rollout/group_reward_std", noisy(0.25, 0.02), 0.0, 0.5)
    columns |= spread("rollout/repetition", np.abs(noisy(0.01, 0.005)), 0.0, 0.1)
    columns |= spread("rollout/distinct_completions", noisy(0.5 - 0.2 * time, 0.02), 1 / SAMPLES, 1.0)
    columns |= spread("rollout/behavior_logp", noisy(-0.3, 0.01), -9.0, 0.0)
    columns |= spread("ppo_actor/seq_len", noisy(3.6, 0.1), 3.0, 5.0)
    columns |= spread("ppo_actor/advantage", noisy(0.0, 0.01), -2.6, 2.6)
    columns |= spread("ppo_actor/behave_log_ratio", -np.abs(noisy(0.005, 0.002)), -3.0, 2.0)
    columns |= spread("ppo_actor/update/importance_weight", noisy(1.0, 0.005), 0.4, 1.6)
    columns |= spread("ppo_actor/update/behave_imp_weight", noisy(1.0, 0.01), 0.05, 6.0)
    columns |= spread("critic/return", mean, 0.0, 1.0) | spread("critic/value", mean, 0.0, 1.0)
    columns |= spread("timeperf/reward", np.abs(noisy(1e-3, 1e-4)), 1e-4, 0.02)
    lag0 = np.full(steps, np.nan)
    lag0[0] = 1e-6
    return (
        columns
        | {
            "ppo_actor/behave_log_ratio_lag0": lag0,
            "rollout/reward_length_corr": noisy(0.0, 0.06),
            "rollout/duplicate_prompts": np.zeros(steps),
            "rollout/foreign_tokens_in_loss": np.zeros(steps),
            "rollout/equal_reward_groups": np.clip(noisy(0.2 + 0.5 * time, 0.05), 0, 1),
            "rollout/groups": np.full(steps, float(GROUPS)),
            "ppo_actor/update/optimizer_steps": 2.0 * np.arange(1, steps + 1) - 0.5,  # the mean over two minibatches
            "rollout/rejected": np.zeros(steps),
            "rollout/stale": np.zeros(steps),
            "rollout/wait/learner": np.abs(noisy(0.01, 0.005)),
            "rollout/wait/producer_for_lag": np.abs(noisy(0.1, 0.02)),
            "ppo_actor/no_eos_ratio": np.abs(noisy(0.003, 0.002)),
            "ppo_actor/update/approx_kl": np.abs(noisy(0.003, 0.002)),
            "ppo_actor/update/clip_ratio": np.abs(noisy(0.02, 0.01)),
            "ppo_actor/update/behave_cap_ratio": np.abs(noisy(0.001, 0.001)),
            "ppo_actor/update/reference_kl": np.abs(noisy(0.05 * time, 0.002)),
            "ppo_actor/update/entropy": entropy,
            "ppo_actor/update/grad_norm": np.exp(noisy(0.0, 0.4)),
            "ppo_actor/update/lr": np.full(steps, 1e-3),
            "ppo_actor/update/skipped": np.zeros(steps),
            "ppo_actor/update/loss": noisy(0.0, 0.01),
            "critic/explained_variance": np.clip(noisy(0.6 * (1 - np.exp(-8 * time)), 0.05), -1, 1),
            "critic/squared_error": np.abs(noisy(0.2 - 0.1 * time, 0.005)),
            "timeperf/wall": np.abs(noisy(0.5, 0.05)),
            "timeperf/step": np.abs(noisy(0.4, 0.05)),
            "perf/host_memory_bytes": 2**30 * (1.5 + 0.02 * random.standard_normal(steps)),
        }
        | evaluations(steps, reward, random)
    )


def evaluations(steps: int, reward: np.ndarray, random: np.random.Generator) -> Columns:
    """Evaluations before the first step and after each tenth, with the noise of 256 episodes."""
    at = np.zeros(steps, bool)
    at[[0, *range(9, steps, 10)]] = True
    noise = np.sqrt(reward * (1 - reward) / EVALUATED) * random.standard_normal(steps)

    def where(values: np.ndarray | float) -> np.ndarray:
        return np.where(at, values, np.nan)

    ends = {
        f"{name}/{end}": where(value)
        for name in ("eval-rollout/reward", "eval-reward/exact")
        for end, value in (("min", 0.0), ("max", 1.0))
    }
    measured = {f"{name}/avg": where(reward + noise) for name in ("eval-rollout/reward", "eval-reward/exact")}
    return measured | ends | {"eval-rollout/failed": where(0.0)}


def spread(name: str, mean: Any, low: Any, high: Any) -> Columns:
    """Columns of a distribution."""
    count = len(np.atleast_1d(mean))
    return {
        f"{name}/avg": np.asarray(mean, np.float64),
        f"{name}/min": np.broadcast_to(np.asarray(low, np.float64), count).copy(),
        f"{name}/max": np.broadcast_to(np.asarray(high, np.float64), count).copy(),
    }


def samples(seed: int = 0, steps: int = STEPS, completion: Callable[[int, Any], str] | None = None) -> list[dict[str, Any]]:
    """Four lines of samples.jsonl per step: sums and their answers."""
    random = np.random.default_rng(seed)
    lines = []
    for step in range(1, steps + 1):
        for index in range(4):
            a, b = random.integers(10, 99, 2).tolist()
            text = f"{a + b}<eos>" if completion is None else completion(step, random)
            right = float(text.startswith(str(a + b)))
            line = {"step": step, "uid": f"0/{step * 4 + index}", "prompt": f"{a}+{b}=", "completion": text}
            lines.append(line | {"reward": right, "components": {"exact": right}, "versions": [[step, 3]], "finish": "stop"})
    return lines


SESSION: Mapping[str, Any] = {
    "first_step": 0,
    "config": "c",
    "seed": 1,
    "rljax": "0.1",
    "commit": "abc",
    "dirty": False,
    "packages": {"python": "3.11"},
    "hardware": {"cores": 2},
    "model": "m",
    "data": {"data": "train", "prompts": 8000, "kept": "a", "shuffle": True, "seed": 1, "shard": "0 of 1"},
    "evaluation": {
        **{"split": "test", "prompts": EVALUATED, "n_samples": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0},
        **{"greedy": False, "max_new_tokens": 5, "reward": "exact", "data": {"data": "test", "prompts": 500, "kept": "b"}},
    },
}


@functools.cache
def config(**overrides: Any) -> Config:
    """Config of the run, with dotted keys written with two underscores for the dots."""
    settings = {
        "gconfig.n_samples": SAMPLES,
        "gconfig.max_new_tokens": 5,
        "train_dataset.batch_size": GROUPS,
        "rollout.max_head_offpolicyness": 2,
        "actor.ppo_n_minibatches": 2,
        "evaluator.freq_steps": 10,
        "evaluator.max_prompts": EVALUATED,
        "evaluator.greedy": False,
    }
    return make_config(settings | {name.replace("__", "."): value for name, value in overrides.items()})


def history(columns: Columns | None = None, **fields: Any) -> History:
    """History of columns over the steps 1, 2, ...; by default with config, context and samples."""
    columns = healthy() if columns is None else columns
    steps = np.arange(1, 1 + len(next(iter(columns.values()))), dtype=np.int64)
    made = History(steps, columns, config=config(), context=[dict(SESSION)], samples=samples(steps=len(steps)), source="run")
    return dataclasses.replace(made, **fields)


def plan(
    allocation: str = "jax:d1+jax:f1",
    *,
    learner_peak: float = 1.0,
    sampler_peak: float = 1.0,
    rate: float = 1.0,
    in_turn: bool = False,
    usable: float | None = 75e9,
) -> dict[str, Any]:
    """Content of plan.json: 20 GB planned for each side.

    Args:
      learner_peak, sampler_peak, rate: what was measured, over what was planned.
    """
    names = ["sampler", "learner"] if "+" in allocation else ["sampler and learner"]
    groups = [{"name": name, "peak": 40e9 / len(names), "usable": usable, "in_turn": in_turn} for name in names]
    rates = {"learner_tokens": 1e4, "sampler_tokens": 2e4, "step_seconds": 3.0}
    measured = {
        "memory/learner_peak_bytes": 20e9 * learner_peak,
        "memory/sampler_peak_bytes": 20e9 * sampler_peak,
        "timeperf/learner_tokens_per_s": 1e4 * rate,
        "timeperf/sampler_tokens_per_s": 2e4 * rate,
        "timeperf/wall": 3.0 / rate,
    }
    return {"estimated": {"allocation": allocation, "groups": groups, "rates": rates}, "measured": measured}
