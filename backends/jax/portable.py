"""Parameters and optimizer moments under the names that HF files use, so that a run can move
between engines.

Moments are trees like the parameters, so one mapping serves all three: every stacked array is cut
into its layers, and kernels are turned round as HF keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rljax.backends.jax.multihost import fetch, put
from rljax.backends.jax.parameters import Parameter, leaf_at, nested
from rljax.errors import UserError

Tree = dict[str, Any]


def to_hf(tree: Tree, table: Sequence[Parameter]) -> dict[str, np.ndarray]:
    """A tree of the parameters in the table -> {HF tensor name: array on the host}, in the dtype
    it has.

    Example: to_hf(params, parameters(spec))["model.layers.3.mlp.up_proj.weight"].shape ==
    (intermediate_size, hidden_size)
    """
    found: dict[str, np.ndarray] = {}
    for parameter in table:
        leaf = leaf_at(tree, parameter.path)
        array = leaf if isinstance(leaf, np.ndarray) else fetch(leaf)
        for layer, piece in enumerate(array if parameter.stacked else [array]):
            found[parameter.tensor_of(layer)] = np.ascontiguousarray(piece.T if parameter.transposed else piece)
    return found


def from_hf(tensors: Mapping[str, np.ndarray], table: Sequence[Parameter], like: Tree) -> Tree:
    """The inverse: arrays in the dtypes and shardings of `like`, one at a time.

    Raises UserError on a tensor that is missing or has another shape.
    """
    return nested({p.path: placed(_gathered(tensors, p), leaf_at(like, p.path)) for p in table})


def _gathered(tensors: Mapping[str, np.ndarray], parameter: Parameter) -> np.ndarray:
    shape = parameter.shape[1:] if parameter.stacked else parameter.shape
    pieces = []
    for layer in range(parameter.shape[0] if parameter.stacked else 1):
        piece = tensor(tensors, parameter.tensor_of(layer), shape[::-1] if parameter.transposed else shape)
        pieces.append(piece.T if parameter.transposed else piece)
    return np.stack(pieces) if parameter.stacked else pieces[0]


def tensor(tensors: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The array of that name. Raises UserError where there is none, or it has another shape."""
    if name not in tensors:
        raise UserError(f"checkpoint: no tensor {name} (is it of this model?)")
    if tensors[name].shape != shape:
        raise UserError(f"checkpoint: {name} has shape {tensors[name].shape} for a parameter of {shape} (is it of this model?)")
    return tensors[name]


def placed(array: np.ndarray, like: jax.Array) -> jax.Array:
    """Puts an array on the devices with the sharding and dtype of `like`.

    Of several processes, which all have the array, each gives its own part.
    """
    return put(array.astype(like.dtype), like.sharding)
