"""The transformer against itself: packing, caches, blocks, remat and depth change nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.backends.jax.cached import CachedTransformer, unstack
from rljax.backends.jax.decode_attention import Pages, Places
from rljax.backends.jax.model import BLOCK, Norm, Transformer, abstract, dot
from rljax.config.schema import ModelConfig
from rljax.hf import spec_of

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
LENGTH, PAGE, PAGES = 20, 4, 30
BOUND = 2e-5  # float32, another order of summation


def small(architecture, layers=3):
    """Windows shorter than LENGTH in every architecture that has them."""
    model = ModelConfig(architecture, 32, 48, layers, 4, 2, 8, 64, True, 0.02, "char")
    spec = spec_of(model, vocab_size=41)
    if architecture == "llama":
        return spec
    if architecture == "gemma3":
        return dataclasses.replace(spec, windows=(5, None, 3)[:layers], rope_of_layer=(1, 0, 1)[:layers])
    return dataclasses.replace(spec, windows=(None, 5, 5)[:layers])


def random_params(spec, seed=0, dtype=jnp.float32, remat="none", unroll=False):
    graphdef, shapes = abstract(spec, dtype=dtype, param_dtype=dtype, remat=remat, unroll=unroll)
    generator = np.random.default_rng(seed)
    return graphdef, jax.tree.map(lambda leaf: jnp.asarray(generator.normal(0, 0.3, leaf.shape), leaf.dtype), shapes)


@functools.partial(jax.jit, static_argnums=0)
def call(graphdef, params, *inputs):
    return nnx.merge(graphdef, params)(*inputs)


@functools.partial(jax.jit, static_argnums=0)
def extend(graphdef, params, token_ids, positions, tables, cache):
    return CachedTransformer(graphdef, unstack(params)).extend(token_ids, Places(positions, tables), cache)


def stale_cache():
    """Three layers of what earlier tenants may have left: nothing small."""
    stale = np.random.default_rng(3).normal(size=(3, PAGES, 2, PAGE, 8)).astype(np.float32) * 9
    return tuple(Pages(jnp.asarray(layer), jnp.asarray(-layer)) for layer in stale)


def tables_of(rows):
    """Pages of their own for every row, in no order."""
    return np.random.default_rng(4).permutation(PAGES)[: rows * LENGTH // PAGE].reshape(rows, -1).astype(np.int32)


@jax.jit
def positions_of(segment_ids):
    """0, 1, ... in each run of equal ids."""
    index = jnp.arange(segment_ids.shape[1])
    starts = jnp.concatenate([jnp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def hidden(graphdef, params, token_ids, segment_ids=None):
    token_ids = jnp.asarray(token_ids, jnp.int32)
    segment_ids = jnp.ones_like(token_ids) if segment_ids is None else jnp.asarray(segment_ids)
    return np.asarray(call(graphdef, params, token_ids, positions_of(segment_ids), segment_ids))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request):
    spec = small(request.param)
    return spec, *random_params(spec)


def tokens(rows, length, seed=0):
    return np.random.default_rng(seed).integers(0, 41, (rows, length)).astype(np.int32)


def test_packed_rows_equal_each_alone(model):
    _, graphdef, params = model
    token_ids = tokens(1, LENGTH)
    segments = np.repeat([1, 2, 3, 0], [7, 9, 1, 3])[None]
    packed = hidden(graphdef, params, token_ids, segments)
    for start, stop in ((0, 7), (7, 16), (16, 17)):
        alone = hidden(graphdef, params, token_ids[:, start:stop])
        np.testing.assert_allclose(packed[:, start:stop], alone, atol=BOUND)


def test_packed_rows_with_left_padding_change_nothing(model):
    _, graphdef, params = model
    token_ids = tokens(1, LENGTH)
    padded = hidden(graphdef, params, token_ids, np.repeat([0, 1], [6, LENGTH - 6])[None])
    np.testing.assert_allclose(padded[:, 6:], hidden(graphdef, params, token_ids[:, 6:]), atol=BOUND)


def test_packed_rows_show_no_token_another_segment_or_the_future(model):
    _, graphdef, params = model
    segments = np.repeat([1, 2], [8, LENGTH - 8])[None]
    before = hidden(graphdef, params, tokens(1, LENGTH), segments)
    changed = tokens(1, LENGTH)
    changed[:, :8] = (changed[:, :8] + 1) % 41  # the segment before
    changed[:, 15:] = (changed[:, 15:] + 1) % 41  # the future
    after = hidden(graphdef, params, changed, segments)
    np.testing.assert_array_equal(after[:, 8:15], before[:, 8:15])
    assert (after[:, 15:] != before[:, 15:]).any()


def test_window_is_the_number_of_tokens_seen():
    """One layer with a window of 4: the last token depends on itself and the three before it."""
    spec = dataclasses.replace(small("qwen3", layers=1), windows=(4,))
    graphdef, params = random_params(spec)
    before = hidden(graphdef, params, tokens(1, 10))[0, -1]
    for back in range(1, 10):
        changed = tokens(1, 10)
        changed[:, -1 - back] = (changed[:, -1 - back] + 1) % 41
        same = np.array_equal(hidden(graphdef, params, changed)[0, -1], before)
        assert same == (back >= 4), back


@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_decode_through_the_cache_equals_the_whole_row(model, data):
    """Whatever the chunks; rows at different positions; stale content above a row's own position is never seen."""
    _, graphdef, params = model
    token_ids = tokens(2, LENGTH)
    whole = hidden(graphdef, params, token_ids)
    cache, tables = stale_cache(), tables_of(2)
    done = np.zeros(2, int)
    out = np.zeros_like(whole)
    while (done < LENGTH).any():
        width = data.draw(st.sampled_from((1, 4, 8)))
        counts = np.array([data.draw(st.integers(0, width)) for _ in range(2)])
        counts = np.minimum(counts if counts.any() else counts + 1, LENGTH - done)
        offsets = np.arange(width)[None]
        valid = offsets < counts[:, None]
        positions = np.where(valid, done[:, None] + offsets, -1)
        inputs = np.take_along_axis(token_ids, np.clip(positions, 0, LENGTH - 1), axis=1)
        states, cache = extend(graphdef, params, inputs, positions, tables, cache)
        for row in range(2):
            out[row, done[row] : done[row] + counts[row]] = states[row, : counts[row]]
        done += counts
    np.testing.assert_allclose(out, whole, atol=BOUND)


