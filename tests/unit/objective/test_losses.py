"""The oracle's hand-derived gradients against complex steps: exact to rounding, unlike finite
differences.
"""

import inspect

import numpy as np
import pytest

from rljax.objective import logprobs, losses, oracle
from rljax.objective.spec import Objective, TokenArrays
from rljax.testing.parity_cases import KINDS, TERMS, M, R, inputs

STEP = 1e-30  # no cancellation in f(x + ih).imag / h, so it may be this small


def complex_step(function, x: np.ndarray) -> np.ndarray:
    grad = np.zeros(x.shape)
    for index in np.ndindex(*x.shape):
        if np.isfinite(x[index]):
            moved = x.astype(np.complex128)
            moved[index] += 1j * STEP
            grad[index] = function(moved).imag / STEP
    return grad


# A stopped gradient is no derivative of the value: the others have tests of their own below.
PLAIN = [term for term in TERMS if term[0] not in ("cispo", "kl_loss", "distillation")]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "empty"])
@pytest.mark.parametrize("name, static", PLAIN, ids=str)
def test_gradient_is_the_derivative(name, static, kind):
    case = inputs(kind, seed=20)
    kernel = getattr(losses, name)
    arguments = list(inspect.signature(kernel).parameters)[: -len(static) or None]

    def value(**moved):
        return kernel(*((case | moved)[a] for a in arguments), **static).sum

    for argument, grad in kernel(*(case[a] for a in arguments), **static).grads.items():
        numerical = complex_step(lambda x, a=argument: value(**{a: x}), case[argument])
        scale = max(np.abs(numerical).max(), 1e-300)
        np.testing.assert_allclose(grad / scale, numerical / scale, atol=1e-13)


def test_cispo_is_the_derivative_of_the_log_likelihood_with_its_weight_held():
    case = inputs("clipped", seed=21)
    fixed = [case[a] for a in ("proximal_logp", "advantage", "mask", "weight")]
    clip = dict(clip_low=0.2, clip_high=0.28)
    grad = losses.cispo(case["logp"], *fixed, **clip).grads["logp"]
    mask = case["mask"]
    ratio = np.exp(case["logp"][mask] - case["proximal_logp"][mask])
    clipped = np.clip(ratio, 0.8, 1.28) * case["advantage"][mask] * case["weight"][mask]
    np.testing.assert_allclose(grad[mask], -clipped, rtol=1e-14)
    assert not grad[~mask].any()


@pytest.mark.parametrize("name", ["kl_loss", "distillation"])
def test_kl_has_the_gradient_of_reverse_kl_in_expectation(name):
    """Enumerate the vocabulary with its probabilities, against reverse KL over it and its
    derivative by the logits.
    """
    random = np.random.default_rng(3)
    logits, other = random.normal(size=(2, 7))
    log_p, log_q = logprobs.log_softmax(logits), logprobs.log_softmax(other)
    p, ones = np.exp(log_p)[None], np.ones((1, 7))
    static = [dict(estimator=e) for e in ("k1", "k3")] if name == "kl_loss" else [{}]

    def reverse_kl(z):
        log_policy = z - np.log(np.exp(z).sum())
        return (np.exp(log_policy) * (log_policy - log_q)).sum()

    for keywords in static:
        term = getattr(losses, name)(log_p[None], log_q[None], ones, np.ones((1, 7), bool), p, **keywords)
        through_logits = term.grads["logp"][0] - p[0] * term.grads["logp"].sum()
        np.testing.assert_allclose(through_logits, complex_step(reverse_kl, logits), atol=1e-15)
        np.testing.assert_allclose(term.sum, reverse_kl(logits), rtol=1e-13)  # k1 and k3 are unbiased


