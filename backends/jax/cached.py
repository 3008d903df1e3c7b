"""A `Transformer` over a paged key/value cache: what a sampler runs.

Layers are unrolled and each has pages of its own, laid out as attention reads them, so that XLA
updates them where they are: one array for all layers, scanned, is cut, transposed and put together
again at every step.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from rljax.backends.jax.decode_attention import DecodeAttention, Places, write_and_attend
from rljax.backends.jax.decode_attention.xla import XLA
from rljax.backends.jax.model import Rotation, Transformer, rotation_at
from rljax.hf.spec import ModelSpec

LAYERS = "layers"  # of the parameter tree

Cache = tuple[Any, ...]  # a pool of pages per layer, as `DecodeAttention.empty` makes it


def empty_cache(spec: ModelSpec, pages: int, page_size: int, dtype: DTypeLike, attention: DecodeAttention = XLA) -> Cache:
    """Makes a cache of so many pages in every layer."""
    return tuple(attention.empty(pages, page_size, spec.num_kv_heads, spec.head_dim, dtype) for _ in range(spec.num_layers))


def in_order(rows: int, columns: int) -> Array:
    """Tables of rows that have `columns` pages each, in order: [rows, columns] int32."""
    return jnp.arange(rows * columns, dtype=jnp.int32).reshape(rows, columns)


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
        cache, tables = empty_cache(spec, rows * 2, 64, dtype), in_order(rows, 2)
        hidden, cache = model.extend(prompt_ids, Places(positions, tables), cache)
        token_ids = model.logits(hidden[:, -1]).argmax(-1)
        places = Places(positions[:, -1:] + 1, tables)
        hidden, cache = model.extend(token_ids[:, None], places, cache)
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
        self, token_ids: Array, places: Places, cache: Cache, *, attention: DecodeAttention = XLA
    ) -> tuple[Array, Cache]:
        """Writes tokens into pages of the cache; each sees what is cached of its row, and those
        before it here.

        Args:
          token_ids: [R, T] int32.
          places: of the tokens. No page is written by two rows.

        Returns:
          Hidden states after the final norm, [R, T, H], those of padding without meaning, and the
          cache.
        """
        spec, written = self.spec, []
        x, rotation = self._model.embed(token_ids), rotation_at(spec, places.index)

        @functools.partial(jax.jit, static_argnames=("window", "rope"))  # traced and lowered once for all layers alike
        def layer(
            params: Any, x: Array, layer_cache: Any, rotation: Rotation, places: Places, *, window: int | None, rope: int
        ) -> tuple[Array, Any]:
            def see(query: Array, key: Array, value: Array) -> tuple[Array, Any]:
                settings = {"scale": spec.attention_scale, "softcap": spec.attention_softcap, "window": window}
                return write_and_attend(attention, query, key, value, layer_cache, places, **settings)

            return nnx.merge(self._layer, params).step(x, rope, rotation, see)

        for params, layer_cache, window, rope in zip(self._layers, cache, spec.windows, spec.rope_of_layer, strict=True):
            x, new = layer(params, x, layer_cache, rotation, places, window=window, rope=rope)
            written.append(new)
        return self._model.norm(x), tuple(written)
