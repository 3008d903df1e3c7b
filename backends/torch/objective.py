"""The objective in PyTorch: terms combined as an `Objective` says, and the metrics of an update."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from rljax.backends.torch import losses
from rljax.objective.losses import Surrogate
from rljax.objective.spec import PREFIX, WITH_ADVANTAGE, MeanArrays, Objective, TokenArrays


def policy_objective(
    logp: Float[Tensor, "R m"],
    entropy: Float[Tensor, "R m"],
    tokens: TokenArrays,
    objective: Objective,
) -> tuple[Float[Tensor, ""], dict[str, MeanArrays]]:
    """Computes loss and metrics of some rows of a minibatch; differentiable in logp and entropy.

    Losses of the parts of a minibatch add up to that of the whole: tokens.loss_weight includes the
    normalizer.

    Args:
      logp, entropy: of the current policy, nats; anything where tokens.mask is False.

    Returns:
      sum(loss_weight * token_loss), and metrics by name, unweighted: over the trained tokens
      (ppo_actor/update/) and over those that have an advantage (ppo_actor/with_advantage/). The
      loss is not among them, for it is a sum over parts and not a mean: the caller adds it up.
    """
    if objective.loss == "sft":
        return supervised_objective(logp, tokens.loss_weight, tokens.mask)
    mask = tokens.mask
    proximal = proximal_of(logp, tokens, objective)
    weight = torch.where(mask, losses.wide(tokens.loss_weight), 0.0)
    ratio, applied = None, torch.ones_like(weight)
    if objective.decoupled:
        given = (proximal, tokens.behavior_logp, mask, tokens.segment_ids)
        ratio = losses.behavior_ratio(*given, level=objective.cap_level)
        applied = losses.capped(ratio, objective.weight_cap, objective.cap_mode)
    surrogate = _surrogate(logp, proximal, tokens, weight * applied, objective)
    loss = surrogate.sum
    loss = loss + _kl_terms(logp, tokens, weight, objective)
    if objective.entropy_coef:
        loss = loss + objective.entropy_coef * losses.entropy_bonus(entropy, mask, weight).sum
    metrics = _metrics(logp.detach(), entropy.detach(), proximal, tokens, objective, surrogate)
    return loss, metrics | ({} if ratio is None else _weight_metrics(ratio, applied, mask, objective))


def _kl_terms(logp: Tensor, tokens: TokenArrays, weight: Tensor, objective: Objective) -> Tensor | float:
    """Returns the KL to reference and teacher, each times its coefficient; 0 without either."""
    if not (objective.kl_coef or objective.distill_coef):
        return 0.0
    mask, given = tokens.mask, (tokens.behavior_logp, tokens.mask, tokens.segment_ids)
    importance = losses.behavior_weight(logp, *given, cap=objective.weight_cap, mode="clamp", level="token")
    loss: Tensor | float = 0.0
    if objective.kl_coef:
        estimator = objective.kl_estimator
        kl = losses.kl_loss(logp, tokens.reference_logp, importance, mask, weight, estimator=estimator)
        loss = loss + objective.kl_coef * kl.sum
    if objective.distill_coef:
        loss = loss + objective.distill_coef * losses.distillation(logp, tokens.teacher_logp, importance, mask, weight).sum
    return loss


def proximal_of(logp: Float[Tensor, "R m"], tokens: TokenArrays, objective: Objective) -> Float[Tensor, "R m"]:
    """Returns log-probs of the proximal policy, without gradient.

    They are given, the behavior policy's, interpolated, or the current policy's.
    """
    if objective.proximal == "behavior":
        return tokens.behavior_logp
    if objective.proximal == "interpolated" and tokens.interpolation is not None:
        return losses.interpolated_proximal(logp, tokens.behavior_logp, tokens.interpolation, tokens.mask)
    return logp.detach() if tokens.proximal_logp is None else tokens.proximal_logp


def supervised_objective(
    logp: Float[Tensor, "R m"],
    loss_weight: Float[Tensor, "R m"],
    mask: Bool[Tensor, "R m"],
) -> tuple[Float[Tensor, ""], dict[str, MeanArrays]]:
    """Computes the negative log-likelihood of labeled tokens, sum(loss_weight * -logp).

    Returns it, and its unweighted mean as a metric, nats.
    """
    loss = losses.negative_log_likelihood(logp, mask, loss_weight).sum
    return loss, {f"{PREFIX}/nll": mean(-logp.detach(), mask)}


def value_objective(
    values: Float[Tensor, "R m"],
    proximal_values: Float[Tensor, "R m"],
    returns: Float[Tensor, "R m"],
    loss_weight: Float[Tensor, "R m"],
    mask: Bool[Tensor, "R m"],
    *,
    clip: float | None,
) -> tuple[Float[Tensor, ""], dict[str, MeanArrays]]:
    """Computes the critic's squared error, sum(loss_weight * value_loss), and moments as metrics.

    `rljax.objective.explained_variance` is computed from the moments after they are merged.
    """
    loss = losses.value_loss(values, proximal_values, returns, mask, loss_weight, clip=clip).sum
    values, returns = losses.select(values.detach(), mask), losses.select(returns, mask)
    metrics = {
        "critic/value": mean(values, mask, spread=True),
        "critic/return": mean(returns, mask, spread=True),
        "critic/squared_error": mean((values - returns) ** 2, mask),
        "critic/squared_return": mean(returns**2, mask),
    }
    if clip is not None:
        moved = torch.abs(values - losses.select(proximal_values, mask)) > clip
        metrics["critic/clip_ratio"] = mean(moved, mask)
    return loss, metrics


def mean(x: Tensor, mask: Bool[Tensor, "R m"], spread: bool = False) -> MeanArrays:
    """Returns the unweighted mean over trained tokens; with min and max if `spread`."""
    x = losses.wide(x)
    kept = mask if spread else torch.zeros_like(mask)
    low, high = (pad(torch.where(kept, x, end).flatten(), (0, 1), value=end) for end in (torch.inf, -torch.inf))
    return MeanArrays(torch.sum(torch.where(mask, x, 0.0)), torch.sum(mask), low.amin(), high.amax())


def _surrogate(logp: Tensor, proximal: Tensor, tokens: TokenArrays, weight: Tensor, objective: Objective) -> Surrogate:
    clip = dict(clip_low=objective.clip_low, clip_high=objective.clip_high)
    if objective.loss == "cispo":
        return losses.cispo(logp, proximal, tokens.advantage, tokens.mask, weight, **clip)
    if objective.ratio_level == "token":
        surrogate = losses.clipped_surrogate
        return surrogate(logp, proximal, tokens.advantage, tokens.mask, weight, **clip, dual_clip=objective.dual_clip)
    return losses.sequence_surrogate(
        logp, proximal, tokens.advantage, tokens.mask, weight, tokens.segment_ids, **clip, dual_clip=objective.dual_clip
    )


def _metrics(
    logp: Tensor, entropy: Tensor, proximal: Tensor, tokens: TokenArrays, objective: Objective, surrogate: Surrogate
) -> dict[str, MeanArrays]:
    """Measures the surrogate, and how far the policies are apart, over both sets of tokens."""
    mask = tokens.mask
    drift = losses.log_ratio(logp, proximal, mask)
    of_tokens = {
        "approx_kl": torch.expm1(drift) - drift,
        "clip_ratio": surrogate.clipped,
        "entropy": entropy,
    }
    spreads = {
        "importance_weight": surrogate.ratio,
        "behave_imp_weight": torch.exp(losses.log_ratio(proximal, tokens.behavior_logp, mask)),
    }
    if tokens.reference_logp is not None:
        of_tokens["reference_kl"] = losses.kl_penalty(logp, tokens.reference_logp, mask, estimator=objective.kl_estimator)
    if tokens.teacher_logp is not None:
        of_tokens["teacher_kl"] = losses.kl_penalty(logp, tokens.teacher_logp, mask, estimator="k1")
    active = mask & (tokens.advantage != 0)
    metrics = {f"{WITH_ADVANTAGE}/share": mean(active, mask)}
    for prefix, chosen in ((PREFIX, mask), (WITH_ADVANTAGE, active)):
        metrics |= {f"{prefix}/{name}": mean(x, chosen) for name, x in of_tokens.items()}
        metrics |= {f"{prefix}/{name}": mean(x, chosen, spread=True) for name, x in spreads.items()}
    if objective.proximal == "interpolated" and tokens.proximal_logp is not None:
        metrics[f"{PREFIX}/proximal_error"] = mean(torch.abs(proximal - tokens.proximal_logp), mask, spread=True)
    return metrics


def _weight_metrics(ratio: Tensor, applied: Tensor, mask: Tensor, objective: Objective) -> dict[str, MeanArrays]:
    """Measures the decoupled objective's weights as applied, and the share above the cap."""
    metrics = {f"{PREFIX}/applied_weight": mean(applied, mask, spread=True)}
    if objective.weight_cap is not None:
        metrics[f"{PREFIX}/behave_cap_ratio"] = mean(ratio > objective.weight_cap, mask)
    return metrics
