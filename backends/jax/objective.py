"""The objective in JAX: terms put together as an `Objective` says, with the metrics of an update."""

from __future__ import annotations

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float

from rljax.backends.jax import losses
from rljax.objective.spec import PREFIX, MeanArrays, Objective, TokenArrays


def policy_objective(
    logp: Float[Array, "R m"],
    entropy: Float[Array, "R m"],
    tokens: TokenArrays,
    objective: Objective,
) -> tuple[Float[Array, ""], dict[str, MeanArrays]]:
    """The loss of some rows of a minibatch and its metrics; differentiable in logp and entropy.

    Losses of the parts of a minibatch add up to that of the whole: the normalizer is in
    tokens.loss_weight.

    Args:
      logp, entropy: of the current policy, nats; anything where tokens.mask is False.
      objective: static under jit.

    Returns:
      sum(loss_weight * token_loss), and metrics by name, unweighted over the trained tokens. The
      loss is not among them, for it is a sum over parts and not a mean: the caller adds it up.
    """
    if objective.loss == "sft":
        return supervised_objective(logp, tokens.loss_weight, tokens.mask)
    mask = tokens.mask
    proximal = proximal_of(logp, tokens, objective)
    weight = jnp.where(mask, losses.wide(tokens.loss_weight), 0.0)
    weighted = weight
    if objective.decoupled:
        weighted = weight * losses.behavior_weight(
            proximal,
            tokens.behavior_logp,
            mask,
            tokens.segment_ids,
            cap=objective.weight_cap,
            mode=objective.cap_mode,
            level=objective.cap_level,
        )
    loss = _surrogate(logp, proximal, tokens, weighted, objective)
    loss = loss + _kl_terms(logp, tokens, weight, objective)
    if objective.entropy_coef:
        loss = loss + objective.entropy_coef * losses.entropy_bonus(entropy, mask, weight).sum
    return loss, _metrics(stop_gradient(logp), stop_gradient(entropy), proximal, tokens, objective)


def _kl_terms(logp: Array, tokens: TokenArrays, weight: Array, objective: Objective) -> Array | float:
    """KL to the reference and to the teacher, each times its coefficient; 0 where there is
    neither.
    """
    if not (objective.kl_coef or objective.distill_coef):
        return 0.0
    mask, given = tokens.mask, (tokens.behavior_logp, tokens.mask, tokens.segment_ids)
    importance = losses.behavior_weight(logp, *given, cap=objective.weight_cap, mode="clamp", level="token")
    loss: Array | float = 0.0
    if objective.kl_coef:
        estimator = objective.kl_estimator
        kl = losses.kl_loss(logp, tokens.reference_logp, importance, mask, weight, estimator=estimator)
        loss = loss + objective.kl_coef * kl.sum
    if objective.distill_coef:
        loss = loss + objective.distill_coef * losses.distillation(logp, tokens.teacher_logp, importance, mask, weight).sum
    return loss


def proximal_of(logp: Float[Array, "R m"], tokens: TokenArrays, objective: Objective) -> Float[Array, "R m"]:
    """Log-probs of the proximal policy, no gradient: given, the behavior policy's, interpolated,
    or the current one's.
    """
    if objective.proximal == "behavior":
        return tokens.behavior_logp
    if objective.proximal == "interpolated" and tokens.interpolation is not None:
        return losses.interpolated_proximal(logp, tokens.behavior_logp, tokens.interpolation, tokens.mask)
    return stop_gradient(logp) if tokens.proximal_logp is None else tokens.proximal_logp


def supervised_objective(
    logp: Float[Array, "R m"],
    loss_weight: Float[Array, "R m"],
    mask: Bool[Array, "R m"],
) -> tuple[Float[Array, ""], dict[str, MeanArrays]]:
    """Negative log-likelihood of labeled tokens: sum(loss_weight * -logp), and its unweighted mean
    as a metric, nats.
    """
    loss = losses.negative_log_likelihood(logp, mask, loss_weight).sum
    return loss, {f"{PREFIX}/nll": mean(-stop_gradient(logp), mask)}