def test_rows_are_extended_in_their_pages(model):
    """Two rows, and two of padding, one of them without pages; over some of the pages. The others keep every bit."""
    _, graphdef, params = model
    token_ids, before, tables = tokens(2, LENGTH), stale_cache(), tables_of(4)
    tables[3] = PAGES
    cache, parts = before, []
    for start, stop in ((0, 3), (3, 9), (9, LENGTH)):
        inputs = np.concatenate([token_ids[:, start:stop], np.zeros((2, stop - start), np.int32)])
        positions = np.broadcast_to(np.arange(start, stop), inputs.shape).copy()
        positions[2:] = -1
        states, cache = extend(graphdef, params, inputs, positions, tables, cache)
        parts.append(states[:2])
    np.testing.assert_allclose(np.concatenate(parts, axis=1), hidden(graphdef, params, token_ids), atol=BOUND)
    others = np.setdiff1d(np.arange(PAGES), tables[:2])
    for layer, was in zip(cache, before, strict=True):
        for now, then in zip(layer, was, strict=True):
            np.testing.assert_array_equal(now[others], then[others])


def test_rows_share_the_pages_of_an_equal_prefix(model):
    """Two rows go on differently behind eight tokens that one of them wrote."""
    _, graphdef, params = model
    token_ids = tokens(2, LENGTH)
    token_ids[1, :8] = token_ids[0, :8]
    tables = tables_of(2)
    tables[1, :2] = tables[0, :2]
    at = np.arange(LENGTH)
    cache = extend(graphdef, params, token_ids[:1, :8], at[None, :8], tables[:1], stale_cache())[1]
    states, _ = extend(graphdef, params, token_ids[:, 8:], np.stack([at[8:]] * 2), tables, cache)
    np.testing.assert_allclose(states, hidden(graphdef, params, token_ids)[:, 8:], atol=BOUND)


