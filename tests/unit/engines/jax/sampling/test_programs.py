"""The compiled programs update the cache where it is: no operation in them makes anything as large as a layer's cache."""

import re

import jax
import pytest

from rljax.backends.jax.decode_attention.xla import Xla
from rljax.backends.jax.sharding import single_device_mesh
from rljax.engines.jax.config import JaxConfig
from rljax.engines.jax.planning.hlo import large_operations
from rljax.engines.jax.sampling.cache_size import pages_per_shard
from rljax.engines.jax.sampling.programs import Programs
from rljax.errors import UserError
from rljax.testing.models import config_of, make_model

SLOTS, CONTEXT, PAGE = 24, 256, 16  # more pages than any dispatch has rows, slots or copies
PAGES = SLOTS * CONTEXT // PAGE
KV_HEADS, HEAD_DIM = 2, 8

SETTINGS = {"jax.slots": SLOTS, "jax.context_length": CONTEXT, "jax.page_size": PAGE, "jax.prefill_chunk": 64}


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def programs(request, tmp_path_factory):
    model = make_model(tmp_path_factory.mktemp("model"), architecture=request.param)
    return Programs(config_of(**SETTINGS), model, single_device_mesh())


def compiled(programs, name):
    return programs.lower()[name].compile()


LAYER = PAGES * KV_HEADS * PAGE * HEAD_DIM
NAMES = ["decode", "copy", "prefill 1x32", "prefill 4x16", "prefill 1x64"]


@pytest.mark.parametrize("name", NAMES)
def test_no_operation_makes_anything_as_large_as_a_layer_s_pages(programs, name):
    assert programs.lower().keys() == set(NAMES)
    program = compiled(programs, name)
    text = program.as_text()
    assert large_operations(text, LAYER) == []
    assert re.search(rf"f32\[{PAGES},{KV_HEADS},{PAGE},{HEAD_DIM}\]", text)  # it was looked for in the right place
    cache = 2 * 2 * LAYER * 4
    assert program.memory_analysis().alias_size_in_bytes >= cache  # donated: the result is the input's memory
    assert program.memory_analysis().temp_size_in_bytes < cache / 2


def test_a_copy_would_be_found(programs):
    """The same search over a program that does copy: one that keeps the old cache beside the new."""

    def kept(cache, row):
        return [leaf.at[row].set(0.0) for leaf in jax.tree.leaves(cache)]

    text = jax.jit(kept).lower(programs._cache, 0).compile().as_text()
    assert large_operations(text, LAYER)


class Narrow(Xla):
    """One that can address so many pages."""

    name = "narrow"

    def __init__(self, most):
        self.most_pages = lambda page_size, kv_heads, head_dim: most


def pages(most=None, **settings):
    mesh = single_device_mesh()
    spec_of_cache = type("Spec", (), dict(num_layers=2, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM))()
    return pages_per_shard(
        JaxConfig(**dict(slots=SLOTS, context_length=CONTEXT) | settings), spec_of_cache, mesh, Narrow(most), PAGE, {}
    )


def test_the_cache_has_room_for_every_slot_or_for_what_it_is_told():
    assert pages() == PAGES
    assert pages(cache_tokens=10 * CONTEXT) == 10 * CONTEXT // PAGE
    assert pages(most=PAGES - 1) == PAGES - 1


def test_the_cache_takes_its_share_of_the_memory_that_is_free(monkeypatch):
    page = 2 * 2 * KV_HEADS * PAGE * HEAD_DIM * 2
    monkeypatch.setattr("rljax.engines.jax.sampling.cache_size.memory_of", lambda device: 100 * page)
    assert pages(cache_memory_fraction=0.5) == 50
    with pytest.raises(UserError, match=r"jax.cache_memory_fraction: room for 160 tokens, .*jax.context_length=256 needs 256"):
        pages(cache_memory_fraction=0.1)


@pytest.mark.parametrize(
    "tokens, most, culprit",
    [
        (CONTEXT - 1, None, "255 tokens, and one request of jax.context_length=256 needs 256"),
        (CONTEXT * 2, 8, "narrow can address 128"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(tokens, most, culprit):
    with pytest.raises(UserError, match=rf"^jax.cache_tokens: {culprit}"):
        pages(most, cache_tokens=tokens)