def test_samples_of_another_policy_are_reweighted():
    """Samples of pi_behave with importance pi_theta / pi_behave give the same expectation."""
    random = np.random.default_rng(4)
    logits, other, behaved = random.normal(size=(3, 7))
    log_p, log_q, log_b = (logprobs.log_softmax(z)[None] for z in (logits, other, behaved))
    mask, ones = np.ones((1, 7), bool), np.ones((1, 7))
    on_policy = losses.kl_loss(log_p, log_q, ones, mask, np.exp(log_p), estimator="k3")
    off_policy = losses.kl_loss(log_p, log_q, np.exp(log_p - log_b), mask, np.exp(log_b), estimator="k3")
    np.testing.assert_allclose(off_policy.sum, on_policy.sum, rtol=1e-12)
    np.testing.assert_allclose(off_policy.grads["logp"], on_policy.grads["logp"], rtol=1e-12)


def test_a_ratio_beyond_the_limit_is_bounded_and_has_no_gradient():
    one = np.ones((1, 1))
    for log_ratio in (25.0, 700.0, np.inf):
        logp, proximal = np.zeros((1, 1)), np.full((1, 1), -log_ratio)
        term = losses.clipped_surrogate(logp, proximal, -one, one > 0, one, clip_low=0.2, clip_high=0.2, dual_clip=None)
        assert term.sum == np.exp(losses.LOG_RATIO_LIMIT)
        assert term.grads["logp"] == 0


def test_dual_clip_bounds_the_loss_of_a_bad_token():
    one = np.ones((1, 1))
    arguments = (np.log(8) * one, 0 * one, -2 * one, one > 0, one)
    assert losses.clipped_surrogate(*arguments, clip_low=0.2, clip_high=0.2, dual_clip=3.0).sum == 6.0
    np.testing.assert_allclose(losses.clipped_surrogate(*arguments, clip_low=0.2, clip_high=0.2, dual_clip=None).sum, 16.0)


def test_the_sequence_weight_is_the_product_of_its_tokens_weights():
    case = inputs("ordinary", seed=22)
    arguments = [case[a] for a in ("proximal_logp", "behavior_logp", "mask", "segment_ids")]
    token = losses.behavior_weight(*arguments, cap=None, mode="clamp", level="token")
    sequence = losses.behavior_weight(*arguments, cap=None, mode="clamp", level="sequence")
    for row, segment in {(r, s) for r, s in zip(*np.nonzero(case["mask"]), strict=True)}:
        members = case["mask"][row] & (case["segment_ids"][row] == case["segment_ids"][row, segment])
        np.testing.assert_allclose(sequence[row, segment], token[row, members].prod(), rtol=1e-12)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_log_prob_ops_gradient_is_the_derivative(softcap):
    random = np.random.default_rng(5)
    hidden, unembedding, labels = random.normal(size=(4, 3)), random.normal(size=(6, 3)), random.integers(0, 6, 4)
    d_logp, d_entropy = random.normal(size=(2, 4))
    static = dict(temperature=0.7, softcap=softcap)

    def loss(hidden, unembedding):
        logp, entropy = logprobs.token_logprobs(hidden, unembedding, labels, **static)
        return np.sum(d_logp * logp + d_entropy * entropy)

    grads = logprobs.token_logprobs_grad(hidden, unembedding, labels, d_logp, d_entropy, **static)
    np.testing.assert_allclose(grads[0], complex_step(lambda x: loss(x, unembedding), hidden), atol=1e-13)
    np.testing.assert_allclose(grads[1], complex_step(lambda x: loss(hidden, x), unembedding), atol=1e-13)


@pytest.mark.parametrize("objective", [Objective(ratio_level="sequence"), Objective(entropy_coef=0.3, weight_cap=2.0)])
def test_the_objectives_gradient_is_the_derivative(objective):
    """Surrogate and entropy bonus are plain functions of logp if the proximal policy is given."""
    case = inputs("stale", seed=23)
    names = ("mask", "advantage", "behavior_logp", "segment_ids", "proximal_logp")
    tokens = TokenArrays(loss_weight=case["weight"], **{name: case[name] for name in names})
    result = oracle.policy_objective(case["logp"], case["entropy"], tokens, objective)
    by_logp = complex_step(lambda x: oracle.policy_objective(x, case["entropy"], tokens, objective).loss, case["logp"])
    by_entropy = complex_step(
        lambda x: np.complex128(oracle.policy_objective(case["logp"], x, tokens, objective).loss), case["entropy"]
    )
    np.testing.assert_allclose(result.d_logp, by_logp, atol=1e-12)
    np.testing.assert_allclose(result.d_entropy, by_entropy, atol=1e-12)
    assert result.d_logp.shape == (R, M)


