"""An optimizer at work on some parameters: its state, and the programs of its step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax.backends.jax.accumulate import GradientStep, Loss, to_means
from rljax.backends.jax.multihost import put
from rljax.backends.jax.optim import Optimizer, moments, set_moments, set_rate_factor, step_count
from rljax.backends.jax.rounding import Rounding
from rljax.backends.jax.sharding import replicated
from rljax.config.schema import OptimizerConfig
from rljax.metrics.guardrails import UpdateBound
from rljax.metrics.mean import Mean

Tree = Any  # a pytree of arrays


class Phase:
    """Warm-up, policy updates or critic updates.

    The parameters belong to whoever calls, for two phases may share them.
    """

    def __init__(
        self,
        loss: Loss,
        config: OptimizerConfig,
        total_steps: int | None,
        key: str,
        prefix: str,
        params: Tree,
        mesh: Mesh,
        bounds: Sequence[UpdateBound] = (),
        rounding: Rounding | None = None,
    ) -> None:
        """
        Args:
          key: config key of `config`, for messages.
          prefix: of the names of loss, grad_norm, lr and skipped.
          bounds: a step whose metrics break one is not taken.
          rounding: of the parameters where they are published.
        """
        self._prefix = prefix
        self._everywhere = replicated(mesh)
        optimizer = Optimizer(config, total_steps, key, bounds, rounding)
        self._state = self._placed(optimizer.init(params))
        self._step = GradientStep(loss, optimizer, params, self._state, mesh)

    def step(self, params: Tree, frozen: Tree, parts: Sequence[Tree]) -> tuple[Tree, dict[str, Mean]]:
        """One optimizer step. `params` is donated; the new ones are returned."""
        params, self._state, report = self._step(params, self._state, frozen, parts)
        return params, to_means(report, self._prefix)

    def scale_lr(self, factor: float) -> None:
        """Multiplies the learning rate of later steps by `factor`, relative to the schedule."""
        self._state = self._placed(set_rate_factor(self._state, factor))

    def compilations(self) -> int:
        return self._step.compilations()

    def saved(self) -> dict[str, Tree]:
        """Returns what a checkpoint keeps, by names of our own."""
        mu, nu = moments(self._state)
        return {"mu": mu, "nu": nu, "count": step_count(self._state)}

    def load(self, saved: dict[str, Tree]) -> None:
        self._state = self._placed(set_moments(self._state, saved["mu"], saved["nu"], jnp.asarray(saved["count"])))

    def _placed(self, state: Tree) -> Tree:
        """Moments lie as the parameters do already; counters go to every device."""
        return jax.tree.map(lambda a: a if a.ndim else put(a, self._everywhere), state)
