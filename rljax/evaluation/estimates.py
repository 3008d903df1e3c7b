"""Estimates of a policy's score from n samples of each of m prompts, with confidence intervals.

The m prompts are drawn at random from all that could be asked, and the n samples of a prompt are
not independent of each other: intervals are computed from one value per prompt (the prompts are
the clusters), so that more samples of few prompts don't make a narrow interval.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

SHARE = "Wilson score interval with the effective sample size of a cluster sample, clusters are prompts"
MEAN = "Student's t interval over the means of prompts"
LEVEL = 0.95  # of all intervals


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A score and its confidence interval.

    Example: Estimate(0.62, 0.56, 0.68, prompts=200, method=SHARE)
    """

    value: float
    low: float
    high: float
    prompts: int  # that the value is a mean over
    method: str  # of the interval
    level: float = LEVEL

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Estimates the chance that at least one of k samples passes, without bias.

    .. math:: 1 - \\binom{n - c}{k} / \\binom{n}{k}

    Chen et al. 2021, arXiv:2107.03374, equation 1. It is the share of the k-subsets of the samples
    that have one that passes.

    Args:
      samples: n, at least k.
      passed: c, of the n samples.

    Raises ValueError if there are fewer than k samples.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {passed} in {samples} samples is not defined")
    if samples - passed < k:
        return 1.0
    failed = np.arange(samples - passed + 1, samples + 1)
    return float(1.0 - np.prod(1.0 - k / failed))


def majority_at_k(answers: Sequence[str | None], passed: Sequence[bool], k: int) -> float:
    """Estimates the chance that the most frequent answer of k samples passes, without bias.

    The mean over the n // k blocks of k samples in order, which share no sample. A sample without
    an answer has no vote; of answers with equal votes each counts in part. Self-consistency, Wang
    et al. 2022, arXiv:2203.11171.

    Args:
      answers: [n] final answers in a canonical form; None where a completion has none.
      passed: [n] whether the reward of the sample is that of success.

    Raises ValueError if there are fewer than k samples.
    """
    if len(answers) != len(passed) or not 1 <= k <= len(answers):
        raise ValueError(f"maj@{k} of {len(answers)} samples is not defined")
    blocks = [slice(start, start + k) for start in range(0, len(answers) - k + 1, k)]
    return float(np.mean([_vote(answers[block], passed[block]) for block in blocks]))


def _vote(answers: Sequence[str | None], passed: Sequence[bool]) -> float:
    """Returns the share of the winners that pass; a winner passes as often as its samples do."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    pairs = list(zip(answers, passed, strict=True))
    return float(np.mean([np.mean([ok for answer, ok in pairs if answer == winner]) for winner in winners]))


def share(values: Sequence[float] | np.ndarray, level: float = LEVEL) -> Estimate:
    """Estimates a share from one value in [0, 1] per prompt.

    The Wilson interval of a sample of the size at which independent draws would have the standard
    error that the prompts have; with one sample per prompt it is Wilson's own. It keeps its
    coverage near 0 and 1, where a symmetric interval does not, and lies in [0, 1].

    Args:
      values: [m], of the prompts; m is at least 1.
    """
    values = np.asarray(values, np.float64)
    m, mean = len(values), float(values.mean())
    spread = float(values.var())  # of prompts; for values of 0 and 1 alone it is mean (1 - mean)
    independent = mean * (1.0 - mean)
    size = m if spread <= 0.0 or independent <= 0.0 else m * independent / spread
    low, high = _wilson(mean, size, _t_quantile(level, m - 1))
    return Estimate(mean, low, high, m, SHARE, level)


def mean(values: Sequence[float] | np.ndarray, level: float = LEVEL) -> Estimate:
    """Estimates a mean from one value of any range per prompt.

    Of one prompt the interval is infinite.
    """
    values = np.asarray(values, np.float64)
    m, center = len(values), float(values.mean())
    if m < 2:
        return Estimate(center, -math.inf, math.inf, m, MEAN, level)
    width = _t_quantile(level, m - 1) * float(values.std(ddof=1)) / math.sqrt(m)
    return Estimate(center, center - width, center + width, m, MEAN, level)


def of_rewards(values: Sequence[float] | np.ndarray, level: float = LEVEL) -> Estimate:
    """Estimates a mean reward from one value per prompt.

    As a share if all values lie in [0, 1], else as a mean.
    """
    values = np.asarray(values, np.float64)
    return share(values, level) if values.min() >= 0.0 and values.max() <= 1.0 else mean(values, level)


def _wilson(p: float, n: float, z: float) -> tuple[float, float]:
    """Returns the Wilson score interval. Wilson 1927, doi:10.1080/01621459.1927.10502953."""
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, min(p, center - half)), min(1.0, max(p, center + half))


def _t_quantile(level: float, freedom: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(max(freedom, 1), 0.5 + level / 2))
