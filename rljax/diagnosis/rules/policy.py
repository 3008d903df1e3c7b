"""Policy update: how far it goes, and whether sampler and learner mean the same policy."""

from __future__ import annotations

import dataclasses

import numpy as np

from rljax.config.schema import Config
from rljax.diagnosis import names
from rljax.diagnosis.evidence import above, away_from, line_of, standing
from rljax.diagnosis.finding import Severity
from rljax.diagnosis.history import History
from rljax.diagnosis.progress import improves_held_out, lost_share
from rljax.diagnosis.rule import Rule, Sign, rule
from rljax.diagnosis.series import Series, rolling_median, sustained
from rljax.diagnosis.thresholds import (
    BASELINE,
    BROKEN_CAPPED,
    FATAL_KL,
    FATAL_REFERENCE_DRIFT,
    IDLE_CLIPPING,
    KL_TARGET,
    LARGE_KL,
    MAX_CAPPED,
    MAX_CLIP_RATIO,
    MAX_DISAGREEMENT,
    MAX_IMPORTANCE_DEVIATION,
    MAX_ROUNDING,
    NOTED_DISAGREEMENT,
    PATIENCE,
    REFERENCE_DRIFT,
    STILL_RATIO,
)


def _recomputes(config: Config) -> bool:
    """Returns whether the proximal policy is scored by the learner itself."""
    actor = config.actor
    return actor.loss != "sft" and actor.recompute_logprob and actor.prox_logp_method == "recompute"


@rule(
    "policy.kl",
    "The policy moves too far in one step: twice the KL divergence that a step should have, or more.",
    needs=(names.APPROX_KL,),
    bounds=(KL_TARGET, LARGE_KL, FATAL_KL),
    causes=(
        "the learning rate is too high",
        "too many minibatches per batch, or several epochs over it",
        "advantages are not normalized, or the rewards' scale has changed",
    ),
    next="rljax train with actor.optimizer.lr a third of it; then with actor.ppo_n_minibatches=1",
)
def kl(history: History) -> Sign | None:
    """Tells large steps that go on, or cost reward, from those that a run has behind it.

    The first steps of a run are often the largest: the policy has most to learn, and the
    optimizer's moments have seen little. They are a strain until they have lasted.
    """
    series = history[names.APPROX_KL]
    fatal, large, long = _fatal(series), above(series, LARGE_KL, Severity.BROKEN), _over_target(series)
    found = [sign for sign in (fatal, large, long) if sign is not None]
    if not found:
        return None
    sign = min(found, key=lambda sign: sign.step)
    if series.tail(2 * PATIENCE).median <= 2 * KL_TARGET:
        return dataclasses.replace(sign, over=True)
    at_start = large is None or large.step < series.head(2 * BASELINE).steps[-1]
    if fatal is None and at_start and len(series.since(sign.step)) < 3 * BASELINE and not lost_share(history):
        return dataclasses.replace(sign, severity=Severity.WARNING)
    return sign


def _fatal(series: Series) -> Sign | None:
    """Finds a single step that makes another policy."""
    fatal = series.where(series.values > FATAL_KL)
    if not fatal:
        return None
    line = f"{series.name} is {fatal.values[0]:.4g} nats per token at step {fatal.steps[0]}, above {FATAL_KL!r}"
    return Sign(Severity.BROKEN, int(fatal.steps[0]), line)


def _over_target(series: Series) -> Sign | None:
    """Finds a KL divergence over twice its target at most steps of a while."""
    smooth = rolling_median(series, 2 * PATIENCE)
    step = sustained(smooth, smooth.values > 2 * KL_TARGET, window=PATIENCE, share=1.0)
    if step is None:
        return None
    first = series.until(step).tail(2 * PATIENCE)  # what the first such median is of
    onset = int(first.steps[first.values > 2 * KL_TARGET][0])
    line = (
        f"{series.name} is {first.median:.3g} nats per token (median of steps {first.steps[0]} to {first.steps[-1]}), "
        f"over twice a target of {KL_TARGET!r}"
    )
    return Sign(Severity.BROKEN, onset, line)


