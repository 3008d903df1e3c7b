"""Thresholds of all rules, each with its unit and where it comes from.

"tuned" ones were set on the tuning half of the library of broken and healthy runs, and judged on
its other half (docs/doctor.md).
"""

from __future__ import annotations

from typing import Self


class Threshold(float):
    """Number that a rule compares with.

    Example: Threshold(0.4, "share of tokens", "PPO practice: ...")
    """

    unit: str
    origin: str

    def __new__(cls, value: float, unit: str, origin: str) -> Self:
        threshold = super().__new__(cls, value)
        threshold.unit, threshold.origin = unit, origin
        return threshold

    def __repr__(self) -> str:
        return f"{float(self):g}"


class Count(int):
    """Threshold that counts something: steps, samples, passes."""

    unit: str
    origin: str

    def __new__(cls, value: int, unit: str, origin: str) -> Self:
        count = super().__new__(cls, value)
        count.unit, count.origin = unit, origin
        return count

    def __repr__(self) -> str:
        return str(int(self))


# Statistics
SIGNIFICANCE = Threshold(1e-3, "p-value", "about 60 rules with one or two tests each: less than one false alarm in ten runs")
PATIENCE = Count(5, "steps", "four of five steps in a row: a single noisy step never speaks")
OVER = Threshold(0.2, "share of the last ten steps", "what was sustained, and is at so few of them, has passed")
BASELINE = Count(10, "steps", "first RL steps, that later ones are compared with")
SIMULTANEOUS_STEPS = Count(3, "steps", "onsets closer than this count as simultaneous; then the order of links decides")
SIMULTANEOUS_SHARE = Threshold(0.03, "share of the RL steps", "likewise, in a longer run")

# The plan beside what was measured
PLANNED_MEMORY = Threshold(0.1, "share of the estimate", "what the plan is held to (docs/plan.md)")
PLANNED_TIME = Threshold(2.0, "times the estimate, or its part", "rooflines are no closer where steps are short")

# Environment
MAX_TRUNCATION = Threshold(0.05, "share of completions", "practice: above it the length limit shapes the reward")
BROKEN_TRUNCATION = Threshold(0.3, "share of completions", "one in three answers is not heard to its end; tuned")
MAX_DUPLICATES = Threshold(0.1, "share of a batch's groups", "a shuffled epoch has none")
BROKEN_DUPLICATES = Threshold(0.5, "share of a batch's groups", "the batch is at most half as large as it says")
LONE = Threshold(1.5, "episodes per group", "most groups have a single one: its baseline is itself")
SMALL_GROUPS = Threshold(
    0.5, "share of gconfig.n_samples", "half of the samples are lost; a filter of single episodes may mean to"
)
MAX_FAILURES = Threshold(0.05, "share of episodes", "practice; failures are not random, so the rest is biased")
BROKEN_FAILURES = Threshold(0.3, "share of episodes", "tuned")
MAX_TIMEOUTS = Threshold(0.02, "share of episodes", "tuned")

# Reward signal
MIN_GROUP_SPREAD = Threshold(0.02, "share of groups whose rewards differ", "tuned; a task with any spread has more")
OPPOSITE = Threshold(-0.99, "correlation", "a component that is the reward but for its sign")
BROKEN_REWARD_SCALE = Threshold(100.0, "reward units", "losses and clips are made for rewards of about 1; tuned")
TINY_REWARD = Threshold(
    1e-3, "reward units", "the default of actor.reward_norm.std_floor, below which spread is taken for none"
)
MAX_FILTERED = Threshold(0.75, "share of groups", "practice of dynamic sampling (DAPO): three of four samples are wasted")
SATURATED = Threshold(0.9, "share of groups with equal rewards", "one group in ten still teaches something")

# Policy update
KL_TARGET = Threshold(0.0125, "nats per token", "target of a step: PPO practice is 0.01 to 0.02; tuned")
LARGE_KL = Threshold(0.1, "nats per token", "eight times the target: five steps are enough")
FATAL_KL = Threshold(1.0, "nats per token", "a single step that makes another policy")
MAX_CLIP_RATIO = Threshold(0.4, "share of tokens", "practice: beyond it the clip, not the gradient, decides")
MAX_IMPORTANCE_DEVIATION = Threshold(0.1, "mean ratio", "a tenth of the gradient's weight is distortion; tuned")
MAX_ROUNDING = Threshold(
    1e-3, "ratio", "rounding of log-probs in bfloat16 logits with float32 log-sum-exp; exactly 0 on one device"
)
NOTED_DISAGREEMENT = Threshold(2e-3, "nats per token", "bfloat16 sampler beside a float32 learner")
MAX_DISAGREEMENT = Threshold(0.01, "nats per token", "five times what precision explains; tuned")
IDLE_CLIPPING = Threshold(1e3, "times the clip", "less than a thousandth of the gradient is left")
STILL_RATIO = Threshold(1e-3, "ratio", "runs that learn have tokens at 0.1; rounding is far below")
MAX_CAPPED = Threshold(0.1, "share of tokens", "healthy runs stay below 0.02")
BROKEN_CAPPED = Threshold(0.5, "share of tokens", "the cap, not the objective, decides what is learned from")
REFERENCE_DRIFT = Threshold(1.0, "nats per token", "practice: past it completions have little in common with the reference's")
FATAL_REFERENCE_DRIFT = Threshold(10.0, "nats per token", "a token of the policy is one in e10 of the reference's")

