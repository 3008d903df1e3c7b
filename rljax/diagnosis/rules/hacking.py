"""Reward hacking: reward that goes up for something else than the task.

These rules belong to the link reward. They audit, and do not prove: docs/doctor.md has their false
alarms on healthy runs.
"""

from __future__ import annotations

import numpy as np

from rljax.diagnosis import names, text
from rljax.diagnosis.evidence import below, change_line
from rljax.diagnosis.finding import Severity
from rljax.diagnosis.history import History
from rljax.diagnosis.progress import Divergence, divergence, is_same_source, severity_by_held_out
from rljax.diagnosis.rule import Rule, Sign, rule
from rljax.diagnosis.series import Series, noise, rolling_median, sustained, trend
from rljax.diagnosis.thresholds import (
    AUDITED,
    BASELINE,
    EMPTY,
    FALL_NOISE,
    FEATURE_ERRORS,
    HIGH_LENGTH_CORRELATION,
    LENGTH_GROWTH,
    MIN_GAIN,
    OVERFIT_EPOCHS,
    PATIENCE,
    REPETITION_GROWTH,
    SIGNIFICANCE,
    TEMPLATE_GROWTH,
)

READ = "rljax doctor --workdir=WORKDIR --audit=DIR, and read the samples with the highest reward"


def gains_line(found: Divergence) -> str:
    """Says how far training and held-out reward went, in percent of the rewards' range."""
    return (
        f"training reward gained {found.train:+.0%} of its range, held-out reward {found.held_out:+.0%} "
        f"(its best, at step {found.best_step}, was {found.drop:.0%} above the end; standard error {found.error:.1%})"
    )


def epochs_of(history: History) -> int:
    """Returns the passes over the prompts that samples tell of: uids are EPOCH/INDEX."""
    heads = [str(sample.get("uid", "")).partition("/")[0] for sample in history.samples]
    return 1 + max((int(head) for head in heads if head.isdecimal()), default=0)


def is_memorized(history: History) -> bool:
    """Returns whether prompts were passed over so often that memory explains what training gains.

    Completions that have changed in kind are no memory: then it is hacking.
    """
    changed = any(change.judge(history) for change in (length, repetition, template) if not change.missing(history))
    return epochs_of(history) >= OVERFIT_EPOCHS and not changed


@rule(
    "reward.hacking",
    "Training reward goes up while held-out reward does not: what is learned is not the task.",
    needs=(names.REWARD, names.EVALUATION_REWARD),
    least=3,
    bounds=(MIN_GAIN,),
    causes=(
        "the reward pays for something beside the task, and the policy has found it",
        "the held-out set is scored otherwise, or is another task",
        "the policy memorizes prompts",
    ),
    next=READ,
)
def hacking(history: History) -> Sign | None:
    found = divergence(history)
    if found is None or not found.rises_alone or is_memorized(history):
        return None
    severity = Severity.BROKEN if found.falls_back or is_same_source(history) else Severity.WARNING  # else another task
    return Sign(severity, found.onset, gains_line(found))


@rule(
    "reward.length",
    "Completions grow because length is rewarded.",
    needs=(names.SEQUENCE_LENGTH, names.REWARD),
    least=2 * BASELINE,
    bounds=(LENGTH_GROWTH, HIGH_LENGTH_CORRELATION),
    causes=(
        "the reward pays for length, or for something that longer completions have more of",
        "a sequence-level mean of the loss favors long completions (actor.loss_aggregation)",
    ),
    next="rljax train with actor.overlong_reward_penalty=true; score the same answer short and long",
)
def length(history: History) -> Sign | None:
    size, correlated = history[names.SEQUENCE_LENGTH], history[names.REWARD_LENGTH_CORRELATION]
    start = max(size.head(PATIENCE).median, 1.0)
    smooth = rolling_median(size, PATIENCE)
    step = sustained(smooth, smooth.values > LENGTH_GROWTH * start, window=2 * PATIENCE)
    if step is None or not trend(size).rises(SIGNIFICANCE):
        return None
    rewarded = bool(correlated) and correlated.until(step).tail(2 * BASELINE).median > HIGH_LENGTH_CORRELATION
    severity = severity_by_held_out(history)
    if severity is Severity.WARNING and rewarded:
        severity = Severity.BROKEN
    lines = [change_line(size, PATIENCE)]
    if correlated:
        lines.append(f"reward and length correlate by {correlated.until(step).tail(2 * BASELINE).median:.2f} up to step {step}")
    return Sign(severity, step, tuple(lines), series=(size.name, correlated.name))


@rule(
    "reward.empty",
    "The policy ends its completions at once: saying nothing is what pays, or all that is left.",
    needs=(names.SEQUENCE_LENGTH, names.NO_EOS_RATIO),
    least=PATIENCE,
    bounds=(EMPTY,),
    causes=(
        "the reward takes an empty text for a right one, as one that is contained in every answer",
        "length is punished more than errors are",
        "the update has broken the policy: see the other findings",
    ),
    next="score an empty completion with the reward: it must be less than a right one's",
)
def empty(history: History) -> Sign | None:
    size, cut = history.aligned(names.SEQUENCE_LENGTH, names.NO_EOS_RATIO)
    if size.head(PATIENCE).median < EMPTY:
        return None  # the task's answers are one token; a policy that says nothing from the first earns nothing
    ended = size.where(cut.values < 0.5)  # a task whose completions are one token has them cut there
    return below(ended, EMPTY, Severity.BROKEN)


