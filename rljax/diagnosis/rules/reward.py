"""Reward signal: what the numbers that are maximized look like, and whether they mean the task."""

from __future__ import annotations

import numpy as np

from rljax.config.schema import Config
from rljax.diagnosis import names
from rljax.diagnosis.evidence import above
from rljax.diagnosis.finding import Severity
from rljax.diagnosis.history import History
from rljax.diagnosis.progress import reward_range
from rljax.diagnosis.rule import Rule, Sign, rule
from rljax.diagnosis.series import Series, correlation, noise, sustained
from rljax.diagnosis.thresholds import (
    BASELINE,
    BROKEN_REWARD_SCALE,
    CALM_REWARD,
    LONG_TAIL,
    MAX_FILTERED,
    MIN_GROUP_SPREAD,
    NOISY_REWARD,
    OPPOSITE,
    PATIENCE,
    SATURATED,
    TINY_REWARD,
)


def learns_from_reward(config: Config) -> bool:
    """Returns whether the reward is what is maximized; in distillation it may only be watched."""
    return config.actor.loss != "sft" and config.actor.reward_scaling != 0


LOWEST, HIGHEST = f"{names.REWARD}/min", f"{names.REWARD}/max"


@rule(
    "reward.all_zero",
    "Every reward is the same, at the bottom: nothing tells completions apart, so nothing is learned.",
    needs=(names.REWARD,),
    least=PATIENCE,
    applies=learns_from_reward,
    causes=(
        "the reward looks for an answer in a format that the prompt does not ask for",
        "the task is too hard for this model: it is never right",
        "answers are cut at gconfig.max_new_tokens before they end",
    ),
    next="read ten completions of WORKDIR/samples.jsonl beside the expected answers; score one completion by hand",
)
def all_zero(history: History) -> Sign | None:
    return _constant(history, at_top=False)


@rule(
    "reward.all_one",
    "Every reward is the same, at the top, from the first step on: the reward accepts anything.",
    needs=(names.REWARD,),
    least=PATIENCE,
    applies=learns_from_reward,
    causes=("the reward compares the answer with itself, or catches its errors as successes", "the task is solved already"),
    next="score an empty and a wrong completion with the reward: both must be less than the right one",
)
def all_one(history: History) -> Sign | None:
    return _constant(history, at_top=True)


def _constant(history: History, *, at_top: bool) -> Sign | None:
    """Finds one and the same reward in all trajectories from the first step on.

    A run that has come to its best reward is constant too, but did not begin so.
    """
    reward, equal = batches_of_one_reward(history)
    if not reward:
        return None
    same = equal & (reward.values == reward.values[0])
    step = sustained(reward.head(2 * BASELINE), same[: 2 * BASELINE], window=2 * PATIENCE)
    if step is None or step > reward.steps[PATIENCE - 1] or bool(reward.values[0] > 0) is not at_top:
        return None
    line = f"every reward is {reward.values[0]:g} at {int(same.sum())} of {len(reward)} steps, from step {step} on"
    return Sign(Severity.BROKEN, step, line)


def batches_of_one_reward(history: History) -> tuple[Series, np.ndarray]:
    """Returns rewards, and at which steps all of a batch are this one.

    Logs without the least and the greatest reward tell it by groups without spread; those without
    these too, by a mean that does not move.
    """
    low, high = history.aligned(LOWEST, HIGHEST)
    if high:
        return high, low.values == high.values
    for name, alone in ((names.EQUAL_REWARD_GROUPS, 1.0), (names.GROUP_REWARD_STD, 0.0)):
        reward, spread = history.aligned(names.REWARD, name)
        if spread:
            return reward, spread.values == alone
    reward = history[names.REWARD]
    return reward, np.ones(len(reward), bool)


