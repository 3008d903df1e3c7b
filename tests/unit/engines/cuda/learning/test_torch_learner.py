"""The PyTorch learner does what the JAX learner does, and a run can move between them."""

import math

import jax
import numpy as np
import pytest
from torch.distributed.checkpoint import FileSystemReader

from rljax.config.allocation import Pool
from rljax.engine import ExportToDirectory, ExportToSampler
from rljax.engines.cuda.learning.learner import TorchLearner
from rljax.engines.jax.learning.learner import JaxLearner
from rljax.errors import UserError
from rljax.testing import models
from rljax.testing.learner_batches import assert_means_close, config_of, episodes, first_fit, pack

UPDATE = "ppo_actor/update"
LORA = {"actor.lora.rank": 4, "actor.lora.alpha": 8.0, "actor.optimizer.lr": 3e-2, "actor.kl_ctl": 0.01}
MILD = {"actor.optimizer.eps": 1e-2}  # else the first step of Adam is the sign of the gradient, noise included


def make(model_dir, **settings):
    return TorchLearner(config_of(**settings), Pool("fsdp"), model_dir)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return models.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def batch():
    items = episodes(8)
    packed = pack(items, first_fit(items, 64), 64)
    drifted = np.where(packed.loss_mask, packed.behavior_logp + 0.1 * np.sin(packed.token_ids), 0)
    return packed.replace(proximal_logp=drifted.astype(np.float32))


def assert_states_close(got, want, tolerance):
    for place in ("params", "mu", "nu"):
        assert got[place].keys() == want[place].keys()
        for name, array in want[place].items():
            np.testing.assert_allclose(got[place][name], array, atol=tolerance, rtol=1e-3, err_msg=f"{place} {name}")


