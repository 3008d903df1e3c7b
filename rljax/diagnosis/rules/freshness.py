"""Freshness: how old the tokens are that are trained on, and whether published weights arrive."""

from __future__ import annotations

import numpy as np

from rljax.diagnosis import names
from rljax.diagnosis.evidence import above
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
    STALE_FACTOR,
    STALE_GROWTH,
    STALE_KL,
)


@rule(
    "freshness.lag_bound",
    "Tokens older than the lag bound are trained on.",
    needs=(f"{names.STALENESS}/max",),
    needs_config=True,
    causes=("versions are stamped wrongly by the sampler", "the buffer is bypassed by a workflow or a plugin"),
    next="rljax train with rollout.enable_rollout_tracing=true, and look for the group in WORKDIR/trace.json",
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
    "The sampler's policy is further behind the learner's than its versions say: published weights do not arrive.",
    needs=(names.BEHAVE_LOG_RATIO, names.STALENESS),
    least=BASELINE,
    bounds=(STALE_KL, STALE_FACTOR, STALE_GROWTH),
    causes=(
        "load_weights of the sampler raises the version but keeps the weights",
        "the sampler reads a directory, or a server, to which nothing is published",
        "only a part of the weights is published: adapters, or the unembedding",
    ),
    next="rljax doctor --workdir=WORKDIR --rescore: which version do the stored tokens belong to?",
)
def stale_weights(history: History) -> Sign | None:
    """Compares the KL divergence of behavior to proximal policy with what the lag explains of it."""
    distance = rolling_median(history[names.BEHAVE_LOG_RATIO].map(np.negative), PATIENCE)
    explained = _explained(history)
    if explained:
        bound = STALE_FACTOR * np.interp(distance.steps, explained.steps, explained.values)
    else:
        bound = np.full(len(distance), STALE_GROWTH * max(distance.head(BASELINE).median, 0.0))
    step = sustained(distance, distance.values > np.maximum(STALE_KL, bound), window=PATIENCE, share=1.0)
    if step is None or not (explained or trend(distance).rises(SIGNIFICANCE)):
        return None
    lag = history[names.STALENESS].since(step).median
    line = (
        f"the sampler's tokens are {distance.since(step).head(PATIENCE).median:.3g} nats from the learner's policy from step "
        f"{step} on, {distance.last:.3g} at the end, at a lag of {lag:.3g} versions"
    )
    if explained:
        line += f", which explains about {explained.since(step).median:.2g}"
    return Sign(Severity.BROKEN, step, line)


def _explained(history: History) -> Series:
    """Returns the KL divergence, nats per token, that updates since the tokens' versions may make.

    Policies that move steadily for n updates are n squared times as far apart as one update moves
    them, which the later minibatches of a batch show. Empty with one minibatch: it shows nothing.
    """
    moved, lag = history.aligned(names.APPROX_KL, names.STALENESS)
    minibatches = 1 if history.config is None else history.config.actor.ppo_n_minibatches
    if minibatches == 1:
        return moved.head(0)
    share = 1 - 1 / minibatches  # of the tokens whose minibatch came after another
    versions = np.clip(lag.values, 1, len(moved))
    back = np.maximum(np.arange(len(moved)) - PATIENCE - versions.astype(np.int64), 0)
    per_update = np.array([np.median(moved.values[first : at + 1]) for at, first in enumerate(back)]) / share
    return Series(f"{names.BEHAVE_LOG_RATIO} that the lag explains", moved.steps, per_update * (minibatches * versions) ** 2)


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
