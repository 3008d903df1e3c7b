"""AdamW against its equations in float64 numpy; schedules at the steps where their value follows
from the definition.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.backends.jax import optim
from rljax.backends.jax.rounding import rounded, share_rounded_away
from rljax.config.schema import OptimizerConfig
from rljax.errors import UserError

CONFIG = OptimizerConfig(
    type="adamw",
    lr=1e-2,
    weight_decay=0.1,
    beta1=0.9,
    beta2=0.95,
    eps=1e-8,
    lr_scheduler_type="constant",
    min_lr_ratio=0.0,
    warmup_steps_proportion=0.0,
    gradient_clipping=1.0,
)


def params_and_grads(steps):
    rng = np.random.default_rng(0)
    params = {"layers": {"up_proj": rng.normal(size=(3, 4)), "input_norm": rng.normal(size=4)}, "bias": rng.normal(size=2)}
    grads = [{k: jax.tree.map(lambda p: rng.normal(size=p.shape), v) for k, v in params.items()} for _ in range(steps)]
    return params, grads


def adamw(config, params, grads, lrs):
    """Algorithm 2 of arXiv:1711.05101 after clipping by the global norm, on flat float64
    dictionaries.
    """
    mu = {k: 0.0 * p for k, p in params.items()}
    nu = {k: 0.0 * p for k, p in params.items()}
    for step, (grad, lr) in enumerate(zip(grads, lrs, strict=True), 1):
        norm = math.sqrt(sum((g**2).sum() for g in grad.values()))
        scale = min(1.0, config.gradient_clipping / norm) if config.gradient_clipping else 1.0
        for k in params:
            g = grad[k] * scale
            mu[k] = config.beta1 * mu[k] + (1 - config.beta1) * g
            nu[k] = config.beta2 * nu[k] + (1 - config.beta2) * g**2
            direction = mu[k] / (1 - config.beta1**step) / (np.sqrt(nu[k] / (1 - config.beta2**step)) + config.eps)
            decay = config.weight_decay if "norm" not in k and "bias" not in k else 0.0
            params = {**params, k: params[k] - lr * (direction + decay * params[k])}
    return params, mu, nu


def flat(tree):
    return {jax.tree_util.keystr(p): np.asarray(v, np.float64) for p, v in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize("clipping", [0.0, 1.0, 1e3])
def test_steps_follow_the_equations_with_no_decay_of_norms_and_biases(clipping):
    config = dataclasses.replace(CONFIG, gradient_clipping=clipping, lr_scheduler_type="linear", warmup_steps_proportion=0.5)
    params, grads = params_and_grads(4)
    optimizer = optim.Optimizer(config, 4, "actor.optimizer")
    p = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params)
    state = optimizer.init(p)
    step = jax.jit(optimizer.apply)
    for grad in grads:
        p, state, stats = step(p, state, jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), grad))
        expected = math.sqrt(sum((g**2).sum() for g in flat(grad).values()))
        np.testing.assert_allclose(stats.grad_norm, expected, rtol=1e-5)
        assert stats.skipped == 0
    lrs = [config.lr * share for share in (1 / 2, 1, 2 / 3, 1 / 3)]  # 2 steps up, then down to zero after the last of 4
    want, mu, nu = adamw(config, flat(params), [flat(g) for g in grads], lrs)
    for got, expected in ((p, want), (optim.moments(state)[0], mu), (optim.moments(state)[1], nu)):
        for name, array in flat(got).items():
            np.testing.assert_allclose(array, expected[name], rtol=2e-5, atol=1e-7, err_msg=name)
    assert optim.step_count(state) == 4


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(poison):
    params, grads = params_and_grads(2)
    optimizer = optim.Optimizer(CONFIG, None, "actor.optimizer")
    p = jax.tree.map(jnp.asarray, params)
    p, state, _ = optimizer.apply(p, optimizer.init(p), jax.tree.map(jnp.asarray, grads[0]))
    bad = jax.tree.map(jnp.asarray, grads[1])
    bad["bias"] = bad["bias"].at[1].set(poison)
    after, after_state, stats = optimizer.apply(p, state, bad)
    assert stats.skipped == 1
    assert not math.isfinite(stats.grad_norm)
    jax.tree.map(np.testing.assert_array_equal, (after, after_state), (p, state))


def test_zero_learning_rate_changes_no_bit_of_the_parameters():
    params, grads = params_and_grads(1)
    optimizer = optim.Optimizer(dataclasses.replace(CONFIG, lr=0.0), None, "actor.optimizer")
    p = jax.tree.map(jnp.asarray, params)
    after, _, _ = optimizer.apply(p, optimizer.init(p), jax.tree.map(jnp.asarray, grads[0]))
    jax.tree.map(np.testing.assert_array_equal, after, p)


@pytest.mark.parametrize("kind", optim.SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_the_rate_rises_over_the_warmup_and_ends_above_its_floor(kind, warmup):
    total = 21
    config = dataclasses.replace(CONFIG, lr_scheduler_type=kind, warmup_steps_proportion=warmup / total, min_lr_ratio=0.25)
    schedule = optim.make_schedule(config, total, "actor.optimizer")
    rates = np.array([float(schedule(step)) for step in range(total)]) / config.lr
    np.testing.assert_allclose(rates[:warmup], np.arange(1, warmup + 1) / max(warmup, 1), rtol=1e-6)
    tail = rates[max(warmup - 1, 0) :]
    fraction = np.arange(len(tail)) / len(tail)
    expected = {
        "constant": np.ones_like(fraction),
        "linear": 1 - 0.75 * fraction,
        "cosine": 0.25 + 0.75 * (1 + np.cos(np.pi * fraction)) / 2,
    }[kind]
    np.testing.assert_allclose(tail, expected, rtol=1e-5)
    if kind != "constant":
        assert tail[-1] > 0.25 and float(schedule(total)) == float(schedule(total + 10)) == pytest.approx(config.lr * 0.25)


def test_a_schedule_over_an_unknown_number_of_steps_is_refused():
    with pytest.raises(UserError, match="total_train_steps"):
        optim.make_schedule(dataclasses.replace(CONFIG, lr_scheduler_type="cosine"), None, "actor.optimizer")


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(UserError, match=r"critic\.optimizer\.type.*sgd.*adamw"):
        optim.Optimizer(dataclasses.replace(CONFIG, type="sgd"), None, "critic.optimizer")
    with pytest.raises(UserError, match="cosine"):
        optim.make_schedule(dataclasses.replace(CONFIG, lr_scheduler_type="step"), 5, "actor.optimizer")


def test_moments_can_be_replaced_and_the_schedule_goes_on_from_the_count():
    params, grads = params_and_grads(3)
    config = dataclasses.replace(CONFIG, lr_scheduler_type="linear")
    optimizer = optim.Optimizer(config, 10, "actor.optimizer")
    p = jax.tree.map(jnp.asarray, params)
    state = optimizer.init(p)
    for grad in grads[:2]:
        p, state, _ = optimizer.apply(p, state, jax.tree.map(jnp.asarray, grad))
    mu, nu = optim.moments(state)
    rebuilt = optim.set_moments(optimizer.init(p), mu, nu, optim.step_count(state))
    jax.tree.map(np.testing.assert_array_equal, rebuilt, state)
    jax.tree.map(
        np.testing.assert_array_equal,
        optimizer.apply(p, rebuilt, jax.tree.map(jnp.asarray, grads[2])),
        optimizer.apply(p, state, jax.tree.map(jnp.asarray, grads[2])),
    )


def published_in(dtype):
    return lambda tree: jax.tree.map(lambda a: rounded(a, dtype), tree)


def test_what_rounding_takes_of_an_update_is_all_below_half_an_ulp():
    def share(lr, dtype):
        """Result of one step of lr down from 1 (below which an ulp of bfloat16 is 2^-8)."""
        config = dataclasses.replace(CONFIG, lr=lr, weight_decay=0.0, gradient_clipping=0.0)
        optimizer = optim.Optimizer(config, None, "key", rounding=published_in(dtype))
        params, grads = {"moved": jnp.ones((3, 4)), "still": jnp.ones(5)}, {"moved": jnp.ones((3, 4)), "still": jnp.zeros(5)}
        found = jax.jit(optimizer.apply)(params, optimizer.init(params), grads)[2].rounded_away
        assert found.count == 12  # a weight that stays where it was has nothing to lose
        return found.sum / found.count

    assert share(2**-9 * 0.99, jnp.bfloat16) == 1
    assert share(2**-9 * 1.01, jnp.bfloat16) == 0


@pytest.mark.parametrize(("gradient", "steps"), [(1.0, 1), (np.nan, 0)])  # of NaN no step is taken
def test_rounding_takes_nothing_of_an_update_in_float32_and_no_weight_is_looked_at(gradient, steps):
    config = dataclasses.replace(CONFIG, lr=2**-23)
    params, grads = {"weight": jnp.ones((3, 4))}, {"weight": jnp.full((3, 4), gradient)}
    optimizer = optim.Optimizer(config, None, "key", rounding=published_in(jnp.float32))
    found = jax.jit(optimizer.apply)(params, optimizer.init(params), grads)[2].rounded_away
    assert (found.sum, found.count) == (0, steps)

    def of_weights(optimizer):
        equations = jax.make_jaxpr(optimizer.apply)(params, optimizer.init(params), grads).eqns
        return sum(any(out.aval.shape == (3, 4) for out in equation.outvars) for equation in equations)

    assert of_weights(optimizer) == of_weights(optim.Optimizer(config, None, "key"))


def test_a_sample_of_large_arrays_counts_for_the_whole(monkeypatch):
    monkeypatch.setattr("rljax.backends.jax.rounding.SAMPLE", 64)
    before = {"layers": jnp.ones((6, 8, 8)), "table": jnp.ones((64, 4)), "scale": jnp.ones(16)}
    by = {"layers": 2**-10, "table": 0.5, "scale": 0.0}  # lost in bfloat16, kept, not moved
    after = {name: array - by[name] for name, array in before.items()}
    found = share_rounded_away(before, after, published_in(jnp.bfloat16), jnp.array(True))
    assert (found.sum, found.count) == (6 * 8 * 8, 6 * 8 * 8 + 64 * 4)
