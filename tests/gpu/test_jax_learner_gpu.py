"""The JAX model on a GPU: attention kernels, remat and unrolling change its gradient no more than bfloat16 does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rljax.backends.jax.attention.cudnn import CudnnAttention
from rljax.backends.jax.attention.xla import XlaAttention
from rljax.backends.jax.model import abstract
from rljax.config.schema import ModelConfig
from rljax.hf import spec_of

pytestmark = pytest.mark.gpu
ROWS, LENGTH = 2, 512
BOUND = 3e-2  # ||got - want|| / ||want||: bfloat16 through three layers


def packed():
    """Segments of many lengths, padding between and behind them."""
    lengths = ((200, 1, 57, 130, -124), (-3, 300, 64, 9, -100, 36))
    return np.stack([np.repeat(np.cumsum(np.array(row) > 0) * (np.array(row) > 0), np.abs(row)) for row in lengths]).astype(
        np.int32
    )


@functools.cache
def gradient(attention, dtype, remat="none", unroll=False):
    spec = spec_of(ModelConfig("qwen3", 256, 512, 3, 4, 2, 64, 1024, True, 0.02, "char"), vocab_size=97)
    graphdef, shapes = abstract(spec, dtype=dtype, remat=remat, attention=attention, unroll=unroll)
    generator = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(generator.normal(0, 0.1, leaf.shape), leaf.dtype), shapes)
    ids, token_ids = packed(), generator.integers(0, 97, (ROWS, LENGTH))
    positions = np.concatenate([np.arange(LENGTH)[None]] * ROWS)
    bounds = attention.bounds(ids)

    @jax.jit
    def loss(params):
        hidden = nnx.merge(graphdef, params)(jnp.asarray(token_ids), jnp.asarray(positions), jnp.asarray(ids), bounds=bounds)
        return jnp.sum(jnp.where(ids[..., None] > 0, jnp.sin(hidden.astype(jnp.float32)), 0))

    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(params))]


@pytest.mark.parametrize("remat, unroll", [("none", False), ("none", True), ("full", False), ("full", True)])
def test_the_gradient_through_cudnn_is_that_of_plain_attention(remat, unroll):
    want = gradient(XlaAttention(), "float32")
    got = gradient(CudnnAttention(), "bfloat16", remat, unroll)
    plain = gradient(XlaAttention(), "bfloat16")
    for exact, ours, theirs in zip(want, got, plain, strict=True):
        size = np.linalg.norm(exact)
        assert np.isfinite(ours).all()
        assert np.linalg.norm(ours - exact) <= max(BOUND * size, 1.5 * np.linalg.norm(theirs - exact))
