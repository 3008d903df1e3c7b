"""Share of an update that the dtype of the published weights rounds away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rljax.objective.spec import MeanArrays

Tree = Any  # a pytree of arrays
SAMPLE = 1 << 20  # elements of an array that are looked at, about; a layer at least
Rounding = Callable[[Tree], Tree]  # float32 parameters -> what their published values are worth, float32


def rounded(array: jax.Array, dtype: Any) -> jax.Array:
    """Rounds float32 values to those that `dtype` has; the result is float32.

    It is the array itself where `dtype` has them all.
    """
    if array.dtype == dtype == jnp.float32:
        return array
    kind = jnp.finfo(dtype)  # a conversion there and back might be optimized away
    return jax.lax.reduce_precision(array.astype(jnp.float32), kind.nexp, kind.nmant)


def share_rounded_away(before: Tree, after: Tree, rounding: Rounding, taken: jax.Array) -> MeanArrays:
    """`rounded_away` of an update, estimated where arrays are large.

    Of a stack of layers every k-th is looked at, of other arrays every k-th row, and its elements
    count k times: to count all took a ninth of an update. Where every array is published as it is,
    none is looked at, which would be a fifth of the kernels of a small model's update to compile.

    Args:
      taken: scalar bool; False if nothing has changed, and there is no share.
    """
    old, new = jax.tree.map(_every_kth, before), jax.tree.map(_every_kth, after)
    published = rounding(old)
    if all(value is array for value, array in zip(jax.tree.leaves(published), jax.tree.leaves(old), strict=True)):
        return MeanArrays(jnp.zeros((), jnp.float32), taken.astype(jnp.float32), jnp.inf, -jnp.inf)
    weights = jax.tree.map(lambda whole, part: whole.size / part.size, before, old)
    return rounded_away(old, new, published, rounding(new), weights)


def rounded_away(before: Tree, after: Tree, published_before: Tree, published_after: Tree, weights: Tree = None) -> MeanArrays:
    """Share of the elements that differ before and after, but are published as the same value.

    weights: how often the elements of each array count, a tree of floats; None for once.
    """

    def counts(old: jax.Array, new: jax.Array, old_value: jax.Array, new_value: jax.Array) -> jax.Array:
        moved = old != new
        return jnp.stack([jnp.sum(moved & (old_value == new_value), dtype=jnp.float32), jnp.sum(moved, dtype=jnp.float32)])

    counted = jax.tree.leaves(jax.tree.map(counts, before, after, published_before, published_after))
    times = [1.0] * len(counted) if weights is None else jax.tree.leaves(weights)
    lost, moved = sum(time * count for time, count in zip(times, counted, strict=True))
    return MeanArrays(lost, moved, jnp.inf, -jnp.inf)


def _every_kth(array: jax.Array) -> jax.Array:
    if array.size <= SAMPLE:
        return array
    k = min(-(-array.size // SAMPLE), array.shape[0])
    return array[k // 2 :: k]
