"""Exploration: whether the policy still tries different things."""

from __future__ import annotations

import numpy as np

from rljax.diagnosis import names
from rljax.diagnosis.evidence import below, change_line
from rljax.diagnosis.finding import Severity
from rljax.diagnosis.history import History
from rljax.diagnosis.progress import divergence, improves_held_out, level, lost_share, reward_range, severity_by_rewards
from rljax.diagnosis.rule import Rule, Sign, rule
from rljax.diagnosis.series import Series, rolling_median, sustained, trend
from rljax.diagnosis.thresholds import (
    BASELINE,
    COLLAPSED_ENTROPY,
    ENTROPY_RISE,
    ENTROPY_RISE_NATS,
    FALLEN_ENTROPY,
    LITTLE_CHOICE,
    LITTLE_DIVERSITY,
    MIN_GAIN,
    PATIENCE,
    SIGNIFICANCE,
    SOLVED,
    STILL_ENTROPY,
    STILL_RISING,
    TURNED_ENTROPY,
)

MORE_ENTROPY = "rljax train with actor.entropy_coef=1e-3, or actor.eps_clip_higher=0.28, from the last healthy checkpoint"


@rule(
    "exploration.entropy_collapse",
    "Entropy is all but gone while the task is not solved: the policy has stopped trying.",
    needs=(names.ENTROPY, names.REWARD),
    least=2 * BASELINE,
    bounds=(COLLAPSED_ENTROPY, SOLVED, FALLEN_ENTROPY, TURNED_ENTROPY, MIN_GAIN),
    causes=(
        "the learning rate is too high, or a batch teaches too many steps",
        "the entropy bonus has the wrong sign, or the clip's upper side is tight",
        "advantages favor what is likely already (no negative samples, a filter that leaves only successes)",
    ),
    next=MORE_ENTROPY,
)
def collapse(history: History) -> Sign | None:
    entropy, reached = history[names.ENTROPY], level(history)
    start = entropy.head(PATIENCE).median
    smooth = rolling_median(entropy, PATIENCE)
    share = _at(rolling_median(reached, PATIENCE), smooth.steps)
    gone = (smooth.values < COLLAPSED_ENTROPY * start) & (share < SOLVED)
    fallen = (smooth.values < FALLEN_ENTROPY * start) & (share < reached.head(PATIENCE).median)
    step = sustained(smooth, gone | fallen, window=2 * PATIENCE)
    if step is None or reached.tail(BASELINE).median > SOLVED:
        return None
    lines = (change_line(entropy, PATIENCE), change_line(history[names.REWARD], PATIENCE))
    severity = _severity_of_certainty(history)
    if trend(reached.since(step)).rises(STILL_RISING):
        severity = min(severity, Severity.WARNING)
    return Sign(severity, _turned(smooth, smooth.values < (1 - TURNED_ENTROPY) * start, step), lines)


def _severity_of_certainty(history: History) -> Severity:
    """Returns how bad it is that a policy has become sure of itself before its reward is the best.

    A note if held-out reward has gained with it: the best there is may be less than the range of
    rewards, as in games that chance decides. A warning if only training reward has, or little.
    """
    found = divergence(history)
    if found is None:
        share = level(history)
        gained = share.tail(BASELINE).median - share.head(PATIENCE).median > MIN_GAIN
        return Severity.WARNING if gained and not lost_share(history) else Severity.BROKEN
    if not improves_held_out(history):
        return Severity.BROKEN
    return Severity.NOTE if found.held_out > MIN_GAIN else Severity.WARNING


def _turned(series: Series, away: np.ndarray, step: int) -> int:
    """Returns the step from which the series was away from its start for good, up to a step."""
    near = series.steps[~away & (series.steps <= step)]
    return int(series.steps[0]) if not len(near) else int(near[-1])


def _at(series: Series, steps: np.ndarray) -> np.ndarray:
    """Returns the series at some steps, interpolated."""
    return np.interp(steps, series.steps, series.values) if series else np.zeros(len(steps))


@rule(
    "exploration.entropy_floor",
    "Entropy is below the bound that the config sets.",
    needs=(names.ENTROPY,),
    needs_config=True,
    applies=lambda config: config.guard.min_entropy is not None,
    causes=("entropy collapses: see exploration.entropy_collapse",),
    next=MORE_ENTROPY,
)
def floor(history: History) -> Sign | None:
    assert history.config is not None and history.config.guard.min_entropy is not None
    return below(history[names.ENTROPY], history.config.guard.min_entropy, Severity.BROKEN)


