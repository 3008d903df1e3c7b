"""Attention in plain JAX, for any device, dtype and mask: the reference, and what the CPU uses.

Also over a key/value cache, which the sampler and no other implementation needs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rljax.backends.jax.attention.interface import Bounds, Problem, Window

QUERY_BLOCK = 512  # queries whose logits are held at once, where a row is longer than twice that
MASKED = -1e30  # finite: a query that sees nothing gets a uniform average, not NaN


@dataclasses.dataclass(frozen=True)
class XlaAttention:
    """Implements `Attention` by matrix products and a mask."""

    name: str = "xla"

    def refusal(self, problem: Problem) -> None:
        return None

    def bounds(self, segment_ids: np.ndarray) -> None:
        return None

    def segments(self, segment_ids: Array, bounds: Bounds | None) -> Array:
        return segment_ids

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        scale: float,
        softcap: float | None = None,
        segments: Array | None = None,
        window: Window = None,
        windows: tuple[int | None, ...] = (None,),
    ) -> Array:
        return attention(query, key, value, scale=scale, softcap=softcap, segment_ids=segments, window=window)


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    scale: float,
    softcap: float | None = None,
    segment_ids: Array | None = None,
    window: Window = None,
) -> Array:
    r"""Softmax attention of grouped query heads; a query sees keys at or before its own index, and
    of its own segment.

    .. math:: \mathrm{softmax}_s(c \tanh(q_t \cdot k_s\,\mathrm{scale} / c))\, v_s,
        \quad t - \mathrm{window} < s \le t

    Args:
      query: [B, T, N, D], N a multiple of K.
      key, value: [B, T, K, D].
      softcap: c; None for no cap.
      segment_ids: [B, T] int32: a token sees its own segment alone.
      window: keys a query sees, itself included; None: all. May be traced.

    Returns:
      [B, T, N, D] in the dtype of value. Softmax is in float32 or wider.
    """
    batch, length, heads, dim = query.shape
    groups = heads // key.shape[2]
    query = query.reshape(batch, length, key.shape[2], groups, dim)
    block: Callable[..., Array] = functools.partial(_block, scale=scale, softcap=softcap, window=window)
    if length <= 2 * QUERY_BLOCK:
        out = block(query, key, value, jnp.arange(length)[None], segment_ids, segment_ids)
        return out.reshape(batch, length, heads, dim)
    block = jax.checkpoint(block)  # else the backward pass keeps the logits of all blocks
    parts = []
    for start in range(0, length, QUERY_BLOCK):
        rows = slice(start, min(start + QUERY_BLOCK, length))
        keys = slice(0, rows.stop)  # later ones are not seen by this block
        index = jnp.arange(rows.start, rows.stop)[None]
        segments = (None, None) if segment_ids is None else (segment_ids[:, rows], segment_ids[:, keys])
        parts.append(block(query[:, rows], key[:, keys], value[:, keys], index, *segments))
    return jnp.concatenate(parts, axis=1).reshape(batch, length, heads, dim)


def _block(
    query: Array,
    key: Array,
    value: Array,
    query_index: Array,
    query_segments: Array | None,
    key_segments: Array | None,
    *,
    scale: float,
    softcap: float | None,
    window: Window,
) -> Array:
    """query [B, T, K, G, D], key, value [B, S, K, D], query_index [B or 1, T] -> as query."""
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
    wide = jnp.promote_types(query.dtype, jnp.float32)
    logits = jnp.einsum("btkgd,bskd->bkgts", query, key, precision=precision, preferred_element_type=wide) * scale
    if softcap is not None:
        logits = jnp.tanh(logits / softcap) * softcap
    key_index = jnp.arange(key.shape[1])[None, None]
    index = query_index[:, :, None]
    seen = key_index <= index
    if window is not None:
        seen &= key_index > index - window
    if query_segments is not None and key_segments is not None:
        seen &= query_segments[:, :, None] == key_segments[:, None, :]
    logits = jnp.where(seen[:, None, None], logits, MASKED)
    weights = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, value, precision=precision)
