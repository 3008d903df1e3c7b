"""AdamW on shards, with a schedule and global-norm clipping.

Steps whose gradient is not finite, or that break a bound, are skipped.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from rljax.backends.torch.rounding import Shards
from rljax.config.learning_rate import make_schedule
from rljax.config.schema import OptimizerConfig
from rljax.errors import UserError
from rljax.metrics.guardrails import GRAD_NORM, UpdateBound
from rljax.metrics.mean import Mean


@dataclasses.dataclass(frozen=True)
class TrainedParameter:
    """A parameter as the optimizer sees it: this rank's shard, and how to get its gradient."""

    name: str  # its HF name
    value: Tensor  # this rank's shard
    gradient: Callable[[], Tensor | None]  # returns the shard's gradient after a backward pass
    replicas: int = 1  # ranks that have the same shard


@dataclasses.dataclass(frozen=True)
class StepStats:
    """Statistics of one optimizer step."""

    grad_norm: float  # global norm before clipping
    lr: float  # learning rate of this step
    skipped: bool  # the gradient was not finite, and nothing was changed
    steps: int  # that the moments have seen, this one included
    rounded_away: Mean | None = None  # share of the moved weights whose published value stayed; None if not asked for
    out_of_bounds: bool | None = None  # a bound was broken, and nothing was changed; None without bounds


def decays(name: str) -> bool:
    """Returns whether weight decay applies to a parameter: not to norms and biases."""
    return "norm" not in name.lower() and "bias" not in name.lower()


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) over this rank's shards.

    All ranks step at the same time.

    Example:
        optimizer = Optimizer(config.actor.optimizer, None, "actor.optimizer", parameters, reduce)
        stats = optimizer.step()
    """

    def __init__(
        self,
        config: OptimizerConfig,
        total_steps: int | None,
        key: str,
        parameters: Sequence[TrainedParameter],
        reduce: Callable[[Tensor], Tensor],
        bounds: Sequence[UpdateBound] = (),
        published: torch.dtype | None = None,
    ) -> None:
        """Makes moments of zeros, float32, in the shapes of the shards. Raises UserError.

        Args:
          key: config key of `config`, for messages.
          reduce: sums a tensor over all ranks, in place.
          bounds: a step whose metrics break one is not taken.
          published: dtype of the parameters where they are published, to report what of a step it
            rounds away.
        """
        if config.type != "adamw":
            raise UserError(f"{key}.type: no optimizer named {config.type!r} (only adamw)")
        self._config, self._reduce = config, reduce
        self.schedule = make_schedule(config, total_steps, key)
        self.parameters = list(parameters)
        self.mu = [torch.zeros_like(parameter.value) for parameter in parameters]
        self.nu = [torch.zeros_like(parameter.value) for parameter in parameters]
        self._bounds, self._published = bounds, published
        self.rate_factor = 1.0  # of the learning rate
        self.count = 0  # steps taken, skipped ones not counted

    @torch.no_grad()
    def step(self, metrics: Mapping[str, Mean] | None = None) -> StepStats:
        """Takes one step with the parameters' gradients.

        If the gradient isn't finite or a bound is broken, neither parameters nor moments change.

        Args:
          metrics: of the minibatch, the same on all ranks, for the bounds.
        """
        grads = [parameter.gradient() for parameter in self.parameters]
        norm = self._norm(grads)
        lr = self.schedule(self.count) * self.rate_factor
        known = {**(metrics or {}), GRAD_NORM: Mean(norm, 1)}
        broken = any(bound.broken(known) for bound in self._bounds) if self._bounds else None
        if not math.isfinite(norm):
            return StepStats(norm, lr, True, self.count, self._nothing, None if broken is None else False)
        if broken:
            return StepStats(norm, lr, False, self.count, self._nothing, True)
        if 0 < self._config.gradient_clipping <= norm:
            torch._foreach_mul_([g for g in grads if g is not None], self._config.gradient_clipping / norm)
        values = [parameter.value for parameter in self.parameters]
        before = None if self._published in (None, torch.float32) else Shards(values)  # float32 loses nothing
        for decayed in (True, False):
            which = [i for i, parameter in enumerate(self.parameters) if decays(parameter.name) == decayed]
            self._adamw(which, grads, lr, decayed)
        self.count += 1
        lost = None if self._published is None else Mean(0.0, 1)
        if before is not None and self._published is not None:
            lost = before.rounded_away(values, self._published, [p.replicas for p in self.parameters], self._reduce)
        return StepStats(norm, lr, False, self.count, lost, broken)

    @property
    def _nothing(self) -> Mean | None:
        """Share that a step rounds away which is not taken."""
        return None if self._published is None else Mean(0.0, 0)

    def _adamw(self, which: list[int], grads: list[Tensor | None], lr: float, decayed: bool) -> None:
        which = [i for i in which if self.parameters[i].value.numel()]
        if not which:
            return
        config = self._config
        values = [self.parameters[i].value for i in which]
        gradients = [torch.zeros_like(v) if (g := grads[i]) is None else g for i, v in zip(which, values, strict=True)]
        on_gpu = values[0].is_cuda
        steps = torch.full((len(which),), float(self.count), device=values[0].device if on_gpu else None)
        adamw(
            values,
            gradients,
            [self.mu[i] for i in which],
            [self.nu[i] for i in which],
            [],
            list(steps.unbind()),
            foreach=not on_gpu,
            fused=on_gpu,
            amsgrad=False,
            beta1=config.beta1,
            beta2=config.beta2,
            lr=lr,
            weight_decay=config.weight_decay if decayed else 0.0,
            eps=config.eps,
            maximize=False,
        )

    def _norm(self, grads: Sequence[Tensor | None]) -> float:
        """Returns the norm of the whole gradient; elements that several ranks have count once."""
        pairs = zip(grads, self.parameters, strict=True)
        present = [(g, parameter.replicas) for g, parameter in pairs if g is not None and g.numel()]
        device = self.parameters[0].value.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        if present:
            norms = torch.stack(torch._foreach_norm([g for g, _ in present])).double()
            total += (norms**2 / torch.tensor([c for _, c in present], dtype=torch.float64, device=device)).sum()
        return float(self._reduce(total).sqrt())