@pytest.mark.parametrize(
    "settings",
    [
        {"actor.gradient_checkpointing": "full"},
        pytest.param(
            {"actor.importance_sampling_level": "sequence", "actor.optimizer.gradient_clipping": 0.05}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_step_is_that_of_the_jax_learner_and_a_run_moves_between_them(model_dir, batch, settings):
    config = config_of(**MILD, **settings, **{"actor.entropy_coef": 0.01, "actor.optimizer.weight_decay": 0.1})
    ours, theirs = TorchLearner(config, Pool("fsdp"), model_dir), JaxLearner(config, Pool("jax"), model_dir)
    np.testing.assert_allclose(ours.score(batch), theirs.score(batch), atol=2e-5)
    assert_means_close(ours.update(batch), theirs.update(batch), 1e-4)
    mine, other = ours.named_state(), theirs.named_state()
    assert_states_close(mine, other, 2e-6)
    assert mine["counts"] == {"actor": 1}
    ours.update(batch)  # elsewhere
    ours.load_named_state(other, 1)
    theirs.load_named_state(mine, 1)
    for name, array in other["params"].items():
        np.testing.assert_array_equal(ours.named_state()["params"][name], array)
    assert_means_close(ours.update(batch), theirs.update(batch), 1e-4)
    assert_states_close(ours.named_state(), theirs.named_state(), 4e-6)
    ours.close()


def test_a_state_by_name_is_everything_that_a_learner_goes_on_from(model_dir, batch):
    settings = {"actor.adv_estimator": "gae", "actor.kl_ctl": 0.1, "warmup.steps": 3, "warmup.optimizer.lr": 1e-3}
    one, other = make(model_dir, **settings), make(model_dir, **settings)
    one.update_supervised(batch)
    other.load_named_state(one.named_state(), 0)
    assert_means_close(other.update_supervised(batch), one.update_supervised(batch), 0.0)

    def train(learner):
        reference = learner.score_reference(batch)
        means = learner.update(batch.replace(reference_logp=reference))
        return means | learner.update_critic(batch.replace(values=learner.values(batch)))

    train(one)
    state = one.named_state()
    assert "value_head" in state["critic/params"] and "reference" in state
    other.load_named_state(state, 1)
    assert_means_close(train(other), train(one), 0.0)
    np.testing.assert_array_equal(other.score(batch), one.score(batch))
    before = other.score(batch)
    without = {place: arrays for place, arrays in state.items() if place != "nu"}
    for broken in ({**state, "mu": {}}, without):
        with pytest.raises(UserError, match="checkpoint"):
            other.load_named_state(broken, 1)
    np.testing.assert_array_equal(other.score(batch), before)
    one.close()
    other.close()


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(model_dir, batch):
    learner = make(model_dir)
    before = learner.score(batch)
    advantage = batch.advantage.copy()
    advantage[batch.loss_mask & (batch.loss_weight > 0)] = np.inf
    means = learner.update(batch.replace(advantage=advantage))
    assert means[f"{UPDATE}/skipped"].value == 1
    assert means[f"{UPDATE}/grad_norm"].count == 0
    assert math.isnan(means[f"{UPDATE}/loss"].value)
    np.testing.assert_array_equal(learner.score(batch), before)
    assert learner.named_state()["counts"]["actor"] == 0
    assert learner.update(batch)[f"{UPDATE}/skipped"].value == 0
    learner.close()


def test_weights_in_memory_are_the_policy_and_what_nobody_took_is_let_go(model_dir, batch):
    learner = make(model_dir, **{"allocation_mode": "sglang:d1+fsdp:d1", "sglang.device": "cpu"})
    learner.update(batch)
    params = learner.named_state()["params"]
    found = dict(learner.export(ExportToSampler("gloo", Pool("sglang"))).sender.tensors)
    assert found.keys() == params.keys()
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor.numpy(), params[name])
    first, again, other = (learner.export(ExportToSampler("gloo", Pool("sglang", tensor=n))).sender for n in (1, 1, 2))
    assert first.group is again.group is not other.group and other.group.tensor == 2  # a group outlives publishes
    tensors = learner.export(ExportToSampler("gloo", Pool("sglang"))).sender.tensors
    next(iter(tensors))  # a server fails after the first one
    learner.update(batch)
    assert not list(tensors)
    learner.close()


# LoRA


@pytest.fixture(scope="module")
def adapted(model_dir, batch):
    learner = make(model_dir, **LORA, **MILD)
    base = learner.score(batch)
    for _ in range(3):
        means = learner.update(batch.replace(reference_logp=learner.score_reference(batch)))
    yield learner, base, means
    learner.close()


def test_adapters_begin_as_their_base_learn_as_those_of_jax_and_leave_the_reference(model_dir, batch, adapted):
    learner, base, means = adapted
    plain = make(model_dir)
    np.testing.assert_allclose(base, plain.score(batch), atol=1e-6)
    plain.close()
    assert np.abs(learner.score(batch) - base).max() > 1e-3
    np.testing.assert_array_equal(learner.score_reference(batch), base)
    theirs = JaxLearner(config_of(**LORA, **MILD), Pool("jax"), model_dir)
    for _ in range(3):
        expected = theirs.update(batch.replace(reference_logp=theirs.score_reference(batch)))
    assert_means_close(means, expected, 2e-4)
    np.testing.assert_allclose(learner.score(batch), theirs.score(batch), atol=1e-4)
    trained = sum(a.size for a in jax.tree.leaves(theirs._policy.trained))
    assert sum(a.size for a in learner.named_state()["params"].values()) == trained


def test_what_is_exported_has_the_adapters_folded_in(batch, adapted, tmp_path):
    learner, _, _ = adapted
    learner.export(ExportToDirectory(tmp_path / "export"))
    merged = make(tmp_path / "export")
    np.testing.assert_allclose(merged.score(batch), learner.score(batch), atol=3e-5)
    merged.close()


def test_a_checkpoint_of_adapters_is_theirs_alone(model_dir, batch, adapted, tmp_path):
    learner, _, _ = adapted
    learner.save(tmp_path / "lora")
    resumed = make(model_dir, **LORA, **MILD)
    resumed.restore(tmp_path / "lora")
    np.testing.assert_array_equal(resumed.score(batch), learner.score(batch))
    resumed.close()
    stored = FileSystemReader(tmp_path / "lora" / "tree").read_metadata().state_dict_metadata
    held = [entry.size.numel() for name, entry in stored.items() if not name.endswith("count")]
    adapters = sum(a.size for a in learner.named_state()["params"].values())
    assert sum(held) == 3 * adapters  # parameters and two moments
    full = make(model_dir)
    with pytest.raises(UserError, match="lora"):
        full.restore(tmp_path / "lora")
    full.close()


def test_a_critic_beside_adapters_shares_their_base(model_dir, batch):
    learner = make(model_dir, **LORA, **{"actor.adv_estimator": "gae"})
    policy = learner.score(batch)
    first = learner.update_critic(batch.replace(values=learner.values(batch)))
    for _ in range(10):
        last = learner.update_critic(batch.replace(values=learner.values(batch)))
    assert last["critic/loss"].value < first["critic/loss"].value
    np.testing.assert_array_equal(learner.score(batch), policy)
    assert all("lora" in name or name == "value_head" for name in learner.named_state()["critic/params"])
    learner.close()


def test_a_module_that_does_not_exist_is_refused(model_dir):
    with pytest.raises(UserError, match=r"target_modules.*'x_proj'.*q_proj"):
        make(model_dir, **LORA, **{"actor.lora.target_modules": ("x_proj",)})


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, LORA])
def test_both_learners_tell_what_rounding_takes_of_an_update(model_dir, batch, lora):
    settings = {**MILD, **lora, "actor.kl_ctl": 0.0, "actor.optimizer.lr": 1e-3, "jax.sampler_dtype": "bfloat16"}
    config = config_of(**settings, **{"actor.dtype": "bfloat16"})
    theirs = JaxLearner(config, Pool("jax"), model_dir)

    def published():
        """Returns what a sampler gets of the matrices; of those with adapters the middle layer, which is what is measured."""
        params = theirs.export(ExportToSampler("memory", Pool("jax"))).params
        if not lora:
            return [np.asarray(a) for path, a in jax.tree.leaves_with_path(params) if path[-1].key != "scale"]
        adapted, middle = theirs._policy.trained["layers"], theirs._spec.num_layers // 2
        return [np.asarray(params["layers"][name]["kernel"][middle]) for name in sorted(adapted)]

    before = published()
    mean = theirs.update(batch)[f"{UPDATE}/rounded_away"]
    changed = sum(int((old != new).sum()) for old, new in zip(before, published(), strict=True))
    norms = sum(a.size for path, a in jax.tree.leaves_with_path(theirs._policy.trained) if path[-1].key == "scale")
    assert mean.count - mean.sum == pytest.approx(changed, abs=norms)  # the norms are published as they are
    ours = TorchLearner(config, Pool("fsdp"), model_dir)
    assert 0.1 < mean.value < 0.9
    assert ours.update(batch)[f"{UPDATE}/rounded_away"].value == pytest.approx(mean.value, abs=0.02)
    ours.close()
