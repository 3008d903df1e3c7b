"""Differences from the oracle that experiments.parity allows an engine.

In float32 they are constants. In bfloat16 what rounding does depends on the model and the batch by
orders of magnitude, so it is measured: transformers' model computes the same in bfloat16, and an
engine may be FACTOR times as far from float64 as that is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from rljax.experiments.certificate.case import Case, Result, Tensors, Update
from rljax.shadow.differences import FACTOR, FLOAT32

SIGMAS = 4.0
# A first step of Adam is the gradient's sign: an entry near 0 may round to either sign, and its step then differs in full.
FLOAT32_STEP = 0.1  # norm of the difference over the norm


@dataclasses.dataclass(frozen=True)
class UpdateBounds:
    """Bounds of one optimizer step of the policy or the critic; all are relative."""

    loss: float
    norm: float  # of the gradient
    gradients: Mapping[str, float]  # by tensor


@dataclasses.dataclass(frozen=True)
class ResultBounds:
    """Bounds of a learner's results: largest differences of log-probs and entropies in nats."""

    logp: float
    policy: UpdateBounds
    steps: Mapping[str, float]  # of the policy's tensors, between the two learners; relative
    reference: float
    values: float  # reward units
    critic: UpdateBounds | None


def of_float32(right: Result) -> ResultBounds:
    """Returns the constants, for a case with these results."""
    bounds = FLOAT32

    def update(of: Update) -> UpdateBounds:
        return UpdateBounds(bounds.loss, bounds.gradient, dict.fromkeys(of.gradients, bounds.gradient))

    return ResultBounds(
        logp=bounds.logp,
        policy=update(right.policy),
        steps=dict.fromkeys(right.policy.gradients, FLOAT32_STEP),
        reference=bounds.logp,
        values=bounds.logp,
        critic=None if right.critic is None else update(right.critic),
    )


def of_rounding(case: Case, right: Result, rounded: Result) -> ResultBounds:
    """Derives bounds from what rounding does to the results.

    Args:
      rounded: results of transformers' model in the dtype of the case.
    """
    critic = None
    if right.critic is not None and rounded.critic is not None:
        critic = _of_update(right.critic, rounded.critic, _error(right.values, rounded.values))
    return ResultBounds(
        logp=largest_error(right.logp, rounded.logp),
        policy=_of_update(right.policy, rounded.policy, _error(right.logp, rounded.logp)),
        steps=_of_steps(right.policy.gradients, rounded.policy.gradients, case.config.actor.optimizer.eps),
        reference=largest_error(right.reference, rounded.reference),
        values=largest_error(right.values, rounded.values),
        critic=critic,
    )


def largest_error(right: np.ndarray | None, rounded: np.ndarray | None) -> float:
    """Returns FACTOR times the largest difference; 0 where the config has no such part."""
    return FACTOR * float(np.abs(_error(right, rounded)).max(initial=0.0))


def _error(right: np.ndarray | None, rounded: np.ndarray | None) -> np.ndarray:
    return np.zeros(0) if right is None or rounded is None else rounded - right


def _of_update(right: Update, rounded: Update, error: np.ndarray) -> UpdateBounds:
    """Derives bounds of a step.

    A loss may be right by chance, so its bound comes from the errors of the log-probs (or values)
    that it is made of: to first order it is at most the product of their norm and that of its
    slopes. A norm is at most as wrong as the gradient. A tensor of few entries may be lucky, too:
    none is held to more than the whole gradient.
    """
    loss = right.slope * float(np.linalg.norm(error)) / (abs(float(right.loss)) or 1.0)
    whole, errors = _relative_errors(right.gradients, rounded.gradients)
    return UpdateBounds(FACTOR * loss, FACTOR * whole, {name: FACTOR * max(error, whole) for name, error in errors.items()})


def _of_steps(right: Tensors, rounded: Tensors, eps: float) -> dict[str, float]:
    """Derives bounds between the first Adam steps of two learners.

    An entry whose sign is wrong is wrong by 2. How many are grows as the error of the gradient
    does, in each of the two learners, and in a tensor of few entries it is a small number, drawn by
    chance: SIGMAS standard deviations of it are allowed.
    """
    signs = [{name: g / (np.abs(g) + eps) for name, g in gradients.items()} for gradients in (right, rounded)]
    whole, errors = _relative_errors(*signs)
    bounds = {}
    for name, error in errors.items():
        wrong = 2 * FACTOR * right[name].size * max(error, whole) ** 2 / 4
        bounds[name] = 2 * float(np.sqrt((wrong + SIGMAS * np.sqrt(wrong) + SIGMAS) / right[name].size))
    return bounds


def _relative_errors(right: Tensors, rounded: Tensors) -> tuple[float, dict[str, float]]:
    """Returns the norm of the difference over the norm: of all tensors together, and of each."""
    errors = {name: float(np.linalg.norm(rounded[name] - array)) for name, array in right.items()}
    norms = {name: float(np.linalg.norm(array)) for name, array in right.items()}
    whole = float(np.linalg.norm(list(errors.values()))) / (float(np.linalg.norm(list(norms.values()))) or 1.0)
    return whole, {name: error / (norms[name] or 1.0) for name, error in errors.items()}
