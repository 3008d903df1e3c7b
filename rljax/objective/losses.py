"""The terms of the objective: their definition, in float64 numpy, with gradients derived by hand.

`rljax.backends.jax.losses` and `rljax.backends.torch.losses` implement the same functions, which
have the same names, arguments and docstrings; tests/parity holds them to these. Here a `Term` also
carries the gradient of its sum.

Arrays are [R, m]: m tokens of each of R rows. `mask` says which are trained on; elsewhere every
input may hold anything, NaN included. `weight` multiplies each token's loss: it holds aggregation,
the global normalizer and, in the decoupled objective, `behavior_weight`; no gradient flows through
it. Segments are local to a row, so rows may be cut apart.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

# Log-ratios are clipped to this and have no gradient beyond it: e^20 is a fault, not an estimate. Its square still fits a
# float32, so that one broken token cannot make a global gradient norm infinite.
LOG_RATIO_LIMIT = 20.0

Array = np.ndarray


class Term(NamedTuple):
    """One term over some tokens. Sums and counts of parts add up to those of the whole."""

    sum: Any  # of weight * loss over the trained tokens
    count: Any  # trained tokens
    grads: dict[str, Array]  # of sum by argument name; only the oracle has any


class Surrogate(NamedTuple):
    """A `Term` of the policy's ratio, with what it did to each token; these have no gradient."""

    sum: Any
    count: Any
    grads: dict[str, Array]
    ratio: Any  # [R, m]: r, or s of the token's sequence, before any clip; 1 where mask is False
    clipped: Any  # [R, m] bool: the clip changed the token's loss


