"""A `Transformer` over a key/value cache: what a sampler runs.

Layers are unrolled and each has a cache of its own, laid out as attention reads it, so that XLA
updates it where it is: one array for all layers, scanned, is cut, transposed and put together
again at every step.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from rljax.backends.jax.decode_attention import Attend
from rljax.backends.jax.decode_attention.xla import XLA
from rljax.backends.jax.model import Transformer, rotation_at
from rljax.backends.jax.sharding import constrain
from rljax.hf.spec import ModelSpec

LAYERS = "layers"  # of the parameter tree


class LayerCache(NamedTuple):
    """Keys and values of the tokens so far, of one layer. Key index == absolute position of the
    token in its row.

    What lies at indices above a query's position is never seen by it, so stale content needs no
    clearing.
    """

    key: Array  # [B, K, S, D]
    value: Array  # [B, K, S, D]


Cache = tuple[LayerCache, ...]  # one per layer


def empty_cache(spec: ModelSpec, rows: int, length: int, dtype: DTypeLike) -> Cache:
    """Makes a cache for `rows` rows of at most `length` tokens."""
    shape = (rows, spec.num_kv_heads, length, spec.head_dim)
    return tuple(LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(spec.num_layers))


def unstack(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters with a tuple of trees, one per layer, where all layers were stacked: what
    `CachedTransformer` takes.
    """
    count = len(jax.tree.leaves(params[LAYERS])[0])
    return params | {LAYERS: tuple(jax.tree.map(lambda leaf, i=i: leaf[i], params[LAYERS]) for i in range(count))}


def stack(params: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `unstack`."""
    return params | {LAYERS: jax.tree.map(lambda *leaves: jnp.stack(leaves), *params[LAYERS])}


class CachedTransformer:
    """The model of a graph definition and unstacked parameters, inside a traced function.

    Example:
        model = CachedTransformer(graphdef, unstack(params))
        hidden, cache = model.extend(prompt_ids, positions, empty_cache(spec, rows, length, dtype))
        token_ids = model.logits(hidden[:, -1]).argmax(-1)
        hidden, cache = model.decode(token_ids, positions[:, -1] + 1, cache)
    """

    def __init__(self, graphdef: nnx.GraphDef, params: dict[str, Any]) -> None:
        self._layers = params[LAYERS]
        self._model: Transformer = nnx.merge(graphdef, params | {LAYERS: self._layers[0]})
        self._layer = nnx.split(self._model.layers)[0]
        self.spec = self._model.spec

    def logits(self, hidden: Array) -> Array:
        """[..., H] -> [..., V] float32."""
        return self._model.logits(hidden)

    def extend(
        self, token_ids: Array, positions: Array, cache: Cache, rows: Array | None = None, *, attend: Attend = XLA.attend
    ) -> tuple[Array, Cache]:
        """Writes tokens into rows of the cache; each sees what is cached of its row, and those
        before it here.

        Args:
          token_ids: [R, T] int32.
          positions: [R, T] int32, in the row; what is outside [0, S) is padding: not written, and
            what it sees means nothing.
          rows: [R] int32, of the cache, no two alike; one out of range is padding. None: R is B,
            in order.

        Returns:
          Hidden states after the final norm, [R, T, H], and the cache.
        """
        held = cache[0].key
        keep = (positions >= 0) & (positions < held.shape[2])
        if rows is not None:
            keep &= (rows < len(held))[:, None]
        index = jnp.where(keep, positions, -1)
        spec, written = self.spec, []
        x, rotation = self._model.embed(token_ids), rotation_at(spec, positions)

        def write_and_see(
            query: Array, key: Array, value: Array, *, held: LayerCache, window: int | None
        ) -> tuple[Array, LayerCache]:
            held = LayerCache(write(held.key, key, index, rows), write(held.value, value, index, rows))
            out = attend(query, *held, index, rows, scale=spec.attention_scale, softcap=spec.attention_softcap, window=window)
            return out, held

        for params, layer_cache, window, rope in zip(self._layers, cache, spec.windows, spec.rope_of_layer, strict=True):
            see = functools.partial(write_and_see, held=layer_cache, window=window)
            x, new = nnx.merge(self._layer, params).step(x, rope, rotation, see)
            written.append(new)
        return self._model.norm(x), tuple(written)

    def decode(self, tokens: Array, positions: Array, cache: Cache, *, attend: Attend = XLA.attend) -> tuple[Array, Cache]:
        """Takes in one token of every row of the cache: [B] int32 each -> hidden states [B, H],
        and the cache.
        """
        hidden, cache = self.extend(tokens[:, None], positions[:, None], cache, attend=attend)
        return hidden[:, 0], cache


def write(cache: Array, new: Array, positions: Array, rows: Array | None = None) -> Array:
    """A layer's keys or values [B, K, S, D] with new ones [R, T, K, D] at positions [R, T] of the
    rows; -1: dropped.
    """
    size = cache.shape[2]
    slots = jnp.where(positions >= 0, positions, size)  # a negative index would count from the end
    rows = jnp.arange(len(new)) if rows is None else rows
    return constrain(cache.at[rows[:, None], :, slots].set(new.astype(cache.dtype), mode="drop"), "cache")