def test_distillation_is_the_policy_gradient_of_what_the_teacher_thinks_better():
    """Distillation with coefficient c is a surrogate, at the sampling policy.

    Its advantage is c (log pi_teacher - log pi_theta).
    """
    case = inputs("ordinary", seed=24)
    names = ("mask", "segment_ids", "teacher_logp")
    tokens = TokenArrays(
        loss_weight=case["weight"],
        behavior_logp=case["logp"],
        advantage=np.where(case["mask"], 0.3 * (case["teacher_logp"] - case["logp"]), 0.0),
        **{name: case[name] for name in names},
    )
    unmoved = tokens._replace(advantage=np.zeros_like(case["logp"]))
    taught = oracle.policy_objective(case["logp"], case["entropy"], unmoved, Objective(distill_coef=0.3))
    rewarded = oracle.policy_objective(case["logp"], case["entropy"], tokens, Objective())
    np.testing.assert_allclose(taught.d_logp, rewarded.d_logp, rtol=1e-12)
    assert taught.loss == pytest.approx(-0.3 * np.sum((case["weight"] * (case["teacher_logp"] - case["logp"]))[case["mask"]]))


ONES = np.ones((1, 4), bool)


def test_a_cap_clamps_or_masks_what_is_above_it_and_leaves_what_is_not():
    logp, zeros, segments = np.log([[0.5, 2.0, 5.0, 50.0]]), np.zeros((1, 4)), np.ones((1, 4), int)
    for mode, want in (("clamp", [0.5, 2.0, 5.0, 5.0]), ("mask", [0.5, 2.0, 5.0, 0.0])):
        weight = losses.behavior_weight(logp, zeros, ONES, segments, cap=5.0 + 1e-9, mode=mode, level="token")
        np.testing.assert_allclose(weight, [want], rtol=1e-8)


def test_an_interpolated_policy_is_the_behavior_policy_at_0_and_the_current_one_at_1():
    logp, behavior = np.array([[-0.1, -0.2, -0.3, -3.3]]), np.array([[-1.7, -2.0, -0.3, -1.1]])
    found = losses.interpolated_proximal(logp, behavior, np.array([[0.0, 1.0, 1.0, 0.5]]), ONES)
    np.testing.assert_array_equal(found[:, :3], [[-1.7, -0.2, -0.3]])
    assert found[0, 3] == pytest.approx(-2.2)


def test_estimators_of_the_kl_have_the_values_of_their_formulas():
    ratio = np.array([[0.5, 0.9, 1.0, 3.0]])  # pi_ref / pi
    for estimator, want in (("k1", -np.log(ratio)), ("k2", np.log(ratio) ** 2 / 2), ("k3", ratio - 1 - np.log(ratio))):
        found = losses.kl_penalty(np.zeros((1, 4)), np.log(ratio), ONES, estimator=estimator)
        np.testing.assert_allclose(found, want, atol=1e-15)


def test_a_ratio_is_clipped_on_the_side_where_it_would_be_rewarded():
    ratio = np.array([[0.75, 0.85, 1.25, 1.3]])
    for advantage, want in ((1.0, [0.75, 0.85, 1.25, 1.28]), (-1.0, [0.8, 0.85, 1.25, 1.3])):
        found = losses.clipped_ratio(ratio, np.full((1, 4), advantage), 0.2, 0.28, None)
        np.testing.assert_allclose(found, [want])
    assert losses.clipped_ratio(np.array([[9.0]]), np.array([[-1.0]]), 0.2, 0.28, 3.0) == 3.0
