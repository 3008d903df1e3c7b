"""The terms of the objective in JAX. `rljax/objective/losses.py` is their definition: same names,
arguments and docstrings.

Arithmetic is in float32 at least, whatever comes in. Masks select before anything is
exponentiated: 0 times inf is NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int

from rljax.objective.losses import LOG_RATIO_LIMIT, Surrogate, Term


def clipped_surrogate(
    logp: Float[Array, "R m"],
    proximal_logp: Float[Array, "R m"],
    advantage: Float[Array, "R m"],
    mask: Bool[Array, "R m"],
    weight: Float[Array, "R m"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> Surrogate:
    r"""Clipped surrogate, to be minimized; times `behavior_weight` it is the decoupled objective.

    .. math:: L = -\min(r A, \mathrm{clip}(r, 1-\epsilon_l, 1+\epsilon_h) A),\quad
              r = \pi_\theta / \pi_{prox};\qquad A < 0:\ -\max(\cdot, c A)

    PPO, arXiv:1707.06347, eq. 7; decoupled: Hilton et al. 2021, arXiv:2110.00641; asymmetric clip:
    DAPO, arXiv:2503.14476, eq. 8; dual clip: Ye et al. 2019, arXiv:1912.09729.

    Args:
      logp, proximal_logp: of the sampled tokens, nats; gradient flows through logp alone.
      advantage: of each token, no gradient.
      mask: tokens that are trained on.
      weight: of each token's loss.
      dual_clip: c > 1, the bound of r where the advantage is negative; None for no bound.

    Returns:
      Weighted sum over trained tokens, their number, and each token's ratio.
    """
    ratio = jnp.exp(log_ratio(logp, proximal_logp, mask))
    advantage = select(advantage, mask)
    used = clipped_ratio(ratio, advantage, clip_low, clip_high, dual_clip)
    return _surrogate(_total(-used * advantage, mask, weight), used, ratio, advantage)


def sequence_surrogate(
    logp: Float[Array, "R m"],
    proximal_logp: Float[Array, "R m"],
    advantage: Float[Array, "R m"],
    mask: Bool[Array, "R m"],
    weight: Float[Array, "R m"],
    segment_ids: Int[Array, "R m"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> Surrogate:
    r"""Clipped surrogate of the ratio of whole sequences.

    The ratio is taken per token: the geometric mean over the sequence's n trained tokens.

    .. math:: L_t = -\min(s A_t, \mathrm{clip}(s, 1-\epsilon_l, 1+\epsilon_h) A_t),\quad
              s = \exp\Big(\frac1n \sum_u \log\frac{\pi_\theta(u)}{\pi_{prox}(u)}\Big),\quad
              \frac{\partial s}{\partial \log\pi_\theta(u)} = \frac{s}{n}

    GSPO, arXiv:2507.18071.

    Args:
      logp, proximal_logp: of the sampled tokens, nats; gradient flows through logp alone, to every
        token of the sequence.
      advantage: of each token, no gradient.
      mask: tokens that are trained on.
      weight: of each token's loss.
      segment_ids: the sequence of each token, in [1, m] where mask, local to a row.
      dual_clip: c > 1, the bound of s where the advantage is negative; None for no bound.

    Returns:
      Weighted sum over trained tokens, their number, and each token's sequence's ratio.
    """
    difference = log_ratio(logp, proximal_logp, mask)
    length = over_segments(jnp.ones_like(difference), mask, segment_ids)
    ratio = jnp.exp(over_segments(difference, mask, segment_ids) / length)
    advantage = select(advantage, mask)
    used = clipped_ratio(ratio, advantage, clip_low, clip_high, dual_clip)
    term = _total(-used * advantage, mask, weight)
    return _surrogate(term, used, jnp.where(mask, ratio, 1.0), advantage)


def cispo(
    logp: Float[Array, "R m"],
    proximal_logp: Float[Array, "R m"],
    advantage: Float[Array, "R m"],
    mask: Bool[Array, "R m"],
    weight: Float[Array, "R m"],
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    r"""Log-likelihood weighted by a clipped ratio: no token loses its gradient to the clip.

    .. math:: L = -\mathrm{sg}[\mathrm{clip}(r, 1-\epsilon_l, 1+\epsilon_h)]\, A
              \log \pi_\theta,\quad r = \pi_\theta / \pi_{prox}

    MiniMax-M1, arXiv:2506.13585, eq. 4 and 5.

    Args:
      logp, proximal_logp: of the sampled tokens, nats; gradient flows through logp, not through r.
      advantage: of each token, no gradient.
      mask: tokens that are trained on.
      weight: of each token's loss.

    Returns:
      Weighted sum over trained tokens, their number, and each token's ratio.
    """
    ratio = jnp.exp(log_ratio(logp, proximal_logp, mask))
    clipped = stop_gradient(jnp.clip(ratio, 1 - clip_low, 1 + clip_high))
    advantage = select(advantage, mask)
    term = _total(-clipped * advantage * select(logp, mask), mask, weight)
    return _surrogate(term, clipped, ratio, advantage)


def behavior_weight(
    proximal_logp: Float[Array, "R m"],
    behavior_logp: Float[Array, "R m"],
    mask: Bool[Array, "R m"],
    segment_ids: Int[Array, "R m"],
    *,
    cap: float | None,
    mode: str,
    level: str,
) -> Float[Array, "R m"]:
    r"""Weight of the decoupled objective: corrects for the policy that sampled. No gradient.

    .. math:: w = \pi_{prox} / \pi_{behave},\quad
              \text{clamp: } \min(w, cap),\quad \text{mask: } w\,[w \le cap]

    Hilton et al. 2021, arXiv:2110.00641; with asynchronous sampling: AReaL, arXiv:2505.24298; the
    cap: truncated importance sampling, Ionides 2008.

    Args:
      proximal_logp, behavior_logp: of the sampled tokens, nats.
      mask: tokens that are trained on.
      segment_ids: the sequence of each token, in [1, m] where mask, local to a row; used at level
        "sequence".
      cap: None for no cap.
      mode: "clamp" or "mask".
      level: "token", or "sequence": each token has the product of its sequence's weights.

    Returns:
      [R, m], 0 where mask is False.
    """
    return capped(behavior_ratio(proximal_logp, behavior_logp, mask, segment_ids, level=level), cap, mode)


def behavior_ratio(
    proximal_logp: Float[Array, "R m"],
    behavior_logp: Float[Array, "R m"],
    mask: Bool[Array, "R m"],
    segment_ids: Int[Array, "R m"],
    *,
    level: str,
) -> Float[Array, "R m"]:
    r"""`behavior_weight` before its cap. No gradient.

    Args:
      proximal_logp, behavior_logp: of the sampled tokens, nats.
      mask: tokens that are trained on.
      segment_ids: the sequence of each token, in [1, m] where mask, local to a row; used at level
        "sequence".
      level: "token", or "sequence": each token has the product of its sequence's ratios.

    Returns:
      [R, m], 0 where mask is False.
    """
    log_weight = log_ratio(stop_gradient(proximal_logp), behavior_logp, mask)
    if level == "sequence":
        log_weight = jnp.clip(over_segments(log_weight, mask, segment_ids), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.where(mask, jnp.exp(log_weight), 0.0)


def capped(weight: Array, cap: float | None, mode: str) -> Array:
    """Caps weights: those above are the cap, or 0 in mode "mask"."""
    return weight if cap is None else jnp.where(weight > cap, cap if mode == "clamp" else 0.0, weight)


def interpolated_proximal(
    logp: Float[Array, "R m"],
    behavior_logp: Float[Array, "R m"],
    interpolation: Float[Array, "R m"],
    mask: Bool[Array, "R m"],
) -> Float[Array, "R m"]:
    r"""Proximal log-probs without a forward pass. No gradient.

    They are log-linear between behavior and current policy.

    .. math:: \log \pi_{prox} = \log \pi_{behave} + a (\log \pi_\theta - \log \pi_{behave})

    The coefficient is `rljax.objective.proximal.interpolation`; at a = 1 the result is logp
    exactly.

    Args:
      logp, behavior_logp: of the sampled tokens, nats.
      interpolation: a, in [0, 1].
      mask: tokens that are trained on.

    Returns:
      [R, m], nats; 0 where mask is False.
    """
    logp, behavior_logp = select(stop_gradient(logp), mask), select(behavior_logp, mask)
    interpolation = select(interpolation, mask)
    return jnp.where(interpolation == 1, logp, behavior_logp + interpolation * (logp - behavior_logp))


def kl_penalty(
    logp: Float[Array, "R m"],
    reference_logp: Float[Array, "R m"],
    mask: Bool[Array, "R m"],
    *,
    estimator: str,
) -> Float[Array, "R m"]:
    r"""Estimate of KL(pi_theta, pi_ref) at each token, for a reward or a metric.

    In a loss use `kl_loss`.

    .. math:: \Delta = \log \pi_\theta - \log \pi_{ref}:\quad
              k_1 = \Delta,\quad k_2 = \Delta^2 / 2,\quad k_3 = e^{-\Delta} - 1 + \Delta

    Schulman 2020, http://joschu.net/blog/kl-approx.html.

    Args:
      logp, reference_logp: of the sampled tokens, nats.
      mask: tokens that are trained on.
      estimator: "k1", "k2" or "k3".

    Returns:
      [R, m], nats; 0 where mask is False.
    """
    difference = log_ratio(logp, reference_logp, mask)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference**2
    return jnp.expm1(-difference) + difference


def kl_loss(
    logp: Float[Array, "R m"],
    reference_logp: Float[Array, "R m"],
    importance: Float[Array, "R m"],
    mask: Bool[Array, "R m"],
    weight: Float[Array, "R m"],
    *,
    estimator: str,
) -> Term:
    r"""KL to a reference inside the loss, with the gradient of reverse KL.

    The value is the estimator's; the gradient is that of reverse KL for all estimators.

    .. math:: \nabla KL(\pi_\theta, \pi_{ref}) = E_{\pi_\theta}[\Delta\, \nabla \log \pi_\theta]
              = E_{\pi_{behave}}[\rho\, \Delta\, \nabla \log \pi_\theta],\quad
              \rho = \pi_\theta / \pi_{behave}

    Differentiated through the samples, k1 would give a gradient of 0 in expectation and k3 that of
    forward KL; k2's is right as it stands. arXiv:2510.01555; with the ratio, by differentiating rho
    k3: DeepSeek-V3.2, arXiv:2512.02556.

    Args:
      logp, reference_logp: of the sampled tokens, nats; gradient flows through logp alone.
      importance: rho, no gradient; ones for samples of the current policy.
      mask: tokens that are trained on.
      weight: of each token's loss.
      estimator: "k1", "k2" or "k3", of the value.

    Returns:
      Weighted sum over trained tokens, and their number.
    """
    importance = stop_gradient(select(importance, mask))
    value = stop_gradient(kl_penalty(logp, reference_logp, mask, estimator=estimator))
    slope = stop_gradient(log_ratio(logp, reference_logp, mask))
    logp = select(logp, mask)
    return _total(importance * (value + slope * (logp - stop_gradient(logp))), mask, weight)


def entropy_bonus(entropy: Float[Array, "R m"], mask: Bool[Array, "R m"], weight: Float[Array, "R m"]) -> Term:
    r"""Negative entropy of the policy, to be minimized.

    .. math:: L = -H,\quad H = -\sum_j p_j \log p_j

    Williams and Peng 1991. The gradient of H by the logits is in `rljax.objective.logprobs`.

    Args:
      entropy: of the whole distribution at each token, nats; gradient flows through it.
      mask: tokens that are trained on.
      weight: of each token's loss.

    Returns:
      Weighted sum over trained tokens, and their number.
    """
    return _total(-select(entropy, mask), mask, weight)


def value_loss(
    values: Float[Array, "R m"],
    proximal_values: Float[Array, "R m"],
    returns: Float[Array, "R m"],
    mask: Bool[Array, "R m"],
    weight: Float[Array, "R m"],
    *,
    clip: float | None,
) -> Term:
    r"""Squared error of the critic, optionally clipped.

    The clipped error is the larger of it and that of values clipped to near those at the update's
    start.

    .. math:: L = \tfrac12 \max\big((V - R)^2,
              (\mathrm{clip}(V, V_{prox} - \epsilon, V_{prox} + \epsilon) - R)^2\big)

    PPO's reference implementation; described in arXiv:2006.05990.

    Args:
      values, proximal_values, returns: of each token's context, reward units; gradient flows
        through values alone.
      mask: tokens that are trained on.
      weight: of each token's loss.
      clip: in reward units; None for no clip, and then proximal_values may hold anything.

    Returns:
      Weighted sum over trained tokens, and their number.
    """
    values, returns = select(values, mask), select(returns, mask)
    loss = 0.5 * (values - returns) ** 2
    if clip is not None:
        proximal = select(proximal_values, mask)
        low, high = proximal - clip, proximal + clip
        moved = jnp.where(values > high, high, jnp.where(values < low, low, values))
        clipped = 0.5 * (moved - returns) ** 2
        loss = jnp.where(clipped > loss, clipped, loss)
    return _total(loss, mask, weight)


def distillation(
    logp: Float[Array, "R m"],
    teacher_logp: Float[Array, "R m"],
    importance: Float[Array, "R m"],
    mask: Bool[Array, "R m"],
    weight: Float[Array, "R m"],
) -> Term:
    r"""Reverse KL to a teacher, estimated on the student's own samples.

    .. math:: KL(\pi_\theta, \pi_{teacher})
              = E_{\pi_\theta}[\log \pi_\theta - \log \pi_{teacher}],\quad
              \nabla = E[\rho\, (\log \pi_\theta - \log \pi_{teacher})\, \nabla \log \pi_\theta]

    On-policy distillation: MiniLLM, arXiv:2306.08543; GKD, arXiv:2306.13649. It is `kl_loss` with
    k1: the policy gradient of the advantage log pi_teacher - log pi_theta, taken anew at each
    update.

    Args:
      logp, teacher_logp: of the sampled tokens, nats; gradient flows through logp alone.
      importance: rho = pi_theta / pi_behave, no gradient; ones for samples of the current policy.
      mask: tokens that are trained on.
      weight: of each token's loss.

    Returns:
      Weighted sum over trained tokens, and their number.
    """
    return kl_loss(logp, teacher_logp, importance, mask, weight, estimator="k1")


def negative_log_likelihood(logp: Float[Array, "R m"], mask: Bool[Array, "R m"], weight: Float[Array, "R m"]) -> Term:
    r"""Supervised fine-tuning.

    .. math:: L = -\log \pi_\theta

    Args:
      logp: of the labeled tokens, nats; gradient flows through it.
      mask: tokens that are trained on.
      weight: of each token's loss.

    Returns:
      Weighted sum over trained tokens, and their number.
    """
    return _total(-select(logp, mask), mask, weight)


def wide(x: Array) -> Array:
    """Casts to float32 if it is narrower."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def select(x: Array, mask: Array) -> Array:
    """x where mask, else 0."""
    return jnp.where(mask, wide(x), 0.0)


