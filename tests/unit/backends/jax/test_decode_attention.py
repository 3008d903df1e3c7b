"""Every implementation of decode attention against the formula in float64; kernels of other devices are interpreted here."""

import dataclasses
import functools
import itertools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from rljax.backends.jax.decode_attention import (
    IMPLEMENTATIONS,
    Pages,
    Places,
    Problem,
    choose,
    find_groups,
    no_groups,
    pallas_tpu,
)
from rljax.backends.jax.decode_attention.groups import PARTS
from rljax.backends.jax.decode_attention.pallas_gpu import PallasGpu
from rljax.backends.jax.decode_attention.pallas_tpu import PairedPages, PallasTpu
from rljax.errors import UserError

PAGE, COLUMNS, PAGES = 64, 4, 40


class InterpretedTpu(PallasTpu):
    """The TPU kernels interpreted, over a cache that is laid out as for the others.

    Each runs in that one of JAX's two interpreters that can do it: a reference that is reshaped only
    the first has, a copy as long as a number on the device says only the second.
    """

    def attend(self, query, cache, places, **settings):
        with blocks_of_two_pages(), pltpu.force_tpu_interpret_mode(True):
            return super().attend(query, paired(cache), places, **settings)

    def write(self, cache, key, value, places):
        with pltpu.force_tpu_interpret_mode():
            written = super().write(paired(cache), key, value, places).pairs
        kv_heads, dim = key.shape[2:]
        return Pages(*(written[:, :, first : 2 * kv_heads : 2, :dim].swapaxes(1, 2) for first in (0, 1)))


def paired(cache):
    """Keys and values of each token in turn, filled up with zeros to whole tiles."""
    kv_heads, dim = cache.key.shape[1], cache.key.shape[3]
    tiles = next(size for size in (1, 2, 4, 8) if size >= kv_heads)
    pairs = jnp.zeros((PAGES, PAGE, 2 * tiles, 128), cache.key.dtype)
    for first, pool in enumerate(cache):
        pairs = pairs.at[:, :, first : 2 * kv_heads : 2, :dim].set(pool.swapaxes(1, 2))
    return PairedPages(pairs, kv_heads)


def blocks_of_two_pages():
    """So that rows of four are several blocks."""
    return mock.patch.object(pallas_tpu, "BLOCK_TOKENS", 2 * PAGE)


@pytest.fixture(autouse=True)
def a_static_index_has_a_shape(monkeypatch):
    """JAX 0.10 and 0.11 ask for it where they interpret a masked store, and integers of their own do not have it."""
    literals = pytest.importorskip("jax._src.literals")
    monkeypatch.setattr(literals.TypedInt, "shape", (), raising=False)


ATTENTION = {"xla": IMPLEMENTATIONS["xla"], "pallas_gpu": PallasGpu(interpret=True)}
TPU = {"pallas_tpu": InterpretedTpu()}  # not in every case: each takes ten seconds
BOUND = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}  # of values near 1: a sum of parts, each rounded

ON_TPU = Problem("tpu", jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16), 64, 8, 128, None, rows=256, columns=32)
GPU = Problem("gpu", jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16), 64, 8, 128, None)


def tables_of(rows, seed=0):
    """Pages of their own for every row, in no order."""
    return np.random.default_rng(seed).permutation(PAGES)[: rows * COLUMNS].reshape(rows, COLUMNS).astype(np.int32)


def decode():
    """A token of every row; the first is at rest."""
    return np.array([[-1], [0], [63], [64], [130], [255]], np.int32), tables_of(6), False


def prefill():
    """Chunks of 40 tokens at most; the last row is padding, and names no page."""
    index = np.array([[*range(20), *[-1] * 20], range(50, 90), [*range(216, 256)], [-1] * 40], np.int32)
    tables = tables_of(4)
    tables[3] = PAGES
    return index, tables, False