@rule(
    "reward.constant_by_prompt",
    "Rewards differ between prompts but not between completions of one: they score the question, not the answer.",
    needs=(names.EQUAL_REWARD_GROUPS, names.REWARD),
    least=PATIENCE,
    applies=lambda config: config.gconfig.n_samples > 1 and learns_from_reward(config),
    bounds=(MIN_GROUP_SPREAD,),
    causes=(
        "the reward reads the prompt or a field of it, and not the completion",
        "all completions of a group are the same: see exploration.identical_completions",
    ),
    next="score two different completions of one prompt with the reward",
)
def constant_by_prompt(history: History) -> Sign | None:
    """Takes a mean that moves for rewards that differ, where least and greatest are not recorded."""
    equal, low, high = history.aligned(names.EQUAL_REWARD_GROUPS, LOWEST, HIGHEST)
    differ = high.values > low.values
    if not equal:
        equal, low = history.aligned(names.EQUAL_REWARD_GROUPS, names.REWARD)
        high, differ = low, low.values != low.median
    if not equal or _are_identical(history):
        return None
    step = sustained(equal, (equal.values >= 1 - MIN_GROUP_SPREAD) & differ, window=2 * PATIENCE, share=0.95)
    if step is None or step > equal.steps[min(BASELINE, len(equal) - 1)]:
        return None
    rewards = f"rewards of a batch go from {low.median:g} to {high.median:g}"
    if high is low:
        rewards = f"the mean reward goes from {low.values.min():.4g} to {low.values.max():.4g}"
    line = f"all {equal.since(step).median:.0%} of the groups have equal rewards from step {step} on, while {rewards}"
    return Sign(Severity.BROKEN, step, line)


def _are_identical(history: History) -> bool:
    distinct, samples = history[names.DISTINCT_COMPLETIONS], history.config.gconfig.n_samples if history.config else 0
    return bool(distinct) and samples > 1 and distinct.head(BASELINE).median < 1.5 / samples


@rule(
    "reward.no_spread",
    "Most groups have equal rewards, so that most of a batch teaches nothing.",
    needs=(names.EQUAL_REWARD_GROUPS, names.REWARD),
    least=PATIENCE,
    applies=lambda config: (
        config.actor.adv_estimator in ("grpo", "rloo") and config.gconfig.n_samples > 1 and learns_from_reward(config)
    ),
    causes=("the task is solved", "the task is too hard", "gconfig.n_samples is small"),
    next="filter such groups out (rollout.should_accept_fn=mixed_rewards), or raise gconfig.n_samples",
)
def no_spread(history: History) -> Sign | None:
    return above(history[names.EQUAL_REWARD_GROUPS], SATURATED, Severity.NOTE)


@rule(
    "reward.one_sample",
    "Rewards are normalized within groups of one, which leaves nothing of them.",
    needs_config=True,
    applies=lambda config: config.actor.adv_estimator in ("grpo", "rloo"),
    causes=("gconfig.n_samples is 1 with actor.reward_norm.mean_level=group",),
    next="set gconfig.n_samples to 8, or actor.reward_norm.mean_level=batch",
)
def one_sample(history: History) -> Sign | None:
    assert history.config is not None
    actor, samples = history.config.actor, history.config.gconfig.n_samples
    if samples > 1 or (actor.adv_estimator == "grpo" and actor.reward_norm.mean_level != "group"):
        return None
    line = f"gconfig.n_samples is {samples}, and the mean that is subtracted from a reward is that of its group"
    return Sign(Severity.BROKEN, history.first_step, line)


@rule(
    "reward.sign",
    "The reward has the wrong sign: the run learns the opposite of the task.",
    needs=(names.REWARD,),
    least=PATIENCE,
    bounds=(OPPOSITE,),
    applies=learns_from_reward,
    causes=("errors are counted where successes are meant", "a cost is used as a reward"),
    next="sort WORKDIR/samples.jsonl by reward: the completions with the highest must be the best ones",
)
def sign(history: History) -> Sign | None:
    return _against_a_component(history) or _never_positive(history)


