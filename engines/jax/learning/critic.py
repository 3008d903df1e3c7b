"""The critic: a backbone of its own that starts as the policy's, and a scalar head that starts at
zero.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rljax.backends.jax.accumulate import Metrics
from rljax.backends.jax.forward import target_values
from rljax.backends.jax.multihost import put
from rljax.backends.jax.objective import value_objective
from rljax.backends.jax.sharding import replicated
from rljax.config.schema import Config
from rljax.engines.jax.learning.phase import Phase
from rljax.engines.jax.learning.policy import MASTER, Policy
from rljax.engines.jax.rows import Rows
from rljax.metrics.mean import Mean

Tree = Any  # a pytree of arrays
PREFIX = "critic"


class Critic:
    """Values of states; with LoRA the base is the policy's own and the adapters are the critic's.

    Proximal policy optimization with a value function: Schulman et al. 2017, arXiv:1707.06347.
    """

    def __init__(self, config: Config, policy: Policy, total_steps: int | None) -> None:
        self._policy = policy
        self._clip = config.critic.eps_clip_value
        everywhere = replicated(policy.mesh)
        head = put(jnp.zeros(policy.spec.hidden_size, MASTER), everywhere)
        self.trained: Tree = {"model": policy.copied(MASTER), "value_head": head}
        self.values = jax.jit(self._values, out_shardings=everywhere)
        key = "critic.optimizer"
        self._phase = Phase(self._loss, config.critic.optimizer, total_steps, key, PREFIX, self.trained, policy.mesh)

    def update(self, parts: list[Rows]) -> dict[str, Mean]:
        """One optimizer step."""
        self.trained, means = self._phase.step(self.trained, self._policy.frozen, parts)
        return means

    def scale_lr(self, factor: float) -> None:
        self._phase.scale_lr(factor)

    def saved(self) -> Tree:
        return {"params": self.trained, **self._phase.saved()}

    def load(self, saved: Tree) -> None:
        self.trained = saved["params"]
        self._phase.load(saved)

    def _values(self, trained: Tree, frozen: Tree, rows: Rows) -> jax.Array:
        return target_values(self._policy.model(trained["model"], frozen), trained["value_head"], rows)

    def _loss(self, trained: Tree, frozen: Tree, rows: Rows) -> tuple[jax.Array, Metrics]:
        tokens = rows.tokens
        values = self._values(trained, frozen, rows)
        return value_objective(values, rows.values, rows.returns, tokens.loss_weight, tokens.mask, clip=self._clip)