def group():
    """Two groups, of 17 rows that share three pages (in as many parts) and of two that share one; one row alone."""
    tables = np.full((20, COLUMNS), PAGES, np.int32)
    fresh = iter(range(PAGES))
    tables[:17, :3] = [next(fresh) for _ in range(3)]
    tables[17:19, :1] = next(fresh)
    for row, first in enumerate([3] * 17 + [1, 1, 0]):
        tables[row, first : min(first + 2, COLUMNS)] = [next(fresh) for _ in range(min(2, COLUMNS - first))]
    index = np.array([192 + 3 * row for row in range(17)] + [64, 190, 100], np.int32)
    index[5] = -1  # at rest in the middle of its group
    return index[:, None], tables, True


CASES = {"decode": decode, "prefill": prefill, "group": group}


def inputs(case, heads, kv_heads, dim, dtype):
    """Queries, keys and values by page, and places."""
    index, tables, grouped = CASES[case]()
    generator = np.random.default_rng(0)
    shapes = (*index.shape, heads, dim), *[(PAGES, kv_heads, PAGE, dim)] * 2
    query, key, value = (jnp.asarray(generator.normal(size=shape), dtype) for shape in shapes)
    groups = find_groups(tables, PAGES, np.arange(len(tables)), split=1) if grouped else None
    return query, Pages(key, value), Places(jnp.asarray(index), jnp.asarray(tables), None, groups)


def formula(query, cache, places, *, scale, softcap, window):
    """One query and one head at a time; zero for padding."""
    query, *pools = (np.asarray(x, np.float64) for x in (query, *cache))
    out = np.zeros_like(query)
    for (row, t), at in np.ndenumerate(places.index):
        pages = np.minimum(places.tables[row], PAGES - 1)
        key, value = (np.moveaxis(pool[pages], 1, 0).reshape(pool.shape[1], -1, pool.shape[3]) for pool in pools)
        for head in range(query.shape[2]) if at >= 0 else ():
            of = head // (query.shape[2] // len(key))
            seen = slice(0 if window is None else max(at - window + 1, 0), at + 1)
            logits = key[of][seen] @ query[row, t, head] * scale
            if softcap is not None:
                logits = softcap * np.tanh(logits / softcap)
            weights = np.exp(logits - logits.max())
            out[row, t, head] = weights @ value[of][seen] / weights.sum()
    return out


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads, kv_heads, dim, dtype", [(4, 2, 16, jnp.float32), (9, 3, 64, jnp.bfloat16)])
@pytest.mark.parametrize("window, softcap", [(None, None), (70, None), (7, 1.5)])
def test_is_the_formula(name, case, heads, kv_heads, dim, window, softcap, dtype):
    assert_is_the_formula(ATTENTION[name], case, heads, kv_heads, dim, window, softcap, dtype)


@pytest.mark.parametrize(
    "case, heads, kv_heads, dim, window, softcap, dtype",
    [
        ("decode", 9, 3, 64, None, None, jnp.bfloat16),
        ("group", 4, 2, 16, 70, None, jnp.float32),
        ("prefill", 9, 3, 64, 7, 1.5, jnp.bfloat16),
        ("prefill", 4, 2, 16, None, None, jnp.float32),
    ],
)
def test_on_a_tpu_is_the_formula(case, heads, kv_heads, dim, window, softcap, dtype):
    assert_is_the_formula(TPU["pallas_tpu"], case, heads, kv_heads, dim, window, softcap, dtype)


def assert_is_the_formula(attention, case, heads, kv_heads, dim, window, softcap, dtype):
    query, cache, places = inputs(case, heads, kv_heads, dim, dtype)
    settings = dict(scale=dim**-0.5, softcap=softcap, window=window)
    out = jax.jit(functools.partial(attention.attend, **settings))(query, cache, places)
    assert out.shape == query.shape and out.dtype == dtype
    assert np.isfinite(np.asarray(out, np.float32)).all()
    out = np.where((places.index >= 0)[..., None, None], np.asarray(out, np.float64), 0)
    np.testing.assert_allclose(out, formula(query, cache, places, **settings), atol=BOUND[dtype])