def log_ratio(logp: Array, other: Array, mask: Array) -> Array:
    """log(p / other) where mask, else 0, within LOG_RATIO_LIMIT; no gradient beyond it."""
    return jnp.clip(select(logp, mask) - select(other, mask), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clipped_ratio(ratio: Array, advantage: Array, clip_low: float, clip_high: float, dual_clip: float | None) -> Array:
    """The ratio that counts: bounded from above where the advantage is positive, from below where
    it is negative.
    """
    upper = jnp.where(advantage >= 0, 1 + clip_high, jnp.inf if dual_clip is None else dual_clip)
    lower = jnp.where(advantage >= 0, 0.0, 1 - clip_low)
    return jnp.where(ratio > upper, upper, jnp.where(ratio < lower, lower, ratio))


def over_segments(x: Array, mask: Array, segment_ids: Array) -> Array:
    """Sum of x over the trained tokens of each token's segment; 1 elsewhere."""
    ids = jnp.where(mask, segment_ids, 0)
    width = x.shape[-1] + 1
    sums = jax.vmap(lambda row, row_ids: jax.ops.segment_sum(row, row_ids, num_segments=width))(x, ids)
    return jnp.where(mask, jnp.take_along_axis(sums, ids, axis=1), 1.0)


def _total(loss: Array, mask: Array, weight: Array) -> Term:
    return Term(jnp.sum(select(weight, mask) * jnp.where(mask, loss, 0.0)), jnp.sum(mask), {})


def _surrogate(term: Term, used: Array, ratio: Array, advantage: Array) -> Surrogate:
    """Adds to a term its ratio, and where a clip changed its loss: not at an advantage of 0."""
    return Surrogate(*term, stop_gradient(ratio), (used != ratio) & (advantage != 0))
