"""Every implementation of decode attention against the formula in float64; kernels of other devices are interpreted here."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.backends.jax.decode_attention import IMPLEMENTATIONS, Problem, choose, spans
from rljax.backends.jax.decode_attention.pallas_gpu import attend as pallas_gpu
from rljax.errors import UserError

SLOTS, LENGTH = 6, 256
ATTEND = {"xla": IMPLEMENTATIONS["xla"].attend, "pallas_gpu": functools.partial(pallas_gpu, interpret=True)}
BOUND = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}  # of values near 1: a sum of parts, each rounded
DECODE = np.array([[-1], [0], [63], [64], [130], [LENGTH - 1]], np.int32), None  # a token of every row
PREFILL = (  # chunks of 40 tokens at most, of some rows in another order; the last row is padding
    np.array([[*range(20), *[-1] * 20], range(50, 90), [*range(216, 256)], [-1] * 40], np.int32),
    np.array([4, 0, 3, SLOTS], np.int32),
)

GPU = Problem("gpu", jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16), 256, 2048, 8, 128, None)


def inputs(case, heads, kv_heads, dim, dtype):
    generator = np.random.default_rng(0)
    shapes = (*case[0].shape, heads, dim), *[(SLOTS, kv_heads, LENGTH, dim)] * 2
    return [jnp.asarray(generator.normal(size=shape), dtype) for shape in shapes]


def formula(query, key, value, index, rows, *, scale, softcap, window):
    """One query and one head at a time; zero for padding."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    out = np.zeros_like(query)
    for (row, t), at in np.ndenumerate(index):
        for head in range(query.shape[2]) if at >= 0 else ():
            of = (row if rows is None else rows[row], head // (query.shape[2] // key.shape[1]))
            seen = slice(0 if window is None else max(at - window + 1, 0), at + 1)
            logits = key[of][seen] @ query[row, t, head] * scale
            if softcap is not None:
                logits = softcap * np.tanh(logits / softcap)
            weights = np.exp(logits - logits.max())
            out[row, t, head] = weights @ value[of][seen] / weights.sum()
    return out


@pytest.mark.parametrize("name", ATTEND)
@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 16), (9, 3, 64)])
@pytest.mark.parametrize("window, softcap", [(None, None), (70, None), (7, 1.5)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_is_the_formula(name, case, heads, kv_heads, dim, window, softcap, dtype):
    arrays, (index, rows) = inputs(case, heads, kv_heads, dim, dtype), case
    settings = dict(scale=dim**-0.5, softcap=softcap, window=window)
    out = jax.jit(functools.partial(ATTEND[name], **settings))(*arrays, index, rows)
    assert out.shape == arrays[0].shape and out.dtype == dtype
    assert np.isfinite(np.asarray(out, np.float32)).all()
    out = np.where((index >= 0)[..., None, None], np.asarray(out, np.float64), 0)
    np.testing.assert_allclose(out, formula(*arrays, index, rows, **settings), atol=BOUND[dtype])


@pytest.mark.parametrize("name", ATTEND)
def test_what_lies_beyond_a_row_is_not_seen(name):
    """Not even where it is enormous; nor what lies before the window."""
    (query, key, value), (index, _) = inputs(DECODE, 4, 2, 16, jnp.float32), DECODE
    attend = jax.jit(functools.partial(ATTEND[name], scale=0.25, window=70))
    keys = np.arange(LENGTH)
    unseen = (keys > index) | (keys <= index - 70)
    spoiled = [jnp.where(unseen[:, None, :, None], 1e4, x) for x in (key, value)]
    np.testing.assert_array_equal(attend(query, *spoiled, index)[1:], attend(query, key, value, index)[1:])


@pytest.mark.parametrize("softcap, window", [(None, None), (30.0, 512)])
@pytest.mark.parametrize("rows, tokens", [(256, 1), (16, 128), (1, 2048), (1, 32)])
def test_the_gpu_kernel_lowers_without_a_gpu(rows, tokens, softcap, window):
    """At Qwen3-0.6B's shapes, into one Triton call."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, tokens, 16, 128), *[(256, 8, 2048, 128)] * 2)]
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, tokens), (rows,))]
    attend = jax.jit(functools.partial(pallas_gpu, scale=0.1, softcap=softcap, window=window))
    text = attend.trace(*shapes, *ints).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("triton_kernel_call") + text.count("__gpu$xla.gpu.triton") == 1


def test_spans_end_with_the_length():
    assert spans(100) == [100] and spans(128) == [128] and spans(600) == [128, 256, 512, 600]


def test_auto_takes_the_first_that_can():
    assert choose("auto", GPU).name == "pallas_gpu"
    for change in ({"platform": "cpu"}, {"cache_dtype": jnp.dtype(jnp.float32)}, {"head_dim": 96}):
        assert choose("auto", dataclasses.replace(GPU, **change)).name == "xla"


@pytest.mark.parametrize(
    "change, culprit",
    [
        ({"platform": "cpu"}, "runs on GPUs"),
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
