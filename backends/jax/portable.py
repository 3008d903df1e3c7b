"""Parameters and optimizer moments under the names that HF files use, so that a run can move between engines.

Moments are trees like the parameters, so one mapping serves all three: every stacked array is cut into its layers, and
kernels are turned round as HF keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from rljax.backends.jax.hosts import fetch, put
from rljax.backends.jax.parameters import Parameter, leaf_at, nested, parameters
from rljax.errors import UserError
from rljax.hf.spec import ModelSpec

Tree = dict[str, Any]


def to_hf(tree: Tree, spec: ModelSpec) -> dict[str, np.ndarray]:
    """A tree like the parameters -> {HF tensor name: array on the host}, in the dtype it has.

    Example: to_hf(params, spec)["model.layers.3.mlp.up_proj.weight"].shape == (intermediate_size, hidden_size)
    """
    found: dict[str, np.ndarray] = {}
    for parameter in parameters(spec):
        array = fetch(leaf_at(tree, parameter.path))
        for layer, piece in enumerate(array if parameter.stacked else [array]):
            found[parameter.tensor_of(layer)] = np.ascontiguousarray(piece.T if parameter.transposed else piece)
    return found


def from_hf(tensors: Mapping[str, np.ndarray], spec: ModelSpec, like: Tree) -> Tree:
    """The inverse: arrays in the dtypes and shardings of `like`.

    Raises UserError on a tensor that is missing or has another shape.
    """
    return nested({p.path: _place(_gathered(tensors, p, spec), leaf_at(like, p.path)) for p in parameters(spec)})


def _gathered(tensors: Mapping[str, np.ndarray], parameter: Parameter, spec: ModelSpec) -> np.ndarray:
    shape = parameter.shape[1:] if parameter.stacked else parameter.shape
    pieces = []
    for layer in range(spec.num_layers if parameter.stacked else 1):
        name = parameter.tensor_of(layer)
        if name not in tensors:
            raise UserError(f"checkpoint: no tensor {name} (is it of this model?)")
        piece = tensors[name].T if parameter.transposed else tensors[name]
        if piece.shape != shape:
            raise UserError(
                f"checkpoint: {name} has shape {tensors[name].shape} for a parameter of {shape} (is it of this model?)"
            )
        pieces.append(piece)
    return np.stack(pieces) if parameter.stacked else pieces[0]


def _place(array: np.ndarray, like: jax.Array) -> jax.Array:
    return put(array.astype(like.dtype), like.sharding)
