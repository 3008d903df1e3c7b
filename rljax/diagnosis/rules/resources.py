"""Resources: time, memory and throughput."""

from __future__ import annotations

import numpy as np

from rljax.diagnosis import names
from rljax.diagnosis.evidence import above, change_line
from rljax.diagnosis.finding import Severity
from rljax.diagnosis.history import History
from rljax.diagnosis.planned import compare
from rljax.diagnosis.rule import Rule, Sign, rule
from rljax.diagnosis.series import Series, rolling_median, sustained, trend
from rljax.diagnosis.thresholds import (
    BASELINE,
    LEAK,
    LEAK_BYTES,
    LENGTH_DOUBLED,
    NOTED_IDLE,
    PATIENCE,
    PLANNED_MEMORY,
    PLANNED_TIME,
    SIGNIFICANCE,
    SLOW_REWARD,
    SLOWDOWN,
)


@rule(
    "resources.memory_growth",
    "Memory in use grows step by step, and the run will not end before it is full.",
    needs=(names.HOST_MEMORY,),
    least=3 * BASELINE,
    bounds=(LEAK, LEAK_BYTES),
    causes=("something keeps the batches or the weights of past steps", "shapes differ every step, and each is compiled"),
    next="rljax train for 20 steps under memray or tracemalloc, and compare steps 10 and 20",
)
def memory_growth(history: History) -> Sign | None:
    return _leak(history.rl[names.HOST_MEMORY]) or _leak(history.rl[names.DEVICE_MEMORY])


def _leak(memory: Series) -> Sign | None:
    """Finds growth in each third of the steps after the first ones, which fill caches."""
    later = memory.after(BASELINE)
    if len(later) < 2 * BASELINE or not trend(later).rises(SIGNIFICANCE):
        return None
    marks = [float(np.median(part)) for part in np.array_split(later.values, 4)]
    steps = np.diff(marks)
    grown = marks[-1] - marks[0]
    if (steps < 0.15 * grown).any() or grown < max(LEAK * marks[0], LEAK_BYTES):
        return None
    per_step = trend(later).slope
    line = (
        f"{memory.name} grows by {per_step / 2**20:.3g} MiB per step: {marks[0] / 2**30:.3g} GiB around step "
        f"{later.steps[len(later) // 8]}, {marks[-1] / 2**30:.3g} GiB at the end"
    )
    return Sign(Severity.BROKEN, int(later.steps[0]), line, series=(memory.name,))


@rule(
    "resources.throughput_drop",
    "Steps take several times as long as they did, for completions of one length.",
    needs=(names.WALL,),
    least=2 * BASELINE,
    bounds=(SLOWDOWN,),
    causes=(
        "the sampler, or a server behind it, has slowed down or lost replicas",
        "completions have grown: see resources.seq_len_growth",
        "another process uses the machine, or memory is swapped",
    ),
    next="compare timeperf/step, rollout/wait/learner and timeperf/reward before and after the drop",
)
def throughput_drop(history: History) -> Sign | None:
    wall = _per_length(history.rl)
    if len(wall) < 2 * BASELINE:
        return None
    start = wall.after(2).head(2 * BASELINE).median
    smooth = rolling_median(wall, PATIENCE)
    step = sustained(smooth, smooth.values > SLOWDOWN * start, window=2 * PATIENCE)
    if step is None:
        return None
    severity = Severity.BROKEN if smooth.last > SLOWDOWN * start else Severity.NOTE
    parts = [history.rl[name] for name in (names.STEP, names.LEARNER_WAIT, names.REWARD_SECONDS)]
    lines = [change_line(part.since(int(wall.steps[2])), PATIENCE) for part in parts if len(part) > 2 * PATIENCE]
    return Sign(
        severity, step, (f"a step takes {smooth.since(step).median:.3g} s from step {step} on, {start:.3g} s before", *lines)
    )


def _per_length(history: History) -> Series:
    """Returns seconds per step, less what longer completions explain of them."""
    wall, size = history[names.WALL], history[names.SEQUENCE_LENGTH]
    if not size:
        return wall
    grown = np.maximum(size.values / max(size.head(BASELINE).median, 1e-9), 1.0)
    return Series(wall.name, wall.steps, wall.values / np.interp(wall.steps, size.steps, grown))


