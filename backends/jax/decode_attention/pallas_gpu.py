"""A Pallas kernel for GPUs: reads keys and values where they lie in their pages, as far as a row
reaches, and those that rows share once for a group of rows.

A kernel of our own because none does all of it: that of
`jax.experimental.pallas.ops.gpu.paged_attention` (deprecated in JAX 0.11) takes one query per row
and shares nothing, cuDNN's takes no queries that begin in the middle of chosen rows.

One program per row, key/value head and block of queries: the query heads of a group are stacked,
so that 16 of them or more are multiplied at once (Dao 2023, arXiv:2307.08691, with the whole row
in one loop: with many slots there are programs enough). Before it, with `Places.groups`, one
program per item and head, with the queries of all its members stacked. It leaves unnormalized sums
from which the members' own programs go on (Hydragen: arXiv:2402.05099).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rljax.backends.jax.decode_attention.groups import HEAD, MEMBERS, PARTS, Groups
from rljax.backends.jax.decode_attention.interface import MASKED, DecodeAttention, Pages, Places, Problem
from rljax.backends.jax.platforms import lacking

SMALLEST_BLOCK_Q, LARGEST_BLOCK_Q = 16, 64  # queries, heads of a group counted
SMALLEST_DIM, LARGEST_DIM = 16, 256
SMALLEST_PAGE, LARGEST_PAGE = 16, 128  # tokens: one page is looked at at once
FEW_QUERIES = 16  # in a block: two warps are as much as they keep busy
INDEXABLE = 2**31  # elements of a layer's keys: offsets are int32


class Settings(NamedTuple):
    """Parameters of `attend` that a kernel is compiled for."""

    scale: float
    softcap: float | None
    window: int | None
    interpret: bool


class Partial(NamedTuple):
    """Attention of W items and K heads over the items' pages; padding behind the queries."""

    out: Array  # [W, K, Q + block_q, D] float32, not divided by the total
    peak: Array  # [W, K, Q + block_q] float32, largest logit
    total: Array  # [W, K, Q + block_q] float32, sum of the weights


class PallasGpu(DecodeAttention):
    name = "pallas_gpu"
    reads_groups = True

    def __init__(self, *, interpret: bool = False) -> None:
        """
        Args:
          interpret: runs the kernels' programs without a GPU, slowly.
        """
        self._interpret = interpret

    def refusal(self, problem: Problem) -> str | None:
        half = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
        dim, page = problem.head_dim, problem.page_size
        if reason := lacking(self.name, problem.platform):
            return reason
        if problem.dtype not in half or problem.cache_dtype != problem.dtype:
            return (
                "needs jax.sampler_dtype and jax.cache_dtype to be the same one of bfloat16 and float16, "
                f"and they are {problem.dtype} and {problem.cache_dtype}"
            )
        if dim & (dim - 1) or not SMALLEST_DIM <= dim <= LARGEST_DIM:
            return f"needs a head_dim that is a power of two from {SMALLEST_DIM} to {LARGEST_DIM}, and the model's is {dim}"
        if page & (page - 1) or not SMALLEST_PAGE <= page <= LARGEST_PAGE:
            return f"needs a jax.page_size that is a power of two from {SMALLEST_PAGE} to {LARGEST_PAGE}, and it is {page}"
        if problem.kv_heads % problem.head_shards:
            return f"needs a tensor axis that divides the {problem.kv_heads} key/value heads, and it is {problem.head_shards}"
        return None

    def most_pages(self, page_size: int, kv_heads: int, head_dim: int) -> int:
        return (INDEXABLE - 1) // (kv_heads * head_dim * page_size)

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
        settings = Settings(scale, softcap, window, self._interpret)
        partial = None if places.groups is None else _see_items(query, cache, places, places.groups, settings)
        return _see_rows(query, cache, places, partial, settings)


