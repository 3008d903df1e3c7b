"""The learner's checkpoint as a tree of this rank's shards, and its conversion to HF names.

{"policy": {name: shard}, "supervised": phase,
 "rl": {"actor": phase, "critic": {"params", *phase}, "reference"}}
phase = {"mu", "nu": {name: shard}, "count"}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rljax.backends.torch.checkpoint import shard_of
from rljax.backends.torch.export import to_numpy
from rljax.backends.torch.mesh import like, local_slices
from rljax.checkpoints.portable import COUNTS
from rljax.engines.common.parts import COUNTED, PARTS, counts_of, parts_of
from rljax.engines.cuda.learning.policy import Policy
from rljax.errors import UserError

Tree = dict[str, Any]


def to_dtensors(tree: Tree, policy: Policy) -> dict[str, Tensor]:
    """Flattens a tree to tensors by path.

    Shards of parameters become DTensors; other tensors are the same on every rank and stay as they
    are.
    """
    found: dict[str, Tensor] = {}
    for path, tensor in _flat(tree).items():
        parameter = policy.trained.get(path.rsplit("/", 1)[-1])
        found[path] = tensor if parameter is None else like(parameter, tensor)
    return found


def bytes_of(tree: Tree, policy: Policy) -> int:
    """Returns the bytes of what `to_dtensors` makes of a tree, all ranks' shards together."""
    whole = {path: policy.trained.get(path.rsplit("/", 1)[-1], tensor) for path, tensor in _flat(tree).items()}
    return sum(whole[path].numel() * tensor.element_size() for path, tensor in _flat(tree).items())


def shards(tensors: Mapping[str, Tensor]) -> Tree:
    """Rebuilds the tree of shards; the inverse of `to_dtensors`."""
    return _nested({path: shard_of(tensor) for path, tensor in tensors.items()})


def to_named(tree: Tree, policy: Policy) -> dict[str, dict[str, np.ndarray]]:
    """Gathers whole arrays by part of `PARTS` and HF name. One collective per tensor."""
    flat = _flat(tree)
    found: dict[str, dict[str, np.ndarray]] = {}
    for part, prefix in PARTS.items():
        inside = {path.rsplit("/", 1)[-1]: tensor for path, tensor in flat.items() if path.rsplit("/", 1)[0] == prefix}
        if inside:
            found[part] = {name: _whole(name, tensor, policy) for name, tensor in inside.items()}
    found[COUNTS] = {name: np.int64(flat[path]) for name, path in COUNTED.items() if path in flat}  # type: ignore[misc]
    return found


def _whole(name: str, tensor: Tensor, policy: Policy) -> np.ndarray:
    """Gathers one array and copies it.

    Without the copy, a shard that one rank holds alone would be changed by the next update.
    """
    parameter = policy.trained.get(name)
    return to_numpy(tensor.float() if parameter is None else like(parameter, tensor.float()).full_tensor()).copy()


def from_named(named: Mapping[str, Mapping[str, np.ndarray]], tree: Tree, policy: Policy, updates: int) -> Tree:
    """Fills the parts of `tree` with shards of named arrays; parts that `named` lacks stay.

    Args:
      updates: optimizer steps of the policy if there are no counts.

    Raises:
      UserError: an array doesn't fit.
    """
    found = _flat(tree)
    inside = {part: [path for path in found if path.rpartition("/")[0] == prefix] for part, prefix in PARTS.items()}
    for part in parts_of(named, [part for part, paths in inside.items() if paths]):
        arrays = named[part]
        for path in inside[part]:
            found[path] = _shard(path.rpartition("/")[2], arrays, found[path], policy)
    for name, count in counts_of(named, updates).items():
        if COUNTED[name] in found:
            found[COUNTED[name]] = torch.tensor(count)
    return _nested(found)


def _shard(name: str, arrays: Mapping[str, np.ndarray], like_this: Tensor, policy: Policy) -> Tensor:
    parameter = policy.trained.get(name)
    if name not in arrays:
        raise UserError(f"checkpoint: no tensor {name} (is it of this model?)")
    array, shape = arrays[name], tuple(like_this.shape if parameter is None else parameter.shape)
    if array.shape != shape:
        raise UserError(f"checkpoint: {name} has shape {array.shape} for a parameter of {shape} (is it of this model?)")
    part = array if parameter is None else array[local_slices(parameter)]
    return torch.from_numpy(np.array(part, np.float32)).to(like_this)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Flattens nested dicts of tensors to {path: tensor}. Parameter names have dots, never slashes."""
    found: dict[str, Tensor] = {}
    for name, node in tree.items():
        found |= _flat(node, f"{prefix}{name}/") if isinstance(node, dict) else {f"{prefix}{name}": node}
    return found


def _nested(tensors: dict[str, Tensor]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, tensor in tensors.items():
        node = tree
        *parents, name = path.split("/")
        for key in parents:
            node = node.setdefault(key, {})
        node[name] = tensor
    return tree
