"""How the learner runs: few programs, one transfer, buffers that outlive a donation, numbers under
HF names.
"""

import dataclasses
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rljax.backends.jax import forward
from rljax.backends.jax.mesh import pool_mesh
from rljax.backends.jax.parameters import parameters
from rljax.backends.jax.portable import from_hf, to_hf
from rljax.config.allocation import Pool
from rljax.engine import ExportToDirectory, ExportToSampler
from rljax.engines.jax.learning.learner import JaxLearner
from rljax.errors import UserError
from rljax.objective.spec import Objective
from rljax.testing import models
from rljax.testing.learner_batches import UPDATE, config_of, episodes, first_fit, pack, untimed


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return models.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def learner(model_dir):
    return JaxLearner(config_of(), Pool("jax"), model_dir)


@pytest.fixture(scope="module")
def batch():
    items = episodes(8)
    return pack(items, first_fit(items, 64), 64)


def test_batches_of_many_sizes_take_few_programs_and_each_is_said(model_dir, caplog):
    caplog.set_level(logging.INFO, "rljax")
    learner = JaxLearner(config_of(**{"actor.mb_spec.rows_per_mb": 2}), Pool("jax"), model_dir)
    rng = np.random.default_rng(0)
    for number in range(7):
        items = episodes(int(rng.integers(6, 14)), seed=number, longest=30)
        length = int(rng.integers(50, 65))
        batch = pack(items, first_fit(items, length), length)
        learner.score(batch)
        learner.update(batch)
    widths = 8  # of rljax.batching.compaction.BUCKETS; a full row of 64 tokens here falls in two or three
    assert learner.compilations() <= 3 * widths
    before = learner.compilations()
    learner.update(batch)
    learner.score(batch)
    assert learner.compilations() == before
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("update: compiled for ")]
    sizes = {text[: text.index(" trained in a row")] for text in said}
    assert 1 < len(sizes) == len(said) < 7  # one a size, none for a size that was there before


OBJECTIVES = {
    "decoupled": {},
    "entropy and KL": {"actor.entropy_coef": 0.01, "actor.kl_ctl": 0.1},
    "loglinear": {"actor.prox_logp_method": "loglinear"},
    "supervised": {"actor.loss": "sft"},
}


QUICK = [("decoupled", 16), ("entropy and KL", 1)]
SLOW = [(name, 16) for name in OBJECTIVES if name != "decoupled"]


@pytest.mark.parametrize(("name", "rows_per_mb"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_the_fused_head_gives_the_step_of_log_probs_and_objective_apart(name, rows_per_mb, model_dir, batch, monkeypatch):
    config = config_of(**OBJECTIVES[name], **{"actor.mb_spec.rows_per_mb": rows_per_mb, "actor.logprob_chunk": 16})
    blend = np.where(batch.loss_mask, 0.5, 0).astype(np.float32)
    calls = []
    monkeypatch.setattr(forward, "fused_objective", lambda *a, f=forward.fused_objective, **k: calls.append(1) or f(*a, **k))

    def step():
        learner = JaxLearner(config, Pool("jax"), model_dir)
        full = batch.replace(proximal_logp=learner.score(batch), reference_logp=batch.behavior_logp, interpolation=blend)
        return untimed(learner.update(full)), jax.tree.map(np.array, learner._phases.rl.actor.saved()["mu"])

    means, gradient = step()
    assert calls
    calls.clear()
    monkeypatch.setattr(Objective, "by_token", False)
    apart, expected = step()
    assert not calls
    assert means.keys() == apart.keys()
    for key in apart:
        got, want = dataclasses.astuple(means[key]), dataclasses.astuple(apart[key])
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6, err_msg=key)
    scale = max(np.abs(a).max() for a in jax.tree.leaves(expected))
    assert scale > 1e-6
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale), gradient, expected)


def test_an_update_reads_the_device_once(learner, batch, monkeypatch):
    learner.update(batch)
    transfers = []
    monkeypatch.setattr(jax, "device_get", lambda x, get=jax.device_get: transfers.append(1) or get(x))
    learner.update(batch)
    assert len(transfers) == 1


def test_published_weights_outlive_the_updates_that_donate_the_learners(learner, batch):
    published = learner.export(ExportToSampler("memory", Pool("jax"))).params
    held = jax.tree.map(np.array, published)
    learner.update(batch)
    jax.tree.map(np.testing.assert_array_equal, published, held)
    after = learner.export(ExportToSampler("memory", Pool("jax"))).params
    assert any((np.asarray(a) != b).any() for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(held), strict=True))


def test_published_matrices_are_in_the_samplers_dtype_and_norms_in_float32(model_dir):
    learner = JaxLearner(config_of(**{"jax.sampler_dtype": "bfloat16"}), Pool("jax"), model_dir)
    for path, leaf in jax.tree_util.tree_leaves_with_path(learner.export(ExportToSampler("memory", Pool("jax"))).params):
        assert leaf.dtype == (jnp.float32 if path[-1].key == "scale" else jnp.bfloat16)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(learner._policy.trained))