def _see_rows(query: Array, cache: Pages, places: Places, partial: Partial | None, settings: Settings) -> Array:
    """Attention of every row over the pages that no item sees for it."""
    rows, length, heads, dim = query.shape
    kv_heads = cache.key.shape[1]
    per_head = length * heads // kv_heads
    block_q = _block_q(per_head)
    blocks = -(-per_head // block_q)
    stacked = _stacked(query, kv_heads)
    index = jnp.repeat(places.index, heads // kv_heads, axis=1)
    padded = jnp.pad(index, ((0, 0), (0, blocks * block_q - per_head)), constant_values=-1)
    starts, stops = _bounds(padded.reshape(rows, blocks, block_q), cache.key.shape[2], settings.window)
    if partial is None:
        own = jnp.zeros((rows, 4), jnp.int32)
    else:
        assert places.groups is not None
        own = places.groups.own
    starts = jnp.maximum(starts, own[:, :1])
    specs = _Specs(cache, places.tables.shape[1], lambda r, k, i: r)
    seen = () if partial is None else tuple(specs.of_items(leaf) for leaf in partial)
    out = _call(
        functools.partial(_rows_kernel, per_head=per_head, group=heads // kv_heads, settings=settings),
        grid=(rows, kv_heads, blocks),
        in_specs=[
            specs.block((None, None, block_q, dim), lambda r, k, i: (r, k, i, 0)),
            specs.block((None, block_q), lambda r, k, i: (r, i)),
            specs.block((None, None, 2), lambda r, k, i: (r, i, 0)),
            specs.block((None, 4), lambda r, k, i: (r, 0)),
            *specs.pages(),
            *seen,
        ],
        out_specs=specs.block((None, None, block_q, dim), lambda r, k, i: (r, k, i, 0)),
        out_shape=jax.ShapeDtypeStruct(stacked.shape, query.dtype),
        settings=settings,
        num_warps=2 if block_q <= FEW_QUERIES else 4,
        name="paged_attention",
    )(stacked, index, jnp.stack([starts, stops], axis=-1), own, places.tables, *cache, *(partial or ()))
    return out.reshape(rows, kv_heads, length, heads // kv_heads, dim).swapaxes(1, 2).reshape(query.shape)


def _see_items(query: Array, cache: Pages, places: Places, groups: Groups, settings: Settings) -> Partial:
    """Attention of the members of every item over its pages."""
    kv_heads, dim = cache.key.shape[1], query.shape[-1]
    group = query.shape[2] // kv_heads
    queries, pad = _power_of_two(MEMBERS * group, SMALLEST_BLOCK_Q), _block_q(group)
    row, first, last, members = (groups.items[:, 0], groups.items[:, 1], groups.items[:, 2], groups.items[:, HEAD:])
    items = len(members)
    filled = queries - MEMBERS * group
    member = jnp.maximum(members, 0)
    stacked = _stacked(query[member, 0], kv_heads)  # [W, K, MEMBERS * group, D]
    stacked = jnp.pad(stacked, ((0, 0), (0, 0), (0, filled), (0, 0)))
    index = jnp.repeat(jnp.where(members >= 0, places.index[member, 0], -1), group, axis=1)
    index = jnp.pad(index, ((0, 0), (0, filled)), constant_values=-1)
    starts, stops = _bounds(index[:, None], cache.key.shape[2], settings.window)
    range_ = jnp.stack([jnp.maximum(first, starts[:, 0]), jnp.minimum(last, stops[:, 0]), last], axis=-1)
    specs = _Specs(cache, places.tables.shape[1], lambda w, k: w)
    shape = (items, kv_heads, queries + pad)
    shapes = (*shape, dim), shape, shape
    return Partial(
        *_call(
            functools.partial(_items_kernel, settings=settings),
            grid=(items, kv_heads),
            in_specs=[
                specs.block((None, None, queries, dim), lambda w, k: (w, k, 0, 0)),
                specs.block((None, queries), lambda w, k: (w, 0)),
                specs.block((None, 3), lambda w, k: (w, 0)),
                *specs.pages(),
            ],
            out_specs=[
                specs.block((None, None, *shape[2:]), lambda w, k, n=len(shape) - 2: (w, k, *[0] * n)) for shape in shapes
            ],
            out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
            settings=settings,
            num_warps=4,
            name="shared_pages_attention",
        )(stacked, index, range_, places.tables[row], *cache)
    )


class _Specs:
    """Block specs of the arrays that both kernels read."""

    def __init__(self, cache: Pages, columns: int, row: Callable[..., Any]) -> None:
        from jax.experimental import pallas as pl  # loads Triton's lowering: only where it is used

        self.block = pl.BlockSpec
        self._pool, self._columns, self._row = cache.key.shape, columns, row

    def pages(self) -> tuple[Any, Any, Any]:
        """Specs of the table of a program's row, and of all keys and all values of its head."""
        pages, _, size, dim = self._pool
        pool = self.block((pages, None, size, dim), lambda _, k, *__: (0, k, 0, 0))
        return self.block((None, self._columns), lambda *at: (self._row(*at), 0)), pool, pool

    def of_items(self, leaf: Array) -> Any:
        """Spec of an array of a `Partial`: all items of a program's head."""
        items, _, *rest = leaf.shape
        return self.block((items, None, *rest), lambda _, k, *__: (0, k, *[0] * len(rest)))


def _call(kernel: Callable[..., None], *, settings: Settings, num_warps: int, **arguments: Any) -> Callable[..., Any]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    params = plgpu.CompilerParams(num_warps=num_warps, num_stages=2)
    return pl.pallas_call(kernel, compiler_params=params, interpret=settings.interpret, **arguments)


def _stacked(query: Array, kv_heads: int) -> Array:
    """[R, T, N, D] -> [R, K, T * N / K, D]"""
    rows, length, heads, dim = query.shape
    return query.reshape(rows, length, kv_heads, heads // kv_heads, dim).swapaxes(1, 2).reshape(rows, kv_heads, -1, dim)


def _block_q(queries: int) -> int:
    return min(_power_of_two(queries, SMALLEST_BLOCK_Q), LARGEST_BLOCK_Q)


def _power_of_two(number: int, least: int) -> int:
    return max(least, 1 << (number - 1).bit_length())


def _bounds(index: Array, page_size: int, window: int | None) -> tuple[Array, Array]:
    """First column of the table that some query sees, and one past the last: [..., Q] -> [...]."""
    stops = (index.max(axis=-1) + page_size) // page_size
    if window is None:
        return jnp.zeros_like(stops), stops
    earliest = jnp.where(index < 0, jnp.iinfo(jnp.int32).max, index).min(axis=-1)
    return jnp.minimum(jnp.maximum(earliest - window + 1, 0) // page_size, stops), stops


def _rows_kernel(
    query_ref: Any,  # [block_q, D]
    index_ref: Any,  # [block_q]
    range_ref: Any,  # [2]: first column of the table, one past the last
    own_ref: Any,  # [4], of Groups.own
    table_ref: Any,  # [C]
    key_ref: Any,  # [P, page_size, D]
    value_ref: Any,  # [P, page_size, D]
    *rest: Any,  # the arrays of a Partial of W items, where there is one, and the result [block_q, D]
    per_head: int,
    group: int,
    settings: Settings,
) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    *partial, out_ref = rest
    block_q, dim = query_ref.shape
    inside = jnp.arange(block_q) < per_head - pl.program_id(2) * block_q
    whole = pl.ds(0, block_q)
    query = plgpu.load(query_ref.at[whole, :], mask=inside[:, None], other=0.0)
    index = plgpu.load(index_ref.at[whole], mask=inside, other=-1)
    state = _nothing(block_q, dim)
    if partial:
        of_group = jnp.arange(block_q) < group
        mine = pl.ds(own_ref[3] * group, block_q)

        for part in range(PARTS):  # not in a loop: their loads are on the way together
            at, there = jnp.where(part < own_ref[2], own_ref[1] + part, 0), of_group & (part < own_ref[2])
            out = plgpu.load(partial[0].at[at, mine, :], mask=there[:, None], other=0.0)
            peak = plgpu.load(partial[1].at[at, mine], mask=there, other=MASKED)
            total = plgpu.load(partial[2].at[at, mine], mask=there, other=0.0)
            state = _merged(state, (out, peak, total))
    state = _see(query, index, table_ref, key_ref, value_ref, range_ref[0], range_ref[1], state, settings)
    out, _, total = state
    out = out / jnp.where(total > 0, total, 1.0)[:, None]
    plgpu.store(out_ref.at[whole, :], out.astype(out_ref.dtype), mask=inside[:, None])


def _items_kernel(
    query_ref: Any,  # [Q, D]
    index_ref: Any,  # [Q]
    range_ref: Any,  # [3]: first column of the table, one past the last, 0 where the item is unused
    table_ref: Any,  # [C]
    key_ref: Any,  # [P, page_size, D]
    value_ref: Any,  # [P, page_size, D]
    out_ref: Any,  # [Q + padding, D]
    peak_ref: Any,  # [Q + padding]
    total_ref: Any,  # [Q + padding]
    *,
    settings: Settings,
) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    queries, dim = query_ref.shape

    @pl.when(range_ref[2] > 0)
    def _() -> None:
        whole = pl.ds(0, queries)
        query, index = plgpu.load(query_ref.at[whole, :]), plgpu.load(index_ref.at[whole])
        nothing = _nothing(queries, dim)
        out, peak, total = _see(query, index, table_ref, key_ref, value_ref, range_ref[0], range_ref[1], nothing, settings)
        plgpu.store(out_ref.at[whole, :], out)
        plgpu.store(peak_ref.at[whole], peak)
        plgpu.store(total_ref.at[whole], total)


def _nothing(queries: int, dim: int) -> tuple[Array, Array, Array]:
    """Sum of weighted values, largest logit and sum of weights, of no keys."""
    zeros = jnp.zeros((queries, dim), jnp.float32)
    return zeros, jnp.full((queries,), MASKED, jnp.float32), jnp.zeros((queries,), jnp.float32)


def _merged(one: tuple[Array, Array, Array], other: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """The state after the keys of both."""
    higher = jnp.maximum(one[1], other[1])
    first, second = jnp.exp(one[1] - higher), jnp.exp(other[1] - higher)
    return one[0] * first[:, None] + other[0] * second[:, None], higher, one[2] * first + other[2] * second


def _see(
    query: Array,
    index: Array,
    table_ref: Any,
    key_ref: Any,
    value_ref: Any,
    start: Array,
    stop: Array,
    state: tuple[Array, Array, Array],
    settings: Settings,
) -> tuple[Array, Array, Array]:
    """Adds the pages of columns [start, stop) of the table to the state."""
    from jax.experimental.pallas import triton as plgpu

    _, size, _ = key_ref.shape
    last = table_ref.shape[0] - 1

    def turn(column: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        out, peak, total, page = carry
        following = table_ref[jnp.minimum(column + 1, last)]  # known a turn ahead: its keys can be fetched early
        logits = plgpu.dot(query, key_ref[page, :, :].T) * settings.scale
        if settings.softcap is not None:
            logits = jnp.tanh(logits / settings.softcap) * settings.softcap
        keys = (column * size + jnp.arange(size))[None, :]
        seen = keys <= index[:, None]
        if settings.window is not None:
            seen &= keys > index[:, None] - settings.window
        logits = jnp.where(seen, logits, MASKED)
        higher = jnp.maximum(peak, logits.max(axis=-1))
        weights, correction = jnp.exp(logits - higher[:, None]), jnp.exp(peak - higher)
        value = value_ref[page, :, :]
        out = out * correction[:, None] + plgpu.dot(weights.astype(value.dtype), value)
        return out, higher, total * correction + weights.sum(axis=-1), following

    first = table_ref[jnp.minimum(start, last)]
    return jax.lax.fori_loop(start, stop, turn, (*state, first))[:3]


PALLAS_GPU = PallasGpu()
