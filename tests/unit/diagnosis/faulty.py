"""Runs with one fault each, planted in the metrics of a healthy run: a case for every rule."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rljax.diagnosis import History, Severity
from rljax.diagnosis.run_files import Bins
from tests.unit.diagnosis import made

N = made.STEPS
TIME = np.arange(1, N + 1)
LATE = TIME > 30
NOISE = np.random.default_rng(7).standard_normal(N)


def changed(config: Any = None, **columns: Any) -> History:
    """The healthy run with columns replaced, by names with __ for /."""
    healthy = made.healthy()
    for name, values in columns.items():
        key = name.replace("__", "/")
        healthy[key] = np.broadcast_to(np.asarray(values, np.float64), N).copy()
    return made.history(healthy, **({} if config is None else {"config": config}))


def scaled(name: str, factor: Any, **more: Any) -> History:
    """The healthy run with one column multiplied."""
    return changed(**{name.replace("/", "__"): made.healthy()[name] * factor}, **more)


def sessions(**second: Any) -> list[dict[str, Any]]:
    return [dict(made.SESSION), dict(made.SESSION) | {"first_step": 40} | second]


def protocol(**fields: Any) -> dict[str, Any]:
    return dict(made.SESSION["evaluation"]) | fields


def not_finite() -> History:
    return dataclasses.replace(made.history(), not_finite={"ppo_actor/update/loss": np.array([33, 34])})


def hacked(**columns: Any) -> History:
    """Held-out reward stays where it began while training reward rises."""
    flat = np.where(np.isfinite(made.healthy()["eval-rollout/reward/avg"]), 0.25, np.nan)
    return changed(**{"eval-rollout__reward__avg": flat, "eval-reward__exact__avg": flat}, **columns)


def with_reward(mean: np.ndarray, **columns: Any) -> History:
    """The healthy run with another reward, held-out reward alike."""
    held_out = np.where(np.isfinite(made.healthy()["eval-rollout/reward/avg"]), mean, np.nan)
    evaluated = {"eval-rollout__reward__avg": held_out, "eval-reward__exact__avg": held_out}
    return changed(**columns, **evaluated, rollout__reward__avg=mean, reward__exact__avg=mean)


def with_samples(completion: Callable[[int, Any], str], history: History | None = None) -> History:
    return dataclasses.replace(history or made.history(), samples=made.samples(completion=completion))


def memorized() -> History:
    lines = [line | {"uid": f"{line['step'] // 10}/0"} for line in made.samples()]
    return dataclasses.replace(hacked(), samples=lines)


def long_tailed() -> History:
    edges, counts = np.arange(0.0, 33.0), np.zeros(32)
    counts[0], counts[1], counts[31] = 240, 14, 2
    return dataclasses.replace(
        made.history(), histograms={"rollout/reward": {step: Bins(edges, counts) for step in range(1, N + 1)}}
    )


def acted(action: str, step: int, restored: int | None = None) -> dict[str, Any]:
    """A line of guard.jsonl."""
    bound = {"guard": "max_approx_kl", "metric": "ppo_actor/update/approx_kl", "value": 12.5, "bound": 10.0}
    return bound | {"step": step, "action": action, "detail": "", "restored": restored}


def rolled_back(times: int, restored: int = 15) -> History:
    """The healthy run, with steps that diverge and that rollbacks undid, five in each."""
    undone = np.zeros(N, bool)
    guard = []
    for at in range(times):
        first = restored + 10 * at
        guard.append(acted("rollback", first + 5, first))
        undone |= (first < TIME) & (first + 5 >= TIME)
    history = changed(
        ppo_actor__update__approx_kl=np.where(undone, 12.5, 0.003), rollout__reward__avg=np.where(undone, 0.0, 0.5)
    )
    return dataclasses.replace(history, guard=guard)


def constant(value: float) -> Mapping[str, Any]:
    return {f"rollout__reward__{end}": value for end in ("avg", "min", "max")} | {"rollout__equal_reward_groups": 1.0}


def falling(*, from_step: int) -> np.ndarray:
    """Mean reward that falls from a step on, to 0.1; before that it rises."""
    rise = 0.3 + 0.4 * np.minimum(TIME / max(from_step, 1), 1) * (from_step > 1)
    return np.maximum(rise - np.maximum(TIME - from_step, 0) * 0.012, 0.05) + 0.02 * NOISE


def scaled_evaluations(factor: float) -> np.ndarray:
    return made.healthy()["eval-rollout/reward/avg"] * factor


PPO = {"actor__adv_estimator": "gae"}
# Rule -> a run with its fault, the severity of the finding, and the least and greatest step that it may give
CASES: Mapping[str, tuple[Callable[[], History], Severity, int, int]] = {
    "context.unrecorded": (lambda: made.history(context=()), Severity.NOTE, 1, 1),
    "context.changed": (lambda: made.history(context=sessions(evaluation=protocol(reward="math"))), Severity.BROKEN, 41, 41),
    "context.circumstances_changed": (lambda: made.history(context=sessions(commit="other")), Severity.NOTE, 41, 41),
    "context.dirty": (lambda: made.history(context=[dict(made.SESSION) | {"dirty": True}]), Severity.NOTE, 1, 1),
    "environment.foreign_tokens": (lambda: changed(rollout__foreign_tokens_in_loss=40.0), Severity.BROKEN, 1, 1),
    "environment.truncation": (lambda: changed(ppo_actor__no_eos_ratio=0.4), Severity.BROKEN, 1, 1),
    "environment.duplicate_prompts": (
        lambda: changed(rollout__duplicate_prompts=np.where(LATE, 0.8, 0.0)),
        Severity.BROKEN,
        31,
        31,
    ),
    "environment.small_groups": (lambda: changed(rollout__group_size__avg=np.where(LATE, 1.0, 8.0)), Severity.BROKEN, 31, 31),
    "environment.failures": (
        lambda: changed(rollout__failed__reward_error=np.where(LATE, 200.0, 0.0)),
        Severity.BROKEN,
        31,
        31,
    ),
    "environment.timeouts_as_zeros": (lambda: changed(rollout__retried__reward_timeout=40.0), Severity.BROKEN, 1, 1),
    "evaluation.missing": (
        lambda: made.history({n: v for n, v in made.healthy().items() if not n.startswith("eval")}),
        Severity.NOTE,
        1,
        1,
    ),
    "evaluation.same_data": (lambda: made.history(config=made.config(valid_dataset__split="train")), Severity.BROKEN, 1, 1),
    "evaluation.protocol": (
        lambda: changed(
            made.config(evaluator__temperature=2.0),
            **{"eval-rollout__reward__avg": scaled_evaluations(0.2), "eval-reward__exact__avg": scaled_evaluations(0.2)},
        ),
        Severity.BROKEN,
        1,
        1,
    ),
    "evaluation.protocol_changed": (
        lambda: made.history(context=sessions(evaluation=protocol(temperature=0.2))),
        Severity.BROKEN,
        41,
        41,
    ),
    "evaluation.failed": (
        lambda: changed(**{"eval-rollout__failed": np.where(np.isfinite(scaled_evaluations(1.0)), 90.0, np.nan)}),
        Severity.BROKEN,
        1,
        1,
    ),
    "evaluation.overfit": (memorized, Severity.BROKEN, 1, 80),
    "evaluation.noise": (
        lambda: changed(
            **{"eval-rollout__reward__avg": np.where(np.isfinite(scaled_evaluations(1.0)), 0.25, np.nan)}, **constant(0.25)
        ),
        Severity.NOTE,
        1,
        1,
    ),
    "reward.all_zero": (lambda: changed(**constant(0.0)), Severity.BROKEN, 1, 1),
    "reward.all_one": (lambda: changed(**constant(1.0)), Severity.BROKEN, 1, 1),
    "reward.constant_by_prompt": (lambda: changed(rollout__equal_reward_groups=1.0), Severity.BROKEN, 1, 1),
    "reward.no_spread": (lambda: changed(rollout__equal_reward_groups=np.where(LATE, 0.95, 0.3)), Severity.NOTE, 31, 31),
    "reward.one_sample": (lambda: made.history(config=made.config(gconfig__n_samples=1)), Severity.BROKEN, 1, 1),
    "reward.sign": (lambda: changed(reward__exact__avg=1 - made.healthy()["rollout/reward/avg"]), Severity.BROKEN, 1, 1),
    "reward.negative_scaling": (lambda: changed(made.config(actor__reward_scaling=-1.0)), Severity.BROKEN, 1, 1),
    "reward.scale": (
        lambda: changed(
            made.config(actor__reward_norm__std_level="none"),
            rollout__reward__max=1000.0,
            rollout__reward__avg=1000 * made.healthy()["rollout/reward/avg"],
        ),
        Severity.BROKEN,
        1,
        1,
    ),
    "reward.filtered": (
        lambda: changed(made.config(rollout__should_accept_fn="mixed_rewards"), rollout__rejected=200.0),
        Severity.NOTE,
        1,
        1,
    ),
    "reward.long_tail": (long_tailed, Severity.WARNING, 1, 1),
    "reward.variance": (
        lambda: changed(rollout__reward__avg=0.5 + 0.1 * NOISE),
        Severity.NOTE,
        1,
        1,
    ),
    "reward.hacking": (hacked, Severity.BROKEN, 1, 80),
    "reward.length": (
        lambda: hacked(ppo_actor__seq_len__avg=3.6 + 0.05 * TIME, rollout__reward_length_corr=0.6),
        Severity.BROKEN,
        15,
        50,
    ),
    "reward.repetition": (
        lambda: hacked(rollout__repetition__avg=np.where(LATE, 0.5, 0.01)),
        Severity.BROKEN,
        30,
        36,
    ),
    "reward.template": (
        lambda: with_samples(lambda step, r: f"ok {r.integers(9)}" if step > 30 else str(r.integers(10, 99)), hacked()),
        Severity.BROKEN,
        25,
        35,
    ),
    "reward.refusal": (
        lambda: with_samples(lambda step, r: "I'm sorry, I can't help" if step > 60 else str(r.integers(10, 99)), hacked()),
        Severity.BROKEN,
        60,
        75,
    ),
    "reward.tool_calls": (
        lambda: with_samples(lambda step, r: "<tool_call>" * (4 if step > 60 else 1) + str(r.integers(99)), hacked()),
        Severity.WARNING,
        60,
        75,
    ),
    "reward.components_apart": (
        lambda: hacked(
            **{f"reward__exact__{end}": v for end, v in (("avg", falling(from_step=1)), ("min", 0.0), ("max", 1.0))},
            **{f"reward__format__{end}": v for end, v in (("avg", TIME / N), ("min", 0.0), ("max", 1.0))},
        ),
        Severity.BROKEN,
        1,
        80,
    ),
    "reward.falls": (lambda: with_reward(falling(from_step=40)), Severity.BROKEN, 35, 45),
    "policy.reversed": (lambda: with_reward(falling(from_step=1)), Severity.BROKEN, 1, 1),
    "policy.drift": (
        lambda: changed(
            rollout__reward__avg=0.4 + 0.01 * NOISE,
            **{"eval-rollout__reward__avg": np.where(np.isfinite(scaled_evaluations(1.0)), np.where(LATE, 0.1, 0.4), np.nan)},
        ),
        Severity.BROKEN,
        1,
        30,
    ),
    "policy.guardrails": (lambda: rolled_back(2), Severity.WARNING, 20, 20),
    "policy.no_progress": (
        lambda: with_reward(0.3 + 0.02 * np.random.default_rng(7).standard_normal(N), rollout__equal_reward_groups=0.3),
        Severity.WARNING,
        2,
        20,
    ),
    "policy.kl": (lambda: changed(ppo_actor__update__approx_kl=np.where(LATE, 0.4, 0.003)), Severity.BROKEN, 31, 31),
    "policy.clip_ratio": (lambda: changed(ppo_actor__update__clip_ratio=np.where(LATE, 0.6, 0.02)), Severity.BROKEN, 31, 31),
    "policy.importance_weight": (
        lambda: changed(ppo_actor__update__importance_weight__avg=np.where(LATE, 1.4, 1.0)),
        Severity.BROKEN,
        31,
        31,
    ),
    "policy.unit_ratio": (
        lambda: changed(made.config(actor__ppo_n_minibatches=1), ppo_actor__update__importance_weight__max=1.2),
        Severity.BROKEN,
        1,
        1,
    ),
    "policy.sampler_disagrees": (lambda: changed(ppo_actor__behave_log_ratio_lag0=-0.3), Severity.BROKEN, 1, 1),
    "policy.behave_imp_weight": (
        lambda: changed(ppo_actor__update__behave_imp_weight__avg=np.where(LATE, 1.5, 1.0)),
        Severity.BROKEN,
        31,
        31,
    ),
    "policy.no_update": (lambda: changed(ppo_actor__update__lr=0.0), Severity.BROKEN, 1, 1),
    "policy.capped": (lambda: changed(ppo_actor__update__behave_cap_ratio=np.where(LATE, 0.7, 0.0)), Severity.BROKEN, 31, 31),
    "reward.empty": (lambda: changed(ppo_actor__seq_len__avg=np.where(LATE, 1.02, 3.6)), Severity.BROKEN, 31, 31),
    "policy.optimizer_reset": (lambda: changed(ppo_actor__update__optimizer_steps=1.5), Severity.BROKEN, 2, 2),
    "policy.reference_kl": (
        lambda: changed(ppo_actor__update__reference_kl=np.where(LATE, 3.0, 0.1), **{"eval-rollout__reward__avg": np.nan}),
        Severity.WARNING,
        31,
        31,
    ),
    "critic.explained_variance": (
        lambda: changed(made.config(**PPO), critic__explained_variance=np.where(LATE, -0.5, 0.3)),
        Severity.BROKEN,
        28,
        36,
    ),
    "critic.loss_flat": (
        lambda: changed(made.config(**PPO), critic__value__avg=0.0, critic__value__max=0.0),
        Severity.BROKEN,
        1,
        1,
    ),
    "critic.scale": (lambda: changed(made.config(**PPO), critic__return__max=100.0), Severity.BROKEN, 1, 1),
    "exploration.entropy_collapse": (
        lambda: with_reward(0.4 + 0.01 * NOISE, ppo_actor__update__entropy=np.where(LATE, 0.01, 0.3)),
        Severity.BROKEN,
        30,
        36,
    ),
    "exploration.entropy_floor": (
        lambda: changed(made.config(guard__min_entropy=0.1), ppo_actor__update__entropy=np.where(LATE, 0.09, 0.3)),
        Severity.BROKEN,
        31,
        31,
    ),
    "exploration.entropy_rises": (
        lambda: with_reward(0.25 + 0.01 * NOISE, ppo_actor__update__entropy=0.3 + 0.03 * TIME),
        Severity.BROKEN,
        5,
        20,
    ),
    "exploration.entropy_never_falls": (lambda: changed(ppo_actor__update__entropy=0.3), Severity.NOTE, 11, 11),
    "exploration.identical_completions": (lambda: changed(rollout__distinct_completions__avg=0.125), Severity.BROKEN, 1, 1),
    "exploration.diversity": (
        lambda: with_reward(0.4 + 0.01 * NOISE, rollout__distinct_completions__avg=np.where(LATE, 0.13, 0.6)),
        Severity.BROKEN,
        30,
        36,
    ),
    "freshness.lag_bound": (lambda: changed(rollout__staleness__max=np.where(LATE, 5.0, 2.0)), Severity.BROKEN, 31, 31),
    "freshness.stale_weights": (
        lambda: changed(ppo_actor__behave_log_ratio__avg=-0.05 * TIME, ppo_actor__behave_log_ratio__min=-9.0),
        Severity.BROKEN,
        8,
        45,
    ),
    "freshness.large_lag": (
        lambda: changed(
            made.config(rollout__max_head_offpolicyness=64),
            rollout__staleness__avg=30.0,
            rollout__staleness__max=40.0,
            ppo_actor__behave_log_ratio__avg=-0.3,
        ),
        Severity.BROKEN,
        1,
        1,
    ),
    "freshness.stale_dropped": (lambda: changed(rollout__stale=40.0), Severity.WARNING, 1, 1),
    "numbers.not_finite": (not_finite, Severity.BROKEN, 33, 33),
    "numbers.grad_norm": (
        lambda: scaled("ppo_actor/update/grad_norm", np.where(TIME % 15 == 0, 1e4, 1.0)),
        Severity.BROKEN,
        15,
        15,
    ),
    "numbers.extreme_logp": (
        lambda: changed(rollout__behavior_logp__min=np.where(LATE, -80.0, -9.0)),
        Severity.WARNING,
        31,
        31,
    ),
    "numbers.outlier_rewards": (lambda: changed(rollout__reward__max=np.where(TIME == 50, 1e6, 1.0)), Severity.BROKEN, 50, 50),
    "resources.memory_growth": (
        lambda: changed(perf__host_memory_bytes=1.5 * 2**30 + 48e6 * TIME),
        Severity.BROKEN,
        1,
        20,
    ),
    "resources.throughput_drop": (lambda: changed(timeperf__wall=np.where(LATE, 3.0, 0.5)), Severity.BROKEN, 31, 36),
    "resources.seq_len_growth": (lambda: changed(ppo_actor__seq_len__avg=np.where(LATE, 9.0, 3.6)), Severity.NOTE, 31, 36),
    "resources.slow_reward": (
        lambda: changed(timeperf__reward__avg=0.5, timeperf__wall=64.0, rollout__wait__learner=60.0),
        Severity.WARNING,
        1,
        1,
    ),
    "resources.learner_idle": (lambda: changed(rollout__wait__learner=0.4), Severity.NOTE, 1, 1),
    "resources.sampler_idle": (
        lambda: changed(made.config(allocation_mode="fake:d1+fake:d1"), rollout__wait__producer_for_lag=0.4),
        Severity.NOTE,
        1,
        1,
    ),
    "resources.plan": (lambda: made.history(plan=made.plan(learner_peak=1.2)), Severity.NOTE, N, N),
}
