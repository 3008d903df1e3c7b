"""Share of an update that the dtype of the published weights rounds away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rljax.objective.spec import MeanArrays

Tree = Any  # a pytree of arrays
Rounding = Callable[[Tree], Tree]  # float32 parameters -> what their published values are worth, float32


def rounded(array: jax.Array, dtype: Any) -> jax.Array:
    """Rounds float32 values to those that `dtype` has; the result is float32."""
    kind = jnp.finfo(dtype)  # a conversion there and back might be optimized away
    return jax.lax.reduce_precision(array.astype(jnp.float32), kind.nexp, kind.nmant)


def rounded_away(before: Tree, after: Tree, published_before: Tree, published_after: Tree) -> MeanArrays:
    """Share of the elements that differ before and after, but are published as the same value."""

    def counts(old: jax.Array, new: jax.Array, old_value: jax.Array, new_value: jax.Array) -> jax.Array:
        moved = old != new
        return jnp.stack([jnp.sum(moved & (old_value == new_value), dtype=jnp.float32), jnp.sum(moved, dtype=jnp.float32)])

    counted = jax.tree.leaves(jax.tree.map(counts, before, after, published_before, published_after))
    lost, moved = jnp.sum(jnp.stack(counted), axis=0)
    return MeanArrays(lost, moved, jnp.inf, -jnp.inf)
