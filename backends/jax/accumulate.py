"""One optimizer step over any number of micro-batches, as jitted programs that never wait for the
host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax.backends.jax.mesh import dispatching
from rljax.backends.jax.multihost import describe
from rljax.backends.jax.optim import Optimizer, StepStats
from rljax.backends.jax.sharding import replicated
from rljax.metrics.mean import Mean
from rljax.objective.spec import MeanArrays

Tree = Any  # a pytree of arrays
Metrics = dict[str, MeanArrays]
Loss = Callable[[Tree, Tree, Tree], tuple[jax.Array, Metrics]]  # (trained, frozen, rows) -> sum of the loss, metrics


class Report(NamedTuple):
    """Results of a step, left on the device for the host to read."""

    stats: StepStats
    loss: jax.Array  # of the minibatch: the sum over its micro-batches
    metrics: Metrics


class GradientStep:
    """Sums the gradient of a loss over micro-batches and applies it once.

    The loss of a micro-batch is its share of the minibatch's: a sum whose weights hold the
    normalizer. So neither gradient nor metrics depend on how rows are split. A minibatch that is
    one micro-batch takes one program, others two. Parameters and optimizer state are donated:
    whoever needs them later copies them first.
    """

    def __init__(self, loss: Loss, optimizer: Optimizer, params: Tree, state: Tree, mesh: Mesh) -> None:
        self._optimizer, self._mesh = optimizer, mesh
        self._gradient = jax.value_and_grad(loss, has_aux=True)
        like = jax.tree.map(lambda a: a.sharding, (params, state))
        everywhere = replicated(mesh)
        out = (*like, everywhere)
        self._whole = jax.jit(self._whole_step, donate_argnums=(0, 1), out_shardings=out)
        self._accumulate = jax.jit(self._add, donate_argnums=(0,), out_shardings=(like[0], everywhere))
        self._apply = jax.jit(self._apply_sum, donate_argnums=(0, 1), out_shardings=out)
        self._zeros = jax.jit(self._nothing, out_shardings=(like[0], everywhere))

    def __call__(self, params: Tree, state: Tree, frozen: Tree, parts: Sequence[Tree]) -> tuple[Tree, Tree, Report]:
        """Takes one step. Returns the new parameters and state, and a report still on the device.

        Args:
          parts: micro-batches of one shape.
        """
        with dispatching(self._mesh):
            if len(parts) == 1:
                return self._whole(params, state, frozen, parts[0])
            carry = self._zeros(params, frozen, parts[0])
        for part in parts:
            with dispatching(self._mesh):  # a sampler on the same devices takes its turn in between
                carry = self._accumulate(carry, params, frozen, part)
        with dispatching(self._mesh):
            return self._apply(params, state, carry)

    def lower(self, params: Tree, state: Tree, frozen: Tree, part: Tree) -> dict[str, jax.stages.Lowered]:
        """The programs of a step by name, lowered for shapes of what a call takes.

        `update` is the step of one micro-batch; `accumulate` and `apply` are those of several.
        """
        sums = self._zeros.lower(params, frozen, part).out_info
        carry = (_placed_as(params, sums[0]), describe(sums[1], replicated(self._mesh)))
        return {
            "update": self._whole.lower(params, state, frozen, part),
            "accumulate": self._accumulate.lower(carry, params, frozen, part),
            "apply": self._apply.lower(params, state, carry),
        }

    def compilations(self) -> int:
        """Programs compiled so far."""
        programs: tuple[Any, ...] = (self._whole, self._accumulate, self._apply, self._zeros)
        return sum(program._cache_size() for program in programs)

    def _whole_step(self, params: Tree, state: Tree, frozen: Tree, part: Tree) -> tuple[Tree, Tree, Report]:
        out, grads = self._gradient(params, frozen, part)
        return self._apply_sum(params, state, (grads, out))

    def _nothing(self, params: Tree, frozen: Tree, part: Tree) -> tuple[Tree, tuple[jax.Array, Metrics]]:
        """The sums before the first micro-batch."""
        (loss, metrics), grads = jax.eval_shape(self._gradient, params, frozen, part)
        grads, loss, metrics = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (grads, loss, metrics))
        empty = {
            name: mean._replace(min=jnp.full_like(mean.min, jnp.inf), max=jnp.full_like(mean.max, -jnp.inf))
            for name, mean in metrics.items()
        }
        return grads, (loss, empty)

    def _add(self, carry: Tree, params: Tree, frozen: Tree, part: Tree) -> tuple[Tree, tuple[jax.Array, Metrics]]:
        (loss, metrics), grads = self._gradient(params, frozen, part)
        sums, (total, so_far) = carry
        merged = {name: _merge(so_far[name], mean) for name, mean in metrics.items()}
        return jax.tree.map(jnp.add, sums, grads), (total + loss, merged)

    def _apply_sum(self, params: Tree, state: Tree, carry: Tree) -> tuple[Tree, Tree, Report]:
        grads, (loss, metrics) = carry
        params, state, stats = self._optimizer.apply(params, state, grads, metrics)
        return params, state, Report(stats, loss, metrics)


def _placed_as(like: Tree, tree: Tree) -> Tree:
    return jax.tree.map(lambda a, leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=a.sharding), like, tree)


def _merge(a: MeanArrays, b: MeanArrays) -> MeanArrays:
    return MeanArrays(a.sum + b.sum, a.count + b.count, jnp.minimum(a.min, b.min), jnp.maximum(a.max, b.max))


def to_means(report: Report, prefix: str) -> dict[str, Mean]:
    """The one device-to-host transfer of a step.

    A skipped step has no grad_norm or loss to tell: they are not numbers.
    """
    stats, loss, metrics = jax.device_get(report)
    means = {name: Mean(float(m.sum), float(m.count), float(m.min), float(m.max)) for name, m in metrics.items()}
    taken = 1.0 - float(stats.skipped)

    def scalar(value: Any) -> Mean:
        return Mean(float(value), 1) if taken else Mean(0.0, 0)

    if stats.out_of_bounds is not None:
        means[f"{prefix}/out_of_bounds"] = Mean(float(stats.out_of_bounds), 1)
    if stats.rounded_away is not None:
        means[f"{prefix}/rounded_away"] = Mean(float(stats.rounded_away.sum), float(stats.rounded_away.count))
    return means | {
        f"{prefix}/loss": scalar(loss),
        f"{prefix}/grad_norm": scalar(stats.grad_norm),
        f"{prefix}/lr": Mean(float(stats.lr), 1),
        f"{prefix}/optimizer_steps": Mean(float(stats.steps), 1),
        f"{prefix}/skipped": Mean(1.0 - taken, 1),
    }
