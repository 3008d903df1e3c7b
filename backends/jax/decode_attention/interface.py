"""Interface of attention over a paged key/value cache, and the problems it is asked to solve.

A layer's cache is a pool of pages, each with room for the keys and values of `page_size` tokens. A
row's tokens lie in the pages that its table names, in order, and rows may name the same page.
Implementations own the layout of a page; pages are the first dimension of every array of it.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from rljax.backends.jax.decode_attention.groups import Groups
from rljax.backends.jax.sharding import BATCH, fit

MASKED = -1e30  # logit of a key that is not seen; finite: a query that sees nothing gets an average, not NaN


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything about a run that an implementation may be unable to do."""

    platform: str  # of the devices: "cpu", "gpu", "tpu"
    dtype: jnp.dtype  # of queries
    cache_dtype: jnp.dtype
    page_size: int  # tokens
    kv_heads: int
    head_dim: int
    softcap: float | None
    head_shards: int = 1  # shards of the mesh that take heads
    rows: int = 1  # decoded at once by a device
    columns: int = 1  # pages of a row, at most
    group: int = 2  # query heads per key/value head


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Places:
    """Pages and positions of the tokens of R rows, T of them new."""

    index: Array  # [R, T] int32, of each new token in its row, consecutive; -1: padding, behind them
    tables: Array  # [R, C] int32, pages of the row in order, counted in its shard's part of the pool; out of range: no page
    shard: Array | None = None  # [R] int32, of the pool, that has the row's pages; None: rows lie on the shards in order
    groups: Groups | None = None  # of rows that begin alike; only with one new token per row


class Pages(NamedTuple):
    """Keys and values of one layer, a page by itself for each head."""

    key: Array  # [P, K, page_size, D]
    value: Array  # [P, K, page_size, D]


class DecodeAttention(abc.ABC):
    """One implementation: the layout of pages, writing to them, and attention over them."""

    name: str
    head_axis: int = 1  # of the arrays of a layer's cache
    reads_groups: bool = False  # makes use of `Places.groups`

    def refusal(self, problem: Problem) -> str | None:
        """Why it can't, as an error says it; None where it can."""
        return None

    def page_size(self, asked: int, context: int) -> int:
        """Tokens per page, where `asked` are asked for and a row has at most `context`."""
        return asked

    def most_pages(self, page_size: int, kv_heads: int, head_dim: int) -> int | None:
        """Largest pool that it can address on a device with so many heads; None: any."""
        return None

    def empty(self, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: DTypeLike) -> Any:
        """Makes a layer's cache; nothing in it is seen before it is written."""
        shape = (pages, kv_heads, page_size, head_dim)
        return Pages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def spec(self, shape: tuple[int, ...], sizes: Any) -> PartitionSpec:
        """Partitioning of an array of the cache on a mesh of these sizes: pages as rows, and heads."""
        axes: list[Any] = [BATCH, *[None] * (len(shape) - 1)]
        axes[self.head_axis] = "tensor"
        return fit(axes, shape, sizes)

    def write(self, cache: Any, key: Array, value: Array, places: Places) -> Any:
        """Puts new keys and values, [R, T, K, D] each, at their places; drops padding."""
        size = cache.key.shape[2]
        page, offset = destinations(places, size, len(cache.key))
        return Pages(
            cache.key.at[page, :, offset].set(key.astype(cache.key.dtype), mode="drop"),
            cache.value.at[page, :, offset].set(value.astype(cache.value.dtype), mode="drop"),
        )

    @abc.abstractmethod
    def attend(
        self,
        query: Array,
        cache: Any,
        places: Places,
        *,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
    ) -> Array:
        r"""Softmax attention of grouped query heads; a query sees the keys of its row at or before
        its own index.

        .. math:: \mathrm{softmax}_s(c \tanh(q_t \cdot k_s\,\mathrm{scale} / c))\, v_s,\quad
                  \mathrm{index}_t - \mathrm{window} < s \le \mathrm{index}_t

        Args:
          query: [R, T, N, D], N a multiple of K.
          cache: of a layer, what is new in it included.
          places: of the queries; the result of padding is finite and means nothing.
          softcap: c; None for no cap.
          window: keys a query sees, itself included; None: all.

        Returns:
          [R, T, N, D] in the dtype of query.
        """


def destinations(places: Places, page_size: int, pages: int) -> tuple[Array, Array]:
    """Page and offset of every new token, [R, T] each; padding is in no page: out of range."""
    columns = jnp.where(places.index >= 0, places.index // page_size, places.tables.shape[1])
    page = jnp.take_along_axis(places.tables, columns, axis=1, mode="fill", fill_value=pages)
    return page, places.index % page_size


def write_and_attend(
    attention: DecodeAttention, query: Array, key: Array, value: Array, cache: Any, places: Places, **settings: Any
) -> tuple[Array, Any]:
    """Writes what is new and attends, on whatever mesh is in use; returns both results.

    A shard of the pool serves the rows whose pages it has: rows that lie on the shards in order are
    computed where they lie. Others are known everywhere, computed by the shard that has them, and
    added up.
    """

    def here(query: Array, key: Array, value: Array, cache: Any, places: Places) -> tuple[Array, Any]:
        cache = attention.write(cache, key, value, places)
        return attention.attend(query, cache, places, **settings), cache

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return here(query, key, value, cache, places)
    cache_specs = jax.tree.map(lambda leaf: attention.spec(leaf.shape, mesh.shape), cache)
    first = jax.tree.leaves(cache_specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))[0]
    rows, heads = first[0], first[attention.head_axis]

    def on_shard(query: Array, key: Array, value: Array, cache: Any, places: Places) -> tuple[Array, Any]:
        if places.shard is None or rows is None:
            return here(query, key, value, cache, places)
        mine = places.shard == jax.lax.axis_index(rows)
        places = dataclasses.replace(places, index=jnp.where(mine[:, None], places.index, -1))
        out, cache = here(query, key, value, cache, places)
        return jax.lax.psum(jnp.where(mine[:, None, None, None], out, 0), rows), cache

    over = rows if places.shard is None else None
    tokens = PartitionSpec(over, None, heads, None)
    of_rows = jax.tree.map(lambda leaf: PartitionSpec(over, *[None] * (leaf.ndim - 1)), places)
    specs = (tokens, tokens, tokens, cache_specs, of_rows)
    run = jax.shard_map(on_shard, in_specs=specs, out_specs=(tokens, cache_specs), check_vma=False)
    return run(query, key, value, cache, places)
