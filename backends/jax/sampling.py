"""Drawing the next token: which distribution a request asks for, and one draw from it.

Every parameter is an array with one entry a row, so that no value of any parameter compiles
anything again. A draw is a function of (seed, index of the token in its completion) and of the
row's logits, of nothing else in the batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

ROUNDING = 1e-6  # of a float32 cumulative sum of probabilities; top_p = 0.8 keeps .5 and .3 whichever way .5 + .3 rounds


class Sampling(NamedTuple):
    """`SamplingParams` of B rows; `seed` and `token_index` (of the token to draw, in its
    completion) choose the noise.
    """

    temperature: Float[Array, " B"]
    top_p: Float[Array, " B"]  # in (0, 1]
    top_k: Int[Array, " B"]  # 0: no limit
    greedy: Bool[Array, " B"]
    min_new_tokens: Int[Array, " B"]
    stop_ids: Int[Array, "B K"]  # unused entries hold an id outside the vocabulary, and not a negative one
    seed: UInt[Array, " B"]
    token_index: Int[Array, " B"]


def sample(
    logits: Float[Array, "B V"], params: Sampling, plain: bool | None = None
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Draws one token per row.

    Args:
      plain: whether every row asks for a temperature alone; None: found out at every call, for
        which the host of a GPU waits.

    Returns:
      Token ids, int32, and their log-probabilities, float32, nats, under the distribution that was
      drawn from. A greedy row takes the likeliest token and reports its log-probability at
      temperature 1 over the whole vocabulary.
    """
    logits = jnp.asarray(logits, jnp.float32)
    if plain is not None:
        return (_sample_plain if plain else _sample_any)(logits, params)
    asks = params.greedy | (params.token_index < params.min_new_tokens) | (params.top_k > 0) | (params.top_p < 1)
    return jax.lax.cond(jnp.any(asks), _sample_any, _sample_plain, logits, params)


def _sample_plain(logits: Array, params: Sampling) -> tuple[Array, Array]:
    """Samples when no row needs more than a temperature.

    Reads the logits twice and writes nothing of their size.
    """
    return draw(logits / params.temperature[:, None], params.seed, params.token_index)


def _sample_any(logits: Array, params: Sampling) -> tuple[Array, Array]:
    logits = _scaled(logits, params)
    drawn, logp = draw(logits, params.seed, params.token_index)
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    of_likeliest = jnp.max(logits, axis=-1) - jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(params.greedy, likeliest, drawn), jnp.where(params.greedy, of_likeliest, logp)


def log_distribution(logits: Float[Array, "B V"], params: Sampling) -> Float[Array, "B V"]:
    """Log-probabilities, float32, nats, of the distribution that a row samples from; -inf for
    tokens it cannot draw.

    In this order, each over what the one before left: stop ids banned until `min_new_tokens` are
    out, temperature, top_k, top_p (the smallest set of likeliest tokens with at least that mass).
    What is left is renormalized. Tokens that tie with the last one kept are kept.
    """
    return jax.nn.log_softmax(_scaled(jnp.asarray(logits, jnp.float32), params), axis=-1)


def _scaled(logits: Array, params: Sampling) -> Array:
    """Logits whose softmax is the distribution of `log_distribution`."""
    banning = params.token_index < params.min_new_tokens
    logits = jax.lax.cond(jnp.any(banning), lambda z: _ban(z, params.stop_ids, banning), lambda z: z, logits)
    logits = logits / jnp.where(params.greedy, 1.0, params.temperature)[:, None]
    top_k = jnp.where(params.greedy, 0, params.top_k)
    top_p = jnp.where(params.greedy, 1.0, params.top_p)
    narrowing = jnp.any((top_k > 0) | (top_p < 1))  # sorting a vocabulary is worth a branch
    return jax.lax.cond(narrowing, lambda z: _keep_top(z, top_k, top_p), lambda z: z, logits)


def _ban(logits: Array, stop_ids: Array, banning: Array) -> Array:
    rows = jnp.arange(len(logits))[:, None]
    ids = jnp.where(banning[:, None], stop_ids, logits.shape[-1])
    return logits.at[rows, ids].set(-jnp.inf, mode="drop")


def _keep_top(logits: Array, top_k: Array, top_p: Array) -> Array:
    ranked = jnp.sort(logits, axis=-1, descending=True)
    last = jnp.where(top_k > 0, jnp.minimum(top_k, logits.shape[-1]), logits.shape[-1]) - 1
    of_top_k = ranked >= jnp.take_along_axis(ranked, last[:, None], axis=-1)
    probabilities = jax.nn.softmax(jnp.where(of_top_k, ranked, -jnp.inf), axis=-1)
    likelier = jnp.cumsum(probabilities, axis=-1) - probabilities  # mass ranked before each token
    of_top_p = (likelier + ROUNDING < top_p[:, None]) | (top_p[:, None] >= 1)
    kept = (of_top_k & of_top_p).at[:, 0].set(True)
    least = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= least, logits, -jnp.inf)


def draw(
    logits: Float[Array, "B V"], seed: UInt[Array, " B"], index: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Draws a token per row from the softmax of its logits, and says its log-probability. Never
    draws a logit of -inf.

    Inverts the cumulative distribution in two levels: a block of about sqrt(V) tokens, then a
    token in it. One uniform per level: two random numbers per token instead of the V of the Gumbel
    trick, which on a CPU cost as much as a small model; and a token of probability 1e-10 is still
    drawn as often as it should be.
    """
    rows, vocabulary = logits.shape
    block = math.isqrt(vocabulary - 1) + 1
    peak = jnp.max(logits, axis=-1, keepdims=True)
    padded = jnp.pad(logits, ((0, 0), (0, -vocabulary % block)), constant_values=-jnp.inf)
    blocks = jnp.exp(padded.reshape(rows, -1, block) - peak[..., None]).sum(axis=-1)
    first, second = _uniforms(seed, index)
    chosen = _invert(blocks, first)
    tokens = chosen[:, None] * block + jnp.arange(block)
    within = jnp.take_along_axis(logits, jnp.minimum(tokens, vocabulary - 1), axis=1)
    token = _invert(jnp.where(tokens < vocabulary, jnp.exp(within - peak), 0.0), second)
    logp = jnp.take_along_axis(within, token[:, None], axis=1) - peak - jnp.log(blocks.sum(axis=-1, keepdims=True))
    return (chosen * block + token).astype(jnp.int32), logp[:, 0]


def _uniforms(seed: Array, index: Array) -> tuple[Array, Array]:
    def of_token(seed: Array, index: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), index)
        return jax.random.uniform(key, (2,), jnp.float32)

    pairs = jax.vmap(of_token)(seed, index)
    return pairs[:, 0], pairs[:, 1]


def _invert(weights: Array, uniform: Array) -> Array:
    """First entry of each row at which the cumulative sum passes uniform * total. A parallel
    cumulative sum need not be monotone to the last bit, so that entries of weight zero are
    excluded by name.
    """
    cumulative = jnp.cumsum(weights, axis=-1)
    passed = (cumulative > uniform[:, None] * cumulative[:, -1:]) & (weights > 0)
    return jnp.where(jnp.any(passed, axis=-1), jnp.argmax(passed, axis=-1), jnp.argmax(weights, axis=-1))
