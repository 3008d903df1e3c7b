"""The sharded network is transformers' model of the same directory; segments don't see each other."""

import json

import numpy as np
import pytest
import torch
import transformers

from rljax.backends.torch import attention, model
from rljax.backends.torch.attention import Segments
from rljax.backends.torch.context_parallel import Context
from rljax.backends.torch.forward import target_objective
from rljax.backends.torch.mesh import RankMesh
from rljax.config.allocation import Pool
from rljax.engines.cuda.learning import distributed as world
from rljax.engines.cuda.learning.rows import micro_batches
from rljax.hf import ModelSpec
from rljax.objective.spec import Objective
from rljax.testing import models
from rljax.testing.learner_batches import episodes, first_fit, pack

SMALL = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
LLAMA3 = dict(rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
WINDOWS = dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)  # shorter than the segments
VARIANTS = {
    "llama": ("Llama", dict(rope_parameters=LLAMA3 | dict(original_max_position_embeddings=16), attention_bias=True)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True, pad_token_id=7) | WINDOWS),
    "qwen3": ("Qwen3", dict(head_dim=16)),
    "gemma3": ("Gemma3Text", dict(head_dim=16, sliding_window=5, sliding_window_pattern=2, final_logit_softcapping=3.0)),
}


@pytest.fixture(scope="module")
def rank_mesh():
    return world.join(Pool("fsdp"))


def rows_of(rank_mesh, spec, batch):
    (rows,) = micro_batches(batch, batch.loss_mask, rank_mesh, spec, len(batch.token_ids))
    return rows


def network_of(directory, rank_mesh, **settings):
    spec = ModelSpec.from_directory(directory)
    network = model.build(spec, directory, rank_mesh, dtype=torch.float32, **settings)
    model.read_weights(network, directory)
    return network


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_rows_have_the_hidden_states_of_each_segment_alone(variant, rank_mesh, tmp_path):
    name, changes = VARIANTS[variant]
    theirs = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**SMALL | changes)
    )
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in theirs.parameters():  # none at its neutral value
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    theirs.save_pretrained(tmp_path)
    network = network_of(tmp_path, rank_mesh)
    items = episodes(5, longest=20)
    for item in items:
        item.arrays["token_ids"] %= SMALL["vocab_size"]
    batch = pack(items, [[0, 1, 2], [3, 4]], 64, start=3)
    rows = rows_of(rank_mesh, network.spec, batch)
    with torch.no_grad():
        logits = network(lambda h, w: h @ w.T, rows.token_ids, rows.positions, rows.segments)
        cap = network.spec.final_softcap
        logits = logits if cap is None else torch.tanh(logits / cap) * cap
        for row, ids in enumerate(batch.segment_ids):
            for segment in range(1, ids.max() + 1):
                where = np.flatnonzero(ids == segment)
                alone = theirs(torch.from_numpy(batch.token_ids[row, where]).long()[None]).logits[0]
                torch.testing.assert_close(logits[row, where], alone, atol=2e-4, rtol=2e-4)


