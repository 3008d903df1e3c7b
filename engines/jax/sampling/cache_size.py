"""Size of the sampler's cache."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from rljax.backends.jax.cached import empty_cache
from rljax.backends.jax.decode_attention import DecodeAttention
from rljax.backends.jax.mesh import first_device, row_shards
from rljax.engines.jax.config import JaxConfig
from rljax.engines.jax.sampling.pages import columns
from rljax.engines.jax.tuning import memory_of
from rljax.errors import UserError
from rljax.hf.spec import ModelSpec


def pages_per_shard(
    settings: JaxConfig, spec: ModelSpec, mesh: Mesh, attention: DecodeAttention, page_size: int, weights: Any
) -> int:
    """Pages of each data shard's pool: `jax.cache_tokens` of them, or as many as all slots can fill
    and the memory that is free beside the weights allows.

    Raises:
      UserError: too few for one request of `jax.context_length`, or more than the attention can
        address.
    """
    shards, least = row_shards(mesh), columns(settings.context_length, page_size)
    heads = spec.num_kv_heads // (mesh.shape["tensor"] if spec.num_kv_heads % mesh.shape["tensor"] == 0 else 1)
    most = attention.most_pages(page_size, heads, spec.head_dim)
    if settings.cache_tokens is not None:
        pages = settings.cache_tokens // (page_size * shards)
        if most is not None and pages > most:
            raise UserError(f"jax.cache_tokens: {attention.name} can address {most * page_size * shards} tokens at most")
        culprit = f"jax.cache_tokens: {settings.cache_tokens} tokens"
    else:
        limits = [settings.slots // shards * least, most, _that_fit(settings, spec, mesh, attention, page_size, weights)]
        pages = min(limit for limit in limits if limit is not None)
        culprit = f"jax.cache_memory_fraction: room for {pages * page_size * shards} tokens"
    if pages < least:
        raise UserError(
            f"{culprit}, and one request of jax.context_length={settings.context_length} needs {least * page_size * shards} "
            f"({least} pages of {page_size} in each of {shards} data shards)"
        )
    return pages


def _that_fit(
    settings: JaxConfig, spec: ModelSpec, mesh: Mesh, attention: DecodeAttention, page_size: int, weights: Any
) -> int | None:
    """Pages that fit a device beside the weights; None where its memory is not known."""
    device = first_device(mesh)
    memory = memory_of(device)
    if memory is None:
        return None
    statistics = device.memory_stats() if device in jax.local_devices() else None
    used = statistics["bytes_in_use"] if statistics is not None else sum(map(shard_bytes, jax.tree.leaves(weights)))
    page = jax.eval_shape(lambda: empty_cache(spec, 1, page_size, settings.cache_dtype, attention))
    bytes_of_page = sum(shard_bytes(_placed(leaf, mesh, attention)) for leaf in jax.tree.leaves(page))
    return int(settings.cache_memory_fraction * max(memory - used, 0)) // bytes_of_page


def _placed(leaf: jax.ShapeDtypeStruct, mesh: Mesh, attention: DecodeAttention) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh, attention.spec(leaf.shape, mesh.shape))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def shard_bytes(leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on each of its devices."""
    assert leaf.sharding is not None
    shape = leaf.sharding.shard_shape(leaf.shape)
    return jnp.dtype(leaf.dtype).itemsize * math.prod(shape)
