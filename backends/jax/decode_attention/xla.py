"""Attention over pages in plain XLA: the reference, and the CPU's.

Goes through the tables page by page, as far as the longest row reaches, with a running softmax
(Milakov and Gimelshein 2018, arXiv:1805.02867): only one page per row is gathered at a time, and
how many turns are taken is found on the device, so that no length compiles anything again.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from rljax.backends.jax.decode_attention.interface import MASKED, DecodeAttention, Pages, Places


class Xla(DecodeAttention):
    name = "xla"

    def page_size(self, asked: int, context: int) -> int:
        return min(asked, context)

    def attend(
        self,
        query: Array,
        cache: Pages,
        places: Places,
        *,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
    ) -> Array:
        """Softmax is in float32 or wider."""
        if places.tables.shape == (len(cache.key), 1):
            return _in_order_of_pages(query, cache, places, scale=scale, softcap=softcap, window=window)
        size = cache.key.shape[2]
        queries = _Queries(query, places.index, cache.key.shape[1], scale, softcap, window)

        def turn(column: Array | int, state: Running | None) -> Running:
            page = jax.lax.dynamic_index_in_dim(places.tables, column, axis=1, keepdims=False)
            key, value = (pool.at[page].get(mode="clip") for pool in cache)
            return queries.see(state, key, value, column * size)

        first, last = _turns(places, size, window)
        if places.tables.shape[1] == 1:
            return queries.result(turn(0, None))
        return queries.result(jax.lax.fori_loop(first, last, turn, queries.nothing()))


def _in_order_of_pages(query: Array, cache: Pages, places: Places, **settings: Any) -> Array:
    """Attends where rows and pages are one to one: sorts the queries by page, and no page moves."""
    page = places.tables[:, 0]
    row = jnp.zeros(len(page), jnp.int32).at[page].set(jnp.arange(len(page)), mode="drop")
    queries = _Queries(query[row], places.index[row], cache.key.shape[1], **settings)
    return queries.result(queries.see(None, *cache, 0)).at[page].get(mode="clip")


def _turns(places: Places, size: int, window: int | None) -> tuple[Array | int, Array]:
    """First column of the tables that some query sees, and one past the last."""
    last = (jnp.max(places.index) + size) // size
    if window is None:
        return 0, last
    earliest = jnp.min(jnp.where(places.index < 0, jnp.iinfo(jnp.int32).max, places.index))
    return jnp.minimum(jnp.maximum(earliest - window + 1, 0) // size, last), last


Running = tuple[Array, Array, Array]  # sum of weighted values [R, K, Q, D], largest logit and sum of weights [R, K, Q, 1]


class _Queries:
    """The queries of R rows, those of a key/value head stacked: Q of them."""

    def __init__(
        self, query: Array, index: Array, kv_heads: int, scale: float, softcap: float | None, window: int | None
    ) -> None:
        rows, length, heads, dim = query.shape
        grouped = query.reshape(rows, length, kv_heads, heads // kv_heads, dim).transpose(0, 2, 3, 1, 4)
        self._shape, self._grouped = query.shape, grouped.shape
        self._query = grouped.reshape(rows, kv_heads, -1, dim)
        self._index = jnp.tile(index, (1, heads // kv_heads))[:, None, :, None]
        self._scale, self._softcap, self._window = scale, softcap, window
        self._precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
        self._wide = jnp.promote_types(query.dtype, jnp.float32)

    def nothing(self) -> Running:
        ones = jnp.ones((*self._query.shape[:3], 1), self._wide)
        return jnp.zeros(self._query.shape, self._wide), MASKED * ones, 0 * ones

    def see(self, state: Running | None, key: Array, value: Array, start: Array | int) -> Running:
        """Adds keys and values, [R, K, S, D] each, at indices from `start`, to the state."""
        dtype, precision = self._query.dtype, self._precision
        logits = jnp.einsum(
            "rkqd,rksd->rkqs", self._query, key.astype(dtype), precision=precision, preferred_element_type=self._wide
        )
        logits *= self._scale
        if self._softcap is not None:
            logits = jnp.tanh(logits / self._softcap) * self._softcap
        at = start + jnp.arange(key.shape[2])
        seen = at <= self._index
        if self._window is not None:
            seen &= at > self._index - self._window
        logits = jnp.where(seen, logits, MASKED)
        peak = logits.max(axis=-1, keepdims=True)
        peak = peak if state is None else jnp.maximum(peak, state[1])
        weights = jnp.exp(logits - peak)
        total = weights.sum(axis=-1, keepdims=True)
        out = jnp.einsum(
            "rkqs,rksd->rkqd",
            weights.astype(dtype),
            value.astype(dtype),
            precision=precision,
            preferred_element_type=self._wide,
        )
        if state is None:
            return out, peak, total
        correction = jnp.exp(state[1] - peak)
        return state[0] * correction + out, peak, state[2] * correction + total

    def result(self, state: Running) -> Array:
        """[R, T, N, D]"""
        out = (state[0] / state[2]).astype(self._query.dtype)
        return out.reshape(self._grouped).transpose(0, 3, 1, 2, 4).reshape(self._shape)


XLA = Xla()