@pytest.mark.parametrize("name, case", [*itertools.product(ATTENTION, ("decode", "group")), ("pallas_tpu", "decode")])
def test_what_a_row_does_not_see_changes_nothing(name, case):
    """Fills other pages, and tokens after a query or before its window, with enormous numbers."""
    query, cache, places = inputs(case, 4, 2, 16, jnp.float32)
    seen = np.zeros((PAGES + 1, PAGE), bool)
    for row, (at,) in enumerate(np.asarray(places.index)):
        for index in range(max(at - 69, 0), at + 1):
            seen[places.tables[row, index // PAGE], index % PAGE] = True
    attend = jax.jit(functools.partial((ATTENTION | TPU)[name].attend, scale=0.25, window=70))
    spoiled = Pages(*(jnp.where(seen[:-1, None, :, None], x, 1e4) for x in cache))
    going = np.flatnonzero(places.index[:, 0] >= 0)
    np.testing.assert_array_equal(attend(query, spoiled, places)[going], attend(query, cache, places)[going])


def test_shared_pages_are_read_for_the_group_and_by_no_member():
    """The kernel takes from the group what the group has: other keys there for one phase alone change the result."""
    query, cache, places = inputs("group", 4, 2, 16, jnp.float32)
    attend = functools.partial(ATTENTION["pallas_gpu"].attend, query, cache, scale=0.25)
    ungrouped = dataclasses.replace(places, groups=no_groups(len(places.index)))
    rows = np.array([row for row in range(19) if row != 5])
    np.testing.assert_allclose(attend(places)[rows], attend(ungrouped)[rows], atol=1e-6)
    own_only = dataclasses.replace(places, groups=ungrouped.groups._replace(own=places.groups.own * np.array([1, 0, 0, 0])))
    assert np.abs(attend(own_only) - attend(places))[rows].max(axis=(1, 2, 3)).min() > 1e-3


def test_rows_that_lie_in_one_page_each_are_seen_where_they_lie():
    """Gives XLA as many pages as rows, where it sorts queries by page instead of moving pages."""
    generator = np.random.default_rng(0)
    tables = generator.permutation(6)[:, None].astype(np.int32)
    tables[4] = 6  # a slot at rest has no page
    index = np.array([[3], [0], [15], [7], [-1], [9]], np.int32)
    query = jnp.asarray(generator.normal(size=(6, 1, 4, 8)), jnp.float32)
    cache = Pages(*(jnp.asarray(generator.normal(size=(6, 2, 16, 8)), jnp.float32) for _ in range(2)))
    larger = Pages(*(jnp.concatenate([x, x]) for x in cache))
    attend = functools.partial(ATTENTION["xla"].attend, query, places=Places(index, tables), scale=0.3)
    rows = [0, 1, 2, 3, 5]
    np.testing.assert_allclose(attend(cache)[np.array(rows)], attend(larger)[np.array(rows)], atol=1e-6)
    text = jax.jit(functools.partial(ATTENTION["xla"].attend, scale=0.3)).lower(query, cache, Places(index, tables)).as_text()
    gathered = re.findall(r'"stablehlo.gather".*-> tensor<(\w+)>', text)
    assert gathered and "6x2x16x8xf32" not in gathered


@pytest.mark.parametrize("name", ATTENTION | TPU)
def test_new_tokens_are_written_where_they_belong_and_nothing_else_is(name):
    _, cache, places = inputs("prefill", 4, 2, 16, jnp.float32)
    key, value = (jnp.asarray(np.random.default_rng(s).normal(size=(*places.index.shape, 2, 16)), jnp.float32) for s in (1, 2))
    written = (ATTENTION | TPU)[name].write(cache, key, value, places)
    for pool, new, before in zip(written, (key, value), cache, strict=True):
        want = np.array(before)
        for (row, t), at in np.ndenumerate(places.index):
            if at >= 0:
                want[places.tables[row, at // PAGE], :, at % PAGE] = new[row, t]
        np.testing.assert_array_equal(pool, want)


@pytest.mark.parametrize("softcap, window", [(None, None), (30.0, 512)])
@pytest.mark.parametrize("rows, tokens, calls", [(256, 1, 2), (24, 1, 2), (16, 128, 1), (1, 2048, 1), (1, 32, 1)])
def test_the_gpu_kernel_lowers_without_a_gpu(rows, tokens, calls, softcap, window):
    """At Qwen3-0.6B's shapes, into one Triton call, and one more for groups."""
    query, *pools = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, tokens, 16, 128), *[(8001, 8, 64, 128)] * 2))
    index, tables = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((rows, tokens), (rows, 32)))
    groups = jax.tree.map(jnp.asarray, no_groups(rows)) if tokens == 1 else None
    attend = jax.jit(functools.partial(IMPLEMENTATIONS["pallas_gpu"].attend, scale=0.1, softcap=softcap, window=window))
    traced = attend.trace(query, Pages(*pools), Places(index, tables, None, groups))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("triton_kernel_call") + text.count("__gpu$xla.gpu.triton") == calls


