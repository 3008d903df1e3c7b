"""Differences between two learners on one batch, and the bounds of two right ones."""

from __future__ import annotations

import dataclasses

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


# In bfloat16 every layer rounds in its own order: each path alone is about 2% from the float32 gradient of a four-layer model.
BOUNDS = {"float32": Bounds(1e-3, 1e-4, 1e-3), "bfloat16": Bounds(0.25, 0.05, 0.1)}


@dataclasses.dataclass(frozen=True)
class Computed:
    """Results of one learner on one batch."""

    logp: np.ndarray  # [R, T] float32, nats, before the update
    loss: float  # NaN if the update was skipped, as is grad_norm
    grad_norm: float

    @classmethod
    def of(cls, logp: np.ndarray, means: dict[str, Mean]) -> Computed:
        return cls(logp, means[f"{PREFIX}/loss"].value, means[f"{PREFIX}/grad_norm"].value)


def compare(batch: Batch, dtype: str, ours: Computed, theirs: Computed) -> dict[str, Mean]:
    """Compares the run's learner with its shadow. Returns metrics under parity/.

    The loss is compared on the scale of its terms, for on the current policy's own samples they
    cancel; without advantages, as in supervised steps, on its own scale. What is not finite on one
    side alone is infinitely far from the other.
    """
    scale = float(np.abs(batch.loss_weight * batch.advantage).sum()) or _size(theirs.loss)
    differences = {
        "logp_error": float(np.abs(ours.logp - theirs.logp)[batch.loss_mask].max(initial=0.0)),
        "loss_error": _difference(ours.loss, theirs.loss) / scale,
        "grad_norm_error": _difference(ours.grad_norm, theirs.grad_norm) / _size(theirs.grad_norm),
    }
    differences = {name: value if np.isfinite(value) else np.inf for name, value in differences.items()}
    bounds = BOUNDS[dtype]
    excess = max(
        differences["logp_error"] / bounds.logp,
        differences["loss_error"] / bounds.loss,
        differences["grad_norm_error"] / bounds.gradient,
    )
    return {f"parity/{name}": Mean(value, 1) for name, value in (differences | {"excess": excess}).items()}


def _difference(a: float, b: float) -> float:
    """Returns |a - b|; 0 if neither is finite, because both skipped the update."""
    return abs(a - b) if np.isfinite(a) or np.isfinite(b) else 0.0


def _size(value: float) -> float:
    return abs(value) if value and np.isfinite(value) else 1.0
