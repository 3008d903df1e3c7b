"""Numbers: what is not finite, and what is far beyond all others."""

from __future__ import annotations

import numpy as np

from rljax.diagnosis import names
from rljax.diagnosis.finding import Severity
from rljax.diagnosis.history import History
from rljax.diagnosis.rule import Rule, Sign, rule
from rljax.diagnosis.rules.reward import learns_from_reward
from rljax.diagnosis.series import Series, rolling_median, sustained
from rljax.diagnosis.thresholds import (
    BASELINE,
    EXTREME_LOGP,
    GRADIENT_GROWTH,
    GRADIENT_SPIKE,
    OUTLIER_REWARD,
    PATIENCE,
)

EVALUATED_NOTHING = ("eval-rollout/", "eval-reward/")  # means over no episode are no fault of the numbers


@rule(
    "numbers.not_finite",
    "A loss, a gradient or another metric is NaN or infinite.",
    causes=(
        "an overflow in the update: the learning rate, or a half-precision dtype",
        "a reward or an advantage that is NaN",
        "log-probs of tokens that the sampler can't have drawn",
    ),
    next="rljax replay --workdir=WORKDIR --step=STEP under a debugger; with actor.dtype=float32",
)
def not_finite(history: History) -> Sign | None:
    first: dict[str, int] = {
        name: int(steps[0])
        for name, steps in history.not_finite.items()
        if len(steps) and not name.startswith(EVALUATED_NOTHING)
    }
    skipped = history[names.SKIPPED]
    found = skipped.where(skipped.values > 0)
    if found:
        first[names.SKIPPED] = int(found.steps[0])
    if not first:
        return None
    step = min(first.values())
    culprits = sorted(name for name, at in first.items() if at == step)
    skips = f"; {found.values.sum():.0f} updates were skipped because of their gradient" if found else ""
    line = f"{', '.join(culprits[:4])} {'is' if len(culprits) == 1 else 'are'} not finite at step {step}{skips}"
    return Sign(
        Severity.BROKEN,
        step,
        line.replace(f"{names.SKIPPED} is not finite", "a gradient is not finite"),
        series=tuple(culprits),
    )


@rule(
    "numbers.grad_norm",
    "Gradients grow out of all proportion, or have spikes again and again.",
    needs=(names.GRAD_NORM,),
    least=2 * BASELINE,
    bounds=(GRADIENT_GROWTH, GRADIENT_SPIKE),
    causes=(
        "advantages or rewards of a few batches are far beyond the others",
        "the learning rate is too high",
        "a numerical fault in a kernel or a dtype",
    ),
    next="rljax replay --workdir=WORKDIR --step=STEP; look at the advantages of that batch",
)
def grad_norm(history: History) -> Sign | None:
    series = history[names.GRAD_NORM]
    typical = series.median
    spikes = series.where((series.values > GRADIENT_SPIKE * typical) & (typical > 0))  # gradients of 0 are no measure
    if len(spikes) >= 2:
        line = (
            f"{series.name} is {spikes.values[0]:.3g} at step {spikes.steps[0]}, {spikes.values[0] / typical:.3g} times its "
            f"median; {len(spikes)} such steps (p95 {series.quantile(0.95):.3g}, largest {series.values.max():.3g})"
        )
        return Sign(Severity.BROKEN, int(spikes.steps[0]), line)
    smooth, start = rolling_median(series, PATIENCE), series.head(BASELINE).median
    step = sustained(smooth, (smooth.values > GRADIENT_GROWTH * start) & (start > 0), window=PATIENCE)
    if step is not None:
        line = (
            f"{series.name} is {smooth.since(step).median:.3g} from step {step} on, {start:.3g} in the first {BASELINE!r} steps"
        )
        return Sign(Severity.WARNING, step, line)
    if spikes:
        line = f"{series.name} is {spikes.values[0]:.3g} at step {spikes.steps[0]}, its median {typical:.3g}"
        return Sign(Severity.NOTE, int(spikes.steps[0]), line)
    return None


@rule(
    "numbers.extreme_logp",
    "Tokens were sampled to which their own policy gives next to no probability.",
    needs=(f"{names.BEHAVIOR_LOGP}/min",),
    least=PATIENCE,
    bounds=(EXTREME_LOGP,),
    causes=("log-probs belong to other tokens than those that were drawn", "sampling at a very high temperature"),
    next="rljax parity --config=CONFIG",
)
def extreme_logp(history: History) -> Sign | None:
    lowest = history[f"{names.BEHAVIOR_LOGP}/min"]
    step = sustained(lowest, lowest.values < EXTREME_LOGP, window=PATIENCE)
    if step is None:
        return None
    return Sign(Severity.WARNING, step, f"{lowest.name} is {lowest.since(step).median:.3g} nats (median) from step {step} on")


@rule(
    "numbers.outlier_rewards",
    "A few rewards are far beyond all others, and decide the batches that they are in.",
    needs=(f"{names.REWARD}/min", f"{names.REWARD}/max"),
    least=2 * PATIENCE,
    bounds=(OUTLIER_REWARD,),
    applies=learns_from_reward,
    causes=("the reward overflows or divides by almost 0 on some inputs", "a sentinel such as -1e6 passes for a reward"),
    next="find the samples with the largest reward by magnitude in WORKDIR/samples.jsonl; set actor.reward_clip",
)
def outlier_rewards(history: History) -> Sign | None:
    low, high = history.aligned(f"{names.REWARD}/min", f"{names.REWARD}/max")
    magnitude = Series("largest reward by magnitude", high.steps, np.maximum(np.abs(low.values), np.abs(high.values)))
    typical = magnitude.where(magnitude.values > 0).median
    found = magnitude.where(magnitude.values > OUTLIER_REWARD * typical)
    if not found:
        return None
    line = (
        f"the largest reward is {found.values[0]:.3g} at step {found.steps[0]}, {typical:.3g} at the median step; "
        f"{len(found)} of {len(magnitude)} steps have one like it"
    )
    return Sign(Severity.BROKEN, int(found.steps[0]), line)


RULES: tuple[Rule, ...] = (not_finite, grad_norm, extreme_logp, outlier_rewards)
