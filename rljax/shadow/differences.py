"""Differences between two learners on one batch, and the bounds of two right ones."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from rljax.batching.batch import Batch
from rljax.metrics.mean import Mean
from rljax.objective.spec import PREFIX


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Differences allowed between two right implementations."""

    logp: float  # nats (reward units for values), largest absolute difference
    loss: float  # relative
    gradient: float  # norm of the difference over the norm


FLOAT32 = Bounds(1e-3, 1e-4, 1e-3)
# In a lower precision what rounding does depends on the model and the batch by orders of magnitude, so it is measured: an
# implementation may be FACTOR times as far from a computation in float32 (the certificate: float64) as a right one is. Two
# right ones round about as often, but not in the same places: between them are sums in other orders, softmax and rotary angles
# in one precision or another, and the luck of a few hundred tokens.
FACTOR = 4.0


@dataclasses.dataclass(frozen=True)
class Computed:
    """Results of one learner on one batch."""

    logp: np.ndarray  # [R, T] float32, nats, before the update
    loss: float  # NaN if the update was skipped, as is grad_norm
    grad_norm: float

    @classmethod
    def of(cls, logp: np.ndarray, means: dict[str, Mean]) -> Computed:
        return cls(logp, means[f"{PREFIX}/loss"].value, means[f"{PREFIX}/grad_norm"].value)


def of_rounding(batch: Batch, dtype: str, right: Computed, rounded: Computed) -> Bounds:
    """Derives bounds from what rounding does to a batch.

    A loss may be right by chance, so its bound comes from the errors of the log-probs that it is
    made of: to first order it is at most the product of their norm and that of its slopes. A
    norm, or the few log-probs of a small batch, may be right by chance too: no bound is below
    FACTOR times the dtype's eps.

    Args:
      right, rounded: results of one implementation in float32 and in `dtype`.
    """
    errors = np.where(batch.loss_mask, rounded.logp - right.logp, 0.0)
    slopes = batch.loss_weight * batch.advantage if _terms(batch) else batch.loss_weight
    loss = float(np.linalg.norm(slopes) * np.linalg.norm(errors)) / _scale(batch, right)
    norm = _difference(rounded.grad_norm, right.grad_norm) / _size(right.grad_norm)
    eps = float(ml_dtypes.finfo(dtype).eps)
    return Bounds(*(FACTOR * max(eps, error) for error in (float(np.abs(errors).max(initial=0.0)), loss, norm)))


def compare(batch: Batch, dtype: str, ours: Computed, theirs: Computed, right: Computed | None = None) -> dict[str, Mean]:
    """Compares the run's learner with its shadow. Returns metrics under parity/.

    The loss is compared on the scale of its terms, for on the current policy's own samples they
    cancel; without advantages, as in supervised steps, on its own scale. What is not finite on one
    side alone is infinitely far from the other.

    Args:
      dtype: that both compute in.
      right: the shadow's results in float32, which ours are compared with; None if dtype is that.
    """
    bounds = FLOAT32 if right is None else of_rounding(batch, dtype, right, theirs)
    right = theirs if right is None else right
    differences = {
        "logp_error": float(np.abs(ours.logp - right.logp)[batch.loss_mask].max(initial=0.0)),
        "loss_error": _difference(ours.loss, right.loss) / _scale(batch, right),
        "grad_norm_error": _difference(ours.grad_norm, right.grad_norm) / _size(right.grad_norm),
    }
    differences = {name: value if np.isfinite(value) else np.inf for name, value in differences.items()}
    allowed = (bounds.logp, bounds.loss, bounds.gradient)
    # a bound is not finite where the dtype can't hold what float32 holds: nothing is expected of it then
    shares = [value / bound for value, bound in zip(differences.values(), allowed, strict=True) if np.isfinite(bound)]
    excess = max(shares, default=0.0)
    return {f"parity/{name}": Mean(value, 1) for name, value in (differences | {"excess": excess}).items()}


def _terms(batch: Batch) -> float:
    """Returns the sum of the sizes of the loss's terms; 0 without advantages."""
    return float(np.abs(batch.loss_weight * batch.advantage).sum())


def _scale(batch: Batch, right: Computed) -> float:
    return _terms(batch) or _size(right.loss)


def _difference(a: float, b: float) -> float:
    """Returns |a - b|; 0 if neither is finite, because both skipped the update."""
    return abs(a - b) if np.isfinite(a) or np.isfinite(b) else 0.0


def _size(value: float) -> float:
    return abs(value) if value and np.isfinite(value) else 1.0
