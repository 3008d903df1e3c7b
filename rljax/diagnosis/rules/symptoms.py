"""Symptoms in the reward: late signs of a break somewhere else, or of an update that goes nowhere.

Each yields to every break of another kind that came before it, or soon after.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rljax.diagnosis import names
from rljax.diagnosis.evidence import change_line
from rljax.diagnosis.finding import Severity
from rljax.diagnosis.history import History
from rljax.diagnosis.progress import divergence, improves_held_out, level, lost_share
from rljax.diagnosis.rule import Rule, Sign, rule
from rljax.diagnosis.rules.hacking import gains_line
from rljax.diagnosis.rules.reward import batches_of_one_reward, learns_from_reward
from rljax.diagnosis.series import Series, noise, rolling_median, trend
from rljax.diagnosis.thresholds import (
    BASELINE,
    EVALUATION_ERRORS,
    FALL_NOISE,
    LITTLE_DOUBT,
    LITTLE_GAIN,
    LOST_REWARD,
    MIN_GAIN,
    PATIENCE,
    SATURATED,
    SOLVED,
    STILL_RISING,
)


@rule(
    "policy.reversed",
    "The reward falls from the first steps on: updates make good completions less likely.",
    needs=(names.REWARD,),
    least=2 * BASELINE,
    bounds=(LOST_REWARD, FALL_NOISE),
    causes=(
        "advantages, or the loss, have the wrong sign",
        "the learning rate is too high",
        "another term outweighs the reward: a bonus, a penalty",
    ),
    next="rljax train with actor.optimizer.lr=0 for ten steps (the reward must stay), then with a tenth of the rate",
    applies=learns_from_reward,
    symptom=True,
)
def turned(history: History) -> Sign | None:
    return _fall(history, from_the_start=True)


@rule(
    "reward.falls",
    "The reward falls after it had risen, or stood still.",
    needs=(names.REWARD,),
    least=2 * BASELINE,
    bounds=(LOST_REWARD, FALL_NOISE),
    causes=(
        "a link before it broke: see the other findings",
        "the learning rate is too high for what is left to learn",
        "the policy has left the region where the reward, or the reference, holds",
    ),
    next="rljax train from the last checkpoint before the fall, with a third of actor.optimizer.lr",
    applies=learns_from_reward,
    symptom=True,
)
def falls(history: History) -> Sign | None:
    """Names the reward first where all of it went to the bottom at once."""
    sign, step = _fall(history, from_the_start=False), _dead_since(history)
    if sign is None or step is None:
        return sign
    reward = history[names.REWARD]
    before = reward.until(step - 1).tail(PATIENCE)
    line = f"every reward is {reward.values[-1]:g} from step {step} on; the {PATIENCE} steps before had {before.median:.4g}"
    return dataclasses.replace(
        sign,
        severity=Severity.BROKEN,
        step=step,
        evidence=line,
        causes=(
            "what the reward asks, as a service, a sandbox or a file, has failed, and that passes for a wrong answer",
            "the policy has collapsed: see the other findings",
        ),
        next="score ten completions of a step before the fall again: they must have the rewards that they had",
    )


def _dead_since(history: History) -> int | None:
    """Returns the step of a fall, within a few steps, to a reward that all steps have since.

    None for a reward that fell slowly, or lies above its least.
    """
    reward, equal = batches_of_one_reward(history)
    if len(reward) <= 2 * PATIENCE:
        return None
    same = equal & (reward.values == reward.values[-1])
    differ = np.flatnonzero(~same)
    start = int(differ[-1]) + 1 if len(differ) else 0
    if not PATIENCE <= start <= len(reward) - PATIENCE:
        return None
    share, step = level(history), int(reward.steps[start])
    before, best = share.until(step - 1).tail(PATIENCE).median, float(rolling_median(share, PATIENCE).values.max())
    return step if share.values[-1] == share.values.min() and before > best / 2 else None


def _fall(history: History, *, from_the_start: bool) -> Sign | None:
    """Finds a fall from the best rolling median to the end.

    A reward that stood still before it fell late has fallen, and was not reversed.
    """
    share, reward, lost = level(history), history[names.REWARD], lost_share(history)
    if not lost:
        return None
    smooth = rolling_median(share, PATIENCE)
    best = int(np.argmax(smooth.values))
    started_best = float(smooth.values[best]) - share.head(PATIENCE).median < MIN_GAIN / 2
    stood = _stood_still(share, float(smooth.values[best]), lost) if started_best else None
    if (started_best and stood is None) is not from_the_start:
        return None
    onset = int(reward.steps[0] if from_the_start else smooth.steps[best] if stood is None else stood)
    fell = reward.since(onset) if stood is None else reward
    line = f"{change_line(fell, PATIENCE)}: {lost:.0%} of the rewards' range is lost"
    severity = Severity.WARNING if improves_held_out(history) else Severity.BROKEN  # else prompts have become harder
    return Sign(severity, onset, line)


def _stood_still(share: Series, best: float, lost: float) -> int | None:
    """Returns the last step at which a reward that falls late was where it began.

    Args:
      best: its best rolling median.
      lost: fall from there to the end.

    Returns:
      None if the reward fell in the first steps, or all the while.
    """
    smooth = rolling_median(share, PATIENCE)
    before = share.until(int(smooth.steps[smooth.values >= best - lost / 2][-1]))  # the first half of the fall
    early = before.head(len(before) // 2)  # has a quarter of the fall, where that is steady
    if len(before) <= 2 * BASELINE or -trend(early).change > lost / 8:
        return None
    near = np.flatnonzero(smooth.values >= early.median - max(noise(early, PATIENCE), lost / 10))
    return int(share.steps[near[-1] + PATIENCE // 2])  # the middle of that median's window


@rule(
    "policy.drift",
    "Held-out reward falls while training reward does not rise: the policy moves, and not toward the task.",
    needs=(names.REWARD, names.EVALUATION_REWARD),
    least=3,
    bounds=(MIN_GAIN, EVALUATION_ERRORS),
    causes=(
        "the reward is noise for what the task wants, and actor.kl_ctl is too small to hold the policy where it began",
        "the learning rate is too high for how much the reward tells",
        "held-out prompts are of another kind than those that are trained on",
    ),
    next="rljax train with actor.kl_ctl=0.01, which also measures how far it goes (ppo_actor/update/reference_kl)",
    applies=learns_from_reward,
    symptom=True,
)
def drift(history: History) -> Sign | None:
    found = divergence(history)
    if found is None or not found.falls_back or found.train > MIN_GAIN:
        return None
    return Sign(Severity.BROKEN, found.onset, gains_line(found))


@rule(
    "policy.no_progress",
    "The reward does not move, although groups have spread and the policy is updated.",
    needs=(names.REWARD, names.EQUAL_REWARD_GROUPS),
    least=4 * BASELINE,
    bounds=(LITTLE_GAIN, LITTLE_DOUBT, STILL_RISING),
    causes=(
        "advantages do not belong to the tokens, or trajectories, that they are given to",
        "another term outweighs the reward: a penalty, a KL divergence",
        "the learning rate is too low",
        "the task is too hard, or the reward too noisy for this batch size: see reward.variance",
    ),
    next="rljax train with ten times actor.optimizer.lr for 50 steps; rljax parity --config=CONFIG for the objective",
    applies=learns_from_reward,
    symptom=True,
)
def no_progress(history: History) -> Sign | None:
    share, equal = level(history), history[names.EQUAL_REWARD_GROUPS]
    if equal.median > SATURATED or not 0.02 < share.head(BASELINE).median < SOLVED:
        return None
    found = trend(share)
    gain = share.tail(BASELINE).mean - share.head(BASELINE).mean
    if abs(gain) > LITTLE_GAIN or found.rises(LITTLE_DOUBT):
        return None
    if improves_held_out(history) or trend(history.evaluations).rises(STILL_RISING):  # slowly, but it moves
        return None
    line = f"{change_line(history[names.REWARD], BASELINE)}: no trend over {len(share)} steps (p = {found.p_value:.2g})"
    return Sign(Severity.WARNING, int(share.steps[BASELINE]), line)


RULES: tuple[Rule, ...] = (turned, falls, drift, no_progress)
