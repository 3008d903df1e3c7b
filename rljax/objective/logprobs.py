"""Log-probs and entropy from hidden states: the float64 definition, with the gradient by hand."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def token_logprobs(
    hidden: Array,
    unembedding: Array,
    labels: Array,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Array, Array]:
    r"""Log-probability of each label, and entropy, under the softmax of tempered logits.

    .. math:: z = \mathrm{cap} \tanh(h W^T / \mathrm{cap}) / \tau,\quad
              \log p_y = z_y - \mathrm{lse}(z),\quad H = \mathrm{lse}(z) - \sum_j p_j z_j

    Differentiable in hidden and unembedding through both results: :math:`\partial \log p_y /
    \partial z_j = 1_{jy} - p_j`, :math:`\partial H / \partial z_j = -p_j (\log p_j + H)`.

    Args:
      hidden: [M, H], final hidden states, each predicting its label; float64, float32 or bfloat16.
      unembedding: [V, H], in the dtype of hidden.
      labels: [M] int, token ids in [0, V).
      temperature: that of sampling.
      softcap: Gemma's final logit soft-capping, None for none.

    Returns:
      logp [M] and entropy [M], nats, float32 (float64 for float64 inputs).
    """
    log_p = log_softmax(_logits(hidden, unembedding, temperature, softcap))
    return log_p[np.arange(len(labels)), labels], -np.sum(np.exp(log_p) * log_p, axis=-1)


def token_logprobs_grad(
    hidden: Array,
    unembedding: Array,
    labels: Array,
    d_logp: Array,
    d_entropy: Array,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Array, Array]:
    """Gradient of `token_logprobs` with respect to hidden [M, H] and unembedding [V, H].

    Args:
      d_logp, d_entropy: [M], the loss's gradient with respect to logp and entropy. The other
        arguments are those of `token_logprobs`.
    """
    logits = _logits(hidden, unembedding, temperature, softcap)
    log_p = log_softmax(logits)
    p = np.exp(log_p)
    entropy = -np.sum(p * log_p, axis=-1, keepdims=True)
    slope = -p * d_logp[:, None] - d_entropy[:, None] * p * (log_p + entropy)
    slope[np.arange(len(labels)), labels] += d_logp
    slope /= temperature
    if softcap is not None:
        slope *= 1 - (logits * temperature / softcap) ** 2
    return slope @ unembedding.astype(np.float64), slope.T @ hidden.astype(np.float64)


def log_softmax(logits: Array) -> Array:
    """Log-softmax over the last axis; float64 or complex."""
    shifted = logits - logits.real.max(axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def _logits(hidden: Array, unembedding: Array, temperature: float, softcap: float | None) -> Array:
    dtype = np.result_type(hidden, unembedding, np.float64)
    logits = hidden.astype(dtype) @ unembedding.astype(dtype).T
    return (logits if softcap is None else softcap * np.tanh(logits / softcap)) / temperature
