"""LoRA: the base is the reference, adapters alone are trained and saved, and what is published has
them folded in.
"""

import jax
import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from rljax.config.allocation import Pool
from rljax.engine import ExportToDirectory, ExportToSampler
from rljax.engines.jax.learning.learner import JaxLearner
from rljax.errors import UserError
from rljax.testing import models
from rljax.testing.learner_batches import config_of, episodes, first_fit, pack

LORA = {"actor.lora.rank": 4, "actor.lora.alpha": 8.0, "actor.optimizer.lr": 3e-2, "actor.kl_ctl": 0.01}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return models.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def batch():
    items = episodes(8)
    return pack(items, first_fit(items, 64), 64)


@pytest.fixture(scope="module")
def trained(model_dir, batch):
    learner = JaxLearner(config_of(**LORA), Pool("jax"), model_dir)
    base = learner.score(batch)
    frozen = jax.tree.map(np.array, learner._policy.frozen)
    for _ in range(3):
        learner.update(batch.replace(reference_logp=learner.score_reference(batch)))
    return learner, base, frozen


def test_an_adapted_model_begins_as_its_base(model_dir, batch, trained):
    plain = JaxLearner(config_of(), Pool("jax"), model_dir)
    np.testing.assert_allclose(trained[1], plain.score(batch), atol=1e-6)


def test_adapters_learn_and_the_base_stays_and_is_the_reference(batch, trained):
    learner, base, frozen = trained
    assert np.abs(learner.score(batch) - base).max() > 1e-2
    jax.tree.map(np.testing.assert_array_equal, learner._policy.frozen, frozen)
    np.testing.assert_array_equal(learner.score_reference(batch), base)


def test_what_is_published_and_exported_has_the_adapters_folded_in(batch, trained, tmp_path):
    learner, _, _ = trained
    learner.export(ExportToDirectory(tmp_path / "export"))
    merged = JaxLearner(config_of(), Pool("jax"), tmp_path / "export")
    np.testing.assert_allclose(merged.score(batch), learner.score(batch), atol=3e-5)
    published = learner.export(ExportToSampler("memory", Pool("jax"))).params
    jax.tree.map(np.testing.assert_array_equal, published, merged._policy.trained)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export").num_parameters() == sum(
        a.size for a in jax.tree.leaves(published)
    )


def test_a_checkpoint_holds_the_adapters_alone(model_dir, batch, trained, tmp_path):
    learner, _, _ = trained
    learner.save(tmp_path / "lora")
    resumed = JaxLearner(config_of(**LORA), Pool("jax"), model_dir)
    resumed.restore(tmp_path / "lora")
    np.testing.assert_array_equal(resumed.score(batch), learner.score(batch))
    adapters = sum(a.nbytes for a in jax.tree.leaves(learner._policy.trained))
    held = sum(a.nbytes for a in jax.tree.leaves(learner._tree(learner._phases)))
    assert held == pytest.approx(3 * adapters, rel=1e-3)  # parameters and two moments
    full = JaxLearner(config_of(), Pool("jax"), model_dir)
    with pytest.raises(UserError, match="lora"):
        full.restore(tmp_path / "lora")


def test_a_critic_beside_adapters_shares_their_base(model_dir, batch):
    learner = JaxLearner(config_of(**LORA, **{"actor.adv_estimator": "gae"}), Pool("jax"), model_dir)
    first = learner.update_critic(batch.replace(values=learner.values(batch)))
    for _ in range(10):
        last = learner.update_critic(batch.replace(values=learner.values(batch)))
    assert last["critic/loss"].value < first["critic/loss"].value
    assert set(learner._phases.rl.critic.trained["model"]) == {"layers"}


def test_a_module_that_does_not_exist_is_refused(model_dir):
    with pytest.raises(UserError, match=r"target_modules.*'x_proj'.*q_proj"):
        JaxLearner(config_of(**LORA, **{"actor.lora.target_modules": ("x_proj",)}), Pool("jax"), model_dir)