def reference_varlen(query, key, value, starts, key_starts, *_, scale, window_size, enable_gqa=False):
    """Computes torch.nn.attention.varlen as documented: run by run, last query beside last key."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = torch.empty_like(query)
    for a, b, c, d in zip(starts[:-1], starts[1:], key_starts[:-1], key_starts[1:], strict=True):
        logits = torch.einsum("qhd,khd->hqk", query[a:b], key[c:d]) * scale
        back = (torch.arange(b - a)[:, None] + (d - c) - (b - a)) - torch.arange(d - c)[None]
        hidden = back < 0 if window_size[0] < 0 else (back < 0) | (back > window_size[0])
        out[a:b] = torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, -torch.inf).softmax(-1), value[c:d])
    return out


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_runs_for_flash_attention_say_the_same_as_the_mask(window, size, monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", reference_varlen)
    ids = np.array([[1] * 5 + [2] * 9 + [0] * 2, [0] * 3 + [1] * 1 + [2] * 12, [1] * 16], np.int32)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, heads, 16, 8, generator=generator) for heads in (4, 2, 2))
    whole = Segments.of(ids, torch.device("cpu"))
    mask = whole.mask(window)
    want = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    for rank in range(size):
        context = Context(rank, size)
        segments, own = Segments.of(ids, torch.device("cpu"), context), context.slice(16)
        assert torch.equal(segments.mask(window), mask[:, :, own])
        got = attention._flash(query[:, :, own], key, value, segments, window, 0.3)
        torch.testing.assert_close(got, want[:, own], atol=1e-6, rtol=1e-5)


def test_a_soft_cap_of_attention_squashes_its_logits():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, 6, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    segments = Segments.of(np.array([[1] * 4 + [2] * 2, [1] * 6], np.int32), torch.device("cpu"))
    module = torch.nn.Module()
    module.attn_logit_softcapping = 0.7
    got, _ = attention.packed_attention(module, query, key, value, None, scaling=0.5, segments=segments)
    for row, start, stop in ((0, 0, 4), (0, 4, 6), (1, 0, 6)):
        q, k, v = (x[row, :, start:stop].numpy() for x in (query, key, value))
        logits = 0.7 * np.tanh(q @ k.transpose(0, 2, 1) * 0.5 / 0.7)
        weights = np.exp(logits) * np.tri(stop - start)
        want = weights / weights.sum(-1, keepdims=True) @ v
        np.testing.assert_allclose(got[row, start:stop].transpose(0, 1), want, atol=1e-6)


def gradients(network, rows):
    objective = Objective(loss="sft")
    loss, _ = target_objective(network, rows, objective, temperature=1.0, chunk=64)
    loss.backward()
    return {name: parameter.grad.full_tensor() for name, parameter in model.parameters(network)}


def test_computing_layers_again_changes_no_gradient(rank_mesh, tmp_path):
    directory = models.make_model(tmp_path)
    items = episodes(6)
    batch = pack(items, first_fit(items, 64), 64)
    want = None
    for remat in ("none", "full", "dots"):
        network = network_of(directory, rank_mesh, remat=remat)
        found = gradients(network, rows_of(rank_mesh, network.spec, batch))
        want = want or found
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, want[name], rtol=0, atol=0, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_compiled_layers_have_the_same_gradients_and_share_what_is_compiled(rank_mesh, tmp_path, remat, architecture):
    directory = models.make_model(tmp_path, architecture=architecture, num_layers=4)
    items = episodes(6)
    batch = pack(items, first_fit(items, 64), 64)
    want = None
    for compile in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        network = network_of(directory, rank_mesh, remat=remat, compile=compile)
        found = gradients(network, rows_of(rank_mesh, network.spec, batch))
        want = want or found
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, want[name], rtol=1e-4, atol=1e-6, msg=name)
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] < 8  # of 4 layers, each cut in two by attention


def test_padding_is_eos_trains_its_embedding_like_any_other(rank_mesh, tmp_path):
    directory = models.make_model(tmp_path)
    items = episodes(4)
    batch = pack(items, first_fit(items, 64), 64)
    token = int(batch.token_ids[batch.loss_mask][0])
    config = json.loads((directory / "config.json").read_text())
    found = []
    for pad in (None, token):
        (directory / "config.json").write_text(json.dumps(config | {"pad_token_id": pad}))
        network = network_of(directory, rank_mesh)
        found.append(gradients(network, rows_of(rank_mesh, network.spec, batch))["model.embed_tokens.weight"])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert found[0][token].any()


def test_bfloat16_is_computed_with_and_float32_is_kept(rank_mesh, tmp_path):
    directory = models.make_model(tmp_path)
    items = episodes(4)
    batch = pack(items, first_fit(items, 64), 64)
    spec = ModelSpec.from_directory(directory)
    network = model.build(spec, directory, rank_mesh, dtype=torch.bfloat16)
    model.read_weights(network, directory)
    seen = []
    rows = rows_of(rank_mesh, spec, batch)
    with torch.no_grad():
        network(lambda h, w: seen.extend([h.dtype, w.dtype]), rows.token_ids, rows.positions, rows.segments)
    assert seen == [torch.bfloat16] * 2
    found = gradients(network, rows)
    kept = {parameter.dtype for _, parameter in model.parameters(network)} | {g.dtype for g in found.values()}
    assert kept == {torch.float32}
    exact = network_of(directory, rank_mesh)
    for name, gradient in gradients(exact, rows_of(rank_mesh, spec, batch)).items():
        distance = torch.linalg.vector_norm(found[name] - gradient) / torch.linalg.vector_norm(gradient)
        assert distance < 0.05, name  # bfloat16 has 8 bits


def test_rows_are_dealt_by_what_they_cost_and_every_rank_has_as_many_micro_batches(rank_mesh, tmp_path):
    """Each row is on one rank, for any number of ranks.

    Attention makes one long segment cost more than two short ones.
    """
    spec = ModelSpec.from_directory(models.make_model(tmp_path))
    items = episodes(16, longest=40)
    rows = [[i] for i in range(16)]
    batch = pack(items, rows, 48)
    for parts in (1, 2, 3, 5, 20):
        cuts = []
        for part in range(parts):
            ours = type("RankMeshOfPart", (RankMesh,), {"data_shard": (part, parts)})(**vars(rank_mesh))
            cuts.append(micro_batches(batch, batch.loss_mask, ours, spec, 2))
        indices = np.concatenate([cut.row_index for cut in cuts])
        assert sorted(indices[indices >= 0]) == list(range(16))
        assert len({len(cut.row_index) for cut in cuts}) == 1
        if parts in (2, 3):
            tokens = [int((cut.batch.segment_ids > 0).sum()) for cut in cuts]
            assert max(tokens) - min(tokens) < 0.1 * sum(tokens) / parts
