"""Pallas kernels for TPUs: JAX's own ragged paged attention, which reads pages where they are, as
far as each row reaches, and one that writes new keys and values into them.

The second is our own. XLA's scatter goes token by token, which TPUs are slow at
(github.com/vllm-project/vllm/pull/19928); here every run of tokens in a page is one copy within
memory.

Keys and values of a token lie side by side, head by head, as the first kernel reads them. What rows
share is read by each of them. A row at rest between others costs up to an eighth of what the one
before it does: its query is answered as if it came behind, and the answer dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from rljax.backends.jax.decode_attention.interface import DecodeAttention, Places, Problem
from rljax.backends.jax.platforms import lacking

LANES = 128  # dimensions of a head that are multiplied at once
TILE = 8  # heads: fewer are tiled as a power of two, more as a multiple of it
SMALLEST_PAGE = 16  # tokens
BLOCK_TOKENS = 512  # keys fetched at once, the last block of a row wholly too: more would be wasted on short rows
BLOCK_BYTES = 2**21  # of them: there are two blocks in 16 MiB, the least that a kernel has on any TPU
MOST_COPIES = 16  # pages per block: each is a copy with addresses of its own, in few scalar registers
SCALAR_BYTES = 15 * 2**16  # of page tables: of 1 MiB of scalar memory on every TPU, which the kernel has other uses for too
PREFILL_QUERIES = 32  # tokens per block of queries, as the kernel's own table has nearly everywhere
DECODE_QUERIES = 8  # where a row has one: each is computed for all of a block, and a row at rest costs its part of one


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairedPages:
    """Keys and values of one layer, a token's side by side."""

    pairs: Array  # [P, page_size, 2K, D]: key and value of each head; K and D rounded up to tiles
    kv_heads: int = dataclasses.field(metadata=dict(static=True))  # of the model, on all devices


