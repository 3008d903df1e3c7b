"""The critic: weights that start as the policy's, and a scalar head that starts at zero."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rljax.backends.torch.accumulate import Metrics
from rljax.backends.torch.forward import target_values
from rljax.backends.torch.objective import value_objective
from rljax.backends.torch.optim import TrainedParameter
from rljax.config.schema import Config
from rljax.engines.cuda.learning.phase import Phase
from rljax.engines.cuda.learning.policy import Policy
from rljax.engines.cuda.learning.rows import Rows
from rljax.metrics.mean import Mean

PREFIX = "critic"
HEAD = "value_head"


class Critic:
    """Predicts the values of states. With LoRA it has its own adapters on the policy's base.

    Proximal policy optimization with a value function: Schulman et al. 2017, arXiv:1707.06347.
    """

    def __init__(self, config: Config, policy: Policy, total_steps: int | None) -> None:
        rank_mesh = policy.rank_mesh
        self._policy = policy
        self._clip = config.critic.eps_clip_value
        self.weights = policy.copied(torch.float32)
        self.head = torch.zeros(policy.spec.hidden_size, device=rank_mesh.device, requires_grad=True)
        head = TrainedParameter(HEAD, self.head.detach(), self._head_gradient, rank_mesh.pool.size)
        self.phase = Phase(policy, config.critic.optimizer, total_steps, "critic.optimizer", PREFIX, [head])

    @torch.no_grad()
    def values(self, parts: Iterable[Rows]) -> list[Tensor]:
        """Returns the values of each micro-batch, [r, m] float32."""
        with self._policy.swapped_in(self.weights):
            return self._policy.scored(lambda rows: target_values(self._policy.network, self.head, rows), parts)

    def update(self, parts: Iterable[Rows]) -> dict[str, Mean]:
        """Takes one optimizer step."""
        self.head.grad = None
        with self._policy.swapped_in(self.weights):
            return self.phase.step(self._loss, parts)

    def _loss(self, rows: Rows) -> tuple[Tensor, Metrics]:
        tokens = rows.tokens
        assert rows.values is not None and rows.returns is not None  # the batch of a run with a critic has them
        values = target_values(self._policy.network, self.head, rows)
        return value_objective(values, rows.values, rows.returns, tokens.loss_weight, tokens.mask, clip=self._clip)

    def _head_gradient(self) -> Tensor:
        """Sums the head's gradient over ranks; the ranks of one tensor-parallel group count once."""
        rank_mesh = self._policy.rank_mesh
        own = torch.zeros_like(self.head) if self.head.grad is None or not rank_mesh.is_primary else self.head.grad.clone()
        return rank_mesh.reduce(own)

    def scale_lr(self, factor: float) -> None:
        self.phase.scale_lr(factor)

    def saved(self) -> dict[str, Any]:
        params = dict(zip(self._policy.trained, self.weights, strict=True))
        return {"params": params | {HEAD: self.head.detach()}, **self.phase.saved()}

    def load(self, saved: dict[str, Any]) -> None:
        for shard, name in zip(self.weights, self._policy.trained, strict=True):
            shard.copy_(saved["params"][name])
        self.head.detach().copy_(saved["params"][HEAD])
        self.phase.load(saved)
