"""What the learner keeps over time, as a tree of arrays on its mesh: for checkpoints, and by HF names to move between engines.

{"policy": tree, "supervised": phase, "rl": {"actor": phase, "critic": {"params", *phase}, "reference": tree}}
phase = {"mu": tree, "nu": tree, "count"}; trees of the critic are {"model": tree, "value_head"}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rljax.backends.jax import checkpoint
from rljax.backends.jax.parameters import Parameter, adapters, parameters
from rljax.backends.jax.portable import from_hf, placed, tensor, to_hf
from rljax.checkpoints.integrity import read_meta, verify
from rljax.checkpoints.portable import COUNTS, VALUE_HEAD, LazyState
from rljax.engine import State
from rljax.engines.jax.critic import Critic
from rljax.engines.jax.phase import Phase
from rljax.errors import UserError
from rljax.hf.spec import ModelSpec

Tree = Any  # nested dicts of arrays
Table = Sequence[Parameter]

PARTS = {  # of rljax/checkpoints/portable.py -> of the tree
    "params": ("policy",),
    "mu": ("rl", "actor", "mu"),
    "nu": ("rl", "actor", "nu"),
    "supervised/mu": ("supervised", "mu"),
    "supervised/nu": ("supervised", "nu"),
    "critic/params": ("rl", "critic", "params"),
    "critic/mu": ("rl", "critic", "mu"),
    "critic/nu": ("rl", "critic", "nu"),
    "reference": ("rl", "reference"),
}
COUNTED = {
    "actor": ("rl", "actor", "count"),
    "critic": ("rl", "critic", "count"),
    "supervised": ("supervised", "count"),
}
NEEDED = ("params", "mu", "nu", "supervised/mu", "supervised/nu")  # where the tree has them


@dataclasses.dataclass
class Reinforcement:
    """What exists from the moment that RL begins."""

    actor: Phase
    critic: Critic | None
    reference: Tree | None  # like the policy's, in the compute dtype

    def saved(self, *, with_reference: bool) -> Tree:
        tree: dict[str, Tree] = {"actor": self.actor.saved()}
        if self.critic is not None:
            tree["critic"] = self.critic.saved()
        if self.reference is not None and with_reference:
            tree["reference"] = self.reference
        return tree

    def load(self, saved: Tree) -> None:
        self.actor.load(saved["actor"])
        if self.critic is not None:
            self.critic.load(saved["critic"])
        if "reference" in saved:
            self.reference = saved["reference"]


def table_of(spec: ModelSpec, lora: Mapping[str, Any] | None) -> Table:
    """What is trained: every parameter, or the factors of adapters {"rank", "target_modules"}."""
    return adapters(spec, lora["rank"], lora["target_modules"]) if lora else parameters(spec)


def to_named(tree: Tree, table: Table) -> dict[str, dict[str, np.ndarray]]:
    """The parts of `rljax.checkpoints.portable` that the tree has, on the host."""
    found = {part: _named(subtree, table) for part, path in PARTS.items() if (subtree := _at(tree, path)) is not None}
    counts = {name: np.asarray(count, np.int64) for name, path in COUNTED.items() if (count := _at(tree, path)) is not None}
    return {**found, COUNTS: counts}


def from_named(state: State, tree: Tree, table: Table, updates: int) -> Tree:
    """The tree with what the state has in its parts, and its own elsewhere. Raises UserError where something doesn't fit.

    updates: the policy's optimizer steps where there are no counts.
    """
    found = _copied(tree)
    for part, path in PARTS.items():
        own = _at(tree, path)
        if own is None:
            continue
        if part in state:
            _put(found, path, _unnamed(state[part], table, own))
        elif part in NEEDED:
            raise UserError(f"checkpoint: nothing of {part} in the state of another engine (is it of this config?)")
    counts: dict[str, Any] = {"actor": updates}
    if COUNTS in state:
        counts |= state[COUNTS]
    for name, path in COUNTED.items():
        if name in counts and _at(tree, path) is not None:
            _put(found, path, np.int32(counts[name]))
    return found


def read(directory: Path) -> State:
    """The checkpoint of a JAX learner. Raises UserError where a file is missing or changed."""
    verify(directory)
    meta, there = read_meta(directory), checkpoint.stored_paths(directory)
    table = table_of(ModelSpec.from_config(meta["model"], f"{directory}: model"), meta["lora"])
    counted = {name: path for name, path in COUNTED.items() if "/".join(path) in there}
    parts = [part for part, path in PARTS.items() if any(name.startswith("/".join(path) + "/") for name in there)]

    def of_part(part: str) -> Mapping[str, np.ndarray]:
        if part == COUNTS:
            return {name: np.asarray(checkpoint.read_host(directory, path), np.int64) for name, path in counted.items()}
        return _named(checkpoint.read_host(directory, PARTS[part]), table)

    return LazyState([*parts, COUNTS], of_part)


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


def _at(tree: Tree, path: Sequence[str]) -> Tree | None:
    for key in path:
        if key not in tree:
            return None
        tree = tree[key]
    return tree


def _put(tree: Tree, path: Sequence[str], part: Tree) -> None:
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = part


def _copied(tree: Tree) -> Tree:
    """Other dicts, the same arrays."""
    return {key: _copied(node) for key, node in tree.items()} if isinstance(tree, dict) else tree
