"""A learner's state as a tree of arrays on its mesh: for checkpoints, and by HF names to move
between engines.

    {"policy": tree, "supervised": phase,
     "rl": {"actor": phase, "critic": {"params", *phase}, "reference": tree}}

where phase is {"mu": tree, "nu": tree, "count"}; the critic's trees are {"model", "value_head"}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rljax.backends.jax import checkpoint
from rljax.backends.jax.parameters import Parameter, adapters, parameters
from rljax.backends.jax.portable import from_hf, placed, tensor, to_hf
from rljax.checkpoints.integrity import read_meta, verify
from rljax.checkpoints.portable import COUNTS, VALUE_HEAD
from rljax.engine import PortableState
from rljax.engines.common.parts import COUNTED, PARTS, counts_of, parts_of, stored_state
from rljax.hf.spec import ModelSpec

Tree = Any  # nested dicts of arrays
Table = Sequence[Parameter]


def table_of(spec: ModelSpec, lora: Mapping[str, Any] | None) -> Table:
    """Lists what is trained: all parameters, or the factors of adapters {"rank", "target_modules"}."""
    return adapters(spec, lora["rank"], lora["target_modules"]) if lora else parameters(spec)


def to_named(tree: Tree, table: Table) -> dict[str, dict[str, np.ndarray]]:
    """The parts of `rljax.checkpoints.portable` that the tree has, on the host."""
    found = {part: _named(subtree, table) for part, path in PARTS.items() if (subtree := _at(tree, path)) is not None}
    counts = {name: np.asarray(count, np.int64) for name, path in COUNTED.items() if (count := _at(tree, path)) is not None}
    return {**found, COUNTS: counts}


def from_named(state: PortableState, tree: Tree, table: Table, updates: int) -> Tree:
    """Returns the tree with what the state has in its parts, and its own elsewhere.

    Args:
      updates: the policy's optimizer steps where there are no counts.

    Raises:
      UserError: something doesn't fit.
    """
    found = _copied(tree)
    for part in parts_of(state, [part for part, path in PARTS.items() if _at(tree, path) is not None]):
        _put(found, PARTS[part], _unnamed(state[part], table, _at(tree, PARTS[part])))
    for name, count in counts_of(state, updates).items():
        if _at(tree, COUNTED[name]) is not None:
            _put(found, COUNTED[name], np.int32(count))
    return found


def read(directory: Path) -> PortableState:
    """The checkpoint of a JAX learner. Raises UserError where a file is missing or changed."""
    verify(directory)
    meta = read_meta(directory)
    table = table_of(ModelSpec.from_config(meta["model"], f"{directory}: model"), meta["lora"])

    def read_at(path: str) -> Tree:
        return checkpoint.read_host(directory, path.split("/"))

    return stored_state(checkpoint.stored_paths(directory), lambda path: _named(read_at(path), table), read_at)


def _named(tree: Tree, table: Table) -> dict[str, np.ndarray]:
    if VALUE_HEAD in tree:
        return {**to_hf(tree["model"], table), VALUE_HEAD: np.asarray(jax.device_get(tree[VALUE_HEAD]))}
    return to_hf(tree, table)


def _unnamed(arrays: Mapping[str, np.ndarray], table: Table, like: Tree) -> Tree:
    if VALUE_HEAD in like:
        head = like[VALUE_HEAD]
        whole = placed(tensor(arrays, VALUE_HEAD, head.shape), head)
        return {"model": from_hf(arrays, table, like["model"]), VALUE_HEAD: whole}
    return from_hf(arrays, table, like)


def _at(tree: Tree, path: str) -> Tree | None:
    for key in path.split("/"):
        if key not in tree:
            return None
        tree = tree[key]
    return tree


def _put(tree: Tree, path: str, part: Tree) -> None:
    *parents, name = path.split("/")
    for key in parents:
        tree = tree[key]
    tree[name] = part


def _copied(tree: Tree) -> Tree:
    """Other dicts, the same arrays."""
    return {key: _copied(node) for key, node in tree.items()} if isinstance(tree, dict) else tree