@rule(
    "resources.seq_len_growth",
    "Completions have become twice as long as they were, and steps with them.",
    needs=(names.SEQUENCE_LENGTH,),
    least=2 * BASELINE,
    bounds=(LENGTH_DOUBLED,),
    causes=("longer completions are better at the task", "length is rewarded: see reward.length"),
    next="look at reward.length and at held-out reward; set gconfig.max_new_tokens to what the task needs",
)
def seq_len_growth(history: History) -> Sign | None:
    size = history[names.SEQUENCE_LENGTH]
    smooth, start = rolling_median(size, PATIENCE), size.head(PATIENCE).median
    step = sustained(smooth, smooth.values > LENGTH_DOUBLED * start, window=2 * PATIENCE)
    return None if step is None else Sign(Severity.NOTE, step, change_line(size, PATIENCE))


@rule(
    "resources.slow_reward",
    "The learner waits for rewards.",
    needs=(names.REWARD_SECONDS, names.LEARNER_WAIT, names.WALL),
    least=2 * PATIENCE,
    bounds=(SLOW_REWARD,),
    causes=("the reward calls a slow service, or runs code", "reward.workers is small"),
    next="rljax train with reward.workers doubled; make the reward async if it waits for a service",
)
def slow_reward(history: History) -> Sign | None:
    """Compares the seconds of a step's reward calls, spread over the workers, with its time."""
    seconds, wall, wait = history.rl.aligned(names.REWARD_SECONDS, names.WALL, names.LEARNER_WAIT)
    config = history.config
    if config is None:
        return None
    workers = config.reward.workers
    calls = config.batch_size * config.gconfig.n_samples
    busy = Series("share of the time in rewards", wall.steps, seconds.values * calls / workers / np.maximum(wall.values, 1e-9))
    waiting = wait.values / np.maximum(wall.values, 1e-9)
    step = sustained(busy, (busy.values > 0.5) & (waiting > SLOW_REWARD), window=2 * PATIENCE)
    if step is None:
        return None
    line = (
        f"a reward call takes {seconds.since(step).median:.3g} s (mean), {calls} of them on {workers} workers a step; "
        f"the learner waits {float(np.median(waiting)):.0%} of the time"
    )
    return Sign(Severity.WARNING, step, line)


@rule(
    "resources.learner_idle",
    "The learner waits for batches for much of the time.",
    needs=(names.LEARNER_WAIT, names.WALL),
    least=2 * PATIENCE,
    bounds=(NOTED_IDLE,),
    causes=("sampling is slower than learning: give it more devices", "rollout.max_head_offpolicyness is 0: RL is synchronous"),
    next="rljax train with rollout.max_head_offpolicyness raised by one; or more devices for the sampler in allocation_mode",
)
def learner_idle(history: History) -> Sign | None:
    return _idle(history, names.LEARNER_WAIT, "the learner waits for a batch")


@rule(
    "resources.sampler_idle",
    "The sampler may not begin new prompts for much of the time, because of the lag bound.",
    needs=(names.PRODUCER_WAIT, names.WALL),
    least=2 * PATIENCE,
    applies=lambda config: "+" in config.allocation_mode,  # else both share their devices, and take turns
    bounds=(NOTED_IDLE,),
    causes=("learning is slower than sampling: give it more devices",),
    next="move devices from the sampler to the learner in allocation_mode",
)
def sampler_idle(history: History) -> Sign | None:
    return _idle(history, names.PRODUCER_WAIT, "the producer waits for a version")


def _idle(history: History, name: str, words: str) -> Sign | None:
    wait, wall = history.rl.aligned(name, names.WALL)
    share = Series(f"share of the time in which {words}", wall.steps, wait.values / np.maximum(wall.values, 1e-9))
    sign = above(share, NOTED_IDLE, Severity.NOTE, window=2 * PATIENCE)
    if sign is None or share.median < NOTED_IDLE:
        return None
    return Sign(Severity.NOTE, sign.step, f"{words} {share.median:.0%} of the time (median of {len(share)} steps)")


@rule(
    "resources.plan",
    "Memory or time is not as the plan estimated it.",
    bounds=(PLANNED_MEMORY, PLANNED_TIME),
    causes=(
        "prompts and completions have other lengths than the plan assumes",
        "a small model waits for kernel launches and the host, of which the plan knows nothing",
        "another process uses the devices",
    ),
    next="rljax plan with --prompt_tokens and --completion_tokens of the run, on the devices that it has",
)
def plan(history: History) -> Sign | None:
    out = [each for each in compare(history.plan) if each.is_out]
    return Sign(Severity.NOTE, history.last_step, tuple(map(str, out))) if out else None


RULES: tuple[Rule, ...] = (
    memory_growth,
    throughput_drop,
    seq_len_growth,
    slow_reward,
    learner_idle,
    sampler_idle,
    plan,
)
