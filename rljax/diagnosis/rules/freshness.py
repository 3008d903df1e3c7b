"""Freshness: how old the tokens are that are trained on, and whether published weights arrive."""

from __future__ import annotations

import numpy as np

from rljax.diagnosis import names
from rljax.diagnosis.evidence import above, change_line
from rljax.diagnosis.finding import Severity
from rljax.diagnosis.history import History
from rljax.diagnosis.rule import Rule, Sign, rule
from rljax.diagnosis.series import Series, rolling_median, sustained, trend
from rljax.diagnosis.thresholds import (
    BASELINE,
    LARGE_LAG,
    MAX_STALE_SHARE,
    PATIENCE,
    SIGNIFICANCE,
    STALE_GROWTH,
    STALE_KL,
)


@rule(
    "freshness.lag_bound",
    "Tokens older than the lag bound are trained on.",
    needs=(f"{names.STALENESS}/max",),
    needs_config=True,
    causes=("versions are stamped wrongly by the sampler", "the buffer is bypassed by a workflow or a plugin"),
    next="rljax train with rollout.enable_rollout_tracing=true, and look for the group's events in WORKDIR/trace.jsonl",
)
def lag_bound(history: History) -> Sign | None:
    assert history.config is not None
    bound, oldest = history.config.rollout.max_head_offpolicyness, history[f"{names.STALENESS}/max"]
    late = oldest.where(oldest.values > bound)
    if not late:
        return None
    line = (
        f"a token of lag {late.values[0]:.0f} is trained on at step {late.steps[0]}; rollout.max_head_offpolicyness is {bound}"
    )
    return Sign(Severity.BROKEN, int(late.steps[0]), line)


@rule(
    "freshness.stale_weights",
    "The sampler's policy falls further and further behind the learner's: published weights do not arrive.",
    needs=(names.BEHAVE_LOG_RATIO,),
    least=2 * BASELINE,
    bounds=(STALE_KL, STALE_GROWTH),
    causes=(
        "load_weights of the sampler raises the version but keeps the weights",
        "the sampler reads a directory, or a server, to which nothing is published",
        "only a part of the weights is published: adapters, or the unembedding",
    ),
    next="rljax doctor --workdir=WORKDIR --rescore: which version do the stored tokens belong to?",
)
def stale_weights(history: History) -> Sign | None:
    """Reads the KL divergence of behavior to proximal policy, which stays small at a bounded lag."""
    divergence = history[names.BEHAVE_LOG_RATIO].map(np.negative)
    smooth = rolling_median(divergence, PATIENCE)
    start = max(smooth.head(BASELINE).median, 1e-6)
    step = sustained(smooth, smooth.values > max(STALE_KL, STALE_GROWTH * start), window=2 * PATIENCE)
    if step is None or not trend(divergence).rises(SIGNIFICANCE):
        return None
    staleness = history[names.STALENESS]
    line = (
        f"the sampler's tokens are {smooth.since(step).median:.3g} nats from the learner's policy from step {step} on, "
        f"{start:.2g} in the first steps, at a lag of {staleness.median:.3g} throughout"
    )
    return Sign(Severity.BROKEN, step, (line, change_line(divergence, PATIENCE)))


@rule(
    "freshness.large_lag",
    "Tokens are many versions old, and the policy that drew them is far from the one that learns from them.",
    needs=(names.STALENESS,),
    least=PATIENCE,
    bounds=(LARGE_LAG, STALE_KL),
    causes=("rollout.max_head_offpolicyness is large", "rollout.max_concurrent_rollouts keeps many prompts in flight"),
    next="rljax train with rollout.max_head_offpolicyness=4",
)
def large_lag(history: History) -> Sign | None:
    staleness, apart = history[names.STALENESS], history[names.BEHAVE_LOG_RATIO].map(np.negative)
    sign = above(staleness, LARGE_LAG, Severity.BROKEN)
    if sign is None:
        return None
    distance = rolling_median(apart, PATIENCE).since(sign.step)
    if distance and distance.values.max() < STALE_KL:
        return Sign(Severity.NOTE, sign.step, sign.evidence)
    return sign


@rule(
    "freshness.stale_dropped",
    "Much of what is sampled is too old when it is finished, and sampled again.",
    needs=(names.STALE, names.GROUPS),
    least=PATIENCE,
    bounds=(MAX_STALE_SHARE,),
    causes=("completions take longer than rollout.max_head_offpolicyness updates", "too many prompts are in flight"),
    next="lower rollout.max_concurrent_rollouts, or raise rollout.max_head_offpolicyness by one",
)
def stale_dropped(history: History) -> Sign | None:
    stale, groups = history.aligned(names.STALE, names.GROUPS)
    share = Series(
        "share of groups that were too old", groups.steps, stale.values / np.maximum(stale.values + groups.values, 1)
    )
    return above(share, MAX_STALE_SHARE, Severity.WARNING, window=2 * PATIENCE)


RULES: tuple[Rule, ...] = (lag_bound, stale_weights, large_lag, stale_dropped)
