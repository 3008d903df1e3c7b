"""Attention over a cache in plain XLA.

Reads every row up to the longest, rounded up to a power of two: which of them is found on the
device, so that no length compiles anything again, and each costs its own branch of a few
operations.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from rljax.backends.jax.decode_attention.interface import DecodeAttention

MASKED = -1e30  # finite: a query that sees nothing gets a uniform average, not NaN
SHORTEST_SPAN = 128  # tokens; below it attention costs little beside the matrices


def spans(length: int) -> list[int]:
    """Powers of two from SHORTEST_SPAN, and the length itself."""
    shorter = []
    span = SHORTEST_SPAN
    while span < length:
        shorter.append(span)
        span *= 2
    return [*shorter, length]


def attend(
    query: Array,
    key: Array,
    value: Array,
    index: Array,
    rows: Array | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> Array:
    """Implements `Attend`. Softmax is in float32 or wider."""
    length = key.shape[2]
    lengths = spans(length)
    branches = [functools.partial(_over_span, span=span, scale=scale, softcap=softcap, window=window) for span in lengths]
    inputs = (query, key, value, index, rows)
    if len(branches) == 1:
        return branches[0](*inputs)
    return jax.lax.switch(jnp.searchsorted(jnp.asarray(lengths[:-1]), jnp.max(index) + 1), branches, *inputs)


def _over_span(
    query: Array,
    key: Array,
    value: Array,
    index: Array,
    rows: Array | None,
    *,
    span: int,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Array:
    batch, length, heads, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    if rows is None:
        key, value = key[:, :, :span], value[:, :, :span]
    else:
        key, value = (cache.at[rows, :, :span].get(mode="clip") for cache in (key, value))
    key, value = key.astype(query.dtype), value.astype(query.dtype)
    stacked = query.reshape(batch, length, kv_heads, groups, dim).transpose(0, 2, 3, 1, 4)  # [R, K, G, T, D]
    stacked = stacked.reshape(batch, kv_heads, groups * length, dim)
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
    wide = jnp.promote_types(query.dtype, jnp.float32)
    logits = jnp.einsum("rkqd,rksd->rkqs", stacked, key, precision=precision, preferred_element_type=wide) * scale
    if softcap is not None:
        logits = jnp.tanh(logits / softcap) * softcap
    at = jnp.tile(index, (1, groups))[:, None, :, None]  # [R, 1, G * T, 1]
    keys = jnp.arange(span)
    seen = keys <= at
    if window is not None:
        seen &= keys > at - window
    weights = jax.nn.softmax(jnp.where(seen, logits, MASKED), axis=-1).astype(value.dtype)
    out = jnp.einsum("rkqs,rksd->rkqd", weights, value, precision=precision)
    return out.reshape(batch, kv_heads, groups, length, dim).transpose(0, 3, 1, 2, 4).reshape(query.shape)


XLA = DecodeAttention("xla", attend)
