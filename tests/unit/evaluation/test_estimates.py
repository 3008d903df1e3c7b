"""Estimates against enumeration, and coverage of their intervals by simulation."""

import itertools
import math

import numpy as np
import pytest

from rljax.evaluation.estimates import majority_at_k, mean, of_rewards, pass_at_k, share


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_k_subsets_with_a_sample_that_passes(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        outcomes = [True] * c + [False] * (n - c)
        subsets = list(itertools.combinations(outcomes, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_is_unbiased():
    """Over all outcomes of n independent samples, its expectation is the chance of k samples."""
    n, p = 6, 0.3
    for k in range(1, n + 1):
        expectation = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
        assert expectation == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_pass_at_k_of_many_samples_does_not_overflow():
    exact = 1 - math.comb(4000, 1000) / math.comb(5000, 1000)  # integers of Python
    assert pass_at_k(5000, 1000, 1000) == pytest.approx(exact, abs=1e-12)
    assert pass_at_k(10_000, 3, 10) == pytest.approx(1 - math.comb(9997, 10) / math.comb(10_000, 10), rel=1e-9)


@pytest.mark.parametrize(("samples", "passed", "k"), [(3, 1, 4), (3, 4, 1), (3, 1, 0)])
def test_pass_at_k_of_too_few_samples_is_not_defined(samples, passed, k):
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(samples, passed, k)


def test_majority_vote_is_the_expected_vote_of_k_samples():
    """Its expectation over all draws of n = 4 samples equals the vote of 2 samples, enumerated."""
    chances = {("7", True): 0.5, ("8", False): 0.3, (None, False): 0.2}

    def expected(n, k):
        total = 0.0
        for draws in itertools.product(chances, repeat=n):
            weight = math.prod(chances[draw] for draw in draws)
            total += weight * majority_at_k([answer for answer, _ in draws], [ok for _, ok in draws], k)
        return total

    vote = 0.5**2 + 2 * 0.5 * 0.2 + 2 * 0.5 * 0.3 * 0.5  # both, one with no answer, a tie
    assert expected(2, 2) == pytest.approx(vote) == pytest.approx(expected(4, 2))


def test_majority_vote_by_hand():
    assert majority_at_k(["1", "2", "2"], [True, False, False], 3) == 0.0
    assert majority_at_k(["1", "1", "2"], [True, True, False], 3) == 1.0
    assert majority_at_k(["1", "2", None], [True, False, False], 3) == 0.5
    assert majority_at_k([None, None], [False, False], 2) == 0.0
    assert majority_at_k(["1", "2", "3"], [True, False, True], 1) == pytest.approx(2 / 3)  # k = 1: pass@1


def test_a_share_of_single_samples_has_wilsons_interval():
    """Its ends are where a test of that share at the normal approximation just rejects."""
    estimate = share([1.0] * 30 + [0.0] * 170)
    z = (0.15 - estimate.low) / math.sqrt(estimate.low * (1 - estimate.low) / 200)
    assert z == pytest.approx((estimate.high - 0.15) / math.sqrt(estimate.high * (1 - estimate.high) / 200))
    assert z == pytest.approx(1.96, abs=0.02)  # Student's t of 199 degrees of freedom


def test_samples_of_one_prompt_are_no_independent_ones():
    """Copies of a sample change nothing, whatever their number: the prompts are the clusters."""
    outcomes = np.array([1.0] * 12 + [0.0] * 28)
    assert share(np.repeat(outcomes[:, None], 16, axis=1).mean(1)) == share(outcomes)


@pytest.mark.parametrize("values", [[0.0] * 20, [1.0] * 20, [0.5], [0.25] * 3 + [0.75]])
def test_intervals_of_shares_lie_in_the_unit_interval_and_hold_the_share(values):
    estimate = of_rewards(values)
    assert 0.0 <= estimate.low <= estimate.value <= estimate.high <= 1.0 and estimate.low < estimate.high


def test_a_mean_of_one_prompt_has_no_finite_interval():
    assert mean([3.0]).low == -math.inf and of_rewards([3.0]).high == math.inf


@pytest.mark.parametrize("samples", [1, 8])
@pytest.mark.parametrize(("a", "b"), [(0.5, 4.5), (2.0, 2.0)], ids=["hard prompts", "mixed prompts"])
def test_intervals_cover_the_true_share(samples, a, b):
    """2000 evaluations of 100 prompts, whose chances are Beta(a, b), at 95%; their standard error is 0.5%."""
    generator, evaluations, prompts = np.random.default_rng(0), 2000, 100
    chances = generator.beta(a, b, (evaluations, prompts))
    passed = generator.binomial(samples, chances) / samples
    covered = [estimate.low <= a / (a + b) <= estimate.high for estimate in map(share, passed)]
    assert 0.93 < np.mean(covered) < 0.97


def test_intervals_that_forget_the_prompts_do_not_cover():
    """The same with the samples taken as independent: the reason why prompts are the clusters."""
    generator = np.random.default_rng(0)
    chances = generator.beta(2.0, 2.0, (1000, 100))
    passed = generator.binomial(8, chances)
    each = [share([1.0] * int(row.sum()) + [0.0] * int(800 - row.sum())) for row in passed[:200]]
    assert np.mean([estimate.low <= 0.5 <= estimate.high for estimate in each]) < 0.85


def test_paired_differences_of_means_cover():
    generator = np.random.default_rng(1)
    differences = generator.normal(0.1, 1.0, (2000, 30))
    covered = [estimate.low <= 0.1 <= estimate.high for estimate in map(mean, differences)]
    assert 0.935 < np.mean(covered) < 0.965