@rule(
    "policy.clip_ratio",
    "Many tokens are clipped: the update wants to leave the region in which its surrogate is valid.",
    needs=(names.CLIP_RATIO,),
    least=PATIENCE,
    bounds=(MAX_CLIP_RATIO,),
    causes=("the learning rate is too high", "too many minibatches per batch", "batches are stale"),
    next="rljax train with half of actor.ppo_n_minibatches; then with a third of actor.optimizer.lr",
)
def clip_ratio(history: History) -> Sign | None:
    return above(history[names.CLIP_RATIO], MAX_CLIP_RATIO, Severity.BROKEN)


@rule(
    "policy.importance_weight",
    "The ratio of current to proximal policy is away from 1 on average: minibatches of one batch pull apart.",
    needs=(names.IMPORTANCE_WEIGHT,),
    least=PATIENCE,
    applies=lambda config: config.actor.ppo_n_minibatches > 1,
    bounds=(MAX_IMPORTANCE_DEVIATION,),
    causes=("the learning rate is too high", "too many minibatches per batch"),
    next="rljax train with half of actor.ppo_n_minibatches",
)
def importance_weight(history: History) -> Sign | None:
    return away_from(history[names.IMPORTANCE_WEIGHT], 1.0, MAX_IMPORTANCE_DEVIATION, Severity.BROKEN)


@rule(
    "policy.unit_ratio",
    "With one minibatch the ratio of current to proximal policy is 1 by definition, and here it is not.",
    needs=(f"{names.IMPORTANCE_WEIGHT}/min", f"{names.IMPORTANCE_WEIGHT}/max"),
    needs_config=True,
    applies=lambda config: config.actor.ppo_n_minibatches == 1 and _recomputes(config),
    bounds=(MAX_ROUNDING,),
    causes=(
        "score and update do not compute the same numbers: another dtype, attention kernel or packing",
        "the learner is not deterministic (deterministic=true; on GPUs --xla_gpu_deterministic_ops=true)",
        "the weights changed between score and update, or the update is made several times",
    ),
    next="rljax train with deterministic=true for ten steps; rljax parity --config=CONFIG",
)
def unit_ratio(history: History) -> Sign | None:
    low, high = history.aligned(f"{names.IMPORTANCE_WEIGHT}/min", f"{names.IMPORTANCE_WEIGHT}/max")
    away = Series(
        "largest distance of importance_weight from 1", low.steps, np.maximum(np.abs(low.values - 1), np.abs(high.values - 1))
    )
    return above(away, MAX_ROUNDING, Severity.BROKEN)


@rule(
    "policy.sampler_disagrees",
    "Sampler and learner give the same tokens other probabilities under the same weights.",
    needs=(names.BEHAVE_LOG_RATIO_LAG0,),
    applies=_recomputes,
    bounds=(NOTED_DISAGREEMENT, MAX_DISAGREEMENT),
    causes=(
        "temperature, top_p or top_k of the sampler are not those of the learner's log-probs",
        "another model: rotary base, chat template, a checkpoint that was loaded in part",
        "another precision: dtype of weights, attention or key/value cache, quantization",
    ),
    next="rljax parity --config=CONFIG; rljax doctor --workdir=WORKDIR --rescore",
)
def sampler_disagrees(history: History) -> Sign | None:
    """Reads tokens of lag 0: the mean log-ratio is minus the KL divergence, 0 if they agree."""
    series = history[names.BEHAVE_LOG_RATIO_LAG0]
    apart = series.map(np.abs)
    share = (apart.values > MAX_DISAGREEMENT).mean()
    if share > 0.5:
        first = apart.where(apart.values > MAX_DISAGREEMENT)
        line = (
            f"log-probs of sampler and learner are {first.values[0]:.3g} nats apart on average at step {first.steps[0]}, "
            f"on tokens that the newest weights drew ({len(first)} of {len(apart)} steps with such tokens)"
        )
        return Sign(Severity.BROKEN, int(first.steps[0]), line)
    if apart.median > NOTED_DISAGREEMENT:
        line = f"log-probs of sampler and learner are {apart.median:.3g} nats apart on average (median), on tokens of lag 0"
        return Sign(Severity.NOTE, int(apart.steps[0]), line)
    return None