def test_bfloat16_compute_keeps_float32_weights_and_is_near_float32(learner, model_dir, batch):
    half = JaxLearner(config_of(**{"actor.dtype": "bfloat16"}), Pool("jax"), model_dir)
    whole = JaxLearner(config_of(), Pool("jax"), model_dir)
    np.testing.assert_allclose(half.score(batch), whole.score(batch), atol=0.05)
    half.update(batch)
    state = half._phases.rl.actor.saved()
    assert {a.dtype for a in jax.tree.leaves((half._policy.trained, state["mu"], state["nu"]))} == {np.dtype("float32")}


def test_log_probs_and_the_export_are_those_of_transformers(learner, batch, tmp_path):
    source = learner.export(ExportToDirectory(tmp_path / "export"))
    model = AutoModelForCausalLM.from_pretrained(source.directory, dtype=torch.float32)
    scored = learner.score(batch)
    for row in range(batch.shape[0]):
        for segment in range(1, batch.segment_ids[row].max() + 1):
            where = np.flatnonzero(batch.segment_ids[row] == segment)
            ids = torch.tensor(batch.token_ids[row, where])[None].long()
            with torch.no_grad():
                logp = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
            expected = np.where(batch.loss_mask[row, where[1:]], logp, 0)
            np.testing.assert_allclose(scored[row, where[1:]], expected, atol=2e-5)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(model_dir, batch):
    learner = JaxLearner(config_of(), Pool("jax"), model_dir)
    before = learner.score(batch)
    advantage = batch.advantage.copy()
    advantage[batch.loss_mask] = np.nan
    means = learner.update(batch.replace(advantage=advantage))
    assert means[f"{UPDATE}/skipped"].value == 1
    assert means[f"{UPDATE}/grad_norm"].count == 0
    np.testing.assert_array_equal(learner.score(batch), before)
    means = learner.update(batch)
    assert means[f"{UPDATE}/skipped"].value == 0
    assert math.isfinite(means[f"{UPDATE}/grad_norm"].value)


def test_the_gradient_norm_is_that_of_the_whole_minibatch(model_dir, batch):
    """From the first moments after one step, which are (1 - beta1) times the clipped gradient."""
    config = config_of(**{"actor.optimizer.gradient_clipping": 0.05})
    learner = JaxLearner(config, Pool("jax"), model_dir)
    norm = learner.update(batch)[f"{UPDATE}/grad_norm"].value
    mu = learner._phases.rl.actor.saved()["mu"]
    clipped = math.sqrt(sum(float((np.asarray(a, np.float64) ** 2).sum()) for a in jax.tree.leaves(mu)))
    assert norm > 0.05
    assert clipped / (1 - config.actor.optimizer.beta1) == pytest.approx(0.05, rel=1e-4)


def test_parameters_and_moments_go_to_hf_names_and_back(learner, batch):
    learner.update(batch)
    table, trained = parameters(learner._policy.spec), learner._policy.trained
    saved = learner._phases.rl.actor.saved()
    for tree in (trained, saved["mu"], saved["nu"]):
        named = to_hf(tree, table)
        jax.tree.map(np.testing.assert_array_equal, from_hf(named, table, tree), tree)
    kernel = to_hf(saved["mu"], table)["model.layers.1.mlp.up_proj.weight"]
    np.testing.assert_array_equal(kernel, np.asarray(saved["mu"]["layers"]["up_proj"]["kernel"])[1].T)
    named = to_hf(trained, table)
    model_names = set(AutoModelForCausalLM.from_pretrained(learner._model_dir).state_dict()) - {"lm_head.weight"}
    assert set(named) == model_names
    del named["model.layers.0.self_attn.q_proj.weight"]
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.q_proj"):
        from_hf(named, table, trained)


def test_engine_portability_by_hf_names_to_the_same_bits(model_dir, batch):
    learner, other = (JaxLearner(config_of(), Pool("jax"), model_dir) for _ in range(2))
    for _ in range(2):
        learner.update(batch)
    other.load_named_state(learner.named_state(), 2)
    assert untimed(other.update(batch)) == untimed(learner.update(batch))
    np.testing.assert_array_equal(other.score(batch), learner.score(batch))


def test_too_few_devices_are_named_with_the_remedy():
    count = len(jax.devices())
    with pytest.raises(UserError, match=r"jax:d1000.*XLA_FLAGS"):
        pool_mesh(Pool("jax", data=1000))
    with pytest.raises(UserError, match=rf"devices {count} to {count}"):
        pool_mesh(dataclasses.replace(Pool("jax"), first_device=count))