@rule(
    "exploration.entropy_rises",
    "Entropy rises: the policy turns to noise.",
    needs=(names.ENTROPY,),
    least=2 * BASELINE,
    bounds=(ENTROPY_RISE, ENTROPY_RISE_NATS, TURNED_ENTROPY),
    causes=(
        "actor.entropy_coef is too large, or has the wrong sign",
        "the learning rate is too high",
        "sampler and learner disagree, so that gradients push probability to tokens nobody meant",
    ),
    next="rljax train with actor.entropy_coef=0 and a third of actor.optimizer.lr",
)
def rises(history: History) -> Sign | None:
    entropy = history[names.ENTROPY]
    start = entropy.head(PATIENCE).median
    smooth = rolling_median(entropy, PATIENCE)
    bound = max(ENTROPY_RISE * start, start + ENTROPY_RISE_NATS)
    step = sustained(smooth, smooth.values > bound, window=PATIENCE)
    if step is None or entropy.tail(PATIENCE).median < bound:
        return None
    onset = _turned(smooth, smooth.values > (1 + TURNED_ENTROPY) * start, step)
    return Sign(severity_by_rewards(history), onset, change_line(entropy, PATIENCE))


@rule(
    "exploration.entropy_never_falls",
    "Entropy stays where it was: the policy does not make up its mind.",
    needs=(names.ENTROPY,),
    least=5 * BASELINE,
    bounds=(STILL_ENTROPY,),
    causes=("the learning rate is too low", "actor.entropy_coef holds it up", "advantages are all 0, or noise"),
    next="rljax train with three times actor.optimizer.lr",
)
def never_falls(history: History) -> Sign | None:
    entropy = history[names.ENTROPY]
    first, last = entropy.head(BASELINE).median, entropy.tail(BASELINE).median
    if last > (1 + TURNED_ENTROPY) * first or last < (1 - STILL_ENTROPY) * first or trend(entropy).falls(SIGNIFICANCE):
        return None
    line = (
        f"{entropy.name} is {first:.4g} in the first {BASELINE} steps and {last:.4g} in the last {BASELINE}, "
        f"at step {entropy.steps[-1]}"
    )
    if f"{first:.4g}" == f"{last:.4g}":
        line = f"{entropy.name} is still {last:.4g}, as at first (medians of {BASELINE} steps), at step {entropy.steps[-1]}"
    return Sign(Severity.NOTE, int(entropy.steps[BASELINE]), line)


@rule(
    "exploration.identical_completions",
    "The completions of a group are the same although the policy has entropy: samples are not independent.",
    needs=(names.DISTINCT_COMPLETIONS, names.ENTROPY),
    needs_config=True,
    least=PATIENCE,
    applies=lambda config: config.gconfig.n_samples > 1,
    bounds=(LITTLE_DIVERSITY, LITTLE_CHOICE),
    causes=(
        "all samples of a group have one seed",
        "gconfig.greedy, a temperature near 0, or top_k=1",
        "a cache answers repeated prompts",
    ),
    next="rljax rollout --config=CONFIG --out=DIR, and compare the completions of one prompt",
)
def identical(history: History) -> Sign | None:
    assert history.config is not None
    distinct, entropy, samples = history[names.DISTINCT_COMPLETIONS], history[names.ENTROPY], history.config.gconfig.n_samples
    least = 1 / samples
    step = sustained(distinct, distinct.values < least + LITTLE_DIVERSITY * (1 - least), window=2 * PATIENCE, share=1.0)
    if step is None or step > distinct.steps[min(PATIENCE, len(distinct) - 1)]:
        return None
    length = history[names.SEQUENCE_LENGTH]
    choice = entropy.head(PATIENCE).median * (length.head(PATIENCE).median if length else 1.0)
    if choice < LITTLE_CHOICE:
        return None  # one answer is all but certain
    line = (
        f"{distinct.since(step).median * samples:.3g} of {samples} completions of a group are distinct from step {step} on, "
        f"at an entropy of {entropy.head(PATIENCE).median:.3g} nats per token"
    )
    return Sign(Severity.BROKEN, step, line)


@rule(
    "exploration.diversity",
    "The completions of a group have become the same while the task is not solved.",
    needs=(names.DISTINCT_COMPLETIONS, names.REWARD),
    needs_config=True,
    least=2 * BASELINE,
    applies=lambda config: config.gconfig.n_samples > 1,
    bounds=(LITTLE_DIVERSITY, SOLVED, MIN_GAIN),
    causes=(
        "entropy has collapsed: see exploration.entropy_collapse",
        "the reward is highest for one text, whatever the prompt",
    ),
    next=MORE_ENTROPY,
)
def diversity(history: History) -> Sign | None:
    assert history.config is not None
    distinct, least = history[names.DISTINCT_COMPLETIONS], 1 / history.config.gconfig.n_samples
    if reward_range(history).width == 0 or level(history).tail(BASELINE).median > SOLVED:
        return None
    smooth = rolling_median(distinct, PATIENCE)
    step = sustained(smooth, smooth.values < least + LITTLE_DIVERSITY * (1 - least), window=2 * PATIENCE)
    if step is None:
        return None
    return Sign(_severity_of_certainty(history), step, change_line(distinct, PATIENCE))


RULES: tuple[Rule, ...] = (collapse, floor, rises, never_falls, identical, diversity)