def loss_and_gradient(graphdef, params, token_ids):
    def loss(params):
        out = nnx.merge(graphdef, params)(token_ids, jnp.arange(token_ids.shape[1])[None])
        return jnp.sum(jnp.sin(out))

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize("remat, unroll", [("full", False), ("dots", False), ("none", True), ("full", True)])
def test_neither_remat_nor_unrolling_changes_loss_or_gradient(remat, unroll):
    spec = small("gemma3", layers=2)
    whole = loss_and_gradient(*random_params(spec), tokens(1, 8))
    results = [whole, loss_and_gradient(*random_params(spec, remat=remat, unroll=unroll), tokens(1, 8))]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), *results)


def test_program_does_not_grow_with_depth():
    def lines(layers):
        spec = small("llama", layers)
        graphdef, shapes = abstract(spec)
        ids = jax.ShapeDtypeStruct((1, 8), jnp.int32)
        return len(str(jax.make_jaxpr(lambda p, i: nnx.merge(graphdef, p)(i, i))(shapes, ids)).splitlines())

    assert lines(2) == lines(12)


def test_bfloat16_computes_in_bfloat16_and_is_near_float32():
    spec = small("qwen3")
    _, params = random_params(spec)
    exact = hidden(abstract(spec)[0], params, tokens(1, LENGTH)).astype(np.float64)
    near = hidden(abstract(spec, dtype=jnp.bfloat16)[0], params, tokens(1, LENGTH))
    assert near.dtype == jnp.bfloat16
    assert np.linalg.norm(near.astype(np.float64) - exact) < 0.1 * np.linalg.norm(exact)


def test_logits_are_the_capped_product_with_the_embedding():
    spec = dataclasses.replace(small("gemma3"), final_softcap=0.5)
    graphdef, params = random_params(spec)
    model = nnx.merge(graphdef, params)
    states = np.random.default_rng(2).normal(size=(2, 32)).astype(np.float32)
    expected = 0.5 * np.tanh(states @ np.asarray(params["embed_tokens"]["kernel"]).T / 0.5)
    np.testing.assert_allclose(model.logits(jnp.asarray(states)), expected, atol=1e-5)


def test_blocked_sums_are_nearer_to_exact_ones():
    """Blocked summation's error grows with the block and the number of blocks, not with their product."""
    generator = np.random.default_rng(5)
    x, kernel = (generator.normal(size=shape).astype(np.float32) for shape in ((40, 3000), (3000, 30)))
    exact = x.astype(np.float64) @ kernel.astype(np.float64)
    whole, blocked = (np.linalg.norm(dot(jnp.asarray(x), jnp.asarray(kernel), block) - exact) for block in (None, BLOCK))
    assert blocked < 0.7 * whole
    with jax.enable_x64(True):
        wide = dot(jnp.asarray(x, jnp.float64), jnp.asarray(kernel, jnp.float64), 7)
        np.testing.assert_allclose(wide, exact, rtol=0, atol=1e-11)


def test_precise_norm_divides_by_the_rounded_root():
    x = np.random.default_rng(6).normal(size=(50, 32)).astype(np.float32)
    norm = Norm((32,), 1e-6, 1.0, jnp.float32, precise=True)
    mean = np.asarray(jax.jit(lambda x: jnp.mean(jnp.square(x), axis=-1, keepdims=True))(x))
    root = np.float32(1) / np.sqrt(mean + np.float32(1e-6))
    np.testing.assert_array_equal(jax.jit(lambda x: norm(x))(x), x * root)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_precise_model_is_the_same_function(architecture):
    """Values and gradients, up to rounding."""
    spec = dataclasses.replace(small(architecture), intermediate_size=2 * BLOCK + 16)
    _, params = random_params(spec)

    def value(precise):
        graphdef, _ = abstract(spec, precise=precise)
        token_ids, positions = tokens(1, LENGTH), np.arange(LENGTH)[None]
        run = jax.jit(jax.value_and_grad(lambda p: jnp.sum(jnp.sin(call(graphdef, p, token_ids, positions)))))
        return jax.tree.leaves(run(params))

    for plain, precise in zip(value(False), value(True), strict=True):
        np.testing.assert_allclose(precise, plain, rtol=1e-3, atol=1e-4 * np.abs(plain).max())


def test_unknown_remat_choice_is_refused():
    with pytest.raises(ValueError, match="none, full, dots"):
        Transformer(small("llama"), remat="some")
