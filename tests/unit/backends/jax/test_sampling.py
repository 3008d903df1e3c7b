"""The distribution that a request samples from, against numpy in float64; draws, against their own distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.backends.jax.sampling import Sampling, draw, log_distribution, sample

sample_jit = jax.jit(sample)
log_distribution_jit = jax.jit(log_distribution)


def sampling(rows=1, *, vocabulary=1 << 20, **changes) -> Sampling:
    values = dict(
        temperature=1.0, top_p=1.0, top_k=0, greedy=False, min_new_tokens=0, stop_ids=(vocabulary,), seed=0, token_index=0
    )
    dtypes = dict(temperature=np.float32, top_p=np.float32, top_k=np.int32, greedy=bool, min_new_tokens=np.int32)
    dtypes |= dict(stop_ids=np.int32, seed=np.uint32, token_index=np.int32)
    values |= changes
    arrays = {}
    for name, value in values.items():
        value = np.asarray(value, dtypes[name])
        per_row = value.ndim == (2 if name == "stop_ids" else 1)
        arrays[name] = jnp.asarray(value if per_row else np.broadcast_to(value, (rows, *value.shape)))
    return Sampling(**arrays)


def oracle(logits, temperature=1.0, top_k=0, top_p=1.0, banned=()):
    """Token by token in float64: the log-probabilities that log_distribution should give for distinct logits."""
    z = np.array(logits, np.float64)
    z[list(banned)] = -np.inf
    z /= temperature
    order = list(np.argsort(-z))
    kept = order[: top_k or None]
    p = np.exp(z[kept] - z[kept].max())
    p /= p.sum()
    count, mass = 0, 0.0
    while count < len(kept) and (count == 0 or top_p == 1 or mass < top_p - 1e-9):
        mass += p[count]
        count += 1
    logp = np.full(len(z), -np.inf)
    with np.errstate(divide="ignore"):
        logp[kept[:count]] = np.log(p[:count] / p[:count].sum())
    return logp


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, 40, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-9])
def test_distribution_is_the_oracle_s(temperature, top_k, top_p):
    logits = np.random.default_rng(0).normal(size=(3, 40)) * 3
    banned = [7, int(logits[1].argmax())]
    params = sampling(3, temperature=temperature, top_k=top_k, top_p=top_p, min_new_tokens=4, token_index=3, stop_ids=banned)
    got = log_distribution_jit(jnp.asarray(logits, jnp.float32), params)
    want = [oracle(row, temperature, top_k, top_p, banned) for row in logits]
    np.testing.assert_allclose(got, want, atol=3e-5)


def test_truncated_sampling_log_prob_is_of_the_kept_set():
    logits = jnp.log(jnp.asarray([[0.50, 0.30, 0.12, 0.05, 0.03]]))
    kept = log_distribution_jit(logits, sampling(top_p=0.8))
    np.testing.assert_allclose(kept[0], [-0.470004, np.log(0.3 / 0.8), -np.inf, -np.inf, -np.inf], atol=1e-6)
    np.testing.assert_allclose(log_distribution_jit(logits, sampling())[0, 0], -0.693147, atol=1e-6)


def test_sampling_temperature_is_that_of_the_log_prob():
    logits = jnp.asarray([[2.0, 0.0, -1.0]])
    np.testing.assert_allclose(log_distribution_jit(logits, sampling(temperature=0.6))[0, 0], -0.041537, atol=1e-6)
    np.testing.assert_allclose(log_distribution_jit(logits, sampling())[0, 0], -0.169846, atol=1e-6)


def test_greedy_takes_the_likeliest_and_reports_the_whole_softmax():
    logits = np.random.default_rng(1).normal(size=(8, 50)).astype(np.float32)
    token, logp = sample_jit(logits, sampling(8, greedy=True, temperature=0.2, top_k=3, top_p=0.5))
    np.testing.assert_array_equal(token, logits.argmax(-1))
    np.testing.assert_allclose(logp, [oracle(row).max() for row in logits], atol=1e-5)


def test_stop_ids_are_banned_only_until_the_minimum():
    logits = jnp.asarray([[0.0, 9.0, 1.0]] * 4)
    params = sampling(4, greedy=True, min_new_tokens=2, token_index=[0, 1, 2, 3], stop_ids=(1, 99))
    np.testing.assert_array_equal(sample_jit(logits, params)[0], [2, 2, 1, 1])


def test_rows_do_not_influence_one_another():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(4, 30)), jnp.float32)
    mixed = sampling(
        4, temperature=[0.5, 1, 1, 2], top_k=[0, 3, 0, 0], top_p=[1, 1, 0.5, 1], greedy=[0, 0, 0, 1], seed=[1, 2, 3, 4]
    )
    together = sample_jit(logits, mixed)
    for row in range(4):
        alone = sample_jit(logits[row : row + 1], jax.tree.map(lambda x, row=row: x[row : row + 1], mixed))
        np.testing.assert_array_equal(together[0][row], alone[0][0])
        np.testing.assert_allclose(together[1][row], alone[1][0], atol=1e-6)


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 100])
def test_frequencies_are_the_distribution(vocabulary):
    n = 40_000
    logits = np.random.default_rng(vocabulary).normal(size=vocabulary) * 1.5
    seeds, indices = np.divmod(np.arange(n), 200)  # varying either must give fresh noise
    params = sampling(n, top_p=0.95, seed=seeds, token_index=indices)
    token, logp = sample_jit(np.broadcast_to(logits, (n, vocabulary)).astype(np.float32), params)
    want = oracle(logits, top_p=0.95)
    p = np.exp(want)
    counts = np.bincount(token, minlength=vocabulary)
    assert not counts[p == 0].any()
    assert np.all(np.abs(counts - n * p) <= 5 * np.sqrt(n * p * (1 - p)) + 1e-9)  # five standard deviations
    np.testing.assert_allclose(logp, want[np.asarray(token)], atol=2e-5)


def test_noise_depends_on_seed_and_index_alone():
    logits = jnp.zeros((6, 1000))
    token = np.asarray(sample_jit(logits, sampling(6, seed=[5, 5, 6, 5, 5, 6], token_index=[0, 1, 0, 0, 1, 0]))[0])
    np.testing.assert_array_equal(token[:3], token[3:])
    assert len(set(token[:3])) == 3


def test_weight_zero_is_never_drawn_and_tiny_weights_are():
    weights = np.zeros((20_000, 300), np.float32)
    weights[:, 17], weights[:, 18], weights[:, 250] = 1.0, 1e-3, 1e-3
    with np.errstate(divide="ignore"):
        logits = np.log(weights)
    tokens, _ = jax.jit(draw)(logits, np.arange(20_000, dtype=np.uint32), np.zeros(20_000, np.int32))
    drawn = np.bincount(tokens, minlength=300)
    assert drawn.sum() == drawn[[17, 18, 250]].sum()
    assert np.all(np.abs(drawn[[18, 250]] - 20_000 / 1002) <= 5 * np.sqrt(20))