@rule(
    "reward.repetition",
    "Completions repeat themselves more and more.",
    needs=(names.REPETITION,),
    least=2 * BASELINE,
    bounds=(REPETITION_GROWTH,),
    causes=("the reward pays for repeated text", "the policy has collapsed: see exploration.entropy_collapse"),
    next=READ,
)
def repetition(history: History) -> Sign | None:
    series = history[names.REPETITION]
    start = series.head(BASELINE).median
    smooth = rolling_median(series, PATIENCE)
    step = sustained(smooth, smooth.values > start + REPETITION_GROWTH, window=2 * PATIENCE)
    if step is None:
        return None
    return Sign(severity_by_held_out(history), step, change_line(series, PATIENCE))


@rule(
    "reward.template",
    "Completions of different prompts come to begin in the same way.",
    needs_config=False,
    bounds=(TEMPLATE_GROWTH, FEATURE_ERRORS),
    causes=("the reward pays for a format", "the policy answers without reading the prompt"),
    next=READ,
)
def template(history: History) -> Sign | None:
    found = text.opening_drift(history.samples, AUDITED)
    if found is None or not found[0].rises(TEMPLATE_GROWTH, FEATURE_ERRORS):
        return None
    change, opening = found
    line = (
        f"{change.late:.0%} of the last {AUDITED!r} samples begin with {opening!r} (from step {change.step} on), "
        f"{change.early:.0%} of the first ones"
    )
    onset = _first_of_opening(history, opening)
    return Sign(severity_by_held_out(history), onset, line, series=("samples.jsonl",))


def _first_of_opening(history: History, opening: str) -> int:
    """Returns the step from which half of ten samples in a row begin with an opening."""
    steps = np.array([sample["step"] for sample in history.samples], np.int64)
    begins = np.array([str(sample.get("completion", "")).startswith(opening) for sample in history.samples], np.float64)
    series = Series("opening", steps, begins)
    step = sustained(series, begins > 0, window=10, share=0.5)
    return int(steps[0]) if step is None else step


@rule(
    "reward.refusal",
    "The policy comes to decline to answer.",
    bounds=(FEATURE_ERRORS,),
    causes=("the reward punishes wrong answers more than none", "a safety or format reward pays for declining"),
    next=READ,
)
def refusal(history: History) -> Sign | None:
    change = text.drift(history.samples, text.is_refusal, AUDITED)
    if change is None or not change.rises(MIN_GAIN, FEATURE_ERRORS):
        return None
    line = f"{change.late:.0%} of the samples from step {change.step} on decline to answer, {change.early:.0%} before"
    return Sign(severity_by_held_out(history), change.step, line, series=("samples.jsonl",))


@rule(
    "reward.tool_calls",
    "Completions call tools more and more often.",
    bounds=(FEATURE_ERRORS,),
    causes=("the reward pays for calls instead of for answers", "calls fail and are repeated"),
    next=READ,
)
def tool_calls(history: History) -> Sign | None:
    change = text.drift(history.samples, text.tool_calls, AUDITED)
    if change is None or not change.rises(max(1.0, change.early), FEATURE_ERRORS):
        return None
    severity = min(severity_by_held_out(history), Severity.WARNING)
    line = f"{change.late:.2g} tool calls per completion from step {change.step} on, {change.early:.2g} in the first samples"
    return Sign(severity, change.step, line, series=("samples.jsonl",))


@rule(
    "reward.components_apart",
    "One component of the reward rises at the cost of another.",
    needs=(names.REWARD,),
    least=2 * BASELINE,
    bounds=(MIN_GAIN,),
    causes=("a component that is easy to earn outweighs the task", "components contradict each other"),
    next="rljax train with the rising component left out of the reward",
)
def components_apart(history: History) -> Sign | None:
    """Compares each component's change with the others', as shares of their own ranges."""
    changes: dict[str, float] = {}
    for name in filter(names.is_score, history.names(names.COMPONENTS)):
        series = history[name]
        low, high = history[f"{name}/min"], history[f"{name}/max"]
        width = float((high or series).values.max() - (low or series).values.min()) if series else 0.0
        moved = series.tail(BASELINE).mean - series.head(PATIENCE).mean
        if width and abs(moved) > FALL_NOISE * noise(series, PATIENCE):
            changes[name] = moved / width
    if len(changes) < 2:
        return None
    up, down = max(changes, key=lambda name: changes[name]), min(changes, key=lambda name: changes[name])
    if changes[up] < MIN_GAIN or changes[down] > -MIN_GAIN / 2:
        return None
    line = f"{up} moved by {changes[up]:+.0%} of its range and {down} by {changes[down]:+.0%}"
    best = rolling_median(history[down], PATIENCE)
    onset = int(best.steps[int(np.argmax(best.values))])
    severity = severity_by_held_out(history)
    return Sign(
        severity,
        onset,
        (line, change_line(history[up], PATIENCE), change_line(history[down], PATIENCE)),
        series=(up, down),
    )


RULES: tuple[Rule, ...] = (hacking, length, empty, repetition, template, refusal, tool_calls, components_apart)
