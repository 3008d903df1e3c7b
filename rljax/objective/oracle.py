"""The policy objective in float64 numpy: the terms of losses.py put together.

The gradient is derived by hand, and the metrics are of what the terms did.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from rljax.objective import losses
from rljax.objective.spec import PREFIX, WITH_ADVANTAGE, MeanArrays, Objective, TokenArrays


class LossAndGradient(NamedTuple):
    loss: float  # sum(loss_weight * token_loss)
    d_logp: np.ndarray  # [R, m]
    d_entropy: np.ndarray  # [R, m]
    metrics: dict[str, MeanArrays]  # by name, as every backend has them


def policy_objective(logp: np.ndarray, entropy: np.ndarray, tokens: TokenArrays, objective: Objective) -> LossAndGradient:
    """Computes the objective and its metrics as `policy_objective` of every backend does.

    The arguments are the same, as numpy arrays.
    """
    mask, zeros = tokens.mask, np.zeros(logp.shape)
    weight = losses.select(tokens.loss_weight, mask)
    if objective.loss == "sft":
        term = losses.negative_log_likelihood(logp, mask, weight)
        return LossAndGradient(term.sum, term.grads["logp"], zeros, {f"{PREFIX}/nll": _mean(-logp.real, mask)})
    proximal = proximal_of(logp, tokens, objective)
    ratio, applied = None, np.ones(logp.shape)
    if objective.decoupled:
        given = (proximal, tokens.behavior_logp, mask, tokens.segment_ids)
        ratio = losses.behavior_ratio(*given, level=objective.cap_level)
        applied = losses.capped(ratio, objective.weight_cap, objective.cap_mode)
    surrogate = _surrogate(logp, proximal, tokens, weight * applied, objective)
    loss, d_logp, d_entropy = surrogate.sum, surrogate.grads["logp"], zeros
    for coef, term in _kl_terms(logp, tokens, weight, objective):
        loss, d_logp = loss + coef * term.sum, d_logp + coef * term.grads["logp"]
    if objective.entropy_coef:
        term = losses.entropy_bonus(entropy, mask, weight)
        loss, d_entropy = loss + objective.entropy_coef * term.sum, objective.entropy_coef * term.grads["entropy"]
    metrics = _metrics(logp.real, entropy.real, np.real(proximal), tokens, objective, surrogate)
    if ratio is not None:
        metrics |= _weight_metrics(np.real(ratio), np.real(applied), mask, objective)
    return LossAndGradient(loss, d_logp, d_entropy, metrics)


def _kl_terms(
    logp: np.ndarray, tokens: TokenArrays, weight: np.ndarray, objective: Objective
) -> Iterator[tuple[float, losses.Term]]:
    """Yields the KL to the reference and to the teacher, each with its coefficient."""
    mask, given = tokens.mask, (tokens.behavior_logp, tokens.mask, tokens.segment_ids)
    rho = losses.behavior_weight(logp, *given, cap=objective.weight_cap, mode="clamp", level="token")
    if objective.kl_coef:
        estimator = objective.kl_estimator
        yield objective.kl_coef, losses.kl_loss(logp, tokens.reference_logp, rho, mask, weight, estimator=estimator)
    if objective.distill_coef:
        yield objective.distill_coef, losses.distillation(logp, tokens.teacher_logp, rho, mask, weight)


def proximal_of(logp: np.ndarray, tokens: TokenArrays, objective: Objective) -> np.ndarray:
    """Returns log-probs of the proximal policy, [R, m], nats.

    They are given, the behavior policy's, interpolated, or the current policy's.
    """
    if objective.proximal == "behavior":
        return tokens.behavior_logp
    if objective.proximal == "interpolated" and tokens.interpolation is not None:
        return losses.interpolated_proximal(logp, tokens.behavior_logp, tokens.interpolation, tokens.mask)
    return logp if tokens.proximal_logp is None else tokens.proximal_logp


def _surrogate(
    logp: np.ndarray, proximal: np.ndarray, tokens: TokenArrays, weight: np.ndarray, objective: Objective
) -> losses.Surrogate:
    arrays = (logp, proximal, tokens.advantage, tokens.mask, weight)
    clip: dict[str, Any] = dict(clip_low=objective.clip_low, clip_high=objective.clip_high)
    if objective.loss == "cispo":
        return losses.cispo(*arrays, **clip)
    if objective.ratio_level == "token":
        return losses.clipped_surrogate(*arrays, **clip, dual_clip=objective.dual_clip)
    return losses.sequence_surrogate(*arrays, tokens.segment_ids, **clip, dual_clip=objective.dual_clip)


def _metrics(
    logp: np.ndarray,
    entropy: np.ndarray,
    proximal: np.ndarray,
    tokens: TokenArrays,
    objective: Objective,
    surrogate: losses.Surrogate,
) -> dict[str, MeanArrays]:
    """Measures the surrogate, and how far the policies are apart, over both sets of tokens."""
    mask = tokens.mask
    drift = losses.log_ratio(logp, proximal, mask)[0]
    of_tokens = {"approx_kl": np.expm1(drift) - drift, "clip_ratio": surrogate.clipped, "entropy": entropy}
    spreads = {
        "importance_weight": surrogate.ratio,
        "behave_imp_weight": np.exp(losses.log_ratio(proximal, tokens.behavior_logp, mask)[0]),
    }
    if tokens.reference_logp is not None:
        of_tokens["reference_kl"] = losses.kl_penalty(logp, tokens.reference_logp, mask, estimator=objective.kl_estimator)
    if tokens.teacher_logp is not None:
        of_tokens["teacher_kl"] = losses.kl_penalty(logp, tokens.teacher_logp, mask, estimator="k1")
    active = mask & (tokens.advantage != 0)
    metrics = {f"{WITH_ADVANTAGE}/share": _mean(active, mask)}
    for prefix, chosen in ((PREFIX, mask), (WITH_ADVANTAGE, active)):
        metrics |= {f"{prefix}/{name}": _mean(x, chosen) for name, x in of_tokens.items()}
        metrics |= {f"{prefix}/{name}": _mean(x, chosen, spread=True) for name, x in spreads.items()}
    if objective.proximal == "interpolated" and tokens.proximal_logp is not None:
        metrics[f"{PREFIX}/proximal_error"] = _mean(np.abs(proximal - tokens.proximal_logp), mask, spread=True)
    return metrics


def _weight_metrics(ratio: np.ndarray, applied: np.ndarray, mask: np.ndarray, objective: Objective) -> dict[str, MeanArrays]:
    """Measures the decoupled objective's weights as applied, and the share above the cap."""
    metrics = {f"{PREFIX}/applied_weight": _mean(applied, mask, spread=True)}
    if objective.weight_cap is not None:
        metrics[f"{PREFIX}/behave_cap_ratio"] = _mean(ratio > objective.weight_cap, mask)
    return metrics


def _mean(x: np.ndarray, mask: np.ndarray, *, spread: bool = False) -> MeanArrays:
    """Returns the unweighted mean over the tokens of a mask; with min and max if `spread`."""
    x = x[mask].astype(np.float64)
    low, high = (x.min(initial=np.inf), x.max(initial=-np.inf)) if spread else (np.inf, -np.inf)
    return MeanArrays(float(x.sum()), float(x.size), float(low), float(high))
