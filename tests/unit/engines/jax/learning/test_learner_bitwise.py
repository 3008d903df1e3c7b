"""The bitwise mode: one program scores for sampler and learner, and what else a call holds changes
no bit.
"""

import jax
import numpy as np
import pytest

from rljax.config.allocation import Allocation, Pool
from rljax.engine import ExportToSampler
from rljax.engines.jax.learning.learner import JaxLearner
from rljax.engines.jax.plugin import PLUGIN
from rljax.engines.jax.scoring import ROWS_PER_SHARD, bitwise_scorer, scorer_of
from rljax.engines.jax.tuning import logit_rows_of
from rljax.errors import UserError
from rljax.metrics.mean import merge
from rljax.testing import models
from rljax.testing.learner_batches import UPDATE, Episode, config_of, episodes, first_fit, halves, pack, unpack

BITWISE = {"jax.bitwise": True, "actor.optimizer.lr": 0.0, "actor.ppo_n_minibatches": 2}


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    return JaxLearner(config_of(**BITWISE), Pool("jax"), models.make_model(tmp_path_factory.mktemp("model")))


def sequences():
    return [item.arrays["token_ids"] for item in episodes(2 * ROWS_PER_SHARD + 3, seed=5, longest=60)]


def test_a_sequences_bits_do_not_depend_on_its_company(learner):
    config = config_of(**BITWISE)
    scorer = scorer_of(config, learner._policy.spec, learner._mesh)
    params = learner._policy.merged()
    together = scorer(params, sequences())
    backwards = scorer(params, sequences()[::-1])[::-1]
    for index, sequence in enumerate(sequences()):
        np.testing.assert_array_equal(together[index], backwards[index])
        np.testing.assert_array_equal(together[index], scorer(params, [sequence])[0])


def test_the_sampler_gets_the_program_of_the_learner_and_its_weights(learner):
    """What is published is the master's bits, and the scorer is one object, so one compiled
    program, for both.
    """
    config = config_of(**BITWISE)
    spec, mesh = learner._policy.spec, learner._mesh
    assert scorer_of(config, spec, mesh) is scorer_of(config, spec, mesh)
    assert scorer_of(config, spec, mesh) is bitwise_scorer(
        spec, mesh, "float32", 1.0, logit_rows_of(config, spec, mesh), 64, False
    )
    published = learner.export(ExportToSampler("memory", Pool("jax"))).params
    jax.tree.map(np.testing.assert_array_equal, published, learner._policy.trained)
    items = episodes(6)
    rows = first_fit(items, 64)
    scored = unpack(learner.score(pack(items, rows, 64)), items, rows)
    sampled = scorer_of(config, spec, mesh)(published, [item.arrays["token_ids"] for item in items])
    for index, item in enumerate(items):
        mask = item.arrays["loss_mask"]
        np.testing.assert_array_equal(scored[index][mask], sampled[index][mask])


def test_zero_learning_rate_gives_ratio_1_in_every_minibatch_whatever_the_packing(learner):
    items = episodes(8)
    batch = pack(items, first_fit(items, 64), 64)
    alone = [[i] for i in range(len(items))]
    scored = unpack(learner.score(pack(items, alone, 40)), items, alone)  # as a sampler would, row by row
    behavior = [Episode(item.arrays | {"behavior_logp": scored[i]}) for i, item in enumerate(items)]
    batch = pack(behavior, first_fit(items, 64), 64).replace(proximal_logp=learner.score(batch))
    means = merge(learner.update(part) for part in halves(batch))
    for name in ("importance_weight", "behave_imp_weight"):
        mean = means[f"{UPDATE}/{name}"]
        assert (mean.value, mean.min, mean.max) == (1.0, 1.0, 1.0), name


def test_its_log_probs_are_those_of_packed_rows_to_rounding(learner, tmp_path):
    packed = JaxLearner(config_of(), Pool("jax"), learner._model_dir)
    items = episodes(8)
    batch = pack(items, first_fit(items, 64), 64)
    np.testing.assert_allclose(learner.score(batch), packed.score(batch), atol=1e-5)


def test_a_sequence_beyond_the_context_is_refused(learner):
    scorer = scorer_of(config_of(**BITWISE), learner._policy.spec, learner._mesh)
    with pytest.raises(UserError, match=r"jax\.context_length"):
        scorer(learner._policy.merged(), [np.zeros(65, np.int32)])


def test_pools_that_add_up_in_different_orders_are_refused_before_anything_starts():
    short = {"gconfig.max_new_tokens": 16}
    config = config_of(**BITWISE, **short)
    PLUGIN.check(config, Allocation(Pool("jax", data=2), Pool("jax", data=2)))
    with pytest.raises(UserError, match=r"jax\.bitwise.*jax:d2 and jax:t2"):
        PLUGIN.check(config, Allocation(Pool("jax", data=2), Pool("jax", tensor=2)))
    with pytest.raises(UserError, match="both be jax"):
        PLUGIN.check(config, Allocation(Pool("sglang"), Pool("jax")))
    PLUGIN.check(config_of(**short), Allocation(Pool("sglang"), Pool("jax")))