def value_objective(
    values: Float[Array, "R m"],
    proximal_values: Float[Array, "R m"],
    returns: Float[Array, "R m"],
    loss_weight: Float[Array, "R m"],
    mask: Bool[Array, "R m"],
    *,
    clip: float | None,
) -> tuple[Float[Array, ""], dict[str, MeanArrays]]:
    """Squared error of the critic: sum(loss_weight * value_loss), and the moments that explained
    variance is made of.

    `rljax.objective.explained_variance` takes it from them when they are merged.
    """
    loss = losses.value_loss(values, proximal_values, returns, mask, loss_weight, clip=clip).sum
    values, returns = losses.select(stop_gradient(values), mask), losses.select(returns, mask)
    metrics = {
        "critic/value": mean(values, mask, spread=True),
        "critic/return": mean(returns, mask, spread=True),
        "critic/squared_error": mean((values - returns) ** 2, mask),
        "critic/squared_return": mean(returns**2, mask),
    }
    if clip is not None:
        moved = jnp.abs(values - losses.select(proximal_values, mask)) > clip
        metrics["critic/clip_ratio"] = mean(moved, mask)
    return loss, metrics


def mean(x: Array, mask: Bool[Array, "R m"], spread: bool = False) -> MeanArrays:
    """Unweighted over the trained tokens; with min and max where it is a distribution."""
    x = losses.wide(x)
    kept = mask if spread else jnp.zeros_like(mask)
    low, high = jnp.min(x, where=kept, initial=jnp.inf), jnp.max(x, where=kept, initial=-jnp.inf)
    return MeanArrays(jnp.sum(jnp.where(mask, x, 0.0)), jnp.sum(mask), low, high)


def _surrogate(logp: Array, proximal: Array, tokens: TokenArrays, weight: Array, objective: Objective) -> Array:
    clip = dict(clip_low=objective.clip_low, clip_high=objective.clip_high)
    if objective.loss == "cispo":
        return losses.cispo(logp, proximal, tokens.advantage, tokens.mask, weight, **clip).sum
    if objective.ratio_level == "token":
        surrogate = losses.clipped_surrogate
        return surrogate(logp, proximal, tokens.advantage, tokens.mask, weight, **clip, dual_clip=objective.dual_clip).sum
    return losses.sequence_surrogate(
        logp, proximal, tokens.advantage, tokens.mask, weight, tokens.segment_ids, **clip, dual_clip=objective.dual_clip
    ).sum


def _metrics(logp: Array, entropy: Array, proximal: Array, tokens: TokenArrays, objective: Objective) -> dict[str, MeanArrays]:
    mask = tokens.mask
    drift = losses.log_ratio(logp, proximal, mask)
    if objective.ratio_level == "sequence":
        drift = losses.over_segments(drift, mask, tokens.segment_ids) / losses.over_segments(
            jnp.ones_like(drift), mask, tokens.segment_ids
        )
    ratio = jnp.exp(drift)
    dual_clip = objective.dual_clip if objective.loss == "ppo" else None
    used = losses.clipped_ratio(
        ratio, losses.select(tokens.advantage, mask), objective.clip_low, objective.clip_high, dual_clip
    )
    behave = jnp.exp(losses.log_ratio(proximal, tokens.behavior_logp, mask))
    metrics = {
        "importance_weight": mean(ratio, mask, spread=True),
        "behave_imp_weight": mean(behave, mask, spread=True),
        "approx_kl": mean(jnp.expm1(drift) - drift, mask),
        "clip_ratio": mean(used != ratio, mask),
        "entropy": mean(entropy, mask),
    }
    if objective.decoupled and objective.weight_cap is not None:
        metrics["behave_cap_ratio"] = mean(behave > objective.weight_cap, mask)
    if objective.kl_coef:
        metrics["reference_kl"] = mean(
            losses.kl_penalty(logp, tokens.reference_logp, mask, estimator=objective.kl_estimator), mask
        )
    if objective.distill_coef:
        metrics["teacher_kl"] = mean(losses.kl_penalty(logp, tokens.teacher_logp, mask, estimator="k1"), mask)
    if objective.proximal == "interpolated" and tokens.proximal_logp is not None:
        metrics["proximal_error"] = mean(jnp.abs(proximal - tokens.proximal_logp), mask, spread=True)
    return {f"{PREFIX}/{name}": value for name, value in metrics.items()}
