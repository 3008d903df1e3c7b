"""The torch learner's optimizer alone, for experiments.parity."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rljax.backends.torch.optim import Optimizer, TrainedParameter
from rljax.experiments.certificate.case import Case
from rljax.experiments.certificate.oracle import load


def two_steps(case: Case) -> dict[str, np.ndarray]:
    """Returns the change of each tensor in two optimizer steps in float64.

    The gradients are those of `Case.gradient`.
    """
    model = load(case)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gradients = {name: torch.from_numpy(case.gradient(name, tuple(p.shape))) for name, p in parameters.items()}
    return _optimized(case, parameters, gradients, case.factors)


def _optimized(
    case: Case, parameters: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor], factors: Sequence[float]
) -> dict[str, np.ndarray]:
    """Returns the change of master weights in steps of the learner's optimizer.

    The gradient is multiplied by each factor in turn.
    """
    values = {name: parameter.clone() for name, parameter in parameters.items()}
    factor = 1.0

    def trained(name: str) -> TrainedParameter:
        return TrainedParameter(name, values[name], lambda: gradients[name] * factor if name in gradients else None)

    settings = case.optimizer
    optimizer = Optimizer(
        settings, case.total_steps, "actor.optimizer", [trained(name) for name in values], lambda total: total
    )
    for factor in factors:  # noqa: B007 (read by the parameters)
        optimizer.step()
    return {name: (values[name] - parameters[name]).numpy() for name in gradients}
