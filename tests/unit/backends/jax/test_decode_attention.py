"""Every implementation of decode attention against the formula in float64; kernels of other devices are interpreted here."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.backends.jax.decode_attention import IMPLEMENTATIONS, Problem, choose, spans
from rljax.backends.jax.decode_attention.pallas_gpu import attend as pallas_gpu
from rljax.backends.jax.decode_attention.pallas_gpu import splits
from rljax.errors import UserError

LENGTH = 512
ATTEND = {"xla": IMPLEMENTATIONS["xla"].attend, "pallas_gpu": functools.partial(pallas_gpu, interpret=True)}
BOUND = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}  # of values near 1: a sum of parts, each rounded
LENGTHS = np.array([0, 1, 63, 64, 65, 130, 300, LENGTH], np.int32)

GPU = Problem("gpu", jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16), 256, 2048, 16, 8, 128, None)


def inputs(heads, kv_heads, dim, dtype, seed=0):
    generator = np.random.default_rng(seed)
    shapes = (len(LENGTHS), heads, dim), *[(len(LENGTHS), kv_heads, LENGTH, dim)] * 2
    return [jnp.asarray(generator.normal(size=shape), dtype) for shape in shapes]


def formula(query, key, value, *, scale, softcap, window):
    """One row and one head at a time."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    out = np.zeros_like(query)
    for row, length in enumerate(LENGTHS):
        for head in range(query.shape[1]):
            of = head // (query.shape[1] // key.shape[1])
            seen = slice(0 if window is None else max(length - window, 0), length)
            logits = key[row, of, seen] @ query[row, head] * scale
            if softcap is not None:
                logits = softcap * np.tanh(logits / softcap)
            weights = np.exp(logits - logits.max(initial=-np.inf))
            out[row, head] = weights @ value[row, of, seen] / max(weights.sum(), 1e-300)
    return out


@pytest.mark.parametrize("name", ATTEND)
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 16), (9, 3, 64), (3, 3, 32)])
@pytest.mark.parametrize("window, softcap", [(None, None), (100, None), (7, 1.5)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_is_the_formula(name, heads, kv_heads, dim, window, softcap, dtype):
    if name == "pallas_gpu" and softcap is not None:
        pytest.skip("refused: has no soft-cap")
    arrays = inputs(heads, kv_heads, dim, dtype)
    settings = dict(scale=dim**-0.5, softcap=softcap, window=window)
    out = jax.jit(functools.partial(ATTEND[name], **settings))(*arrays, LENGTHS)
    assert out.shape == arrays[0].shape and out.dtype == dtype
    np.testing.assert_allclose(np.asarray(out, np.float64)[1:], formula(*arrays, **settings)[1:], atol=BOUND[dtype])
    assert np.isfinite(np.asarray(out, np.float32)).all()


@pytest.mark.parametrize("name", ATTEND)
def test_what_lies_beyond_a_row_is_not_seen(name):
    """Not even where it is enormous; nor what lies before the window."""
    query, key, value = inputs(4, 2, 16, jnp.float32)
    attend = jax.jit(functools.partial(ATTEND[name], scale=0.25, window=70))
    index = np.arange(LENGTH)
    unseen = (index >= LENGTHS[:, None]) | (index < LENGTHS[:, None] - 70)
    spoiled = [jnp.where(unseen[:, None, :, None], 1e4, x) for x in (key, value)]
    np.testing.assert_array_equal(attend(query, *spoiled, LENGTHS)[1:], attend(query, key, value, LENGTHS)[1:])


def test_the_gpu_kernel_lowers_for_a_gpu_and_moves_no_cache():
    """Without a GPU here: into one Triton call per layer, beside which no transpose of a cache is left by XLA's simplifier."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 16, 128), (8, 8, LENGTH, 128), (8, 8, LENGTH, 128))]
    lengths = jax.ShapeDtypeStruct((8,), jnp.int32)
    attend = jax.jit(functools.partial(pallas_gpu, scale=0.1))
    text = attend.trace(*shapes, lengths).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("triton_kernel_call") == 1 or text.count("__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize("length", [256, 512, 2048, 768, 1280])
def test_splits_are_whole_blocks(length):
    assert length % splits(length) == 0 and length // splits(length) % 64 == 0


def test_spans_end_with_the_length():
    assert spans(100) == [100] and spans(128) == [128] and spans(600) == [128, 256, 512, 600]


def test_auto_takes_the_first_that_can():
    assert choose("auto", GPU).name == "pallas_gpu"
    for change in ({"platform": "cpu"}, {"softcap": 30.0}, {"cache_dtype": jnp.dtype(jnp.float32)}, {"head_dim": 96}):
        assert choose("auto", dataclasses.replace(GPU, **change)).name == "xla"


@pytest.mark.parametrize(
    "change, culprit",
    [
        ({"platform": "cpu"}, "runs on GPUs"),
        ({"softcap": 30.0}, "soft-cap"),
        ({"cache_dtype": jnp.dtype(jnp.float32)}, "cache_dtype"),
        ({"dtype": jnp.dtype(jnp.float32), "cache_dtype": jnp.dtype(jnp.float32)}, "sampler_dtype"),
        ({"head_dim": 96}, "head_dim"),
        ({"head_shards": 3}, "tensor axis"),
        ({"rows": 2048}, "jax.slots"),
    ],
)
def test_a_choice_that_cannot_be_done_is_refused(change, culprit):
    with pytest.raises(UserError, match=f"jax.decode_attention=pallas_gpu.*{culprit}.*auto takes xla"):
        choose("pallas_gpu", dataclasses.replace(GPU, **change))


def test_an_unknown_name_is_refused():
    with pytest.raises(UserError, match=r"paged.*one of auto, pallas_gpu, xla"):
        choose("paged", GPU)
