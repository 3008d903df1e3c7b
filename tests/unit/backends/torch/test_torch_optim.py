"""AdamW against its equations in float64 numpy, and its schedules against those of the JAX path."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rljax.backends.jax import optim as jax_optim
from rljax.backends.torch.optim import Optimizer, TrainedParameter, decays
from rljax.backends.torch.rounding import Shards
from rljax.config.learning_rate import SCHEDULES, make_schedule
from rljax.errors import UserError
from tests.unit.backends.jax.test_optim import CONFIG, adamw

SHAPES = {"layers.0.up_proj.weight": (3, 4), "layers.0.input_layernorm.weight": (4,), "layers.0.q_proj.bias": (2,)}


def setup(config, total=None, copies=1):
    rng = np.random.default_rng(0)
    values = {name: torch.tensor(rng.normal(size=shape), dtype=torch.float32) for name, shape in SHAPES.items()}
    grads = {}
    parameters = [
        TrainedParameter(name, value, lambda name=name: grads[name].clone(), copies) for name, value in values.items()
    ]
    return values, grads, Optimizer(config, total, "actor.optimizer", parameters, lambda x: x.mul_(copies))


def random_gradients(steps):
    rng = np.random.default_rng(1)
    return [{name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()} for _ in range(steps)]


@pytest.mark.parametrize("clipping", [0.0, 1.0, 1e3])
@pytest.mark.parametrize("copies", [1, 3])  # ranks that hold every shard
def test_steps_follow_the_equations_with_no_decay_of_norms_and_biases(clipping, copies):
    config = dataclasses.replace(CONFIG, gradient_clipping=clipping, lr_scheduler_type="linear", warmup_steps_proportion=0.5)
    values, grads, optimizer = setup(config, 4, copies)
    start = {name: value.numpy().astype(np.float64) for name, value in values.items()}
    sequence = random_gradients(4)
    for gradient in sequence:
        grads.update({name: torch.from_numpy(g) for name, g in gradient.items()})
        stats = optimizer.step()
        assert stats.grad_norm == pytest.approx(math.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradient.values())))
    lrs = [config.lr * share for share in (1 / 2, 1, 2 / 3, 1 / 3)]  # 2 steps up, then down to zero after the last of 4
    want, mu, nu = adamw(config, start, [{n: g.astype(np.float64) for n, g in step.items()} for step in sequence], lrs)
    for index, name in enumerate(SHAPES):
        for got, expected in ((values[name], want), (optimizer.mu[index], mu), (optimizer.nu[index], nu)):
            np.testing.assert_allclose(got, expected[name], rtol=2e-5, atol=1e-7, err_msg=name)
    assert optimizer.count == 4


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(poison):
    values, grads, optimizer = setup(CONFIG)
    first, bad = random_gradients(2)
    grads.update({name: torch.from_numpy(g) for name, g in first.items()})
    optimizer.step()
    before = [t.clone() for t in (*values.values(), *optimizer.mu, *optimizer.nu)]
    bad["layers.0.q_proj.bias"][1] = poison
    grads.update({name: torch.from_numpy(g) for name, g in bad.items()})
    stats = optimizer.step()
    assert stats.skipped
    assert optimizer.count == 1
    for got, want in zip((*values.values(), *optimizer.mu, *optimizer.nu), before, strict=True):
        assert torch.equal(got, want)


def test_zero_learning_rate_changes_no_bit_of_the_parameters():
    values, grads, optimizer = setup(dataclasses.replace(CONFIG, lr=0.0))
    before = {name: value.clone() for name, value in values.items()}
    grads.update({name: torch.from_numpy(g) for name, g in random_gradients(1)[0].items()})
    optimizer.step()
    assert all(torch.equal(values[name], before[name]) for name in SHAPES)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_the_rate_is_that_of_the_jax_path_at_every_step(kind, warmup):
    config = dataclasses.replace(CONFIG, lr_scheduler_type=kind, warmup_steps_proportion=warmup / 21, min_lr_ratio=0.25)
    ours, theirs = make_schedule(config, 21, "actor.optimizer"), jax_optim.make_schedule(config, 21, "actor.optimizer")
    for step in range(30):
        assert ours(step) == pytest.approx(float(theirs(step)), rel=1e-6), step


def test_what_cannot_be_done_is_refused_by_its_key():
    with pytest.raises(UserError, match="total_train_steps"):
        make_schedule(dataclasses.replace(CONFIG, lr_scheduler_type="cosine"), None, "actor.optimizer")
    with pytest.raises(UserError, match=r"critic\.optimizer\.type.*sgd.*adamw"):
        Optimizer(dataclasses.replace(CONFIG, type="sgd"), None, "critic.optimizer", [], lambda x: x)
    with pytest.raises(UserError, match="cosine"):
        make_schedule(dataclasses.replace(CONFIG, lr_scheduler_type="step"), 5, "actor.optimizer")


def test_adapters_and_embeddings_decay():
    assert decays("model.embed_tokens.weight")
    assert decays("model.layers.0.self_attn.q_proj.lora_A.weight")
    assert decays("value_head")
    assert not decays("model.layers.0.self_attn.q_norm.weight")


@pytest.mark.parametrize("copies", [1, 3])  # ranks that hold every shard
def test_what_rounding_takes_of_an_update_is_all_below_half_an_ulp(copies):
    def share(lr):
        """Result of one step of lr down from 1, below which an ulp of bfloat16 is 2^-8."""
        config = dataclasses.replace(CONFIG, lr=lr, weight_decay=0.0, gradient_clipping=0.0)
        grads = {"moved": torch.ones(3, 4), "still": torch.zeros(5)}
        parameters = [
            TrainedParameter(name, torch.ones_like(grad), lambda name=name: grads[name], copies) for name, grad in grads.items()
        ]
        optimizer = Optimizer(config, None, "key", parameters, lambda x: x.mul_(copies), published=torch.bfloat16)
        found = optimizer.step().rounded_away
        assert found.count == pytest.approx(12)  # a weight that stays where it was has nothing to lose
        return found.value

    assert share(2**-9 * 0.99) == 1
    assert share(2**-9 * 1.01) == 0


@pytest.mark.parametrize(("gradient", "steps"), [(1.0, 1), (float("nan"), 0)])  # of NaN no step is taken
def test_rounding_takes_nothing_of_an_update_in_float32_and_no_weight_is_copied(gradient, steps, monkeypatch):
    monkeypatch.setattr("rljax.backends.torch.optim.Shards", None)
    parameters = [TrainedParameter("weight", torch.ones(3, 4), lambda: torch.full((3, 4), gradient))]
    config = dataclasses.replace(CONFIG, lr=2**-23)
    found = Optimizer(config, None, "key", parameters, lambda x: x, published=torch.float32).step().rounded_away
    assert (found.sum, found.count) == (0, steps)


def test_a_sample_of_the_weights_is_spread_over_all_of_them():
    values = [torch.ones(64, 64), torch.ones(64, 32)]
    before = Shards(values, limit=500)
    values[0][:32] -= 2**-10  # half of two thirds are moved by less than rounding
    values[1] -= 0.5
    found = before.rounded_away(values, torch.bfloat16, [1, 1], lambda x: x)
    assert 300 < found.count < 500
    assert found.value == pytest.approx(1 / 2, abs=0.02)
