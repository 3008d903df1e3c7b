"""Functions that the learner differentiates and compiles: log-probs and losses of a policy."""

from __future__ import annotations

import jax

from rljax.backends.jax.accumulate import Metrics
from rljax.backends.jax.forward import target_logprobs, target_objective
from rljax.backends.jax.model import Transformer
from rljax.backends.jax.objective import policy_objective
from rljax.config.schema import Config
from rljax.engines.jax.learning.policy import Policy, Tree
from rljax.engines.jax.rows import Rows
from rljax.engines.jax.tuning import logit_rows_of
from rljax.objective.spec import Objective


class Functions:
    """Pure functions of a policy's parameters and a micro-batch, as the config has them."""

    def __init__(self, config: Config, policy: Policy) -> None:
        self._policy, self._objective = policy, Objective.from_config(config)
        self._chunk, self._temperature = logit_rows_of(config, policy.spec, policy.mesh), config.gconfig.temperature
        self._trained_at = 1.0 if config.actor.loss == "sft" else self._temperature

    def logp(self, model: Transformer, rows: Rows) -> jax.Array:
        """[r, m] float32, nats: log-probs of the target tokens at the sampling temperature."""
        return self._logprobs(model, rows, self._temperature)[0]

    def policy_loss(self, trained: Tree, frozen: Tree, rows: Rows) -> tuple[jax.Array, Metrics]:
        """Sum of the policy objective over the micro-batch, and its metrics."""
        model = self._policy.model(trained, frozen)
        if rows.anchor is None:
            return self._fused(model, rows, self._objective, self._trained_at)
        # The gradient of this program, at the very numbers that the scorer gave
        logp, entropy = self._logprobs(model, rows, self._trained_at)
        logp = rows.anchor + (logp - jax.lax.stop_gradient(logp))
        return policy_objective(logp, entropy, rows.tokens, self._objective)

    def supervised_loss(self, trained: Tree, frozen: Tree, rows: Rows) -> tuple[jax.Array, Metrics]:
        """Sum of the negative log-likelihood over the micro-batch, and its metrics."""
        return self._fused(self._policy.model(trained, frozen), rows, Objective(loss="sft"), 1.0)

    def _logprobs(self, model: Transformer, rows: Rows, temperature: float) -> tuple[jax.Array, jax.Array]:
        return target_logprobs(model, rows, self._policy.mesh, temperature=temperature, chunk=self._chunk)

    def _fused(self, model: Transformer, rows: Rows, objective: Objective, temperature: float) -> tuple[jax.Array, Metrics]:
        return target_objective(model, rows, self._policy.mesh, objective, temperature=temperature, chunk=self._chunk)
