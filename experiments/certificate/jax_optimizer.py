"""The JAX learner's optimizer alone, for experiments.parity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rljax.backends.jax import hf
from rljax.backends.jax.optim import Optimizer
from rljax.backends.jax.parameters import Parameter, leaf_at, nested, parameters
from rljax.experiments.certificate.case import Case
from rljax.hf.spec import ModelSpec


def two_steps(case: Case) -> dict[str, np.ndarray]:
    """Returns the change of each tensor in two optimizer steps in float64.

    The gradients are those of `Case.gradient`.
    """
    with jax.enable_x64(True):
        spec = ModelSpec.from_directory(case.model_dir)
        _, params = hf.load(case.model_dir, param_dtype=np.float64)
        grads = nested({p.path: _drawn(case, p, spec.num_layers) for p in parameters(spec)})
        return _by_tensor(_optimized(case, params, grads, case.factors, np.dtype(np.float64)), spec, np.dtype(np.float64))


def _drawn(case: Case, parameter: Parameter, layers: int) -> np.ndarray:
    """Draws `case.gradient` for each tensor of a parameter, in the shape of the parameter."""
    shape = parameter.shape[1:] if parameter.stacked else parameter.shape
    pieces = []
    for layer in range(layers) if parameter.stacked else (0,):
        piece = case.gradient(parameter.tensor_of(layer), shape[::-1] if parameter.transposed else shape)
        pieces.append(piece.T if parameter.transposed else piece)
    return np.stack(pieces) if parameter.stacked else pieces[0]


def _optimized(case: Case, params: Any, grads: Any, factors: Sequence[float], dtype: np.dtype) -> Any:
    """Returns the change of master weights in steps of the learner's optimizer.

    The gradient is multiplied by each factor in turn.
    """
    optimizer = Optimizer(case.optimizer, case.total_steps, "actor.optimizer")
    before = jax.tree.map(lambda p: jnp.asarray(p, dtype), params)

    @jax.jit
    def step(params: Any, state: Any, grads: Any, factor: Array) -> tuple[Any, Any]:
        grads = jax.tree.map(lambda g: jnp.asarray(g, dtype) * jnp.asarray(factor, dtype), grads)
        return optimizer.apply(params, state, grads)[:2]

    after, state = before, optimizer.init(before)
    for factor in factors:
        after, state = step(after, state, grads, jnp.asarray(factor))
    return jax.tree.map(jnp.subtract, after, before)


def _by_tensor(tree: Any, spec: ModelSpec, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Returns tensors by Hugging Face name, in its shapes."""
    tensors = {}
    for parameter in parameters(spec):
        array = np.asarray(leaf_at(tree, parameter.path)).astype(dtype)
        for layer in range(spec.num_layers) if parameter.stacked else (0,):
            piece = array[layer] if parameter.stacked else array
            tensors[parameter.tensor_of(layer)] = piece.T if parameter.transposed else piece
    return tensors