DISAGREES = "sampler and learner disagree under the same weights: see policy.sampler_disagrees"
STALE = "tokens are stale: see freshness.stale_weights; lower rollout.max_head_offpolicyness"
UNCAPPED = "actor.behav_imp_weight_cap is unset, so that few tokens weigh as much as all others"


@rule(
    "policy.behave_imp_weight",
    "The ratio of proximal to behavior policy is away from 1 on average: the decoupled weights distort the gradient.",
    needs=(names.BEHAVE_WEIGHT,),
    least=PATIENCE,
    bounds=(MAX_IMPORTANCE_DEVIATION,),
    causes=(DISAGREES, STALE, UNCAPPED),
    next="rljax train with rollout.max_head_offpolicyness=0 for 20 steps: what is left is disagreement, not staleness",
    symptom=True,
)
def behave_imp_weight(history: History) -> Sign | None:
    sign = away_from(history[names.BEHAVE_WEIGHT], 1.0, MAX_IMPORTANCE_DEVIATION, Severity.BROKEN)
    return None if sign is None else dataclasses.replace(sign, causes=_causes_of_weights(history))


def _causes_of_weights(history: History) -> tuple[str, ...]:
    """Orders the causes by what tokens of lag 0, where only disagreement is left, tell of them."""
    fresh, config = history[names.BEHAVE_LOG_RATIO_LAG0], history.config
    agree = bool(fresh) and fresh.map(np.abs).median < MAX_DISAGREEMENT
    first = [UNCAPPED] if config is not None and config.actor.behav_imp_weight_cap is None else []
    return (*first, *((STALE, DISAGREES) if agree else (DISAGREES, STALE)))


@rule(
    "policy.no_update",
    "The policy does not change from step to step.",
    needs=(names.LEARNING_RATE,),
    least=PATIENCE,
    causes=(
        "actor.optimizer.lr is 0, or the schedule has come to its end",
        "actor.optimizer.gradient_clipping is so small that nothing is left of the gradient",
        "parameters are frozen, or adapters are not in the optimizer",
    ),
    next="rljax train with actor.optimizer.lr=1e-6 and actor.optimizer.gradient_clipping=1.0 for ten steps",
)
def no_update(history: History) -> Sign | None:
    return _no_rate(history) or _no_movement(history)


def _no_rate(history: History) -> Sign | None:
    rate = history[names.LEARNING_RATE]
    zero = sustained(rate, rate.values == 0, window=2 * PATIENCE, share=1.0)
    if zero is None or zero == rate.steps[-1]:
        return None
    return Sign(
        Severity.BROKEN, zero, f"{rate.name} is 0 from step {zero} on ({(rate.values == 0).sum()} of {len(rate)} steps)"
    )


def _no_movement(history: History) -> Sign | None:
    """Finds gradients of which clipping leaves nothing, and minibatches that leave the ratio at 1."""
    gradient, config = history[names.GRAD_NORM], history.config
    if not gradient or config is None:
        return None
    if config.actor.ppo_n_minibatches > 1 and (sign := _still(history, config)) is not None:
        return sign
    clip = config.actor.optimizer.gradient_clipping
    if clip and gradient.median > IDLE_CLIPPING * clip:
        line = (
            f"{gradient.name} is {gradient.median:.3g} (median), {gradient.median / clip:.3g} times "
            f"actor.optimizer.gradient_clipping={clip:g}"
        )
        return Sign(Severity.BROKEN, int(gradient.steps[0]), line, series=(gradient.name,))
    return None