def clipped_surrogate(
    logp: Array,
    proximal_logp: Array,
    advantage: Array,
    mask: Array,
    weight: Array,
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
    difference, inside = log_ratio(logp, proximal_logp, mask)
    ratio = np.exp(difference)
    advantage, weight = select(advantage, mask), select(weight, mask)
    used = clipped_ratio(ratio, advantage, clip_low, clip_high, dual_clip)
    slope = np.where(inside & (used == ratio), -ratio * advantage, 0.0)
    term = _term(-used * advantage, mask, weight, logp=weight * slope)
    return Surrogate(*term, ratio.real, changed(used, ratio, advantage))


def sequence_surrogate(
    logp: Array,
    proximal_logp: Array,
    advantage: Array,
    mask: Array,
    weight: Array,
    segment_ids: Array,
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
    difference, inside = log_ratio(logp, proximal_logp, mask)
    length = over_segments(np.ones_like(difference), mask, segment_ids)
    ratio = np.exp(over_segments(difference, mask, segment_ids) / length)
    advantage, weight = select(advantage, mask), select(weight, mask)
    used = clipped_ratio(ratio, advantage, clip_low, clip_high, dual_clip)
    by_sequence = np.where(used == ratio, -weight * advantage * ratio, 0.0)
    grad = np.where(inside & mask, over_segments(by_sequence, mask, segment_ids) / length, 0.0)
    term = _term(-used * advantage, mask, weight, logp=grad)
    return Surrogate(*term, np.where(mask, ratio.real, 1.0), changed(used, ratio, advantage))


def cispo(
    logp: Array,
    proximal_logp: Array,
    advantage: Array,
    mask: Array,
    weight: Array,
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
    ratio = np.exp(log_ratio(logp, proximal_logp, mask)[0]).real
    clipped = np.clip(ratio, 1 - clip_low, 1 + clip_high)
    advantage = select(advantage, mask)
    slope = -clipped * advantage
    term = _term(slope * select(logp, mask), mask, weight, logp=select(weight, mask) * slope)
    return Surrogate(*term, ratio, changed(clipped, ratio, advantage))


def behavior_weight(
    proximal_logp: Array,
    behavior_logp: Array,
    mask: Array,
    segment_ids: Array,
    *,
    cap: float | None,
    mode: str,
    level: str,
) -> Array:
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


def behavior_ratio(proximal_logp: Array, behavior_logp: Array, mask: Array, segment_ids: Array, *, level: str) -> Array:
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
    log_weight = log_ratio(proximal_logp, behavior_logp, mask)[0]
    if level == "sequence":
        log_weight = np.clip(over_segments(log_weight, mask, segment_ids), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return np.where(mask, np.exp(log_weight), 0.0)


def capped(weight: Array, cap: float | None, mode: str) -> Array:
    """Caps weights: those above are the cap, or 0 in mode "mask"."""
    return weight if cap is None else np.where(weight > cap, cap if mode == "clamp" else 0.0, weight)


def interpolated_proximal(logp: Array, behavior_logp: Array, interpolation: Array, mask: Array) -> Array:
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
    logp, behavior_logp, interpolation = select(logp, mask), select(behavior_logp, mask), select(interpolation, mask)
    return np.where(interpolation == 1, logp, behavior_logp + interpolation * (logp - behavior_logp))


def kl_penalty(logp: Array, reference_logp: Array, mask: Array, *, estimator: str) -> Array:
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
    difference = log_ratio(logp, reference_logp, mask)[0]
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference**2
    return np.expm1(-difference) + difference


def kl_loss(
    logp: Array,
    reference_logp: Array,
    importance: Array,
    mask: Array,
    weight: Array,
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
    importance, weight = select(importance, mask), select(weight, mask)
    loss = importance * kl_penalty(logp, reference_logp, mask, estimator=estimator)
    return _term(loss, mask, weight, logp=weight * importance * log_ratio(logp, reference_logp, mask)[0])


def entropy_bonus(entropy: Array, mask: Array, weight: Array) -> Term:
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
    return _term(-select(entropy, mask), mask, weight, entropy=-select(weight, mask))


def value_loss(
    values: Array,
    proximal_values: Array,
    returns: Array,
    mask: Array,
    weight: Array,
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
    values, returns, weight = select(values, mask), select(returns, mask), select(weight, mask)
    loss, slope = 0.5 * (values - returns) ** 2, values - returns
    if clip is not None:
        proximal = select(proximal_values, mask)
        low, high = proximal - clip, proximal + clip
        moved = np.where(values.real > high, high, np.where(values.real < low, low, values))
        clipped = 0.5 * (moved - returns) ** 2
        larger = clipped.real > loss.real
        loss, slope = np.where(larger, clipped, loss), np.where(larger & (moved != values), 0.0, slope)
    return _term(loss, mask, weight, values=weight * slope)


def distillation(logp: Array, teacher_logp: Array, importance: Array, mask: Array, weight: Array) -> Term:
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


def negative_log_likelihood(logp: Array, mask: Array, weight: Array) -> Term:
    r"""Supervised fine-tuning.

    .. math:: L = -\log \pi_\theta

    Args:
      logp: of the labeled tokens, nats; gradient flows through it.
      mask: tokens that are trained on.
      weight: of each token's loss.

    Returns:
      Weighted sum over trained tokens, and their number.
    """
    return _term(-select(logp, mask), mask, weight, logp=-select(weight, mask))


def wide(x: Array) -> Array:
    """Converts to float64, or to complex128 where a derivative is taken by a complex step."""
    return np.asarray(x, dtype=np.complex128 if np.iscomplexobj(x) else np.float64)


def select(x: Array, mask: Array) -> Array:
    """Returns x where mask is True, else 0."""
    return np.where(mask, wide(x), 0.0)


def log_ratio(logp: Array, other: Array, mask: Array) -> tuple[Array, Array]:
    """Returns log(p / other) within LOG_RATIO_LIMIT, and a mask of where it has a gradient.

    The log-ratio is 0 where mask is False.
    """
    difference = select(logp, mask) - select(other, mask)
    inside = mask & (np.abs(difference.real) <= LOG_RATIO_LIMIT)
    return np.where(mask & ~inside, np.sign(difference.real) * LOG_RATIO_LIMIT, difference), inside


def clipped_ratio(ratio: Array, advantage: Array, clip_low: float, clip_high: float, dual_clip: float | None) -> Array:
    """Clips the ratio: from above where the advantage is positive, from below where it is negative.

    With `dual_clip` it is also bounded from above where the advantage is negative.
    """
    upper = np.where(advantage >= 0, 1 + clip_high, np.inf if dual_clip is None else dual_clip)
    lower = np.where(advantage >= 0, 0.0, 1 - clip_low)
    return np.where(ratio.real > upper, upper, np.where(ratio.real < lower, lower, ratio))


def changed(used: Array, ratio: Array, advantage: Array) -> Array:
    """Returns where a clip of the ratio changed the loss: a token of advantage 0 has none."""
    return (used != ratio) & (advantage != 0)


def over_segments(x: Array, mask: Array, segment_ids: Array) -> Array:
    """Sums x over the trained tokens of each token's segment; 1 elsewhere."""
    out = np.ones_like(x)
    for row in range(x.shape[0]):
        for segment in np.unique(segment_ids[row][mask[row]]):
            members = mask[row] & (segment_ids[row] == segment)
            out[row, members] = x[row, members].sum()
    return out


def _term(loss: Array, mask: Array, weight: Array, **grads: Array) -> Term:
    return Term(np.sum(select(weight, mask) * np.where(mask, loss, 0.0)), np.count_nonzero(mask), grads)
