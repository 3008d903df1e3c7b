"""JAX's own Pallas kernel for GPUs: reads each row's keys and values once, up to the row's own length.

A slot's keys are cut into a few splits that are worked on side by side, so that a long row among short ones is not waited for;
splits beyond a row's length, or before its window, end at once.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from rljax.backends.jax.decode_attention.interface import DecodeAttention, Problem
from rljax.backends.jax.sharding import BATCH, fit

BLOCK = 64  # keys that are looked at at once
MOST_SPLITS = 4
SMALLEST_DIM, LARGEST_DIM = 16, 256
INDEXABLE = 2**31  # elements of a layer's cache: the kernel's offsets are int32


def attend(
    query: Array,
    key: Array,
    value: Array,
    lengths: Array,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    interpret: bool = False,
) -> Array:
    assert softcap is None, "refused before"
    run = functools.partial(_attend, scale=scale, window=window, interpret=interpret)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return run(query, key, value, lengths)
    cache = fit((BATCH, "tensor", None, None), key.shape, mesh.shape)
    heads, rows = PartitionSpec(*cache[:2], None), PartitionSpec(cache[0])
    sharded = jax.shard_map(run, in_specs=(heads, cache, cache, rows), out_specs=heads, check_vma=False)
    return sharded(query, key, value, lengths)


def _attend(
    query: Array, key: Array, value: Array, lengths: Array, *, scale: float, window: int | None, interpret: bool
) -> Array:
    from jax.experimental.pallas.ops.gpu.decode_attention import gqa  # loads Triton's lowering: only where it is used

    starts = jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0)
    return gqa(
        query,
        key.swapaxes(1, 2),  # undone within, so that nothing moves
        value.swapaxes(1, 2),
        starts,
        lengths,
        sm_scale=scale,
        block_k=BLOCK,
        k_splits=splits(key.shape[2]),
        interpret=interpret,
    ).astype(query.dtype)


def splits(length: int) -> int:
    """Equal parts of whole blocks, as many as there can be."""
    blocks = length // BLOCK
    return max(count for count in range(1, MOST_SPLITS + 1) if blocks % count == 0)


@dataclasses.dataclass(frozen=True)
class _PallasGpu(DecodeAttention):
    def refusal(self, problem: Problem) -> str | None:
        half = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
        dim = problem.head_dim
        if problem.platform != "gpu":
            return f"runs on GPUs, and the devices are of {problem.platform}"
        if problem.softcap is not None:
            return "has no soft-cap, and the model caps its attention logits"
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


PALLAS_GPU = _PallasGpu("pallas_gpu", attend, length_multiple=4 * BLOCK)