class PallasTpu(DecodeAttention):
    name = "pallas_tpu"
    head_axis = 2

    def refusal(self, problem: Problem) -> str | None:
        single, half = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
        page, heads, shards = problem.page_size, problem.kv_heads, problem.head_shards
        if reason := lacking(self.name, problem.platform):
            return reason
        if problem.dtype not in (single, half) or problem.cache_dtype != problem.dtype:
            return (
                "needs jax.sampler_dtype and jax.cache_dtype to be the same one of bfloat16 and float32, "
                f"and they are {problem.dtype} and {problem.cache_dtype}"
            )
        if page & (page - 1) or page < SMALLEST_PAGE:
            return f"needs a jax.page_size that is a power of two from {SMALLEST_PAGE} on, and it is {page}"
        if heads % shards or tiled(heads) % shards or tiled(heads) // shards != tiled(tiled(heads) // shards):
            return f"needs a tensor axis that divides the {heads} key/value heads and their tiles, and it is {shards}"
        if _scalar_bytes(problem.rows, problem.columns) > SCALAR_BYTES:
            return (
                f"needs the page tables of a device in {SCALAR_BYTES // 2**10} KiB, and {problem.rows} rows of "
                f"{problem.columns} pages need more: larger jax.page_size, fewer jax.slots, shorter jax.context_length"
            )
        local = tiled(heads) // shards
        if problem.dtype == single and local > 4 and problem.group % 2:
            return f"needs an even number of query heads per key/value head in float32, and it is {problem.group}"
        if problem.head_dim > LANES and (heads > shards or problem.dtype == single):
            return (
                f"needs a head_dim of at most {LANES}, or one key/value head per device in bfloat16, "
                f"and the model has {heads} heads of {problem.head_dim}"
            )
        return None

    def empty(self, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: DTypeLike) -> PairedPages:
        dim = -(-head_dim // LANES) * LANES
        return PairedPages(jnp.zeros((pages, page_size, 2 * tiled(kv_heads), dim), dtype), kv_heads)

    def write(self, cache: PairedPages, key: Array, value: Array, places: Places) -> PairedPages:
        pages, page_size, heads, dim = cache.pairs.shape
        pair = jnp.stack([_padded(each, heads // 2, dim) for each in (key, value)], axis=3)  # [R, T, K, 2, D]
        new = pair.reshape(-1, heads, dim).astype(cache.pairs.dtype)
        return dataclasses.replace(cache, pairs=_write(cache.pairs, new, runs_of(places, page_size, pages)))

    def attend(
        self,
        query: Array,
        cache: PairedPages,
        places: Places,
        *,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
    ) -> Array:
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

        rows, length, heads, head_dim = query.shape
        pages, _, pairs, dim = cache.pairs.shape
        group = heads // local_heads(cache)
        stacked = _padded(query, group * pairs // 2, dim).reshape(rows * length, -1, dim)
        sequences = sequences_of(places, pages)
        precise = jax.default_matmul_precision("highest") if query.dtype == jnp.float32 else contextlib.nullcontext()
        with precise:
            out = ragged_paged_attention(
                stacked,
                cache.pairs,
                *sequences,
                sm_scale=scale,
                sliding_window=window,
                soft_cap=softcap,
                num_kv_pages_per_block=pages_per_block(cache.pairs, places.tables.shape[1]),
                num_queries_per_block=min(PREFILL_QUERIES if length > 1 else DECODE_QUERIES, rows * length),
            )
        out = out.reshape(rows, length, -1, dim)[:, :, :heads, :head_dim]
        return jnp.where((places.index >= 0)[..., None, None], out, 0)  # behind the last sequence nothing was computed


def tiled(heads: int) -> int:
    """Key/value heads that so many are kept as."""
    return min(1 << (heads - 1).bit_length(), -(-heads // TILE) * TILE)


def _scalar_bytes(rows: int, columns: int) -> int:
    """Bytes of scalar memory that page tables take, in its tiles."""
    return -(-rows // TILE) * TILE * -(-columns // LANES) * LANES * 4


def local_heads(cache: PairedPages) -> int:
    """Key/value heads of the model whose pages are here: all, or a shard's."""
    return cache.kv_heads * cache.pairs.shape[2] // (2 * tiled(cache.kv_heads))


def pages_per_block(pairs: Array | jax.ShapeDtypeStruct, columns: int) -> int:
    """Pages that the kernel fetches at once."""
    _, page_size, heads, dim = pairs.shape
    itemsize = pairs.dtype.itemsize
    at_once = min(heads, TILE * 4 // itemsize)  # of them the kernel takes a tile after the other
    by_memory = BLOCK_BYTES // (page_size * at_once * dim * itemsize)
    return max(min(BLOCK_TOKENS // page_size, by_memory, MOST_COPIES, columns), 1)


class Sequences(NamedTuple):
    """Rows with new tokens, in order, as the attention kernel takes them: queries side by side, the
    last of a sequence at its last key.

    What lies between a row's tokens and those of the next such row, padding and rows at rest,
    counts as more tokens of it, and what lies before the first as tokens before; their results are
    dropped. What lies behind the last token is in no sequence.
    """

    lengths: Array  # [R] int32, keys
    tables: Array  # [R, C] int32, all within the pool
    ends: Array  # [R + 1] int32, of the queries of the sequences before
    number: Array  # [1] int32, of sequences, at least one


def sequences_of(places: Places, pages: int) -> Sequences:
    """Describes the rows to the kernel. Without a sequence, or with one without keys, it would
    start a copy that nothing waits for, so the first row stands in where all are at rest.
    """
    rows, length = places.index.shape
    counts = jnp.sum(places.index >= 0, axis=1, dtype=jnp.int32)
    order = jnp.argsort(counts == 0, stable=True).astype(jnp.int32)
    number = jnp.maximum(jnp.sum(counts > 0, dtype=jnp.int32), 1)
    first = order * length
    end = jnp.maximum(first[number - 1] + counts[order[number - 1]], 1)
    ends = jnp.concatenate([jnp.where(jnp.arange(rows) < number, first, end).at[0].set(0), end[None]])
    lengths = jnp.maximum(places.index[order, 0] + ends[1:] - first, 1)
    return Sequences(lengths, jnp.clip(places.tables, 0, pages - 1)[order], ends, number[None])


class Runs(NamedTuple):
    """New tokens that lie side by side in a page, those of S pages."""

    page: Array  # [S] int32
    offset: Array  # [S] int32, in the page
    first: Array  # [S] int32, of the new tokens
    tokens: Array  # [S] int32, how many; 0: nothing is to be written


def runs_of(places: Places, page_size: int, pages: int) -> Runs:
    """Cuts the new tokens of each row at the ends of its pages. No page: nothing is written."""
    rows, length = places.index.shape
    start = jnp.maximum(places.index[:, :1], 0)
    end = start + jnp.sum(places.index >= 0, axis=1, keepdims=True, dtype=jnp.int32)
    columns = start // page_size + jnp.arange((length + page_size - 2) // page_size + 1)  # [R, those that a row may touch]
    page = jnp.take_along_axis(places.tables, columns, axis=1, mode="fill", fill_value=pages)
    low, high = jnp.maximum(start, columns * page_size), jnp.minimum(end, (columns + 1) * page_size)
    count = jnp.where((page >= 0) & (page < pages), jnp.maximum(high - low, 0), 0)
    first = jnp.arange(rows)[:, None] * length + low - start
    return Runs(*(each.astype(jnp.int32).reshape(-1) for each in (page, low % page_size, first, count)))


def _write(pairs: Array, new: Array, runs: Runs) -> Array:
    """pairs [P, page_size, 2K, D] with the runs of new [N, 2K, D] in them, in its memory."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        _write_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(runs),
            grid=(1,),
            in_specs=[anywhere, anywhere],
            out_specs=anywhere,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(pairs.shape, pairs.dtype),
        input_output_aliases={len(runs) + 1: 0},
        name="write_pages",
    )(*runs, new, pairs)


def _write_kernel(
    page_ref: Any,  # [S]
    offset_ref: Any,  # [S]
    first_ref: Any,  # [S]
    tokens_ref: Any,  # [S]
    new_ref: Any,  # [N, 2K, D]
    _before: Any,  # the pages, in the memory of pairs_ref
    pairs_ref: Any,  # [P, page_size, 2K, D]
    arrived: Any,  # semaphore
) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def copy(run: Array) -> Any:
        source = new_ref.at[pl.ds(first_ref[run], tokens_ref[run])]
        target = pairs_ref.at[page_ref[run], pl.ds(offset_ref[run], tokens_ref[run])]
        return pltpu.make_async_copy(source, target, arrived)

    @pl.loop(0, len(tokens_ref))
    def start(run: Array) -> None:
        pl.when(tokens_ref[run] > 0)(lambda: copy(run).start())

    @pl.loop(0, len(tokens_ref))
    def wait(run: Array) -> None:
        pl.when(tokens_ref[run] > 0)(lambda: copy(run).wait())


def _padded(x: Array, heads: int, dim: int) -> Array:
    """[..., N, D] -> [..., heads, dim], zeros behind."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, heads - x.shape[-2]), (0, dim - x.shape[-1])])


PALLAS_TPU = PallasTpu()