def _still(history: History, config: Config) -> Sign | None:
    """Finds updates at the full rate, by advantages other than 0, that move no token."""
    weights = (f"{names.IMPORTANCE_WEIGHT}/min", f"{names.IMPORTANCE_WEIGHT}/max")
    low, high, rate, advantage = history.aligned(*weights, names.LEARNING_RATE, f"{names.ADVANTAGE}/max")
    moving = (rate.values >= config.actor.optimizer.lr / 2) & (rate.values > 0) & (advantage.values > 0)
    farthest = Series(low.name, low.steps, np.maximum(1 - low.values, high.values - 1)).where(moving)
    if len(farthest) < 2 * PATIENCE or farthest.quantile(0.9) > STILL_RATIO:
        return None
    line = (
        f"no token's ratio of current to proximal policy is further than {farthest.quantile(0.9):.2g} from 1 (nine of ten of "
        f"{len(farthest)} steps), at a learning rate of {rate.where(moving).median:.3g} and advantages of up to "
        f"{advantage.where(moving).median:.3g}"
    )
    causes = ("actor.optimizer.eps is large beside the gradient", "parameters are frozen, or not those that are published")
    return Sign(
        Severity.BROKEN, int(farthest.steps[0]), line, causes=(*causes, "the learning rate is far too low"), series=weights
    )


@rule(
    "policy.capped",
    "The cap on behavior weights catches many tokens: with mode mask they teach nothing.",
    needs=(names.BEHAVE_CAP_RATIO,),
    least=3,
    bounds=(MAX_CAPPED, BROKEN_CAPPED),
    causes=(
        "actor.behav_imp_weight_cap is too low: weights are 1 where sampler and learner agree",
        "sampler and learner disagree, or tokens are stale: see policy.sampler_disagrees and freshness.stale_weights",
    ),
    next="rljax train with actor.behav_imp_weight_cap=5",
)
def capped(history: History) -> Sign | None:
    series = history[names.BEHAVE_CAP_RATIO]
    return standing(above(series, BROKEN_CAPPED, Severity.BROKEN), above(series, MAX_CAPPED, Severity.WARNING))


@rule(
    "policy.optimizer_reset",
    "The optimizer forgets: its moments have seen no more steps than before, so that every update is a first one.",
    needs=(names.OPTIMIZER_STEPS,),
    least=PATIENCE,
    causes=(
        "the optimizer is made anew for each step, or its state is dropped when weights are published or offloaded",
        "a checkpoint without moments is loaded again and again",
    ),
    next="rljax replay --workdir=WORKDIR --step=STEP under a debugger, and compare the optimizer's state before and after",
)
def optimizer_reset(history: History) -> Sign | None:
    """Finds steps in which the count has not risen although no update was skipped."""
    seen, skipped = history[names.OPTIMIZER_STEPS], history[names.SKIPPED]
    still = Series(seen.name, seen.steps[1:], np.diff(seen.values))
    taken = ~np.isin(still.steps, skipped.steps[skipped.values > 0])
    step = sustained(still, (still.values <= 0) & taken, window=PATIENCE)
    if step is None or not still:
        return None
    return Sign(Severity.BROKEN, step, f"{seen.name} is {seen.since(step).median:.4g} from step {step} on, and does not rise")


@rule(
    "policy.reference_kl",
    "The policy is far from its reference: what the start model could do is being forgotten.",
    needs=(names.REFERENCE_KL,),
    least=2 * BASELINE,
    bounds=(REFERENCE_DRIFT, FATAL_REFERENCE_DRIFT),
    causes=("actor.kl_ctl is small for this learning rate", "the reward pulls away from all that the start model does"),
    next="rljax train with actor.kl_ctl three times as large",
)
def reference_kl(history: History) -> Sign | None:
    series = history[names.REFERENCE_KL]
    step = sustained(series, series.values > REFERENCE_DRIFT, window=2 * BASELINE)
    if step is None or series.tail(PATIENCE).median < REFERENCE_DRIFT:
        return None
    fallen = lost_share(history) > 0 or series.tail(PATIENCE).median > FATAL_REFERENCE_DRIFT
    severity = Severity.NOTE if improves_held_out(history) else Severity.BROKEN if fallen else Severity.WARNING
    return Sign(severity, step, line_of(series, step, PATIENCE, f"above {REFERENCE_DRIFT!r} nats per token"))


RULES: tuple[Rule, ...] = (
    kl,
    clip_ratio,
    importance_weight,
    unit_ratio,
    sampler_disagrees,
    behave_imp_weight,
    no_update,
    capped,
    optimizer_reset,
    reference_kl,
)
