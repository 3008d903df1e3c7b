"""The kernel over the cache's pages, compiled for the GPU: at Qwen3-0.6B's and SmolLM2's heads, against the formula."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.backends.jax.decode_attention import IMPLEMENTATIONS, Pages, Places, find_groups
from tests.unit.backends.jax.test_decode_attention import CASES, formula, inputs

pytestmark = pytest.mark.gpu
BOUND = 5e-3  # ||got - want|| / ||want||: bfloat16 in and out; 1.3e-3 to 2.0e-3 seen on an H200


def close(out, want, index):
    out, want = (np.where((np.asarray(index) >= 0)[..., None, None], np.asarray(x, np.float64), 0) for x in (out, want))
    assert np.linalg.norm(out - want) < BOUND * np.linalg.norm(want)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads, kv_heads, dim", [(16, 8, 128), (9, 3, 64)])
@pytest.mark.parametrize("window, softcap", [(None, None), (70, None), (100, 20.0)])
def test_is_the_formula(case, heads, kv_heads, dim, window, softcap):
    query, cache, places = inputs(case, heads, kv_heads, dim, jnp.bfloat16)
    settings = dict(scale=dim**-0.5, softcap=softcap, window=window)
    out = jax.jit(functools.partial(IMPLEMENTATIONS["pallas_gpu"].attend, **settings))(query, cache, places)
    close(out, formula(query, cache, places, **settings), places.index)


@pytest.mark.parametrize("window", [None, 512])
def test_a_full_batch_is_what_plain_xla_makes_of_it(window):
    """Qwen3-0.6B's heads, 256 slots in 16 groups of 16 with a prompt of 1,000 tokens, and completions of any length."""
    generator = np.random.default_rng(0)
    slots, pages, shared, columns = 256, 8192, 15, 32
    fresh = iter(generator.permutation(pages))
    tables = np.full((slots, columns), pages, np.int32)
    for first in range(0, slots, 16):
        tables[first : first + 16, :shared] = [next(fresh) for _ in range(shared)]
    tables[:, shared:] = [[next(fresh) for _ in range(columns - shared)] for _ in range(slots)]
    index = jnp.asarray(generator.integers(1000, 2048, (slots, 1)), jnp.int32).at[7].set(-1)
    key = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(key[0], (slots, 1, 16, 128), jnp.bfloat16)
    cache = Pages(*(jax.random.normal(k, (pages, 8, 64, 128), jnp.bfloat16) for k in key[1:]))
    groups = find_groups(tables, pages, np.arange(slots))
    places = Places(index, jnp.asarray(tables), None, jax.tree.map(jnp.asarray, groups))
    results = [
        jax.jit(functools.partial(IMPLEMENTATIONS[name].attend, scale=128**-0.5, window=window))(query, cache, at)
        for name, at in (("xla", places), ("pallas_gpu", places), ("pallas_gpu", dataclasses.replace(places, groups=None)))
    ]
    for out in results[1:]:
        close(out, results[0], index)
