"""A training phase: an optimizer on some parameters, its state and its step."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rljax.backends.torch import model
from rljax.backends.torch.accumulate import Loss, add_gradients, merge_ranks, to_means
from rljax.backends.torch.optim import Optimizer, TrainedParameter
from rljax.config.schema import OptimizerConfig
from rljax.engines.cuda.learning.policy import Policy
from rljax.metrics.guardrails import UpdateBound
from rljax.metrics.mean import Mean


class Phase:
    """Warm-up, policy updates or critic updates.

    The parameters belong to the caller, for phases may share them.
    """

    def __init__(
        self,
        policy: Policy,
        config: OptimizerConfig,
        total_steps: int | None,
        key: str,
        prefix: str,
        extra: Sequence[TrainedParameter] = (),
        bounds: Sequence[UpdateBound] = (),
        published: torch.dtype | None = None,
    ) -> None:
        """Makes the optimizer.

        Args:
          key: config key of `config`, for messages.
          prefix: prefix of the metrics loss, grad_norm, lr and skipped.
          extra: parameters that are trained beside the policy's network.
          bounds: a step whose metrics break one is not taken.
          published: dtype of the parameters where they are published.
        """
        self._policy, self._prefix = policy, prefix
        parameters = [*policy.trained_parameters(), *extra]
        self.optimizer = Optimizer(config, total_steps, key, parameters, policy.rank_mesh.reduce, bounds, published)

    def step(self, loss: Loss, parts: Iterable[Any]) -> dict[str, Mean]:
        """Takes one optimizer step on the weights that are in the network."""
        self._policy.forget_gradients()
        total, metrics = add_gradients(loss, parts, functools.partial(model.replicate_gradients, self._policy.network))
        whole, means = merge_ranks(total, metrics, self._policy.rank_mesh)
        stats = self.optimizer.step(means)
        self._policy.forget_gradients()
        return to_means(whole, means, stats, self._prefix)

    def scale_lr(self, factor: float) -> None:
        """Multiplies the learning rate of later steps by `factor`, relative to the schedule."""
        self.optimizer.rate_factor = factor

    def saved(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: {"mu", "nu": {parameter: shard}, "count"}."""
        names = [parameter.name for parameter in self.optimizer.parameters]
        moments = {"mu": self.optimizer.mu, "nu": self.optimizer.nu}
        found: dict[str, Any] = {kind: dict(zip(names, shards, strict=True)) for kind, shards in moments.items()}
        return found | {"count": torch.tensor(self.optimizer.count)}

    def load(self, saved: dict[str, Any]) -> None:
        for kind, shards in (("mu", self.optimizer.mu), ("nu", self.optimizer.nu)):
            _fill(shards, [saved[kind][parameter.name] for parameter in self.optimizer.parameters])
        self.optimizer.count = int(saved["count"])


def _fill(shards: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    for shard, other in zip(shards, others, strict=True):
        shard.copy_(other)
