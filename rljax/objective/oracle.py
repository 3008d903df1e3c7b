"""The policy objective in float64 numpy: the terms of losses.py put together.

The gradient is derived by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from rljax.objective import losses
from rljax.objective.spec import Objective, TokenArrays


class LossAndGradient(NamedTuple):
    loss: float  # sum(loss_weight * token_loss)
    d_logp: np.ndarray  # [R, m]
    d_entropy: np.ndarray  # [R, m]


def policy_objective(logp: np.ndarray, entropy: np.ndarray, tokens: TokenArrays, objective: Objective) -> LossAndGradient:
    """Computes the objective as `policy_objective` of every backend does, without the metrics.

    The arguments are the same, as numpy arrays.
    """
    mask, zeros = tokens.mask, np.zeros(logp.shape)
    weight = losses.select(tokens.loss_weight, mask)
    if objective.loss == "sft":
        term = losses.negative_log_likelihood(logp, mask, weight)
        return LossAndGradient(term.sum, term.grads["logp"], zeros)
    proximal = proximal_of(logp, tokens, objective)
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
    term = _surrogate(logp, proximal, tokens, weighted, objective)
    loss, d_logp, d_entropy = term.sum, term.grads["logp"], zeros
    for coef, term in _kl_terms(logp, tokens, weight, objective):
        loss, d_logp = loss + coef * term.sum, d_logp + coef * term.grads["logp"]
    if objective.entropy_coef:
        term = losses.entropy_bonus(entropy, mask, weight)
        loss, d_entropy = loss + objective.entropy_coef * term.sum, objective.entropy_coef * term.grads["entropy"]
    return LossAndGradient(loss, d_logp, d_entropy)


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
) -> losses.Term:
    arrays = (logp, proximal, tokens.advantage, tokens.mask, weight)
    clip: dict[str, Any] = dict(clip_low=objective.clip_low, clip_high=objective.clip_high)
    if objective.loss == "cispo":
        return losses.cispo(*arrays, **clip)
    if objective.ratio_level == "token":
        return losses.clipped_surrogate(*arrays, **clip, dual_clip=objective.dual_clip)
    return losses.sequence_surrogate(*arrays, tokens.segment_ids, **clip, dual_clip=objective.dual_clip)