def test_on_two_tpus_each_sees_its_heads():
    """Six heads are kept as eight, so that each half has three in four places."""
    query, cache, places = inputs("decode", 12, 6, 16, jnp.float32)
    attend = jax.jit(functools.partial(PallasTpu().attend, scale=0.25))
    halves = []
    for part in (0, 1):
        of_part = paired(Pages(*(pool[:, 3 * part : 3 * part + 3] for pool in cache)))
        with blocks_of_two_pages(), pltpu.force_tpu_interpret_mode(True):
            halves.append(attend(query[:, :, 6 * part : 6 * part + 6], dataclasses.replace(of_part, kv_heads=6), places))
    want = formula(query, cache, places, scale=0.25, softcap=None, window=None)
    np.testing.assert_allclose(jnp.concatenate(halves, axis=2)[1:], want[1:], atol=1e-5)


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"])
@pytest.mark.parametrize("rows, tokens", [(256, 1), (16, 128)])
def test_the_tpu_kernels_lower_without_a_tpu(rows, tokens, kind):
    """At Qwen3-0.6B's shapes, into one kernel that writes and one that reads."""
    attention = IMPLEMENTATIONS["pallas_tpu"]
    query, new = (jax.ShapeDtypeStruct((rows, tokens, heads, 128), jnp.bfloat16) for heads in (16, 8))
    cache = jax.eval_shape(lambda: attention.empty(8001, 64, 8, 128, jnp.bfloat16))
    places = Places(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, tokens), (rows, 32))))

    def step(query, key, value, cache, places):
        cache = attention.write(cache, key, value, places)
        return attention.attend(query, cache, places, scale=0.1, softcap=30.0, window=512), cache

    device = jax.sharding.AbstractDevice(kind, 1, "tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("data",), abstract_device=device)):
        lowered = jax.jit(step).trace(query, new, new, cache, places).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") == 2


def read_by(groups, tables, rows):
    """Pages that each row's queries meet: by items and by itself, each once and in its own table."""
    met = {int(row): [] for row in rows}
    for row, (skipped, first, count, place) in enumerate(groups.own):
        for item in groups.items[first : first + count]:
            assert item[3 + place] == row
            met[row] += tables[item[0], item[1] : item[2]].tolist()
        if row in met:
            met[row] += tables[row, skipped:].tolist()
    return met


def test_groups_cover_every_page_of_every_row_once():
    """Draws random forests of prefixes, with more groups than there is room for items."""
    generator = np.random.default_rng(0)
    for _ in range(50):
        slots, pages, columns = int(generator.integers(1, 40)), 900, 20
        fresh = iter(generator.permutation(pages))
        stems = [[next(fresh) for _ in range(generator.integers(0, 16))] for _ in range(generator.integers(1, 12))]
        tables = np.full((slots, columns), pages, np.int32)
        for row in range(slots):
            stem = stems[generator.integers(len(stems))]
            shared = stem[: generator.integers(len(stem) + 1)] if generator.integers(3) == 0 else stem
            own = [next(fresh) for _ in range(generator.integers(1, columns - len(shared) + 1))]
            tables[row, : len(shared) + len(own)] = [*shared, *own]
        rows = np.flatnonzero(generator.integers(4, size=slots))
        groups = find_groups(tables, pages, rows, split=int(generator.integers(1, 9)))
        assert groups.own[:, 2].max(initial=0) <= PARTS
        assert [leaf.shape for leaf in groups] == [leaf.shape for leaf in no_groups(slots)]
        assert {row: tables[row].tolist() for row in rows.tolist()} == read_by(groups, tables, rows)
        assert not np.any(groups.own[np.setdiff1d(np.arange(slots), rows)])


def test_a_group_s_prompt_is_read_once_for_sixteen():
    tables = np.full((64, 24), 2000, np.int32)
    tables[:, :16] = np.arange(64)[:, None] // 16 * 16 + np.arange(16)
    tables[:, 16] = 64 + np.arange(64)
    groups = find_groups(tables, 2000, np.arange(64))
    read = int((groups.items[:, 2] - groups.items[:, 1]).sum()) + int((17 - groups.own[:, 0]).sum())
    assert read == 4 * 16 + 64
    assert np.count_nonzero(groups.items[:, 2]) == 4 * 2  # in parts, for more processors than groups


def test_auto_takes_the_first_that_can():
    assert choose("auto", GPU).name == "pallas_gpu"
    for change in ({"platform": "cpu"}, {"cache_dtype": jnp.dtype(jnp.float32)}, {"head_dim": 96}):
        assert choose("auto", dataclasses.replace(GPU, **change)).name == "xla"
    assert choose("auto", ON_TPU).name == "pallas_tpu"
    for change in ({"head_dim": 64, "kv_heads": 3}, {"head_dim": 256, "kv_heads": 1}, {"kv_heads": 6, "head_shards": 2}):
        assert choose("auto", dataclasses.replace(ON_TPU, **change)).name == "pallas_tpu"


@pytest.mark.parametrize(
    "change, culprit",
    [
        ({"platform": "cpu"}, "it needs an NVIDIA GPU"),
        ({"cache_dtype": jnp.dtype(jnp.float32)}, "cache_dtype"),
        ({"dtype": jnp.dtype(jnp.float32), "cache_dtype": jnp.dtype(jnp.float32)}, "sampler_dtype"),
        ({"head_dim": 96}, "head_dim"),
        ({"head_shards": 3}, "tensor axis"),
        ({"page_size": 48}, "jax.page_size"),
    ],
)
def test_a_choice_that_cannot_be_done_is_refused(change, culprit):
    with pytest.raises(UserError, match=f"jax.decode_attention=pallas_gpu.*{culprit}.*auto takes xla"):
        choose("pallas_gpu", dataclasses.replace(GPU, **change))


@pytest.mark.parametrize(
    "change, culprit",
    [
        ({"platform": "gpu"}, "it needs a TPU"),
        ({"dtype": jnp.dtype(jnp.float32)}, "jax.sampler_dtype"),
        ({"page_size": 8}, "jax.page_size"),
        ({"head_dim": 256}, "head_dim"),
        ({"kv_heads": 3, "head_shards": 3}, "tensor axis"),
        ({"head_shards": 16}, "tensor axis"),
        ({"columns": 1024}, "larger jax.page_size"),
        ({"dtype": jnp.dtype(jnp.float32), "cache_dtype": jnp.dtype(jnp.float32), "group": 1}, "even number of query heads"),
    ],
)
def test_what_the_tpu_kernels_cannot_do_is_refused(change, culprit):
    with pytest.raises(UserError, match=f"jax.decode_attention=pallas_tpu.*{culprit}"):
        choose("pallas_tpu", dataclasses.replace(ON_TPU, **change))


def test_an_unknown_name_is_refused():
    with pytest.raises(UserError, match=r"paged.*one of auto, pallas_gpu, pallas_tpu, xla"):
        choose("paged", GPU)