HELD_UP = Threshold(0.5, "share of the RL steps", "more is undone or left out than is learned from")
OFTEN = Threshold(0.1, "share of the RL steps", "fewer skipped updates are outliers")

# Freshness
STALE_KL = Threshold(0.03, "nats per token", "less is noise; tuned")
STALE_FACTOR = Threshold(10.0, "times what lag and updates explain", "healthy runs stay below 6; tuned")
STALE_GROWTH = Threshold(4.0, "times that of the first steps", "where one minibatch shows no updates; tuned")
LARGE_LAG = Threshold(8.0, "versions", "practice: asynchronous runs stay within 8; tuned")
MAX_STALE_SHARE = Threshold(0.25, "share of groups", "a quarter of the sampling is for nothing")

# Numbers
GRADIENT_GROWTH = Threshold(10.0, "times that of the first steps", "tuned")
GRADIENT_SPIKE = Threshold(100.0, "times the median", "healthy runs have spikes of up to 20; tuned")
EXTREME_LOGP = Threshold(-40.0, "nats", "e-18: no such token is drawn in a run's lifetime")
OUTLIER_REWARD = Threshold(50.0, "times the median step's largest", "tuned")
LONG_TAIL = Threshold(10.0, "times the span of 19 in 20 rewards", "tuned")
NOISY_REWARD = Threshold(0.05, "share of the rewards' range", "a gain of 1% per step takes 25 steps to see")
CALM_REWARD = Threshold(0.02, "share of the rewards' range", "a gain of 1% per step takes 4 steps to see")

# Progress
MIN_GAIN = Threshold(0.1, "share of the rewards' range", "smaller gains of training reward are not held against an evaluation")
FLAT_GAIN = Threshold(0.2, "share of the gain in training", "held-out reward that gains less has not moved with it; tuned")
EVALUATION_ERRORS = Threshold(4.0, "standard errors of an evaluation", "an evaluation has several tests in a run; tuned")

# Reward hacking
AUDITED = Count(40, "samples", "ten steps of the default stats_logger.samples_per_step, early and late")
FEATURE_ERRORS = Threshold(4.0, "standard errors", "five features are compared")
LENGTH_GROWTH = Threshold(1.25, "times that of the first steps", "tuned; held-out reward tells reasoning from padding")
HIGH_LENGTH_CORRELATION = Threshold(0.2, "correlation within a batch", "tuned")
REPETITION_GROWTH = Threshold(0.15, "share of 4-grams", "tuned")
EMPTY = Threshold(1.5, "tokens", "most completions are their end alone")
TEMPLATE_GROWTH = Threshold(0.4, "share of samples", "tuned")

# Evaluation
PROTOCOL_GAP = Threshold(0.1, "share of the rewards' range", "tuned; the same policy scores the same in both, but for chance")
BROKEN_EVALUATION_FAILURES = Threshold(0.15, "share of episodes", "tuned")
OVERFIT_EPOCHS = Count(3, "passes over the prompts", "practice: the first two passes rarely memorize")

# Critic
MIN_EXPLAINED = Threshold(-0.03, "share of the returns' variance", "0 is what the mean explains, less the noise of a batch")
USELESS_CRITIC = Threshold(0.25, "share of the returns' variance", "tuned")
VALUE_OFFSET = Threshold(0.2, "share of the rewards' range", "tuned")
RETURN_SCALE = Threshold(5.0, "times the largest reward", "a return of one reward at the end is that reward; tuned")

# Exploration
COLLAPSED_ENTROPY = Threshold(0.2, "times that of the first steps", "tuned")
FALLEN_ENTROPY = Threshold(0.5, "times that of the first steps", "where the reward is below its start too; tuned")
TURNED_ENTROPY = Threshold(0.1, "share of that of the first steps", "from there on it rises, or falls, for good")
SOLVED = Threshold(0.85, "share of the rewards' range", "above it a policy without entropy is one that knows; tuned")
ENTROPY_RISE = Threshold(1.5, "times that of the first steps", "tuned")
ENTROPY_RISE_NATS = Threshold(0.1, "nats per token", "tuned")
STILL_ENTROPY = Threshold(0.02, "share of that of the first steps", "a policy that learns becomes surer")
STILL_RISING = Threshold(0.05, "p-value", "a run whose reward still rises has not lost its way")
LITTLE_CHOICE = Threshold(0.3, "nats per completion", "below it three in four completions may be one and the same")
LITTLE_DIVERSITY = Threshold(0.05, "of the way from all equal to all distinct", "tuned")

# Resources
LEAK = Threshold(0.2, "share of the memory in use", "tuned; caches fill in the first steps, which are left out")
LEAK_BYTES = Threshold(2.0**28, "bytes", "256 MiB: less is noise of the allocator")
SLOWDOWN = Threshold(3.0, "times the first steps", "other load on a machine rarely does more; tuned")
LENGTH_DOUBLED = Threshold(2.0, "times that of the first steps", "a step costs twice as much")
SLOW_REWARD = Threshold(0.5, "share of the time", "the learner is idle every other second")
NOTED_IDLE = Threshold(0.5, "share of the time", "half of the devices' time is for nothing")

# Symptoms
LOST_REWARD = Threshold(0.1, "share of the rewards' range", "tuned")
FALL_NOISE = Threshold(3.0, "standard deviations of a step about the rolling median", "medians of five steps vary half as much")
LITTLE_GAIN = Threshold(0.08, "share of the rewards' range", "three standard errors of ten steps' mean of 32 prompts")
LITTLE_DOUBT = Threshold(0.01, "p-value", "a trend this sure is progress, however slow")
