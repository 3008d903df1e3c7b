"""Explained variance of a critic."""

from __future__ import annotations

from collections.abc import Mapping

from rljax.metrics.mean import Mean

RESOLUTION = 1e-6  # share of the mean square; a smaller variance is rounding, because learners sum in float32
EMPTY = Mean(0.0, 0)


def explained_variance(metrics: Mapping[str, Mean]) -> Mean:
    r"""Returns the share of the returns' variance that the critic explains.

    .. math:: 1 - \mathrm{Var}[R - V] / \mathrm{Var}[R]

    1 is a perfect critic, 0 one that knows the mean alone; worse ones are below 0. It is computed
    from moments and is not a mean over tokens: merge the moments of all minibatches first, never
    average their explained variances.

    Args:
      metrics: critic/value, critic/return, critic/squared_error and critic/squared_return, reward
        units, as `value_objective` of every backend names them.

    Returns:
      One value; an empty mean, which is neither merged nor logged, where the returns are all the
      same. There is no variance to explain then, and so no share of it: 0 would blame a critic
      that may be exact, 1 praise one that may be far off.
    """
    value, target, square = (metrics[f"critic/{name}"] for name in ("value", "return", "squared_return"))
    if not target.count or target.min == target.max:
        return EMPTY
    variance = square.value - target.value**2
    if variance <= RESOLUTION * square.value:
        return EMPTY
    unexplained = metrics["critic/squared_error"].value - (target.value - value.value) ** 2
    return Mean(1 - unexplained / variance, 1)
