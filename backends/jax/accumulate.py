"""One optimizer step over any number of micro-batches, as jitted programs that never wait for the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax.backends.jax.mesh import replicated
from rljax.backends.jax.optim import Optimizer, StepStats
from rljax.metrics import Mean
from rljax.objective import MeanArrays

Tree = Any  # a pytree of arrays
Metrics = dict[str, MeanArrays]
Loss = Callable[[Tree, Tree, Tree], tuple[jax.Array, Metrics]]  # (trained, frozen, rows) -> sum of the loss, metrics


class GradientStep:
    """Sums the gradient of a loss over micro-batches and applies it once.

    The loss of a micro-batch is its share of the minibatch's: a sum whose weights hold the normaliser. So neither gradient
    nor metrics depend on how rows are split. A minibatch that is one micro-batch takes one program, others two.
    Parameters and optimizer state are donated: whoever needs them later copies them first.
    """

    def __init__(self, loss: Loss, optimizer: Optimizer, params: Tree, state: Tree, mesh: Mesh) -> None:
        self._optimizer = optimizer
        self._gradient = jax.value_and_grad(loss, has_aux=True)
        like = jax.tree.map(lambda a: a.sharding, (params, state))
        everywhere = replicated(mesh)
        out = (*like, everywhere)
        self._whole = jax.jit(self._whole_step, donate_argnums=(0, 1), out_shardings=out)
        self._accumulate = jax.jit(self._add, donate_argnums=(0,), out_shardings=(like[0], everywhere))
        self._apply = jax.jit(self._apply_sum, donate_argnums=(0, 1, 2), out_shardings=out)
        self._zeros = jax.jit(self._nothing, out_shardings=(like[0], everywhere))

    def __call__(self, params: Tree, state: Tree, frozen: Tree, parts: Sequence[Tree]) -> tuple[Tree, Tree, tuple[StepStats, Metrics]]:
        """parts: micro-batches of one shape. Returns parameters, state, and on the device what `to_means` turns into metrics."""
        if len(parts) == 1:
            return self._whole(params, state, frozen, parts[0])
        carry = self._zeros(params, frozen, parts[0])
        for part in parts:
            carry = self._accumulate(carry, params, frozen, part)
        return self._apply(params, state, carry)

    def compilations(self) -> int:
        """Programs compiled so far."""
        return sum(f._cache_size() for f in (self._whole, self._accumulate, self._apply, self._zeros))

    def _whole_step(self, params: Tree, state: Tree, frozen: Tree, part: Tree) -> tuple[Tree, Tree, Any]:
        (_, metrics), grads = self._gradient(params, frozen, part)
        params, state, stats = self._optimizer.apply(params, state, grads)
        return params, state, (stats, metrics)

    def _nothing(self, params: Tree, frozen: Tree, part: Tree) -> tuple[Tree, Metrics]:
        (_, metrics), grads = jax.eval_shape(self._gradient, params, frozen, part)
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (grads, metrics))
        empty = {
            name: mean._replace(min=jnp.full_like(mean.min, jnp.inf), max=jnp.full_like(mean.max, -jnp.inf))
            for name, mean in zeros[1].items()
        }
        return zeros[0], empty

    def _add(self, carry: tuple[Tree, Metrics], params: Tree, frozen: Tree, part: Tree) -> tuple[Tree, Metrics]:
        (_, metrics), grads = self._gradient(params, frozen, part)
        return jax.tree.map(jnp.add, carry[0], grads), {name: _merge(carry[1][name], mean) for name, mean in metrics.items()}

    def _apply_sum(self, params: Tree, state: Tree, carry: tuple[Tree, Metrics]) -> tuple[Tree, Tree, Any]:
        params, state, stats = self._optimizer.apply(params, state, carry[0])
        return params, state, (stats, carry[1])


def _merge(a: MeanArrays, b: MeanArrays) -> MeanArrays:
    return MeanArrays(a.sum + b.sum, a.count + b.count, jnp.minimum(a.min, b.min), jnp.maximum(a.max, b.max))


def to_means(report: tuple[StepStats, Mapping[str, MeanArrays]], prefix: str) -> dict[str, Mean]:
    """The one device-to-host transfer of a step. grad_norm of a skipped step is left out: it is not a number."""
    stats, metrics = jax.device_get(report)
    means = {name: Mean(float(m.sum), float(m.count), float(m.min), float(m.max)) for name, m in metrics.items()}
    skipped = bool(stats.skipped)
    norm = Mean(0.0, 0) if skipped else Mean(float(stats.grad_norm), 1)
    return means | {
        f"{prefix}/grad_norm": norm,
        f"{prefix}/lr": Mean(float(stats.lr), 1),
        f"{prefix}/skipped": Mean(float(skipped), 1),
    }
