"""The kernel over the cache, compiled for the GPU: at Qwen3-0.6B's and SmolLM2's heads, against the formula."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.backends.jax.decode_attention import IMPLEMENTATIONS
from tests.unit.backends.jax.test_decode_attention import DECODE, PREFILL, formula, inputs

pytestmark = pytest.mark.gpu
BOUND = 5e-3  # ||got - want|| / ||want||: bfloat16 in and out; 1.3e-3 to 2.0e-3 seen on an H200


@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("heads, kv_heads, dim", [(16, 8, 128), (9, 3, 64)])
@pytest.mark.parametrize("window, softcap", [(None, None), (70, None), (100, 20.0)])
def test_is_the_formula(case, heads, kv_heads, dim, window, softcap):
    arrays, (index, rows) = inputs(case, heads, kv_heads, dim, jnp.bfloat16), case
    settings = dict(scale=dim**-0.5, softcap=softcap, window=window)
    out = jax.jit(functools.partial(IMPLEMENTATIONS["pallas_gpu"].attend, **settings))(*arrays, index, rows)
    want = formula(*arrays, index, rows, **settings)
    out = np.where((index >= 0)[..., None, None], np.asarray(out, np.float64), 0)
    assert np.linalg.norm(out - want) < BOUND * np.linalg.norm(want)