def _against_a_component(history: History) -> Sign | None:
    """Finds a component whose mean moves exactly against the reward's."""
    for name in filter(names.is_score, history.names(names.COMPONENTS)):
        reward, component = history.aligned(names.REWARD, name)
        together = correlation(reward.values, component.values)
        if len(reward) >= PATIENCE and together < OPPOSITE:
            line = (
                f"rollout/reward moves against its component {name}: their correlation over {len(reward)} steps is "
                f"{together:.3f}; {reward.values[0]:.3g} and {component.values[0]:.3g} at step {reward.steps[0]}"
            )
            return Sign(Severity.BROKEN, int(reward.steps[0]), line, series=(names.REWARD, name))
    return None


def _never_positive(history: History) -> Sign | None:
    """Finds rewards that are 0 at best, while held-out rewards are positive, or fall as these rise."""
    low, high, evaluations = history[LOWEST], history[HIGHEST], history.evaluations
    if not low or not high or not evaluations or high.values.max() > 0 or low.values.min() >= 0:
        return None
    line = (
        f"no reward of the training set is above 0 (lowest {low.values.min():.3g}), "
        f"while the held-out reward is {evaluations.values[0]:.3g} at step {evaluations.steps[0]}"
    )
    return Sign(Severity.BROKEN, int(high.steps[0]), line) if evaluations.values.max() > 0 else None


@rule(
    "reward.negative_scaling",
    "Rewards are multiplied by a negative number: the run learns the opposite of the task.",
    needs_config=True,
    causes=("the reward is a cost: then the reward function is the place for its sign",),
    next="unset actor.reward_scaling",
)
def negative_scaling(history: History) -> Sign | None:
    """Reads the config alone, so that it speaks before the first step."""
    assert history.config is not None
    scaling = history.config.actor.reward_scaling
    if scaling >= 0:
        return None
    return Sign(Severity.BROKEN, history.first_step, f"actor.reward_scaling is {scaling:g}: low rewards are reinforced")


@rule(
    "reward.scale",
    "Rewards are of a scale that the objective is not made for.",
    needs=(LOWEST, HIGHEST),
    least=PATIENCE,
    bounds=(BROKEN_REWARD_SCALE, TINY_REWARD),
    applies=learns_from_reward,
    causes=("the reward counts in another unit", "actor.reward_scaling is missing"),
    next="set actor.reward_scaling so that rewards lie in [-1, 1], or so",
)
def scale(history: History) -> Sign | None:
    low, high = history.aligned(LOWEST, HIGHEST)
    largest = Series("largest reward by magnitude", high.steps, np.maximum(np.abs(low.values), np.abs(high.values)))
    shaped = 1.0 if history.config is None else abs(history.config.actor.reward_scaling)
    if history.config is not None and history.config.actor.reward_clip is not None:
        return None
    severity = Severity.NOTE if _is_normalized(history.config) else Severity.BROKEN
    sign = above(largest.map(lambda values: values * shaped), BROKEN_REWARD_SCALE, severity)
    if sign is not None:
        return sign
    width = Series("range of rewards", high.steps, (high.values - low.values) * shaped)
    tiny = sustained(width, (width.values > 0) & (width.values < TINY_REWARD), window=2 * PATIENCE)
    if tiny is None:
        return None
    return Sign(Severity.WARNING, tiny, f"rewards of a batch differ by {width.since(tiny).median:.3g} from step {tiny} on")


def _is_normalized(config: Config | None) -> bool:
    """Returns whether rewards or advantages are divided by their spread, without a critic."""
    if config is None or config.actor.adv_estimator == "gae":
        return False
    return any(norm.std_level != "none" for norm in (config.actor.reward_norm, config.actor.adv_norm))


@rule(
    "reward.filtered",
    "The filter throws most groups away, so that sampling is mostly for nothing.",
    needs=(names.REJECTED, names.GROUPS),
    least=PATIENCE,
    applies=lambda config: config.rollout.should_accept_fn is not None,
    bounds=(MAX_FILTERED,),
    causes=("most prompts are solved, or too hard", "the filter asks for too much"),
    next="take prompts of middling difficulty: those with a mean reward between 0.2 and 0.8 in a rollout of the start model",
)
def filtered(history: History) -> Sign | None:
    rejected, groups = history.aligned(names.REJECTED, names.GROUPS)
    share = rejected.values / np.maximum(rejected.values + groups.values, 1)
    return above(Series("share of groups that were rejected", groups.steps, share), MAX_FILTERED, Severity.NOTE)


