"""Share of an update of the adapters that the dtype of the merged weights rounds away."""

from __future__ import annotations

import torch
from torch import Tensor

from rljax.backends.torch.export import gathered
from rljax.backends.torch.rounding import changes
from rljax.config.schema import LoraConfig
from rljax.engines.cuda.learning.policy import Policy
from rljax.hf.adapter import A, B
from rljax.hf.tensors import layer_tensor, projections
from rljax.metrics.mean import Mean


class AdapterUpdates:
    """The adapters of the middle layer from before an update. Its methods are collectives.

    Example:
        before = AdapterUpdates(policy, config.actor.lora)
        metrics = phase.step(loss, rows)
        share = before.rounded_away()
    """

    def __init__(self, policy: Policy, config: LoraConfig) -> None:
        self._policy, self._scale = policy, config.alpha / config.rank
        middle = policy.spec.num_layers // 2
        names = [layer_tensor(middle, projection) for projection in projections(policy.spec)]
        self._names = [name for name in names if f"{name}.{A}" in policy.trained]
        self._before = [self._factors(name) for name in self._names]

    @torch.no_grad()
    def rounded_away(self) -> Mean:
        """Share of the weights that the update moved, but whose merged value in the published dtype
        stayed.
        """
        counts = torch.zeros(2, dtype=torch.float64, device=self._policy.rank_mesh.device)
        dtype, frozen = self._policy.dtype, self._policy.frozen
        for name, (a, b) in zip(self._names, self._before, strict=True):
            weight = gathered(frozen[f"{name}.weight"], dtype)
            old, new = self._scale * (b @ a), self._update(name)
            counts += changes(old, new, weight + old.to(dtype), weight + new.to(dtype))
        lost, moved = counts.tolist()
        return Mean(lost, moved)

    def _update(self, name: str) -> Tensor:
        a, b = self._factors(name)
        return self._scale * (b @ a)

    def _factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Gathers copies of A and B, float32."""
        a, b = (gathered(self._policy.trained[f"{name}.{factor}"], torch.float32).clone() for factor in (A, B))
        return a, b
