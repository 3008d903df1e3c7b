"""A Pallas kernel for GPUs: reads each row's keys and values where they lie in the cache, once, up
to the row's own length.

A kernel of our own because none does both: that of
`jax.experimental.pallas.ops.gpu.decode_attention` (deprecated in JAX 0.11) takes one query per row
and every row of the cache, cuDNN's takes no queries that begin in the middle of chosen rows.

One program per row, key/value head and block of queries: the query heads of a group are stacked,
so that 16 of them or more are multiplied at once (Dao 2023, arXiv:2307.08691, with the whole row
in one loop: with many slots there are programs enough).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from rljax.backends.jax.decode_attention.interface import DecodeAttention, Problem
from rljax.backends.jax.sharding import BATCH, fit

BLOCK_K = 64  # keys that are looked at at once
SMALLEST_BLOCK_Q, LARGEST_BLOCK_Q = 16, 64  # queries, heads of a group counted
SMALLEST_DIM, LARGEST_DIM = 16, 256
INDEXABLE = 2**31  # elements of a layer's cache: offsets are int32
MASKED = -1e30  # finite: a query that sees nothing gets a uniform average, not NaN


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
    interpret: bool = False,
) -> Array:
    run = functools.partial(_attend, scale=scale, softcap=softcap, window=window, interpret=interpret)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return run(query, key, value, index, jnp.arange(len(query)) if rows is None else rows)
    cache = fit((BATCH, "tensor", None, None), key.shape, mesh.shape)
    if rows is None:
        own = PartitionSpec(cache[0], None, cache[1], None)
        each = lambda q, k, v, i: run(q, k, v, i, jnp.arange(len(q)))  # noqa: E731
        specs = (own, cache, cache, PartitionSpec(cache[0], None))
        return jax.shard_map(each, in_specs=specs, out_specs=own, check_vma=False)(query, key, value, index)
    everywhere = PartitionSpec(None, None, cache[1], None)
    part = functools.partial(_of_shard, run, axes=cache[0])
    whole = (everywhere, cache, cache, PartitionSpec(), PartitionSpec())
    return jax.shard_map(part, in_specs=whole, out_specs=everywhere, check_vma=False)(query, key, value, index, rows)


def _of_shard(run: Any, query: Array, key: Array, value: Array, index: Array, rows: Array, *, axes: Any) -> Array:
    """Attends on one shard of a cache whose rows are split over `axes`.

    Each shard computes the rows that it has; the results are added up.
    """
    if axes is None:
        return run(query, key, value, index, rows)
    local = rows - jax.lax.axis_index(axes) * len(key)
    mine = (local >= 0) & (local < len(key))
    out = run(query, key, value, jnp.where(mine[:, None], index, -1), local)
    return jax.lax.psum(jnp.where(mine[:, None, None, None], out, 0), axes)


def _attend(
    query: Array,
    key: Array,
    value: Array,
    index: Array,
    rows: Array,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
    interpret: bool,
) -> Array:
    from jax.experimental import pallas as pl  # loads Triton's lowering: only where it is used
    from jax.experimental.pallas import triton as plgpu

    batch, length, heads, dim = query.shape
    slots, kv_heads, size, _ = key.shape
    groups = heads // kv_heads
    queries = length * groups  # per key/value head
    block_q = min(max(SMALLEST_BLOCK_Q, 1 << (queries - 1).bit_length()), LARGEST_BLOCK_Q)
    blocks = -(-queries // block_q)
    stacked = query.reshape(batch, length, kv_heads, groups, dim).swapaxes(1, 2).reshape(batch, kv_heads, queries, dim)
    index = jnp.repeat(index, groups, axis=1)
    starts, stops = _bounds(jnp.pad(index, ((0, 0), (0, blocks * block_q - queries)), constant_values=-1), block_q, window)
    rows = jnp.clip(rows, 0, slots - 1)
    scalar = pl.BlockSpec((None,), lambda r, k, i: (r,))
    per_block = pl.BlockSpec((None, None), lambda r, k, i: (r, i))
    of_head = pl.BlockSpec((slots, None, size, dim), lambda r, k, i: (0, k, 0, 0))
    of_queries = pl.BlockSpec((None, None, block_q, dim), lambda r, k, i: (r, k, i, 0))
    out = pl.pallas_call(
        functools.partial(_kernel, queries=queries, scale=scale, softcap=softcap, window=window),
        grid=(batch, kv_heads, blocks),
        in_specs=[
            of_queries,
            pl.BlockSpec((None, block_q), lambda r, k, i: (r, i)),
            scalar,
            per_block,
            per_block,
            of_head,
            of_head,
        ],
        out_specs=of_queries,
        out_shape=jax.ShapeDtypeStruct(stacked.shape, query.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="cached_attention",
    )(stacked, index, rows, starts, stops, key, value)
    return out.reshape(batch, kv_heads, length, groups, dim).swapaxes(1, 2).reshape(query.shape)


def _bounds(index: Array, block_q: int, window: int | None) -> tuple[Array, Array]:
    """First block of keys that a block of queries sees, and one past the last: [R, blocks] int32
    each.
    """
    by_block = index.reshape(len(index), -1, block_q)
    stops = (by_block.max(axis=-1) + BLOCK_K) // BLOCK_K
    if window is None:
        return jnp.zeros_like(stops), stops
    earliest = jnp.where(by_block < 0, jnp.iinfo(jnp.int32).max, by_block).min(axis=-1)
    return jnp.minimum(jnp.maximum(earliest - window + 1, 0) // BLOCK_K, stops), stops


def _kernel(
    query_ref: Any,  # [block_q, D]
    index_ref: Any,  # [block_q]
    row_ref: Any,  # []
    start_ref: Any,  # []
    stop_ref: Any,  # []
    key_ref: Any,  # [B, S, D]
    value_ref: Any,  # [B, S, D]
    out_ref: Any,  # [block_q, D]
    *,
    queries: int,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    block_q, dim = query_ref.shape
    inside = jnp.arange(block_q) < queries - pl.program_id(2) * block_q
    whole = pl.ds(0, block_q)
    query = plgpu.load(query_ref.at[whole, :], mask=inside[:, None], other=0.0)
    index = plgpu.load(index_ref.at[whole], mask=inside, other=-1)
    row = row_ref[()]

    def body(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, peak, total = carry
        at = pl.ds(step * BLOCK_K, BLOCK_K)
        logits = plgpu.dot(query, key_ref[row, at, :].T) * scale
        if softcap is not None:
            logits = jnp.tanh(logits / softcap) * softcap
        keys = (step * BLOCK_K + jnp.arange(BLOCK_K))[None, :]
        seen = keys <= index[:, None]
        if window is not None:
            seen &= keys > index[:, None] - window
        logits = jnp.where(seen, logits, MASKED)
        higher = jnp.maximum(peak, logits.max(axis=-1))
        weights, correction = jnp.exp(logits - higher[:, None]), jnp.exp(peak - higher)
        value = value_ref[row, at, :]
        out = out * correction[:, None] + plgpu.dot(weights.astype(value.dtype), value)
        return out, higher, total * correction + weights.sum(axis=-1)

    nothing = (
        jnp.zeros((block_q, dim), jnp.float32),
        jnp.full((block_q,), MASKED, jnp.float32),
        jnp.zeros((block_q,), jnp.float32),
    )
    out, _, total = jax.lax.fori_loop(start_ref[()], stop_ref[()], body, nothing)
    out = out / jnp.where(total > 0, total, 1.0)[:, None]
    plgpu.store(out_ref.at[whole, :], out.astype(out_ref.dtype), mask=inside[:, None])


@dataclasses.dataclass(frozen=True)
class _PallasGpu(DecodeAttention):
    def refusal(self, problem: Problem) -> str | None:
        half = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
        dim = problem.head_dim
        if problem.platform != "gpu":
            return f"runs on GPUs, and the devices are of {problem.platform}"
        if problem.dtype not in half or problem.cache_dtype != problem.dtype:
            return (
                "needs jax.sampler_dtype and jax.cache_dtype to be the same one of bfloat16 and float16, "
                f"and they are {problem.dtype} and {problem.cache_dtype}"
            )
        if dim & (dim - 1) or not SMALLEST_DIM <= dim <= LARGEST_DIM:
            return f"needs a head_dim that is a power of two from {SMALLEST_DIM} to {LARGEST_DIM}, and the model's is {dim}"
        if problem.kv_heads % problem.head_shards:
            return f"needs a tensor axis that divides the {problem.kv_heads} key/value heads, and it is {problem.head_shards}"
        local = problem.rows * problem.kv_heads // (problem.row_shards * problem.head_shards)
        if local * self.padded(problem.length) * dim >= INDEXABLE:
            return f"indexes fewer than {INDEXABLE} elements, and a layer's cache has more: fewer jax.slots, a shorter context"
        return None


PALLAS_GPU = _PallasGpu("pallas_gpu", attend, length_multiple=BLOCK_K)