@rule(
    "reward.long_tail",
    "A few completions of a batch earn most of it: the mean reward is theirs, and so is the gradient.",
    needs=(LOWEST, HIGHEST),
    least=2 * PATIENCE,
    bounds=(LONG_TAIL,),
    applies=learns_from_reward,
    causes=("the reward is a product or a ratio without a bound", "a bonus adds up over a completion"),
    next="rljax train with actor.reward_clip at the 95th percentile of the rewards",
)
def long_tail(history: History) -> Sign | None:
    """Reads histograms of more than two kinds of reward; rare successes are no tail."""
    found = []
    for step, bins in sorted(history.histograms.get(names.REWARD, {}).items()):
        tail = tail_of(bins.edges, bins.counts)
        if tail is not None:
            found.append((step, *tail))
    if len(found) < 2 * PATIENCE or 2 * len(found) < len(history.histograms[names.REWARD]):
        return None
    step, body, whole = found[0]
    line = f"19 of 20 rewards lie within {body:.3g}, all of them within {whole:.3g} (step {step}); so at {len(found)} steps"
    return Sign(Severity.WARNING, step, line, series=("histograms.jsonl",))


def tail_of(edges: np.ndarray, counts: np.ndarray) -> tuple[float, float] | None:
    """Returns the span of 19 in 20 rewards and that of all, if the second is much larger.

    Args:
      edges: [n + 1], ascending, of one width.
      counts: [n], rewards in each bin.

    Returns:
      None if there is no long tail, as of two kinds of rewards, or of rare successes alike.
    """
    occupied = np.flatnonzero(counts)
    if len(occupied) < 3:
        return None
    centers = (edges[:-1] + edges[1:]) / 2
    shares = np.cumsum(counts) / counts.sum()
    body = float(centers[int(np.searchsorted(shares, 0.95))] - centers[occupied[0]])
    whole = float(centers[occupied[-1]] - centers[occupied[0]])
    above_lowest = np.cumsum(counts[occupied[1:]])
    middle = occupied[1 + int(np.searchsorted(above_lowest, above_lowest[-1] / 2))]
    typical = float(centers[middle] - centers[occupied[0]])  # of those that are more than the lowest
    return (body, whole) if whole > LONG_TAIL * max(body, typical, float(edges[1] - edges[0])) else None


@rule(
    "reward.variance",
    "The mean reward of a batch is noisy: what a step gains can't be seen, and gradients are as noisy.",
    needs=(names.REWARD,),
    least=3 * BASELINE,
    bounds=(NOISY_REWARD, CALM_REWARD),
    causes=("batches have few prompts", "prompts are of very different difficulty"),
    next="rljax train with train_dataset.batch_size as the evidence says",
)
def variance(history: History) -> Sign | None:
    """Takes the spread about a rolling median for the standard error of a batch's mean."""
    reward, width = history[names.REWARD], reward_range(history).width
    spread = noise(reward, PATIENCE)
    if not width or not spread > NOISY_REWARD * width:
        return None
    groups = history[names.GROUPS]
    now = groups.median if groups else float(history.config.batch_size) if history.config else float("nan")
    line = f"{names.REWARD} varies by {spread:.3g} from step to step (standard deviation about its rolling median)"
    if np.isfinite(now):
        wanted = now * min(spread / (CALM_REWARD * width), 1e3) ** 2
        line += f"; {wanted:.0f} prompts per update in place of {now:.0f} would bring that to {CALM_REWARD * width:.2g}"
    return Sign(Severity.NOTE, int(reward.steps[0]), line)


RULES: tuple[Rule, ...] = (
    all_zero,
    all_one,
    constant_by_prompt,
    no_spread,
    one_sample,
    sign,
    negative_scaling,
    scale,
    filtered,
    long_tail,
    variance,
)
